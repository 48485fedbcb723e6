// The tile kernel, written once over a vector type and included by every .cpp file here.
//
//                     document tokens of the tile, in groups of kGroup
//                     t0 t1 t2 ...                 (rows of D as they lie in memory: each value is
//                   +--+--+--+--+--+--+            broadcast to all lanes, so D is not transposed)
//   query rows of   |                 |
//   the panel: one  |  similarities   |  <- NV vectors x NT tokens of accumulators, in registers,
//   row a lane,     |                 |     for all k-steps; then folded into `best` and `winner`
//   NV vectors      +--+--+--+--+--+--+     lane by lane: a maximum over tokens needs no shuffle
//
// The panel ([step][2 vectors of rows], a few KiB) stays in L1 while the tokens of the tile stream past it;
// the tile stays in L2 while all panels of the row block pass over it. The calling thread owns both.
//
// Tokens that do not divide evenly are padded by repeating the last one: it has the same similarity
// again and cannot beat itself.
//
// Op gives: Scalar, Index, V and I (vectors of values and indices), Step (what one lane of an operand holds),
// Query (a vector of them), Sum (what products add up to), kLanes, and the functions used below. kGroup is
// the widest NT; NT comes in thirds of it.
#include "fold.inc.h"

namespace {

// An Op that multiplies values as they lie in memory.
template <class Vectors>
struct Multiply : Vectors {
  using Step = typename Vectors::Scalar;
  using Query = typename Vectors::V;
  using Sum = typename Vectors::V;
  static Sum multiply_add(Sum sum, Query a, Query b) { return ::multiply_add(sum, a, b); }
  static Sum value(Sum sum, const Tile&, int64_t) { return sum; }
};

// An Op whose steps are four bytes of packed values, several products each.
template <class Sum_>
struct MultiplySteps : F32 {
  using Step = int32_t;
  using Query = I;
  using Sum = Sum_;
  static V value(Sum sum, const Tile&, int64_t) {
    if constexpr (std::is_same_v<Sum, V>) {
      return sum;
    } else {
      return from_integers((U)sum);
    }
  }
};

// Similarities from the sums of products of tokens [first, first + NT), folded into the tile's maxima.
template <class Op, int NV, int NT>
inline __attribute__((always_inline)) void finish_group(const typename Op::Sum (&sum)[NV][NT],
                                                        const Tile& tile, int64_t first) {
  Column<Op, NT> column[NV];
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) column[v].value[t] = Op::value(sum[v][t], tile, first + t);
  }
  fold_columns(column, tile, first);
}

template <class Op, int NV, int NT>
inline __attribute__((always_inline)) void score_group(const Tile& tile, int64_t first) {
  using Query = typename Op::Query;
  using Step = typename Op::Step;
  const char* query = static_cast<const char*>(tile.panel);
  const char* token = static_cast<const char*>(tile.tokens) + tile.offsets[first];
  int64_t offset[NT];
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) offset[t] = tile.offsets[first + t] - tile.offsets[first];

  typename Op::Sum sum[NV][NT] = {};
  const char* ahead = tile.ahead + first * tile.steps * tile.ahead_step;
  const int64_t ahead_step = NT * tile.ahead_step;
  for (const char* end = token + tile.steps * sizeof(Step); token != end; token += sizeof(Step)) {
    Query q[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) q[v] = load<Query>(query + v * sizeof(Query));
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      const auto x = set1<Query>(load<Step>(t == 0 ? token : token + offset[t]));
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) sum[v][t] = Op::multiply_add(sum[v][t], q[v], x);
    }
    query += 2 * sizeof(Query);
    __builtin_prefetch(ahead, 0, 2);
    ahead += ahead_step;
  }

  finish_group<Op>(sum, tile, first);
}

// Tokens [first, count) of the tile, which are fewer than a group.
template <class Op, int NV>
void score_rest(const Tile& tile, int64_t first) {
  constexpr int kStep = kGroup / 3;
  const int64_t tokens = tile.count - first;
  if (tokens == 2 * kStep) {
    score_group<Op, NV, 2 * kStep>(tile, first);
  } else if (tokens == kStep) {
    score_group<Op, NV, kStep>(tile, first);
  }
}

template <class Op, int NV>
void score_panel(const Tile& tile) {
  int64_t t = 0;
  for (; t + kGroup <= tile.count; t += kGroup) score_group<Op, NV, kGroup>(tile, t);
  score_rest<Op, NV>(tile, t);
}

template <class Op>
void score_tile(const Tile& tile) {
  with_vectors(tile, [&]<int NV>() { score_panel<Op, NV>(tile); });
}

template <class Op>
Multiplier multiplier(Dtype native, int step_dims,
                      void (*pack_row)(const void*, Dtype, int64_t, int64_t, void*)) {
  static_assert(kGroup % 6 == 0, "groups come in thirds, and NaNs are looked for in pairs");
  return {Op::kLanes, kGroup / 3, kGroup,        step_dims, sizeof(typename Op::Step),
          native,     pack_row,   score_tile<Op>};
}

}  // namespace
