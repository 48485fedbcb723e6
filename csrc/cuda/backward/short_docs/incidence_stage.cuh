// A stage of the ring of incidence_products.cuh: the embeddings of some units, and beside them (`side`)
// winners and gradients.
//
// Winners lie in runs. A run is the winners of one query with one document that a unit needs, contiguous in
// memory. It takes whole vectors of 16 bytes, with the offset in the first vector that it has in memory, so
// that cp.async copies whole vectors.
//
//            grad_D: runs [unit][document], gradients [unit][document]
//   side     +---------------+---------------+-- ... --+-----------------------+
//            | run           | run           |         | gradients             |
//            +---------------+---------------+-- ... --+-----------------------+
//            grad_Q: runs [unit][query of the block's rows], gradients [unit][query]
#pragma once

#include <cuda.h>

#include <type_traits>

#include "../../../plan/backward/short_docs.h"
#include "../../pipeline/ring.cuh"
#include "../../ptx/wgmma.cuh"
#include "args.h"

namespace late_interaction {

template <class T>
struct IncidenceWgmma;
template <>
struct IncidenceWgmma<__nv_bfloat16> : std::type_identity<ptx::WgmmaBf16> {};
template <>
struct IncidenceWgmma<__half> : std::type_identity<ptx::WgmmaFp16> {};

template <class Tile>
struct IncidenceShared;

struct NoTensorMap {};

// kTma: TMA, clusters and wgmma (sm_90a); else cp.async and mma.sync.
template <class T_, bool kGradQ_, int kSteps_, int kDims_, bool kTma_>
struct IncidenceTile {
  using T = T_;
  using Shared = IncidenceShared<IncidenceTile>;
  using Map = std::conditional_t<kTma_, CUtensorMap, NoTensorMap>;
  static constexpr bool kGathers = false, kTma = kTma_;
  static constexpr bool kGradQ = kGradQ_;
  static constexpr int kSteps = kSteps_, kDims = kDims_, kColumns = (kDims + 63) / 64;
  static constexpr int kUnitRows = 16 * kSteps, kUnits = incidence_stage_units(kSteps_),
                       kStageRows = kUnits * kUnitRows;
  static constexpr int kColumnBytes = kStageRows * 128, kTileBytes = kColumns * kColumnBytes;
  static constexpr int kSumWidth = kDims + 8, kUnitVecs = kIncidenceUnitVecs;
};

template <class Tile>
struct IncidenceShared : Ring {
  uint32_t first_stage;
  int stages;

  __device__ __forceinline__ IncidenceShared(const IncidenceArgs& p, uint32_t first_stage, uint32_t barriers)
      : Ring{barriers}, first_stage(first_stage), stages(p.stages) {}
  __device__ __forceinline__ uint32_t tile(int stage) const { return first_stage + stage * Tile::kTileBytes; }
  __device__ __forceinline__ uint32_t winners(int stage) const {
    return first_stage + stages * Tile::kTileBytes + stage * kIncidenceSideBytes;
  }
  __device__ __forceinline__ uint32_t grads(int stage) const {
    return winners(stage) + kIncidenceWinnerBytes;
  }
};

static_assert(kMostIncidenceDocs * incidence_run_vecs(16, 14) * incidence_stage_units(1) * 16 <=
              kIncidenceWinnerBytes);
static_assert(kMostIncidenceDocs * incidence_run_vecs(32, 14) * incidence_stage_units(2) * 16 <=
              kIncidenceWinnerBytes);
static_assert(kIncidenceUnitVecs * incidence_stage_units(1) * 16 <= kIncidenceWinnerBytes);
static_assert(4 * kMostIncidenceDocs * incidence_stage_units(1) <=
              kIncidenceSideBytes - kIncidenceWinnerBytes);
// A block's rows are of 14 queries at most, of which the first and the last may have few tokens in it.
static_assert(kIncidenceRows / kLeastIncidenceQuery + 2 <= kMostIncidenceQueries);

// An address's offset in a vector of 16 bytes.
__device__ __forceinline__ uint32_t low_bits(const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address));
}

__device__ __forceinline__ const uint8_t* first_winner(const IncidenceArgs& p, int64_t i, int64_t j, int s) {
  return static_cast<const uint8_t*>(p.winners) + i * p.query_bytes + 2 * (j * p.Lq + s);
}

// grad_Q: the queries whose tokens are a block's rows, and the vectors of their runs in a unit. All but the
// first and the last query have all tokens in the block.
struct BlockQueries {
  int32_t first, count, first_token;  // first query, number of queries, the first query's first token
  int32_t first_vecs, vecs;           // of the first query's run, and of each other run

  __device__ __forceinline__ BlockQueries(const IncidenceArgs& p, int32_t first_row) {
    const auto last_row = static_cast<int32_t>(min(int64_t{first_row} + p.block_rows, p.rows)) - 1;
    first = p.by_Lq.quotient(first_row);
    count = static_cast<int32_t>(p.by_Lq.quotient(last_row)) - first + 1;
    first_token = first_row - first * p.Lq;
    first_vecs = incidence_run_vecs(min(p.Lq - first_token, p.block_rows), p.run_offset);
    vecs = incidence_run_vecs(min(p.Lq, p.block_rows), p.run_offset);
  }
  // The query-th query's first vector, and first token in the block.
  __device__ __forceinline__ int first_vec(int query) const {
    return query == 0 ? 0 : first_vecs + (query - 1) * vecs;
  }
  __device__ __forceinline__ int begin(int query) const { return query == 0 ? first_token : 0; }
};

// A query row of a block, or the first of `count` rows that are read together: the winner's offset in a unit,
// from bit 16 on the run's offset in 16 bytes with document 0, and the index of the block's query. Behind the
// last rows the last rows repeat.
struct BlockQueryRow {
  uint32_t offsets;
  int32_t query;

  __device__ __forceinline__ BlockQueryRow(const IncidenceArgs& p, int32_t first_row, int row, int count) {
    const BlockQueries queries(p, first_row);
    const int32_t whole = min(first_row + row, static_cast<int32_t>(p.rows - count));
    const int32_t i = p.by_Lq.quotient(whole);
    query = i - queries.first;
    const int32_t begin = queries.begin(query);
    offsets = queries.first_vec(query) * 16 + 2 * (whole - i * p.Lq - begin) +
              ((low_bits(first_winner(p, i, 0, begin)) & 15) << 16);
  }
  // The winner's offset, with a document `further` bytes behind document 0.
  static __device__ __forceinline__ uint32_t offset(uint32_t offsets, uint32_t further) {
    return (offsets & 0xFFFF) + (((offsets >> 16) + further) & 15);
  }
};

}  // namespace late_interaction
