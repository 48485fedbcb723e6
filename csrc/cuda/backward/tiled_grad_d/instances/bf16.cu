#include "../launch.cuh"

template struct late_interaction::TiledGradDLauncher<__nv_bfloat16>;
