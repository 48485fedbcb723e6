// Launches the backward kernels for one element type. Each of instances/ instantiates it once.
#pragma once

#include <algorithm>

#include "../runtime/launch_config.cuh"
#include "kernels.cuh"
#include "launcher.h"
#include "norm_rows.cuh"

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

inline RowsView rows_of(const BackwardArgs& p, bool documents) {
  if (!documents) return {p.Q, p.Nq, p.Lq, int64_t{p.Nq} * p.Lq};
  const int64_t count = p.layout == Layout::in_batch ? p.N : p.Nq * p.N;
  return {p.D, p.N, p.Ld, count * p.Ld};
}

inline unsigned rows_grid(int64_t rows) {
  return static_cast<unsigned>(std::min<int64_t>((rows + 7) / 8, 65536));
}

// rows: of grad_Q, that a warp takes together.
inline LaunchShape lowmem_shape(const BackwardArgs& args, const BackwardPlan& plan, int rows = 1) {
  const int64_t gather_blocks = args.grad_Q != nullptr ? (plan.gather_grid + rows - 1) / rows : 0;
  const int smem = args.grad_d_blocks > 0 ? plan.lowmem_smem_bytes : plan.gather_smem_bytes;
  return {args.grad_d_blocks + gather_blocks, kBackwardThreads, smem, plan.pdl};
}

template <class T>
cudaError_t BackwardLauncher<T>::lowmem(const BackwardArgs& args, const BackwardPlan& plan,
                                        cudaStream_t stream) {
  const bool normalized =
      args.q_inverse != nullptr || args.d_inverse != nullptr || args.grad_D_sums != nullptr;
  return with_rows<T>(plan, [&]<int kFragments, bool kVectors>() {
    const auto launch_rows = [&]<bool kNormalized>() {
      if (plan.single_query) {
        const int rows = args.N == 1 ? kUnroll<T, kFragments, kVectors> : 1;
        return launch(backward_single_query<T, kFragments, kVectors, kNormalized>,
                      lowmem_shape(args, plan, rows), stream, args);
      }
      return launch(backward_lowmem<T, kFragments, kVectors, kNormalized, BackwardArgs>,
                    lowmem_shape(args, plan), stream, args);
    };
    if constexpr (kVectors && sizeof(T) < 8) {  // what is rare takes the one that can normalize
      if (!normalized) return launch_rows.template operator()<false>();
    }
    return launch_rows.template operator()<true>();
  });
}

template <class T>
cudaError_t BackwardLauncher<T>::lowmem_pairs(const PairBackwardArgs& args, const BackwardPlan& plan,
                                              cudaStream_t stream) {
  return with_rows<T>(plan, [&]<int kFragments, bool kVectors>() {
    return launch(backward_lowmem<T, kFragments, kVectors, false, PairBackwardArgs>, lowmem_shape(args, plan),
                  stream, args);
  });
}

template <class T>
cudaError_t BackwardLauncher<T>::unified(const BackwardArgs& args, const BackwardPlan& plan,
                                         cudaStream_t stream) {
  return with_rows<T>(plan, [&]<int kFragments, bool kVectors>() {
    const LaunchShape shape{plan.gather_grid, kBackwardThreads, plan.gather_smem_bytes, plan.pdl};
    return launch(backward_unified<T, kFragments, kVectors>, shape, stream, args);
  });
}

// Whether every row starts on 16 bytes and is a whole number of them long.
template <class T>
bool in_vectors_of_16(const TokenView& view, int d) {
  constexpr int64_t kVec = 16 / sizeof(T);
  return view.dim_stride == 1 && d % kVec == 0 && view.token_stride % kVec == 0 &&
         view.item_stride % kVec == 0 && view.query_stride % kVec == 0 &&
         reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

template <class T>
cudaError_t BackwardLauncher<T>::norms(const BackwardArgs& args, bool documents, void* inverse,
                                       cudaStream_t stream) {
  const RowsView view = rows_of(args, documents);
  const auto kernel =
      in_vectors_of_16<T>(view.view, args.d) ? inverse_norms<T, true> : inverse_norms<T, false>;
  constexpr int64_t kRows = kRowsThreads / kNormLanes;  // of a block
  const int64_t grid = std::min<int64_t>((view.rows + kRows - 1) / kRows, 8192);
  kernel<<<static_cast<unsigned>(grid), kRowsThreads, 0, stream>>>(view, view.place(grid * kRows), args.d,
                                                                   static_cast<Sum<T>*>(inverse));
  return cudaGetLastError();
}

template <class T>
cudaError_t BackwardLauncher<T>::finish(const BackwardArgs& args, bool documents, cudaStream_t stream) {
  const RowsView view = rows_of(args, documents);
  finish_rows<T><<<rows_grid(view.rows), kRowsThreads, 0, stream>>>(
      view, args.d, static_cast<const Sum<T>*>(documents ? args.grad_D_sums : args.grad_Q_sums),
      static_cast<const Sum<T>*>(documents ? args.d_inverse : args.q_inverse),
      documents && args.normalized_documents, static_cast<T*>(documents ? args.grad_D : args.grad_Q));
  return cudaGetLastError();
}

}  // namespace late_interaction
