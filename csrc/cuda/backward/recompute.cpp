// maxsim_backward_recompute on CUDA: the backward of a forward that kept no winners finds them again, part by
// part. Nothing here waits for the device.
#include <torch/csrc/stable/accelerator.h>

#include "../../common/tensors.h"
#include "../../plan/recompute.h"
#include "../forward/run.h"
#include "../runtime/device.h"
#include "run.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;

using Parts = RecomputePlan::Parts;

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
  const OperandConversion how = operand_conversion(in, precision, normalize, Q.get_device_index());
  const bool copied = how.copies != Copies::none;
  const int64_t element = how.copies == Copies::fp16x2 ? 4 : 2;
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
      score_into(some_Q, part_D, some_in, normalize, how, scores, part_of(winners, q, some));
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

}  // namespace

}  // namespace late_interaction

STABLE_TORCH_LIBRARY_IMPL(late_interaction, CUDA, m) {
  m.impl("maxsim_backward_recompute", TORCH_BOX(&late_interaction::maxsim_backward_recompute));
}
