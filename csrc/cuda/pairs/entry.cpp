// The CUDA side of the operators on listed pairs. Nothing here waits for the device.
#include <torch/csrc/stable/accelerator.h>

#include <array>

#include "../../common/pair_tensors.h"
#include "../../common/registration.h"
#include "../../plan/pairs.h"
#include "../backward/run.h"
#include "../runtime/device.h"
#include "../runtime/op_helpers.h"
#include "../runtime/stream.h"
#include "../varlen/backward.h"
#include "../varlen/run.h"
#include "index.h"
#include "to_csr.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;

PairSizes sizes_of(const PairInputs& in, int64_t longest_query) {
  const Pairs& p = in.pairs;
  return {p.count, p.queries, p.documents, p.q_tokens, p.d_tokens, in.sizes.d, longest_query};
}

// Scores a work tile a pair, in the order of the list. Inputs are in the dtype of the products.
void score_list(const PairInputs& in, int64_t longest_query, Precision precision, const Tensor& scores,
                const OptionalTensor& winners, cudaStream_t stream) {
  const int64_t pairs = in.pairs.count;
  const Device& device = device_properties(scores.get_device_index());
  const ForwardPlan plan =
      plan_pairs(sizes_of(in, longest_query), traits_of(in, precision, false), winners.has_value(), device);
  const bool shared_out = plan.kernel->takes_shares;
  const int64_t chunks = shared_out ? chunks_of(pairs) : 0, blocks = shared_out ? plan.grid : 0;
  // Rows and spans of pairs, costs of chunks, and ends of blocks, in this order.
  const Tensor workspace = new_tensor(scores, {2 * pairs + chunks + (blocks + 1) / 2}, ScalarType::Long);
  auto* words = static_cast<int64_t*>(workspace.data_ptr());
  PairIndex index{};
  index.pairs = in.pairs;
  index.longest_query = static_cast<int32_t>(longest_query);
  index.rows = reinterpret_cast<Span*>(words);
  index.spans = reinterpret_cast<Span*>(words + pairs);
  index.pdl = device_supports_pdl(scores);
  if (shared_out) {
    index.chunk_costs = words + 2 * pairs;
    index.work_tile_ends = reinterpret_cast<int32_t*>(words + 2 * pairs + chunks);
    index.blocks = blocks;
    index.pair_tokens = plan.tokens / 2 + 16;  // half of the last tile, and the document's end
  }
  if (winners) fill_sentinel(*winners, stream);  // a query may have fewer tokens than there is room for
  check(launch_pair_index(index, stream), "index of pairs");

  PairArgs args{forward_args({.in = in, .precision = precision, .scores = scores, .winners = winners}, plan),
                nullptr, 0};
  args.N = pairs;
  args.scores = scores.data_ptr();
  args.winner_stride = winners ? static_cast<int32_t>(winners->size(1)) : 0;
  args.packed = true;
  args.spans = index.spans;
  args.rows = index.rows;
  args.work_tile_ends = index.work_tile_ends;
  check(ForwardInstance<PairArgs>::launch({args, plan, stream}), "forward");
}

// True if there is nothing to multiply, though pairs are listed. (The kernel of fp64 needs no tokens.)
bool is_empty(const PairInputs& in) {
  const bool none = in.sizes.Lq == 0 || in.sizes.Ld == 0 || in.pairs.queries == 0 || in.pairs.documents == 0;
  return in.dtype != Dtype::fp64 && none;
}

struct Scored {
  Tensor scores;
  OptionalTensor winners;
};

PairPick pick_to(const PairInputs& in, int64_t longest_query, const Scored& to) {
  PairPick pick{};
  pick.pairs = in.pairs;
  pick.longest_query = static_cast<int32_t>(longest_query);
  pick.scores = static_cast<float*>(to.scores.data_ptr());
  pick.winners = to.winners ? to.winners->data_ptr() : nullptr;
  pick.wide_winners = wide_winners(in.sizes.Ld);
  pick.winner_stride = to.winners ? static_cast<int32_t>(to.winners->size(1)) : 0;
  pick.pdl = device_supports_pdl(to.scores);
  return pick;
}

