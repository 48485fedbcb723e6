// maxsim_backward_recompute on CUDA: finds again, part by part, the winners that the forward did not keep.
// Nothing here waits for the device.
#include "../../plan/recompute.h"
#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../../plan/l2_parts.h"
#include "../forward/run.h"
#include "run.h"

namespace late_interaction {

namespace {

using Parts = RecomputePlan::Parts;

Tensor part_of(const Tensor& x, int64_t start, int64_t length) {
  if (length == x.size(0)) return x;
  Tensor whole = x;
  return torch::stable::narrow(whole, 0, start, length);
}

OptionalTensor part_of(const OptionalTensor& x, int64_t start, int64_t length) {
  return x ? OptionalTensor(part_of(*x, start, length)) : std::nullopt;
}

// Queries [first, first + count) with documents [first, first + count).
struct Part {
  int64_t first_query, queries, first_document, documents;
};

// A call whose winners are found again, part by part.
struct Recomputation {
  const Tensor &grad_scores, &Q, &D;
  const OptionalTensor &q_mask, &d_mask;
  const bool normalize, paired, need_grad_Q, need_grad_D;
  const Backward method;
  const Inputs in;
  const OperandConversion how;
  const ScalarType sum_type = score_type(in.dtype);
  const bool sums_in_place = sum_type == Q.scalar_type();
  int64_t queries_at_once = in.sizes.Nq;  // of converted operands
  RecomputePlan plan{Parts::none, in.sizes.Nq, in.sizes.N};
  Tensor grad_Q{}, grad_D{};
  OptionalTensor sums{};    // of grad_Q over parts of the documents
  OptionalTensor d_sums{};  // of grad_D of a part over parts of the queries
  bool allocated = false;

  bool in_batch() const { return in.sizes.layout == Layout::in_batch; }

  // The memory that a part takes decides how large parts are.
  void make_plan() {
    const Sizes& s = in.sizes;
    // Converted operands, and the compacted tokens that a mask keeps.
    const bool converted = how.copies != Copies::none;
    const int64_t element = how.copies == Copies::fp16x2 ? 4 : 2;
    const int64_t document = s.Ld * (element * s.d + 8), norms = normalize ? 4 * s.Ld : 0;
    // Converted queries of a whole batch may be too many, beside a part's converted documents.
    constexpr int64_t kMostOfQueries = 4 << 20;
    const int64_t query = converted ? s.Lq * (element * s.d + 4) : 0;
    if (in_batch() && converted) {
      queries_at_once = std::max<int64_t>(1, kMostOfQueries / std::max<int64_t>(query, 1));
    }
    const RecomputeBytes bytes{.sum = sums_in_place ? 0 : 4,
                               .query = queries_at_once < s.Nq ? kMostOfQueries / s.Nq : query,
                               .forward = norms + (int64_t{converted} + d_mask.has_value()) * document,
                               .backward = norms};
    if (method == Backward::unified) return;
    const BatchPart part = recompute_part(s, in.dtype, device_properties(Q.get_device_index()));
    if (part.queries < s.Nq || part.documents < s.N) {
      plan = {Parts::blocks, part.queries, part.documents};
    } else {
      plan = plan_recompute(s, bytes, need_grad_Q && need_grad_D);
    }
  }

  // Finds the winners of a part, a few queries at a time.
  Tensor find_winners(const Tensor& part_Q, const Tensor& part_D, const OptionalTensor& part_q_mask,
                      const OptionalTensor& part_d_mask, const Inputs& part) const {
    const Tensor winners = new_tensor(Q, shape_of_winners(part), winner_type(in.sizes.Ld));
    const int64_t queries = part_Q.size(0);
    const int64_t at_once = plan.parts == Parts::none ? queries : std::min(queries, queries_at_once);
    for (int64_t q = 0; q < queries; q += at_once) {
      const int64_t some = std::min(at_once, queries - q);
      const Tensor some_Q = part_of(part_Q, q, some);
      const OptionalTensor some_mask = part_of(part_q_mask, q, some);
      const Inputs some_in = parse_inputs(some_Q, part_D, some_mask, part_d_mask, paired);
      const Tensor scores = new_tensor(Q, shape_of_scores(some_in), sum_type);
      score_into(some_Q, part_D, some_in, normalize, how, scores, part_of(winners, q, some));
    }
    return winners;
  }

