// Lists the splits of long residual-compressed documents (SplitDocuments), a thread a document; a warp writes
// the splits of its 32 documents together. Their order differs from run to run, which changes no result.
#include <algorithm>

#include "../primitives/argmax.cuh"
#include "decompress.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) split_docs(const __grid_constant__ ResidualArgs p) {
  const SplitDocuments& to = p.split_docs;
  const int lane = threadIdx.x % 32;
  const int64_t mine = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int32_t count = mine < p.documents.N ? span_of(p.documents, mine).count : 0;
  uint32_t long_ones = __ballot_sync(kFullWarp, count > 2 * to.tokens);
  for (; long_ones != 0; long_ones &= long_ones - 1) {
    const int which = __ffs(long_ones) - 1;
    const int32_t tokens = __shfl_sync(kFullWarp, count, which);
    const int32_t splits = (tokens + to.tokens - 1) / to.tokens;
    int32_t first = 0, slot = 0;
    if (lane == 0) {
      first = atomicAdd(to.counts, splits);
      slot = atomicAdd(to.counts + 1, 1);
    }
    first = __shfl_sync(kFullWarp, first, 0);
    slot = __shfl_sync(kFullWarp, slot, 0);
    if (first > to.most - splits) continue;
    const auto document = static_cast<int32_t>(mine - lane + which);
    for (int32_t k = lane; k < splits; k += 32) {
      to.splits[first + k] = {document, k * to.tokens, slot, splits};
    }
  }
}

}  // namespace

cudaError_t launch_split_docs(const ResidualArgs& args, cudaStream_t stream) {
  const int64_t blocks = (args.documents.N + kThreads - 1) / kThreads;
  split_docs<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace late_interaction
