// Flags document tokens that are winners. Each thread reads the winner of a (query token, document). Several
// threads may set one flag, to the same value.
#include <algorithm>

#include "../primitives/argmax.cuh"
#include "kernels.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) argmax_mask(const void* winners, bool wide, int64_t count,
                                                        int64_t Nd, int64_t Lq, int64_t Ld, uint8_t* mask) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < count; at += stride) {
    const int32_t token = load_winner(winners, wide, at);
    if (token >= 0 && token < Ld) mask[at / Lq % Nd * Ld + token] = 1;
  }
}

}  // namespace

cudaError_t launch_argmax_mask(const void* winners, bool wide, const Sizes& s, uint8_t* mask,
                               cudaStream_t stream) {
  const int64_t count = s.Nq * s.N * s.Lq;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, 1 << 16));
  argmax_mask<<<blocks, kThreads, 0, stream>>>(winners, wide, count, s.N, s.Lq, s.Ld, mask);
  return cudaGetLastError();
}

}  // namespace late_interaction
