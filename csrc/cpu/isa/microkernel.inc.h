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
// Op gives: Scalar, Index, V / I / M (vectors of values, indices, mask), Query / Token / Sum (operands, and
// what products add up to), kLanes, kGroup (the widest NT; NT comes in thirds of it), and the functions used
// below and by fold.inc.h.
#include "fold.inc.h"

namespace {

// An Op that multiplies values as they lie in memory.
template <class Vectors, int Group>
struct Multiply : Vectors {
  using Scalar = typename Vectors::Scalar;
  using Query = typename Vectors::V;
  using Token = typename Vectors::V;
  using Sum = typename Vectors::V;
  static constexpr int kStepBytes = sizeof(Scalar);
  static constexpr int kGroup = Group;
  static Query load_query(const char* p) { return Vectors::load(reinterpret_cast<const Scalar*>(p)); }
  static Token load_token(const char* p) {
    Scalar x;
    __builtin_memcpy(&x, p, sizeof(Scalar));
    return Vectors::set1(x);
  }
  static Sum none() { return Vectors::zero(); }
  static typename Vectors::V value(Sum sum, const Tile&, int64_t) { return sum; }
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
  using V = typename Op::V;
  const char* query = static_cast<const char*>(tile.panel);
  const char* token = static_cast<const char*>(tile.tokens) + tile.offsets[first];
  int64_t offset[NT];
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) offset[t] = tile.offsets[first + t] - tile.offsets[first];

  typename Op::Sum sum[NV][NT];
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) sum[v][t] = Op::none();
  }
  const char* ahead = tile.ahead + first * tile.steps * tile.ahead_step;
  const int64_t ahead_step = NT * tile.ahead_step;
  for (const char* end = token + tile.steps * Op::kStepBytes; token != end; token += Op::kStepBytes) {
    typename Op::Query q[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) q[v] = Op::load_query(query + v * sizeof(V));
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      const typename Op::Token x = Op::load_token(t == 0 ? token : token + offset[t]);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) sum[v][t] = Op::multiply_add(sum[v][t], q[v], x);
    }
    query += 2 * sizeof(V);
    __builtin_prefetch(ahead, 0, 2);
    ahead += ahead_step;
  }

  finish_group<Op>(sum, tile, first);
}

// Tokens [first, count) of the tile, which are fewer than a group.
template <class Op, int NV>
void score_rest(const Tile& tile, int64_t first) {
  constexpr int kStep = Op::kGroup / 3;
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
  for (; t + Op::kGroup <= tile.count; t += Op::kGroup) score_group<Op, NV, Op::kGroup>(tile, t);
  score_rest<Op, NV>(tile, t);
}

template <class Op>
void score_tile(const Tile& tile) {
  if (tile.vectors == 2) {
    score_panel<Op, 2>(tile);
  } else {
    score_panel<Op, 1>(tile);
  }
}

template <class Op>
Multiplier multiplier(Dtype native, int step_dims,
                      void (*pack_row)(const void*, Dtype, int64_t, int64_t, void*)) {
  static_assert(Op::kGroup % 6 == 0, "groups come in thirds, and NaNs are looked for in pairs");
  return {Op::kLanes,     Op::kGroup / 3, Op::kGroup, step_dims,
          Op::kStepBytes, native,         pack_row,   score_tile<Op>};
}

}  // namespace
