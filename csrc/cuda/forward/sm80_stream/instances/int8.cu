#include "../launch.cuh"

LATE_INTERACTION_FORWARD(sm80_stream, int8)
