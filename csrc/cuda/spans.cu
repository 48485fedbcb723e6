// The span of each document that a mask leaves: from the first token that it keeps to the last. A warp a
// document.
#include <algorithm>

#include "forward.h"
#include "kernels/rows.cuh"
#include "kernels/winner.cuh"

namespace late_interaction {

namespace {

constexpr int kWarps = 8;

__global__ void __launch_bounds__(32 * kWarps)
    find_spans(const __grid_constant__ ForwardArgs p, int64_t documents, Span* spans) {
  constexpr int kWords =
      8;  // of 32 tokens, on their way at a time: one would leave the warp waiting for memory
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  for (int64_t at = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; at < documents; at += stride) {
    const int64_t query = p.layout == Layout::in_batch ? 0 : at / p.N;
    const uint8_t* mask =
        document_mask(p, static_cast<int32_t>(query), static_cast<int32_t>(at - query * p.N));
    int32_t first = p.Ld, end = 0;
    for (int32_t begin = 0; begin < p.Ld; begin += 32 * kWords) {
      bool kept[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int32_t t = begin + 32 * w + lane;
        kept[w] = t < p.Ld && mask[t * p.d_mask.token_stride] != 0;
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t bits = __ballot_sync(kFullWarp, kept[w]);
        if (bits == 0) continue;
        first = min(first, begin + 32 * w + __ffs(bits) - 1);
        end = begin + 32 * (w + 1) - __clz(bits);
      }
    }
    if (lane == 0) spans[at] = end == 0 ? Span{0, 0} : Span{first, end - first};
  }
}

}  // namespace

cudaError_t launch_spans(const ForwardArgs& args, int64_t documents, Span* spans, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>((documents + kWarps - 1) / kWarps, 1 << 20);
  find_spans<<<static_cast<unsigned>(blocks), 32 * kWarps, 0, stream>>>(args, documents, spans);
  return cudaGetLastError();
}

}  // namespace late_interaction
