// What the CUDA side of several operators needs: how tensors come, and what their launches share.
#pragma once

#include <cuda_runtime.h>

#include <bit>

#include "../common/pair_tensors.h"
#include "../plan/copies.h"
#include "../plan/plan.h"
#include "check.h"
#include "device.h"
#include "kernels/backward_args.h"
#include "packed.h"
#include "pair_index.h"
#include "tensor_map.h"

namespace late_interaction {

using OptionalTensor = std::optional<Tensor>;

inline void fill_zero(const Tensor& x, cudaStream_t stream) {
  if (x.numel() == 0) return;
  check(cudaMemsetAsync(x.data_ptr(), 0, x.numel() * x.element_size(), stream), "zeros");
}

inline void fill_sentinel(const Tensor& winners, cudaStream_t stream) {
  if (winners.numel() == 0) return;
  const int64_t bytes = winners.numel() * winners.element_size();
  check(cudaMemsetAsync(winners.data_ptr(), 0xFF, bytes, stream), "winners");
}

inline int64_t element_bytes(Dtype dtype) {
  if (is_quantized(dtype)) return 1;
  return dtype == Dtype::fp64 ? 8 : dtype == Dtype::fp32 ? 4 : 2;
}

// Rows can be read `bytes` at a time: dense, aligned, and a whole number of pieces.
inline bool reads_in_pieces(const TokenView& view, int64_t d, int64_t element, int64_t bytes) {
  const auto whole = [&](int64_t elements) { return elements * element % bytes == 0; };
  return (view.dim_stride == 1 || d == 1) && whole(d) && whole(view.token_stride) &&
         whole(view.item_stride) && whole(view.query_stride) &&
         reinterpret_cast<uintptr_t>(view.data) % bytes == 0;
}

// The same of both inputs, in the vectors that the backward kernels read.
inline bool reads_in_vectors(const Inputs& in) {
  const int64_t element = element_bytes(in.dtype), vector = element == 8 ? 16 : 4 * element;
  return reads_in_pieces(in.Q, in.sizes.d, element, vector) &&
         reads_in_pieces(in.D, in.sizes.d, element, vector);
}

// Packed fp32 inputs that multiply in half precision are converted first: one pass, and the tensor cores read
// half as much.
inline std::optional<ScalarType> converted(Dtype dtype, Precision precision) {
  if (dtype != Dtype::fp32) return std::nullopt;
  if (precision == Precision::medium) return ScalarType::BFloat16;
  if (precision == Precision::fp16) return ScalarType::Half;
  return std::nullopt;
}

// Whether kernels that call pdl_wait may be launched to start before the kernel before them has ended.
inline bool device_supports_pdl(const Tensor& like) {
  return device_properties(like.get_device_index()).capability >= 90;
}

// Room for what index_packed works out.
struct PackedRoom {
  Tensor spans, row_queries;

  PackedRoom(const Inputs& in, const Tensor& like)
      : spans(new_tensor(like, {in.sizes.N, 2}, ScalarType::Int)),
        row_queries(new_tensor(like, {in.sizes.Lq}, ScalarType::Int)) {}

  PackedIndex index(const Inputs& in) const {
    PackedIndex index{};
    index.q_offsets = in.packed->q_offsets;
    index.d_offsets = in.packed->d_offsets;
    index.queries = in.packed->queries;
    index.documents = in.sizes.N;
    index.q_tokens = static_cast<int32_t>(in.sizes.Lq);
    index.d_tokens = static_cast<int32_t>(in.sizes.Ld);
    index.spans = static_cast<Span*>(spans.data_ptr());
    index.row_queries = static_cast<int32_t*>(row_queries.data_ptr());
    index.pdl = device_supports_pdl(spans);
    return index;
  }
};

inline bool aligned(const TokenView& view, const Inputs& in) {
  return reads_in_pieces(view, in.sizes.d, element_bytes(in.dtype), 16);
}

inline ForwardTraits traits_of(const Inputs& in, Precision precision, bool scaled) {
  return {.dtype = in.dtype,
          .precision = precision,
          .masked = in.d_mask.data != nullptr,
          .packed = in.packed.has_value(),
          .scaled = scaled,
          .copy_engine = aligned(in.Q, in) && aligned(in.D, in) && fits_tensor_maps(in)};
}

// How many winners of one (query, document), of `count` that lie behind each other, can be read at once.
inline int32_t winners_at_once(const void* winners, int64_t count, int64_t Ld) {
  const auto fit = [&](int64_t n) {
    return !wide_winners(Ld) && count % n == 0 && reinterpret_cast<uintptr_t>(winners) % (2 * n) == 0;
  };
  return fit(4) ? 4 : fit(2) ? 2 : 1;
}

// What the backward kernels take from their plan. A block's tokens are neighbours.
inline void take_plan(BackwardArgs& args, const BackwardPlan& plan) {
  args.split_bits = std::bit_width(static_cast<unsigned>(plan.split)) - 1;
  args.segments = plan.segments;
  args.segment_bits = std::bit_width(static_cast<unsigned>(plan.segments)) - 1;
  args.room = plan.chunk / plan.segments;
  args.chunk = plan.chunk;
  args.compact = plan.compact;
  args.grads_kept = plan.grads_kept;
  args.narrow_list = plan.narrow_list;
  args.memory = plan.memory;
  args.tile_tokens = plan.tile_tokens;
  args.tiles = plan.tiles;
  args.by_tiles = Divider(static_cast<uint32_t>(plan.tiles));
  args.token_step = 1;
  args.by_step = Divider(1);
  args.list_capacity = plan.list_capacity;
}

// Defined in launch_forward.cpp: the forward that the plan names, among those that are compiled.
cudaError_t launch_forward(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);

// Defined in maxsim.cpp, for the operators that score on their way: how inputs multiply; scores, and winners
// where given, of inputs that multiply so; and what `pick` wants of those of every query with every document.
Multiplied multiplied(const Inputs& in, const std::string& precision, bool normalize, int device);
void score_into(const Tensor& Q, const Tensor& D, const OptionalTensor& q_mask, const OptionalTensor& d_mask,
                const Inputs& in, bool normalize, const Multiplied& how, const Tensor& scores,
                const OptionalTensor& winners);
void pick_from_grid(const PairInputs& in, Precision precision, const PairPick& pick, const Tensor& like);

}  // namespace late_interaction
