// Weights from sums that are known. A block has kRows whole rows, so that what it reads of a column serves
// them all, and so that half-precision weights may overwrite the scores: that of column j lies where column
// j / 2 was, which the block has read by then.
#include "softmax.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;
constexpr int kRows = 8;

struct RowTerms {
  float maximum, scale, shift, of_label;
  int label;
};

// The terms of kVec neighbouring columns.
template <int kVec>
struct ColumnTerms {
  ScoreGroup<kVec> maximum, scale, factor;
};

template <int kVec>
__device__ __forceinline__ ScoreGroup<kVec> load_terms(const float* terms, int group) {
  ScoreGroup<kVec> found;  // terms of columns begin anywhere
#pragma unroll
  for (int e = 0; e < kVec; ++e) found.x[e] = terms[group * kVec + e];
  return found;
}

// The derivative in one score. A scale of 0 is that of a row or column that is left out, whose scores may be
// NaN.
template <bool kColumns>
__device__ __forceinline__ float weight_of(float score, int column, const RowTerms& row, float maximum,
                                           float scale, float factor, float smoothing, float share,
                                           float exponent) {
  float weight = row.scale == 0.0f ? 0.0f : exp_relative(score - row.maximum, exponent) * row.scale;
  weight -= row.shift;
  if (column == row.label) weight -= row.of_label;
  if constexpr (kColumns) {
    float back = scale == 0.0f ? 0.0f : exp_relative(score - maximum, exponent) * scale;
    back -= factor * share;
    if (column == row.label) back -= factor * (1.0f - smoothing);
    weight += back;
  }
  return weight;
}

template <class Out, int kVec, bool kColumns>
__global__ void __launch_bounds__(kThreads) softmax_weights(const __grid_constant__ WeightsArgs args) {
  __shared__ RowTerms of_rows[kRows];
  const ScoreMatrix& in = args.scores;
  const WeightMatrix& to = args.weights;
  const int thread = threadIdx.x;
  const int first_row = blockIdx.x * kRows, rows = min(in.rows - first_row, kRows);
  const int count = in.columns / kVec, rest = in.columns - count * kVec;
  const float exponent = *in.inverse_temperature * kLog2e;
  const float share = to.smoothing / static_cast<float>(in.columns);
  const float* scores = in.data + first_row * in.stride;
  Out* out = static_cast<Out*>(to.data) + first_row * to.stride;
  const float* column_terms = args.column_terms;

  if (thread < rows) {
    const int row = first_row + thread;
    const float factor = args.row_terms[2 * int64_t{in.rows} + row];
    of_rows[thread] = {.maximum = args.row_terms[row],
                       .scale = args.row_terms[int64_t{in.rows} + row],
                       .shift = factor * share,
                       .of_label = factor * (1.0f - to.smoothing),
                       .label = label_column(to.labels, row, in.columns)};
  }
  // Up to 3 columns are behind the last group.
  const int behind = count * kVec + (rest > 0 ? thread % rest : 0),
            behind_row = rest > 0 ? thread / rest : rows;
  const float last = behind_row < rows ? scores[behind_row * in.stride + behind] : 0.0f;
  __syncthreads();

  for (int first = 0; first < count; first += kThreads) {
    const int at = first + thread;
    ScoreGroup<kVec> x[kRows];
    ColumnTerms<kVec> columns{};
    if (at < count) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < rows) x[r] = reinterpret_cast<const ScoreGroup<kVec>*>(scores + r * in.stride)[at];
      }
      if constexpr (kColumns) {
        columns.maximum = load_terms<kVec>(column_terms, at);
        columns.scale = load_terms<kVec>(column_terms + in.columns, at);
        columns.factor = load_terms<kVec>(column_terms + 2 * int64_t{in.columns}, at);
      }
    }
    __syncthreads();  // all have read up to here, and weights are written below here
    if (at < count) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) break;
        const RowTerms row = of_rows[r];
        float weights[kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          weights[e] =
              weight_of<kColumns>(x[r].x[e], at * kVec + e, row, columns.maximum.x[e], columns.scale.x[e],
                                  columns.factor.x[e], to.smoothing, share, exponent);
        }
        store_weights<Out, kVec>(out + r * to.stride, at, weights);
      }
    }
  }
  if (behind_row < rows) {
    float maximum = 0, scale = 0, factor = 0;
    if constexpr (kColumns) {
      maximum = column_terms[behind];
      scale = column_terms[in.columns + behind];
      factor = column_terms[2 * int64_t{in.columns} + behind];
    }
    out[behind_row * to.stride + behind] = narrow<Out>(weight_of<kColumns>(
        last, behind, of_rows[behind_row], maximum, scale, factor, to.smoothing, share, exponent));
  }
}

template <class Out, int kVec>
cudaError_t launch_weights(const WeightsArgs& args, cudaStream_t stream) {
  const auto kernel =
      args.column_terms != nullptr ? softmax_weights<Out, kVec, true> : softmax_weights<Out, kVec, false>;
  kernel<<<(args.scores.rows + kRows - 1) / kRows, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <int kVec>
cudaError_t launch_weights(const WeightsArgs& args, cudaStream_t stream) {
  switch (args.weights.dtype) {
    case Dtype::bf16:
      return launch_weights<__nv_bfloat16, kVec>(args, stream);
    case Dtype::fp16:
      return launch_weights<__half, kVec>(args, stream);
    case Dtype::fp32:
      return launch_weights<float, kVec>(args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_softmax_weights(const WeightsArgs& args, cudaStream_t stream) {
  return args.scores.vectors ? launch_weights<4>(args, stream) : launch_weights<1>(args, stream);
}

}  // namespace late_interaction
