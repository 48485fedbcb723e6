// The CUDA side of the backward operators: parse, plan, allocate, launch. Nothing here waits for the device.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "../common/tensors.h"
#include "../plan/own_documents.h"
#include "../plan/recompute.h"
#include "backward.h"
#include "calls.h"
#include "device.h"
#include "packed_backward.h"
#include "stream.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;
using Parts = RecomputePlan::Parts;

// What the backward kernels take from the sizes, the gradients of the scores and the winners.
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

// Where the gradients of a backward go.
struct Destinations {
  Tensor grad_Q, grad_D;                       // with zero elements: not needed
  OptionalTensor unit_inverse = std::nullopt;  // D holds unit rows, these are the inverse norms that they had
  // grad_Q of several calls with documents of their own: summed up here, and finished by the last one.
  OptionalTensor q_sums = std::nullopt;
  bool first = true, last = true;
};

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
  STD_TORCH_CHECK(plan.gather_grid + plan.owned_grid <= INT32_MAX,
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

  OptionalTensor q_inverse, d_inverse, q_sums = to.q_sums, d_sums;
  if (normalize) {
    q_inverse = new_tensor(like, {s.Nq * s.Lq}, sum_type);
    d_inverse = new_tensor(like, {s.documents() * s.Ld}, sum_type);
    check(launch_inverse_norms(args, in.dtype, false, q_inverse->data_ptr(), stream), "norms of Q");
    check(launch_inverse_norms(args, in.dtype, true, d_inverse->data_ptr(), stream), "norms of D");
    args.q_inverse = q_inverse->data_ptr();
    args.d_inverse = d_inverse->data_ptr();
  }
  if (to.unit_inverse) {
    args.d_inverse = to.unit_inverse->data_ptr();
    args.unit_documents = true;
  }
  if (need_grad_Q && plan.finish_later && !q_sums) q_sums = new_tensor(like, {s.Nq * s.Lq * s.d}, sum_type);
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
      part.owned_blocks = grad_D ? static_cast<int32_t>(plan.owned_grid) : 0;
      check(launch_lowmem(part, in.dtype, plan, stream), "gradients");
    };
    const bool in_place = need_grad_D && to.grad_D.data_ptr() == in.D.data;
    if (in_place) launch(need_grad_Q, false);  // which reads D, before grad_D takes its place
    launch(need_grad_Q && !in_place, need_grad_D);
  }
  const bool finished = normalize ? !q_sums : args.grad_Q_sums == nullptr || args.grad_Q_sums == args.grad_Q;
  if (!finished && to.last) check(launch_finish(args, in.dtype, false, stream), "grad_Q in the dtype of Q");
  if (d_sums && args.d_inverse) {
    check(launch_finish(args, in.dtype, true, stream), "grad_D in the dtype of D");
  } else if (d_sums && args.grad_D_sums != args.grad_D) {
    Tensor grad_D = to.grad_D;  // nothing is left but to round, which PyTorch has a kernel for
    torch::stable::copy_(grad_D, *d_sums);
  }
}

// Room for the gradients that are needed; the others have no elements.
std::tuple<Tensor, Tensor> new_gradients(const Tensor& Q, const Inputs& in, bool need_grad_Q,
                                         bool need_grad_D) {
  const std::vector<int64_t> none{0};
  return {new_tensor(Q, need_grad_Q ? shape_of_queries(in) : none, Q.scalar_type()),
          new_tensor(Q, need_grad_D ? shape_of_documents(in) : none, Q.scalar_type())};
}

std::tuple<Tensor, Tensor> maxsim_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor winners,
                                           bool normalize, std::string backward, bool need_grad_Q,
                                           bool need_grad_D, bool paired) {
  const Inputs in = parse_inputs(Q, D, std::nullopt, std::nullopt, paired);
  check_backward_inputs(grad_scores, Q, winners, in);
  const DeviceGuard guard(Q.get_device_index());
  const auto [grad_Q, grad_D] = new_gradients(Q, in, need_grad_Q, need_grad_D);
  backward_into(in, grad_scores, winners, normalize, parse_backward(backward),
                {.grad_Q = grad_Q, .grad_D = grad_D});
  return {grad_Q, grad_D};
}

Tensor part_of(const Tensor& x, int64_t start, int64_t length) {
  if (length == x.size(0)) return x;
  Tensor whole = x;
  return torch::stable::narrow(whole, 0, start, length);
}

OptionalTensor part_of(const OptionalTensor& x, int64_t start, int64_t length) {
  return x ? OptionalTensor(part_of(*x, start, length)) : std::nullopt;
}

