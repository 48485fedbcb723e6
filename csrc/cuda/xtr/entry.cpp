// The CUDA side of XTR's selection: parse, launch. Nothing here waits for the device.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "../../common/xtr_tensors.h"
#include "../runtime/check.h"
#include "../runtime/stream.h"
#include "launch.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;

void xtr_select_(Tensor similarities, std::optional<Tensor> d_mask, int64_t Ld, int64_t k,
                 bool zero_unless_all, Tensor maxima, Tensor winners) {
  const XtrSelection call =
      parse_xtr_selection(similarities, d_mask, Ld, k, zero_unless_all, maxima, winners);
  if (call.rows == 0) return;
  const int device = similarities.get_device_index();
  const DeviceGuard guard(device);
  check(launch_xtr_select(call, current_stream(device)), "XTR selection");
}

}  // namespace

}  // namespace late_interaction

STABLE_TORCH_LIBRARY_IMPL(late_interaction, CUDA, m) {
  m.impl("xtr_select_", TORCH_BOX(&late_interaction::xtr_select_));
}
