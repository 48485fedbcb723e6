// The CPU side of the operators in csrc/ops.cpp: tensors in, plain calls out.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../common/packed_codes_tensors.h"
#include "../common/pooling_tensors.h"
#include "../common/registration.h"
#include "../common/tensors.h"
#include "../common/xtr_tensors.h"
#include "backward.h"
#include "forward.h"
#include "kernels.h"
#include "pairs.h"
#include "pooling.h"
#include "xtr.h"

namespace late_interaction::cpu {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Fills a call with the sizes, views and masks of parsed tensors.
template <class Call>
Call call_of(const Inputs& in) {
  Call call;
  call.sizes = in.sizes;
  call.packed = in.packed;
  call.dtype = in.dtype;
  call.Q = in.Q;
  if (in.packed && in.packed->q_offsets) call.Q.item_stride = 0;  // offsets say where queries begin
  call.D = in.D;
  call.q_weights = in.q_weights;
  if constexpr (std::is_same_v<Call, ForwardCall>) {
    call.q_mask = in.q_mask;
    call.d_mask = in.d_mask;
  }
  return call;
}

// Parameters: the operators'. weights: of the query tokens; null: none.
std::tuple<Tensor, Tensor> score(const Tensor& Q, const Tensor& D, const Tensor* weights,
                                 const OptionalTensor& q_mask, const OptionalTensor& d_mask, bool normalize,
                                 const std::string& precision, const std::string& backward, bool paired,
                                 bool with_winners) {
  Inputs in = parse_inputs(Q, D, q_mask, d_mask, paired);
  if (weights != nullptr) take_weights(in, *weights, Q);
  parse_backward(backward);
  auto call = call_of<ForwardCall>(in);
  call.precision = parse_precision(precision);
  call.normalize = normalize;
  Tensor scores = new_tensor(Q, shape_of_scores(in), score_type(in.dtype));
  call.scores = scores.mutable_data_ptr();
  if (!with_winners) {
    forward(call);
    return {scores, scores};
  }
  Tensor winners = new_tensor(Q, shape_of_winners(in), winner_type(in.sizes.Ld));
  call.winners = winners.mutable_data_ptr();
  forward(call);
  return {scores, winners};
}

Tensor maxsim(Tensor Q, Tensor D, OptionalTensor q_mask, OptionalTensor d_mask, bool normalize,
              std::string precision, std::string backward, bool paired) {
  return std::get<0>(score(Q, D, nullptr, q_mask, d_mask, normalize, precision, backward, paired, false));
}

std::tuple<Tensor, Tensor> maxsim_winners(Tensor Q, Tensor D, OptionalTensor q_mask, OptionalTensor d_mask,
                                          bool normalize, std::string precision, std::string backward,
                                          bool paired) {
  return score(Q, D, nullptr, q_mask, d_mask, normalize, precision, backward, paired, true);
}

Tensor maxsim_weighted(Tensor Q, Tensor D, Tensor q_weights, OptionalTensor q_mask, OptionalTensor d_mask,
                       bool normalize, std::string precision, std::string backward, bool paired) {
  return std::get<0>(score(Q, D, &q_weights, q_mask, d_mask, normalize, precision, backward, paired, false));
}

std::tuple<Tensor, Tensor> maxsim_weighted_winners(Tensor Q, Tensor D, Tensor q_weights,
                                                   OptionalTensor q_mask, OptionalTensor d_mask,
                                                   bool normalize, std::string precision,
                                                   std::string backward, bool paired) {
  return score(Q, D, &q_weights, q_mask, d_mask, normalize, precision, backward, paired, true);
}

// Fills winners with the sentinel, all bits set: no call writes winners of tokens that belong to no query. An
// empty tensor has a null pointer, which memset must not be given.
void fill_with_sentinel(Tensor& winners) {
  if (winners.numel() == 0) return;
  std::memset(winners.mutable_data_ptr(), 0xFF, winners.numel() * winners.element_size());
}

// On the CPU what offsets say can be looked at.
void check_offsets(const int32_t* offsets, int64_t sequences, int64_t tokens, const char* name) {
  int64_t before = 0;
  for (int64_t i = 0; i <= sequences; ++i) {
    STD_TORCH_CHECK(before <= offsets[i] && offsets[i] <= tokens, "late_interaction: ", name,
                    " must not decrease and lie within [0, ", tokens, "], got ", name, "[", i,
                    "] = ", offsets[i], " after ", before);
    before = offsets[i];
  }
}

Inputs parse_checked(const Tensor& Q, const Tensor& D, const Tensor& cu_seqlens_q,
                     const Tensor& cu_seqlens_d) {
  const Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  check_offsets(in.packed->q_offsets, in.packed->queries, in.sizes.Lq, "cu_seqlens_q");
  check_offsets(in.packed->d_offsets, in.sizes.N, in.sizes.Ld, "cu_seqlens_d");
  return in;
}

std::tuple<Tensor, Tensor> score_varlen(const Tensor& Q, const Tensor& D, const Tensor* weights,
                                        const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d,
                                        const std::string& precision, bool with_winners) {
  Inputs in = parse_checked(Q, D, cu_seqlens_q, cu_seqlens_d);
  if (weights != nullptr) take_weights(in, *weights, Q);
  auto call = call_of<ForwardCall>(in);
  call.sizes.Nq = in.packed->queries;
  call.precision = parse_precision(precision);
  Tensor scores = new_tensor(Q, {in.packed->queries, in.sizes.N}, score_type(in.dtype));
  call.scores = scores.mutable_data_ptr();
  if (!with_winners) {
    forward(call);
    return {scores, scores};
  }
  Tensor winners = new_tensor(Q, {in.sizes.N, in.sizes.Lq}, winner_type(in.sizes.Ld));
  fill_with_sentinel(winners);
  call.winners = winners.mutable_data_ptr();
  forward(call);
  return {scores, winners};
}

Tensor maxsim_varlen(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d, std::string precision) {
  return std::get<0>(score_varlen(Q, D, nullptr, cu_seqlens_q, cu_seqlens_d, precision, false));
}

std::tuple<Tensor, Tensor> maxsim_varlen_winners(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                                                 std::string precision) {
  return score_varlen(Q, D, nullptr, cu_seqlens_q, cu_seqlens_d, precision, true);
}

Tensor maxsim_varlen_weighted(Tensor Q, Tensor D, Tensor q_weights, Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                              std::string precision) {
  return std::get<0>(score_varlen(Q, D, &q_weights, cu_seqlens_q, cu_seqlens_d, precision, false));
}

std::tuple<Tensor, Tensor> maxsim_varlen_weighted_winners(Tensor Q, Tensor D, Tensor q_weights,
                                                          Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                                                          std::string precision) {
  return score_varlen(Q, D, &q_weights, cu_seqlens_q, cu_seqlens_d, precision, true);
}

// Scores of integers or 8-bit floats, whose call says how they multiply.
Tensor score_codes(ForwardCall call, const Tensor& Q) {
  if (call.packed) check_offsets(call.packed->d_offsets, call.sizes.N, call.sizes.Ld, "cu_seqlens_d");
  Tensor scores = new_tensor(Q, {call.sizes.Nq, call.sizes.N}, ScalarType::Float);
  call.scores = scores.mutable_data_ptr();
  forward(call);
  return scores;
}

Tensor score_scaled_codes(const QuantizedInputs& in, int d_bits, const Tensor& Q) {
  auto call = call_of<ForwardCall>(in);
  call.d_bits = d_bits;
  call.q_scale = in.q_scale;
  call.d_scale = in.d_scale;
  return score_codes(call, Q);
}

Tensor maxsim_quantized(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                        OptionalTensor d_mask) {
  return score_scaled_codes(parse_quantized_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask), 0, Q);
}

