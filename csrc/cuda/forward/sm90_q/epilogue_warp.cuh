// The end of a document in kernel.cuh: a consumer warpgroup leaves the maxima of its 128 rows in shared
// memory and goes on. Its epilogue warp computes rare rows again, scales the maxima, sums and stores them.
//
//     consumer        lane: its maxima of four rows       ->  EpilogueBuffer: 128 rows x 4 lanes of a quad
//     epilogue warp   lane: the maxima of every 32nd row  <-
//
// The buffer holds one document, which the epilogue warp reads at once; the next one comes some thousand
// clocks later. Of a split, the row maxima are stored, neither scaled nor summed.
#pragma once

#include "../epilogue.cuh"
#include "../sm90_pipeline.cuh"

namespace late_interaction {

// The j-th token range.
template <class Tile>
__device__ __forceinline__ DocRange doc_range_at(const ForwardArgs& p, const RowTile& tile, int32_t j) {
  if (Tile::kWhole || (!Tile::kDocRanges && (p.doc_ranges == nullptr || j >= p.N))) return {0, p.Ld, j, 0};
  return p.doc_ranges[document_index(p, tile.query, j)];
}

// True if ranges are splits of documents.
template <class Tile>
__device__ __forceinline__ bool leaves_maxima(const ForwardArgs& p) {
  return !Tile::kWhole && p.maxima != nullptr;
}

// All lanes of both sides arrive on the mbarriers, since each writes, or reads, different words.
template <class Tile>
struct EpilogueBuffer {
  static constexpr uint32_t kValueBytes = 128 * 16, kBytes = kValueBytes * (Tile::kWinners ? 2 : 1);
  uint32_t buffer;
  Ring ring;  // of one stage

  // A lane's maxima, of rows 64 * block + 16 * warp + 8 * half + lane / 4 in the order of 2 * block + half.
  template <class Best>
  __device__ __forceinline__ void give(Best (&best)[4], uint32_t parity) const {
    ring.producer_acquire({0, parity});
    const uint32_t lane_words = buffer + 256 * (ptx::tid_x() / 32 % 4) + 4 * (ptx::tid_x() % 32);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const uint32_t to = lane_words + 1024 * (h / 2) + 128 * (h % 2);
      ptx::st_shared(to, __float_as_uint(best[h].maximum()));
      if constexpr (Tile::kWinners) ptx::st_shared(to + kValueBytes, best[h].token());
      best[h].clear();
    }
    ring.producer_commit(0);
  }

  // Takes the maxima of rows lane, lane + 32, ... Of equal maxima the lowest token wins; the sentinel, as
  // unsigned, is the highest.
  __device__ __forceinline__ void take(Maximum (&best)[4], uint32_t parity) const {
    ring.consumer_wait({0, parity});
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const uint32_t from = buffer + 512 * o + 16 * (threadIdx.x % 32);
      const float4 m = ptx::ld_shared_v4_f32(from);
      const float value = max_keeping_nan(max_keeping_nan(m.x, m.y), max_keeping_nan(m.z, m.w));
      best[o] = {value, kSentinel};
      if constexpr (Tile::kWinners) {
        const uint4 tokens = ptx::ld_shared_v4_b32(from + kValueBytes);
        const auto where_best = [&](float maximum, uint32_t token) { return maximum == value ? token : ~0u; };
        best[o].token = static_cast<int32_t>(min(min(where_best(m.x, tokens.x), where_best(m.y, tokens.y)),
                                                 min(where_best(m.z, tokens.z), where_best(m.w, tokens.w))));
      }
    }
  }
};

// The row tile of an epilogue warp and what depends on it alone, in shared memory for want of registers.
template <class Tile>
struct EpilogueRows {
  static_assert(Tile::kLaneRows == 4);
  // Scales and queries of a lane's rows, as in LaneRows.
  float4 scale[32];
  int4 query[32];
  // Offsets, for document 0, of the winners of a lane's rows, and of the score that the lane stores, of the
  // query lane / 8 behind the first. -1: there is no such row, or score.
  longlong2 winner_at[Tile::kWinners ? 2 : 1][32];
  int64_t score_at[32];
  RowTile tile;
  int32_t first_query, last_query, first_partial;
  // Blocks of 32 rows that each query has in this warp: 1, 2 or 4. 0: some block has rows of two queries.
  int32_t blocks;

  __device__ __forceinline__ void take(const ForwardArgs& p, const RowTile& of, int consumer) {
    const int lane = threadIdx.x % 32;
    LaneRows<Tile> lane_rows;
    lane_rows.take(p, of, consumer);
    scale[lane] = {lane_rows.scale[0], lane_rows.scale[1], lane_rows.scale[2], lane_rows.scale[3]};
    query[lane] = {lane_rows.query[0], lane_rows.query[1], lane_rows.query[2], lane_rows.query[3]};
    if constexpr (Tile::kWinners) {
      const auto at = [&](int o) -> int64_t {
        const int64_t query_index = p.packed ? 0 : lane_rows.query[o];
        return lane_rows.query[o] < 0 ? -1 : query_index * p.winners_stride * p.Lq + lane_rows.query_token[o];
      };
      winner_at[0][lane] = {at(0), at(1)};
      winner_at[1][lane] = {at(2), at(3)};
    }
    const int32_t lane_query = lane_rows.first_query + lane / 8;
    const int64_t partial = int64_t{lane_query} * p.partials +
                            (lane_query == lane_rows.first_query ? lane_rows.first_partial : 0);
    score_at[lane] = lane % 8 == 0 && lane_query <= lane_rows.last_query ? partial * p.scores_stride : -1;
    __syncwarp();
    if (lane == 0) {
      tile = of;
      first_query = lane_rows.first_query;
      last_query = lane_rows.last_query;
      first_partial = lane_rows.first_partial;
      const bool full = !p.packed && of.count >= Tile::kWarpRows * (consumer + 1);
      const bool whole_queries = p.Lq % 32 == 0 && Tile::kWarpRows % p.Lq == 0;
      blocks = !full ? 0 : whole_queries ? p.Lq / 32 : p.Lq % Tile::kWarpRows == 0 ? 4 : 0;
    }
    __syncwarp();
  }
};

