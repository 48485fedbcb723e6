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

inline void check_muvera_matrix(const Tensor& x, const Tensor& tokens, const std::vector<int64_t>& size,
                                ScalarType type, const char* name) {
  bool fits = x.scalar_type() == type && x.dim() == static_cast<int64_t>(size.size()) && x.is_contiguous() &&
              same_place(x, tokens);
  std::string wanted;
  for (size_t i = 0; i < size.size(); ++i) {
    fits = fits && x.size(static_cast<int64_t>(i)) == size[i];
    wanted += (i == 0 ? "" : ", ") + std::to_string(size[i]);
  }
  STD_TORCH_CHECK(fits, "late_interaction: ", name, " must be a contiguous ",
                  type == ScalarType::Int ? "int32" : "float32", " [", wanted, "] on the device of tokens");
}

inline void check_muvera_dim(int64_t dim, const char* name) {
  STD_TORCH_CHECK(dim >= 1 && dim <= INT32_MAX, "late_interaction: ", name,
                  " must be at least 1 and below 2^31, got ", dim);
}

inline void parse_muvera_tokens(MuveraCall& call, const Tensor& tokens, const std::optional<Tensor>& mask,
                                const std::optional<Tensor>& cu_seqlens) {
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
  STD_TORCH_CHECK(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1 &&
                      cu_seqlens->scalar_type() == ScalarType::Int && cu_seqlens->is_contiguous() &&
                      same_place(*cu_seqlens, tokens),
                  "late_interaction: cu_seqlens must be a contiguous int32 [sequences + 1] on the device of "
                  "tokens");
  call.tokens = {tokens.const_data_ptr(), 0, 0, tokens.stride(0), tokens.stride(1)};
  call.offsets = static_cast<const int32_t*>(cu_seqlens->const_data_ptr());
  call.sequences = cu_seqlens->size(0) - 1;
  call.packed_tokens = tokens.size(0);
}

// Parameters: the operator's.
inline MuveraCall parse_muvera(const Tensor& tokens, const std::optional<Tensor>& mask,
                               const std::optional<Tensor>& cu_seqlens, const Tensor& hyperplanes,
                               const std::optional<Tensor>& projection, const std::optional<Tensor>& buckets,
                               const std::optional<Tensor>& signs, const MuveraSizes& sizes) {
  MuveraCall call;
  parse_muvera_tokens(call, tokens, mask, cu_seqlens);
  STD_TORCH_CHECK(sizes.k_sim >= 0 && sizes.k_sim <= kMostMuveraBits, "late_interaction: k_sim must lie in ",
                  "[0, ", kMostMuveraBits, "], got ", sizes.k_sim);
  STD_TORCH_CHECK(sizes.repetitions >= 1 && sizes.repetitions <= kMaxTokens,
                  "late_interaction: repetitions must be at least 1, got ", sizes.repetitions);
  call.k_sim = sizes.k_sim;
  call.repetitions = sizes.repetitions;
  const int64_t columns = round_up(sizes.repetitions * sizes.k_sim, kMuveraColumns);
  check_muvera_matrix(hyperplanes, tokens, {call.d, columns}, ScalarType::Float, "hyperplanes");
  call.hyperplanes = static_cast<const float*>(hyperplanes.const_data_ptr());
  if (projection) {
    check_muvera_dim(sizes.d_proj, "d_proj");
    check_muvera_matrix(*projection, tokens,
                        {sizes.repetitions, call.d, round_up(sizes.d_proj, kMuveraColumns)},
                        ScalarType::Float, "projection");
    call.projection = static_cast<const float*>(projection->const_data_ptr());
    call.d_proj = sizes.d_proj;
  }
  STD_TORCH_CHECK(buckets.has_value() == signs.has_value(),
                  "late_interaction: buckets and signs must come together");
  if (buckets) {
    check_muvera_dim(sizes.d_final, "d_final");
    check_muvera_matrix(*buckets, tokens, {call.dims_before_sketch()}, ScalarType::Int, "buckets");
    check_muvera_matrix(*signs, tokens, {call.dims_before_sketch()}, ScalarType::Float, "signs");
    call.buckets = static_cast<const int32_t*>(buckets->const_data_ptr());
    call.signs = static_cast<const float*>(signs->const_data_ptr());
    call.d_final = sizes.d_final;
  }
  return call;
}

}  // namespace late_interaction
