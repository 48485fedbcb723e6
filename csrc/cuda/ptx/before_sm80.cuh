// What stands in for instructions of sm_80 in code for sm_75 (Turing).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace late_interaction::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr bool kBeforeSm80 = true;
#else
inline constexpr bool kBeforeSm80 = false;
#endif

// Threads of a multiprocessor. ptxas warns of launch bounds that ask for more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kThreadsPerSm = 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1100)
inline constexpr int kThreadsPerSm = 1536;
#else
inline constexpr int kThreadsPerSm = 2048;
#endif

// True if code for sm_75 only traps, since a block has no more than 64 KiB of shared memory: a wrong plan
// ends with an error then, not with memory that nothing was written to.
constexpr bool is_too_large(int smem_bytes) { return kBeforeSm80 && smem_bytes > 64 * 1024; }

// ---- cp.async: a load and a store, that a thread waits for ----

// Copies the first `valid_bytes` of kBytes, and zeros for the rest.
template <int kBytes>
__device__ __forceinline__ void copy_bytes(uint32_t dst, const void* src, uint32_t valid_bytes) {
  using Words = std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 8, uint2, uint4>>;
  Words words{};
  if (valid_bytes == kBytes) {
    words = *static_cast<const Words*>(src);
  } else if constexpr (kBytes == 16) {
    uint32_t part[4] = {};
    for (uint32_t i = 0; i < valid_bytes; ++i) {
      const uint32_t byte = uint32_t{static_cast<const uint8_t*>(src)[i]} << 8 * (i % 4);
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) part[w] |= i / 4 == w ? byte : 0;
    }
    words = {part[0], part[1], part[2], part[3]};
  }
  *static_cast<Words*>(__cvta_shared_to_generic(dst)) = words;
}

// ---- mbarrier: a count of arrivals that begins again after two phases, and the arrivals of a phase ----

__device__ __forceinline__ volatile uint32_t* barrier_words(uint32_t mbarrier) {
  return static_cast<volatile uint32_t*>(__cvta_shared_to_generic(mbarrier));
}

__device__ __forceinline__ void init_barrier(uint32_t mbarrier, uint32_t arrivals) {
  barrier_words(mbarrier)[0] = 0;
  barrier_words(mbarrier)[1] = arrivals;
}

__device__ __forceinline__ void arrive_at_barrier(uint32_t mbarrier) {
  __threadfence_block();
  volatile uint32_t* words = barrier_words(mbarrier);
  atomicInc(const_cast<uint32_t*>(words), 2 * words[1] - 1);
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void wait_at_barrier(uint32_t mbarrier, uint32_t parity) {
  volatile uint32_t* words = barrier_words(mbarrier);
  while ((words[0] >= words[1] ? 1u : 0u) == parity) {
  }
  __threadfence_block();
}

// ---- mma.sync of 16 rows and 8 columns ----

// By two products of half as many elements.
__device__ __forceinline__ void mma_fp16_by_halves(float (&c)[4], const uint32_t (&a)[4],
                                                   const uint32_t (&b)[2]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
  }
}

// By four products of half as many rows and elements.
__device__ __forceinline__ void mma_int8_by_quarters(int32_t (&c)[4], const uint32_t (&a)[4],
                                                     const uint32_t (&b)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};\n"
        : "+r"(c[2 * (i % 2)]), "+r"(c[2 * (i % 2) + 1])
        : "r"(a[i]), "r"(b[i / 2]));
  }
}

// By the plain units: lanes show each other their words. add(c, a, b): c and the product of two words.
template <class Sum, class Add>
__device__ __forceinline__ void mma_by_shuffles(Sum (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                Add add) {
  const int quad = threadIdx.x % 4;
#pragma unroll 1
  for (int from = 0; from < 4; ++from) {
    uint32_t row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) row[i] = __shfl_sync(0xFFFFFFFFu, a[i], from, 4);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t column = __shfl_sync(0xFFFFFFFFu, b[k], 8 * quad + 4 * n + from);
        c[n] = add(c[n], row[2 * k], column);
        c[2 + n] = add(c[2 + n], row[2 * k + 1], column);
      }
    }
  }
}

// ---- bf16 as fp16 times a power of two, for 16 elements of a row ----

// The fp32 exponent of the power, and of its inverse, with which the largest of some bf16 numbers, in two
// words of each lane of a quad, lies between 2^14 and 2^15.
__device__ __forceinline__ uint32_t quad_exponent(uint32_t w0, uint32_t w1) {
  uint32_t largest = max(max(w0 << 17, w0 << 1), max(w1 << 17, w1 << 1));
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lanes));
  }
  return max(largest >> 24, 15u) - 14;
}
__device__ __forceinline__ float with_exponent(uint32_t exponent) { return __uint_as_float(exponent << 23); }

// Two bf16 numbers over 2^(exponent - 127), as fp16. Infinity and NaN stay what they are.
__device__ __forceinline__ uint32_t bf16_as_fp16(uint32_t word, uint32_t exponent) {
  const float inverse = with_exponent(254 - exponent);
  const __half2 pair =
      __floats2half2_rn(__uint_as_float(word << 16) * inverse, __uint_as_float(word & 0xFFFF0000u) * inverse);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace late_interaction::ptx