Tensor maxsim_asymmetric(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                         OptionalTensor d_mask, int64_t nbits) {
  const QuantizedInputs in = parse_asymmetric_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask, nbits);
  return score_scaled_codes(in, static_cast<int>(nbits), Q);
}

Tensor maxsim_hamming(Tensor Q, Tensor D, int64_t d, OptionalTensor q_mask, OptionalTensor d_mask) {
  auto call = call_of<ForwardCall>(parse_hamming_inputs(Q, D, d, q_mask, d_mask));
  call.compared_bits = d;
  return score_codes(call, Q);
}

Tensor maxsim_quantized_packed(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                               Tensor cu_seqlens_d) {
  const QuantizedInputs in = parse_quantized_packed_inputs(Q, D, scale_Q, scale_D, q_mask, cu_seqlens_d);
  return score_scaled_codes(in, 0, Q);
}

Tensor maxsim_asymmetric_packed(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                                Tensor cu_seqlens_d, int64_t nbits) {
  const QuantizedInputs in =
      parse_asymmetric_packed_inputs(Q, D, scale_Q, scale_D, q_mask, cu_seqlens_d, nbits);
  return score_scaled_codes(in, static_cast<int>(nbits), Q);
}

Tensor maxsim_hamming_packed(Tensor Q, Tensor D, int64_t d, OptionalTensor q_mask, Tensor cu_seqlens_d) {
  auto call = call_of<ForwardCall>(parse_hamming_packed_inputs(Q, D, d, q_mask, cu_seqlens_d));
  call.compared_bits = d;
  return score_codes(call, Q);
}

