// Launches the backward kernels for one element type. Each of instances/ instantiates it once.
#pragma once

#include <algorithm>

#include "../runtime/launch_config.cuh"
#include "grad_q_tiled.cuh"
#include "kernels.cuh"
#include "launch.h"

namespace late_interaction {

// Calls f.template operator()<row_fragments, vectors>() as planned. Rows that cannot be read in vectors are
// rare, as is fp64: they have one kernel for all lengths.
template <class T, class F>
cudaError_t with_rows(const BackwardPlan& plan, F f) {
  if (!plan.vectors) return f.template operator()<4, false>();
  if constexpr (sizeof(T) < 8) {
    switch (plan.row_fragments) {
      case 1:
        return f.template operator()<1, true>();
      case 2:
        return f.template operator()<2, true>();
      case 4:
        return f.template operator()<4, true>();
    }
  }
  return f.template operator()<kMostFragments, true>();
}

// rows: of grad_Q, that a warp takes together.
inline LaunchShape lowmem_shape(const BackwardArgs& args, const BackwardPlan& plan, int rows = 1) {
  const int64_t gather_blocks = args.grad_Q != nullptr ? (plan.gather_grid + rows - 1) / rows : 0;
  const int smem = args.grad_d_blocks > 0 ? plan.lowmem_smem_bytes : plan.gather_smem_bytes;
  return {args.grad_d_blocks + gather_blocks, kBackwardThreads, smem, plan.pdl};
}

// Weights whose rows are left as sums take the code for norms.
inline RowScales row_scales(const BackwardArgs& args) {
  if (args.d_inverse != nullptr || args.grad_D_sums != nullptr) return RowScales::norms;
  if (args.q_inverse == nullptr) return RowScales::none;
  return args.grad_Q_sums != nullptr ? RowScales::norms : RowScales::weights;
}

template <class T>
cudaError_t BackwardLauncher<T>::lowmem(const BackwardArgs& args, const BackwardPlan& plan,
                                        cudaStream_t stream) {
  const RowScales scales = row_scales(args);
  return with_rows<T>(plan, [&]<int kFragments, bool kVectors>() {
    const auto launch_rows = [&]<RowScales kScales>() {
      if (plan.single_query) {
        const int rows = args.N == 1 ? kUnroll<T, kFragments, kVectors> : 1;
        return launch(backward_single_query<T, kFragments, kVectors, kScales>, lowmem_shape(args, plan, rows),
                      stream, args);
      }
      constexpr RowScales kServing = kScales == RowScales::none ? RowScales::weights : kScales;
      return launch(backward_lowmem<T, kFragments, kVectors, kServing, BackwardArgs>,
                    lowmem_shape(args, plan), stream, args);
    };
    if constexpr (kVectors && sizeof(T) < 8) {  // rare types take the kernel that can normalize
      if constexpr (kFragments == 1) {
        if (scales == RowScales::none) return launch_rows.template operator()<RowScales::none>();
      }
      if (scales != RowScales::norms) return launch_rows.template operator()<RowScales::weights>();
    }
    return launch_rows.template operator()<RowScales::norms>();
  });
}

template <class T>
cudaError_t BackwardLauncher<T>::lowmem(const PairBackwardArgs& args, const BackwardPlan& plan,
                                        cudaStream_t stream) {
  return with_rows<T>(plan, [&]<int kFragments, bool kVectors>() {
    constexpr RowScales kScales = kVectors && sizeof(T) < 8 ? RowScales::weights : RowScales::none;
    return launch(backward_lowmem<T, kFragments, kVectors, kScales, PairBackwardArgs>,
                  lowmem_shape(args, plan), stream, args);
  });
}

template <class T>
cudaError_t BackwardLauncher<T>::grad_q_tiled(const BackwardArgs& args, const TiledGradQPlan& plan,
                                              cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    const LaunchShape shape{plan.grid, kTiledThreads, plan.smem_bytes, plan.pdl};
    const auto kernel = args.q_inverse != nullptr ? late_interaction::grad_q_tiled<T, true>
                                                  : late_interaction::grad_q_tiled<T, false>;
    return launch(kernel, shape, stream, args, plan.slices);
  } else {
    return cudaErrorInvalidValue;  // the planner gives it 2-byte elements alone
  }
}

template <class T>
cudaError_t BackwardLauncher<T>::unified(const BackwardArgs& args, const BackwardPlan& plan,
                                         cudaStream_t stream) {
  return with_rows<T>(plan, [&]<int kFragments, bool kVectors>() {
    const LaunchShape shape{plan.gather_grid, kBackwardThreads, plan.gather_smem_bytes, plan.pdl};
    return launch(backward_unified<T, kFragments, kVectors>, shape, stream, args);
  });
}

}  // namespace late_interaction