  // Behind the first winners, whose buffers' memory is free again by then.
  void allocate_gradients() {
    if (allocated) return;
    const Sizes& s = in.sizes;
    std::tie(grad_Q, grad_D) = new_gradients(Q, in, need_grad_Q, need_grad_D);
    const bool blocks = plan.parts == Parts::blocks;
    if (plan.parts == Parts::documents || (blocks && need_grad_Q)) {
      sums = sums_in_place ? grad_Q : new_tensor(Q, {s.Nq, s.Lq, s.d}, sum_type);
    }
    if (blocks && need_grad_D && !sums_in_place)
      d_sums = new_tensor(Q, {plan.documents, s.Ld, s.d}, sum_type);
    allocated = true;
  }

  // Finds the winners of a part, then gradients.
  void run_part(const Part& x, bool to_Q, bool to_D) {
    const auto of_queries = [&](const auto& t) { return part_of(t, x.first_query, x.queries); };
    const auto of_documents = [&](const auto& t) {
      return in_batch() ? part_of(t, x.first_document, x.documents) : of_queries(t);
    };
    const Tensor part_Q = of_queries(Q), part_D = of_documents(D);
    const OptionalTensor part_q_mask = of_queries(q_mask), part_d_mask = of_documents(d_mask);
    const Inputs part = parse_inputs(part_Q, part_D, part_q_mask, part_d_mask, paired);
    const Tensor winners = find_winners(part_Q, part_D, part_q_mask, part_d_mask, part);
    allocate_gradients();
    Tensor grads = of_queries(grad_scores);
    if (x.documents < in.sizes.N) grads = torch::stable::narrow(grads, 1, x.first_document, x.documents);
    const Tensor none = new_tensor(Q, {0}, Q.scalar_type());
    Destinations to{.grad_Q = to_Q ? of_queries(grad_Q) : none,
                    .grad_D = to_D ? of_documents(grad_D) : none,
                    .q_sums = of_queries(sums),
                    .first = x.first_document == 0,
                    .last = x.first_document + x.documents == in.sizes.N};
    if (plan.parts == Parts::blocks && to_D) {
      to.d_sums = sums_in_place ? to.grad_D : part_of(*d_sums, 0, x.documents);
      to.d_first = x.first_query == 0;
      to.d_last = x.first_query + x.queries == in.sizes.Nq;
    }
    backward_into(part, grads, winners, normalize, method, to);
  }

  void run_parts(int64_t queries, int64_t documents, bool to_Q, bool to_D) {
    const Sizes& s = in.sizes;
    for (int64_t j = 0; j < s.N; j += documents) {
      for (int64_t i = 0; i < s.Nq; i += queries) {
        run_part({i, std::min(queries, s.Nq - i), j, std::min(documents, s.N - j)}, to_Q, to_D);
      }
    }
  }
  void run() {
    const Sizes& s = in.sizes;
    if (plan.parts == Parts::none) {
      run_part({0, s.Nq, 0, s.N}, need_grad_Q, need_grad_D);
    } else if (plan.parts == Parts::apart) {
      if (need_grad_Q) run_parts(plan.queries, s.N, true, false);
      if (need_grad_D) run_parts(s.Nq, plan.documents, false, true);
    } else if (plan.parts == Parts::queries || plan.parts == Parts::blocks) {
      run_parts(plan.queries, plan.documents, need_grad_Q, need_grad_D);
    } else {
      run_parts(s.Nq, plan.documents, true, true);
    }
  }
};

std::tuple<Tensor, Tensor> maxsim_backward_recompute(Tensor grad_scores, Tensor Q, Tensor D,
                                                     OptionalTensor q_mask, OptionalTensor d_mask,
                                                     bool normalize, std::string precision,
                                                     std::string backward, bool need_grad_Q, bool need_grad_D,
                                                     bool paired) {
  // A caller who keeps no winners has little memory.
  const Backward method =
      parse_backward(backward) == Backward::unified ? Backward::unified : Backward::lowmem;
  const Inputs in = parse_inputs(Q, D, q_mask, d_mask, paired);
  check_grad_scores(grad_scores, shape_of_scores(in), in.dtype, Q);
  const OnDevice on(Q);
  const OperandConversion how = operand_conversion(in, precision, normalize, on.index);
  Recomputation call{grad_scores, Q,           D,           q_mask, d_mask, normalize,
                     paired,      need_grad_Q, need_grad_D, method, in,     how};
  call.make_plan();
  call.run();
  return {call.grad_Q, call.grad_D};
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("maxsim_backward_recompute", TORCH_BOX(&late_interaction::maxsim_backward_recompute));
}
