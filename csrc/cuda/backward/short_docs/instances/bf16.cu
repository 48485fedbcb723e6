#include "../launch.cuh"

template struct late_interaction::ShortDocsLauncher<__nv_bfloat16>;
