// Calls on residual-compressed documents: tensors checked, as tensors.h does it for the others.
#pragma once

#include "tensors.h"

namespace late_interaction {

struct ResidualInputs {
  Sizes sizes;  // in_batch; Ld is the room of a padded document, or all tokens of packed ones
  Dtype dtype = Dtype::fp32;
  bool packed = false;  // documents behind each other; else padded
};

// The operators' arguments.
struct ResidualTensors {
  const Tensor &Q, &codes, &residuals, &extents, &centroids, &bucket_weights;
  int64_t nbits;  // of a bucket
};

inline bool is_index(const Tensor& x) {
  return x.scalar_type() == ScalarType::Int || x.scalar_type() == ScalarType::Long;
}

// Bits of a bucket.
inline void check_residual_bits(int64_t nbits) {
  STD_TORCH_CHECK(nbits == 1 || nbits == 2 || nbits == 4 || nbits == 8,
                  "late_interaction: nbits must be 1, 2, 4 or 8, got ", nbits);
}

inline ResidualInputs parse_residual_inputs(const ResidualTensors& x) {
  const auto& [Q, codes, residuals, extents, centroids, bucket_weights, nbits] = x;
  check_residual_bits(nbits);
  STD_TORCH_CHECK(Q.dim() == 3, "late_interaction: Q must be [Nq, Lq, d], got rank ", Q.dim());
  STD_TORCH_CHECK(codes.dim() == 1 || codes.dim() == 2,
                  "late_interaction: codes must be [tokens] or [Nd, Ld], got rank ", codes.dim());
  ResidualInputs in;
  in.dtype = parse_dtype(Q.scalar_type());
  in.packed = codes.dim() == 1;
  in.sizes = {
      Layout::in_batch, Q.size(0), in.packed ? 0 : codes.size(0), Q.size(1), codes.size(in.packed ? 0 : 1),
      Q.size(2)};
  STD_TORCH_CHECK(
      extents.dim() == 1 && extents.size(0) >= (in.packed ? 1 : 0) && is_index(extents),
      "late_interaction: extents must be int32 or int64, [Nd + 1] offsets of packed documents or [Nd]"
      " lengths of padded ones");
  if (in.packed) in.sizes.N = extents.size(0) - 1;
  STD_TORCH_CHECK(in.packed || extents.size(0) == in.sizes.N,
                  "late_interaction: extents must hold a length for each of ", in.sizes.N, " documents, got ",
                  extents.size(0));
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Int, "late_interaction: codes must be int32");
  STD_TORCH_CHECK(residuals.scalar_type() == ScalarType::Byte, "late_interaction: residuals must be uint8");
  const int64_t bytes = (in.sizes.d * nbits + 7) / 8, r = codes.dim();
  STD_TORCH_CHECK(one_per_token(codes, residuals) && residuals.size(r) == bytes,
                  "late_interaction: residuals must be codes' shape by ", bytes, " bytes");
  STD_TORCH_CHECK(centroids.dim() == 2 && centroids.size(0) > 0 && centroids.size(1) == in.sizes.d,
                  "late_interaction: centroids must be [n, ", in.sizes.d, "] with n of at least 1");
  parse_dtype(centroids.scalar_type());
  STD_TORCH_CHECK(bucket_weights.dim() == 1 && bucket_weights.size(0) == int64_t{1} << nbits &&
                      bucket_weights.scalar_type() == ScalarType::Float,
                  "late_interaction: bucket_weights must be float32 [", int64_t{1} << nbits, "]");
  for (const Tensor* x : {&codes, &residuals, &extents, &centroids, &bucket_weights})
    STD_TORCH_CHECK(same_place(*x, Q), "late_interaction: all arguments must be on the device of Q");
  STD_TORCH_CHECK(in.sizes.d >= 1 && in.sizes.Nq * in.sizes.Lq <= kMaxTokens &&
                      in.sizes.d <= kMaxTokens / 8 && (in.packed || in.sizes.Ld <= kMaxTokens),
                  "late_interaction: d must be at least 1; Nq * Lq and Ld at most 2^30, d at most 2^27");
  return in;
}

// A winner, the token of a maximum, takes 32 bits in packed documents, which may have any length.
inline bool wide_winners(const ResidualInputs& in) { return in.packed || wide_winners(in.sizes.Ld); }

inline ScalarType winner_type(const ResidualInputs& in) {
  return wide_winners(in) ? ScalarType::Int : ScalarType::Short;
}

inline void check_residual_winners(const Tensor& grad_scores, const Tensor& Q, const Tensor& winners,
                                   const ResidualInputs& in) {
  check_grad_scores(grad_scores, {in.sizes.Nq, in.sizes.N}, in.dtype, Q);
  check_winners(winners, {in.sizes.Nq, in.sizes.N, in.sizes.Lq}, winner_type(in), Q);
}

inline void check_centroid_scores(const Tensor& table, const Tensor& codes, const Tensor& lengths) {
  STD_TORCH_CHECK(
      table.dim() == 2 && table.size(0) > 0 &&
          (table.scalar_type() == ScalarType::Double || table.scalar_type() == ScalarType::Float),
      "late_interaction: query_centroid_scores must be float32 or float64, [n, Lq] with n of at least 1");
  STD_TORCH_CHECK(codes.dim() == 2 && codes.scalar_type() == ScalarType::Int,
                  "late_interaction: codes must be int32, [B, Ld]");
  STD_TORCH_CHECK(lengths.dim() == 1 && lengths.size(0) == codes.size(0) && is_index(lengths),
                  "late_interaction: doc_lengths must be int32 or int64, [B]");
  STD_TORCH_CHECK(same_place(codes, table) && same_place(lengths, table),
                  "late_interaction: all arguments must be on one device");
}

}  // namespace late_interaction
