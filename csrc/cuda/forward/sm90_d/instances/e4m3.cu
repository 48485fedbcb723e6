#include "../launch.cuh"

LATE_INTERACTION_FORWARD(sm90_d, e4m3)
