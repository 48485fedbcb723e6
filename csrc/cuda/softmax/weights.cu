// Weights from known sums. A block has kRows rows of a strip of columns, so that a column's terms serve
// several rows.
#include "../primitives/element_dispatch.h"
#include "softmax.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;
constexpr int kRows = kWeightRows;

struct RowTerms {
  float maximum, scale, shift, of_label;
  int label;
};

// Terms of kVec neighbouring columns.
template <int kVec>
struct ColumnTerms {
  float maximum[kVec], scale[kVec], shift[kVec], of_label[kVec];
};

// Computes the derivatives of one row in kVec scores from column `first` on. A row or column whose scale is 0
// is left out; its scores may be NaN.
template <int kVec, bool kColumns>
__device__ __forceinline__ void weigh(float (&weights)[kVec], const ScoreGroup<kVec>& scores, int first,
                                      const RowTerms& row, const ColumnTerms<kVec>& columns, float exponent) {
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    const float score = scores.x[e];
    float weight = row.scale == 0.0f ? 0.0f : exp_relative(score - row.maximum, exponent) * row.scale;
    weight -= row.shift;
    if constexpr (kColumns) {
      const float scale = columns.scale[e];
      weight += scale == 0.0f ? 0.0f : exp_relative(score - columns.maximum[e], exponent) * scale;
      weight -= columns.shift[e];
    }
    if (first + e == row.label) weight -= kColumns ? row.of_label + columns.of_label[e] : row.of_label;
    weights[e] = weight;
  }
}

template <class Out, int kVec, bool kColumns>
__global__ void __launch_bounds__(kThreads) softmax_weights(const __grid_constant__ WeightsArgs args) {
  __shared__ RowTerms of_rows[kRows];
  const ScoreMatrix& in = args.scores;
  const WeightMatrix& to = args.weights;
  const int64_t first_row = int64_t{blockIdx.y} * kRows;
  const int rows = static_cast<int>(min(in.rows - first_row, int64_t{kRows}));
  const float exponent = *in.inverse_temperature * kLog2e;
  const float share = to.smoothing / static_cast<float>(in.columns);

  if (threadIdx.x < rows) {
    const int row = static_cast<int>(first_row) + threadIdx.x;
    const float factor = args.row_terms[2 * int64_t{in.rows} + row];
    of_rows[threadIdx.x] = {.maximum = args.row_terms[row],
                            .scale = args.row_terms[int64_t{in.rows} + row],
                            .shift = factor * share,
                            .of_label = factor * (1.0f - to.smoothing),
                            .label = label_column(to.labels, row, in.columns)};
  }
  __syncthreads();
  // The last columns may be no whole group: behind the groups, a thread takes one column.
  const int count = in.columns / kVec, at = blockIdx.x * kThreads + threadIdx.x;
  const int behind = count * kVec + (at - count);
  if (at >= count && behind >= in.columns) return;

  const auto write = [&]<int kCount>() {
    const int first = kCount == kVec && at < count ? at * kVec : behind;
    ScoreGroup<kCount> x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < rows) {
        x[r] = *reinterpret_cast<const ScoreGroup<kCount>*>(in.data + (first_row + r) * in.stride + first);
      }
    }
    ColumnTerms<kCount> columns{};
    if constexpr (kColumns) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const float* terms = args.column_terms + first + e;
        const float factor = terms[2 * int64_t{in.columns}];
        columns.maximum[e] = terms[0];
        columns.scale[e] = terms[in.columns];
        columns.shift[e] = factor * share;
        columns.of_label[e] = factor * (1.0f - to.smoothing);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      float weights[kCount];
      weigh<kCount, kColumns>(weights, x[r], first, of_rows[r], columns, exponent);
      store_weights<Out, kCount>(static_cast<Out*>(to.data) + (first_row + r) * to.stride + first, 0,
                                 weights);
    }
  };
  if (at < count) {
    write.template operator()<kVec>();
  } else {
    write.template operator()<1>();
  }
}

template <class Out, int kVec>
cudaError_t launch_weights(const WeightsArgs& args, cudaStream_t stream) {
  const auto kernel =
      args.column_terms != nullptr ? softmax_weights<Out, kVec, true> : softmax_weights<Out, kVec, false>;
  const int threads = args.scores.columns / kVec + args.scores.columns % kVec;
  const dim3 grid((threads + kThreads - 1) / kThreads, (args.scores.rows + kRows - 1) / kRows);
  kernel<<<grid, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <int kVec>
cudaError_t launch_weights(const WeightsArgs& args, cudaStream_t stream) {
  return with_narrow_element(args.weights.dtype,
                             [&]<class Out>() { return launch_weights<Out, kVec>(args, stream); });
}

}  // namespace

cudaError_t launch_softmax_weights(const WeightsArgs& args, cudaStream_t stream) {
  return args.scores.vectors ? launch_weights<4>(args, stream) : launch_weights<1>(args, stream);
}

}  // namespace late_interaction
