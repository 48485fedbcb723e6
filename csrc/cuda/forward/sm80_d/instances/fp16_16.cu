#include "../launch.cuh"

LATE_INTERACTION_FORWARD_STEPS(sm80_d, fp16, 16)
