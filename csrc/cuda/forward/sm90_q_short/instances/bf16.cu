#include "../launch.cuh"

LATE_INTERACTION_FORWARD(sm90_q_short, bf16)
