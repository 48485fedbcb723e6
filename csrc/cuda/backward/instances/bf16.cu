#include "../launch.cuh"

template struct late_interaction::BackwardLauncher<__nv_bfloat16>;
