// The inputs of the operators on packed codes, from tensors to the plain terms of problem.h. As in tensors.h,
// the checks are the last line for callers of torch.ops.late_interaction.*.
#pragma once

#include "arithmetic.h"
#include "tensors.h"

namespace late_interaction {

inline void check_bytes(const Tensor& x, const char* name, int64_t bytes, int64_t d, int64_t nbits) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Byte, "late_interaction: ", name, " must be uint8");
  STD_TORCH_CHECK(x.size(x.dim() - 1) == bytes, "late_interaction: ", name, " must have ", bytes,
                  " bytes a token for ", d, " codes of ", nbits, " bits, got ", x.size(x.dim() - 1));
}

inline Dtype parse_bytes(ScalarType) { return Dtype::int8; }

// Q and D are packed bits of d dims; the d of the sizes counts their bytes.
inline Inputs parse_hamming_inputs(const Tensor& Q, const Tensor& D, int64_t d, const OptionalTensor& q_mask,
                                   const OptionalTensor& d_mask) {
  STD_TORCH_CHECK(d >= 1 && d <= kMaxTokens, "late_interaction: d must be within [1, 2^30], got ", d);
  const Inputs in = parse_inputs(Q, D, q_mask, d_mask, false, parse_bytes);
  check_bytes(Q, "Q", ceil_div(d, 8), d, 1);
  check_bytes(D, "D", ceil_div(d, 8), d, 1);
  return in;
}

// Q is int8 of d dims, D packed codes of nbits each.
inline QuantizedInputs parse_asymmetric_inputs(const Tensor& Q, const Tensor& D, const Tensor& scale_Q,
                                               const Tensor& scale_D, const OptionalTensor& q_mask,
                                               const OptionalTensor& d_mask, int64_t nbits) {
  STD_TORCH_CHECK(nbits == 1 || nbits == 4, "late_interaction: nbits must be 1 or 4, got ", nbits);
  STD_TORCH_CHECK(Q.dim() == 3, "late_interaction: Q must be [Nq, Lq, d], got rank ", Q.dim());
  STD_TORCH_CHECK(D.dim() == 3 || D.dim() == 4,
                  "late_interaction: D must be [Nd, Ld, bytes] or [Nq, K, Ld, bytes], got rank ", D.dim());
  STD_TORCH_CHECK(Q.scalar_type() == ScalarType::Char, "late_interaction: Q must be int8");
  STD_TORCH_CHECK(same_place(Q, D), "late_interaction: Q and D must be on one device");
  const int64_t d = Q.size(2);
  check_bytes(D, "D", ceil_div(d * nbits, 8), d, nbits);
  const Inputs in = sized_inputs(Q, D, q_mask, d_mask, false, Dtype::int8);
  return {in, parse_scale(scale_Q, Q, "scale_Q"), parse_scale(scale_D, D, "scale_D")};
}

inline Inputs parse_hamming_packed_inputs(const Tensor& Q, const Tensor& D, int64_t d,
                                          const OptionalTensor& q_mask, const Tensor& cu_seqlens_d) {
  return parse_packed_documents(D, cu_seqlens_d, [&](const Tensor& document) {
    return parse_hamming_inputs(Q, document, d, q_mask, std::nullopt);
  });
}

inline QuantizedInputs parse_asymmetric_packed_inputs(const Tensor& Q, const Tensor& D, const Tensor& scale_Q,
                                                      const Tensor& scale_D, const OptionalTensor& q_mask,
                                                      const Tensor& cu_seqlens_d, int64_t nbits) {
  return parse_packed_codes(D, scale_D, cu_seqlens_d, [&](const Tensor& document, const Tensor& scale) {
    return parse_asymmetric_inputs(Q, document, scale_Q, scale, q_mask, std::nullopt, nbits);
  });
}

}  // namespace late_interaction
