// The end of a document in kernel.cuh: a consumer warpgroup leaves the maxima of its 128 rows in shared
// memory and goes on. Its epilogue warp computes rare rows again, scales the maxima, sums and stores them.
//
//     consumer        lane: its maxima of four rows                    ->  EpilogueBuffer: 128 rows x 4 lanes
//     epilogue warp   lane: the maxima of every eighth row of 32 rows  <-                  of a quad
//
// The buffer holds one document, which the epilogue warp reads at once; the next one comes some thousand
// clocks later. Packed codes, whose tiles take least, have two buffers, and an epilogue of fewer instructions
// for documents whose maxima are finite. Of a split, the row maxima are stored, neither scaled nor summed.
#pragma once

#include "../epilogue.cuh"
#include "../sm90_pipeline.cuh"

namespace late_interaction {

// The j-th token range.
template <class Tile>
__device__ __forceinline__ DocRange doc_range_at(const ForwardArgs& p, const RowTile& tile, int32_t j) {
  if constexpr (Tile::kPackedCodes) return p.doc_ranges[j];
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
  static constexpr uint32_t kValueBytes = 128 * 16, kStageBytes = kValueBytes * (Tile::kWinners ? 2 : 1);
  static constexpr int kStages = Tile::kPackedCodes ? 2 : 1;
  static constexpr uint32_t kBytes = kStages * kStageBytes;
  uint32_t buffer;
  Ring ring;

  // The stage of the document that comes after `before` others.
  static __device__ __forceinline__ PipelineState state(uint32_t before) {
    return {static_cast<int>(before % kStages), before / kStages & 1};
  }
  __device__ __forceinline__ uint32_t stage(int i) const { return buffer + i * kStageBytes; }

  // A lane's maxima, of rows 64 * block + 16 * warp + 8 * half + lane / 4 in the order of 2 * block + half.
  template <class Best>
  __device__ __forceinline__ void give(Best (&best)[4], const PipelineState& to) const {
    ring.producer_acquire(to);
    put(best, to.stage, stage(to.stage) + 256 * (ptx::tid_x() / 32 % 4) + 4 * (ptx::tid_x() % 32));
  }
  // Where a lane's words begin in a stage, by fewer instructions than above.
  __device__ __forceinline__ uint32_t lane_words(int i) const {
    const uint32_t thread = ptx::tid_x();
    return stage(i) + 256 * (thread / 32 % 4) + 4 * (thread % 32);
  }
  // Into a stage that was acquired.
  template <class Best>
  __device__ __forceinline__ void put(Best (&best)[4], int i, uint32_t lane_words) const {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const uint32_t to = lane_words + 1024 * (h / 2) + 128 * (h % 2);
      ptx::st_shared(to, __float_as_uint(best[h].maximum()));
      if constexpr (Tile::kWinners) ptx::st_shared(to + kValueBytes, best[h].token());
      best[h].clear();
    }
    ring.producer_commit(i);
  }

