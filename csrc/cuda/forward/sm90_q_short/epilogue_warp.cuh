// The end of a group of documents in kernel.cuh: a consumer warpgroup leaves the maxima of its 128 rows over
// each document in shared memory and goes on. Its epilogue warp computes rare rows again, scales the maxima,
// stores the winners, and sums the rows of each query.
//
//     ShortEpilogueBuffer, twice    document 0 [128 rows]  document 1 [128 rows]  ...   fp32
//                                   document 0 [128 rows]  document 1 [128 rows]  ...   winners, a byte each
#pragma once

#include "../epilogue.cuh"
#include "../sm90_pipeline.cuh"

namespace late_interaction {

// A block's remaining work tiles, each a (row tile, document group). There are fewer than 2^31.
template <class Tile>
struct DocGroupRange {
  int32_t next, end;

  static __device__ __forceinline__ DocGroupRange of_block(const ForwardArgs& p) {
    const WorkRange range = WorkRange::of_block(p);
    return {static_cast<int32_t>(range.work_tile), static_cast<int32_t>(range.end)};
  }
};

// The document groups [first, end) of one row tile.
template <class Tile>
struct DocGroupWork {
  RowTile tile;
  int32_t first, end;

  // slots.cu writes the number of packed documents' groups behind the ends of the blocks' work tiles.
  static __device__ __forceinline__ int32_t count_groups(const ForwardArgs& p) {
    if constexpr (Tile::kPacked) return p.work_tile_ends[gridDim.x];
    return (static_cast<int32_t>(p.N) + Tile::kDocs - 1) / Tile::kDocs;
  }

  static __device__ __forceinline__ DocGroupWork take(const ForwardArgs& p, DocGroupRange<Tile>& range) {
    const RowTileItems items = take_row_tile_items(range.next, range.end, count_groups(p));
    return {row_tile(p, items.row_tile, Tile::kRows), items.first, items.end};
  }
};

// Two buffers, which a consumer and its epilogue warp take in turn. Each lane arrives on a buffer's
// mbarriers, since each writes and reads different values.
template <class Tile>
struct ShortEpilogueBuffer {
  // Bytes from one document's values to the next, so that lanes that store at once use different banks.
  static constexpr uint32_t kDocBytes = 4 * (128 + (Tile::kHalf % 2 == 1   ? 16
                                                    : Tile::kHalf % 4 == 2 ? 8
                                                                           : 4));
  static constexpr uint32_t kValueBytes = Tile::kSlots * kDocBytes;
  static constexpr uint32_t kBufferBytes = kValueBytes + Tile::kSlots * 128;
  static constexpr uint32_t kBytes = 2 * kBufferBytes + 4 * 128;
  uint32_t buffers;
  Ring ring;

  __device__ __forceinline__ uint32_t of(uint32_t group) const { return buffers + group % 2 * kBufferBytes; }
  // The epilogue warp keeps winners of recomputed rows here.
  __device__ __forceinline__ uint32_t spill() const { return buffers + 2 * kBufferBytes; }

  // The buffer of a consumer's group-th group.
  static __device__ __forceinline__ PipelineState state(uint32_t group) {
    return {static_cast<int>(group % 2), group / 2 & 1};
  }
};

// An epilogue warp's work on a document group. A lane has four neighbouring rows.
//
// If each lane's rows are of at most two queries, a sum takes a few shuffles: `head` is the sum of the lane's
// rows before the first row that begins a query, and `tail` the sum from that row on. Heads are added towards
// lower lanes, up to the lane where their query begins:
//
//     rows        0 1 2 3   4 5 6 7   8 9 . .          queries of 6 rows
//     lane        0         1         2
//     query       a a a a   a a b b   b b b b
//     head        a a a a   a a       b b b b   ->     lane 0: the sum of a
//     tail                      b b                    lane 1: the sum of b, from its tail and later heads
//
// Masked and missing rows have the scale 0.
template <class Tile>
struct ShortEpilogue {
  using Buffer = ShortEpilogueBuffer<Tile>;
  // Documents that a warp sums at a time.
  static constexpr int kBatch = Tile::kWinners ? 2 : Tile::kDocs >= 8 ? 4 : Tile::kDocs % 3 == 0 ? 3 : 2;
  const ForwardArgs& p;
  const Buffer from;
  const int consumer;  // whose maxima this warp takes
  RowTile tile;
  float head_scale[4], tail_scale[4];  // of the lane's rows; 0 for rows outside the head, or the tail
  uint32_t sentinels[2];               // 16 bits a row: the sentinel if it does not count, else 0
  int32_t query, query_token;          // of the lane's first row; -1: the lane has no rows
  int32_t first_query, first_partial;
  int32_t reach;       // later lanes whose heads are of the same query
  int32_t longest;     // lanes of a query's rows, at most
  int32_t summed;      // the query whose sum the lane stores; -1: none
  bool regular;        // each lane's rows are of at most two queries, and all queries have some
  bool begins_inside;  // a query begins among the rows of lane 0
  Maximum best[4];     // of the current document, where a group is taken document by document

