// The CUDA side of XTR's operators: parse, launch. Nothing here waits for the device.
#include <cuda_runtime.h>

#include "../../common/registration.h"
#include "../../common/xtr_tensors.h"
#include "../runtime/op_helpers.h"
#include "launch.h"

namespace late_interaction {

namespace {

void select(const XtrSelection& call, const Tensor& similarities) {
  if (call.rows == 0) return;
  const OnDevice on(similarities);
  check(launch_xtr_select(call, on.stream()), "XTR selection");
}

void xtr_select_(Tensor similarities, OptionalTensor d_mask, int64_t Ld, int64_t k, bool zero_unless_all,
                 Tensor maxima, Tensor winners) {
  select(parse_xtr_selection(similarities, d_mask, Ld, k, zero_unless_all, maxima, winners), similarities);
}

void xtr_group_maxima_(Tensor Q, Tensor D, OptionalTensor d_mask, Tensor group_maxima) {
  const XtrGroupMaxima call = parse_xtr_group_maxima(Q, D, d_mask, group_maxima);
  if (call.rows == 0 || call.tokens == 0) return;
  const OnDevice on(Q);
  if (call.d > 64) require_sm80(on.properties(), "XTR in half precision of more than 64 dims");
  check(launch_xtr_group_maxima(call, on.properties(), on.stream()), "XTR's maxima of groups");
}

void xtr_select_in_groups_(Tensor group_maxima, Tensor Q, Tensor D, OptionalTensor d_mask, int64_t Ld,
                           int64_t k, bool zero_unless_all, Tensor maxima, Tensor winners) {
  select(parse_xtr_groups(group_maxima, Q, D, d_mask, Ld, k, zero_unless_all, maxima, winners), group_maxima);
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("xtr_select_", TORCH_BOX(&late_interaction::xtr_select_));
  m.impl("xtr_group_maxima_", TORCH_BOX(&late_interaction::xtr_group_maxima_));
  m.impl("xtr_select_in_groups_", TORCH_BOX(&late_interaction::xtr_select_in_groups_));
}
