// A stage of the ring of grad_q_gathered, and the warps that fill it.
//
//   tile     [token][document][32 dims]. The 16-byte chunks of a row are permuted by the document's index, as
//            TMA's swizzle does if documents are the box's inner axis, so that rows of the stage's documents
//            share no bank, whichever tokens they are. Behind the last token is one of zeros: the winner of
//            query rows that have none.
//   winners  [octet][document][row of the octet], as in memory
//   grads    [octet][document], of the octet's query
#pragma once

#include "../../pipeline/ring.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/tma.cuh"
#include "args.h"

namespace late_interaction {

inline constexpr int kGatheredThreads = 32 * kGatheredWarps + 128;

struct GatheredRing : Ring {
  uint32_t tiles, side, tile_bytes, winner_bytes, side_bytes;

  __device__ __forceinline__ GatheredRing(const GatheredGradQArgs& p, uint32_t memory, uint32_t barriers)
      : Ring{barriers},
        tiles(memory),
        side(memory + p.stages * p.tile_bytes),
        tile_bytes(p.tile_bytes),
        winner_bytes(p.winner_bytes),
        side_bytes(p.side_bytes) {}
  __device__ __forceinline__ uint32_t tile(int stage) const { return tiles + stage * tile_bytes; }
  __device__ __forceinline__ uint32_t winners(int stage) const { return side + stage * side_bytes; }
  __device__ __forceinline__ uint32_t grads(int stage) const { return winners(stage) + winner_bytes; }
};

// Loads documents by TMA (sm_90a): one warp, beside three that look up winners.
struct TmaDocuments {
  static constexpr bool kTma = true;
  static constexpr int kDocs = gathered_docs(kTma), kLookUpThreads = 96;
  CUtensorMap map;

  // One warp: loads the tokens of all documents, a stage at a time.
  __device__ __forceinline__ void load(const GatheredGradQArgs& p, const GatheredRing& ring,
                                       int first_dim) const {
    const auto N = static_cast<int32_t>(p.N);
    PipelineState state;
    for (int32_t doc = 0; doc < N; doc += kDocs) {
      ring.producer_acquire(state);
      if (threadIdx.x % 32 == 0) {
        ring.producer_expect(state.stage, p.tile_bytes);
        ptx::tma_load_4d(ring.tile(state.stage), &map, ring.full(state.stage), first_dim, doc, 0, 0);
      }
      state.advance(p.stages);
    }
  }
};

// Loads documents by cp.async, in the threads of the four warps that look up winners.
struct CpAsyncDocuments {
  static constexpr bool kTma = false;
  static constexpr int kDocs = gathered_docs(kTma), kLookUpThreads = 128;

  // A thread's share of a stage: 16 bytes of a document's every eighth token.
  static __device__ __forceinline__ void copy(const GatheredGradQArgs& p, uint32_t tile, int32_t first_doc,
                                              int first_dim, int thread) {
    constexpr int kChunks = kGatheredDims / 8, kStep = kLookUpThreads / (kChunks * kDocs);
    const int chunk = thread % kChunks, doc = thread / kChunks % kDocs;
    const int32_t j = first_doc + doc, dim = first_dim + 8 * chunk;
    const bool exists = j < p.N && dim < p.d;
    const auto* from = static_cast<const uint8_t*>(p.D.data) + 2 * (j * p.D.item_stride + dim);
    const uint32_t to = tile + doc * 2 * kGatheredDims + ((chunk ^ doc / 2) << 4);
#pragma unroll 4
    for (int t = thread / (kChunks * kDocs); t <= p.Ld; t += kStep) {
      ptx::cp_async_16(to + t * kDocs * 2 * kGatheredDims, from + 2 * t * p.D.token_stride,
                       exists && t < p.Ld ? 16 : 0);
    }
  }
};

// Eight winners from `offset` bytes on in two vectors of memory. offset: even, below 16.
__device__ __forceinline__ uint4 shifted_winners(const uint4& low, const uint4& high, uint32_t offset) {
  uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int k = 0; k < 6; ++k) word[k] = (offset & 8) != 0 ? word[k + 2] : word[k];
#pragma unroll
  for (int k = 0; k < 5; ++k) word[k] = (offset & 4) != 0 ? word[k + 1] : word[k];
#pragma unroll
  for (int k = 0; k < 4; ++k) word[k] = __funnelshift_r(word[k], word[k + 1], (offset & 2) * 8);
  return {word[0], word[1], word[2], word[3]};
}

