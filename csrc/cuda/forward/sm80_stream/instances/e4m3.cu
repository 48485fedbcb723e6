#include "../launch.cuh"

LATE_INTERACTION_FORWARD(sm80_stream, e4m3)
