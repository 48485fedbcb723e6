// The epilogue of every tensor-core forward, at the end of a document: reduces each row's maximum over lanes,
// computes rare rows again, applies the query mask and scales, stores winners, and sums each query's rows.
//
// A lane has Tile::kLaneRows rows: Tile::slot(warp_m, lane, o) is the index in the tile of the o-th. A warp
// has kWarpRows neighbouring rows. kPacked: the kernel takes packed queries.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../primitives/argmax.cuh"
#include "../primitives/element.cuh"
#include "../primitives/token_scales.cuh"
#include "../ptx/ld_st.cuh"
#include "args.h"
#include "row_tile.cuh"

namespace late_interaction {

// The tokens of a document, or of a split of one, that a maximum is over.
template <class E>
struct Passage {
  const E* tokens;
  const uint8_t* mask;
  const float* scales;
  int32_t first, length;

  __device__ __forceinline__ Passage(const ForwardArgs& p, int32_t query, int32_t j, Span of)
      : tokens(static_cast<const E*>(p.D.data) + document_offset(p, query, j) + of.first * p.D.token_stride),
        mask(document_mask(p, query, j)),
        scales(document_scales(p, query, j)),
        first(of.first),
        length(of.length) {
    if (mask != nullptr) mask += first * p.d_mask.token_stride;
    if (scales != nullptr) scales += first * p.d_scales.token_stride;
  }
};

__device__ __forceinline__ Span whole_document(const ForwardArgs& p, int32_t query, int32_t j) {
  return {0, document_length(p, query, j)};
}

// The maximum of one row in plain fp32 and token order. All lanes of the warp work on the same row. A row
// whose norm overflows, of finite elements, counts as zeros, as torch.nn.functional.normalize returns it.
template <class E>
__device__ Maximum recompute_row(const ForwardArgs& p, const E* q, const Passage<E>& of) {
  Maximum best{-INFINITY, kSentinel};
  for (int32_t t = 0; t < of.length; ++t) {
    if (of.mask != nullptr && of.mask[t * p.d_mask.token_stride] == 0) continue;
    const E* x = of.tokens + t * p.D.token_stride;
    float dot = 0.0f, squares = 0.0f;
    bool finite = true;
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < p.d; k += 32) {
      const float value = widen(x[k * p.D.dim_stride]), of_q = widen(q[k * p.Q.dim_stride]);
      dot = fmaf(of_q, value, dot);
      squares = fmaf(value, value, squares);
      finite = finite && fabsf(value) < INFINITY && fabsf(of_q) < INFINITY;
    }
    dot = warp_sum(dot);
    if (of.scales != nullptr) {
      dot *= usable_scale(of.scales[t * p.d_scales.token_stride]);
    } else if (p.normalize) {
      dot *= inverse_norm(warp_sum(squares));
    }
    if (p.normalize && __all_sync(kFullWarp, finite) && !(fabsf(dot) < INFINITY)) dot = 0.0f;
    if (isnan(dot)) return {dot, of.first + t};
    if (best.token == kSentinel || dot > best.value) best = {dot, of.first + t};
  }
  return best;
}

template <class E>
__device__ __forceinline__ bool any_token_kept(const ForwardArgs& p, const Passage<E>& of) {
  if (of.mask == nullptr) return of.length > 0;
  for (int32_t first = 0; first < of.length; first += 32) {
    const int32_t t = first + threadIdx.x % 32;
    if (__any_sync(kFullWarp, t < of.length && of.mask[t * p.d_mask.token_stride] != 0)) return true;
  }
  return false;
}

// Computes rows again whose maximum is NaN or infinite. The first NaN wins, as in PyTorch. Minus infinity
// without a winner says that the document has no token that counts: the row then counts 0. Each rare lane has
// one row. Out of line, so that the common case does not pay for the registers.
template <class E>
__device__ __noinline__ Maximum resolve_rare_rows(const ForwardArgs& p, bool rare, int32_t row, int32_t query,
                                                  int32_t j, Span tokens) {
  const Passage<E> passage(p, query, j, tokens);
  Maximum resolved{-INFINITY, kSentinel};
  if (!any_token_kept(p, passage)) return resolved;
  for (unsigned left = __ballot_sync(kFullWarp, rare); left != 0; left &= left - 1) {
    const int who = __ffs(left) - 1;
    const int32_t rare_row = __shfl_sync(kFullWarp, row, who);
    const Maximum exact =
        recompute_row(p, static_cast<const E*>(p.Q.data) + row_offset(p, rare_row), passage);
    if (static_cast<int>(threadIdx.x % 32) == who) resolved = exact;
  }
  return resolved;
}