  // Takes the maxima of the lane's rows, as Tile::slot. Of equal maxima the lowest token wins; the sentinel,
  // as unsigned, is the highest.
  __device__ __forceinline__ void take(Maximum (&best)[4], const PipelineState& from) const {
    ring.consumer_wait(from);
    const uint32_t lane_rows = first_lane_row(from.stage);
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const uint32_t row = lane_rows + 128 * o;
      const float4 m = ptx::ld_shared_v4_f32(row);
      const float value = max_keeping_nan(max_keeping_nan(m.x, m.y), max_keeping_nan(m.z, m.w));
      best[o] = {value, kSentinel};
      if constexpr (Tile::kWinners) {
        const uint4 tokens = ptx::ld_shared_v4_b32(row + kValueBytes);
        const auto where_best = [&](float maximum, uint32_t token) { return maximum == value ? token : ~0u; };
        best[o].token = static_cast<int32_t>(min(min(where_best(m.x, tokens.x), where_best(m.y, tokens.y)),
                                                 min(where_best(m.z, tokens.z), where_best(m.w, tokens.w))));
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t first_lane_row(int i) const {
    if constexpr (Tile::kPackedCodes) return stage(i) + 512 * (threadIdx.x / 8 % 4) + 16 * (threadIdx.x % 8);
    return stage(i) + 512 * (ptx::tid_x() / 8 % 4) + 16 * (ptx::tid_x() % 8);
  }
};

// Holds what a lane of an epilogue warp needs for each document of a row tile.
struct LaneEpilogue {
  float4 scale;      // of the lane's rows, as in LaneRows; packed codes: 0 for kMaskedRow
  int64_t score_at;  // offset, for document 0, of the score that the lane stores; -1: it stores none
  // Blocks of 32 rows that each query has in this warp: 1, 2 or 4. 0: some block has rows of two queries.
  int32_t blocks;
};

// The row tile of an epilogue warp and what depends on it alone, in shared memory for want of registers.
template <class Tile>
struct EpilogueRows {
  static_assert(Tile::kLaneRows == 4);
  // Scales and queries of a lane's rows, as in LaneRows.
  float4 scale[32];
  int4 query[32];
  // Offsets, for document 0, of the winners of a lane's rows. -1: there is no such row.
  longlong2 winner_at[Tile::kWinners ? 2 : 1][32];
  int64_t score_at[32];  // of LaneEpilogue
  RowTile tile;
  int32_t first_query, last_query, first_partial;  // of the warp, as in LaneRows
  int32_t blocks;                                  // of LaneEpilogue

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
    if (lane == 0) {
      tile = of;
      first_query = lane_rows.first_query;
      last_query = lane_rows.last_query;
      first_partial = lane_rows.first_partial;
    }
    __syncwarp();
    // From shared memory again: LaneRows took all registers.
    const int32_t each = query_blocks(), of_lane = query[lane].x;
    const bool begun = of_lane == first_query || p.packed;  // false: partial 0
    const int64_t partial = int64_t{of_lane} * p.partials + (begun ? first_partial : 0);
    score_at[lane] = each != 0 && lane % (8 * each) == 0 ? partial * p.scores_stride : -1;
    if (lane == 0) blocks = each;
    __syncwarp();
  }

  __device__ __forceinline__ LaneEpilogue lane_epilogue() const {
    const int lane = threadIdx.x % 32;
    LaneEpilogue held{scale[lane], score_at[lane], blocks};
    if constexpr (Tile::kPackedCodes) {
      for (float* s : {&held.scale.x, &held.scale.y, &held.scale.z, &held.scale.w}) {
        if (*s == kMaskedRow) *s = 0.0f;
      }
      held.blocks = __shfl_sync(kFullWarp, blocks, 0);  // so that the compiler knows that all lanes have it
    }
    return held;
  }

  // LaneEpilogue::blocks. From one row to the next the query is the same, or a later one.
  __device__ __forceinline__ int32_t query_blocks() const {
    const int32_t others = last_query - first_query, each = others == 3 ? 1 : others == 1 ? 2 : 4;
    bool all = others == 4 / each - 1;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const int32_t wanted = first_query + block / each;
      all = all && query[8 * block].x == wanted && query[8 * block + 7].w == wanted;
    }
    return all ? each : 0;
  }
};

