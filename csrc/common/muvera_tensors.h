// The tensors of muvera_encode as a MuveraCall, with what can be said of them without reading them.
#pragma once

#include "arithmetic.h"
#include "muvera.h"
#include "tensors.h"

namespace late_interaction {

// 2^k_sim partitions of a repetition are numbered, and k_sim bits of a token are read as one word.
inline constexpr int64_t kMostMuveraBits = 16;

struct MuveraSizes {
  int64_t k_sim, repetitions, d_proj, d_final;
};

inline const float* parse_muvera_matrix(const Tensor& x, const Tensor& tokens,
                                        const std::vector<int64_t>& size, const char* name) {
  check_dense(x, ScalarType::Float, size, name, tokens, "tokens");
  return data_of<float>(x);
}

inline void check_muvera_dim(int64_t dim, const char* name) {
  STD_TORCH_CHECK(dim >= 1 && dim <= INT32_MAX, "late_interaction: ", name,
                  " must be at least 1 and below 2^31, got ", dim);
}

inline void parse_muvera_tokens(MuveraCall& call, const Tensor& tokens, const OptionalTensor& mask,
                                const OptionalTensor& cu_seqlens) {
  STD_TORCH_CHECK(tokens.dim() == (cu_seqlens ? 2 : 3), "late_interaction: tokens must be [N, L, d], or ",
                  "[tokens, d] with cu_seqlens, got rank ", tokens.dim());
  call.dtype = parse_dtype(tokens.scalar_type());
  call.d = tokens.size(tokens.dim() - 1);
  STD_TORCH_CHECK(call.d >= 1, "late_interaction: tokens need an embedding dim d of at least 1");
  STD_TORCH_CHECK(tokens.size(tokens.dim() - 2) <= kMaxTokens, "late_interaction: too many tokens");
  if (!cu_seqlens) {
    check_mask(mask, tokens, "mask");
    call.tokens = view_tokens(tokens);
    call.mask = view_mask(mask);
    call.sequences = tokens.size(0);
    call.length = tokens.size(1);
    return;
  }
  STD_TORCH_CHECK(!mask, "late_interaction: mask must be None with cu_seqlens");
  const Offsets offsets = parse_offsets(*cu_seqlens, tokens, "cu_seqlens");
  call.tokens = {tokens.const_data_ptr(), 0, 0, tokens.stride(0), tokens.stride(1)};
  call.offsets = offsets.data;
  call.sequences = offsets.sequences;
  call.packed_tokens = tokens.size(0);
}

// Parameters: the operator's.
inline MuveraCall parse_muvera(const Tensor& tokens, const OptionalTensor& mask,
                               const OptionalTensor& cu_seqlens, const Tensor& hyperplanes,
                               const OptionalTensor& projection, const OptionalTensor& buckets,
                               const OptionalTensor& signs, const MuveraSizes& sizes) {
  MuveraCall call;
  parse_muvera_tokens(call, tokens, mask, cu_seqlens);
  STD_TORCH_CHECK(sizes.k_sim >= 0 && sizes.k_sim <= kMostMuveraBits, "late_interaction: k_sim must lie in ",
                  "[0, ", kMostMuveraBits, "], got ", sizes.k_sim);
  STD_TORCH_CHECK(sizes.repetitions >= 1 && sizes.repetitions <= kMaxTokens,
                  "late_interaction: repetitions must be at least 1, got ", sizes.repetitions);
  call.k_sim = sizes.k_sim;
  call.repetitions = sizes.repetitions;
  const int64_t columns = round_up(sizes.repetitions * sizes.k_sim, kMuveraColumns);
  call.hyperplanes = parse_muvera_matrix(hyperplanes, tokens, {call.d, columns}, "hyperplanes");
  if (projection) {
    check_muvera_dim(sizes.d_proj, "d_proj");
    call.projection = parse_muvera_matrix(*projection, tokens,
                                          {sizes.repetitions, call.d, round_up(sizes.d_proj, kMuveraColumns)},
                                          "projection");
    call.d_proj = sizes.d_proj;
  }
  STD_TORCH_CHECK(buckets.has_value() == signs.has_value(),
                  "late_interaction: buckets and signs must come together");
  if (buckets) {
    check_muvera_dim(sizes.d_final, "d_final");
    check_dense(*buckets, ScalarType::Int, {call.dims_before_sketch()}, "buckets", tokens, "tokens");
    call.buckets = data_of<int32_t>(buckets);
    call.signs = parse_muvera_matrix(*signs, tokens, {call.dims_before_sketch()}, "signs");
    call.d_final = sizes.d_final;
  }
  return call;
}

}  // namespace late_interaction
