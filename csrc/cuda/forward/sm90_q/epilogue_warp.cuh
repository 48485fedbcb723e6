// The end of a document in kernel.cuh: a consumer warpgroup leaves the maxima of its 128 rows in shared
// memory and goes on. Its epilogue warp computes rare rows again, scales the maxima, sums and stores them.
//
//     consumer        lane: what it saw of four rows      ->  EpilogueBuffer: 128 rows x 4 lanes of a quad
//     epilogue warp   lane: the maxima of every 32nd row  <-
//
// The buffer holds one document, which the epilogue warp reads at once; the next one comes some thousand
// clocks later. A split of a document is treated like a document, but its rows' maxima are stored as they
// are, neither scaled nor summed.
#pragma once

#include "../epilogue.cuh"
#include "../sm90_pipeline.cuh"

namespace late_interaction {

// The token range at place j.
template <class Tile>
__device__ __forceinline__ DocRange doc_range_at(const ForwardArgs& p, const RowTile& tile, int32_t j) {
  if (Tile::kWhole || (!Tile::kDocRanges && (p.doc_ranges == nullptr || j >= p.N))) return {0, p.Ld, j, 0};
  return p.doc_ranges[document_index(p, tile.query, j)];
}

// Whether ranges are splits of documents.
template <class Tile>
__device__ __forceinline__ bool leaves_maxima(const ForwardArgs& p) {
  return !Tile::kWhole && p.maxima != nullptr;
}

// All lanes of both sides arrive on the mbarriers, since each writes, or reads, words of its own.
template <class Tile>
struct EpilogueBuffer {
  static constexpr uint32_t kValueBytes = 128 * 16, kBytes = kValueBytes * (Tile::kWinners ? 2 : 1);
  uint32_t buffer, barriers;

  __device__ __forceinline__ uint32_t full() const { return barriers; }
  __device__ __forceinline__ uint32_t empty() const { return barriers + 8; }

  __device__ __forceinline__ void init_barriers() const {
    ptx::mbarrier_init(full(), 128);
    ptx::mbarrier_init(empty(), 32);
  }

  // A lane's maxima, of rows 64 * block + 16 * warp + 8 * half + lane / 4 in the order of 2 * block + half.
  template <class Best>
  __device__ __forceinline__ void give(Best (&best)[4], uint32_t parity) const {
    ptx::mbarrier_wait_parity(empty(), parity ^ 1);
    const uint32_t mine = buffer + 256 * (ptx::tid_x() / 32 % 4) + 4 * (ptx::tid_x() % 32);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const uint32_t to = mine + 1024 * (h / 2) + 128 * (h % 2);
      ptx::st_shared(to, __float_as_uint(best[h].maximum()));
      if constexpr (Tile::kWinners) ptx::st_shared(to + kValueBytes, best[h].token());
      best[h].clear();
    }
    ptx::mbarrier_arrive(full());
  }

  // Takes the maxima of rows lane, lane + 32, ...
  __device__ __forceinline__ void take(Maximum (&best)[4], uint32_t parity) const {
    ptx::mbarrier_wait_parity(full(), parity);
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const uint32_t from = buffer + 512 * o + 16 * (threadIdx.x % 32);
      const float4 m = ptx::ld_shared_v4_f32(from);
      float4 tokens{};
      if constexpr (Tile::kWinners) tokens = ptx::ld_shared_v4_f32(from + kValueBytes);
      best[o] = {m.x, __float_as_int(tokens.x)};
      keep_better<Tile::kWinners>(best[o].value, best[o].token, m.y, __float_as_int(tokens.y));
      keep_better<Tile::kWinners>(best[o].value, best[o].token, m.z, __float_as_int(tokens.z));
      keep_better<Tile::kWinners>(best[o].value, best[o].token, m.w, __float_as_int(tokens.w));
    }
  }
  __device__ __forceinline__ void taken() const { ptx::mbarrier_arrive(empty()); }
};

// Computes rows again whose maximum is NaN or infinite, one after the other, as resolve_rare_rows does. That
// function is not called, since it has more registers than an epilogue warp. The maxima wait in the buffer,
// so that the rare case costs the common one no registers.
template <class Tile>
__device__ __forceinline__ void resolve_rows(const ForwardArgs& p, const RowTile& tile, int group,
                                             const DocRange& doc_range, uint32_t buffer,
                                             Maximum (&best)[Tile::kLaneRows]) {
  using Element = typename Tile::Element;
  bool rare = false;
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) rare = rare || !(fabsf(best[o].value) < INFINITY);
  if (!__any_sync(kFullWarp, rare)) return;
  const int32_t j = doc_range.document;
  const Passage<Element> passage(p, tile.query, j,
                                 leaves_maxima<Tile>(p) ? Span{doc_range.argmax_base, doc_range.length}
                                                        : whole_document(p, tile.query, j));
  if (!any_token_kept(p, passage)) {
#pragma unroll
    for (int o = 0; o < Tile::kLaneRows; ++o) best[o] = {-INFINITY, kSentinel};
    return;
  }
  const auto place = [&](int row) { return buffer + 16 * row; };
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    ptx::st_shared(place(32 * o + threadIdx.x % 32), __float_as_uint(best[o].value));
    ptx::st_shared(place(32 * o + threadIdx.x % 32) + 4, best[o].token);
  }
  __syncwarp();
