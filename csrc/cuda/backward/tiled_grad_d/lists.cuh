// The lists of grad_d_tiled: the winners of a document, stage by stage of query rows, in the order of tokens.
//
// A list is a stable counting sort of a stage's rows, by one producer warp. Its keys are the document's
// tokens in the order of the consumers that own them (kGradDConsumerKeys).
//   count    32 rows at a time: lanes with the same token count as one, and each learns its rank among them
//   offsets  sums over the keys before: where each token's entries begin, and, for consumers, end
//   entries  every lane scatters its rows
#pragma once

#include "../../../plan/backward/tiled_grad_d.h"
#include "../../pipeline/ring.cuh"
#include "../../primitives/argmax.cuh"
#include "../../primitives/prefix_sum.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/tma.cuh"
#include "../args.h"

namespace late_interaction {

// A query row that a token has won: the row's address in shared memory, and the gradient of the score.
struct alignas(8) ListedRow {
  uint32_t address;
  float grad;
};

// Lists come first, so that their addresses fit 16 bits.
template <GradDShape kShape>
struct alignas(128) GradDShared {
  ListedRow list[kGradDStages][kShape.docs][kShape.rows + kGradDReadAhead];
  uint16_t ends[kGradDStages][kShape.docs][kShape.keys()];  // the address behind each token's last entry
  uint32_t counts[kShape.docs * kShape.producers()][kShape.keys()];
  uint64_t barriers[2 * kGradDStages];
};

// Addresses of the ring of query rows, which lies behind GradDShared, and of its mbarriers.
template <GradDShape kShape>
struct GradDRing : Ring {
  static constexpr uint32_t kRows = kShape.rows;
  uint32_t rows, row_bytes, begin;

  __device__ __forceinline__ GradDRing(const BackwardArgs& p, const GradDShared<kShape>& shared)
      : Ring{ptx::smem_address(shared.barriers)},
        rows(static_cast<uint32_t>(p.Nq * p.Lq)),
        row_bytes(2 * p.d),
        begin(ptx::smem_address(&shared) + sizeof(shared)) {}

  __device__ __forceinline__ uint32_t stages() const { return (rows + kRows - 1) / kRows; }
  __device__ __forceinline__ uint32_t stage(int index) const { return begin + index * kRows * row_bytes; }

  // All lanes that list a stage's winners arrive for the lists, and one of them, or all, for the copies of
  // rows.
  static constexpr int kFullArrivals = 32 * kShape.docs + (kShape.tma ? 1 : 32 * kShape.docs);

  // A lane that lists winners starts to copy a share of the n-th rows of the batch to a stage of the ring.
  __device__ __forceinline__ void copy(const void* Q, uint32_t n, int index, uint32_t lane) const {
    const uint32_t first = n * kRows, bytes = min(rows - first, kRows) * row_bytes;
    const uint8_t* from = static_cast<const uint8_t*>(Q) + int64_t{first} * row_bytes;
    if constexpr (kShape.tma) {
      if (lane > 0) return;
      producer_expect(index, bytes);
      ptx::bulk_load(stage(index), from, bytes, full(index));
    } else {
#pragma unroll 4
      for (uint32_t byte = 16 * lane; byte < bytes; byte += 16 * 32 * kShape.docs) {
        ptx::cp_async_16(stage(index) + byte, from + byte, 16);
      }
      producer_commit_cp_async(index);
    }
  }
};

// A producer warp: it has a document, and every so-many-th stage.
template <GradDShape kShape>
struct ListProducer {
  static constexpr int kConsumers = kShape.consumers(), kProducers = kShape.producers();
  // A warp that waits for a stage must know from earlier waits that the fill before the last one has been
  // read: an mbarrier's parity tells two phases apart.
  static_assert(kProducers <= kGradDStages);
  static constexpr int kBatches = kShape.rows / 32;
  static constexpr uint32_t kNone = 0xFFFF;  // the row has no winner

  const BackwardArgs& p;
  GradDShared<kShape>& shared;
  const GradDRing<kShape>& ring;
  const int document, turn;
  uint32_t* counts;
  const uint16_t* winners;  // of the first query
  const float* grads;
  const uint32_t row_end;

  __device__ __forceinline__ ListProducer(const BackwardArgs& p, GradDShared<kShape>& shared,
                                          const GradDRing<kShape>& ring, int producer, int64_t first_j)
      : p(p),
        shared(shared),
        ring(ring),
        document(producer % kShape.docs),
        turn(producer / kShape.docs),
        counts(shared.counts[producer]),
        winners(static_cast<const uint16_t*>(p.winners) + (first_j + document) * p.Lq),
        grads(static_cast<const float*>(p.grad) + (first_j + document) * p.grad_item_stride),
        row_end(first_j + document < p.N ? ring.rows : 0) {}

