#include "../launch.cuh"

LATE_INTERACTION_FORWARD(sm80_stream, e5m2)
