#include "../launch.cuh"

template struct late_interaction::BackwardLauncher<float>;