// The rows of a lane, and the queries that its warp sums, while the block stays on one row tile.
//
// A partial is the sum of one query's rows in one warp. For packed queries, partial (warp, query) has the
// index warp + query, which no two share: from one row to the next the warp, the query or both increase.
template <class Tile>
struct LaneRows {
  float scale[Tile::kLaneRows];          // of a row's maximum; kMaskedRow: masked, or there is no such row
  int32_t query[Tile::kLaneRows];        // -1: there is no such row
  int32_t query_token[Tile::kLaneRows];  // the row's index in its query
  int32_t first_query, last_query;       // of the warp; none if last < first
  int32_t first_partial;  // index of this warp's partial of the first query, which may begin in another warp

  __device__ __forceinline__ void take(const ForwardArgs& p, const RowTile& tile, int warp_m) {
#pragma unroll
    for (int o = 0; o < Tile::kLaneRows; ++o) {
      const int index = Tile::slot(warp_m, threadIdx.x % 32, o);
      const int32_t row = tile.first + index;
      const bool exists = index < tile.count;
      query[o] = exists ? row / p.Lq : -1;
      query_token[o] = row - query[o] * p.Lq;
      scale[o] = kMaskedRow;
      if (exists && keeps_row(p, row)) {
        scale[o] = weighted(p.q_weights, query[o], query_token[o],
                            row_scale(p.q_scales, p.shared_scale, query[o], query_token[o]));
      }
      if (Tile::kPacked && p.packed && exists) {
        const int32_t row_query = p.row_queries[row];
        query[o] = max(row_query, ~row_query);
        if (row_query < 0) scale[o] = kMaskedRow;
      }
    }
    const int32_t first = tile.first + warp_m * Tile::kWarpRows;
    const int32_t count = min(Tile::kWarpRows, tile.count - warp_m * Tile::kWarpRows);
    if (Tile::kPacked && p.packed) return take_packed_queries(p, first, count);
    first_query = first / p.Lq;
    last_query = count > 0 ? (first + count - 1) / p.Lq : -1;
    const int32_t begun = first_query * p.Lq - tile.origin;
    first_partial = (first - tile.origin) / Tile::kWarpRows - begun / Tile::kWarpRows;
  }

  __device__ __forceinline__ void take_packed_queries(const ForwardArgs& p, int32_t first, int32_t count) {
    const auto query_of = [&](int32_t row) { return max(p.row_queries[row], ~p.row_queries[row]); };
    const bool alone = p.Lq <= Tile::kWarpRows;  // partials are the scores, so none may be missing
    first_query = count <= 0 || alone ? 0 : query_of(first);
    last_query = count <= 0 ? -1 : alone ? p.queries - 1 : query_of(first + count - 1);
    first_partial = first / Tile::kWarpRows;
  }
};

// The row of the o-th maximum that reduce_quad leaves to a lane, where a warp's rows are blocks of 16 and a
// lane holds rows lane / 4 and lane / 4 + 8 of each, in that order.
template <int kWarpRows, int kLaneRows>
__device__ __forceinline__ int slot_after_quad(int warp_m, int lane, int o) {
  const int held = (lane % 4) * kLaneRows + o;
  return warp_m * kWarpRows + (held / 2) * 16 + (held % 2) * 8 + lane / 4;
}

// Row of the o-th maximum a lane is left with after reduce_halving over lanes 16, 8 and 4 apart, where lane q
// of a quad holds rows 2q and 2q + 1 of every 8, in that order.
template <int kLaneRows>
__device__ __forceinline__ int slot_after_halving(int lane, int o) {
  const int held = ((lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1)) * kLaneRows + o;
  return held / 2 * 8 + held % 2 + lane % 4 * 2;
}

// The order of maxima that may be computed again (keep_better).
template <bool kWinners>
struct KeepBetter {
  static __device__ __forceinline__ void keep(float& m, int32_t& token, float other, int32_t other_token) {
    keep_better<kWinners>(m, token, other, other_token);
  }
};

// One exchange of a butterfly that halves what lanes carry: of two maxima, the lane keeps the low one (the
// high one if it is the upper of the two lanes), merged with what its partner has for it.
template <bool kWinners, class Order>
__device__ __forceinline__ void exchange_halves(float& low, int32_t& low_token, float high,
                                                int32_t high_token, bool upper, int partner) {
  const float got = __shfl_xor_sync(kFullWarp, upper ? low : high, partner);
  low = upper ? high : low;
  int32_t got_token = 0;
  if constexpr (kWinners) {
    got_token = __shfl_xor_sync(kFullWarp, upper ? low_token : high_token, partner);
    low_token = upper ? high_token : low_token;
  }
  Order::keep(low, low_token, got, got_token);
}

