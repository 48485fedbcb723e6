// grad_Q of many query rows in bf16, whose winners' rows ldmatrix reads from shared memory.
//
//   grad_Q[i, s] = sum over j of grad[i, j] * D[j, winner[i, j, s]]
//
// A query row takes one token of each of a stage's eight documents. ldmatrix gathers these eight rows of
// shared memory and transposes them, for four query rows at once: operand A of mma.sync, whose quarters are 8
// dims by 8 documents of a query row each. Operand B has the gradients of the query's scores with the
// documents, in one column for the two rows that share a range of K, and 0 elsewhere. So 16 rows share an
// accumulator of 8 dims. Of stages of four documents (before sm_90), an eight by eight matrix has two query
// rows: a quarter has 8 dims of one row and, so that they share no bank, 8 other dims of the other row, and
// each row has a column. A gradient is the sum of two bf16 numbers, high and low, which errs by 2^-17 of the
// gradient at most; each takes one product.
//
// Who owns what
//   block     some octets (eight neighbouring query rows of one query), and a slice of dims: documents pass
//             through shared memory once for all of these rows
//   warp      of 12, a share of the octets
//   producer  a warp that starts TMA's copies of documents, and three that copy winners and gradients
//             (cp.async); before sm_90, four that copy documents too
//
// Shared memory bounds it: 64 bytes are read for each row, document and 32 dims. Every sum is over documents
// in their order: the same bits in every run.
#pragma once

#include "../../ptx/pdl.cuh"
#include "../../ptx/wgmma.cuh"
#include "sums.cuh"

namespace late_interaction {

template <int kDocs>
class GatheredConsumer {
 public:
  __device__ __forceinline__ GatheredConsumer(const GatheredGradQArgs& args, const GatheredRing& ring,
                                              const WarpOctets& octets)
      : p(args), ring(ring), octets(octets) {
    const int lane = threadIdx.x % 32, doc = lane % kDocs;
    // As TMA's swizzle permutes the four chunks of a row. A matrix's second row begins with the third chunk.
    lane_bytes = doc * kRowBytes + (doc / 2 ^ lane % 8 / kDocs * 2) * 16;
  }

  __device__ __forceinline__ void add_to(GatheredSums& sums) const {
    const auto N = static_cast<int32_t>(p.N);
    PipelineState state;
#pragma unroll 1
    for (int32_t doc = 0; doc < N; doc += kDocs) {
      ring.consumer_wait(state);
      add_stage(state.stage, sums);
      ring.consumer_release(state.stage);
      state.advance(p.stages);
    }
  }

 private:
  static constexpr uint32_t kRowBytes = 2 * kGatheredDims, kTokenBytes = kDocs * kRowBytes,
                            kWinnerBytes = gathered_winner_bytes(kDocs);
  using Words = IncidenceWords<__nv_bfloat16>;
  const GatheredGradQArgs& p;
  const GatheredRing& ring;
  const WarpOctets& octets;
  uint32_t lane_bytes;  // offset of the lane's first chunk from the first row of a token

  // High and low numbers of the gradients with two documents.
  struct SplitGrads {
    uint32_t high, low;
    __device__ __forceinline__ explicit SplitGrads(uint2 bits) {
      const float2 grad{__uint_as_float(bits.x), __uint_as_float(bits.y)};
      high = Words::pack(grad.x, grad.y);
      const float2 rounded = Words::unpack(high);
      low = Words::pack(grad.x - rounded.x, grad.y - rounded.y);
    }
    __device__ __forceinline__ SplitGrads(uint32_t high, uint32_t low) : high(high), low(low) {}
    __device__ __forceinline__ SplitGrads where(bool counts) const {
      return {counts ? high : 0u, counts ? low : 0u};
    }
  };

