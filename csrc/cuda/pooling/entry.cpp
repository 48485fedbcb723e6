// The CUDA side of Ward's clustering: parse, plan, launch. Nothing here waits for the device.
#include <cuda_runtime.h>

#include "../../common/pooling_tensors.h"
#include "../../common/registration.h"
#include "../runtime/op_helpers.h"
#include "launch.h"

namespace late_interaction {

namespace {

void ward_cut_(Tensor similarities, Tensor cu_seqlens, Tensor clusters, int64_t longest, Tensor labels,
               Tensor found) {
  const WardCut call = parse_ward_cut(similarities, cu_seqlens, clusters, longest, labels, found);
  if (call.documents == 0 || longest == 0) return;
  const OnDevice on(similarities);
  WardLaunch launch;
  check(plan_ward_cut(call, longest, on.properties(), launch), "Ward clustering");
  const Tensor workspace = new_tensor(similarities, {launch.workspace_bytes}, ScalarType::Byte);
  check(launch_ward_cut(call, longest, launch, workspace.mutable_data_ptr(), on.stream()), "Ward clustering");
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) { m.impl("ward_cut_", TORCH_BOX(&late_interaction::ward_cut_)); }
