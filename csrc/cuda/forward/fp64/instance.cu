#include "launch.cuh"

LATE_INTERACTION_FORWARD(fp64, fp64)