  // Lanes have winners [quarter of the warp: two rows of an octet][document], or, of four documents,
  // [quarter] [row][document]. Lanes below 16 have the gradients of even octets, the others of the next
  // octet, each with two documents.
  __device__ __forceinline__ void add_stage(int stage, GatheredSums& sums) const {
    const int lane = threadIdx.x % 32;
    const uint32_t tile = ring.tile(stage) + lane_bytes;
    const uint32_t winners = ring.winners(stage) + octets.first * kWinnerBytes + lane % kDocs * 16 +
                             lane / 8 * 4 + lane % 8 / kDocs * 2;
    const uint32_t grads = ring.grads(stage) + lane % (kDocs / 2) * 8;
    SplitGrads both(0u, 0u);
#pragma unroll
    for (int g = 0; g < kGatheredMostOctets; ++g) {
      if (g >= octets.count) break;
      if (g % 2 == 0) {
        const int octet = min(octets.first + g + lane / 16, p.octets - 1);
        both = SplitGrads(ptx::ld_shared_v2_b32(grads + octet * 4 * kDocs));
      }
      const uint32_t none = p.Ld | p.Ld << 16;  // the token of zeros
      const SplitGrads split = both.where(lane / 16 == g % 2);
      if constexpr (kDocs == 8) {
        const uint32_t pair = __vminu2(ptx::ld_shared(winners + g * kWinnerBytes), none);
        add_rows(sums.x[g / 2], tile + (pair & 0xFFFF) * kTokenBytes, 0, split);
        add_rows(sums.x[g / 2], tile + (pair >> 16) * kTokenBytes, 2, split);
      } else {
        const uint32_t winner = min(ptx::ld_shared_u16(winners + g * kWinnerBytes), none & 0xFFFF);
        add_rows(sums.x[g / 2], tile + winner * kTokenBytes, lane % 4 / 2 * 2, split);
      }
    }
  }

  // Adds four rows: two to column `column` of the octet's four, two to the next one. from: the address of the
  // lane's row. Of four documents, eight rows: a lane's gradients are those of one column.
  __device__ __forceinline__ void add_rows(ptx::Accumulator (&sums)[GatheredSums::kBlocks], uint32_t from,
                                           int column, const SplitGrads& split) const {
    const int lane_column = threadIdx.x % 16 / 4;
    const SplitGrads first = split.where(lane_column == column),
                     second = split.where(lane_column == column + 1);
#pragma unroll
    for (int m = 0; m < GatheredSums::kBlocks; ++m) {
      ptx::MmaBf16::A rows;
      ptx::ldmatrix_x4_trans(rows.r, from ^ 16 * m);
      ptx::MmaBf16::multiply(sums[m], rows, {{first.high, second.high}});
      ptx::MmaBf16::multiply(sums[m], rows, {{first.low, second.low}});
    }
  }
};

template <class T, bool kAligned, class Documents>
__global__ void __launch_bounds__(kGatheredThreads, 1)
    grad_q_gathered(const __grid_constant__ GatheredGradQArgs p,
                    const __grid_constant__ Documents documents) {
  if constexpr (ptx::kIsSm90a || (!Documents::kTma && !ptx::kBeforeSm80)) {
    using LookUp = WinnerLookUp<kAligned, Documents>;
    constexpr int kLookUpThreads = Documents::kLookUpThreads;
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t barriers[2 * kGatheredMostStages];
    const GatheredRing ring(p, ptx::smem_address(shared), ptx::smem_address(barriers));
    if (threadIdx.x == 0) {
      constexpr int kProducers = Documents::kTma + kLookUpThreads * (LookUp::kCopies + LookUp::kStores);
      ring.init(p.stages, kProducers, 32 * kGatheredWarps);
      if constexpr (Documents::kTma) ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::pdl_wait_and_launch_dependents();
    const int tile = static_cast<int>(blockIdx.x) / p.slices;
    const int first_dim = (static_cast<int>(blockIdx.x) - tile * p.slices) * kGatheredDims;
    const int first_octet = tile * p.octets;
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    if (warp >= kGatheredWarps) {
      if constexpr (Documents::kTma) {
        ptx::setmaxnreg_dec<56>();
        if (warp == kGatheredWarps) return documents.load(p, ring, first_dim);
      }
      LookUp(p, ring, first_octet, first_dim, threadIdx.x - (kGatheredThreads - kLookUpThreads)).run();
    } else {
      if constexpr (Documents::kTma) ptx::setmaxnreg_inc<152>();
      GatheredSums sums{};
      const WarpOctets octets(p.octets, warp);
      GatheredConsumer<Documents::kDocs>(p, ring, octets).add_to(sums);
      ptx::named_barrier_sync(1, 32 * kGatheredWarps);  // all have left the ring
      sums.put<Documents::kDocs>(reinterpret_cast<float*>(shared), octets);
      ptx::named_barrier_sync(1, 32 * kGatheredWarps);
      write_summed_rows<T>(p, ring.tiles, first_octet, first_dim);
    }
  } else {
    __trap();
  }
}

}  // namespace late_interaction
