#include "../launch.cuh"

namespace late_interaction {

template struct BackwardLauncher<__half>;

}  // namespace late_interaction
