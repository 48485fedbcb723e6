#include "../launch.cuh"

namespace late_interaction {

template struct BackwardLauncher<__nv_bfloat16>;

}  // namespace late_interaction
