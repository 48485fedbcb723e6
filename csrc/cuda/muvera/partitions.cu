// Launches the partitions of tokens.
#include <algorithm>
#include <climits>

#include "../../common/arithmetic.h"
#include "../primitives/element_dispatch.h"
#include "launch.h"
#include "partitions.cuh"

namespace late_interaction {

namespace {

template <class T>
constexpr int kMostWidth = sizeof(T) == 8 ? 5 : 7;  // of more the kernel would spill registers

template <class T, int kWidth>
cudaError_t run(const PartitionArgs<T>& args, cudaStream_t stream) {
  const int64_t tiles = ceil_div(args.rows, kPartitionRows) * args.column_tiles;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, INT_MAX));
  muvera_partitions<T, kWidth><<<grid, kPartitionThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class T>
cudaError_t run(const PartitionArgs<T>& args, cudaStream_t stream) {
  const int64_t width = ceil_div(args.tile_repetitions * args.k_sim, kPartitionColumns);
  if (width <= 2) return run<T, 2>(args, stream);
  if (width <= 4) return run<T, 4>(args, stream);
  if (width <= 5) return run<T, 5>(args, stream);
  return run<T, kMostWidth<T>>(args, stream);
}

}  // namespace

cudaError_t launch_muvera_partitions(const MuveraCall& call, const Device& device, uint16_t* codes,
                                     cudaStream_t stream) {
  const bool packed = call.offsets != nullptr;
  const int64_t rows = packed ? call.packed_tokens : call.sequences * call.length;
  if (rows == 0) return cudaSuccess;
  return with_element(call.dtype, [&]<class T>() {
    // As many repetitions a block as it has columns for, but no fewer blocks than multiprocessors.
    const int64_t most = kMostWidth<T> * kPartitionColumns / call.k_sim;
    const int64_t wanted = ceil_div(device.sm_count, ceil_div(rows, kPartitionRows));
    const int64_t tiles = std::clamp(wanted, ceil_div(call.repetitions, most), call.repetitions);
    const int64_t tile_repetitions = ceil_div(call.repetitions, tiles);
    const TokenView& x = call.tokens;
    const PartitionArgs<T> args{.tokens = static_cast<const T*>(x.data),
                                .item_stride = packed ? 0 : x.item_stride,
                                .token_stride = x.token_stride,
                                .dim_stride = x.dim_stride,
                                .length = packed ? rows : call.length,
                                .rows = rows,
                                .hyperplanes = call.hyperplanes,
                                .columns = round_up(call.repetitions * call.k_sim, kMuveraColumns),
                                .d = static_cast<int32_t>(call.d),
                                .k_sim = static_cast<int32_t>(call.k_sim),
                                .repetitions = call.repetitions,
                                .tile_repetitions = tile_repetitions,
                                .column_tiles = ceil_div(call.repetitions, tile_repetitions),
                                .vectors = call.d % 8 == 0 && readable_in_vectors(x, call.d, sizeof(T), 16),
                                .codes = codes};
    return run(args, stream);
  });
}

}  // namespace late_interaction
