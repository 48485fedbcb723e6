// The two ways to both gradients, each in one launch.
//
//   backward_lowmem   the first blocks own documents and write grad_D, the others gather grad_Q: two kinds of
//                     block that wait for different things (votes and shared memory; L2) on one
//                     multiprocessor. Those that own documents take longest and come first. Either kind may
//                     be absent.
//   backward_unified  grad_Q, and grad_D by reductions as the winners' rows go by.
#pragma once

#include "backward_gather.cuh"
#include "backward_owned.cuh"
#include "turns.cuh"

namespace late_interaction {

template <class T, int kPieces>
inline constexpr int kBackwardBlocks = kPieces > 1 || sizeof(T) == 8 ? 1 : 3;  // on a multiprocessor

// Args: BackwardArgs, or PairBackwardArgs for listed pairs.
template <class T, int kPieces, bool kVectors, class Args>
__global__ void __launch_bounds__(kBackwardThreads, (kBackwardBlocks<T, kPieces>))
    backward_lowmem(const __grid_constant__ Args p) {
  extern __shared__ __align__(16) uint8_t shared[];
  take_turns();
  if (blockIdx.x < p.owned_blocks) {
    own_documents<T, kPieces, kVectors>(p, blockIdx.x, shared);
  } else {
    gather_winners<T, kPieces, kVectors, false>(p, blockIdx.x - p.owned_blocks, shared);
  }
}

template <class T, int kPieces, bool kVectors>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks<T, kPieces> == 1 ? 1 : 2)
    backward_unified(const __grid_constant__ BackwardArgs p) {
  extern __shared__ __align__(16) uint8_t shared[];
  take_turns();
  gather_winners<T, kPieces, kVectors, true>(p, blockIdx.x, shared);
}

}  // namespace late_interaction