  __device__ __forceinline__ static uint32_t row(uint32_t n, int batch) {
    return n * kShape.rows + 32 * batch + threadIdx.x % 32;
  }

  __device__ __forceinline__ void load_winners(uint32_t n, uint32_t (&winner)[kBatches]) const {
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
      winner[b] = kNone;
      if (row(n, b) >= row_end) continue;
      const uint32_t i = p.by_Lq.quotient(row(n, b)), s = row(n, b) - i * p.Lq;
      winner[b] = winners[i * (p.winners_stride * p.Lq) + s];
    }
  }

  __device__ __forceinline__ void load_grads(uint32_t n, float (&grad)[kBatches]) const {
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
      grad[b] = row(n, b) < row_end ? grads[p.by_Lq.quotient(row(n, b)) * p.grad_query_stride] : 0.0f;
    }
  }

  // Turns a winner into its token's key and, in the upper half, the rank among the token's entries; a row
  // without a winner into kNone.
  __device__ __forceinline__ void count(uint32_t (&winner)[kBatches]) const {
    const uint32_t lane = threadIdx.x % 32, lower = (1u << lane) - 1;
#pragma unroll
    for (int k = 0; k < kConsumers; ++k) counts[32 * k + lane] = 0;
    __syncwarp();
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
      const uint32_t t = winner[b], consumer_token = t / kConsumers;
      const bool won = t < static_cast<uint32_t>(p.Ld);
      const uint32_t key =
          won ? (t - consumer_token * kConsumers) * kGradDConsumerKeys + consumer_token : kNone;
      const unsigned same = __match_any_sync(kFullWarp, key);
      const uint32_t before = won ? counts[key] : 0;
      __syncwarp();
      if (won && (same & lower) == 0) counts[key] = before + __popc(same);
      __syncwarp();
      winner[b] = won ? key | (before + __popc(same & lower)) << 16 : kNone;
    }
  }

  // Turns counts into the offsets where tokens' entries begin, and writes the stage's ends. Returns the
  // number of entries.
  __device__ __forceinline__ uint32_t find_offsets(int stage) const {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t* lane_counts = counts + kConsumers * lane;
    uint16_t* ends = shared.ends[stage][document] + kConsumers * lane;
    uint32_t found[kConsumers], sum = 0;
#pragma unroll
    for (int k = 0; k < kConsumers; ++k) sum += found[k] = lane_counts[k];
    const uint32_t end = sum_up_to_lane(sum);
    uint32_t entry = end - sum;
    const uint32_t list = ptx::smem_address(shared.list[stage][document]);
#pragma unroll
    for (int k = 0; k < kConsumers; ++k) {
      lane_counts[k] = entry;
      entry += found[k];
      ends[k] = static_cast<uint16_t>(list + entry * sizeof(ListedRow));
    }
    __syncwarp();
    return __shfl_sync(kFullWarp, end, 31);
  }

  __device__ __forceinline__ void run() const {
    const uint32_t lane = threadIdx.x % 32, stages = ring.stages();
    uint32_t next[kBatches];
    load_winners(turn, next);
    PipelineState state;
    for (int k = 0; k < turn; ++k) state.advance(kGradDStages);
    for (uint32_t n = turn; n < stages; n += kProducers) {
      uint32_t now[kBatches];
      float grad[kBatches];
#pragma unroll
      for (int b = 0; b < kBatches; ++b) now[b] = next[b];
      load_winners(n + kProducers, next);
      count(now);
      load_grads(n, grad);
      ring.producer_acquire(state);
      ring.copy(p.Q.data, n, state.stage, 32 * document + lane);
      __syncwarp();
      const uint32_t entries = find_offsets(state.stage), rows = ring.stage(state.stage);
      ListedRow* list = shared.list[state.stage][document];
#pragma unroll
      for (int b = 0; b < kBatches; ++b) {
        if (now[b] == kNone) continue;
        list[counts[now[b] & 0xFFFF] + (now[b] >> 16)] = {rows + (32 * b + lane) * ring.row_bytes, grad[b]};
      }
      if (lane < kGradDReadAhead) list[entries + lane] = {rows, 0.0f};
      __syncwarp();
      ring.producer_commit(state.stage);
#pragma unroll
      for (int k = 0; k < kProducers; ++k) state.advance(kGradDStages);
    }
  }
};

}  // namespace late_interaction
