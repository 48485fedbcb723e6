#include "../../forward/sm90_d/launch.cuh"

LATE_INTERACTION_FORWARD_PAIRS(sm90_d, bf16)
