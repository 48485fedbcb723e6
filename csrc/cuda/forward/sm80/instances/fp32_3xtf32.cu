#include "../launch.cuh"

LATE_INTERACTION_FORWARD(sm80, tf32x3)
