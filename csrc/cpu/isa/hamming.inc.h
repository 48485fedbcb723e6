// Similarities of bit codes: dims - 2 * (bits that differ), the inner product of two vectors of +1 and -1.
// Included behind the vectors of an instruction set.
//
// As in microkernel.inc.h a lane is a query row, and 32 bits of a token are broadcast to all lanes. The least
// Hamming distance stays in registers over all groups of the tile; it becomes a similarity once a tile.
//
// Bits gives: kWide (tokens of a wide group), Counts, kMaxSteps (so many words fit into Counts), add_ones
// (Counts + the ones of each lane) and total (Counts to 32-bit lanes).

namespace {

constexpr int kNarrow = 4;  // tokens of a narrow group

// Steps [begin, end) of NV vectors of query rows against NT tokens.
template <class Bits, int NV, int NT>
inline __attribute__((always_inline)) void count_steps(typename Bits::Counts (&count)[NV][NT],
                                                       const char* query, const char* const (&token)[NT],
                                                       int64_t begin, int64_t end) {
  using Words = F32::U;
  for (int64_t step = begin; step < end; ++step) {
    Words q[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) q[v] = load<Words>(query + (2 * step + v) * sizeof(Words));
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      const auto word = set1<Words>(load<uint32_t>(token[t] + 4 * step));
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) count[v][t] = Bits::add_ones(count[v][t], q[v] ^ word);
    }
  }
}

template <class Bits, int NV, int NT>
inline __attribute__((always_inline)) void count_group(const Tile& tile, int64_t first, F32::U (&least)[NV]) {
  using Words = F32::U;
  const char* query = static_cast<const char*>(tile.panel);
  const char* token[NT];
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) token[t] = static_cast<const char*>(tile.tokens) + tile.offsets[first + t];
  const int64_t ahead_bytes = tile.steps * tile.ahead_step;
  for (int64_t line = 0; line < NT * ahead_bytes; line += 64) {
    __builtin_prefetch(tile.ahead + first * ahead_bytes + line, 0, 2);
  }

  Words total[NV][NT] = {};
  if constexpr (Bits::kMaxSteps == 0) {
    count_steps<Bits>(total, query, token, 0, tile.steps);
  } else {
    for (int64_t step = 0; step < tile.steps; step += Bits::kMaxSteps) {
      const int64_t end = tile.steps - step < Bits::kMaxSteps ? tile.steps : step + Bits::kMaxSteps;
      typename Bits::Counts count[NV][NT] = {};
      count_steps<Bits>(count, query, token, step, end);
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) {
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) total[v][t] += Bits::total(count[v][t]);
      }
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) least[v] = smaller(least[v], total[v][t]);
  }
}

template <class Bits, int NV>
void compare_panel(const Tile& tile) {
  using Words = F32::U;
  Words least[NV];
#pragma GCC unroll 2
  for (int v = 0; v < NV; ++v) least[v] = Words{} + uint32_t{INT32_MAX};
  int64_t t = 0;
  for (; t + Bits::kWide <= tile.count; t += Bits::kWide) count_group<Bits, NV, Bits::kWide>(tile, t, least);
  for (; t < tile.count; t += kNarrow) count_group<Bits, NV, kNarrow>(tile, t, least);
#pragma GCC unroll 2
  for (int v = 0; v < NV; ++v) {
    float* best = static_cast<float*>(tile.best) + v * F32::kLanes;
    const auto similarities = from_integers(static_cast<uint32_t>(tile.dims) - 2 * least[v]);
    store(best, larger(similarities, load<F32::V>(best)));
  }
}

template <class Bits>
void compare_tile(const Tile& tile) {
  with_vectors(tile, [&]<int NV>() { compare_panel<Bits, NV>(tile); });
}

// Bytes as they lie in memory; the last word is filled up with zeros, which differ in no bit.
void pack_words(const void* data, Dtype, int64_t stride, int64_t bytes, void* out) {
  const auto* x = static_cast<const uint8_t*>(data);
  auto* packed = static_cast<uint8_t*>(out);
  for (int64_t k = 0; k < bytes; ++k) packed[k] = x[k * stride];
  for (int64_t k = bytes; k % 4; ++k) packed[k] = 0;
}

template <class Bits>
void fill_hamming(Kernels& k) {
  static_assert(Bits::kWide % kNarrow == 0, "a tile is whole narrow groups");
  k.hamming = {F32::kLanes, kNarrow, Bits::kWide, 4, 4, Dtype::int8, pack_words, compare_tile<Bits>};
}

}  // namespace
