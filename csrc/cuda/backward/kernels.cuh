// The ways to both gradients, each in one launch.
//
//   backward_lowmem   the first blocks own documents and write grad_D, the others gather grad_Q: two kinds of
//                     block that wait for different things (shared memory; L2) on one multiprocessor. Those
//                     that own documents take longest and come first. Either kind may be absent.
//   backward_few      the same where each document meets one query alone.
//   backward_unified  grad_Q, and grad_D by reductions as the winners' rows go by.
#pragma once

#include "grad_d_segmented.cuh"
#include "grad_d_single_query.cuh"
#include "grad_q_gather.cuh"

namespace late_interaction {

template <class T, int kPieces>
inline constexpr int kBackwardBlocks = kPieces > 1 || sizeof(T) == 8 ? 1 : 3;  // on a multiprocessor
#if __CUDA_ARCH__ >= 900
template <bool kNormalized>
inline constexpr int kMostFewBlocks = kNormalized ? 4 : 5;
#else
template <bool kNormalized>
inline constexpr int kMostFewBlocks = 4;  // five leave 48 registers a thread: too few there
#endif
template <class T, int kPieces, bool kNormalized>
inline constexpr int kFewBlocks = kPieces == 8                    ? 1
                                  : kPieces > 1 || sizeof(T) == 8 ? 2
                                                                  : kMostFewBlocks<kNormalized>;

// Args: BackwardArgs, or PairBackwardArgs for listed pairs.
template <class T, int kPieces, bool kVectors, bool kNormalized, class Args>
__global__ void __launch_bounds__(kBackwardThreads, (kBackwardBlocks<T, kPieces>))
    backward_lowmem(const __grid_constant__ Args p) {
  extern __shared__ __align__(16) uint8_t shared[];
  if (blockIdx.x < p.owned_blocks) {
    own_documents<T, kPieces, kVectors, kNormalized>(p, blockIdx.x, shared);
  } else {
    gather_winners<T, kPieces, kVectors, kNormalized, false>(p, blockIdx.x - p.owned_blocks, shared);
  }
}

template <class T, int kPieces, bool kVectors, bool kNormalized>
__global__ void __launch_bounds__(kBackwardThreads, (kFewBlocks<T, kPieces, kNormalized>))
    backward_few(const __grid_constant__ BackwardArgs p) {
  extern __shared__ __align__(16) uint8_t shared[];
  if (blockIdx.x < p.owned_blocks) {
    own_few<T, kPieces, kVectors, kNormalized>(p, blockIdx.x, shared);
  } else if (p.N == 1) {
    copy_winners<T, kPieces, kVectors, kNormalized>(p, blockIdx.x - p.owned_blocks);
  } else {
    gather_winners<T, kPieces, kVectors, kNormalized, false>(p, blockIdx.x - p.owned_blocks, shared);
  }
}

template <class T, int kPieces, bool kVectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks<T, kPieces> == 1 ? 1 : 2)
    backward_unified(const __grid_constant__ BackwardArgs p) {
  extern __shared__ __align__(16) uint8_t shared[];
  gather_winners<T, kPieces, kVectors, true, true>(p, blockIdx.x, shared);
}

}  // namespace late_interaction