// Winners and gradients of the block's octets, from octet `first` of all on. A thread has one of the
// documents of each stage, and every so-many-th octet. Zeros stand behind the last octet and the last
// document, garbage behind the last row of a query.
//
// kAligned: an octet's winners start at a multiple of 16 bytes, so cp.async copies them. Else a thread loads
// the one or two vectors that hold them, and stores them shifted.
template <bool kAligned, class Documents>
class WinnerLookUp {
 public:
  // A thread arrives on the mbarrier of a full stage for its copies, and for what it stores.
  static constexpr bool kCopies = kAligned || !Documents::kTma, kStores = !kAligned;

  __device__ __forceinline__ WinnerLookUp(const GatheredGradQArgs& p, const GatheredRing& ring, int32_t first,
                                          int first_dim, int thread)
      : p(p),
        ring(ring),
        first(first),
        first_dim(first_dim),
        thread(thread),
        doc(thread % kDocs),
        octet(thread / kDocs) {}

  __device__ __forceinline__ void run() const {
    const auto N = static_cast<int32_t>(p.N);
    PipelineState state;
    for (int32_t j = doc; j < N + doc; j += kDocs) {
      ring.producer_acquire(state);
      if constexpr (!Documents::kTma) Documents::copy(p, ring.tile(state.stage), j - doc, first_dim, thread);
      copy(j, state.stage);
      if constexpr (kCopies) ring.producer_commit_cp_async(state.stage);
      if constexpr (kStores) ring.producer_commit(state.stage);
      state.advance(p.stages);
    }
  }

 private:
  static constexpr int kDocs = Documents::kDocs, kStep = Documents::kLookUpThreads / kDocs;
  const GatheredGradQArgs& p;
  const GatheredRing& ring;
  const int32_t first;
  const int first_dim, thread, doc, octet;

  __device__ __forceinline__ void copy(int32_t j, int stage) const {
    const uint32_t winners = ring.winners(stage) + doc * 16, grads = ring.grads(stage) + doc * 4;
#pragma unroll 2  // Four spill registers.
    for (int g = octet; g < p.octets; g += kStep) {
      const bool exists = first + g < p.all_octets && j < p.N;
      const int32_t whole = min(first + g, p.all_octets - 1);
      const int32_t i = p.by_query_octets.quotient(whole), octet_of_query = whole - i * p.query_octets;
      const uint8_t* from = static_cast<const uint8_t*>(p.winners) + i * p.query_winner_bytes +
                            2 * (int64_t{j} * p.Lq + octet_of_query * kGatheredOctetRows);
      const float* grad =
          static_cast<const float*>(p.grad) + i * p.grad_query_stride + j * p.grad_item_stride;
      const uint32_t to = winners + g * gathered_winner_bytes(kDocs), grad_to = grads + g * 4 * kDocs;
      if constexpr (kAligned) {
        ptx::cp_async_16(to, from, exists ? 16 : 0);
        ptx::cp_async_narrow<4>(grad_to, grad, exists ? 4 : 0);
      } else {
        const int rows = min(p.Lq - octet_of_query * kGatheredOctetRows, kGatheredOctetRows);
        const uint4 found = exists ? load(from, 2 * rows) : uint4{};
        ptx::st_shared_v4_f32(to, {__uint_as_float(found.x), __uint_as_float(found.y),
                                   __uint_as_float(found.z), __uint_as_float(found.w)});
        ptx::st_shared(grad_to, exists ? __float_as_uint(*grad) : 0u);
      }
    }
  }

  // Reads only vectors that hold winners.
  static __device__ __forceinline__ uint4 load(const uint8_t* from, uint32_t bytes) {
    const auto offset = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from)) & 15;
    const auto* vectors = reinterpret_cast<const uint4*>(from - offset);
    const uint4 low = vectors[0], high = offset + bytes > 16 ? vectors[1] : uint4{};
    return shifted_winners(low, high, offset);
  }
};

}  // namespace late_interaction
