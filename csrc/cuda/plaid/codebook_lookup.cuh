// Looks up what residual codes add to a centroid, a lane's share of a token at a time.
//
// A vector is 16 bytes of a token's embedding. Each lookup says how many dims that is, which bytes of the
// residual belong to it, what table in shared memory it needs, and how the table's values are added.
#pragma once

#include <type_traits>

#include "../ptx/ld_st.cuh"
#include "decompress.cuh"

namespace late_interaction {

// Bytes [first, first + kCount) of a residual row, as far as it goes, one by one.
template <int kCount>
__device__ __forceinline__ uint32_t load_bytes(const uint8_t* row, uint32_t row_bytes, uint32_t first) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i < row_bytes) codes |= uint32_t{row[first + i]} << 8 * i;
  }
  return codes;
}

// The sums of two elements in each word.
template <class E>
__device__ __forceinline__ uint32_t add_words(uint32_t a, uint32_t b) {
  const PairOf<E> sum = __hadd2(reinterpret_cast<const PairOf<E>&>(a), reinterpret_cast<const PairOf<E>&>(b));
  return reinterpret_cast<const uint32_t&>(sum);
}

// Half precision: a whole byte at a time. Row b of the table is 128 bytes, the values of byte b over and
// over, so that every lane finds them in banks of its own, whatever byte it has.
template <class E, int kBits>
struct ByteLookup {
  using Element = E;
  static constexpr int kVecDims = 8;
  static constexpr bool kByBytes = true;  // a vector's codes are whole bytes, which may be aligned
  static constexpr int kVecBytes = kBits;
  static constexpr int kValues = 8 / kBits;  // of a byte
  static constexpr int kWords = kBits == 8 ? 1 : kValues / 2;
  static constexpr int kRowBytes = 128;
  static constexpr int kTableBytes = 256 * kRowBytes;
  using Codes = std::conditional_t<kBits == 8, uint2, uint32_t>;

  uint32_t values;  // where the lane's copy of row 0 is

  __device__ __forceinline__ explicit ByteLookup(uint32_t table, const ResidualArgs&)
      : values(table + threadIdx.x % (kRowBytes / (4 * kWords)) * (4 * kWords)) {}

  static __device__ __forceinline__ uint32_t value(const ResidualArgs& p, int byte, int index) {
    const int bucket = byte >> (kBits * index) & ((1 << kBits) - 1);
    const E x = narrow<E>(p.documents.weights[bucket]);
    return *reinterpret_cast<const uint16_t*>(&x);
  }
  // By all threads of the block.
  static __device__ __forceinline__ void fill(const ResidualArgs& p, uint32_t table) {
    constexpr int kRowWords = kRowBytes / 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < kTableBytes / 4; i += blockDim.x) {
      const int byte = i / kRowWords, word = i % kWords;
      uint32_t x = value(p, byte, kBits == 8 ? 0 : 2 * word);
      if constexpr (kBits < 8) x |= value(p, byte, 2 * word + 1) << 16;
      ptx::st_shared(table + 4 * i, x);
    }
  }

  // A vector's codes, wherever they lie.
  static __device__ __forceinline__ Codes load_any(const ResidualArgs& p, const uint8_t* row, int vec) {
    const uint32_t bytes = p.documents.residual_row, first = vec * kVecBytes;
    if constexpr (kBits == 8) {
      return {load_bytes<4>(row, bytes, first), load_bytes<4>(row, bytes, first + 4)};
    } else {
      return load_bytes<kVecBytes>(row, bytes, first);
    }
  }
  // The same where they are whole and aligned. They are read once, and should not drive centroids out of L2.
  static __device__ __forceinline__ Codes load_whole(const uint8_t* row, int vec) {
    const uint8_t* at = row + vec * kVecBytes;
    if constexpr (kBits == 8) {
      return __ldcs(reinterpret_cast<const uint2*>(at));
    } else if constexpr (kBits == 4) {
      return __ldcs(reinterpret_cast<const uint32_t*>(at));
    } else if constexpr (kBits == 2) {
      return __ldcs(reinterpret_cast<const uint16_t*>(at));
    } else {
      return __ldcs(at);
    }
  }

  static __device__ __forceinline__ uint32_t row_of(uint32_t codes, int byte) {
    constexpr uint32_t kMask = 0xFF * kRowBytes;
    return (byte == 0 ? codes << 7 : codes >> (8 * byte - 7)) & kMask;
  }

  __device__ __forceinline__ void add(const ResidualArgs&, uint32_t (&x)[4], Codes codes) const {
    uint32_t w[4];
    if constexpr (kBits == 8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t half = i < 2 ? codes.x : codes.y;
        w[i] = ptx::ld_shared(values + row_of(half, 2 * i % 4)) |
               ptx::ld_shared(values + row_of(half, 2 * i % 4 + 1)) << 16;
      }
    } else if constexpr (kBits == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = ptx::ld_shared(values + row_of(codes, i));
    } else if constexpr (kBits == 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 two = ptx::ld_shared_v2_f32(values + row_of(codes, i));
        w[2 * i] = __float_as_uint(two.x);
        w[2 * i + 1] = __float_as_uint(two.y);
      }
    } else {
      const uint4 four = ptx::ld_shared_v4_b32(values + row_of(codes, 0));
      w[0] = four.x;
      w[1] = four.y;
      w[2] = four.z;
      w[3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = add_words<E>(x[i], w[i]);
  }

  // Zeros from the dim on that is the count-th of the vector.
  static __device__ __forceinline__ void cut(uint32_t (&x)[4], int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] &= (2 * i < count ? 0x0000FFFFu : 0u) | (2 * i + 1 < count ? 0xFFFF0000u : 0u);
  }
};

// fp32, any number of bits: a dim at a time.
struct DimLookup {
  using Element = float;
  static constexpr bool kByBytes = false;
  static constexpr int kVecDims = 4;
  static constexpr int kTableBytes = 256 * 4;
  using Codes = uint32_t;

  uint32_t table;

  __device__ __forceinline__ explicit DimLookup(uint32_t table, const ResidualArgs&) : table(table) {}

  static __device__ __forceinline__ void fill(const ResidualArgs& p, uint32_t table) {
    for (int i = threadIdx.x; i < 1 << p.documents.nbits; i += blockDim.x)
      ptx::st_shared(table + 4 * i, __float_as_uint(p.documents.weights[i]));
  }
  static __device__ __forceinline__ Codes load_any(const ResidualArgs& p, const uint8_t* row, int vec) {
    const uint32_t bit = vec * kVecDims * p.documents.nbits;
    return load_bytes<4>(row, p.documents.residual_row, bit / 8) >> bit % 8;
  }
  __device__ __forceinline__ void add(const ResidualArgs& p, uint32_t (&x)[4], Codes codes) const {
    const int nbits = p.documents.nbits;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bucket = codes >> (i * nbits) & ((1u << nbits) - 1);
      x[i] = __float_as_uint(__uint_as_float(x[i]) + __uint_as_float(ptx::ld_shared(table + 4 * bucket)));
    }
  }
  static __device__ __forceinline__ void cut(uint32_t (&x)[4], int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = i < count ? x[i] : 0u;
  }
};

}  // namespace late_interaction
