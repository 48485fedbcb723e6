#include "../launch.cuh"

namespace late_interaction {

template struct BackwardLauncher<double>;

}  // namespace late_interaction
