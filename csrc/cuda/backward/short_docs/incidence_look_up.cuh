// The producers of incidence_products.cuh: a warp that loads embeddings (TMA), and warps that take turns to
// copy winners and gradients (cp.async). Without TMA these copy embeddings too, in TMA's layout. No warp
// waits for its copies: they arrive on the mbarrier of their stage, so that all stages of the ring are under
// way.
#pragma once

#include "../../pipeline/ring.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/tma.cuh"
#include "gather_stage.cuh"

namespace late_interaction {

// Warps that look up, for a ring of so many stages: an mbarrier's parity tells two phases apart, so each warp
// must have waited for the fill before the last one.
template <class Tile>
__device__ __forceinline__ int look_up_warps(int stages) {
  return Tile::kTma ? 3 : min(stages, 4);
}

// One warp: loads the embeddings of the units [unit, end). Items of one unit come several to a box: nobody
// multiplies the last box's further units.
template <class Tile>
__device__ __forceinline__ void load_units(const IncidenceArgs& p, const CUtensorMap& map,
                                           const IncidenceShared<Tile>& memory, int32_t unit, int32_t end,
                                           int first_dim) {
  const bool leads = ptx::tid_x() % 32 == 0;
  PipelineState state;
  for (; unit < end; unit += Tile::kUnits) {
    memory.producer_acquire(state);
    const int boxes = p.units == 1 ? 1 : min(Tile::kUnits, end - unit);
    const int box_bytes = (p.units == 1 ? Tile::kUnits : 1) * Tile::kUnitRows * 128;
    if (leads) memory.producer_expect(state.stage, boxes * Tile::kColumns * box_bytes);
#pragma unroll 1
    for (int u = 0; u < boxes; ++u) {
      const int32_t item = p.by_units.quotient(unit + u),
                    first = (unit + u - item * p.units) * Tile::kUnitRows;
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c) {
        if (!leads) continue;
        ptx::tma_load_4d(memory.tile(state.stage) + c * Tile::kColumnBytes + u * Tile::kUnitRows * 128, &map,
                         memory.full(state.stage), first_dim + 64 * c, first, item, 0);
      }
    }
    state.advance(memory.stages);
  }
}

// One warp: loads the embeddings of the documents [doc, end), a stage in one box.
__device__ __forceinline__ void load_incidence_documents(const CUtensorMap& map,
                                                         const GatherTileShared& memory, int32_t doc,
                                                         int32_t end, int first_dim) {
  PipelineState state;
  for (; doc < end; doc += kGatherDocs) {
    memory.producer_acquire(state);
    if (ptx::tid_x() % 32 == 0) {
      memory.producer_expect(state.stage, memory.tile_bytes());
      ptx::tma_load_4d(memory.tile(state.stage), &map, memory.full(state.stage), first_dim, doc, 0, 0);
    }
    state.advance(memory.stages);
  }
}

// Loads the units of a stage by cp.async. A lane has 16 bytes of every fourth row.
template <class Tile>
__device__ __forceinline__ void copy_items(const IncidenceArgs& p, const IncidenceShared<Tile>&,
                                           uint32_t tile, int32_t unit, int units, int32_t, int first_dim) {
  const int lane = threadIdx.x % 32, chunk = lane % 8, dim = first_dim + 8 * chunk;
  const int32_t length = Tile::kGradQ ? p.Ld : p.Lq;
#pragma unroll 2
  for (int row = lane / 8; row < units * Tile::kUnitRows; row += 4) {
    const int u = row / Tile::kUnitRows;
    const int32_t item = p.by_units.quotient(unit + u);
    const int32_t token = (unit + u - item * p.units) * Tile::kUnitRows + row % Tile::kUnitRows;
    const auto* from = static_cast<const uint8_t*>(p.items.data) +
                       2 * (item * p.items.item_stride + token * p.items.token_stride + dim);
    const bool exists = token < length && dim < p.d;
    ptx::cp_async_16(tile + row * 128 + ((chunk ^ row % 8) << 4), from, exists ? 16 : 0);
  }
}

// Loads the documents of a stage by cp.async. A lane has 16 bytes of each token of two documents.
template <class Tile>
__device__ __forceinline__ void copy_items(const IncidenceArgs& p, const GatherTileShared& memory,
                                           uint32_t tile, int32_t doc, int, int32_t end, int first_dim) {
  const int lane = threadIdx.x % 32, chunk = lane % 8, dim = first_dim + 8 * chunk;
#pragma unroll
  for (int k = lane / 8; k < kGatherDocs; k += 4) {
    const bool exists = doc + k < end && dim < p.d;
    const auto* from =
        static_cast<const uint8_t*>(p.items.data) + 2 * ((doc + k) * p.items.item_stride + dim);
    const uint32_t to = tile + k * 128 + ((chunk ^ k) << 4);
#pragma unroll 4
    for (int t = 0; t <= memory.Ld; ++t) {
      ptx::cp_async_16(to + t * (kGatherDocs * 128), from + 2 * t * p.items.token_stride,
                       exists && t < memory.Ld ? 16 : 0);
    }
  }
}

// Copies a vector of a run, but nothing behind the run. `from` has the run's offset in a vector; `bytes` are
// left of the run from there on.
__device__ __forceinline__ void copy_run_vec(uint32_t to, const uint8_t* from, int bytes) {
  const uint32_t offset = low_bits(from) & 15;
  const int valid = min(bytes + static_cast<int>(offset), 16);
  if (valid > 0) ptx::cp_async_16(to, from - offset, valid);
}

