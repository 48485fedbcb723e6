#include "../launch.cuh"

LATE_INTERACTION_FORWARD(sm80, fp32)
