// The stages of a backward: plan, norms, gradients, the cast to the inputs' dtype. Nothing here waits for the
// device.
#include "run.h"

#include <cuda_runtime.h>

#include <bit>

#include "../primitives/row_norms.h"
#include "../runtime/device.h"
#include "../runtime/stream.h"
#include "launch.h"

namespace late_interaction {

int32_t winners_at_once(const void* winners, int64_t count, int64_t Ld) {
  const auto fit = [&](int64_t n) {
    return !wide_winners(Ld) && count % n == 0 && reinterpret_cast<uintptr_t>(winners) % (2 * n) == 0;
  };
  return fit(4) ? 4 : fit(2) ? 2 : 1;
}

void take_plan(BackwardArgs& args, const BackwardPlan& plan) {
  args.split_bits = std::bit_width(static_cast<unsigned>(plan.split)) - 1;
  args.segments = plan.segments;
  args.segment_bits = std::bit_width(static_cast<unsigned>(plan.segments)) - 1;
  args.warp_capacity = plan.chunk / plan.segments;
  args.chunk = plan.chunk;
  args.compact = plan.compact;
  args.grads_kept = plan.grads_kept;
  args.narrow_list = plan.narrow_list;
  args.memory = plan.memory;
  args.tile_tokens = plan.tile_tokens;
  args.tiles = plan.tiles;
  args.by_tiles = Divider(static_cast<uint32_t>(plan.tiles));
  args.token_step = 1;
  args.by_step = Divider(1);
  args.list_capacity = plan.list_capacity;
}

void take_winners(BackwardArgs& args, const Sizes& s, const Tensor& grad_scores, const Tensor& winners) {
  args.layout = s.layout;
  args.N = s.N;
  args.Nq = static_cast<int32_t>(s.Nq);
  args.Lq = static_cast<int32_t>(s.Lq);
  args.Ld = static_cast<int32_t>(s.Ld);
  args.d = static_cast<int32_t>(s.d);
  args.by_Lq = Divider(static_cast<uint32_t>(s.Lq));
  args.by_N = Divider(static_cast<uint32_t>(s.N));
  args.grad = grad_scores.const_data_ptr();
  args.grad_query_stride = grad_scores.stride(0);
  args.grad_item_stride = grad_scores.dim() == 1 ? 0 : grad_scores.stride(1);
  args.winners = winners.const_data_ptr();
  args.wide_winners = wide_winners(s.Ld);
  args.winners_at_once = winners_at_once(args.winners, s.Lq, s.Ld);
}

namespace {

// Where grad_Q is summed before it is rounded: the caller's sums, or new ones. None: grad_Q is written as it
// is.
OptionalTensor query_sums(const Destinations& to, const Sizes& s, bool needed, const Tensor& like) {
  if (to.q_sums || !needed) return to.q_sums;
  return new_tensor(like, {s.Nq * s.Lq * s.d}, like.scalar_type());
}

}  // namespace

void backward_into(const Inputs& in, const Tensor& grad_scores, const Tensor& winners, bool normalize,
                   Backward method, const Destinations& to) {
  // Sums go on from one call to the next, which kernels of a query's own documents do not.
  const Sizes s = to.q_sums || to.unit_inverse ? in.sizes : with_own_documents(in.sizes);
  const Tensor& like = grad_scores;
  const int device = like.get_device_index();
  const cudaStream_t stream = current_stream(device);
  const ScalarType sum_type = score_type(in.dtype);
  const bool need_grad_Q = to.grad_Q.numel() > 0, need_grad_D = to.grad_D.numel() > 0;
  if (winners.numel() == 0 || s.Ld == 0) {
    fill_zero(to.grad_Q, stream);
    fill_zero(to.grad_D, stream);
    return;
  }

  const BackwardPlan plan = plan_backward(s, in.dtype, reads_in_vectors(in), normalize || to.unit_inverse,
                                          method, device_properties(device));
  STD_TORCH_CHECK(plan.gather_grid + plan.grad_d_grid <= INT32_MAX,
                  "late_interaction: more than 2^31 - 1 blocks in one backward");

  BackwardArgs args{};
  take_winners(args, s, grad_scores, winners);
  take_plan(args, plan);
  if (s.layout == Layout::in_batch) {  // tokens that win often may be neighbours: each goes to another block
    args.token_step = plan.tiles;
    args.by_step = Divider(static_cast<uint32_t>(plan.tiles));
  }
  args.Q = in.Q;
  args.D = in.D;
  args.grad_Q = need_grad_Q ? to.grad_Q.data_ptr() : nullptr;
  args.grad_D = need_grad_D ? to.grad_D.data_ptr() : nullptr;

  OptionalTensor q_inverse, d_inverse, d_sums;
  const RowsView q_rows = query_rows(in.Q, s), d_rows = document_rows(in.D, s);
  if (normalize) {
    q_inverse = new_tensor(like, {q_rows.rows}, sum_type);
    d_inverse = new_tensor(like, {d_rows.rows}, sum_type);
    check(launch_inverse_norms(q_rows, s.d, in.dtype, q_inverse->data_ptr(), stream), "norms of Q");
    check(launch_inverse_norms(d_rows, s.d, in.dtype, d_inverse->data_ptr(), stream), "norms of D");
    args.q_inverse = q_inverse->data_ptr();
    args.d_inverse = d_inverse->data_ptr();
  }
  if (to.unit_inverse) {
    args.d_inverse = to.unit_inverse->data_ptr();
    args.normalized_documents = true;
  }
  const OptionalTensor q_sums = query_sums(to, s, need_grad_Q && plan.finish_later, like);
  if (q_sums) {
    args.grad_Q_sums = q_sums->data_ptr();
    args.adds_to_sums = !to.first;
  }
  const bool scatter = need_grad_D && plan.method == Backward::unified;
  if (scatter || (need_grad_D && plan.finish_later)) {
    const bool in_their_dtype = sum_type == to.grad_D.scalar_type() && !args.d_inverse;
    d_sums = in_their_dtype ? to.grad_D : new_tensor(like, shape_of_documents(in), sum_type);
    if (scatter) fill_zero(*d_sums, stream);
    args.grad_D_sums = d_sums->data_ptr();
  }

  if (scatter) {
    check(launch_unified(args, in.dtype, plan, stream), "gradients");
  } else {
    const auto launch = [&](bool grad_Q, bool grad_D) {
      if (!grad_Q && !grad_D) return;
      BackwardArgs part = args;
      if (!grad_Q) part.grad_Q = nullptr;
      part.grad_d_blocks = grad_D ? static_cast<int32_t>(plan.grad_d_grid) : 0;
      check(launch_lowmem(part, in.dtype, plan, stream), "gradients");
    };
    const bool in_place = need_grad_D && to.grad_D.data_ptr() == in.D.data;
    if (in_place) launch(need_grad_Q, false);  // which reads D, before grad_D takes its place
    launch(need_grad_Q && !in_place, need_grad_D);
  }
  const bool finished = normalize ? !q_sums : args.grad_Q_sums == nullptr || args.grad_Q_sums == args.grad_Q;
  if (!finished && to.last) {
    const GradientSums sums{args.grad_Q_sums, args.q_inverse, false, args.grad_Q};
    check(launch_finish_gradients(q_rows, s.d, in.dtype, sums, stream), "grad_Q in the dtype of Q");
  }
  if (d_sums && args.d_inverse) {
    const GradientSums sums{args.grad_D_sums, args.d_inverse, args.normalized_documents, args.grad_D};
    check(launch_finish_gradients(d_rows, s.d, in.dtype, sums, stream), "grad_D in the dtype of D");
  } else if (d_sums && args.grad_D_sums != args.grad_D) {
    Tensor grad_D = to.grad_D;  // nothing is left but to round, which PyTorch has a kernel for
    torch::stable::copy_(grad_D, *d_sums);
  }
}

std::tuple<Tensor, Tensor> new_gradients(const Tensor& Q, const Inputs& in, bool need_grad_Q,
                                         bool need_grad_D) {
  const std::vector<int64_t> none{0};
  return {new_tensor(Q, need_grad_Q ? shape_of_queries(in) : none, Q.scalar_type()),
          new_tensor(Q, need_grad_D ? shape_of_documents(in) : none, Q.scalar_type())};
}

}  // namespace late_interaction
