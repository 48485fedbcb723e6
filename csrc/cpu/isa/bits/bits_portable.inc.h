// Bits of any CPU, in the GCC / Clang vector extension; NEON counts the ones of bytes in one instruction.
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

struct Bits {
  using Words = uint32_t __attribute__((vector_size(16)));
  using Counts = Words;  // of bytes
  static constexpr int kLanes = 4, kWide = 4, kNarrow = 4;
  static constexpr int64_t kMaxSteps = 31;  // a byte counts 8 ones a step

  static Words load(const char* p) {
    Words x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static Words set1(const char* p) {
    uint32_t word;
    __builtin_memcpy(&word, p, 4);
    return Words{word, word, word, word};
  }
  static Words min(Words a, Words b) {
    const Words less = (Words)(a < b);
    return (a & less) | (b & ~less);
  }
#if defined(__aarch64__)
  static Counts add_ones(Counts count, Words x) {
    return (Counts)vaddq_u8((uint8x16_t)count, vcntq_u8((uint8x16_t)x));
  }
  static Words total(Counts x) { return (Words)vpaddlq_u16(vpaddlq_u8((uint8x16_t)x)); }
#else
  static Counts add_ones(Counts count, Words x) {
    x -= x >> 1 & 0x55555555u;
    x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
    return count + ((x + (x >> 4)) & 0x0F0F0F0Fu);
  }
  static Words total(Counts x) {
    const Words pairs = (x & 0x00FF00FFu) + (x >> 8 & 0x00FF00FFu);
    return (pairs & 0xFFFFu) + (pairs >> 16);
  }
#endif
  static void fold(float* best, Words similarities) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto x = static_cast<float>(static_cast<int32_t>(similarities[lane]));
      if (x > best[lane]) best[lane] = x;
    }
  }
};

struct Unpack {
  static constexpr int kDims = 0;
  static void bits(const uint8_t*, int8_t*) {}
  static void nibbles(const uint8_t*, int8_t*) {}
};

}  // namespace
