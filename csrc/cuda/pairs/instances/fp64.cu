#include "../../forward/fp64/launch.cuh"

LATE_INTERACTION_FORWARD_PAIRS(fp64, fp64)
