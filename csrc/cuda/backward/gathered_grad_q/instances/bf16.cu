#include "../launch.cuh"

template struct late_interaction::GatheredGradQLauncher<__nv_bfloat16>;
