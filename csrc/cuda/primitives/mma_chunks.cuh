// Tiles of embeddings in shared memory, a k chunk of 128 bytes of each row at a time, and their products by
// mma.sync (sm_80+).
//
// cp.async copies chunks to the stages of a ring. Rows of 128 bytes are swizzled (16-byte vector ^ row % 8),
// so that ldmatrix is free of bank conflicts. Zeros stand past the last row and past d.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../common/problem.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mma.cuh"

namespace late_interaction {

inline constexpr int kChunkBytes = 128;
inline constexpr int kVecsPerChunk = 8;  // of 16 bytes
inline constexpr int kMaxStages = 8;

// Address of a 16-byte vector in a swizzled chunk of rows.
__device__ __forceinline__ uint32_t vec_address(uint32_t base, int row, int vec) {
  return base + row * kChunkBytes + ((vec ^ (row & 7)) << 4);
}

// The bytes that one cp.async can copy of the rows of a view: 16, 8 or 4; 0: rows take ordinary loads.
template <class E>
__device__ __forceinline__ int copy_width(const TokenView& view, bool aligned, int d) {
  if (aligned) return 16;
  const int64_t strides = view.token_stride | view.item_stride | view.query_stride | d;
  const auto bits = reinterpret_cast<uint64_t>(view.data) | static_cast<uint64_t>(strides) * sizeof(E);
  return view.dim_stride != 1 || bits % 4 != 0 ? 0 : bits % 8 == 0 ? 8 : 4;
}

// Copies one vector, kBytes at a time. Its first `valid_bytes` bytes exist, the others become zeros.
template <int kBytes>
__device__ __forceinline__ void copy_vec(uint32_t dst, const void* src, int valid_bytes) {
#pragma unroll
  for (int at = 0; at < 16; at += kBytes) {
    const bool exists = at < valid_bytes;
    ptx::cp_async_narrow<kBytes>(dst + at, static_cast<const char*>(src) + (exists ? at : 0),
                                 exists ? kBytes : 0);
  }
}

// Copies one vector by ordinary loads, for rows that cp.async cannot copy: misaligned, or with elements
// apart. Out of line, so that the usual path does not pay for its registers.
template <class E>
__device__ __noinline__ void load_vec_by_element(uint32_t dst, const E* row, int64_t stride, int first,
                                                 int d) {
  constexpr int kVecElements = 16 / sizeof(E);
  union {
    E element[kVecElements];
    float4 whole;
  } vec;
  vec.whole = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int k = 0; k < kVecElements; ++k) {
    if (first + k < d) vec.element[k] = row[(first + k) * stride];
  }
  ptx::st_shared_v4_f32(dst, vec.whole);
}

// Copies one k chunk of `kRows` rows to shared memory. source(r): offset of row r, in elements; rows from
// `valid_rows` on, and elements from d on, become zeros.
template <class E, int kRows, int kThreads, class Source>
__device__ __forceinline__ void load_k_chunk(uint32_t dst, const TokenView& view, int width, int k_chunk,
                                             int d, int valid_rows, Source source) {
  constexpr int kVecElements = 16 / sizeof(E);
  const E* data = static_cast<const E*>(view.data);
  const int vec = threadIdx.x % kVecsPerChunk;
  const int first = (k_chunk * kVecsPerChunk + vec) * kVecElements;
  if (first >= d) valid_rows = 0;
  const int row_bytes = (d - first) * static_cast<int>(sizeof(E));  // from this vector on
#pragma unroll 4
  for (int row = threadIdx.x / kVecsPerChunk; row < kRows; row += kThreads / kVecsPerChunk) {
    const uint32_t to = vec_address(dst, row, vec);
    const bool exists = row < valid_rows;
    const E* from = exists ? data + source(row) + first : data;
    if (width == 16) {  // d is then a multiple of a vector
      ptx::cp_async_16(to, from, exists ? 16 : 0);
    } else if (width == 8) {
      copy_vec<8>(to, from, exists ? row_bytes : 0);
    } else if (width == 4) {
      copy_vec<4>(to, from, exists ? row_bytes : 0);
    } else {
      load_vec_by_element(to, exists ? data + source(row) : data, view.dim_stride, first, exists ? d : 0);
    }
  }
}

// The same for whole vectors. source(row, bytes) returns a row's address, or sets bytes to 0: there is none.
template <class E, int kRows, int kThreads, class Source>
__device__ __forceinline__ void load_k_chunk_in_vectors(uint32_t dst, int k_chunk, int d, Source source) {
  constexpr int kVecElements = 16 / sizeof(E), kStep = kThreads / kVecsPerChunk;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0, "a thread's rows are swizzled alike");
  const int vec = threadIdx.x % kVecsPerChunk, first_row = threadIdx.x / kVecsPerChunk;
  const int first = (k_chunk * kVecsPerChunk + vec) * kVecElements;
  const bool in_row = first < d;
  const uint32_t to = vec_address(dst, first_row, vec);
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    uint32_t bytes = in_row ? 16 : 0;
    const E* from = source(first_row + row, bytes);
    ptx::cp_async_16(to + row * kChunkBytes, from + (in_row ? first : 0), bytes);
  }
}