  __device__ __forceinline__ void enter(const RowTile& rows) {
    tile = rows;
    LaneRows<Tile> lane_rows;
    lane_rows.take(p, tile, consumer);
    query = lane_rows.query[0];
    query_token = lane_rows.query_token[0];
    first_query = lane_rows.first_query;
    first_partial = lane_rows.first_partial;
    find_queries(lane_rows);
  }

  // Finds the rows where queries begin. The warp's first row counts as begun: lane 0 sums that query.
  __device__ __forceinline__ void find_queries(const LaneRows<Tile>& lane_rows) {
    const int lane = ptx::tid_x() % 32;
    const int32_t before = __shfl_up_sync(kFullWarp, lane_rows.query[3], 1);
    int begin = 4, begun = 0;
    summed = lane == 0 && count_rows() > 0 ? first_query : -1;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const bool first_of_all = lane == 0 && o == 0;
      const int32_t previous = o == 0 ? before : lane_rows.query[o == 0 ? 0 : o - 1];
      if (!first_of_all && lane_rows.query[o] >= 0 && lane_rows.query[o] != previous) {
        if (begun++ == 0) begin = o;
        if (lane > 0) summed = lane_rows.query[o];
      }
    }
    sentinels[0] = sentinels[1] = 0;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const bool counts = lane_rows.scale[o] != kMaskedRow;
      const float scale = counts ? lane_rows.scale[o] : 0.0f;
      head_scale[o] = o < begin ? scale : 0.0f;
      tail_scale[o] = o < begin ? 0.0f : scale;
      if (!counts) sentinels[o / 2] |= uint32_t{kNarrowSentinel} << (o % 2 * 16);
    }
    const uint32_t begins = __ballot_sync(kFullWarp, begin < 4), here = begins >> lane;
    reach = here != 0 ? __ffs(here) - 1 : 31 - lane;
    longest = Tile::kPacked ? 32 : min(32, (p.Lq + 3) / 4);
    begins_inside = (begins & 1) != 0;
    const int queries = __popc(begins) + (count_rows() > 0 ? 1 : 0);
    regular = !__any_sync(kFullWarp, begun > 1) &&
              (count_rows() <= 0 || queries == lane_rows.last_query - first_query + 1);
  }

  __device__ __forceinline__ float scale_of(int o) const { return head_scale[o] + tail_scale[o]; }
  __device__ __forceinline__ bool row_counts(int o) const {
    return (sentinels[o / 2] >> (o % 2 * 16) & 1) == 0;
  }

  // The sums over documents in slots [g, g + kBatch), and their winners. Returns 0, or NaN where a maximum is
  // not finite. j: the document of slot i of them.
  template <class DocumentOf>
  __device__ __forceinline__ float sum_batch(int g, int slots, uint32_t buffer,
                                             DocumentOf document_of) const {
    const int lane = ptx::tid_x() % 32;
    float head[kBatch], tail[kBatch], check = 0.0f;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float4 v =
          ptx::ld_shared_v4_f32(buffer + min(g + i, Tile::kSlots - 1) * Buffer::kDocBytes + 16 * lane);
      head[i] =
          fmaf(v.w, head_scale[3], fmaf(v.z, head_scale[2], fmaf(v.y, head_scale[1], v.x * head_scale[0])));
      tail[i] =
          fmaf(v.w, tail_scale[3], fmaf(v.z, tail_scale[2], fmaf(v.y, tail_scale[1], v.x * tail_scale[0])));
      if (g + i < slots) check = fmaf(head[i] + tail[i], 0.0f, check);
    }
