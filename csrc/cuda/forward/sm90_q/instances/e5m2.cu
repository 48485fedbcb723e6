#include "../launch.cuh"

LATE_INTERACTION_FORWARD(sm90_q, e5m2)
