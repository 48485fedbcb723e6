// Which of the library's machine codes the driver has loaded.
#pragma once

namespace late_interaction {

// The compute capability, 10 * major + minor, that this library's code on the current device was compiled
// for: __CUDA_ARCH__ / 10. It is less than the device's own where the library has no code for that one.
int loaded_code_capability();

}  // namespace late_interaction
