#include "../../forward/sm80/launch.cuh"

LATE_INTERACTION_FORWARD_PAIRS(sm80, fp16)
