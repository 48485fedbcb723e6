// Plans and launches the weights of a matrix product.
#include <algorithm>

#include "../../../common/arithmetic.h"
#include "../../runtime/device.h"
#include "../../runtime/launch_config.cuh"
#include "../../runtime/tma_descriptors.h"
#include "kernel.cuh"

namespace late_interaction {

namespace {

using StreamedTile = ProductTile<0>;
constexpr int kMostHeldChunks = 8;
constexpr int64_t kKChunk = StreamedTile::kKChunk, kMaxDims = 4096;
constexpr int kSmemBytes = std::max(StreamedTile::kSmemBytes, ProductTile<kMostHeldChunks>::kSmemBytes);

template <class Tile>
cudaError_t launch_tile(const ProductRowsArgs& args, int pass, cudaStream_t stream) {
  ProductTensorMaps maps{};
  maps.documents = make_row_map(args.documents, Compute::bf16, args.columns, args.d, args.document_stride,
                                Tile::kBoxColumns);
  if (!Tile::kHeld)
    maps.q = make_row_map(args.q, Compute::bf16, args.rows, args.d, args.q_stride, Tile::kConsumerRows);
  const LaunchShape shape{Tile::kCluster * args.shares.clusters, Tile::kThreads, Tile::kSmemBytes, false,
                          Tile::kCluster};
  return launch(softmax_product_weights<Tile>, shape, stream, args, maps, pass);
}

}  // namespace

bool can_product_rows(const Device& device, int64_t d) {
  return device.wgmma && device.smem_per_block >= kSmemBytes && d <= kMaxDims;
}

ProductRowsPlan plan_product_rows(const Device& device, int32_t rows, int32_t columns, int64_t d) {
  ProductRowsPlan plan{};
  plan.tile_rows = d <= kMostHeldChunks * kKChunk ? ProductTile<kMostHeldChunks>::kRows : StreamedTile::kRows;
  const auto row_tiles = static_cast<int32_t>(ceil_div(rows, plan.tile_rows));
  const auto column_tiles = static_cast<int32_t>(ceil_div(columns, kProductColumns));
  const int64_t tiles = int64_t{row_tiles} * column_tiles;
  const auto clusters = static_cast<int32_t>(std::min<int64_t>(tiles, std::max(1, device.sm_count / 2)));
  plan.shares = {row_tiles, column_tiles, clusters};
  const int64_t least_share = tiles / clusters;
  plan.most_owners =
      static_cast<int32_t>(std::min<int64_t>(ceil_div(column_tiles, least_share) + 1, clusters));
  return plan;
}

cudaError_t launch_product_weights(const ProductRowsArgs& args, int pass, cudaStream_t stream) {
  switch (ceil_div(args.d, 2 * kKChunk)) {
    case 1:
      return launch_tile<ProductTile<2>>(args, pass, stream);
    case 2:
      return launch_tile<ProductTile<4>>(args, pass, stream);
    case 3:
      return launch_tile<ProductTile<6>>(args, pass, stream);
    case 4:
      return launch_tile<ProductTile<kMostHeldChunks>>(args, pass, stream);
    default:
      return launch_tile<StreamedTile>(args, pass, stream);
  }
}

cudaError_t launch_product_rows(const ProductRowsArgs& args, cudaStream_t stream) {
  if (const cudaError_t error = launch_label_scores(args, stream); error != cudaSuccess) return error;
  for (int pass = 0; pass < 2; ++pass) {
    cudaError_t error = launch_product_weights(args, pass, stream);
    if (error == cudaSuccess) error = launch_finish_rows(args, pass, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace late_interaction
