// wgmma (sm_90a): a warpgroup of four warps multiplies 64 rows by N columns from shared memory,
// asynchronously. setmaxnreg, which wgmma's accumulators need, is here too.
#pragma once

#include <cstdint>
#include <type_traits>

namespace late_interaction::ptx {

// The type of the operands, with the type of the accumulators. (The tensor cores add fp8 products with fewer
// bits than a float has: scores err by 5e-5 at d = 128.)
struct WgmmaBf16 {
  using Accumulator = float;
};
struct WgmmaFp16 {
  using Accumulator = float;
};
struct WgmmaTf32 {  // the upper 19 bits of fp32; the others are ignored
  using Accumulator = float;
};
struct WgmmaE4m3 {
  using Accumulator = float;
};
struct WgmmaE5m2 {
  using Accumulator = float;
};
struct WgmmaInt8 {
  using Accumulator = int32_t;
};

// Accumulator of a 64 x N product: thread (lane) of warp w holds rows 16 * w + lane / 4 + {0, 8}; c[4 * n + 2
// * h + e] is row half h, column 8 * n + 2 * (lane % 4) + e.
template <int kN>
struct WgmmaShape;

// The same for MN-major operands: the sum runs over their rows (16-bit elements alone).
template <int kN>
struct TransposedWgmmaShape;

// The same with operand A in registers, 64 rows of 16 elements as in mma.sync, and an MN-major B.
template <int kN>
struct RegisterWgmmaShape;

// The same with a K-major B.
template <int kN>
struct RegisterKMajorWgmmaShape;

// The last digits of SIGNS say which matrices of two-byte types are MN-major; the others are the signs of
// both. The widths of integers are multiples of 16.
#define LATE_INTERACTION_WGMMA_HALVES(INSTRUCTION, SIGNS) \
  if constexpr (std::is_same_v<Type, WgmmaBf16>) {        \
    INSTRUCTION("k16.f32.bf16.bf16", SIGNS, "+f");        \
  } else if constexpr (std::is_same_v<Type, WgmmaFp16>) { \
    INSTRUCTION("k16.f32.f16.f16", SIGNS, "+f");          \
  }

#define LATE_INTERACTION_WGMMA_SHAPE(N)                                                              \
  template <>                                                                                        \
  struct WgmmaShape<N> {                                                                             \
    template <class Type>                                                                            \
    static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[N / 2], uint64_t a, \
                                                 uint64_t b, int accumulate) {                       \
      LATE_INTERACTION_WGMMA_HALVES(LATE_INTERACTION_WGMMA_##N, ", 1, 1, 0, 0")                      \
      else if constexpr (std::is_same_v<Type, WgmmaTf32>) {                                          \
        LATE_INTERACTION_WGMMA_##N("k8.f32.tf32.tf32", ", 1, 1", "+f");                              \
      }                                                                                              \
      else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {                                          \
        LATE_INTERACTION_WGMMA_##N("k32.f32.e4m3.e4m3", ", 1, 1", "+f");                             \
      }                                                                                              \
      else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {                                          \
        LATE_INTERACTION_WGMMA_##N("k32.f32.e5m2.e5m2", ", 1, 1", "+f");                             \
      }                                                                                              \
      else if constexpr (std::is_same_v<Type, WgmmaInt8>) {                                          \
        LATE_INTERACTION_WGMMA_##N("k32.s32.s8.s8", "", "+r");                                       \
      }                                                                                              \
    }                                                                                                \
  }

#define LATE_INTERACTION_TRANSPOSED_WGMMA_SHAPE(N)                                          \
  template <>                                                                               \
  struct TransposedWgmmaShape<N> {                                                          \
    template <class Type>                                                                   \
    static __device__ __forceinline__ void issue(float (&c)[N / 2], uint64_t a, uint64_t b, \
                                                 int accumulate) {                          \
      LATE_INTERACTION_WGMMA_HALVES(LATE_INTERACTION_WGMMA_##N, ", 1, 1, 1, 1")             \
    }                                                                                       \
  }

#define LATE_INTERACTION_REGISTER_WGMMA_SHAPE(SHAPE, N, SIGNS)                                          \
  template <>                                                                                           \
  struct SHAPE<N> {                                                                                     \
    template <class Type>                                                                               \
    static __device__ __forceinline__ void issue(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b, \
                                                 int accumulate) {                                      \
      LATE_INTERACTION_WGMMA_HALVES(LATE_INTERACTION_REGISTER_WGMMA_##N, SIGNS)                         \
    }                                                                                                   \
  }
#define LATE_INTERACTION_REGISTER_WGMMA_SHAPES(N)                            \
  LATE_INTERACTION_REGISTER_WGMMA_SHAPE(RegisterWgmmaShape, N, ", 1, 1, 1"); \
  LATE_INTERACTION_REGISTER_WGMMA_SHAPE(RegisterKMajorWgmmaShape, N, ", 1, 1, 0")

#include "wgmma_shapes.inc.h"

// A shared-memory descriptor of a K-major matrix: rows of 128 bytes, swizzled as TMA does (16-byte vector ^
// row % 8), the embedding along the row. `address` must be a multiple of 1024, plus 32 * k for the k-th 32
// bytes of a row. From one wgmma to the next only the low word changes, so it is computed apart.
__device__ __forceinline__ uint32_t smem_desc_low(uint32_t address) {
  return ((address & 0x3FFFF) >> 4) | (uint32_t{1} << 16);
}
// kSpacing: the matrix takes each kSpacing-th group of eight rows.
template <int kSpacing = 1>
__device__ __forceinline__ uint64_t smem_desc_k_major(uint32_t low) {
  constexpr uint32_t kGroupOfRows = (kSpacing * 8 * 128) >> 4;  // from eight rows to the next eight
  constexpr uint32_t kSwizzle128 = 1;
  return (uint64_t{kGroupOfRows | (kSwizzle128 << 30)} << 32) | low;
}

// A shared-memory descriptor of an MN-major matrix, for TransposedWgmmaShape: columns of 64 elements, each of
// them rows of 128 bytes swizzled in the same way, one row for each index that is summed over; `column_bytes`
// from one column to the next. `address` must be a multiple of 1024. Where rows begin further on, its lower
// word has a sixteenth of their bytes more.
__device__ __forceinline__ uint32_t smem_desc_low_mn_major(uint32_t address, uint32_t column_bytes) {
  return ((address & 0x3FFFF) >> 4) | (column_bytes >> 4 << 16);
}
__device__ __forceinline__ uint64_t smem_desc_mn_major(uint32_t low) {
  constexpr uint32_t kGroupOfRows = (8 * 128) >> 4;
  constexpr uint32_t kSwizzle128 = 1;
  return (uint64_t{kGroupOfRows | (kSwizzle128 << 30)} << 32) | low;
}
__device__ __forceinline__ uint64_t smem_desc_mn_major(uint32_t address, uint32_t column_bytes) {
  return smem_desc_mn_major(smem_desc_low_mn_major(address, column_bytes));
}

// Before the first wgmma of a group: makes earlier writes to registers and shared memory visible to it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Waits until at most `kPending` of this warpgroup's newest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Says whether this is the machine code of a GPU that has wgmma and setmaxnreg.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kIsSm90a = true;
#else
inline constexpr bool kIsSm90a = false;
#endif

// Moves registers between warpgroups: the producer gives up what the consumers take.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

}  // namespace late_interaction::ptx