// grad_D: runs and gradients [unit][document].
template <class Tile>
struct RowLookUp {
  const IncidenceArgs& p;
  int32_t first_j;

  __device__ __forceinline__ void copy(int32_t unit, int units, uint32_t winners, uint32_t grads) const {
    const int lane = threadIdx.x % 32, runs = units * p.block_docs;
    const auto last = static_cast<int>(p.N - 1 - first_j);
    const uint8_t* first = first_winner(p, 0, first_j, 0);
#pragma unroll 1
    for (int index = lane; index < runs * p.run_vecs; index += 32) {
      const int run = p.by_run_vecs.quotient(index), vec = index - run * p.run_vecs;
      const int u = p.by_docs.quotient(run), doc = min(run - u * p.block_docs, last);
      const int32_t i = p.by_units.quotient(unit + u), s = (unit + u - i * p.units) * Tile::kUnitRows;
      const int64_t begin = i * p.query_bytes + 2 * (int64_t{doc} * p.Lq + s) + 16 * vec;
      copy_run_vec(winners + 16 * index, first + begin, 2 * min(Tile::kUnitRows, p.Lq - s) - 16 * vec);
    }
    const float* first_grad = static_cast<const float*>(p.grad) + first_j * p.grad_item_stride;
#pragma unroll 1
    for (int index = lane; index < runs; index += 32) {
      const int u = p.by_docs.quotient(index), doc = min(index - u * p.block_docs, last);
      const int32_t i = p.by_units.quotient(unit + u);
      ptx::cp_async_narrow<4>(grads + 4 * index,
                              first_grad + i * p.grad_query_stride + doc * p.grad_item_stride, 4);
    }
  }
};

// grad_Q: runs and gradients [unit][query]. From stage to stage a lane's vectors and gradients are those of
// later documents. Gradients of units that a stage lacks are 0.
template <class Tile>
struct IncidenceLookUp {
  static constexpr int kVecs = kIncidenceUnitVecs / 32, kNothing = -16;
  const IncidenceArgs& p;
  const uint8_t* runs[kVecs];  // with document 0, from the lane's vectors on
  int32_t bytes[kVecs];
  const float* grads;  // of the lane's query; of none: null
  bool two_vecs;

  __device__ __forceinline__ IncidenceLookUp(const IncidenceArgs& args, int32_t first_row) : p(args) {
    const BlockQueries queries(p, first_row);
    const int lane = threadIdx.x % 32, query = lane % kMostIncidenceQueries;
    two_vecs = queries.first_vec(queries.count) > 32;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) take_vec(queries, first_row, 32 * k + lane, k);
    grads = query < queries.count
                ? static_cast<const float*>(p.grad) + (queries.first + query) * p.grad_query_stride
                : nullptr;
  }

  __device__ __forceinline__ void take_vec(const BlockQueries& queries, int32_t first_row, int index, int k) {
    const int later = index - queries.first_vecs, query = later < 0 ? 0 : 1 + later / queries.vecs;
    const int vec = index - queries.first_vec(query), s = queries.begin(query);
    const int row = (queries.first + query) * p.Lq + s - first_row;  // of the block
    const int rows = min(p.Lq - s, static_cast<int>(min(int64_t{p.block_rows}, p.rows - first_row)) - row);
    bytes[k] = query < queries.count ? 2 * rows - 16 * vec : kNothing;
    runs[k] = first_winner(p, queries.first + query, 0, s) + 16 * vec;
  }

  __device__ __forceinline__ void copy(int32_t unit, int units, uint32_t to, uint32_t to_grads) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int u = 0; u < units; ++u) {
      const int64_t further = int64_t{unit + u} * (2 * p.Lq);
      const uint32_t vec_address = to + (u * Tile::kUnitVecs + lane) * 16;
      copy_run_vec(vec_address, runs[0] + further, bytes[0]);
      if (two_vecs) copy_run_vec(vec_address + 32 * 16, runs[1] + further, bytes[1]);
    }
    if (grads == nullptr) return;
#pragma unroll 1
    for (int u = lane / kMostIncidenceQueries; u < Tile::kUnits; u += 32 / kMostIncidenceQueries) {
      const int index = u * kMostIncidenceQueries + lane % kMostIncidenceQueries;
      ptx::cp_async_narrow<4>(to_grads + 4 * index, grads + (unit + u) * p.grad_item_stride,
                              u < units ? 4 : 0);
    }
  }
};

// One of the warps that look up: fills every so-many-th stage, from `turn` on.
template <class Tile, class LookUp>
__device__ __forceinline__ void look_up(const typename Tile::Shared& memory, const LookUp& found, int turn,
                                        int32_t unit, int32_t end, int first_dim) {
  const int warps = look_up_warps<Tile>(memory.stages);
  if (turn >= warps) return;
  PipelineState state;
  for (int skipped = 0; skipped < turn; ++skipped) state.advance(memory.stages);
  for (unit += turn * Tile::kUnits; unit < end; unit += warps * Tile::kUnits) {
    memory.producer_acquire(state);
    const int units = min(Tile::kUnits, end - unit);
    if constexpr (!Tile::kTma) {
      copy_items<Tile>(found.p, memory, memory.tile(state.stage), unit, units, end, first_dim);
    }
    found.copy(unit, units, memory.winners(state.stage), memory.grads(state.stage));
    memory.producer_commit_cp_async(state.stage);
    for (int skipped = 0; skipped < warps; ++skipped) state.advance(memory.stages);
  }
}

}  // namespace late_interaction
