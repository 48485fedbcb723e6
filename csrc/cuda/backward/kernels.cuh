// The ways to both gradients, each in one launch.
//
//   backward_lowmem        the first blocks own documents and write grad_D, which takes longest; the others
//                          gather grad_Q. On one multiprocessor the two kinds wait for different things,
//                          shared memory and L2. Either kind may be absent.
//   backward_single_query  the same where each document meets one query alone.
//   backward_unified       grad_Q, and grad_D by red as the winners' rows are read.
//
// Policies, by element type and fragments of a row (kFragments; a longer row is taken in blocks of dims)
//
//   blocks a multiprocessor   1 fragment   2, 4   8   fp64   why
//   lowmem                    3            1      1   1      rows in flight need the registers
//   unified                   2            1      1   1      it holds the row of Q as well
//   single_query              5 (*)        2      1   1, 2   bound by writing zeros: many small blocks
//
//   (*) 4 but for RowScales::none, and before sm_90, where 48 registers a thread are too few.
//   rows in flight (kUnroll, grad_rows.cuh): 16 registers, two rows at least; one where elements are read one
//   by one. RowScales::weights: for bf16, fp16 and fp32 rows in vectors alone; others are rare. It serves
//   rows without factors, for which single_query of one fragment, the most frequent, has RowScales::none.
#pragma once

#include "grad_d_segmented.cuh"
#include "grad_d_single_query.cuh"
#include "grad_q_gather.cuh"

namespace late_interaction {

template <class T, int kFragments>
inline constexpr int kBackwardBlocks = kFragments > 1 || sizeof(T) == 8 ? 1 : 3;
#if __CUDA_ARCH__ >= 900
template <RowScales kScales>
inline constexpr int kMostSingleQueryBlocks = kScales == RowScales::none ? 5 : 4;
#else
template <RowScales kScales>
inline constexpr int kMostSingleQueryBlocks = 4;
#endif
template <class T, int kFragments, RowScales kScales>
inline constexpr int kSingleQueryBlocks = kFragments == 8 ? 1
                                          : kFragments > 1 || sizeof(T) == 8
                                              ? 2
                                              : kMostSingleQueryBlocks<kScales>;

// Args: BackwardArgs, or PairBackwardArgs for listed pairs.
template <class T, int kFragments, bool kVectors, RowScales kScales, class Args>
__global__ void __launch_bounds__(kBackwardThreads, (kBackwardBlocks<T, kFragments>))
    backward_lowmem(const __grid_constant__ Args p) {
  extern __shared__ __align__(16) uint8_t shared[];
  if (blockIdx.x < p.grad_d_blocks) {
    grad_d_segmented<T, kFragments, kVectors, kScales>(p, blockIdx.x, shared);
  } else {
    gather_winners<T, kFragments, kVectors, kScales, false>(p, blockIdx.x - p.grad_d_blocks, shared);
  }
}

template <class T, int kFragments, bool kVectors, RowScales kScales>
__global__ void __launch_bounds__(kBackwardThreads, (kSingleQueryBlocks<T, kFragments, kScales>))
    backward_single_query(const __grid_constant__ BackwardArgs p) {
  extern __shared__ __align__(16) uint8_t shared[];
  if (blockIdx.x < p.grad_d_blocks) {
    grad_d_single_query<T, kFragments, kVectors, kScales>(p, blockIdx.x, shared);
  } else if (p.N == 1) {
    copy_winners<T, kFragments, kVectors, kScales>(p, blockIdx.x - p.grad_d_blocks);
  } else {
    gather_winners<T, kFragments, kVectors, kScales, false>(p, blockIdx.x - p.grad_d_blocks, shared);
  }
}

template <class T, int kFragments, bool kVectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks<T, kFragments> == 1 ? 1 : 2)
    backward_unified(const __grid_constant__ BackwardArgs p) {
  extern __shared__ __align__(16) uint8_t shared[];
  gather_winners<T, kFragments, kVectors, RowScales::norms, true>(p, blockIdx.x, shared);
}

}  // namespace late_interaction