// The gradients of Q, D and the weights of Q; dense Q without weights has no tensor for the last. One without
// elements was not asked for.
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// Parameters: the operators'. Every strategy is the one deterministic kernel of backward.cpp.
Gradients dense_gradients(const Tensor& grad_scores, const Tensor& Q, const Tensor& D, const Tensor* weights,
                          const Tensor& winners, bool normalize, const std::string& backward_name,
                          bool need_grad_Q, bool need_grad_D, bool paired, bool need_grad_weights = true) {
  Inputs in = parse_inputs(Q, D, std::nullopt, std::nullopt, paired);
  if (weights != nullptr) take_weights(in, *weights, Q);
  parse_backward(backward_name);
  check_backward_inputs(grad_scores, Q, winners, in);
  const std::vector<int64_t> none{0}, tokens{in.sizes.Nq, in.sizes.Lq};
  Tensor grad_Q = new_tensor(Q, need_grad_Q ? shape_of_queries(in) : none, Q.scalar_type());
  Tensor grad_D = new_tensor(Q, need_grad_D ? shape_of_documents(in) : none, Q.scalar_type());
  const bool need_weights = weights != nullptr && need_grad_Q && need_grad_weights;
  Tensor grad_weights;
  if (weights != nullptr) grad_weights = new_tensor(Q, need_weights ? tokens : none, score_type(in.dtype));

  auto call = call_of<BackwardCall>(in);
  call.grad_weights = need_weights ? grad_weights.mutable_data_ptr() : nullptr;
  call.normalize = normalize;
  call.grad_scores = grad_scores.const_data_ptr();
  call.grad_query_stride = grad_scores.stride(0);
  call.grad_item_stride = paired ? 0 : grad_scores.stride(1);
  call.winners = winners.const_data_ptr();
  call.grad_Q = need_grad_Q ? grad_Q.mutable_data_ptr() : nullptr;
  call.grad_D = need_grad_D ? grad_D.mutable_data_ptr() : nullptr;
  backward(call);
  return {grad_Q, grad_D, grad_weights};
}

std::tuple<Tensor, Tensor> maxsim_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor winners,
                                           bool normalize, std::string backward_name, bool need_grad_Q,
                                           bool need_grad_D, bool paired) {
  const auto [grad_Q, grad_D, _] = dense_gradients(grad_scores, Q, D, nullptr, winners, normalize,
                                                   backward_name, need_grad_Q, need_grad_D, paired);
  return {grad_Q, grad_D};
}

Gradients maxsim_weighted_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor q_weights, Tensor winners,
                                   bool normalize, std::string backward_name, bool need_grad_Q,
                                   bool need_grad_D, bool paired, bool need_grad_weights) {
  return dense_gradients(grad_scores, Q, D, &q_weights, winners, normalize, backward_name, need_grad_Q,
                         need_grad_D, paired, need_grad_weights);
}

// Allocates the gradients of packed tokens.
Gradients packed_gradients(const Tensor& Q, const Inputs& in, bool need_grad_Q, bool need_grad_D) {
  const std::vector<int64_t> none{0}, of_Q{in.sizes.Lq, in.sizes.d}, of_D{in.sizes.Ld, in.sizes.d};
  const bool need_weights = in.q_weights.data != nullptr && need_grad_Q;
  return {new_tensor(Q, need_grad_Q ? of_Q : none, Q.scalar_type()),
          new_tensor(Q, need_grad_D ? of_D : none, Q.scalar_type()),
          new_tensor(Q, {need_weights ? in.sizes.Lq : 0}, score_type(in.dtype))};
}

