// What every tensor-core forward does once a document has gone by: agree on each row's maximum, treat the
// rare rows, apply the query mask and norms, write winners, and sum each query's rows.
//
// A Tile says who owns what: kOwned rows a lane, Tile::slot(warp_m, lane, o) the row within the tile of the
// o-th, kWarpRows neighbouring rows a warp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "element.cuh"
#include "forward_args.h"
#include "rows.cuh"
#include "winner.cuh"

namespace late_interaction {

struct Maximum {
  float value;
  int32_t token;
};

// The exact answer for one row against one document, in plain fp32 and token order. All lanes of the warp
// work on the same row.
template <class E>
__device__ Maximum recompute_row(const ForwardArgs& p, const E* q, const E* document, const uint8_t* mask) {
  Maximum best{-INFINITY, kSentinel};
  for (int32_t t = 0; t < p.Ld; ++t) {
    if (mask != nullptr && mask[t * p.d_mask.token_stride] == 0) continue;
    const E* x = document + t * p.D.token_stride;
    float dot = 0.0f, squares = 0.0f;
    for (int k = threadIdx.x % 32; k < p.d; k += 32) {
      const float value = widen(x[k * p.D.dim_stride]);
      dot = fmaf(widen(q[k * p.Q.dim_stride]), value, dot);
      squares = fmaf(value, value, squares);
    }
    dot = warp_sum(dot);
    if (p.normalize) dot *= inverse_norm(warp_sum(squares));
    if (isnan(dot)) return {dot, t};
    if (best.token == kSentinel || dot > best.value) best = {dot, t};
  }
  return best;
}

__device__ __forceinline__ bool any_token_kept(const ForwardArgs& p, const uint8_t* mask) {
  if (mask == nullptr) return true;
  for (int32_t first = 0; first < p.Ld; first += 32) {
    const int32_t t = first + threadIdx.x % 32;
    if (__any_sync(kFullWarp, t < p.Ld && mask[t * p.d_mask.token_stride] != 0)) return true;
  }
  return false;
}

// Rows whose maximum is NaN (the first NaN token wins, as in PyTorch) or -inf: the document has no token left
// (the row counts 0 and has no winner), or its similarities really are -inf. One row of each rare lane; kept
// out of line, and out of the registers of the common case.
template <class E>
__device__ __noinline__ Maximum resolve_rare_rows(const ForwardArgs& p, bool rare, int32_t row, int32_t query,
                                                  int32_t j) {
  const uint8_t* mask = document_mask(p, query, j);
  Maximum mine{0.0f, kSentinel};
  if (!any_token_kept(p, mask)) return mine;
  for (unsigned left = __ballot_sync(kFullWarp, rare); left != 0; left &= left - 1) {
    const int who = __ffs(left) - 1;
    const int32_t its_row = __shfl_sync(kFullWarp, row, who);
    const Maximum exact = recompute_row(p, static_cast<const E*>(p.Q.data) + row_offset(p, its_row),
                                        static_cast<const E*>(p.D.data) + document_offset(p, query, j), mask);
    if (static_cast<int>(threadIdx.x % 32) == who) mine = exact;
  }
  return mine;
}

// The rows a lane owns, for as long as its block stays on one row tile.
template <class Tile>
struct OwnedRows {
  int32_t query[Tile::kOwned];  // -1: the row does not exist
  float
      scale[Tile::kOwned];  // what its maximum counts: 0 if masked, else 1 or the query token's inverse norm

