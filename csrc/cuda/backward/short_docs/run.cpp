// Plans, workspaces and launches of the backward of short documents. Nothing here waits for the device.
#include "run.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"

namespace late_interaction {

namespace {

// Calls f.template operator()<T>() with a 2-byte element type, which is what the planner serves.
template <class F>
cudaError_t with_half(Dtype dtype, F f) {
  if (dtype == Dtype::bf16) return f.template operator()<__nv_bfloat16>();
  return f.template operator()<__half>();
}

bool writable_in_vectors(const Destinations& to) {
  const auto fits = [](const Tensor& x) { return x.numel() == 0 || is_aligned(x.data_ptr(), 16); };
  return fits(to.grad_Q) && fits(to.grad_D);
}

}  // namespace

bool lone_query_gradients(const Inputs& in, const Sizes& s, const Tensor& grad_scores, const Tensor& winners,
                          const Destinations& to, const Device& device, cudaStream_t stream) {
  const auto plan = plan_lone_query(s, in.dtype, aligned(in.D, in), device);
  const bool in_place = to.grad_D.numel() > 0 && to.grad_D.data_ptr() == in.D.data;
  if (!plan || in_place || !writable_in_vectors(to)) return false;
  LoneQueryArgs args{};
  take_winners(args, s, grad_scores, winners);
  args.Q = in.Q;
  args.D = in.D;
  args.slices = plan->slices;
  args.slice_dims = plan->slice_dims;
  if (to.grad_D.numel() > 0) args.grad_D = to.grad_D.data_ptr();
  const bool need_grad_Q = to.grad_Q.numel() > 0;
  const Tensor partials =
      new_tensor(grad_scores, {need_grad_Q ? plan->grid : 0, s.Lq, s.d}, ScalarType::Float);
  if (need_grad_Q) {
    args.grad_Q = to.grad_Q.data_ptr();
    args.partials = static_cast<float*>(partials.data_ptr());
  }
  check(with_half(in.dtype, [&]<class T>() { return ShortDocsLauncher<T>::lone_query(args, *plan, stream); }),
        "gradients of a query and its short documents");
  return true;
}

bool short_docs_grad_q(const Inputs& in, const Sizes& s, const Tensor& grad_scores, const Tensor& winners,
                       const Destinations& to, const Device& device, cudaStream_t stream) {
  const auto plan = plan_short_grad_q(s, in.dtype, aligned(in.D, in), device);
  if (!plan || to.grad_Q.numel() == 0 || !writable_in_vectors(to)) return false;
  STD_TORCH_CHECK(plan->grid <= INT32_MAX, "late_interaction: more than 2^31 - 1 blocks in one backward");
  ShortGradQArgs args{};
  take_winners(args, s, grad_scores, winners);
  args.D = in.D;
  args.by_Ld = Divider(static_cast<uint32_t>(s.Ld));
  args.slices = plan->slices;
  args.slice_dims = plan->slice_dims;
  args.groups = plan->groups;
  args.cluster = plan->cluster;
  args.stage_docs = plan->stage_docs;
  args.grad_Q = to.grad_Q.data_ptr();
  check(with_half(in.dtype, [&]<class T>() { return ShortDocsLauncher<T>::grad_q(args, *plan, stream); }),
        "grad_Q of short documents");
  return true;
}

bool short_docs_grad_d(const Inputs& in, const Sizes& s, const Tensor& grad_scores, const Tensor& winners,
                       const Destinations& to, const Device& device, cudaStream_t stream) {
  const auto plan = plan_short_grad_d(s, in.dtype, aligned(in.Q, in), device);
  if (!plan || to.grad_D.numel() == 0 || !writable_in_vectors(to)) return false;
  STD_TORCH_CHECK(plan->grid <= INT32_MAX, "late_interaction: more than 2^31 - 1 blocks in one backward");
  ShortGradDArgs args{};
  take_winners(args, s, grad_scores, winners);
  args.Q = in.Q;
  args.grad_D = to.grad_D.data_ptr();
  args.slices = plan->slices;
  args.slice_dims = plan->slice_dims;
  args.block_docs = plan->block_docs;
  args.cluster = plan->cluster;
  args.units = plan->units;
  args.row_bytes = plan->row_bytes;
  args.sum_width = plan->sum_width;
  args.by_units = Divider(static_cast<uint32_t>(plan->units));
  args.by_vecs = Divider(static_cast<uint32_t>(s.d / 8));
  check(with_half(in.dtype, [&]<class T>() { return ShortDocsLauncher<T>::grad_d(args, *plan, stream); }),
        "grad_D of short documents");
  return true;
}

}  // namespace late_interaction
