// Plans, workspaces and launches of the backward of short documents. Nothing here waits for the device.
#include "run.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"

namespace late_interaction {

namespace {

// Calls f.template operator()<T>() with a 2-byte element type; the planner serves no other.
template <class F>
cudaError_t with_half(Dtype dtype, F f) {
  if (dtype == Dtype::bf16) return f.template operator()<__nv_bfloat16>();
  return f.template operator()<__half>();
}

bool writable_in_vectors(const Destinations& to) {
  const auto fits = [](const Tensor& x) { return x.numel() == 0 || is_aligned(x.data_ptr(), 16); };
  return fits(to.grad_Q) && fits(to.grad_D);
}

enum class Gradient { q, d, d_beside_q };

bool incidence_gradient(const GradientCall& call, Gradient which) {
  const Inputs& in = call.in;
  const Sizes& s = call.s;
  const bool grad_q = which == Gradient::q;
  const auto plan = plan_incidence(s, in.dtype, aligned(grad_q ? in.D : in.Q, in), grad_q, call.device);
  const Tensor& out = grad_q ? call.to.grad_Q : call.to.grad_D;
  const bool described =
      grad_q ? fits_tensor_map(in.D, s.Ld, s.N, in.dtype) : fits_tensor_map(in.Q, s.Lq, s.Nq, in.dtype);
  if (!plan || !described || out.numel() == 0 || !writable_in_vectors(call.to)) return false;
  check_grid(plan->grid);
  IncidenceArgs args{};
  take_winners(args, s, call.grad_scores, call.winners);
  args.items = grad_q ? in.D : in.Q;
  args.out = out.data_ptr();
  args.beside_grad_q = which == Gradient::d_beside_q && plan->tma;
  const Tensor partials =
      new_tensor(call.grad_scores, {!plan->tma && plan->cluster > 1 ? plan->cluster : 0, plan->rows, s.d},
                 ScalarType::Float);
  args.partials = static_cast<float*>(partials.data_ptr());
  args.rows = plan->rows;
  args.block_units = static_cast<int32_t>(plan->all_units / plan->cluster);
  args.more_units = static_cast<int32_t>(plan->all_units % plan->cluster);
  args.units = plan->units;
  args.slices = plan->slices;
  args.block_docs = plan->block_docs;
  args.block_rows = plan->block_rows;
  args.warpgroups = ceil_div(plan->block_rows, 64);
  args.cluster = plan->cluster;
  args.stages = plan->stages;
  args.by_slices = Divider(static_cast<uint32_t>(plan->slices));
  args.by_cluster = Divider(static_cast<uint32_t>(plan->cluster));
  args.by_units = Divider(static_cast<uint32_t>(plan->units));
  args.by_docs = Divider(static_cast<uint32_t>(plan->block_docs));
  args.query_bytes = 2 * args.winners_stride * s.Lq;
  args.run_offset = s.Lq % 8 == 0 && is_aligned(args.winners, 16) ? 0 : 14;
  args.run_vecs = incidence_run_vecs(16 * plan->steps, args.run_offset);
  args.by_run_vecs = Divider(static_cast<uint32_t>(args.run_vecs));
  check(with_half(in.dtype, [&]<class T>() { return launch_incidence<T>(args, *plan, call.stream); }),
        grad_q ? "grad_Q of short documents" : "grad_D of short documents");
  return true;
}

}  // namespace

bool lone_query_gradients(const GradientCall& call) {
  const Inputs& in = call.in;
  const Sizes& s = call.s;
  const auto plan = plan_lone_query(s, in.dtype, aligned(in.D, in), call.device);
  const bool in_place = call.to.grad_D.numel() > 0 && call.to.grad_D.data_ptr() == in.D.data;
  if (!plan || in_place || !writable_in_vectors(call.to)) return false;
  LoneQueryArgs args{};
  static_cast<LoneQueryPlan&>(args) = *plan;
  take_winners(args, s, call.grad_scores, call.winners);
  args.Q = in.Q;
  args.D = in.D;
  if (call.to.grad_D.numel() > 0) args.grad_D = call.to.grad_D.data_ptr();
  const bool need_grad_Q = call.to.grad_Q.numel() > 0;
  const Tensor partials =
      new_tensor(call.grad_scores, {need_grad_Q ? plan->grid : 0, s.Lq, s.d}, ScalarType::Float);
  if (need_grad_Q) {
    args.grad_Q = call.to.grad_Q.data_ptr();
    args.partials = static_cast<float*>(partials.data_ptr());
  }
  check(with_half(in.dtype, [&]<class T>() { return launch_lone_query<T>(args, call.stream); }),
        "gradients of a query and its short documents");
  return true;
}

bool short_docs_grad_q(const GradientCall& call) { return incidence_gradient(call, Gradient::q); }

bool short_docs_grad_d(const GradientCall& call, bool beside_grad_q) {
  return incidence_gradient(call, beside_grad_q ? Gradient::d_beside_q : Gradient::d);
}

}  // namespace late_interaction