std::tuple<Tensor, Tensor> maxsim_backward_recompute(Tensor grad_scores, Tensor Q, Tensor D,
                                                     OptionalTensor q_mask, OptionalTensor d_mask,
                                                     bool normalize, std::string precision,
                                                     std::string backward, bool need_grad_Q, bool need_grad_D,
                                                     bool paired) {
  // Who keeps no winners wants the memory.
  const Backward method =
      parse_backward(backward) == Backward::unified ? Backward::unified : Backward::lowmem;
  const Inputs in = parse_inputs(Q, D, q_mask, d_mask, paired);
  const Sizes& s = in.sizes;
  check_grad_scores(grad_scores, Q, in);
  const DeviceGuard guard(Q.get_device_index());
  const bool in_batch = s.layout == Layout::in_batch;
  const ScalarType sum_type = score_type(in.dtype);
  const bool summed_in_place = sum_type == Q.scalar_type();
  // Half-precision copies, and copies of the tokens that a mask keeps.
  const Multiplied how = multiplied(in, precision, normalize, Q.get_device_index());
  const bool copied = how.copies != Copies::none;
  const int64_t element = how.copies == Copies::halves ? 4 : 2;
  const int64_t copy = s.Ld * (element * s.d + 8), norms = normalize ? 4 * s.Ld : 0;
  // Of all queries of a batch they may be too many at a time, beside those of a part of the documents.
  constexpr int64_t kMostOfQueries = 4 << 20;
  const int64_t of_query = copied ? s.Lq * (element * s.d + 4) : 0;
  const int64_t queries_at_once =
      in_batch && copied ? std::max<int64_t>(1, kMostOfQueries / std::max<int64_t>(of_query, 1)) : s.Nq;
  const RecomputeBytes bytes{.sum = summed_in_place ? 0 : 4,
                             .query = queries_at_once < s.Nq ? kMostOfQueries / s.Nq : of_query,
                             .forward = norms + (int64_t{copied} + d_mask.has_value()) * copy,
                             .backward = norms};
  const RecomputePlan plan = method == Backward::unified
                                 ? RecomputePlan{Parts::none, s.Nq, s.N}
                                 : plan_recompute(s, bytes, need_grad_Q && need_grad_D);

  Tensor grad_Q, grad_D;
  OptionalTensor sums;
  bool allocated = false;
  // Winners of some queries with some documents, found again, and what follows from them.
  const auto take = [&](int64_t i, int64_t queries, int64_t j, int64_t documents, bool to_Q, bool to_D) {
    const auto of_documents = [&](const auto& x) {
      return in_batch ? part_of(x, j, documents) : part_of(x, i, queries);
    };
    const Tensor part_Q = part_of(Q, i, queries), part_D = of_documents(D);
    const OptionalTensor part_q_mask = part_of(q_mask, i, queries), part_d_mask = of_documents(d_mask);
    const Inputs part = parse_inputs(part_Q, part_D, part_q_mask, part_d_mask, paired);
    const Tensor winners = new_tensor(Q, shape_of_winners(part), winner_type(s.Ld));
    const int64_t at_once = plan.parts == Parts::none ? queries : std::min(queries, queries_at_once);
    for (int64_t q = 0; q < queries; q += at_once) {
      const int64_t some = std::min(at_once, queries - q);
      const Tensor some_Q = part_of(part_Q, q, some);
      const OptionalTensor some_mask = part_of(part_q_mask, q, some);
      const Inputs some_in = parse_inputs(some_Q, part_D, some_mask, part_d_mask, paired);
      const Tensor scores = new_tensor(Q, shape_of_scores(some_in), sum_type);
      score_into(some_Q, part_D, some_mask, part_d_mask, some_in, normalize, how, scores,
                 part_of(winners, q, some));
    }
    if (!allocated) {
      std::tie(grad_Q, grad_D) = new_gradients(Q, in, need_grad_Q, need_grad_D);
      if (plan.parts == Parts::documents) {
        sums = summed_in_place ? grad_Q : new_tensor(Q, {s.Nq, s.Lq, s.d}, sum_type);
      }
      allocated = true;
    }
    Tensor grads = part_of(grad_scores, i, queries);
    if (documents < s.N) grads = torch::stable::narrow(grads, 1, j, documents);
    const Tensor none = new_tensor(Q, {0}, Q.scalar_type());
    backward_into(part, grads, winners, normalize, method,
                  {.grad_Q = to_Q ? part_of(grad_Q, i, queries) : none,
                   .grad_D = to_D ? of_documents(grad_D) : none,
                   .q_sums = sums,
                   .first = j == 0,
                   .last = j + documents == s.N});
  };
  const auto take_queries = [&](bool to_Q, bool to_D) {
    for (int64_t i = 0; i < s.Nq; i += plan.queries) {
      take(i, std::min(plan.queries, s.Nq - i), 0, s.N, to_Q, to_D);
    }
  };
  const auto take_documents = [&](bool to_Q, bool to_D) {
    for (int64_t j = 0; j < s.N; j += plan.documents) {
      take(0, s.Nq, j, std::min(plan.documents, s.N - j), to_Q, to_D);
    }
  };

  switch (plan.parts) {
    case Parts::none:
      take(0, s.Nq, 0, s.N, need_grad_Q, need_grad_D);
      break;
    case Parts::queries:
      take_queries(need_grad_Q, need_grad_D);
      break;
    case Parts::documents:
      take_documents(true, true);
      break;
    case Parts::apart:
      if (need_grad_Q) take_queries(true, false);
      if (need_grad_D) take_documents(false, true);
      break;
  }
  return {grad_Q, grad_D};
}

