// wgmma (sm_90a): a warpgroup of four warps multiplies 64 rows by N columns from shared memory,
// asynchronously.
#pragma once

#include <cstdint>
#include <type_traits>

namespace late_interaction::ptx {

// What is multiplied, and what the sums are kept in. (Of a sum of fp8 products the tensor cores keep fewer
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

// The same of matrices whose rows are what is summed over (16-bit elements alone).
template <int kN>
struct TransposedWgmmaShape;

#include "wgmma_shapes.inc.h"

// Describes rows of 128 bytes in shared memory, swizzled as TMA does (16-byte piece ^ row % 8), the embedding
// along the row. `address` must be a multiple of 1024, plus 32 * k for the k-th 32 bytes of a row.
// All that changes from one product to the next lies in the low word.
// kSpacing: the matrix takes each kSpacing-th group of eight rows.
__device__ __forceinline__ uint32_t matrix_at(uint32_t address) {
  return ((address & 0x3FFFF) >> 4) | (uint32_t{1} << 16);
}
template <int kSpacing = 1>
__device__ __forceinline__ uint64_t matrix_of_rows(uint32_t low) {
  constexpr uint32_t kGroupOfRows = (kSpacing * 8 * 128) >> 4;  // from eight rows to the next eight
  constexpr uint32_t kSwizzle128 = 1;
  return (uint64_t{kGroupOfRows | (kSwizzle128 << 30)} << 32) | low;
}

// Describes a matrix for TransposedWgmmaShape: columns of 64 elements, each of them rows of 128 bytes
// swizzled in the same way, one row a summed index; `column_bytes` from one column to the next. `address`
// must be a multiple of 1024.
__device__ __forceinline__ uint64_t matrix_of_columns(uint32_t address, uint32_t column_bytes) {
  constexpr uint32_t kGroupOfRows = (8 * 128) >> 4;
  constexpr uint32_t kSwizzle128 = 1;
  const uint32_t low = ((address & 0x3FFFF) >> 4) | (column_bytes >> 4 << 16);
  return (uint64_t{kGroupOfRows | (kSwizzle128 << 30)} << 32) | low;
}

// Before the first product of a group: what was written to its registers and to shared memory is visible to
// it.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// threadIdx.x and blockIdx.x, read anew: for warps too short of registers to keep them.
__device__ __forceinline__ int thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(x));
  return x;
}
__device__ __forceinline__ uint32_t block() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(x));
  return x;
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// A barrier of `threads` threads of the block, apart from __syncthreads.
__device__ __forceinline__ void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}
// Counts among the threads that sync_some waits for, and waits for nobody.
__device__ __forceinline__ void arrive_some(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace late_interaction::ptx
