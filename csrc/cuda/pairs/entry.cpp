// The CUDA side of the operators on listed pairs. Nothing here waits for the device.
#include <array>

#include "../../common/forms.h"
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

namespace late_interaction {

namespace {

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

PairPick pick_to(const PairInputs& in, int64_t longest_query, const Tensor& scores,
                 const OptionalTensor& winners) {
  PairPick pick{};
  pick.pairs = in.pairs;
  pick.longest_query = static_cast<int32_t>(longest_query);
  pick.scores = static_cast<float*>(scores.data_ptr());
  pick.winners = winners ? winners->data_ptr() : nullptr;
  pick.wide_winners = wide_winners(in.sizes.Ld);
  pick.winner_stride = winners ? static_cast<int32_t>(winners->size(1)) : 0;
  pick.pdl = device_supports_pdl(scores);
  return pick;
}

// Scores every query with every document, and picks the listed pairs of them.
void pick_from_grid(const PairInputs& in, Precision precision, PairPick pick, const Tensor& like) {
  const Tensor grid = new_tensor(like, {in.pairs.queries, in.pairs.documents}, ScalarType::Float);
  OptionalTensor winners;
  if (pick.winners != nullptr) {
    winners = new_tensor(like, {in.sizes.N, in.sizes.Lq}, winner_type(in.sizes.Ld));
  }
  const PackedScores made =
      score_packed({.in = in, .precision = precision, .scores = grid, .winners = winners}, in.sizes);
  pick.grid = static_cast<const float*>(made.sums.const_data_ptr());
  pick.grid_winners = made.args.winners;
  pick.partial_rows = made.partial_rows;
  const int device = like.get_device_index();
  check(launch_pick_pairs(pick, device_properties(device), current_stream(device)), "picked pairs");
}

// Inputs are in the dtype of the products.
void score_into(const PairInputs& in, int64_t longest_query, Precision precision, const Tensor& scores,
                const OptionalTensor& winners, const OnDevice& on) {
  if (is_empty(in)) {
    const PairPick pick = pick_to(in, longest_query, scores, winners);
    check(launch_pick_pairs(pick, on.properties(), on.stream()), "empty pairs");
  } else if (!in.pairs.scattered && score_as_grid(sizes_of(in, longest_query), in.dtype)) {
    pick_from_grid(in, precision, pick_to(in, longest_query, scores, winners), scores);
  } else {
    score_list(in, longest_query, precision, scores, winners, on.stream());
  }
}

// parse(Q, D): the inputs. Winners have room for max_seqlen_q query tokens.
template <class Parse>
ScoresAndWinners score(const Tensor& Q, const Tensor& D, Parse parse, bool want_winners,
                       std::optional<int64_t> max_seqlen_q, const std::string& precision_name) {
  const Precision precision = parse_precision(precision_name);
  const PairInputs in = parse(Q, D);
  STD_TORCH_CHECK(max_seqlen_q.value_or(0) >= 0, "late_interaction: max_seqlen_q must not be negative");
  const OnDevice on(Q);
  const int64_t longest_query = std::min<int64_t>(max_seqlen_q.value_or(in.sizes.Lq), in.sizes.Lq);
  const Tensor scores = new_tensor(Q, {in.pairs.count}, score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) {
    check_winner_stride(in, *max_seqlen_q);
    winners = new_tensor(Q, {in.pairs.count, *max_seqlen_q}, winner_type(in.sizes.Ld));
  }
  if (in.pairs.count == 0) return {scores, winners};
  if (const auto type = converted(in.dtype, precision)) {
    const Tensor half_Q = torch::stable::to(Q, *type), half_D = torch::stable::to(D, *type);
    score_into(parse(half_Q, half_D), longest_query, precision, scores, winners, on);
  } else {
    score_into(in, longest_query, precision, scores, winners, on);
  }
  return {scores, winners};
}

// Parameters: the operators'.
ScoresAndWinners score_listed(const Tensor& Q, const Tensor& D, const Tensor* weights, bool want_winners,
                              const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d, const Tensor& pair_q,
                              const Tensor& pair_d, std::optional<int64_t> max_seqlen_q,
                              const std::string& precision) {
  const auto parse = [&](const Tensor& q, const Tensor& d) {
    return parse_pairs(q, d, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, weights);
  };
  return score(Q, D, parse, want_winners, max_seqlen_q, precision);
}

Tensor maxsim_spans(Tensor Q, Tensor D, Tensor starts, Tensor lengths, std::string precision) {
  const auto parse = [&](const Tensor& q, const Tensor& d) { return parse_spans(q, d, starts, lengths); };
  return std::get<0>(score(Q, D, parse, false, std::nullopt, precision));
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
  take_winners(args, {Layout::in_batch, 1, s.N, stride, s.Ld, s.d}, grad_scores, winners);
  args.grad_item_stride = grad_scores.stride(0);  // of pairs
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

// Parameters: the operators'. The gradients of weights come with that of Q.
Gradients gradients(const Tensor& grad_scores, const Tensor& Q, const Tensor& D, const Tensor* weights,
                    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d, const Tensor& pair_q,
                    const Tensor& pair_d, const Tensor& winners, bool need_grad_Q, bool need_grad_D) {
  const PairInputs in = parse_pairs(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, weights);
  check_pair_backward_inputs(grad_scores, Q, winners, in);
  const OnDevice on(Q);
  const PackedGradients grads(Q, D, weights, need_grad_Q, need_grad_D);
  pair_gradients(in, pair_q, pair_d, grad_scores, winners, grads);
  return {grads.Q, grads.D, grads.weights};
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  using namespace late_interaction;
  ScoreForms<&score_listed>::add_to(m, "maxsim_pairs_packed");
  GradientForms<&gradients>::add_to(m, "maxsim_pairs_packed");
  m.impl("maxsim_spans", TORCH_BOX(&maxsim_spans));
}
