#include "../launch.cuh"

LATE_INTERACTION_FORWARD(sm90_d, fp16)