// Applies the query mask and the scales to the maxima, and stores winners.
template <class Tile>
__device__ __forceinline__ void scale_and_store_winners(const ForwardArgs& p, const EpilogueRows<Tile>& rows,
                                                        int32_t j, Maximum (&best)[4]) {
  const int lane = threadIdx.x % 32;
  const float4 loaded = rows.scale[lane];
  const float scale[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
  for (int o = 0; o < 4; ++o) best[o] = scaled(best[o], scale[o]);
  if constexpr (Tile::kWinners) {
    const int64_t first = int64_t{j} * p.Lq;
    const longlong2 low = rows.winner_at[0][lane], high = rows.winner_at[1][lane];
    const int64_t at[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      if (at[o] >= 0) store_winner(p.winners, p.wide_winners, at[o] + first, best[o].token);
    }
  }
}

// Stores each query's sum over the rows of this warp, four queries at a time. The sums of whole blocks of 32
// rows need no selection; the order of additions is the same.
template <class Tile>
__device__ __forceinline__ void store_sums(const ForwardArgs& p, const EpilogueRows<Tile>& rows, int32_t j,
                                           const Maximum (&best)[4]) {
  const int lane = threadIdx.x % 32;
  auto* scores = static_cast<float*>(p.scores);
  if (const int blocks = rows.blocks; blocks != 0) {
    const float low = best[0].value + best[1].value, high = best[2].value + best[3].value;
    float sum[4] = {best[0].value, best[1].value, best[2].value, best[3].value};
    if (blocks > 1) {
      sum[0] = blocks == 2 ? low : low + best[2].value + best[3].value;
      sum[1] = blocks == 2 ? high : 0.0f;
      sum[2] = sum[3] = 0.0f;
    }
    const float total = sum_each(sum, threadIdx.x);
    const int64_t at = rows.score_at[lane];
    if (at >= 0) scores[at + j] = total;
    return;
  }
  const int4 loaded = rows.query[lane];
  const int32_t query[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll 1
  for (int32_t first = rows.first_query; first <= rows.last_query; first += 4) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int o = 0; o < 4; ++o) sum[i] += query[o] == first + i ? best[o].value : 0.0f;
    }
    const float total = sum_each(sum, threadIdx.x);
    const int32_t lane_query = first + lane / 8;
    if (lane % 8 == 0 && lane_query <= rows.last_query) {
      const bool begun = lane_query == rows.first_query || p.packed;  // false: partial 0
      const int64_t partial = int64_t{lane_query} * p.partials + (begun ? rows.first_partial : 0);
      scores[partial * p.scores_stride + j] = total;
    }
  }
}

// The consumer that this epilogue warp serves: computed again at each use, for want of registers.
template <class Tile>
__device__ __forceinline__ int followed_consumer() {
  return ptx::tid_x() / 32 - Tile::kFirstEpilogueWarp;
}

// One warp: runs the epilogue of each document of its consumer.
template <class Tile>
__device__ void run_epilogue_warp(const ForwardArgs& p, const EpilogueBuffer<Tile>& from,
                                  EpilogueRows<Tile>& rows) {
  const WorkRange range = WorkRange::of_block(p);
  auto documents = static_cast<int32_t>(range.end - range.work_tile);
  auto tile_index = static_cast<int32_t>(range.work_tile / p.N);
  auto j = static_cast<int32_t>(range.work_tile % p.N);
  bool entered = false;
  for (uint32_t parity = 0; documents > 0; parity ^= 1, --documents) {
    if (!entered) {
      rows.take(p, row_tile(p, tile_index, Tile::kRows), followed_consumer<Tile>());
      entered = true;
    }
    Maximum best[Tile::kLaneRows];
    const DocRange doc_range = doc_range_at<Tile>(p, rows.tile, j);
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
    const auto tokens_of = [&] {
      return leaves_maxima<Tile>(p) ? Span{doc_range.argmax_base, doc_range.length}
                                    : whole_document(p, rows.tile.query, doc_range.document);
    };
    resolve_waiting_rows<Tile>(p, rows.tile, followed_consumer<Tile>(), doc_range.document, tokens_of,
                               WaitingMaxima<16>{from.buffer, 4}, best);
    from.ring.consumer_release(0);
    if (leaves_maxima<Tile>(p)) {
      leave_maxima<Tile>(p, rows.tile, followed_consumer<Tile>(), j, best);
    } else {
      scale_and_store_winners<Tile>(p, rows, doc_range.document, best);
      store_sums<Tile>(p, rows, doc_range.document, best);
    }
    if (++j == p.N) {
      j = 0;
      ++tile_index;
      entered = false;
    }
  }
}

}  // namespace late_interaction
