#include "../launch.cuh"

LATE_INTERACTION_FORWARD_STEPS(sm80_q, bf16, 8)