#pragma unroll 1
  for (int of_group = 0; of_group < 128; ++of_group) {
    const int slot = 128 * group + of_group;
    const float value = __uint_as_float(ptx::ld_shared(place(of_group)));
    if (fabsf(value) < INFINITY || slot >= tile.count || !keeps_row(p, tile.first + slot)) continue;
    const Maximum exact =
        recompute_row(p, static_cast<const Element*>(p.Q.data) + row_offset(p, tile.first + slot), passage);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::st_shared(place(of_group), __float_as_uint(exact.value));
      ptx::st_shared(place(of_group) + 4, exact.token);
    }
  }
  __syncwarp();
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    best[o] = {__uint_as_float(ptx::ld_shared(place(32 * o + threadIdx.x % 32))),
               static_cast<int32_t>(ptx::ld_shared(place(32 * o + threadIdx.x % 32) + 4))};
  }
}

// Stores each query's sum over the rows of this warp, four queries at a time: a butterfly whose first two
// exchanges also give each of the four to eight lanes.
template <class Tile>
__device__ __forceinline__ void sum_four_by_four(const ForwardArgs& p, const LaneRows<Tile>& own, int32_t j,
                                                 const Maximum (&best)[Tile::kLaneRows]) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t first = own.first_query; first <= own.last_query; first += 4) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int o = 0; o < Tile::kLaneRows; ++o) sum[i] += own.query[o] == first + i ? best[o].value : 0.0f;
    }
#pragma unroll
    for (int half = 2; half > 0; half /= 2) {
      const bool upper = lane & 8 * half;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float got = __shfl_xor_sync(kFullWarp, upper ? sum[i] : sum[i + half], 8 * half);
        sum[i] = (upper ? sum[i + half] : sum[i]) + got;
      }
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum[0] += __shfl_xor_sync(kFullWarp, sum[0], offset);
    const int32_t query = first + lane / 8;
    if (lane % 8 == 0 && query <= own.last_query) {
      const bool begun =
          query == own.first_query || p.packed;  // false: the query begins here, with partial 0
      const int64_t partial = int64_t{query} * p.partials + (begun ? own.first_partial : 0);
      static_cast<float*>(p.scores)[partial * p.scores_stride + j] = sum[0];
    }
  }
}

// What a lane of an epilogue warp keeps in shared memory, since it has few registers: the document that comes
// next, and the lane's rows of the row tile.
template <class Tile>
struct EpilogueState {
  int32_t documents, tile_index, j;  // documents: those left
  RowTile tile;
  LaneRows<Tile> own;
};

// The consumer that this epilogue warp serves: computed again at each use, for want of registers.
template <class Tile>
__device__ __forceinline__ int followed_consumer() {
  return ptx::tid_x() / 32 - Tile::kFirstEpilogueWarp;
}

// One warp: runs the epilogue of each document of its consumer.
template <class Tile>
__device__ void run_epilogue_warp(const ForwardArgs& p, const EpilogueBuffer<Tile>& from,
                                  EpilogueState<Tile>& state) {
  const WorkRange range = WorkRange::mine(p);
  state.documents = static_cast<int32_t>(range.end - range.work_tile);
  state.tile_index = static_cast<int32_t>(range.work_tile / p.N);
  state.j = static_cast<int32_t>(range.work_tile % p.N);
  bool entered = false;
  for (uint32_t parity = 0; state.documents > 0; parity ^= 1) {
    if (!entered) {
      state.tile = row_tile(p, state.tile_index, Tile::kRows);
      state.own.take(p, state.tile, followed_consumer<Tile>());
      entered = true;
    }
    Maximum best[Tile::kLaneRows];
    const DocRange doc_range = doc_range_at<Tile>(p, state.tile, state.j);
    from.take(best, parity);
#pragma unroll
    for (int o = 0; o < Tile::kLaneRows; ++o) {
      if (doc_range.length == 0) best[o].value = -INFINITY;
      if constexpr (Tile::kWinners) {
        const int32_t token = max(best[o].token, 0);
        best[o].token = doc_range.argmax_base < 0 ? p.compacted.positions[~doc_range.argmax_base + token]
                                                  : token + doc_range.argmax_base;
      }
    }
    resolve_rows<Tile>(p, state.tile, followed_consumer<Tile>(), doc_range, from.buffer, best);
    from.taken();
    if (leaves_maxima<Tile>(p)) {
      leave_maxima<Tile>(p, state.tile, followed_consumer<Tile>(), state.j, best);
    } else {
      apply_scale_store_argmax<Tile, Tile::kWinners>(p, state.own, doc_range.document, best);
      sum_four_by_four<Tile>(p, state.own, doc_range.document, best);
    }
    --state.documents;
    if (++state.j == p.N) {
      state.j = 0;
      ++state.tile_index;
      entered = false;
    }
  }
}

}  // namespace late_interaction
