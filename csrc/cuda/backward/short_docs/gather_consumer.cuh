// The consumers of a GatherTile: 16 query rows of a warp, added up stage after stage.
//
// A query row takes one token of each of the stage's eight documents. ldmatrix gathers these eight rows of
// shared memory and transposes them: operand A of mma.sync, 16 dims by 8 documents. Operand B has the
// gradients of the row's scores with the documents, each as two bf16 numbers, high and low, in two columns:
// the sum errs by 2^-17 of the gradient at most. The eight columns of an accumulator are those of four query
// rows, each of which multiplies by zeros in the columns of the others.
//
// For each row and document ldmatrix reads the 128 bytes of 64 dims from shared memory, and no others.
#pragma once

#include "../../pipeline/ring.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/mma.cuh"
#include "gather_stage.cuh"
#include "incidence_words.cuh"

namespace late_interaction {

inline constexpr int kGatherRows = 16;  // of a warp

template <class Tile>
struct GatherSums {
  static constexpr int kBlocks = Tile::kDims / 16;  // of 16 dims
  ptx::Accumulator x[kGatherRows / 4][kBlocks];

  // A lane has the two columns of one row of each group.
  __device__ __forceinline__ void put(float* to) const {
    const int lane = ptx::tid_x() % 32;
    to += lane % 4 * Tile::kSumWidth + lane / 4;
#pragma unroll
    for (int g = 0; g < kGatherRows / 4; ++g) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        float* const block = to + 4 * g * Tile::kSumWidth + 16 * m;
        block[0] = x[g][m][0] + x[g][m][1];
        block[8] = x[g][m][2] + x[g][m][3];
      }
    }
  }
};

// kAligned: runs start at multiples of 16 bytes, and eight neighbouring rows are of one query.
template <bool kAligned, class Tile>
class GatherPipeline {
 public:
  __device__ __forceinline__ GatherPipeline(const IncidenceArgs& args, const GatherTileShared& shared,
                                            int32_t first_row, int32_t begin, int32_t finish)
      : p(args), memory(shared), left(finish - begin) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * kGatherRows;
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      const uint32_t found = BlockQueryRow(p, first_row, row + k * kPlaceRows, kPlaceRows).offsets;
      const uint32_t offset =
          BlockQueryRow::offset(found, static_cast<uint32_t>(begin + lane % 8) * 2 * p.Lq);
      offsets[k / 2] = (k % 2 == 0 ? 0 : offsets[k / 2]) | offset << k % 2 * 16;
    }
