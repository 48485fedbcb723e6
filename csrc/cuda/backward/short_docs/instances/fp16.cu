#include "../launch.cuh"

template struct late_interaction::ShortDocsLauncher<__half>;
