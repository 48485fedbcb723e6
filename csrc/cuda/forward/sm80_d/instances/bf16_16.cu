#include "../launch.cuh"

LATE_INTERACTION_FORWARD_STEPS(sm80_d, bf16, 16)
