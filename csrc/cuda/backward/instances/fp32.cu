#include "../launch.cuh"

namespace late_interaction {

template struct BackwardLauncher<float>;

}  // namespace late_interaction