#pragma unroll
    for (int g = 0; g < kGatherRows / 4; ++g) {
      queries |= 4 * BlockQueryRow(p, first_row, row + 4 * g + lane / 8, 1).query << 8 * g;
    }
  }

  __device__ __forceinline__ void add_to(GatherSums<Tile>& sums) {
    for (; left > 0; left -= kGatherDocs) {
      memory.consumer_wait(stage);
      const uint32_t loaded = add_stage(sums);
      memory.consumer_release(stage.stage, loaded);
      stage.advance(memory.stages);
    }
  }

 private:
  static constexpr int kPlaceRows = kAligned ? 8 : 1, kPlaces = kGatherRows / kPlaceRows;
  const IncidenceArgs& p;
  const GatherTileShared& memory;
  int32_t left;
  PipelineState stage;
  // Offsets in a stage of the rows' winners with the lane's document, two in a word. The next stage has the
  // eighth document after it, whose winners have the same offsets.
  uint32_t offsets[kPlaces / 2];
  uint32_t queries = 0;  // 4 times the query of the lane's row of each group, 8 bits each

  // The winners of the warp's rows with the lane's document, two in a word.
  __device__ __forceinline__ void read_winners(int lane, uint32_t (&winners)[kGatherRows / 2]) const {
    const uint32_t from = memory.winners(stage.stage) + lane % 8 * kGatherUnitVecs * 16;
    if constexpr (kAligned) {
#pragma unroll
      for (int k = 0; k < kPlaces; ++k) {
        const uint4 words = ptx::ld_shared_v4_b32(from + (offsets[0] >> 16 * k & 0xFFFF));
        winners[4 * k] = words.x, winners[4 * k + 1] = words.y;
        winners[4 * k + 2] = words.z, winners[4 * k + 3] = words.w;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kPlaces / 2; ++k) {
        uint32_t two_offsets = offsets[k];
        // Without TMA no registers are left in which the compiler could keep either half.
        if constexpr (!Tile::kTma) asm volatile("" : "+r"(two_offsets));
        winners[k] = ptx::ld_shared_u16(from + (two_offsets & 0xFFFF)) |
                     ptx::ld_shared_u16(from + (two_offsets >> 16)) << 16;
      }
    }
  }

  // Operand B of the g-th four rows in the lane's column: high or low numbers of the gradients with two
  // documents.
  __device__ __forceinline__ uint32_t read_grads(int lane, int g) const {
    using Words = IncidenceWords<typename Tile::T>;
    const uint32_t from =
        memory.grads(stage.stage) + lane % 4 * (8 * kMostIncidenceQueries) + (queries >> 8 * g & 0xFF);
    const float first = __uint_as_float(ptx::ld_shared(from)),
                second = __uint_as_float(ptx::ld_shared(from + 4 * kMostIncidenceQueries));
    const float2 high = Words::unpack(Words::pack(first, second));
    const float low = lane / 4 % 2 == 0 ? 0.0f : -1.0f;
    return Words::pack(fmaf(low, high.x, first), fmaf(low, high.y, second));
  }

  // Returns a word that depends on the last loads from the stage's tile, since the compiler may move the
  // products that use them behind the arrival that releases the stage. A word of all loads would take too
  // many registers; tools/pending_loads.py finds none of the others under way there.
  __device__ __forceinline__ uint32_t add_stage(GatherSums<Tile>& sums) const {
    uint32_t loaded = 0;
    // From the first row of a token: the lane's document, and its chunk there.
    const int lane = ptx::tid_x() % 32, token_of_lane = lane / 8;
    const uint32_t tile = memory.tile(stage.stage) + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
    uint32_t winners[kGatherRows / 2], grads[kGatherRows / 4];
#pragma unroll
    for (int g = 0; g < kGatherRows / 4; ++g) grads[g] = read_grads(lane, g);
    read_winners(lane, winners);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int g = 0; g < kGatherRows / 4; ++g) {
        const uint32_t pair = winners[2 * g + t / 2], winner = t % 2 == 0 ? pair & 0xFFFF : pair >> 16;
        const uint32_t from = tile + min(winner, static_cast<uint32_t>(p.Ld)) * (128 * kGatherDocs);
        const uint32_t row = add_row(sums.x[g], from, token_of_lane == t ? grads[g] : 0u);
        if (t == 3) loaded |= row;
      }
    }
    return loaded;
  }

  __device__ __forceinline__ uint32_t add_row(ptx::Accumulator (&sums)[GatherSums<Tile>::kBlocks],
                                              uint32_t from, uint32_t grads) const {
    uint32_t low[4];
    ptx::ldmatrix_x4_trans(low, from);
    ptx::mma_m16n8k8_bf16(sums[0], low[0], low[1], grads);
    ptx::mma_m16n8k8_bf16(sums[1], low[2], low[3], grads);
    if constexpr (Tile::kDims == 64) {
      uint32_t high[4];
      ptx::ldmatrix_x4_trans(high, from ^ 64);
      ptx::mma_m16n8k8_bf16(sums[2], high[0], high[1], grads);
      ptx::mma_m16n8k8_bf16(sums[3], high[2], high[3], grads);
      return low[0] | high[0];
    } else {
      uint32_t high[2];
      ptx::ldmatrix_x2_trans(high, from ^ 64);
      ptx::mma_m16n8k8_bf16(sums[2], high[0], high[1], grads);
      return low[0] | high[0];
    }
  }
};

}  // namespace late_interaction
