// From tensors to the plain terms of problem.h, with the checks that keep a raw op call from ever
// reading memory it should not. The Python functions check first and raise TypeError / ValueError;
// these are the last line for callers of torch.ops.late_interaction.* and raise RuntimeError.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "problem.h"

namespace late_interaction {

// Token counts are 32-bit inside the kernels, with room to step past the end by a tile; offsets are 64-bit.
inline constexpr int64_t kMaxTokens = int64_t{1} << 30;

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The elements of a tensor whose dtype has been checked; of none: null. Bools are bytes.
template <class T>
const T* data_of(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
const T* data_of(const OptionalTensor& x) {
  return x ? data_of<T>(*x) : nullptr;
}
template <class T>
T* mutable_data_of(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

inline Dtype parse_dtype(ScalarType type) {
  if (type == ScalarType::BFloat16) return Dtype::bf16;
  if (type == ScalarType::Half) return Dtype::fp16;
  if (type == ScalarType::Float) return Dtype::fp32;
  if (type == ScalarType::Double) return Dtype::fp64;
  STD_TORCH_CHECK(false, "late_interaction: Q and D must be bfloat16, float16, float32 or float64");
}

inline Dtype parse_quantized_dtype(ScalarType type) {
  if (type == ScalarType::Float8_e4m3fn) return Dtype::e4m3;
  if (type == ScalarType::Float8_e5m2) return Dtype::e5m2;
  if (type == ScalarType::Char) return Dtype::int8;
  STD_TORCH_CHECK(false, "late_interaction: Q and D must be float8_e4m3fn, float8_e5m2 or int8");
}

// Quotes a caller's string for a message and cuts it short, since it may have any length.
inline std::string in_quotes(const std::string& text) {
  constexpr size_t kShown = 40;
  return "'" + (text.size() <= kShown ? text : text.substr(0, kShown) + "...") + "'";
}

inline Precision parse_precision(const std::string& name) {
  if (name == "highest") return Precision::highest;
  if (name == "high") return Precision::high;
  if (name == "medium") return Precision::medium;
  if (name == "fp16") return Precision::fp16;
  STD_TORCH_CHECK(false, "late_interaction: precision must be 'highest', 'high', 'medium' or 'fp16', got ",
                  in_quotes(name));
}

inline Backward parse_backward(const std::string& name) {
  if (name == "auto") return Backward::automatic;
  if (name == "lowmem") return Backward::lowmem;
  if (name == "unified") return Backward::unified;
  STD_TORCH_CHECK(false, "late_interaction: backward must be 'auto', 'lowmem' or 'unified', got ",
                  in_quotes(name));
}

// The scores of fp64 inputs are fp64 (so that gradcheck runs); every other input scores in fp32.
inline ScalarType score_type(Dtype dtype) {
  return dtype == Dtype::fp64 ? ScalarType::Double : ScalarType::Float;
}

inline bool same_place(const Tensor& a, const Tensor& b) { return a.device() == b.device(); }

inline bool holds_halves(const Tensor& x) {
  return x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Half;
}

inline std::vector<int64_t> shape_of(const Tensor& x) {
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < x.dim(); ++i) shape.push_back(x.size(i));
  return shape;
}

inline bool has_shape(const Tensor& x, const std::vector<int64_t>& shape) {
  bool same = x.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i) same = x.size(i) == shape[i];
  return same;
}

// "[3, 4]", for a message.
inline std::string in_brackets(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// As Python calls it.
inline const char* name_of(ScalarType type) {
  if (type == ScalarType::Bool) return "bool";
  if (type == ScalarType::Short) return "int16";
  if (type == ScalarType::Int) return "int32";
  if (type == ScalarType::Long) return "int64";
  return type == ScalarType::Double ? "float64" : "float32";
}

// beside: the argument whose device x must be on, which the caller knows as beside_name.
inline void check_dense(const Tensor& x, ScalarType type, const std::vector<int64_t>& shape, const char* name,
                        const Tensor& beside, const char* beside_name = "Q") {
  STD_TORCH_CHECK(
      x.scalar_type() == type && has_shape(x, shape) && x.is_contiguous() && same_place(x, beside),
      "late_interaction: ", name, " must be a contiguous ", name_of(type), " ", in_brackets(shape),
      " on the device of ", beside_name);
}

// Packed: sizes are those of one query of all query tokens (or of padded queries), and Ld counts the tokens
// of all documents.
struct Inputs {
  std::optional<Packed> packed;
  bool paired = false;  // per_query with N = 1, and no tensor has the dim N
  Sizes sizes;
  Dtype dtype = Dtype::fp32;
  TokenView Q, D;
  MaskView q_mask, d_mask;
  WeightView q_weights;
};

// paired: x is [Nq, L, d], the only item of each query.
inline TokenView view_tokens(const Tensor& x, bool paired = false) {
  const int64_t r = x.dim();
  return {x.const_data_ptr(), paired || r == 4 ? x.stride(0) : 0, paired ? 0 : x.stride(r - 3),
          x.stride(r - 2), x.stride(r - 1)};
}

inline MaskView view_mask(const OptionalTensor& mask, bool paired = false) {
  if (!mask) return {};
  const int64_t r = mask->dim();
  return {static_cast<const uint8_t*>(mask->const_data_ptr()), paired || r == 3 ? mask->stride(0) : 0,
          paired ? 0 : mask->stride(r - 2), mask->stride(r - 1)};
}

// x is shaped as the tokens without d.
inline bool one_per_token(const Tensor& x, const Tensor& tokens) {
  bool fits = x.dim() == tokens.dim() - 1;
  for (int64_t i = 0; fits && i < x.dim(); ++i) fits = x.size(i) == tokens.size(i);
  return fits;
}

inline void check_mask(const OptionalTensor& mask, const Tensor& tokens, const char* name) {
  if (!mask) return;
  STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool, "late_interaction: ", name, " must be bool");
  STD_TORCH_CHECK(same_place(*mask, tokens), "late_interaction: ", name,
                  " must be on the device of the tokens it masks");
  STD_TORCH_CHECK(one_per_token(*mask, tokens), "late_interaction: ", name,
                  " must have the shape of its tokens without d");
}

// Q [Nq, Lq, d] with D, whose ranks have been checked; the last dim of D is not looked at.
inline Inputs sized_inputs(const Tensor& Q, const Tensor& D, const OptionalTensor& q_mask,
                           const OptionalTensor& d_mask, bool paired, Dtype dtype) {
  const int64_t r = D.dim();
  Inputs in;
  in.dtype = dtype;
  in.paired = paired;
  in.sizes = {paired || r == 4 ? Layout::per_query : Layout::in_batch,
              Q.size(0),
              paired ? 1 : D.size(r - 3),
              Q.size(1),
              D.size(r - 2),
              Q.size(2)};
  STD_TORCH_CHECK(in.sizes.layout == Layout::in_batch || D.size(0) == in.sizes.Nq,
                  "late_interaction: D [Nq, ..., Ld, d] needs Nq = ", in.sizes.Nq, ", got ", D.size(0));
  STD_TORCH_CHECK(in.sizes.d >= 1, "late_interaction: Q and D need an embedding dim d of at least 1");
  STD_TORCH_CHECK(
      in.sizes.Nq * in.sizes.Lq <= kMaxTokens && in.sizes.Ld <= kMaxTokens && in.sizes.d <= kMaxTokens,
      "late_interaction: Nq * Lq, Ld and d must each be at most 2^30");
  check_mask(q_mask, Q, "q_mask");
  check_mask(d_mask, D, "d_mask");
  in.Q = view_tokens(Q);
  in.D = view_tokens(D, paired);
  in.q_mask = view_mask(q_mask);
  in.d_mask = view_mask(d_mask, paired);
  return in;
}

inline Inputs parse_inputs(const Tensor& Q, const Tensor& D, const OptionalTensor& q_mask,
                           const OptionalTensor& d_mask, bool paired = false,
                           Dtype (*parse)(ScalarType) = parse_dtype) {
  STD_TORCH_CHECK(Q.dim() == 3, "late_interaction: Q must be [Nq, Lq, d], got rank ", Q.dim());
  STD_TORCH_CHECK(D.dim() == 3 || (D.dim() == 4 && !paired), "late_interaction: D must be ",
                  paired ? "[Nq, Ld, d]" : "[Nd, Ld, d] or [Nq, K, Ld, d]", ", got rank ", D.dim());
  STD_TORCH_CHECK(Q.scalar_type() == D.scalar_type(), "late_interaction: Q and D must share a dtype");
  STD_TORCH_CHECK(same_place(Q, D), "late_interaction: Q and D must be on one device");
  STD_TORCH_CHECK(D.size(D.dim() - 1) == Q.size(2), "late_interaction: Q and D must share d, got ", Q.size(2),
                  " and ", D.size(D.dim() - 1));
  return sized_inputs(Q, D, q_mask, d_mask, paired, parse(Q.scalar_type()));
}

// Takes weights, which are shaped as Q without d.
inline void take_weights(Inputs& in, const Tensor& weights, const Tensor& Q) {
  STD_TORCH_CHECK(weights.scalar_type() == score_type(in.dtype),
                  "late_interaction: q_weights must be float32 (float64 for float64 inputs)");
  STD_TORCH_CHECK(same_place(weights, Q), "late_interaction: q_weights must be on the device of Q");
  STD_TORCH_CHECK(one_per_token(weights, Q),
                  "late_interaction: q_weights must have the shape of Q without d");
  const int64_t r = weights.dim();
  in.q_weights = {weights.const_data_ptr(), r == 2 ? weights.stride(0) : 0, weights.stride(r - 1)};
}

// The scores' shape as the caller sees it: pairs have no dim N.
inline std::vector<int64_t> shape_of_scores(const Inputs& in) {
  if (in.paired) return {in.sizes.Nq};
  return {in.sizes.Nq, in.sizes.N};
}

inline std::vector<int64_t> shape_of_winners(const Inputs& in) {
  if (in.paired) return {in.sizes.Nq, in.sizes.Lq};
  return {in.sizes.Nq, in.sizes.N, in.sizes.Lq};
}

inline std::vector<int64_t> shape_of_queries(const Inputs& in) {
  return {in.sizes.Nq, in.sizes.Lq, in.sizes.d};
}

inline std::vector<int64_t> shape_of_documents(const Inputs& in) {
  const Sizes& s = in.sizes;
  if (in.paired) return {s.Nq, s.Ld, s.d};
  if (s.layout == Layout::in_batch) return {s.N, s.Ld, s.d};
  return {s.Nq, s.N, s.Ld, s.d};
}

struct Offsets {
  const int32_t* data;
  int64_t sequences;
};

inline Offsets parse_offsets(const Tensor& offsets, const Tensor& tokens, const char* name) {
  STD_TORCH_CHECK(offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 && offsets.size(0) >= 1 &&
                      offsets.is_contiguous(),
                  "late_interaction: ", name, " must be a contiguous int32 tensor of one dim and not empty");
  STD_TORCH_CHECK(same_place(offsets, tokens), "late_interaction: ", name,
                  " must be on the device of its tokens");
  return {static_cast<const int32_t*>(offsets.const_data_ptr()), offsets.size(0) - 1};
}

// Q [tokens, d] and D [tokens, d], packed.
inline void check_tokens(const Tensor& Q, const Tensor& D) {
  STD_TORCH_CHECK(Q.dim() == 2 && D.dim() == 2, "late_interaction: Q and D must be [tokens, d], got ranks ",
                  Q.dim(), " and ", D.dim());
  STD_TORCH_CHECK(Q.scalar_type() == D.scalar_type(), "late_interaction: Q and D must share a dtype");
  STD_TORCH_CHECK(same_place(Q, D), "late_interaction: Q and D must be on one device");
  STD_TORCH_CHECK(Q.size(1) == D.size(1), "late_interaction: Q and D must share d, got ", Q.size(1), " and ",
                  D.size(1));
  STD_TORCH_CHECK(Q.size(0) <= kMaxTokens && D.size(0) <= kMaxTokens && Q.size(1) <= kMaxTokens,
                  "late_interaction: Q and D must have at most 2^30 tokens and dims each");
}

// All but where sequences begin, and how many there are.
inline Inputs packed_inputs(const Tensor& Q, const Tensor& D) {
  Inputs in;
  in.sizes = {Layout::in_batch, 1, 0, Q.size(0), D.size(0), Q.size(1)};
  in.dtype = parse_dtype(Q.scalar_type());
  in.Q = {Q.const_data_ptr(), 0, Q.size(0) * Q.stride(0), Q.stride(0), Q.stride(1)};
  in.D = {D.const_data_ptr(), 0, 0, D.stride(0), D.stride(1)};
  return in;
}

// What offsets say is not looked at.
inline Inputs parse_packed(const Tensor& Q, const Tensor& D, const Tensor& cu_seqlens_q,
                           const Tensor& cu_seqlens_d) {
  check_tokens(Q, D);
  Inputs in = packed_inputs(Q, D);
  const Offsets q = parse_offsets(cu_seqlens_q, Q, "cu_seqlens_q");
  const Offsets d = parse_offsets(cu_seqlens_d, D, "cu_seqlens_d");
  in.packed = Packed{q.sequences, q.data, d.data};
  in.sizes.N = d.sequences;
  return in;
}

// Padded queries with packed documents, whose offsets are not looked at. parse: of D as one document that has
// all tokens.
template <class Parse>
auto parse_packed_documents(const Tensor& D, const Tensor& cu_seqlens_d, const Parse& parse) {
  STD_TORCH_CHECK(D.dim() == 2, "late_interaction: D must be [tokens, d], got rank ", D.dim());
  const Offsets offsets = parse_offsets(cu_seqlens_d, D, "cu_seqlens_d");
  auto in = parse(torch::stable::unsqueeze(D, 0));
  in.packed = Packed{in.sizes.Nq, nullptr, offsets.data};
  in.sizes.N = offsets.sequences;
  in.D.item_stride = 0;
  return in;
}

struct QuantizedInputs : Inputs {
  ScaleView q_scale, d_scale;
};

inline ScaleView parse_scale(const Tensor& scale, const Tensor& tokens, const char* name) {
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float, "late_interaction: ", name, " must be float32");
  STD_TORCH_CHECK(same_place(scale, tokens), "late_interaction: ", name,
                  " must be on the device of the tokens it scales");
  const auto* data = static_cast<const float*>(scale.const_data_ptr());
  const int64_t r = scale.dim();
  if (r == 0) return {data};
  STD_TORCH_CHECK(one_per_token(scale, tokens), "late_interaction: ", name,
                  " must be 0-dim or have the shape of its tokens without d");
  return {data, r == 3 ? scale.stride(0) : 0, scale.stride(r - 2), scale.stride(r - 1)};
}

