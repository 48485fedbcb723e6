#include "../launch.cuh"
#include "../launch_short_docs.cuh"

LATE_INTERACTION_FORWARD(sm80, bf16)
LATE_INTERACTION_FORWARD(sm80_short_docs, bf16)
