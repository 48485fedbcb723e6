// Launches the wgmma forwards with query rows on the M side, sm90_q and sm90_q_longd, for one element type.
// instances/ of both instantiate it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../launch.h"
#include "../sm90_q_longd/kernel.cuh"
#include "kernel.cuh"

namespace late_interaction {

// Scores of quantized tokens have no gradients: nobody asks for their winners.
template <class Element>
inline constexpr bool kMayWantWinners = sizeof(Element) > 1;

// launch.operator()<kColumns>() for the plan's width, one of those that the type has.
template <class Type, class Launch>
cudaError_t choose_columns(const ForwardPlan& plan, Launch launch) {
  static constexpr auto kWidths = [] {
    if constexpr (std::is_same_v<Type, ptx::WgmmaInt8>) {
      return kInt8TileWidths;
    } else {
      return kTileWidths;
    }
  }();
  cudaError_t error = cudaErrorInvalidValue;
  [&]<size_t... kAt>(std::index_sequence<kAt...>) {
    ((plan.columns == kWidths[kAt] && (error = launch.template operator()<kWidths[kAt]>(), true)) || ...);
  }(std::make_index_sequence<kWidths.size()>{});
  return error;
}

// Launches a kernel that calls pdl_wait: its blocks may start while the kernel before it ends.
template <class Kernel, class Args>
cudaError_t launch_pdl(Kernel kernel, int threads, const Args& args, const TensorMaps& maps,
                       const ForwardPlan& plan, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute pdl;
  pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.grid));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = plan.smem_bytes;
  config.stream = stream;
  config.attrs = &pdl;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args, maps);
}

template <class Type, class Element, int kColumns, int kKChunks, bool kMasked, bool kScaled>
cudaError_t launch_rows_tile(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                             cudaStream_t stream) {
  if constexpr (kColumns > widest_tile(kMasked, kScaled)) {
    return cudaErrorInvalidValue;
  } else {
    const auto launch_tile = [&]<bool kWinners, bool kDocRanges>() {
      using Tile = Sm90QTile<Type, Element, kColumns, kKChunks, kWinners, kMasked, kScaled, kDocRanges>;
      static_assert(Sm90QShared<Tile>::kKept <= kRowsKept);
      return launch_pdl(maxsim_forward_sm90_q<Tile>, Tile::kThreads, args, maps, plan, stream);
    };
    const auto launch = [&]<bool kWinners>() {
      if constexpr (has_tails(sizeof(Element), kMasked, kScaled)) {
        if (args.doc_ranges != nullptr) return launch_tile.template operator()<kWinners, true>();
      }
      return launch_tile.template operator()<kWinners, false>();
    };
    if constexpr (kMayWantWinners<Element>) {
      if (args.winners != nullptr) return launch.template operator()<true>();
    }
    return launch.template operator()<false>();
  }
}

template <class Type, class Element, int kKChunks>
cudaError_t launch_rows(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                        cudaStream_t stream) {
  const auto launch = [&]<int kColumns>() {
    const auto kind = [&]<bool kMasked>() {
      return plan.scaled ? launch_rows_tile<Type, Element, kColumns, kKChunks, kMasked, true>(args, maps,
                                                                                              plan, stream)
                         : launch_rows_tile<Type, Element, kColumns, kKChunks, kMasked, false>(args, maps,
                                                                                               plan, stream);
    };
    return plan.masked ? kind.template operator()<true>() : kind.template operator()<false>();
  };
  return choose_columns<Type>(plan, launch);
}

// Blocks in clusters of plan.cluster.
template <class Kernel>
cudaError_t launch_clusters(Kernel kernel, int threads, const ForwardArgs& args, const TensorMaps& maps,
                            const ForwardPlan& plan, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(plan.smem_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args, maps);
}

// launch.operator()<kColumns, kWinners, kMaskedOrScaled>() as planned.
template <class Type, class Element, class Launch>
cudaError_t choose_split(const ForwardArgs& args, const ForwardPlan& plan, Launch launch) {
  return choose_columns<Type>(plan, [&]<int kColumns>() {
    if constexpr (kColumns > kWidestSplitTile) {
      return cudaErrorInvalidValue;
    } else {
      const bool masked_or_scaled = plan.masked || plan.scaled;
      if constexpr (kMayWantWinners<Element>) {
        if (args.winners != nullptr) {
          return masked_or_scaled ? launch.template operator()<kColumns, true, true>()
                                  : launch.template operator()<kColumns, true, false>();
        }
      }
      return masked_or_scaled ? launch.template operator()<kColumns, false, true>()
                              : launch.template operator()<kColumns, false, false>();
    }
  });
}

template <class Type, class Element>
cudaError_t launch_split(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                         cudaStream_t stream) {
  return choose_split<Type, Element>(args, plan, [&]<int kColumns, bool kWinners, bool kMaskedOrScaled>() {
    using Tile = Sm90QLongDTile<Type, Element, kColumns, kWinners, kMaskedOrScaled>;
    return launch_clusters(maxsim_forward_sm90_q_longd<Tile>, Tile::kThreads, args, maps, plan, stream);
  });
}

}  // namespace late_interaction