void* data_of(Tensor& x) { return x.numel() > 0 ? x.mutable_data_ptr() : nullptr; }

// Parameters: the operators'.
Gradients varlen_gradients(const Tensor& grad_scores, const Tensor& Q, const Tensor& D, const Tensor* weights,
                           const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d, const Tensor& winners,
                           bool need_grad_Q, bool need_grad_D) {
  Inputs in = parse_checked(Q, D, cu_seqlens_q, cu_seqlens_d);
  if (weights != nullptr) take_weights(in, *weights, Q);
  check_varlen_backward_inputs(grad_scores, Q, winners, in);
  auto [grad_Q, grad_D, grad_weights] = packed_gradients(Q, in, need_grad_Q, need_grad_D);
  auto call = call_of<BackwardCall>(in);
  call.grad_weights = data_of(grad_weights);
  call.grad_scores = grad_scores.const_data_ptr();
  call.grad_query_stride = grad_scores.stride(0);
  call.grad_item_stride = grad_scores.stride(1);
  call.winners = winners.const_data_ptr();
  call.grad_Q = data_of(grad_Q);
  call.grad_D = data_of(grad_D);
  backward(call);
  return {grad_Q, grad_D, grad_weights};
}

std::tuple<Tensor, Tensor> maxsim_varlen_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor cu_seqlens_q,
                                                  Tensor cu_seqlens_d, Tensor winners, bool need_grad_Q,
                                                  bool need_grad_D) {
  const auto [grad_Q, grad_D, _] = varlen_gradients(grad_scores, Q, D, nullptr, cu_seqlens_q, cu_seqlens_d,
                                                    winners, need_grad_Q, need_grad_D);
  return {grad_Q, grad_D};
}

Gradients maxsim_varlen_weighted_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor q_weights,
                                          Tensor cu_seqlens_q, Tensor cu_seqlens_d, Tensor winners,
                                          bool need_grad_Q, bool need_grad_D) {
  return varlen_gradients(grad_scores, Q, D, &q_weights, cu_seqlens_q, cu_seqlens_d, winners, need_grad_Q,
                          need_grad_D);
}

std::tuple<Tensor, Tensor> score_listed(const PairInputs& in, const Tensor& Q,
                                        std::optional<int64_t> max_seqlen_q, const std::string& precision,
                                        bool with_winners) {
  if (!in.pairs.scattered) {
    check_offsets(in.pairs.q_offsets, in.pairs.queries, in.sizes.Lq, "cu_seqlens_q");
    check_offsets(in.pairs.d_offsets, in.pairs.documents, in.sizes.Ld, "cu_seqlens_d");
  }
  check_pairs(in, max_seqlen_q.value_or(in.sizes.Lq));
  const int64_t pairs = in.pairs.count, stride = with_winners ? *max_seqlen_q : 0;
  check_winner_stride(in, stride);
  Tensor scores = new_tensor(Q, {pairs}, score_type(in.dtype));
  Tensor winners = new_tensor(Q, {pairs, stride}, winner_type(in.sizes.Ld));
  fill_with_sentinel(winners);
  forward_pairs(in, parse_precision(precision), scores.mutable_data_ptr(),
                with_winners ? winners.mutable_data_ptr() : nullptr, stride);
  return {scores, winners};
}

