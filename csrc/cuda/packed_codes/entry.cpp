// The operators on packed codes on CUDA: parse, plan, launch. Nothing here waits for the device.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "../../common/packed_codes_tensors.h"
#include "../../common/registration.h"
#include "../runtime/check.h"
#include "../runtime/device.h"
#include "../runtime/stream.h"
#include "args.h"

namespace late_interaction {

namespace {

using OptionalTensor = std::optional<Tensor>;
using torch::stable::accelerator::DeviceGuard;

// Sums of products fit in 32 bits.
constexpr int64_t kMostDims = int64_t{1} << 19;

PackedCodesCall call_of(const Inputs& in) {
  PackedCodesCall call;
  call.sizes = in.sizes;
  call.Q = in.Q;
  call.D = in.D;
  call.q_mask = in.q_mask;
  call.d_mask = in.d_mask;
  return call;
}

Tensor score(PackedCodesCall& call, const Tensor& like) {
  STD_TORCH_CHECK(call.sizes.d <= kMostDims, "late_interaction: d must be at most ", kMostDims,
                  " on CUDA, got ", call.sizes.d);
  const int device = like.get_device_index();
  const DeviceGuard guard(device);
  const Tensor scores = new_tensor(like, {call.sizes.Nq, call.sizes.N}, ScalarType::Float);
  if (call.sizes.Nq == 0 || call.sizes.N == 0) return scores;
  call.scores = static_cast<float*>(scores.mutable_data_ptr());
  const int multiprocessors = device_properties(device).sm_count;
  if (takes_hamming(call)) {
    const HammingLaunch launch = plan_hamming(call, multiprocessors);
    const Tensor workspace = new_tensor(like, {launch.workspace_bytes}, ScalarType::Byte);
    check(launch_hamming(call, launch, workspace.mutable_data_ptr(), current_stream(device)), "packed codes");
    return scores;
  }
  const PackedCodesLaunch launch = plan_packed_codes(call, multiprocessors);
  const Tensor workspace = new_tensor(like, {launch.workspace_bytes}, ScalarType::Byte);
  check(launch_packed_codes(call, launch, workspace.mutable_data_ptr(), current_stream(device)),
        "packed codes");
  return scores;
}

Tensor maxsim_hamming(Tensor Q, Tensor D, int64_t d, OptionalTensor q_mask, OptionalTensor d_mask) {
  const Inputs in = parse_hamming_inputs(Q, D, d, q_mask, d_mask);
  PackedCodesCall call = call_of(in);
  call.sizes.d = d;
  call.q_bits = 1;
  return score(call, Q);
}

bool one_for_all(const ScaleView& scale) {
  return scale.query_stride == 0 && scale.item_stride == 0 && scale.token_stride == 0;
}

Tensor maxsim_asymmetric(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                         OptionalTensor d_mask, int64_t nbits) {
  const QuantizedInputs in = parse_asymmetric_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask, nbits);
  PackedCodesCall call = call_of(in);
  call.d_bits = static_cast<int>(nbits);
  call.q_scale = in.q_scale;
  // Scales are not negative, so one that all documents' tokens share can multiply their maxima instead.
  if (one_for_all(in.d_scale)) {
    call.shared_scale = in.d_scale.data;
  } else {
    call.d_scale = in.d_scale;
  }
  return score(call, Q);
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("maxsim_hamming", TORCH_BOX(&late_interaction::maxsim_hamming));
  m.impl("maxsim_asymmetric", TORCH_BOX(&late_interaction::maxsim_asymmetric));
}