void maxsim_backward_unit_(Tensor grad_scores, Tensor Q, Tensor D, OptionalTensor inverse, Tensor winners,
                           Tensor grad_Q, Tensor grad_D, OptionalTensor sums, bool first, bool last) {
  const Inputs in = parse_inputs(Q, D, std::nullopt, std::nullopt);
  check_backward_inputs(grad_scores, Q, winners, in);
  const Sizes& s = in.sizes;
  STD_TORCH_CHECK(s.layout == Layout::in_batch, "late_interaction: D must be [Nd, Ld, d]");
  STD_TORCH_CHECK(
      !inverse || (inverse->dim() == 1 && inverse->size(0) == s.N * s.Ld && inverse->is_contiguous() &&
                   same_place(*inverse, D) && inverse->scalar_type() == score_type(in.dtype)),
      "late_interaction: inverse must be what unit_rows_ returned");
  const auto takes = [&](const Tensor& x, int64_t elements, ScalarType type) {
    return x.numel() == elements && x.is_contiguous() && x.scalar_type() == type && same_place(x, Q);
  };
  STD_TORCH_CHECK(grad_Q.numel() == 0 || takes(grad_Q, Q.numel(), Q.scalar_type()),
                  "late_interaction: grad_Q must be contiguous, as Q, or without elements");
  STD_TORCH_CHECK(grad_D.numel() == 0 || takes(grad_D, D.numel(), D.scalar_type()),
                  "late_interaction: grad_D must be contiguous, as D, or without elements");
  STD_TORCH_CHECK(!sums || takes(*sums, Q.numel(), score_type(in.dtype)),
                  "late_interaction: sums must be contiguous, as Q, in the type of sums");
  const DeviceGuard guard(Q.get_device_index());
  if (grad_Q.numel() == 0) sums = std::nullopt;
  backward_into(in, grad_scores, winners, false, Backward::lowmem,
                {.grad_Q = grad_Q,
                 .grad_D = grad_D,
                 .unit_inverse = inverse,
                 .q_sums = sums,
                 .first = first,
                 .last = last});
}

std::tuple<Tensor, Tensor> maxsim_varlen_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor cu_seqlens_q,
                                                  Tensor cu_seqlens_d, Tensor winners, bool need_grad_Q,
                                                  bool need_grad_D) {
  const Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  check_varlen_backward_inputs(grad_scores, Q, winners, in);
  const Sizes& s = in.sizes;
  const int device = Q.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const PackedGradients grads(Q, D, need_grad_Q, need_grad_D);
  if (grad_scores.numel() == 0 || winners.numel() == 0 || s.Ld == 0 || s.d == 0) {
    grads.clear(stream);
    return {grads.Q, grads.D};
  }
  Sizes mean = s;
  mean.Ld = std::max<int64_t>(1, s.Ld / s.N);
  const BackwardPlan plan =
      plan_backward(mean, in.dtype, reads_in_vectors(in), false, Backward::lowmem, device_properties(device));
  BackwardArgs args{};
  take_winners(args, s, grad_scores, winners);
  launch_packed(in, plan, args, grads, launch_lowmem, stream);
  return {grads.Q, grads.D};
}

}  // namespace

}  // namespace late_interaction

STABLE_TORCH_LIBRARY_IMPL(late_interaction, CUDA, m) {
  m.impl("maxsim_backward_unit_", TORCH_BOX(&late_interaction::maxsim_backward_unit_));
  m.impl("maxsim_backward", TORCH_BOX(&late_interaction::maxsim_backward));
  m.impl("maxsim_backward_recompute", TORCH_BOX(&late_interaction::maxsim_backward_recompute));
  m.impl("maxsim_varlen_backward", TORCH_BOX(&late_interaction::maxsim_varlen_backward));
}