// Scores every query with every document, and picks the listed pairs of them.
void pick_from_grid(const PairInputs& in, Precision precision, PairPick pick, const Tensor& like) {
  const Tensor grid = new_tensor(like, {in.pairs.queries, in.pairs.documents}, ScalarType::Float);
  OptionalTensor winners;
  if (pick.winners != nullptr) {
    winners = new_tensor(like, {in.sizes.N, in.sizes.Lq}, winner_type(in.sizes.Ld));
  }
  const PackedScores made = score_packed(
      {.in = in, .precision = precision, .scores = grid, .winners = winners}, mean_document(in.sizes));
  pick.grid = static_cast<const float*>(made.sums.const_data_ptr());
  pick.grid_winners = made.args.winners;
  pick.partial_rows = made.partial_rows;
  const int device = like.get_device_index();
  check(launch_pick_pairs(pick, device_properties(device), current_stream(device)), "picked pairs");
}

// Inputs are in the dtype of the products.
void score_into(const PairInputs& in, int64_t longest_query, Precision precision, const Scored& to) {
  const cudaStream_t stream = current_stream(to.scores.get_device_index());
  if (is_empty(in)) {
    const Device& device = device_properties(to.scores.get_device_index());
    check(launch_pick_pairs(pick_to(in, longest_query, to), device, stream), "empty pairs");
  } else if (!in.pairs.scattered && score_as_grid(sizes_of(in, longest_query), in.dtype)) {
    pick_from_grid(in, precision, pick_to(in, longest_query, to), to.scores);
  } else {
    score_list(in, longest_query, precision, to.scores, to.winners, stream);
  }
}

// parse(Q, D): the inputs. winner_stride: room for each pair's winners; none: no winners.
template <class Parse>
Scored score(const Tensor& Q, const Tensor& D, Parse parse, std::optional<int64_t> longest_query,
             std::optional<int64_t> winner_stride, const std::string& precision_name) {
  const Precision precision = parse_precision(precision_name);
  const PairInputs in = parse(Q, D);
  STD_TORCH_CHECK(longest_query.value_or(0) >= 0, "late_interaction: max_seqlen_q must not be negative");
  const DeviceGuard guard(Q.get_device_index());
  const int64_t longest = std::min<int64_t>(longest_query.value_or(in.sizes.Lq), in.sizes.Lq);
  Scored out{new_tensor(Q, {in.pairs.count}, score_type(in.dtype)), std::nullopt};
  if (winner_stride) {
    check_winner_stride(in, *winner_stride);
    out.winners = new_tensor(Q, {in.pairs.count, *winner_stride}, winner_type(in.sizes.Ld));
  }
  if (in.pairs.count == 0) return out;
  if (const auto type = converted(in.dtype, precision)) {
    const Tensor half_Q = torch::stable::to(Q, *type), half_D = torch::stable::to(D, *type);
    score_into(parse(half_Q, half_D), longest, precision, out);
  } else {
    score_into(in, longest, precision, out);
  }
  return out;
}

