// The tile kernel of AMX on emulated tile registers, so that its loops are tested on CPUs without them.
// Tokens end at a page that faults when it is read.
#include <cstdio>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "../../csrc/cpu/isa/target.h"
#include "../../csrc/cpu/kernels.h"
#include "check.h"
#include "emulated_tiles.h"

using late_interaction::cpu::Multiplier;
using late_interaction::cpu::Tile;

LI_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "../../csrc/cpu/isa/x86/avx512.inc.h"

#include "../../csrc/cpu/isa/x86/amx.inc.h"

namespace {

constexpr int kRows = 2 * F32::kLanes;

// Bytes whose last one is the last of a page, before one that must not be read.
class GuardedBytes {
 public:
  explicit GuardedBytes(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page + page;
    pages_ =
        static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT(pages_ != MAP_FAILED);
    EXPECT(mprotect(pages_ + size_ - page, page, PROT_NONE) == 0);
    data = pages_ + size_ - page - bytes;
  }
  ~GuardedBytes() { munmap(pages_, size_); }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;

  char* data;

 private:
  char* pages_;
  size_t size_;
};

struct Bf16 {
  using Kernel = TileBf16;
  static constexpr int kPerStep = 2;
  // A few values, so that maxima are often equal; their products and sums are exact.
  static double put(char* at, std::mt19937& random) {
    const float x = static_cast<float>(static_cast<int>(random() % 9) - 4) / 4;
    std::memcpy(at, reinterpret_cast<const char*>(&x) + 2, 2);
    return x;
  }
};

struct Int8 {
  using Kernel = TileInt8;
  static constexpr int kPerStep = 4;
  static double put(char* at, std::mt19937& random) {
    const auto x = static_cast<int8_t>(random() % 4 == 0 ? -128 : static_cast<int>(random() % 256) - 128);
    std::memcpy(at, &x, 1);
    return x;
  }
};

struct Case {
  int valid, steps, vectors, gap;  // gap: bytes between tokens
  bool ids, scales, nan;
};

template <class Element>
void check(const Case& c, std::mt19937& random) {
  constexpr int kBytes = 4 / Element::kPerStep;
  const int dims = c.steps * Element::kPerStep, stride = 4 * c.steps + c.gap;
  const int padded = (c.valid + kFoldTokens - 1) / kFoldTokens * kFoldTokens;
  std::vector<double> query(kRows * dims), token(c.valid * dims);
  GuardedBytes panel(4 * c.steps * kRows), tokens((c.valid - 1) * stride + 4 * c.steps);
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < dims; ++k) {
      char* step = panel.data + 4 * (k / Element::kPerStep * kRows + row);
      query[row * dims + k] = Element::put(step + k % Element::kPerStep * kBytes, random);
    }
  }
  for (int t = 0; t < c.valid; ++t) {
    for (int k = 0; k < dims; ++k) {
      token[t * dims + k] = Element::put(tokens.data + t * stride + k * kBytes, random);
    }
  }
  std::vector<int64_t> offsets(padded);
  std::vector<int32_t> ids(padded);
  std::vector<float> scales(padded, 1.0f);
  for (int t = 0; t < padded; ++t) {
    const int n = std::min(t, c.valid - 1);
    offsets[t] = int64_t{n} * stride;
    ids[t] = 7 + 2 * n;
    if (c.scales) scales[t] = n % 3 == 0 ? 0.5f : 2.0f;
    if (c.nan && n % 11 == 5) scales[t] = std::numeric_limits<float>::quiet_NaN();
  }

  std::vector<float> best(kRows, -std::numeric_limits<float>::infinity());
  std::vector<int32_t> winner(kRows, ids[0]);
  Tile tile{};
  tile.panel = panel.data;
  tile.vectors = c.vectors;
  tile.steps = c.steps;
  tile.count = padded;
  tile.valid = c.valid;
  tile.tokens = tokens.data;
  tile.offsets = offsets.data();
  tile.token_scales = c.scales || c.nan ? scales.data() : nullptr;
  tile.ids = c.ids ? ids.data() : nullptr;
  tile.best = best.data();
  tile.winner = winner.data();
  tile.ahead = tokens.data;
  tile.ahead_step = 4;
  score_tile_in_tiles<typename Element::Kernel>(tile);

  for (int row = 0; row < c.vectors * F32::kLanes; ++row) {
    float expected = -std::numeric_limits<float>::infinity();
    int32_t first = ids[0];
    for (int t = 0; t < c.valid; ++t) {
      double sum = 0;
      for (int k = 0; k < dims; ++k) sum += query[row * dims + k] * token[t * dims + k];
      const float x = static_cast<float>(sum) * (tile.token_scales ? scales[t] : 1.0f);
      if (!late_interaction::replaces_maximum(x, expected)) continue;
      expected = x;
      first = ids[t];
    }
    EXPECT(best[row] == expected || (std::isnan(best[row]) && std::isnan(expected)));
    if (c.ids) EXPECT(winner[row] == first);
  }
}

void run() {
  std::mt19937 random(1);
  Multiplier multiplier{};
  use_tiles<TileBf16>(multiplier);
  for (int valid = 1; valid <= 100; ++valid) {
    for (const int steps : {1, 7, 16, 26, 32, 33, 48, 64}) {  // parts of one length, of at most 16
      const Case c{valid,
                   steps,
                   1 + static_cast<int>(random() % 2),
                   static_cast<int>(random() % 3) * 12,
                   random() % 2 == 0,
                   random() % 2 == 0,
                   random() % 4 == 0};
      check<Bf16>(c, random);
      check<Int8>(c, random);
      if (random() % 4 == 0) multiplier.release();
    }
  }
  multiplier.release();
}

}  // namespace
LI_TARGET_END

int main() {
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    std::puts("skipped: this CPU has no AVX-512, which folds the similarities");
    return 0;
  }
  run();
  return failures != 0;
}
#else
int main() {
  std::puts("skipped: not an x86-64 CPU");
  return 0;
}
#endif
