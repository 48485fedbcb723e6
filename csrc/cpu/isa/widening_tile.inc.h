// The tile kernel of tokens that are narrower in memory than the products' type: while a group of tokens
// multiplies, the next group is widened into the tile buffer, a vector of one token a k-step, because
// conversions and stores take other ports of the CPU than products. Included behind microkernel.inc.h.
//
// Convert turns kSourceBytes into a vector of packed steps. Rows of the buffer lie end to end.

namespace {

template <class Convert>
void widen_tokens(const Tile& tile, int64_t first, int64_t end) {
  const int64_t row_bytes = tile.steps * 4;
  for (int64_t n = first; n < end; ++n) {
    const char* source = tile.source + tile.source_offsets[n];
    char* out = tile.widened + tile.offsets[n];
    for (int64_t at = 0; at < row_bytes; at += sizeof(F32::V), source += Convert::kSourceBytes) {
      Convert::run(source, out + at);
    }
  }
}

// As score_group. The next group may have fewer tokens than this one: source_offsets then repeats the last.
template <class Op, class Convert, int NV>
inline __attribute__((always_inline)) void score_group_widening(const Tile& tile, int64_t first) {
  using Query = typename Op::Query;
  constexpr int NT = kGroup, kLanes = F32::kLanes;
  constexpr int64_t kVector = sizeof(F32::V);
  constexpr int kLines = (NT * Convert::kSourceBytes + 63) / 64, kStepsPerLine = kLanes / kLines;
  static_assert(NT <= kLanes, "each token of the next group has a step of every vector");
  const int64_t row_bytes = tile.steps * 4;
  const char* query = static_cast<const char*>(tile.panel);
  const char* token[NT / 3];
  for (int b = 0; b < NT / 3; ++b) token[b] = tile.widened + tile.offsets[first] + 3 * b * row_bytes;
  char* out = tile.widened + tile.offsets[first + NT];
  const char* source = tile.source;
  const int64_t* source_offsets = tile.source_offsets + first + NT;
  const char* ahead = tile.ahead + first * tile.steps * tile.ahead_step;

  typename Op::Sum sum[NV][NT] = {};
  for (int64_t at = 0; at < row_bytes; at += kVector) {
#pragma GCC unroll 16
    for (int k = 0; k < kLanes; ++k) {
      Query q[NV];
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) q[v] = load<Query>(query + (2 * k + v) * kVector);
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) {
        const auto x = set1<Query>(load<typename Op::Step>(token[t / 3] + at + t % 3 * row_bytes + 4 * k));
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) sum[v][t] = Op::multiply_add(sum[v][t], q[v], x);
      }
      if (k < NT) Convert::run(source + source_offsets[k], out + k * row_bytes);
      if (k % kStepsPerLine == 0) __builtin_prefetch(ahead + k / kStepsPerLine * 64, 0, 2);
    }
    query += 2 * kLanes * kVector;
    source += Convert::kSourceBytes;
    out += kVector;
    ahead += NT * Convert::kSourceBytes;
  }
  finish_group<Op>(sum, tile, first);
}

template <class Op, class Convert, int NV>
void score_panel_widening(const Tile& tile) {
  widen_tokens<Convert>(tile, 0, tile.count < kGroup ? tile.count : kGroup);
  int64_t t = 0;
  for (; t + kGroup < tile.count; t += kGroup) score_group_widening<Op, Convert, NV>(tile, t);
  if (t + kGroup == tile.count) {
    score_group<Op, NV, kGroup>(tile, t);
  } else {
    score_rest<Op, NV>(tile, t);
  }
}

template <class Op, class Convert>
void score_tile_widening(const Tile& tile) {
  with_vectors(tile, [&]<int NV>() { score_panel_widening<Op, Convert, NV>(tile); });
}

}  // namespace