inline QuantizedInputs parse_quantized_inputs(const Tensor& Q, const Tensor& D, const Tensor& scale_Q,
                                              const Tensor& scale_D, const OptionalTensor& q_mask,
                                              const OptionalTensor& d_mask) {
  const Inputs in = parse_inputs(Q, D, q_mask, d_mask, false, parse_quantized_dtype);
  return {in, parse_scale(scale_Q, Q, "scale_Q"), parse_scale(scale_D, D, "scale_D")};
}

// parse: of D and scale_D as those of one document.
template <class Parse>
QuantizedInputs parse_packed_codes(const Tensor& D, const Tensor& scale_D, const Tensor& cu_seqlens_d,
                                   const Parse& parse) {
  STD_TORCH_CHECK(scale_D.dim() <= 1, "late_interaction: scale_D must be 0-dim or [tokens], got rank ",
                  scale_D.dim());
  QuantizedInputs in = parse_packed_documents(D, cu_seqlens_d, [&](const Tensor& document) {
    return parse(document, scale_D.dim() == 0 ? scale_D : torch::stable::unsqueeze(scale_D, 0));
  });
  in.d_scale.item_stride = 0;
  return in;
}

inline QuantizedInputs parse_quantized_packed_inputs(const Tensor& Q, const Tensor& D, const Tensor& scale_Q,
                                                     const Tensor& scale_D, const OptionalTensor& q_mask,
                                                     const Tensor& cu_seqlens_d) {
  return parse_packed_codes(D, scale_D, cu_seqlens_d, [&](const Tensor& document, const Tensor& scale) {
    return parse_quantized_inputs(Q, document, scale_Q, scale, q_mask, std::nullopt);
  });
}

