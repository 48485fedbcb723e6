// Sums of rows and of columns in one pass over the scores.
//
//               256 columns of a block
//             +------------------------+
//   16 rows   | warp 0                 |    a lane has 8 columns: 4, and 4 more 128 columns on
//   16 rows   | warp 1                 |
//             | ...                    |    columns: summed in the lane's registers, then over the warps
//   16 rows   | warp 7                 |    rows: summed over the lanes, 4 rows at a time
//             +------------------------+
//
// A block writes partial sums. A second kernel merges them in the order of tiles, and adds the columns' to
// running sums.
#include <algorithm>

#include "softmax.cuh"

namespace late_interaction {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRowsOfWarp = kTileRows / kWarps;
constexpr int kBatch = 4;          // rows that a warp has in flight
constexpr int kColumnsOfLane = 8;  // in two groups of 4
constexpr int kMergedAhead = 8;
static_assert(kTileColumns == 32 * kColumnsOfLane && kTileColumns == kThreads);

// The lane's column number k, within the tile.
__device__ __forceinline__ int column_of(int lane, int k) { return (k / 4) * 128 + lane * 4 + k % 4; }

// A lane's scores of one row; past the last column, numbers below all scores.
template <bool kVectors>
__device__ __forceinline__ void load_row(float (&x)[kColumnsOfLane], const float* row, int lane,
                                         int columns) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = column_of(lane, 4 * half);
    if (kVectors && first + 4 <= columns) {
      const auto group = *reinterpret_cast<const ScoreGroup<4>*>(row + first);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * half + e] = group.x[e];
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * half + e] = first + e < columns ? row[first + e] : kBelowAll;
    }
  }
}

// Sums of a row over the warp, in every lane.
__device__ __forceinline__ SoftmaxSums sum_row(const float (&x)[kColumnsOfLane], int lane, int columns,
                                               float scale) {
  float maximum = x[0];
#pragma unroll
  for (int k = 1; k < kColumnsOfLane; ++k) maximum = fmaxf(maximum, x[k]);
  SoftmaxSums sums;
  sums.maximum = fmaxf(warp_max(maximum), kBelowAll);  // where all scores are NaN, too
#pragma unroll
  for (int k = 0; k < kColumnsOfLane; ++k) {
    if (column_of(lane, k) < columns) sums.add(x[k], scale);
  }
  sums.weight = warp_sum(sums.weight);
  sums.moment = warp_sum(sums.moment);
  sums.total = warp_sum(sums.total);
  return sums;
}

template <bool kVectors>
__global__ void __launch_bounds__(kThreads, 2) softmax_tile_sums(const __grid_constant__ TileSumsArgs args) {
  __shared__ float4 of_warps[kWarps][kTileColumns];
  const ScoreMatrix& in = args.scores;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_column = blockIdx.x * kTileColumns, columns = min(in.columns - first_column, kTileColumns);
  const int first_row = blockIdx.y * kTileRows + warp * kRowsOfWarp;
  const int rows = min(in.rows - first_row, kRowsOfWarp);
  const float scale = *in.inverse_temperature * kLog2e;

  SoftmaxSums of_columns[kColumnsOfLane];
  for (int batch = 0; batch < rows; batch += kBatch) {
    float x[kBatch][kColumnsOfLane];
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      if (batch + r >= rows) break;
      load_row<kVectors>(x[r], in.data + (first_row + batch + r) * in.stride + first_column, lane, columns);
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      if (batch + r >= rows) break;
      const SoftmaxSums of_row = sum_row(x[r], lane, columns, scale);
      const int row = first_row + batch + r;
      if (lane == 0) args.row_partials[int64_t{blockIdx.x} * in.rows + row] = of_row.packed();
    }
#pragma unroll
    for (int k = 0; k < kColumnsOfLane; ++k) {
      float maximum = of_columns[k].maximum;
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        if (batch + r < rows) maximum = fmaxf(maximum, x[r][k]);
      }
      of_columns[k].move_to(maximum, scale);
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        if (batch + r < rows) of_columns[k].add(x[r][k], scale);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kColumnsOfLane; ++k) of_warps[warp][column_of(lane, k)] = of_columns[k].packed();
  __syncthreads();
  const int column = threadIdx.x;
  if (column >= columns) return;
  SoftmaxSums all = SoftmaxSums::of(of_warps[0][column]);
  for (int w = 1; w < kWarps; ++w) all.merge(SoftmaxSums::of(of_warps[w][column]), scale);
  args.column_partials[int64_t{blockIdx.y} * in.columns + first_column + column] = all.packed();
}

// Merges the partial sums `at` of all tiles into `all`, in the order of tiles.
__device__ __forceinline__ void merge_partials(SoftmaxSums& all, const float4* partials, int tiles, int64_t n,
                                               int64_t at, float scale) {
  for (int first = 0; first < tiles; first += kMergedAhead) {
    float4 ahead[kMergedAhead];
#pragma unroll
    for (int i = 0; i < kMergedAhead; ++i) {
      if (first + i < tiles) ahead[i] = partials[(first + i) * n + at];
    }
#pragma unroll
    for (int i = 0; i < kMergedAhead; ++i) {
      if (first + i < tiles) all.merge(SoftmaxSums::of(ahead[i]), scale);
    }
  }
}

// One thread for each row; the threads behind them take a column each.
__global__ void __launch_bounds__(kThreads)
    merge_tile_sums(const __grid_constant__ TileSumsArgs args, int row_tiles, int column_tiles) {
  const ScoreMatrix& in = args.scores;
  const float scale = *in.inverse_temperature * kLog2e;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x, column = at - in.rows;
  if (at < in.rows) {
    SoftmaxSums all;
    merge_partials(all, args.row_partials, column_tiles, in.rows, at, scale);
    all.store(args.row_sums, in.rows, at);
  } else if (column < in.columns) {
    SoftmaxSums all = SoftmaxSums::load(args.column_sums, in.columns, column);
    merge_partials(all, args.column_partials, row_tiles, in.columns, column, scale);
    all.store(args.column_sums, in.columns, column);
  }
}

}  // namespace

cudaError_t launch_softmax_tile_sums(const TileSumsArgs& args, cudaStream_t stream) {
  const ScoreMatrix& in = args.scores;
  const int row_tiles = (in.rows + kTileRows - 1) / kTileRows;
  const int column_tiles = (in.columns + kTileColumns - 1) / kTileColumns;
  const auto kernel = in.vectors ? softmax_tile_sums<true> : softmax_tile_sums<false>;
  kernel<<<dim3(column_tiles, row_tiles), kThreads, 0, stream>>>(args);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const int64_t entries = int64_t{in.rows} + in.columns;
  merge_tile_sums<<<static_cast<unsigned>((entries + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      args, row_tiles, column_tiles);
  return cudaGetLastError();
}

}  // namespace late_interaction