#pragma unroll 1
    for (int offset = 1; offset < longest; offset *= 2) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float behind = __shfl_down_sync(kFullWarp, head[i], offset);
        if (offset <= reach) head[i] += behind;
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float behind = __shfl_down_sync(kFullWarp, head[i], 1);
      tail[i] += lane == 31 ? 0.0f : behind;
      if (g + i >= slots) break;
      const int32_t j = document_of(i);  // by all lanes
      if (summed >= 0) *score(summed, j) = lane == 0 ? head[i] : tail[i];
      if (begins_inside && lane == 0) *score(first_query + 1, j) = tail[i];
      if constexpr (Tile::kWinners) {
        const uint32_t four = ptx::ld_shared(buffer + Buffer::kValueBytes + 128 * (g + i) + 4 * lane);
        if (query >= 0) {
          store_winners(
              j, {__byte_perm(four, 0, 0x4140) | sentinels[0], __byte_perm(four, 0, 0x4342) | sentinels[1]});
        }
      }
    }
    return check;
  }

  // The score, or partial, that takes the sum of a query's rows in this warp.
  __device__ __forceinline__ float* score(int32_t of_query, int32_t j) const {
    const bool begun = of_query == first_query || Tile::kPacked;  // false: partial 0
    const int64_t partial = int64_t{of_query} * p.partials + (begun ? first_partial : 0);
    return static_cast<float*>(p.scores) + partial * p.scores_stride + j;
  }

  // Lanes that sum a query's rows together: about one for eight rows, a power of two.
  __device__ __forceinline__ int count_sum_lanes() const {
    const int32_t rows_a_query = Tile::kPacked ? p.Lq / max(p.queries, 1) : p.Lq;
    return min(16, 1 << (31 - __clz(max(rows_a_query / 8, 1))));
  }

  __device__ __forceinline__ int32_t count_rows() const {
    return min(Tile::kWarpRows, tile.count - Tile::kWarpRows * consumer);
  }

  // Takes the maxima over a slot from the buffer.
  __device__ __forceinline__ void load(uint32_t values, uint32_t tokens) {
    const int lane = ptx::tid_x() % 32;
    const float4 v = ptx::ld_shared_v4_f32(values + 16 * lane);
    const uint32_t four = Tile::kWinners ? ptx::ld_shared(tokens + 4 * lane) : 0;
    best[0] = {v.x, static_cast<int32_t>(four & 0xFF)};
    best[1] = {v.y, static_cast<int32_t>(four >> 8 & 0xFF)};
    best[2] = {v.z, static_cast<int32_t>(four >> 16 & 0xFF)};
    best[3] = {v.w, static_cast<int32_t>(four >> 24)};
  }

  // Multiplies the maxima over document j by the rows' scales, leaves them in the buffer, and stores winners.
  __device__ __forceinline__ void scale_and_store_winners(int32_t j, uint32_t values) {
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      best[o] = scaled(best[o], row_counts(o) ? scale_of(o) : kMaskedRow);
    }
    ptx::st_shared_v4_f32(values + 16 * (ptx::tid_x() % 32),
                          {best[0].value, best[1].value, best[2].value, best[3].value});
    if constexpr (Tile::kWinners) {
      if (query < 0) return;
      if (Tile::kPacked && p.wide_winners) {
#pragma unroll
        for (int o = 0; o < 4; ++o) store_wide_winner(j, o, best[o].token);
      } else {
        const auto narrow = [&](int o) { return static_cast<uint32_t>(best[o].token) & 0xFFFF; };
        store_winners(j, {narrow(0) | narrow(1) << 16, narrow(2) | narrow(3) << 16});
      }
    }
  }

  __device__ __forceinline__ void store_wide_winner(int32_t j, int o, int32_t token) const {
    if (o >= count_rows() - 4 * static_cast<int>(ptx::tid_x() % 32)) return;
    static_cast<int32_t*>(p.winners)[int64_t{j} * p.Lq + query_token + o] = token;
  }

  // Winners of the lane's rows over document j, in 16 bits each.
  __device__ __forceinline__ void store_winners(int32_t j, uint2 four) const {
    const auto winner = [&](int o) {
      return static_cast<uint16_t>((o < 2 ? four.x : four.y) >> (o % 2 * 16));
    };
    const int32_t rows = count_rows() - 4 * static_cast<int>(ptx::tid_x() % 32);  // from the lane's first on
    if constexpr (Tile::kPacked) {
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        const int32_t token = winner(o) == kNarrowSentinel ? kSentinel : winner(o);
        if (o < rows) store_winner(p.winners, p.wide_winners, int64_t{j} * p.Lq + query_token + o, token);
      }
      return;
    }
    uint16_t* to = static_cast<uint16_t*>(p.winners) + (query * p.winners_stride + j) * p.Lq + query_token;
    if (p.Lq % 4 == 0) {  // the lane's rows are of one query
      ptx::st_global_vec(to, four);
      return;
    }
    int32_t left = p.Lq - query_token;  // rows of the query from this one on
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      if (o < rows) *to = winner(o);
      ++to;
      if (--left == 0) {
        to += (p.winners_stride - 1) * p.Lq;
        left = p.Lq;
      }
    }
  }

  // The warp's rows of a query.
  __device__ __forceinline__ Span rows_of(int32_t of_query, int32_t rows) const {
    const int32_t first_row = tile.first + Tile::kWarpRows * consumer;
    Span span{of_query * p.Lq, p.Lq};
    if constexpr (Tile::kPacked) span = packed_span(p.q_offsets, of_query, p.Lq);
    const int32_t begin = max(span.first - first_row, 0);
    return {begin, min(span.first + span.length - first_row, rows) - begin};
  }

  // Stores the sum of each query's rows in this warp over the documents that end in this group. `ending` has
  // a bit for each such slot; lane `slot` has the document's number.
  __device__ __forceinline__ void sum_queries_of_group(int32_t document, uint32_t ending,
                                                       uint32_t buffer) const {
    const int sum_lanes = count_sum_lanes(), sums_at_once = 32 / sum_lanes;
    const int lane = ptx::tid_x() % 32, part = lane & (sum_lanes - 1);
    LaneRows<Tile> lane_rows;
    lane_rows.take(p, tile, consumer);
    const int sums = (lane_rows.last_query - first_query + 1) * Tile::kDocs;
    const int32_t rows = count_rows();
#pragma unroll 1
    for (int first = 0; first < sums; first += sums_at_once) {
      const int at = first + lane / sum_lanes, nth = at / Tile::kDocs, slot = at % Tile::kDocs;
      const int32_t j = __shfl_sync(kFullWarp, document, slot);
      const bool exists = at < sums && (ending >> slot & 1) != 0;
      float sum = 0.0f;
      if (exists) {
        const Span span = rows_of(first_query + nth, rows);
        const uint32_t values = buffer + slot * Buffer::kDocBytes + 4 * span.first;
#pragma unroll 4
        for (int32_t row = part; row < span.length; row += sum_lanes)
          sum += __uint_as_float(ptx::ld_shared(values + 4 * row));
      }
#pragma unroll 1
      for (int partner = sum_lanes / 2; partner > 0; partner /= 2)
        sum += __shfl_xor_sync(kFullWarp, sum, partner);
      if (exists && part == 0) *score(first_query + nth, j) = sum;
    }
  }

  // Takes a group of whole documents.
  __device__ __forceinline__ void take(int32_t group, uint32_t handed) {
    const int32_t j = group * Tile::kDocs;
    const int docs = min(Tile::kDocs, static_cast<int>(p.N) - j);
    const uint32_t buffer = from.of(handed);
    from.ring.consumer_wait(from.state(handed));
    if (!regular || !sum_batches(docs, buffer, [&](int slot) { return j + slot; })) {
#pragma unroll 1
      for (int g = 0; g < docs; ++g) take_slot(j + g, 0, g, buffer, true);
      __syncwarp();
      sum_queries_of_group(j + ptx::tid_x() % 32, (1u << docs) - 1, buffer);
    }
    from.ring.consumer_release(handed % 2);
  }

  // Returns whether all maxima were finite; if not, the stored results are wrong.
  template <class DocumentOf>
  __device__ __forceinline__ bool sum_batches(int slots, uint32_t buffer, DocumentOf document_of) const {
    float check = 0.0f;
#pragma unroll 1
    for (int g = 0; g < slots; g += kBatch)
      check += sum_batch(g, slots, buffer, [&](int i) { return document_of(g + i); });
    return __all_sync(kFullWarp, check == 0.0f);
  }

  // Slot g, whose first token has index `base` in document j. `best` goes from slot to slot until one `ends`.
  __device__ __forceinline__ void take_slot(int32_t j, int32_t base, int g, uint32_t buffer, bool ends) {
    const uint32_t values = buffer + g * Buffer::kDocBytes;
    const Maximum before[4] = {best[0], best[1], best[2], best[3]};
    load(values, buffer + Buffer::kValueBytes + 128 * g);
    if constexpr (Tile::kPacked) {
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        best[o].token += base;
        if (base > 0) {
          Maximum merged = before[o];
          keep_better<Tile::kWinners>(merged.value, merged.token, best[o].value, best[o].token);
          best[o] = merged;
        }
      }
    }
    if (!ends) return;
    // The row tile is entered again rather than kept, for want of registers.
    if (resolve_waiting_rows<Tile>(
            p, tile, consumer, j, [&] { return whole_document(p, tile.query, j); },
            WaitingMaxima<4>{values, from.spill() - values}, best)) {
      enter(tile);
    }
    scale_and_store_winners(j, values);
  }

  // Takes a group of packed documents, whose slots may be several, one after the other.
  __device__ __forceinline__ void take_slots(int32_t group, uint32_t handed) {
    const int lane = ptx::tid_x() % 32;
    DocRange slot{0, 0, -1, 0};
    if (lane <= Tile::kDocs) slot = p.doc_ranges[group * Tile::kDocs + lane];
    const int32_t next = __shfl_down_sync(kFullWarp, slot.document, 1);
    const uint32_t ending =
        __ballot_sync(kFullWarp, lane < Tile::kDocs && slot.document >= 0 && next != slot.document);
    const bool whole =
        lane >= Tile::kDocs || slot.document < 0 || (slot.argmax_base == 0 && (ending >> lane & 1) != 0);
    const bool all_whole = __all_sync(kFullWarp, whole);
    const uint32_t buffer = from.of(handed);
    from.ring.consumer_wait(from.state(handed));
    const auto document_of = [&](int g) { return __shfl_sync(kFullWarp, slot.document, g); };
    if (!regular || !all_whole || !sum_batches(__popc(ending), buffer, document_of)) {
#pragma unroll 1
      for (int g = 0; g < Tile::kDocs && document_of(g) >= 0; ++g) {
        take_slot(document_of(g), __shfl_sync(kFullWarp, slot.argmax_base, g), g, buffer,
                  (ending >> g & 1) != 0);
      }
      __syncwarp();
      sum_queries_of_group(slot.document, ending, buffer);
    }
    from.ring.consumer_release(handed % 2);
  }
};

// One warp: runs the epilogue of each group of documents of its consumer.
template <class Tile>
__device__ __forceinline__ void run_short_epilogue_warp(const ForwardArgs& p,
                                                        const ShortEpilogueBuffer<Tile>& from, int consumer) {
  ShortEpilogue<Tile> epilogue{p, from, consumer};
  uint32_t handed = 0;
  for (auto range = DocGroupRange<Tile>::of_block(p); range.next < range.end;) {
    const auto items = DocGroupWork<Tile>::take(p, range);
    epilogue.enter(items.tile);
    for (int32_t group = items.first; group < items.end; ++group) {
      if constexpr (Tile::kPacked) {
        epilogue.take_slots(group, handed++);
      } else {
        epilogue.take(group, handed++);
      }
    }
  }
}

}  // namespace late_interaction
