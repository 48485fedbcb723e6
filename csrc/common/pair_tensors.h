// From the tensors of listed pairs to plain terms, with the checks of tensors.h.
#pragma once

#include <algorithm>

#include "problem.h"
#include "tensors.h"

namespace late_interaction {

// The packed tokens, and which pairs of them.
struct PairInputs : Inputs {
  Pairs pairs;
};

inline const int32_t* parse_index(const Tensor& index, const Tensor& tokens, const char* name) {
  STD_TORCH_CHECK(index.scalar_type() == ScalarType::Int && index.dim() == 1 && index.is_contiguous() &&
                      same_place(index, tokens),
                  "late_interaction: ", name,
                  " must be a contiguous int32 tensor of one dim on the device of the tokens");
  return static_cast<const int32_t*>(index.const_data_ptr());
}

inline PairInputs with_pairs(const Inputs& in, const Tensor& first, const Tensor& second, const char* names) {
  STD_TORCH_CHECK(first.size(0) == second.size(0), "late_interaction: ", names, " must be equally long, got ",
                  first.size(0), " and ", second.size(0));
  STD_TORCH_CHECK(first.size(0) <= kMaxTokens, "late_interaction: there must be at most 2^30 pairs");
  PairInputs out{in, {}};
  out.pairs.count = first.size(0);
  out.pairs.q_tokens = static_cast<int32_t>(in.sizes.Lq);
  out.pairs.d_tokens = static_cast<int32_t>(in.sizes.Ld);
  return out;
}

inline PairInputs parse_pairs(const Tensor& Q, const Tensor& D, const Tensor& cu_seqlens_q,
                              const Tensor& cu_seqlens_d, const Tensor& pair_q, const Tensor& pair_d,
                              const Tensor* weights = nullptr) {
  const Inputs packed = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  const int32_t* query = parse_index(pair_q, Q, "pair_q");
  const int32_t* document = parse_index(pair_d, Q, "pair_d");
  PairInputs in = with_pairs(packed, pair_q, pair_d, "pair_q and pair_d");
  in.pairs.queries = packed.packed->queries;
  in.pairs.documents = packed.sizes.N;
  in.pairs.q_offsets = packed.packed->q_offsets;
  in.pairs.d_offsets = packed.packed->d_offsets;
  in.pairs.query = query;
  in.pairs.document = document;
  if (weights != nullptr) take_weights(in, *weights, Q);
  return in;
}

// One query, all of Q, with documents of `lengths` tokens of D from `starts` on.
inline PairInputs parse_spans(const Tensor& Q, const Tensor& D, const Tensor& starts, const Tensor& lengths) {
  check_tokens(Q, D);
  const int32_t* start = parse_index(starts, Q, "starts");
  const int32_t* length = parse_index(lengths, Q, "lengths");
  Inputs packed = packed_inputs(Q, D);
  packed.packed = Packed{1, nullptr, nullptr};
  packed.sizes.N = starts.size(0);
  PairInputs in = with_pairs(packed, starts, lengths, "starts and lengths");
  in.pairs.queries = 1;
  in.pairs.documents = in.pairs.count;
  in.pairs.scattered = true;
  in.pairs.starts = start;
  in.pairs.lengths = length;
  return in;
}

// Winners are [pairs, stride].
inline void check_winner_stride(const PairInputs& in, int64_t stride) {
  STD_TORCH_CHECK(stride >= 0 && stride <= kMaxTokens && in.pairs.count * stride <= kMaxTokens,
                  "late_interaction: pairs * max_seqlen_q must be at most 2^30, got ", in.pairs.count, " * ",
                  stride);
}

inline void check_pair_backward_inputs(const Tensor& grad_scores, const Tensor& Q, const Tensor& winners,
                                       const PairInputs& in) {
  STD_TORCH_CHECK(winners.dim() == 2, "late_interaction: winners must be [pairs, max_seqlen_q], got rank ",
                  winners.dim());
  check_grad_scores(grad_scores, {in.pairs.count}, in.dtype, Q);
  check_winners(winners, {in.pairs.count, winners.size(1)}, winner_type(in.sizes.Ld), Q);
  check_winner_stride(in, winners.size(1));
}

}  // namespace late_interaction
