// The tile kernel, written once over a vector type and included by every isa_*.cpp.
//
//                     document tokens of the tile, in groups of kGroup
//                     t0 t1 t2 ...                 (rows of D as they lie in memory: each value is
//                   +--+--+--+--+--+--+            broadcast to all lanes, so D is not transposed)
//   query rows of   |                 |
//   the panel: one  |  similarities   |  <- NV vectors x NT tokens of accumulators, in registers,
//   row a lane,     |                 |     for all k-steps; then folded into `best` and `winner`
//   NV vectors      +--+--+--+--+--+--+     lane by lane: a maximum over tokens needs no shuffle
//
// The panel ([step][2 vectors of rows], a few KiB) stays in L1 while the tokens of the tile stream past it; the tile
// stays in L2 while all panels of the row block pass over it. The calling thread owns both.
//
// The last group is moved back to overlap the one before it when the tokens do not divide evenly:
// a token that is scored twice has the same similarity twice and cannot beat itself.
//
// Op gives: Scalar, Index, V / I / M (vectors of values, indices, mask), Query / Token (operands),
// kLanes, kGroup (the widest NT; NT comes in thirds of it), and the functions used below.

namespace {

// A similarity is NaN: go token by token, in order, so that the first NaN wins and stays.
template <class Op>
[[gnu::noinline, gnu::cold]] void fold_with_nan(const typename Op::Scalar* similarity, int lanes, int tokens,
                                                const int32_t* ids, typename Op::Scalar* best,
                                                typename Op::Index* winner) {
  for (int lane = 0; lane < lanes; ++lane) {
    for (int t = 0; t < tokens; ++t) {
      const typename Op::Scalar x = similarity[t * lanes + lane];
      const bool best_is_nan = best[lane] != best[lane];
      if (best_is_nan || !(x > best[lane] || x != x)) continue;
      best[lane] = x;
      if (ids) winner[lane] = ids[t];
    }
  }
}

template <class Op, int NV, int NT>
inline __attribute__((always_inline)) void score_group(const Tile& tile, int64_t first) {
  using V = typename Op::V;
  using I = typename Op::I;
  const char* query = static_cast<const char*>(tile.panel);
  const char* token = static_cast<const char*>(tile.tokens) + first * tile.token_bytes;
  const int64_t stride = tile.token_bytes;

  V sum[NT][NV];
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) sum[t][v] = Op::zero();
  }
  for (int64_t k = 0; k < tile.steps; ++k) {
    typename Op::Query q[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) q[v] = Op::load_query(query + v * sizeof(V));
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      const typename Op::Token x = Op::load_token(token + t * stride);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) sum[t][v] = Op::multiply_add(sum[t][v], q[v], x);
    }
    query += 2 * sizeof(V);
    token += Op::kStepBytes;
  }

  using Scalar = typename Op::Scalar;
  Scalar* best = static_cast<Scalar*>(tile.best);
  auto* winner = static_cast<typename Op::Index*>(tile.winner);
  if (tile.inverse_norm) {
    const Scalar* scale = static_cast<const Scalar*>(tile.inverse_norm) + first;
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      const V s = Op::set1(scale[t]);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) sum[t][v] = Op::mul(sum[t][v], s);
    }
  }

  typename Op::M nan = Op::unordered(sum[0][0], sum[1][0]);
#pragma GCC unroll 16
  for (int t = 0; t < NT; t += 2) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) nan = Op::either(nan, Op::unordered(sum[t][v], sum[t + 1][v]));
  }
  if (__builtin_expect(Op::any(nan), 0)) {
    Scalar copy[NT * NV * Op::kLanes];
    for (int t = 0; t < NT; ++t) {
      for (int v = 0; v < NV; ++v) Op::store(copy + (t * NV + v) * Op::kLanes, sum[t][v]);
    }
    fold_with_nan<Op>(copy, NV * Op::kLanes, NT, tile.ids ? tile.ids + first : nullptr, best, winner);
    return;
  }

  // A tournament: neighbours meet first, the later token must be strictly greater to go on, and what
  // is left meets the running maximum (a NaN there stays: it is not less than anything).
  if (tile.ids) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      I id[NT];
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) id[t] = Op::set_index(tile.ids[first + t]);
#pragma GCC unroll 4
      for (int reach = 1; reach < NT; reach *= 2) {
#pragma GCC unroll 16
        for (int t = 0; t + reach < NT; t += 2 * reach) {
          const auto later = Op::greater(sum[t + reach][v], sum[t][v]);
          sum[t][v] = Op::select(later, sum[t + reach][v], sum[t][v]);
          id[t] = Op::select_index(later, id[t + reach], id[t]);
        }
      }
      const V old = Op::load(best + v * Op::kLanes);
      const auto higher = Op::greater(sum[0][v], old);
      Op::store(best + v * Op::kLanes, Op::select(higher, sum[0][v], old));
      Op::store_index(winner + v * Op::kLanes,
                      Op::select_index(higher, id[0], Op::load_index(winner + v * Op::kLanes)));
    }
  } else {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 4
      for (int reach = 1; reach < NT; reach *= 2) {
#pragma GCC unroll 16
        for (int t = 0; t + reach < NT; t += 2 * reach) {
          sum[t][v] = Op::max(sum[t + reach][v], sum[t][v]);
        }
      }
      // max returns its second operand when either is NaN.
      Op::store(best + v * Op::kLanes, Op::max(sum[0][v], Op::load(best + v * Op::kLanes)));
    }
  }
}

template <class Op, int NV>
void score_panel(const Tile& tile) {
  constexpr int kThird = Op::kGroup / 3;
  int64_t t = 0;
  for (; t + Op::kGroup <= tile.count; t += Op::kGroup) score_group<Op, NV, Op::kGroup>(tile, t);
  const int64_t left = tile.count - t;
  if (left == 0) return;
  if (left <= kThird) {
    score_group<Op, NV, kThird>(tile, tile.count - kThird);
  } else if (left <= 2 * kThird && tile.count >= 2 * kThird) {
    score_group<Op, NV, 2 * kThird>(tile, tile.count - 2 * kThird);
  } else if (tile.count >= Op::kGroup) {
    score_group<Op, NV, Op::kGroup>(tile, tile.count - Op::kGroup);
  } else {  // a tile shorter than the group that would cover it
    for (; t + kThird <= tile.count; t += kThird) score_group<Op, NV, kThird>(tile, t);
    if (t < tile.count) score_group<Op, NV, kThird>(tile, tile.count - kThird);
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