// Applies the query mask and the scales to the maxima, and stores winners.
template <class Tile>
__device__ __forceinline__ void scale_and_store_winners(const ForwardArgs& p, const EpilogueRows<Tile>& rows,
                                                        const LaneEpilogue& held, int32_t j,
                                                        Maximum (&best)[4]) {
  const int lane = ptx::tid_x() % 32;
  const float4 loaded = Tile::kQuantized && !Tile::kPackedCodes ? held.scale : rows.scale[lane];
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
// rows need no selection, and the order of additions is the same.
template <class Tile>
__device__ __forceinline__ void store_sums(const ForwardArgs& p, const EpilogueRows<Tile>& rows,
                                           const LaneEpilogue& held, int32_t j, const Maximum (&best)[4]) {
  const int lane = ptx::tid_x() % 32;
  auto* scores = static_cast<float*>(p.scores);
  if (const int blocks = Tile::kQuantized ? held.blocks : rows.blocks; blocks != 0) {
    float sum = best[0].value + best[1].value + best[2].value + best[3].value;
    if (blocks > 2) sum += __shfl_xor_sync(kFullWarp, sum, 16);
    if (blocks > 1) sum += __shfl_xor_sync(kFullWarp, sum, 8);
#pragma unroll
    for (int partner = 4; partner > 0; partner /= 2) sum += __shfl_xor_sync(kFullWarp, sum, partner);
    const int64_t at = Tile::kQuantized ? held.score_at : rows.score_at[lane];
    if (at >= 0) scores[at + j] = sum;
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
    const float total = sum_each(sum, lane);
    const int32_t lane_query = first + lane / 8;
    if (lane % 8 == 0 && lane_query <= rows.last_query) {
      const bool begun = lane_query == rows.first_query || p.packed;  // false: partial 0
      const int64_t partial = int64_t{lane_query} * p.partials + (begun ? rows.first_partial : 0);
      scores[partial * p.scores_stride + j] = total;
    }
  }
}

// Does all for a document of packed codes that has tokens, and whose maxima are finite; else returns false.
// If a maximum is infinite or NaN, also that of a masked row, so is its product with a scale.
template <class Tile>
__device__ __forceinline__ bool finish_finite(const ForwardArgs& p, const EpilogueBuffer<Tile>& from,
                                              int stage, const EpilogueRows<Tile>& rows,
                                              const LaneEpilogue& held, const DocRange& doc_range,
                                              const Maximum (&best)[4]) {
  // 0 is added so that a masked row adds 0, and not -0.
  const Maximum terms[4] = {{fmaf(best[0].value, held.scale.x, 0.0f), kSentinel},
                            {fmaf(best[1].value, held.scale.y, 0.0f), kSentinel},
                            {fmaf(best[2].value, held.scale.z, 0.0f), kSentinel},
                            {fmaf(best[3].value, held.scale.w, 0.0f), kSentinel}};
  const float sum = terms[0].value + terms[1].value + terms[2].value + terms[3].value;
  if (leaves_maxima<Tile>(p) || !__all_sync(kFullWarp, fabsf(sum) < INFINITY && doc_range.length > 0)) {
    return false;
  }
  from.ring.consumer_release(stage);
  store_sums<Tile>(p, rows, held, doc_range.document, terms);
  return true;
}

// The consumer that this epilogue warp serves: computed again at each use, for want of registers.
template <class Tile>
__device__ __forceinline__ int followed_consumer() {
  return ptx::tid_x() / 32 - Tile::kFirstEpilogueWarp;
}

// Does all for a document: computes its maxima again that are NaN or infinite, stores winners and sums.
template <class Tile>
__device__ __forceinline__ void finish_document(const ForwardArgs& p, const EpilogueBuffer<Tile>& from,
                                                int stage, const EpilogueRows<Tile>& rows, LaneEpilogue& held,
                                                int32_t j, const DocRange& doc_range, Maximum (&best)[4]) {
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
  const bool rare = resolve_waiting_rows<Tile>(p, rows.tile, followed_consumer<Tile>(), doc_range.document,
                                               tokens_of, WaitingMaxima<16>{from.stage(stage), 4}, best);
  if constexpr (Tile::kQuantized) {
    if (rare || Tile::kPackedCodes) held = rows.lane_epilogue();  // so that the above has their registers
  }
  from.ring.consumer_release(stage);
  if (leaves_maxima<Tile>(p)) {
    leave_maxima<Tile>(p, rows.tile, followed_consumer<Tile>(), j, best);
  } else {
    scale_and_store_winners<Tile>(p, rows, held, doc_range.document, best);
    store_sums<Tile>(p, rows, held, doc_range.document, best);
  }
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
  // Codes alone hold them, whose tiles take least: a load of shared memory, busy with the wgmma, takes some
  // 150 clocks. Elsewhere registers are short.
  LaneEpilogue held;
  for (PipelineState state; documents > 0; state.advance(EpilogueBuffer<Tile>::kStages), --documents) {
    if (!entered) {
      rows.take(p, row_tile(p, tile_index, Tile::kRows), followed_consumer<Tile>());
      if constexpr (Tile::kQuantized) held = rows.lane_epilogue();
      entered = true;
    }
    Maximum best[Tile::kLaneRows];
    const DocRange doc_range = doc_range_at<Tile>(p, rows.tile, j);
    from.take(best, state);
    bool finished = false;
    if constexpr (Tile::kPackedCodes) {
      finished = finish_finite<Tile>(p, from, state.stage, rows, held, doc_range, best);
    }
    if (!finished) finish_document<Tile>(p, from, state.stage, rows, held, j, doc_range, best);
    if (++j == p.N) {
      j = 0;
      ++tile_index;
      entered = false;
    }
  }
}

}  // namespace late_interaction
