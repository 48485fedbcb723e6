#include "../launch.cuh"

LATE_INTERACTION_FORWARD(sm90_q_longd, int8)
