// The maxima of the tile kernels: similarities of NV vectors of query rows with NT tokens, folded into the
// running maxima and winners lane by lane. Op gives Scalar, Index, V and I (vectors of values and
// indices) and kLanes.

namespace {

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
          const auto later = value[t + kReach] > value[t];
          value[t] = later ? value[t + kReach] : value[t];
          id[t] = later ? id[t + kReach] : id[t];
        } else {
          value[t] = larger(value[t + kReach], value[t]);
        }
      }
      play<kIds, 2 * kReach>();
    }
  }
};

// Folds tokens [first, first + NT) of the tile, multiplied by their scales, into its maxima and winners.
template <class Op, int NV, int NT>
inline __attribute__((always_inline)) void fold_columns(Column<Op, NT> (&column)[NV], const Tile& tile,
                                                        int64_t first) {
  using V = typename Op::V;
  using I = typename Op::I;
  using Scalar = typename Op::Scalar;
  using Index = typename Op::Index;
  Scalar* best = static_cast<Scalar*>(tile.best);
  Index* winner = static_cast<Index*>(tile.winner);
  if (tile.token_scales) {
    const Scalar* scale = static_cast<const Scalar*>(tile.token_scales) + first;
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) column[v].value[t] *= scale[t];
    }
  }

  auto numbers = ordered(column[0].value[0], column[0].value[1]);
#pragma GCC unroll 16
  for (int t = 0; t < NT; t += 2) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) numbers = and_ordered(numbers, column[v].value[t], column[v].value[t + 1]);
  }
  if (__builtin_expect(!all(numbers), 0)) {
    Scalar copy[NT * NV * Op::kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) store(copy + (t * NV + v) * Op::kLanes, column[v].value[t]);
    }
    fold_with_nan<Op>(copy, NV * Op::kLanes, NT, tile.ids ? tile.ids + first : nullptr, best, winner);
    return;
  }

  // The maximum of the group is compared with the running maximum. A running maximum of NaN stays, because no
  // value is greater than NaN, and max returns its second operand when either is NaN.
  if (tile.ids) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) column[v].id[t] = set1<I>(static_cast<Index>(tile.ids[first + t]));
      column[v].template play<true>();
      const auto old = load<V>(best + v * Op::kLanes);
      const auto higher = column[v].value[0] > old;
      store(best + v * Op::kLanes, higher ? column[v].value[0] : old);
      Index* won = winner + v * Op::kLanes;
      store(won, higher ? column[v].id[0] : load<I>(won));
    }
  } else {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      column[v].template play<false>();
      store(best + v * Op::kLanes, larger(column[v].value[0], load<V>(best + v * Op::kLanes)));
    }
  }
}

}  // namespace
