// The smooth maximum on CUDA: parse, choose a kernel and splits, launch. Nothing here waits for the device.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "../../common/arithmetic.h"
#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../primitives/row_norms.h"
#include "../runtime/op_helpers.h"
#include "args.h"

namespace late_interaction {

namespace {

constexpr int64_t kMostDims = 128;

struct SmoothCall {
  SmoothArgs args;
  const SmoothKernel* kernel;
  int sm_count;
};

const SmoothKernel& choose_kernel(const Device& device, Dtype dtype) {
  if (dtype == Dtype::bf16) return device.wgmma ? kSmoothSm90Bf16 : kSmoothSm80Bf16;
  return device.wgmma ? kSmoothSm90Fp16 : kSmoothSm80Fp16;
}

SmoothCall parse_smooth(const Tensor& Q, const Tensor& D, const OptionalTensor& d_mask, double tau) {
  STD_TORCH_CHECK(holds_halves(Q) && Q.scalar_type() == D.scalar_type() && same_place(Q, D) && Q.dim() == 3 &&
                      D.dim() == 4 && Q.size(0) == D.size(0) && Q.size(2) == D.size(3),
                  "late_interaction: Q must be bfloat16 or float16 [groups, rows, d], and D [groups, "
                  "documents, Ld, d] as it");
  STD_TORCH_CHECK(Q.size(2) % 8 == 0 && Q.size(2) <= kMostDims && Q.is_contiguous() && D.is_contiguous() &&
                      is_aligned(Q.const_data_ptr(), 16) && is_aligned(D.const_data_ptr(), 16),
                  "late_interaction: Q and D must be contiguous and aligned to 16 bytes, of up to ",
                  kMostDims, " dims, in eights");
  STD_TORCH_CHECK(std::max({Q.size(1), D.size(1), D.size(2)}) <= kMaxTokens && tau > 0.0,
                  "late_interaction: more than 2^30 rows, documents or tokens, or a tau that is not above 0");
  constexpr double kLog2E = 1.4426950408889634;
  check_mask(d_mask, D, "d_mask");
  STD_TORCH_CHECK(!d_mask || d_mask->is_contiguous(), "late_interaction: d_mask must be contiguous");
  const Device device = device_properties(Q.get_device_index());
  SmoothCall call{{}, &choose_kernel(device, parse_dtype(Q.scalar_type())), device.sm_count};
  if (Q.size(2) > 64) require_sm80(device, "a smooth maximum in half precision of more than 64 dims");
  SmoothArgs& args = call.args;
  args.Q = Q.const_data_ptr();
  args.D = D.const_data_ptr();
  args.d_mask = data_of<uint8_t>(d_mask);
  args.groups = Q.size(0);
  args.rows = static_cast<int32_t>(Q.size(1));
  args.documents = static_cast<int32_t>(D.size(1));
  args.Ld = static_cast<int32_t>(D.size(2));
  args.d = static_cast<int32_t>(Q.size(2));
  args.scale = static_cast<float>(kLog2E / tau);
  args.splits = 1;
  return call;
}

// Splits of the rows that stream by, in rounds of blocks: as few as give the shortest time of the logs.
// Splits of gradients are summed afterwards, so another split must be worth it.
int32_t choose_splits(const SmoothCall& call, SmoothPass pass) {
  constexpr int64_t kMostSums = 8, kMostSplits = 64, kTokens = 64;
  const SmoothShape shape = call.kernel->shape(pass);
  const SmoothArgs& args = call.args;
  const int64_t blocks = count_smooth_blocks(args, pass, shape),
                at_once = call.sm_count * shape.blocks_per_sm;
  const int64_t items = pass == SmoothPass::grad_d ? ceil_div(args.rows, kTokens) : args.documents;
  const int64_t most = std::min(items, pass == SmoothPass::logs ? kMostSplits : kMostSums);
  const double gain = pass == SmoothPass::logs ? 1.0 : 0.9;
  int64_t best = 1;
  double best_time = std::numeric_limits<double>::infinity();
  for (int64_t splits = 1; splits <= most; ++splits) {
    const auto time = static_cast<double>(ceil_div(blocks * splits, at_once) * ceil_div(items, splits));
    if (time < gain * best_time) {
      best = splits;
      best_time = time;
    }
  }
  return static_cast<int32_t>(best);
}

void launch_pass(const SmoothCall& call, SmoothPass pass, cudaStream_t stream) {
  check(call.kernel->launch(call.args, pass, stream), "smooth maximum");
}

Tensor smooth_logs(Tensor Q, Tensor D, OptionalTensor d_mask, double tau) {
  SmoothCall call = parse_smooth(Q, D, d_mask, tau);
  const OnDevice on(Q);
  const Tensor logs = new_tensor(Q, {Q.size(0), D.size(1), Q.size(1)}, ScalarType::Float);
  if (logs.numel() == 0) return logs;
  call.args.logs = mutable_data_of<float>(logs);
  call.args.splits = choose_splits(call, SmoothPass::logs);
  launch_pass(call, SmoothPass::logs, on.stream());
  return logs;
}

const float* parse_rows(const Tensor& x, const SmoothCall& call, const Tensor& Q, const char* name) {
  const SmoothArgs& args = call.args;
  check_dense(x, ScalarType::Float, {args.groups, args.documents, args.rows}, name, Q);
  return data_of<float>(x);
}

Tensor smooth_gradient(Tensor Q, Tensor D, OptionalTensor d_mask, Tensor logs, Tensor factors, double tau,
                       bool of_documents) {
  SmoothCall call = parse_smooth(Q, D, d_mask, tau);
  const OnDevice on(Q);
  call.args.logs = const_cast<float*>(parse_rows(logs, call, Q, "logs"));
  call.args.factors = parse_rows(factors, call, Q, "factors");
  const SmoothPass pass = of_documents ? SmoothPass::grad_d : SmoothPass::grad_q;
  const int64_t grad_rows = of_documents ? D.size(1) * D.size(2) : Q.size(1);
  const Tensor grad = new_tensor(Q, {Q.size(0), grad_rows, Q.size(2)}, ScalarType::Float);
  if (grad.numel() == 0) return grad;
  auto* sums = mutable_data_of<float>(grad);
  const cudaStream_t stream = on.stream();
  if (logs.numel() == 0) {
    fill_zero(grad, stream);
    return grad;
  }
  call.args.splits = choose_splits(call, pass);
  call.args.out = sums;
  if (call.args.splits == 1) {
    launch_pass(call, pass, stream);
    return grad;
  }
  const Tensor parts = new_tensor(Q, {call.args.splits, grad.numel()}, ScalarType::Float);
  call.args.out = mutable_data_of<float>(parts);
  launch_pass(call, pass, stream);
  check(launch_sum_slices(call.args.out, call.args.splits, grad.numel(), sums, stream), "smooth maximum");
  return grad;
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("smooth_logs", TORCH_BOX(&late_interaction::smooth_logs));
  m.impl("smooth_gradient", TORCH_BOX(&late_interaction::smooth_gradient));
}