// A butterfly of kSteps exchanges between lanes that each saw other columns (or tokens) of the same kHeld
// rows. Each exchange halves the rows that a lane carries; the rest come to lie in front. The first partner
// is kPartner lanes away, the next one half as far.
template <int kPartner, int kSteps, int kHeld, bool kWinners, class Order = KeepBetter<kWinners>>
__device__ __forceinline__ void reduce_halving(float (&maximum)[kHeld], int32_t (&token)[kHeld]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int half = kHeld >> (step + 1), partner = kPartner >> step;
    const bool upper = threadIdx.x & partner;
#pragma unroll
    for (int h = 0; h < kHeld / 2; ++h) {
      if (h >= half) break;
      exchange_halves<kWinners, Order>(maximum[h], token[h], maximum[h + half], token[h + half], upper,
                                       partner);
    }
  }
}

// Over the four lanes of a quad: lane q is left with rows q * kHeld / 4 and on. Of two rows, lanes 0 and 1
// are left with the first, and lanes 2 and 3 with the second.
template <int kHeld, bool kWinners>
__device__ __forceinline__ void reduce_quad(float (&maximum)[kHeld], int32_t (&token)[kHeld]) {
  reduce_halving<2, 2, kHeld, kWinners>(maximum, token);
  if constexpr (kHeld == 2) {
    const float other = __shfl_xor_sync(kFullWarp, maximum[0], 1);
    const int32_t other_token = kWinners ? __shfl_xor_sync(kFullWarp, token[0], 1) : 0;
    keep_better<kWinners>(maximum[0], token[0], other, other_token);
  }
}

// Merges the maxima of the block's warps, which saw other tokens of its document, in the first warp.
template <bool kWinners, int kWarps>
__device__ __forceinline__ void merge_warps(float& maximum, int32_t& token) {
  __shared__ float maxima[kWarps][32];
  __shared__ int32_t tokens[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // the first warp has read the maxima of the document before
  maxima[warp][lane] = maximum;
  if (kWinners) tokens[warp][lane] = token;
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
    keep_better<kWinners>(maximum, token, maxima[other][lane], kWinners ? tokens[other][lane] : 0);
  }
}

// Computes the lane's row, the tile's row `slot`, again if its maximum over the range is not finite.
template <class E>
__device__ __forceinline__ void resolve_row(const ForwardArgs& p, const RowTile& tile, int slot,
                                            const DocRange& range, Maximum& best) {
  bool rare = !(fabsf(best.value) < INFINITY);
  if (!__any_sync(kFullWarp, rare)) return;
  const int32_t row = tile.first + slot;
  rare = rare && slot < tile.count && keeps_row(p, row);
  const Span tokens{range.first, range.length};
  const Maximum exact = resolve_rare_rows<E>(p, rare, row, tile.query, range.document, tokens);
  if (rare) best = exact;
}

// Returns what a row adds to the score of its query, and its winner. A masked row adds 0, whatever its
// maximum is; so does a row over no token, whatever its scale is.
__device__ __forceinline__ Maximum scaled(const Maximum& best, float scale) {
  const bool none = best.value == -INFINITY && best.token == kSentinel;
  if (none || scale == kMaskedRow) return {0.0f, kSentinel};
  return {best.value * scale, best.token};
}

// Applies the query mask and the scales to the maxima, and stores the argmax.
template <class Tile, bool kWinners>
__device__ __forceinline__ void apply_scale_store_argmax(const ForwardArgs& p, const LaneRows<Tile>& rows,
                                                         int32_t j, Maximum (&best)[Tile::kLaneRows]) {
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    best[o] = scaled(best[o], rows.scale[o]);
    if constexpr (kWinners) {
      if (rows.query[o] >= 0) {
        const int64_t index =
            ((Tile::kPacked && p.packed ? 0 : rows.query[o]) * p.winners_stride + j) * p.Lq +
            rows.query_token[o];
        store_winner(p.winners, p.wide_winners, index, best[o].token);
      }
    }
  }
}

// Each query's sum over the rows of this warp, where lanes with equal lane % 4 have rows of one query
// (ForwardArgs::query_lanes). It adds in the order of sum_queries.
template <class Tile>
__device__ __forceinline__ void sum_aligned_queries(const ForwardArgs& p, const LaneRows<Tile>& rows,
                                                    int32_t j, const Maximum (&best)[Tile::kLaneRows]) {
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) sum += best[o].value;
#pragma unroll
  for (int partner = 16; partner >= 4; partner /= 2) sum += __shfl_xor_sync(kFullWarp, sum, partner);
  if (p.query_lanes > 2) sum += __shfl_xor_sync(kFullWarp, sum, 2);
  if (p.query_lanes > 1) sum += __shfl_xor_sync(kFullWarp, sum, 1);
  if (lane >= 4 || (lane & (p.query_lanes - 1)) != 0 || rows.query[0] < 0) return;
  const int64_t index = int64_t{rows.query[0]} * p.partials + rows.first_partial;
  static_cast<float*>(p.scores)[index * p.scores_stride + j] = sum;
}

