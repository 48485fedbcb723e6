#include "copy_past_cache.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace late_interaction::cpu {

namespace {

constexpr int64_t kItemBytes = 1 << 20;

#ifdef __SSE2__
// Ordinary stores would read every line of `to` before they write it: a third of the traffic.
void copy_item(uint8_t* to, const uint8_t* from, int64_t bytes) {
  constexpr int64_t kPiece = sizeof(__m128i), kLine = 64;
  const int64_t first = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(to) & (kLine - 1));
  std::memcpy(to, from, first);
  int64_t at = first;
  for (; at + kLine <= bytes; at += kLine) {
    __m128i line[kLine / kPiece];
    std::memcpy(line, from + at, kLine);
    for (int64_t i = 0; i < kLine / kPiece; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, line[i]);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();  // such stores are ordered with nothing else
}
#else
void copy_item(uint8_t* to, const uint8_t* from, int64_t bytes) { std::memcpy(to, from, bytes); }
#endif

}  // namespace

void copy_past_cache(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const int64_t items = (bytes + kItemBytes - 1) / kItemBytes;
  for_each_item(items, threads_for(static_cast<double>(bytes)), [&] {
    return [=](int64_t item) {
      const int64_t begin = item * kItemBytes;
      copy_item(to + begin, from + begin, std::min(kItemBytes, bytes - begin));
    };
  });
}

}  // namespace late_interaction::cpu