// The parse of score() for packed tokens; weights: of the query tokens, or none.
auto parser(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d, const Tensor& pair_q,
            const Tensor& pair_d, const Tensor* weights = nullptr) {
  return [&, weights](const Tensor& Q, const Tensor& D) {
    PairInputs in = parse_pairs(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
    if (weights != nullptr) take_weights(in, *weights, Q);
    return in;
  };
}

Tensor maxsim_pairs_packed(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d, Tensor pair_q,
                           Tensor pair_d, std::optional<int64_t> max_seqlen_q, std::string precision) {
  const auto parse = parser(cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
  return score(Q, D, parse, max_seqlen_q, std::nullopt, precision).scores;
}

std::tuple<Tensor, Tensor> maxsim_pairs_packed_winners(Tensor Q, Tensor D, Tensor cu_seqlens_q,
                                                       Tensor cu_seqlens_d, Tensor pair_q, Tensor pair_d,
                                                       int64_t max_seqlen_q, std::string precision) {
  const auto parse = parser(cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
  const Scored out = score(Q, D, parse, max_seqlen_q, max_seqlen_q, precision);
  return {out.scores, *out.winners};
}

Tensor maxsim_pairs_packed_weighted(Tensor Q, Tensor D, Tensor q_weights, Tensor cu_seqlens_q,
                                    Tensor cu_seqlens_d, Tensor pair_q, Tensor pair_d,
                                    std::optional<int64_t> max_seqlen_q, std::string precision) {
  const auto parse = parser(cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, &q_weights);
  return score(Q, D, parse, max_seqlen_q, std::nullopt, precision).scores;
}

std::tuple<Tensor, Tensor> maxsim_pairs_packed_weighted_winners(Tensor Q, Tensor D, Tensor q_weights,
                                                                Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                                                                Tensor pair_q, Tensor pair_d,
                                                                int64_t max_seqlen_q, std::string precision) {
  const auto parse = parser(cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, &q_weights);
  const Scored out = score(Q, D, parse, max_seqlen_q, max_seqlen_q, precision);
  return {out.scores, *out.winners};
}

Tensor maxsim_spans(Tensor Q, Tensor D, Tensor starts, Tensor lengths, std::string precision) {
  const auto parse = [&](const Tensor& q, const Tensor& d) { return parse_spans(q, d, starts, lengths); };
  return score(Q, D, parse, std::nullopt, std::nullopt, precision).scores;
}

// ---- backward ----

// The pairs sorted by name (query or document), and where each name's pairs begin.
class Csr {
 public:
  Csr(const Tensor& names, int64_t count, cudaStream_t stream)
      : begins(new_tensor(names, {count + 1}, ScalarType::Int)) {
    const int64_t pairs = names.size(0), workspace = counting_buffer_size(pairs, count);
    auto* first = static_cast<int32_t*>(begins.data_ptr());
    if (workspace == 0) {
      const auto [sorted, order_data] = sort(names);
      order = order_data;
      const auto* keys = static_cast<const int32_t*>(sorted.const_data_ptr());
      check(launch_csr_of_sorted(keys, pairs, count, first, stream), "order of pairs");
      return;
    }
    order = new_tensor(names, {pairs}, ScalarType::Long);
    const Tensor counts = new_tensor(names, {workspace}, ScalarType::Int);
    const PairsCsr csr{.names = static_cast<const int32_t*>(names.const_data_ptr()),
                       .pairs = pairs,
                       .count = count,
                       .order = static_cast<int64_t*>(order.data_ptr()),
                       .begins = first,
                       .counts = static_cast<int32_t*>(counts.data_ptr()),
                       .pdl = device_supports_pdl(names)};
    check(launch_csr_by_counting(csr, stream), "order of pairs");
  }

  const int64_t* order_data() const { return static_cast<const int64_t*>(order.const_data_ptr()); }
  const int32_t* first() const { return static_cast<const int32_t*>(begins.const_data_ptr()); }

 private:
  Tensor order, begins;

  // Sorts names stably, and returns the original indices too.
  static std::tuple<Tensor, Tensor> sort(const Tensor& names) {
    using torch::stable::detail::from;
    using torch::stable::detail::to;
    std::array<StableIValue, 4> stack{from(names), from(std::optional<bool>(true)), from(int64_t{0}),
                                      from(false)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
    return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
  }
};

void pair_gradients(const PairInputs& in, const Tensor& pair_q, const Tensor& pair_d,
                    const Tensor& grad_scores, const Tensor& winners, const PackedGradients& grads) {
  const Sizes& s = in.sizes;
  const int device = winners.get_device_index();
  const cudaStream_t stream = current_stream(device);
  if (winners.numel() == 0 || s.Lq == 0 || s.Ld == 0 || s.d == 0 || s.N == 0 || in.pairs.queries == 0) {
    return grads.clear(stream);
  }
  const int64_t stride = winners.size(1);
  const BackwardPlan plan = plan_pairs_backward(sizes_of(in, stride), stride, in.dtype, reads_in_vectors(in),
                                                device_properties(device));
  const Csr by_query(pair_q, in.pairs.queries, stream), by_document(pair_d, s.N, stream);
  PairBackwardArgs args{};
  args.layout = Layout::in_batch;
  args.N = s.N;
  args.Nq = 1;
  args.Lq = static_cast<int32_t>(stride);
  args.Ld = static_cast<int32_t>(s.Ld);
  args.d = static_cast<int32_t>(s.d);
  args.by_Lq = Divider(static_cast<uint32_t>(stride));
  args.grad = grad_scores.const_data_ptr();
  args.grad_item_stride = grad_scores.stride(0);
  args.winners = winners.const_data_ptr();
  args.wide_winners = wide_winners(s.Ld);
  args.winners_at_once = winners_at_once(args.winners, stride, s.Ld);
  args.queries = static_cast<int32_t>(in.pairs.queries);
  args.q_tokens = in.pairs.q_tokens;
  args.q_offsets = in.pairs.q_offsets;
  args.pair_query = in.pairs.query;
  args.pair_document = in.pairs.document;
  args.by_query = by_query.order_data();
  args.query_begins = by_query.first();
  args.by_document = by_document.order_data();
  args.document_begins = by_document.first();
  launch_packed(in, plan, args, grads, stream);
}

std::tuple<Tensor, Tensor> maxsim_pairs_packed_backward(Tensor grad_scores, Tensor Q, Tensor D,
                                                        Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                                                        Tensor pair_q, Tensor pair_d, Tensor winners,
                                                        bool need_grad_Q, bool need_grad_D) {
  const PairInputs in = parser(cu_seqlens_q, cu_seqlens_d, pair_q, pair_d)(Q, D);
  check_pair_backward_inputs(grad_scores, Q, winners, in);
  const DeviceGuard guard(Q.get_device_index());
  const PackedGradients grads(Q, D, need_grad_Q, need_grad_D);
  pair_gradients(in, pair_q, pair_d, grad_scores, winners, grads);
  return {grads.Q, grads.D};
}

// grad_Q and grad_weights are needed together.
std::tuple<Tensor, Tensor, Tensor> maxsim_pairs_packed_weighted_backward(
    Tensor grad_scores, Tensor Q, Tensor D, Tensor q_weights, Tensor cu_seqlens_q, Tensor cu_seqlens_d,
    Tensor pair_q, Tensor pair_d, Tensor winners, bool need_grad_Q, bool need_grad_D) {
  const PairInputs in = parser(cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, &q_weights)(Q, D);
  check_pair_backward_inputs(grad_scores, Q, winners, in);
  const DeviceGuard guard(Q.get_device_index());
  PackedGradients grads(Q, D, need_grad_Q, need_grad_D);
  grads.weights = new_tensor(Q, {need_grad_Q ? in.sizes.Lq : 0}, score_type(in.dtype));
  pair_gradients(in, pair_q, pair_d, grad_scores, winners, grads);
  return {grads.Q, grads.D, *grads.weights};
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("maxsim_pairs_packed", TORCH_BOX(&late_interaction::maxsim_pairs_packed));
  m.impl("maxsim_pairs_packed_winners", TORCH_BOX(&late_interaction::maxsim_pairs_packed_winners));
  m.impl("maxsim_pairs_packed_backward", TORCH_BOX(&late_interaction::maxsim_pairs_packed_backward));
  m.impl("maxsim_pairs_packed_weighted", TORCH_BOX(&late_interaction::maxsim_pairs_packed_weighted));
  m.impl("maxsim_pairs_packed_weighted_winners",
         TORCH_BOX(&late_interaction::maxsim_pairs_packed_weighted_winners));
  m.impl("maxsim_pairs_packed_weighted_backward",
         TORCH_BOX(&late_interaction::maxsim_pairs_packed_weighted_backward));
  m.impl("maxsim_spans", TORCH_BOX(&late_interaction::maxsim_spans));
}