  __device__ __forceinline__ void take(const ForwardArgs& p, const RowTile& tile, int warp_m) {
#pragma unroll
    for (int o = 0; o < Tile::kOwned; ++o) {
      const int at = Tile::slot(warp_m, threadIdx.x % 32, o);
      const int32_t row = tile.first + at;
      query[o] = at < tile.count ? row / p.Lq : -1;
      scale[o] = at < tile.count && keeps_row(p, row) ? 1.0f : 0.0f;
      if (p.q_inverse != nullptr && scale[o] != 0.0f) scale[o] = p.q_inverse[row];
    }
  }
};

// Row of the o-th maximum a lane is left with after reduce_quad, where a warp's rows are blocks of 16 and a
// lane holds rows lane / 4 and lane / 4 + 8 of each, in that order.
template <int kWarpRows, int kOwned>
__device__ __forceinline__ int slot_after_quad(int warp_m, int lane, int o) {
  const int held = (lane % 4) * kOwned + o;
  return warp_m * kWarpRows + (held / 2) * 16 + (held % 2) * 8 + lane / 4;
}

// One exchange of a butterfly that halves what lanes carry: of two maxima, the lane keeps the low one (the
// high one if it is the upper of the two lanes), merged with what its partner has for it.
template <bool kWinners>
__device__ __forceinline__ void exchange_halves(float& low, int32_t& low_token, float high,
                                                int32_t high_token, bool upper, int partner) {
  const float got = __shfl_xor_sync(kFullWarp, upper ? low : high, partner);
  low = upper ? high : low;
  int32_t got_token = 0;
  if constexpr (kWinners) {
    got_token = __shfl_xor_sync(kFullWarp, upper ? low_token : high_token, partner);
    low_token = upper ? high_token : low_token;
  }
  keep_better<kWinners>(low, low_token, got, got_token);
}

// Reduces over the four lanes of a quad, each of which saw other columns of the same rows, so that lane q is
// left with the result of its own rows, in front.
template <int kHeld, bool kWinners>
__device__ __forceinline__ void reduce_quad(float (&maximum)[kHeld], int32_t (&token)[kHeld]) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int half = kHeld >> (step + 1), partner = 2 >> step;
    const bool upper = threadIdx.x & partner;
#pragma unroll
    for (int h = 0; h < kHeld / 2; ++h) {
      if (h >= half) break;
      exchange_halves<kWinners>(maximum[h], token[h], maximum[h + half], token[h + half], upper, partner);
    }
  }
}

// A finished document: rare rows, masks, winners out, and each query's sum over the rows of this warp.
template <class E, class Tile, bool kWinners>
__device__ __forceinline__ void finish_document(const ForwardArgs& p, const RowTile& tile,
                                                const OwnedRows<Tile>& own, int warp_m, int32_t j,
                                                float* maximum, int32_t* token) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 0; o < Tile::kOwned; ++o) {
    const bool rare = own.scale[o] != 0.0f && !(maximum[o] > -INFINITY);  // NaN or -inf
    if (__any_sync(kFullWarp, rare)) {
      const int32_t row = tile.first + Tile::slot(warp_m, lane, o);
      const Maximum exact = resolve_rare_rows<E>(p, rare, row, tile.query, j);
      if (rare) {
        maximum[o] = exact.value;
        token[o] = exact.token;
      }
    }
    // A masked row counts 0, whatever its maximum is.
    maximum[o] = own.scale[o] != 0.0f ? maximum[o] * own.scale[o] : 0.0f;
    if constexpr (kWinners) {
      if (own.query[o] >= 0) {
        const int32_t row = tile.first + Tile::slot(warp_m, lane, o);
        const int64_t at = (own.query[o] * p.N + j) * p.Lq + (row - own.query[o] * p.Lq);
        store_winner(p.winners, p.wide_winners, at, own.scale[o] != 0.0f ? token[o] : kSentinel);
      }
    }
  }
  const int32_t first = tile.first + warp_m * Tile::kWarpRows;
  const int32_t count = min(Tile::kWarpRows, tile.count - warp_m * Tile::kWarpRows);
  if (count <= 0) return;
  const int32_t block = (first - tile.origin) / Tile::kWarpRows;
  const int32_t last_query = (first + count - 1) / p.Lq;
  for (int32_t query = first / p.Lq; query <= last_query; ++query) {
    float sum = 0.0f;
#pragma unroll
    for (int o = 0; o < Tile::kOwned; ++o) sum += own.query[o] == query ? maximum[o] : 0.0f;
    sum = warp_sum(sum);
    if (lane == 0) {
      const int32_t part = p.parts == 1 ? 0 : block - (query * p.Lq - tile.origin) / Tile::kWarpRows;
      static_cast<float*>(p.scores)[(static_cast<int64_t>(query) * p.parts + part) * p.N + j] = sum;
    }
  }
}

}  // namespace late_interaction