inline ScalarType winner_type(int64_t Ld) { return wide_winners(Ld) ? ScalarType::Int : ScalarType::Short; }

inline void check_grad_scores(const Tensor& grad_scores, const std::vector<int64_t>& shape, Dtype dtype,
                              const Tensor& Q) {
  const ScalarType type = score_type(dtype);
  STD_TORCH_CHECK(
      has_shape(grad_scores, shape) && grad_scores.scalar_type() == type && same_place(grad_scores, Q),
      "late_interaction: grad_scores must be ", in_brackets(shape), " of ", name_of(type),
      " on the device of Q");
}

// Winners that a forward saved.
inline void check_winners(const Tensor& winners, const std::vector<int64_t>& shape, ScalarType type,
                          const Tensor& Q) {
  STD_TORCH_CHECK(has_shape(winners, shape) && winners.is_contiguous() && winners.scalar_type() == type &&
                      same_place(winners, Q),
                  "late_interaction: winners must be a contiguous ", in_brackets(shape), " of ",
                  name_of(type), " on the device of Q");
}

inline void check_backward_inputs(const Tensor& grad_scores, const Tensor& Q, const Tensor& winners,
                                  const Inputs& in) {
  check_grad_scores(grad_scores, shape_of_scores(in), in.dtype, Q);
  check_winners(winners, shape_of_winners(in), winner_type(in.sizes.Ld), Q);
}

inline void check_varlen_backward_inputs(const Tensor& grad_scores, const Tensor& Q, const Tensor& winners,
                                         const Inputs& in) {
  check_grad_scores(grad_scores, {in.packed->queries, in.sizes.N}, in.dtype, Q);
  check_winners(winners, {in.sizes.N, in.sizes.Lq}, winner_type(in.sizes.Ld), Q);
}

// A new contiguous tensor beside `like`: same device, given dtype. Not by new_empty, which looks its operator
// up by name each time.
inline Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& size, ScalarType dtype) {
  std::vector<int64_t> strides(size.size());
  int64_t stride = 1;
  bool fits = true;
  for (size_t k = size.size(); k-- > 0;) {
    strides[k] = stride;
    fits = !__builtin_mul_overflow(stride, std::max<int64_t>(size[k], 1), &stride) && fits;
  }
  STD_TORCH_CHECK(fits, "late_interaction: a result would have more than 2^63 elements");
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.data(),
                                                  strides.data(), type, device_type, like.get_device_index(),
                                                  &made));
  return Tensor(made);
}

}  // namespace late_interaction
