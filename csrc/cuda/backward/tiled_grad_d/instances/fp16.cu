#include "../launch.cuh"

template struct late_interaction::TiledGradDLauncher<__half>;
