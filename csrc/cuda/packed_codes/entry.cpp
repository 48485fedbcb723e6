// The operators on packed codes on CUDA: parse, plan, launch. Nothing here waits for the device.
//
// Codes of 4 bits, and bits of up to kMostHammingDims with bits, have kernels. Other bits are unpacked to
// int8 and scored by maxsim_quantized.
#include <cuda_runtime.h>

#include <limits>

#include "../../common/packed_codes_tensors.h"
#include "../../common/registration.h"
#include "../runtime/op_helpers.h"
#include "args.h"

namespace late_interaction {

namespace {

// Sums of products fit in 32 bits.
constexpr int64_t kMostDims = int64_t{1} << 19;

// Documents whose rows kernels load in vectors of so many bytes, at distances of less than 2^32.
Tensor loadable(const Tensor& D, int64_t vector, cudaStream_t stream) {
  const int64_t bytes = D.size(D.dim() - 1), width = round_up(bytes, vector);
  const TokenView view = view_tokens(D.dim() == 2 ? torch::stable::unsqueeze(D, 0) : D);
  const bool near = view.token_stride >= 0 && view.token_stride <= std::numeric_limits<uint32_t>::max();
  if (near && readable_in_vectors(view, bytes, 1, vector)) return D;
  const Tensor to = new_rows(D, width, D.scalar_type());
  copy_to_longer_rows(D, to, stream);
  return to;
}

PackedCodesCall call_of(const Inputs& in, const Tensor& D, int64_t d) {
  PackedCodesCall call;
  call.sizes = in.sizes;
  call.sizes.d = d;
  call.Q = in.Q;
  call.D = view_tokens(D.dim() == 2 ? torch::stable::unsqueeze(D, 0) : D);
  call.q_mask = in.q_mask;
  call.d_mask = in.d_mask;
  if (in.packed) call.d_offsets = in.packed->d_offsets;
  return call;
}

Tensor new_scores(const Inputs& in, const Tensor& like) {
  return new_tensor(like, {in.sizes.Nq, in.sizes.N}, ScalarType::Float);
}

// Scores of no products: true if there are none.
bool is_empty(const Inputs& in, const Tensor& scores, cudaStream_t stream) {
  if (scores.numel() > 0 && in.sizes.Ld > 0 && in.sizes.Lq > 0) return false;
  fill_zero(scores, stream);
  return true;
}

Tensor unpacked(const Tensor& x, int64_t d, cudaStream_t stream) {
  const int64_t bytes = x.size(x.dim() - 1), width = round_up(d, 16);
  const Tensor bits = torch::stable::contiguous(x), codes = new_rows(x, width, ScalarType::Char);
  const UnpackArgs args{.bits = data_of<uint8_t>(bits),
                        .rows = x.numel() / bytes,
                        .bytes = bytes,
                        .d = d,
                        .width = width,
                        .codes = mutable_data_of<int8_t>(codes)};
  check(launch_unpack_bits(args, stream), "unpacked bits");
  return codes;
}

// ---- bits with bits ----

// documents: a mask, or the offsets of packed ones. quantized: the operator that scores unpacked bits.
template <class Documents>
Tensor score_hamming(const Inputs& in, const Tensor& Q, const Tensor& D, int64_t d,
                     const OptionalTensor& q_mask, const Documents& documents, const char* quantized) {
  STD_TORCH_CHECK(d <= kMostDims, "late_interaction: d must be at most ", kMostDims, " on CUDA, got ", d);
  const OnDevice on(Q);
  const cudaStream_t stream = on.stream();
  if (d > kMostHammingDims) {
    Tensor one = new_tensor(Q, {}, ScalarType::Float);
    torch::stable::fill_(one, 1.0);
    return call_operator(quantized, unpacked(Q, d, stream), unpacked(D, d, stream), one, one, q_mask,
                         documents);
  }
  const Tensor scores = new_scores(in, Q);
  if (is_empty(in, scores, stream)) return scores;
  const Tensor tokens = loadable(D, 4, stream);
  PackedCodesCall call = call_of(in, tokens, d);
  call.scores = mutable_data_of<float>(scores);
  const HammingLaunch launch = plan_hamming(call, on.properties().sm_count);
  const Tensor workspace = new_tensor(Q, {launch.workspace_bytes}, ScalarType::Byte);
  check(launch_hamming(call, launch, workspace.mutable_data_ptr(), stream), "packed codes");
  return scores;
}

Tensor maxsim_hamming(Tensor Q, Tensor D, int64_t d, OptionalTensor q_mask, OptionalTensor d_mask) {
  return score_hamming(parse_hamming_inputs(Q, D, d, q_mask, d_mask), Q, D, d, q_mask, d_mask,
                       LATE_INTERACTION_QUALIFIED("maxsim_quantized"));
}

Tensor maxsim_hamming_packed(Tensor Q, Tensor D, int64_t d, OptionalTensor q_mask, Tensor cu_seqlens_d) {
  return score_hamming(parse_hamming_packed_inputs(Q, D, d, q_mask, cu_seqlens_d), Q, D, d, q_mask,
                       cu_seqlens_d, LATE_INTERACTION_QUALIFIED("maxsim_quantized_packed"));
}

// ---- codes of 4 bits, and bits, with int8 ----

Tensor score_4_bits(const QuantizedInputs& in, const Tensor& Q, const Tensor& D) {
  const int64_t d = in.sizes.d;
  STD_TORCH_CHECK(d <= kMostDims, "late_interaction: d must be at most ", kMostDims, " on CUDA, got ", d);
  const OnDevice on(Q);
  const cudaStream_t stream = on.stream();
  const Tensor scores = new_scores(in, Q);
  if (is_empty(in, scores, stream)) return scores;
  const Tensor tokens = loadable(D, 16, stream);
  PackedCodesCall call = call_of(in, tokens, d);
  call.scores = mutable_data_of<float>(scores);
  call.q_scale = in.q_scale;
  // Scales are not negative, so one that all documents' tokens share can multiply their maxima instead.
  if (in.d_scale.is_shared()) {
    call.shared_scale = in.d_scale.data;
  } else {
    call.d_scale = in.d_scale;
  }
  const PackedCodesLaunch launch = plan_packed_codes(call, on.properties().sm_count);
  const Tensor workspace = new_tensor(Q, {launch.workspace_bytes}, ScalarType::Byte);
  check(launch_packed_codes(call, launch, workspace.mutable_data_ptr(), stream), "packed codes");
  return scores;
}

// Its parameters are those of the operators, and those of score_hamming.
template <class Documents>
Tensor score_asymmetric(const QuantizedInputs& in, const Tensor& Q, const Tensor& D, const Tensor& scale_Q,
                        const Tensor& scale_D, const OptionalTensor& q_mask, const Documents& documents,
                        int64_t nbits, const char* quantized) {
  if (nbits == 4) return score_4_bits(in, Q, D);
  const OnDevice on(Q);
  Tensor codes = unpacked(D, in.sizes.d, on.stream());
  codes = torch::stable::narrow(codes, codes.dim() - 1, 0, in.sizes.d);
  return call_operator(quantized, Q, codes, scale_Q, scale_D, q_mask, documents);
}

Tensor maxsim_asymmetric(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                         OptionalTensor d_mask, int64_t nbits) {
  return score_asymmetric(parse_asymmetric_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask, nbits), Q, D,
                          scale_Q, scale_D, q_mask, d_mask, nbits,
                          LATE_INTERACTION_QUALIFIED("maxsim_quantized"));
}

Tensor maxsim_asymmetric_packed(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                                Tensor cu_seqlens_d, int64_t nbits) {
  return score_asymmetric(parse_asymmetric_packed_inputs(Q, D, scale_Q, scale_D, q_mask, cu_seqlens_d, nbits),
                          Q, D, scale_Q, scale_D, q_mask, cu_seqlens_d, nbits,
                          LATE_INTERACTION_QUALIFIED("maxsim_quantized_packed"));
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("maxsim_hamming", TORCH_BOX(&late_interaction::maxsim_hamming));
  m.impl("maxsim_hamming_packed", TORCH_BOX(&late_interaction::maxsim_hamming_packed));
  m.impl("maxsim_asymmetric", TORCH_BOX(&late_interaction::maxsim_asymmetric));
  m.impl("maxsim_asymmetric_packed", TORCH_BOX(&late_interaction::maxsim_asymmetric_packed));
}
