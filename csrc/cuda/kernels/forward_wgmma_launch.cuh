// Launches the wgmma forwards for one element type. csrc/cuda/forward_wgmma_*.cu instantiate it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../forward.h"
#include "forward_wgmma_documents.cuh"
#include "forward_wgmma_rows.cuh"

namespace late_interaction {

template <class Kernel>
cudaError_t launch_persistent(Kernel kernel, int threads, const ForwardArgs& args, const TensorMaps& maps,
                              const ForwardPlan& plan, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(plan.grid), threads, plan.smem_bytes, stream>>>(args, maps);
  return cudaGetLastError();
}

template <class Type, class Element, int kColumns, int kChunks, bool kMasked, bool kScaled>
cudaError_t launch_rows_tile(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                             cudaStream_t stream) {
  if constexpr (kColumns > widest_tile(kMasked, kScaled)) {
    return cudaErrorInvalidValue;
  } else {
    const auto launch = [&]<bool kWinners>() {
      using Tile = WgmmaRowsTile<Type, Element, kColumns, kChunks, kWinners, kMasked, kScaled>;
      return launch_persistent(maxsim_forward_wgmma_rows<Tile>, Tile::kThreads, args, maps, plan, stream);
    };
    return args.winners != nullptr ? launch.template operator()<true>() : launch.template operator()<false>();
  }
}

template <class Type, class Element, int kChunks>
cudaError_t launch_rows(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                        cudaStream_t stream) {
  const auto launch = [&]<int kColumns>() {
    const auto kind = [&]<bool kMasked>() {
      return plan.scaled
                 ? launch_rows_tile<Type, Element, kColumns, kChunks, kMasked, true>(args, maps, plan, stream)
                 : launch_rows_tile<Type, Element, kColumns, kChunks, kMasked, false>(args, maps, plan,
                                                                                      stream);
    };
    return plan.masked ? kind.template operator()<true>() : kind.template operator()<false>();
  };
  switch (plan.columns) {
    case 80:
      return launch.template operator()<80>();
    case 104:
      return launch.template operator()<104>();
    case 128:
      return launch.template operator()<128>();
    case 152:
      return launch.template operator()<152>();
    case 176:
      return launch.template operator()<176>();
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Type, class Element, int kColumns>
cudaError_t launch_documents_tile(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                  cudaStream_t stream) {
  using Tile = WgmmaDocumentsTile<Type, Element, kColumns>;
  return args.winners != nullptr ? launch_persistent(maxsim_forward_wgmma_documents<Tile, true>,
                                                     Tile::kThreads, args, maps, plan, stream)
                                 : launch_persistent(maxsim_forward_wgmma_documents<Tile, false>,
                                                     Tile::kThreads, args, maps, plan, stream);
}

template <class Type, class Element>
cudaError_t launch_documents(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                             cudaStream_t stream) {
  switch (plan.columns) {
    case 32:
      return launch_documents_tile<Type, Element, 32>(args, maps, plan, stream);
    case 64:
      return launch_documents_tile<Type, Element, 64>(args, maps, plan, stream);
    case 96:
      return launch_documents_tile<Type, Element, 96>(args, maps, plan, stream);
    case 128:
      return launch_documents_tile<Type, Element, 128>(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace late_interaction