Tensor maxsim_pairs_packed(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d, Tensor pair_q,
                           Tensor pair_d, std::optional<int64_t> max_seqlen_q, std::string precision) {
  const PairInputs in = parse_pairs(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
  return std::get<0>(score_listed(in, Q, max_seqlen_q, precision, false));
}

std::tuple<Tensor, Tensor> maxsim_pairs_packed_winners(Tensor Q, Tensor D, Tensor cu_seqlens_q,
                                                       Tensor cu_seqlens_d, Tensor pair_q, Tensor pair_d,
                                                       int64_t max_seqlen_q, std::string precision) {
  const PairInputs in = parse_pairs(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
  return score_listed(in, Q, max_seqlen_q, precision, true);
}

Tensor maxsim_pairs_packed_weighted(Tensor Q, Tensor D, Tensor q_weights, Tensor cu_seqlens_q,
                                    Tensor cu_seqlens_d, Tensor pair_q, Tensor pair_d,
                                    std::optional<int64_t> max_seqlen_q, std::string precision) {
  PairInputs in = parse_pairs(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
  take_weights(in, q_weights, Q);
  return std::get<0>(score_listed(in, Q, max_seqlen_q, precision, false));
}

std::tuple<Tensor, Tensor> maxsim_pairs_packed_weighted_winners(Tensor Q, Tensor D, Tensor q_weights,
                                                                Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                                                                Tensor pair_q, Tensor pair_d,
                                                                int64_t max_seqlen_q, std::string precision) {
  PairInputs in = parse_pairs(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
  take_weights(in, q_weights, Q);
  return score_listed(in, Q, max_seqlen_q, precision, true);
}

Gradients pair_gradients(const PairInputs& in, const Tensor& grad_scores, const Tensor& Q,
                         const Tensor& winners, bool need_grad_Q, bool need_grad_D) {
  check_offsets(in.pairs.q_offsets, in.pairs.queries, in.sizes.Lq, "cu_seqlens_q");
  check_offsets(in.pairs.d_offsets, in.pairs.documents, in.sizes.Ld, "cu_seqlens_d");
  check_pairs(in, in.sizes.Lq);
  check_pair_backward_inputs(grad_scores, Q, winners, in);
  auto [grad_Q, grad_D, grad_weights] = packed_gradients(Q, in, need_grad_Q, need_grad_D);
  backward_pairs(in, {.grad_scores = grad_scores.const_data_ptr(),
                      .grad_stride = grad_scores.stride(0),
                      .winners = winners.const_data_ptr(),
                      .winner_stride = winners.size(1),
                      .grad_Q = data_of(grad_Q),
                      .grad_D = data_of(grad_D),
                      .grad_weights = data_of(grad_weights)});
  return {grad_Q, grad_D, grad_weights};
}

std::tuple<Tensor, Tensor> maxsim_pairs_packed_backward(Tensor grad_scores, Tensor Q, Tensor D,
                                                        Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                                                        Tensor pair_q, Tensor pair_d, Tensor winners,
                                                        bool need_grad_Q, bool need_grad_D) {
  const PairInputs in = parse_pairs(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
  const auto [grad_Q, grad_D, _] = pair_gradients(in, grad_scores, Q, winners, need_grad_Q, need_grad_D);
  return {grad_Q, grad_D};
}

Gradients maxsim_pairs_packed_weighted_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor q_weights,
                                                Tensor cu_seqlens_q, Tensor cu_seqlens_d, Tensor pair_q,
                                                Tensor pair_d, Tensor winners, bool need_grad_Q,
                                                bool need_grad_D) {
  PairInputs in = parse_pairs(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
  take_weights(in, q_weights, Q);
  return pair_gradients(in, grad_scores, Q, winners, need_grad_Q, need_grad_D);
}

Tensor maxsim_spans(Tensor Q, Tensor D, Tensor starts, Tensor lengths, std::string precision) {
  return std::get<0>(score_listed(parse_spans(Q, D, starts, lengths), Q, std::nullopt, precision, false));
}

void xtr_select_(Tensor similarities, OptionalTensor d_mask, int64_t Ld, int64_t k, bool zero_unless_all,
                 Tensor maxima, Tensor winners) {
  select(parse_xtr_selection(similarities, d_mask, Ld, k, zero_unless_all, maxima, winners));
}

void ward_cut_(Tensor similarities, Tensor cu_seqlens, Tensor clusters, int64_t longest, Tensor labels,
               Tensor found) {
  const WardCut call = parse_ward_cut(similarities, cu_seqlens, clusters, longest, labels, found);
  check_offsets(call.offsets, call.documents, labels.size(0), "cu_seqlens");
  int64_t cells = 0;
  for (int64_t i = 0; i < call.documents; ++i) {
    const int64_t n = call.offsets[i + 1] - call.offsets[i];
    STD_TORCH_CHECK(call.clusters[i] >= std::min<int64_t>(n, 1),
                    "late_interaction: clusters must be at least 1, got ", call.clusters[i]);
    STD_TORCH_CHECK(n <= longest, "late_interaction: longest must be at least ", n, ", got ", longest);
    cells += n * n;
  }
  STD_TORCH_CHECK(similarities.size(0) == cells, "late_interaction: similarities must be [", cells,
                  "], the squares of the documents' lengths, got [", similarities.size(0), "]");
  STD_TORCH_CHECK(cut_ward(call), "late_interaction: similarities must not be NaN");
}

// For tests: forces the kernels of one instruction set.
std::string cpu_isa(std::string force) { return force_isa(force); }

}  // namespace
}  // namespace late_interaction::cpu

LATE_INTERACTION_LIBRARY_IMPL(CPU, m) {
  m.impl("maxsim", TORCH_BOX(&late_interaction::cpu::maxsim));
  m.impl("maxsim_no_autograd", TORCH_BOX(&late_interaction::cpu::maxsim));
  m.impl("maxsim_winners", TORCH_BOX(&late_interaction::cpu::maxsim_winners));
  m.impl("maxsim_winners_no_autograd", TORCH_BOX(&late_interaction::cpu::maxsim_winners));
  m.impl("maxsim_backward", TORCH_BOX(&late_interaction::cpu::maxsim_backward));
  m.impl("maxsim_backward_no_autograd", TORCH_BOX(&late_interaction::cpu::maxsim_backward));
  m.impl("maxsim_quantized", TORCH_BOX(&late_interaction::cpu::maxsim_quantized));
  m.impl("maxsim_asymmetric", TORCH_BOX(&late_interaction::cpu::maxsim_asymmetric));
  m.impl("maxsim_hamming", TORCH_BOX(&late_interaction::cpu::maxsim_hamming));
  m.impl("maxsim_quantized_packed", TORCH_BOX(&late_interaction::cpu::maxsim_quantized_packed));
  m.impl("maxsim_asymmetric_packed", TORCH_BOX(&late_interaction::cpu::maxsim_asymmetric_packed));
  m.impl("maxsim_hamming_packed", TORCH_BOX(&late_interaction::cpu::maxsim_hamming_packed));
  m.impl("maxsim_varlen", TORCH_BOX(&late_interaction::cpu::maxsim_varlen));
  m.impl("maxsim_varlen_winners", TORCH_BOX(&late_interaction::cpu::maxsim_varlen_winners));
  m.impl("maxsim_varlen_backward", TORCH_BOX(&late_interaction::cpu::maxsim_varlen_backward));
  m.impl("maxsim_pairs_packed", TORCH_BOX(&late_interaction::cpu::maxsim_pairs_packed));
  m.impl("maxsim_pairs_packed_winners", TORCH_BOX(&late_interaction::cpu::maxsim_pairs_packed_winners));
  m.impl("maxsim_pairs_packed_backward", TORCH_BOX(&late_interaction::cpu::maxsim_pairs_packed_backward));
  m.impl("maxsim_weighted", TORCH_BOX(&late_interaction::cpu::maxsim_weighted));
  m.impl("maxsim_weighted_winners", TORCH_BOX(&late_interaction::cpu::maxsim_weighted_winners));
  m.impl("maxsim_weighted_backward", TORCH_BOX(&late_interaction::cpu::maxsim_weighted_backward));
  m.impl("maxsim_varlen_weighted", TORCH_BOX(&late_interaction::cpu::maxsim_varlen_weighted));
  m.impl("maxsim_varlen_weighted_winners", TORCH_BOX(&late_interaction::cpu::maxsim_varlen_weighted_winners));
  m.impl("maxsim_varlen_weighted_backward",
         TORCH_BOX(&late_interaction::cpu::maxsim_varlen_weighted_backward));
  m.impl("maxsim_pairs_packed_weighted", TORCH_BOX(&late_interaction::cpu::maxsim_pairs_packed_weighted));
  m.impl("maxsim_pairs_packed_weighted_winners",
         TORCH_BOX(&late_interaction::cpu::maxsim_pairs_packed_weighted_winners));
  m.impl("maxsim_pairs_packed_weighted_backward",
         TORCH_BOX(&late_interaction::cpu::maxsim_pairs_packed_weighted_backward));
  m.impl("maxsim_spans", TORCH_BOX(&late_interaction::cpu::maxsim_spans));
  m.impl("xtr_select_", TORCH_BOX(&late_interaction::cpu::xtr_select_));
  m.impl("ward_cut_", TORCH_BOX(&late_interaction::cpu::ward_cut_));
}

LATE_INTERACTION_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&late_interaction::cpu::cpu_isa));
}
