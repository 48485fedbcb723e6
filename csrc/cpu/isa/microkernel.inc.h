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
// below.

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

// A similarity is NaN: go token by token, in order, so that the first NaN wins and stays.
template <class Op>
[[gnu::noinline, gnu::cold]] void fold_with_nan(const typename Op::Scalar* similarity, int lanes, int tokens,
                                                const int32_t* ids, typename Op::Scalar* best,
                                                typename Op::Index* winner) {
  for (int lane = 0; lane < lanes; ++lane) {
    for (int t = 0; t < tokens; ++t) {
      const typename Op::Scalar x = similarity[t * lanes + lane];
      if (!late_interaction::replaces_maximum(x, best[lane])) continue;
      best[lane] = x;
      if (ids) winner[lane] = ids[t];
    }
  }
}

// One column of a vector of rows against NT tokens: values, and token indices with winners.
template <class Op, int NT>
struct Column {
  typename Op::V value[NT];
  typename Op::I id[NT];

  // A tournament: neighbours meet first, and the later token must be strictly greater to go on.
  template <bool kIds, int kReach = 1>
  inline __attribute__((always_inline)) void play() {
    if constexpr (kReach < NT) {
#pragma GCC unroll 16
      for (int t = 0; t + kReach < NT; t += 2 * kReach) {
        if constexpr (kIds) {
          const auto later = Op::greater(value[t + kReach], value[t]);
          value[t] = Op::select(later, value[t + kReach], value[t]);
          id[t] = Op::select_index(later, id[t + kReach], id[t]);
        } else {
          value[t] = Op::max(value[t + kReach], value[t]);
        }
      }
      play<kIds, 2 * kReach>();
    }
  }
};

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

  Column<Op, NT> column[NV];
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) column[v].value[t] = Op::value(sum[v][t], tile, first + t);
  }
  using Scalar = typename Op::Scalar;
  Scalar* best = static_cast<Scalar*>(tile.best);
  auto* winner = static_cast<typename Op::Index*>(tile.winner);
  if (tile.token_scales) {
    const Scalar* scale = static_cast<const Scalar*>(tile.token_scales) + first;
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      const V s = Op::set1(scale[t]);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) column[v].value[t] = Op::mul(column[v].value[t], s);
    }
  }

  typename Op::M nan = Op::unordered(column[0].value[0], column[0].value[1]);
#pragma GCC unroll 16
  for (int t = 0; t < NT; t += 2) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v)
      nan = Op::either(nan, Op::unordered(column[v].value[t], column[v].value[t + 1]));
  }
  if (__builtin_expect(Op::any(nan), 0)) {
    Scalar copy[NT * NV * Op::kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) Op::store(copy + (t * NV + v) * Op::kLanes, column[v].value[t]);
    }
    fold_with_nan<Op>(copy, NV * Op::kLanes, NT, tile.ids ? tile.ids + first : nullptr, best, winner);
    return;
  }

  // What is left of the group meets the running maximum. A NaN there stays: nothing is greater, and max
  // returns its second operand when either is NaN.
  if (tile.ids) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) column[v].id[t] = Op::set_index(tile.ids[first + t]);
      column[v].template play<true>();
      const V old = Op::load(best + v * Op::kLanes);
      const auto higher = Op::greater(column[v].value[0], old);
      Op::store(best + v * Op::kLanes, Op::select(higher, column[v].value[0], old));
      Op::store_index(winner + v * Op::kLanes,
                      Op::select_index(higher, column[v].id[0], Op::load_index(winner + v * Op::kLanes)));
    }
  } else {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      column[v].template play<false>();
      Op::store(best + v * Op::kLanes, Op::max(column[v].value[0], Op::load(best + v * Op::kLanes)));
    }
  }
}

template <class Op, int NV>
void score_panel(const Tile& tile) {
  constexpr int kStep = Op::kGroup / 3;
  int64_t t = 0;
  for (; t + Op::kGroup <= tile.count; t += Op::kGroup) score_group<Op, NV, Op::kGroup>(tile, t);
  if (tile.count - t == 2 * kStep) {
    score_group<Op, NV, 2 * kStep>(tile, t);
  } else if (tile.count - t == kStep) {
    score_group<Op, NV, kStep>(tile, t);
  }
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
  return {Op::kLanes, Op::kGroup / 3, step_dims, Op::kStepBytes, native, pack_row, score_tile<Op>};
}

}  // namespace
