// The CUDA side of MUVERA's encodings: parse, partitions, blocks, count sketch. Nothing here waits for the
// device.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "../../common/muvera_tensors.h"
#include "../../common/registration.h"
#include "../runtime/op_helpers.h"
#include "launch.h"

namespace late_interaction {

namespace {

constexpr int64_t kSketchBytes = int64_t{256} << 20;  // of blocks before the sketch, but for one sequence

// Sequences and tokens may be any number; numbers within one sequence are 32-bit inside the kernels.
void check_sizes(const MuveraCall& call) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  STD_TORCH_CHECK(call.d <= kMaxTokens && call.d_proj <= kMaxTokens,
                  "late_interaction: d and d_proj must be at most 2^30 on CUDA, got ", call.d, " and ",
                  call.d_proj);
  STD_TORCH_CHECK(call.repetitions * call.partitions() <= kMost,
                  "late_interaction: repetitions * 2**k_sim must be below 2^31 on CUDA");
  STD_TORCH_CHECK(call.buckets == nullptr || (call.dims_before_sketch() <= kMost && call.d_final < kMost),
                  "late_interaction: dims before and after a count sketch must be below 2^31 on CUDA");
}

// The kernel reads projections 16 bytes at a time.
Tensor align_projection(MuveraCall& call, const Tensor& projection, cudaStream_t stream) {
  if (is_aligned(call.projection, 16)) return projection;
  const Tensor copy = new_tensor(projection, shape_of(projection), ScalarType::Float);
  const int64_t bytes = projection.numel() * int64_t{sizeof(float)};
  check(cudaMemcpyAsync(copy.mutable_data_ptr(), call.projection, bytes, cudaMemcpyDeviceToDevice, stream),
        "MUVERA's projection");
  call.projection = data_of<float>(copy);
  return copy;
}

// Some sequences at a time, whose blocks lie in a workspace before the sketch.
void encode_sketched(const MuveraCall& call, const Device& device, const uint16_t* codes, const Tensor& like,
                     cudaStream_t stream) {
  const int64_t dims = call.dims_before_sketch();
  const int64_t most = std::clamp<int64_t>(kSketchBytes / (dims * 4), 1, call.sequences);
  const Tensor blocks = new_tensor(like, {most, dims}, ScalarType::Float);
  const Tensor index = new_tensor(like, {2 * dims + 2 * call.d_final + 1 + most}, ScalarType::Int);
  auto* words = mutable_data_of<int32_t>(index);
  const MuveraSketch sketch{.dims = static_cast<int32_t>(dims),
                            .d_final = static_cast<int32_t>(call.d_final),
                            .buckets = call.buckets,
                            .signs = call.signs,
                            .counts = words,
                            .starts = words + call.d_final,
                            .unordered = words + 2 * call.d_final + 1,
                            .order = words + 2 * call.d_final + 1 + dims};
  check(launch_muvera_sketch_order(sketch, stream), "MUVERA's count sketch");
  auto* out = mutable_data_of<float>(blocks);
  for (int64_t first = 0; first < call.sequences; first += most) {
    const MuveraBlocks part{codes, first, std::min(most, call.sequences - first), out,
                            words + 2 * call.d_final + 1 + 2 * dims};
    check(launch_muvera_blocks(call, device, part, stream), "MUVERA's encodings");
    check(launch_muvera_sketch(sketch, part, call.encodings + first * call.d_final, stream),
          "MUVERA's count sketch");
  }
}

void encode(MuveraCall& call, const OptionalTensor& projection, const Tensor& tokens, const Device& device,
            cudaStream_t stream) {
  OptionalTensor aligned, codes;
  if (projection) aligned = align_projection(call, *projection, stream);
  uint16_t* partitions = nullptr;
  if (call.k_sim > 0) {
    const int64_t rows = call.offsets != nullptr ? call.packed_tokens : call.sequences * call.length;
    codes = new_tensor(tokens, {call.repetitions, rows}, ScalarType::Short);
    partitions = mutable_data_of<uint16_t>(*codes);
    check(launch_muvera_partitions(call, device, partitions, stream), "MUVERA's partitions");
  }
  if (call.buckets != nullptr) {
    encode_sketched(call, device, partitions, tokens, stream);
    return;
  }
  const MuveraBlocks all{partitions, 0, call.sequences, call.encodings, nullptr};
  check(launch_muvera_blocks(call, device, all, stream), "MUVERA's encodings");
}

Tensor muvera_encode(Tensor tokens, OptionalTensor mask, OptionalTensor cu_seqlens, Tensor hyperplanes,
                     OptionalTensor projection, OptionalTensor buckets, OptionalTensor signs, int64_t k_sim,
                     int64_t repetitions, int64_t d_proj, int64_t d_final, bool average, bool fill_empty,
                     double scale) {
  MuveraCall call = parse_muvera(tokens, mask, cu_seqlens, hyperplanes, projection, buckets, signs,
                                 {k_sim, repetitions, d_proj, d_final});
  check_sizes(call);
  call.average = average;
  call.fill_empty = fill_empty;
  call.scale = static_cast<float>(scale);
  const OnDevice on(tokens);
  const Tensor encodings = new_tensor(tokens, {call.sequences, call.dim()}, ScalarType::Float);
  if (call.sequences == 0) return encodings;
  call.encodings = mutable_data_of<float>(encodings);
  encode(call, projection, tokens, on.properties(), on.stream());
  return encodings;
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("muvera_encode", TORCH_BOX(&late_interaction::muvera_encode));
}