// Adds the products of one k chunk to the accumulators.
template <class Mma, class Tile>
__device__ __forceinline__ void multiply_k_chunk(
    ptx::Accumulator (&acc)[Tile::kRowBlocks][Tile::kColumnBlocks], uint32_t q_chunk, uint32_t d_chunk,
    int warp_m, int warp_n) {
  const int lane = threadIdx.x % 32;
  const int q_row = warp_m * Tile::kWarpRows + lane % 16, q_vec = lane / 16;
  const int d_row = warp_n * Tile::kWarpColumns + (lane / 16) * 8 + lane % 8, d_vec = (lane / 8) % 2;
#pragma unroll Mma::kUnroll
  for (int k = 0; k < kVecsPerChunk / 2; ++k) {
    typename Mma::A a[Tile::kRowBlocks];
#pragma unroll
    for (int i = 0; i < Tile::kRowBlocks; ++i) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, vec_address(q_chunk, q_row + i * 16, 2 * k + q_vec));
      a[i] = Mma::operand_a(words);
    }
#pragma unroll
    for (int n = 0; n < Tile::kColumnBlocks; n += 2) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, vec_address(d_chunk, d_row + n * 8, 2 * k + d_vec));
      const typename Mma::B b0 = Mma::operand_b(words[0], words[1]);
      const typename Mma::B b1 = Mma::operand_b(words[2], words[3]);
#pragma unroll
      for (int i = 0; i < Tile::kRowBlocks; ++i) {
        Mma::multiply(acc[i][n], a[i], b0);
        Mma::multiply(acc[i][n + 1], a[i], b1);
      }
    }
  }
}

// Multiplies without tensor cores: a lane reads 16 bytes at a time of the rows and columns of its
// accumulators. Sums of 16 elements begin at zero, since sums of a whole embedding would lose too many
// digits.
template <class Mma, class Tile>
  requires std::is_same_v<Mma, ptx::Ffma>
__device__ __forceinline__ void multiply_k_chunk(
    ptx::Accumulator (&acc)[Tile::kRowBlocks][Tile::kColumnBlocks], uint32_t q_chunk, uint32_t d_chunk,
    int warp_m, int warp_n) {
  constexpr int kRows = 2 * Tile::kRowBlocks;           // of a lane
  constexpr int kColumns = 2 * (Tile::kRowBlocks / 2);  // at once, as registers allow
  constexpr int kSummedVecs = 4;
  const int lane = threadIdx.x % 32;
  const int q_row = warp_m * Tile::kWarpRows + lane / 4;
  const int d_row = warp_n * Tile::kWarpColumns + 2 * (lane % 4);
#pragma unroll
  for (int first = 0; first < 2 * Tile::kColumnBlocks; first += kColumns) {
#pragma unroll 1
    for (int begin = 0; begin < kVecsPerChunk; begin += kSummedVecs) {
      float part[kRows][kColumns] = {};
#pragma unroll kRows / 4  // A thin tile has no registers for more.
      for (int vec = begin; vec < begin + kSummedVecs; ++vec) {
        float4 q[kRows];
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          q[row] = ptx::ld_shared_v4_f32(vec_address(q_chunk, q_row + 8 * row, vec));
        }
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          const int d_column = d_row + 8 * ((first + column) / 2) + column % 2;
          const float4 d = ptx::ld_shared_v4_f32(vec_address(d_chunk, d_column, vec));
          for (const auto element : {&float4::x, &float4::y, &float4::z, &float4::w}) {
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
              part[row][column] = fmaf(q[row].*element, d.*element, part[row][column]);
            }
          }
        }
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          acc[row / 2][(first + column) / 2][row % 2 * 2 + column % 2] += part[row][column];
        }
      }
    }
  }
}

// Waits for the oldest stage of a ring with stages - 1 loads in flight. The instruction takes an immediate.
__device__ __forceinline__ void wait_stage(int stages) {
  switch (stages) {
    case 2:
      return ptx::cp_async_wait<0>();
    case 3:
      return ptx::cp_async_wait<1>();
    case 4:
      return ptx::cp_async_wait<2>();
    case 5:
      return ptx::cp_async_wait<3>();
    case 6:
      return ptx::cp_async_wait<4>();
    case 7:
      return ptx::cp_async_wait<5>();
    default:
      return ptx::cp_async_wait<kMaxStages - 2>();
  }
}

}  // namespace late_interaction
