// Lists the pieces of long residual-compressed documents (CutDocuments), a thread a document; a warp writes
// down those of its 32 documents together. In no order: what comes of them does not depend on it.
#include <algorithm>

#include "../primitives/argmax.cuh"
#include "decompress.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) cut_documents(const __grid_constant__ ResidualArgs p) {
  const CutDocuments& cut = p.cut;
  const int lane = threadIdx.x % 32;
  const int64_t mine = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int32_t count = mine < p.documents.N ? span_of(p.documents, mine).count : 0;
  uint32_t long_ones = __ballot_sync(kFullWarp, count > 2 * cut.tokens);
  for (; long_ones != 0; long_ones &= long_ones - 1) {
    const int which = __ffs(long_ones) - 1;
    const int32_t tokens = __shfl_sync(kFullWarp, count, which);
    const int32_t pieces = (tokens + cut.tokens - 1) / cut.tokens;
    int32_t first = 0, slot = 0;
    if (lane == 0) {
      first = atomicAdd(cut.counts, pieces);
      slot = atomicAdd(cut.counts + 1, 1);
    }
    first = __shfl_sync(kFullWarp, first, 0);
    slot = __shfl_sync(kFullWarp, slot, 0);
    if (first > cut.most - pieces) continue;
    const auto document = static_cast<int32_t>(mine - lane + which);
    for (int32_t k = lane; k < pieces; k += 32) {
      cut.pieces[first + k] = {document, k * cut.tokens, slot, pieces};
    }
  }
}

}  // namespace

cudaError_t launch_cut_documents(const ResidualArgs& args, cudaStream_t stream) {
  const int64_t blocks = (args.documents.N + kThreads - 1) / kThreads;
  cut_documents<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace late_interaction