// Sums each of kCount numbers over all lanes: a butterfly whose first exchanges halve the sums that a lane
// carries. Returns the sum of number lane * kCount / 32, in front too, and adds in one order whatever kCount
// is.
template <int kCount>
__device__ __forceinline__ float sum_each(float (&sums)[kCount], int lane) {
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
    const int partner = 32 / kCount * half;
    const bool upper = lane & partner;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float got = __shfl_xor_sync(kFullWarp, upper ? sums[i] : sums[i + half], partner);
      sums[i] = (upper ? sums[i + half] : sums[i]) + got;
    }
  }
#pragma unroll
  for (int partner = 16 / kCount; partner > 0; partner /= 2) {
    sums[0] += __shfl_xor_sync(kFullWarp, sums[0], partner);
  }
  return sums[0];
}

// Each query's sum over the rows of this warp, of kTogether queries at once.
template <class Tile>
__device__ __forceinline__ void sum_queries(const ForwardArgs& p, const LaneRows<Tile>& rows, int32_t j,
                                            const Maximum (&best)[Tile::kLaneRows]) {
  if constexpr (requires { Tile::kQuadRows; }) {
    if (p.query_lanes != 0) return sum_aligned_queries<Tile>(p, rows, j, best);
  }
  constexpr int kTogether = Tile::kLaneRows > 1 ? 4 : 2, kLanes = 32 / kTogether;  // lanes a sum
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t first = rows.first_query; first <= rows.last_query; first += kTogether) {
    float sums[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      sums[i] = 0.0f;
#pragma unroll
      for (int o = 0; o < Tile::kLaneRows; ++o) sums[i] += rows.query[o] == first + i ? best[o].value : 0.0f;
    }
    sum_each(sums, lane);
    const int32_t query = first + lane / kLanes;
    if (lane % kLanes != 0 || query > rows.last_query) continue;
    // Queries but the first begin in this warp: their partial 0.
    const bool begun = query == rows.first_query || (Tile::kPacked && p.packed);
    const int64_t index = int64_t{query} * p.partials + (begun ? rows.first_partial : 0);
    static_cast<float*>(p.scores)[index * p.scores_stride + j] = sums[0];
  }
}

// Stores the maxima of the lane's rows over a split of a document, for the kernel that combines the splits.
template <class Tile>
__device__ __forceinline__ void leave_maxima(const ForwardArgs& p, const RowTile& tile, int warp_m, int32_t j,
                                             const Maximum (&best)[Tile::kLaneRows]) {
  Maximum* to = p.maxima + int64_t{j} * p.Nq * p.Lq + tile.first;
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    const int slot = Tile::slot(warp_m, threadIdx.x % 32, o);
    if (slot < tile.count) to[slot] = best[o];
  }
}

// True for the tiles of kernels that score splits of documents.
template <class Tile>
inline constexpr bool kMaySplit = requires { requires Tile::kMaySplit; };

// Finishes a document, or a split of one, in a kernel whose warps deliver the maxima that they found.
template <class E, class Tile, bool kWinners>
__device__ __forceinline__ void finish_document(const ForwardArgs& p, const RowTile& tile,
                                                const LaneRows<Tile>& rows, int warp_m, int32_t j,
                                                const float* maximum, const int32_t* token) {
  const DocRange range = range_of<kMaySplit<Tile>>(p, tile.query, j);
  Maximum best[Tile::kLaneRows];
  bool rare = false;
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    best[o] = {maximum[o], token[o]};
    if (kMaySplit<Tile> && token[o] >= 0) best[o].token += range.argmax_base;
    rare = rare || !(fabsf(maximum[o]) < INFINITY);
  }
  if (__any_sync(kFullWarp, rare)) {
#pragma unroll 1
    for (int o = 0; o < Tile::kLaneRows; ++o) {  // by selects: an array that is indexed lies in memory
      Maximum of_row = best[0];
#pragma unroll
      for (int i = 1; i < Tile::kLaneRows; ++i) of_row = o == i ? best[i] : of_row;
      resolve_row<E>(p, tile, Tile::slot(warp_m, threadIdx.x % 32, o), range, of_row);
#pragma unroll
      for (int i = 0; i < Tile::kLaneRows; ++i) best[i] = o == i ? of_row : best[i];
    }
  }
  if (kMaySplit<Tile> && p.num_splits > 1) return leave_maxima<Tile>(p, tile, warp_m, j, best);
  apply_scale_store_argmax<Tile, kWinners>(p, rows, j, best);
  sum_queries<Tile>(p, rows, j, best);
}

}  // namespace late_interaction
