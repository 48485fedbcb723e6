// The steps before and after the product, a warp a row: the score of the row's label; and from the sums of
// all clusters the row's sums, the weight of the label, and the row of q that multiplies the weights.
#include "../softmax.cuh"
#include "args.h"

namespace late_interaction {

namespace {

constexpr int kRowsOfBlock = 8, kThreads = 32 * kRowsOfBlock;
constexpr int kVec = 8;  // elements of 16 bytes

struct Vec {
  uint4 words;

  __device__ __forceinline__ static Vec load(const __nv_bfloat16* from) {
    return {*reinterpret_cast<const uint4*>(from)};
  }
  __device__ __forceinline__ float2 pair(int i) const {
    const uint32_t word = i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
  }
};

__device__ __forceinline__ int32_t row_of_warp() {
  return static_cast<int32_t>(blockIdx.x * kRowsOfBlock + threadIdx.x / 32);
}

// The base of the first pass: the score of the row's label, or of column 0 without a label.
__global__ void __launch_bounds__(kThreads) softmax_label_scores(const __grid_constant__ ProductRowsArgs p) {
  const int32_t row = row_of_warp();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.overflow = 0;
  if (row >= p.rows) return;
  const int lane = threadIdx.x % 32, label = label_column(p.labels, row, p.columns);
  const __nv_bfloat16* q = p.q + row * p.q_stride;
  const __nv_bfloat16* document = p.documents + max(label, 0) * p.document_stride;
  float sum = 0;
  for (int at = kVec * lane; at < p.d; at += 32 * kVec) {
    const Vec a = Vec::load(q + at), b = Vec::load(document + at);
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const float2 x = a.pair(i), y = b.pair(i);
      sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
    }
  }
  sum = warp_sum(sum);
  if (lane != 0) return;
  p.base[0][row] = sum;
  p.label_scores[row] = __int_as_float(0x7FFFFFFF);  // NaN
}

// The sums of a row over the clusters, in order, and the weight of the label: 0 without one.
struct ProductRowSums {
  float base, label_score, label_weight = 0;
  float others = 0, moment = 0, maximum = kBelowAll;  // of all columns but the label; the maximum of all

  __device__ __forceinline__ ProductRowSums(const ProductRowsArgs& p, int pass, int32_t row, int label)
      : base(p.base[pass][row]), label_score(p.label_scores[row]) {
    const int32_t owners = p.shares.owners(row / p.tile_rows);
#pragma unroll 4
    for (int32_t owner = 0; owner < owners; ++owner) {
      others += p.partial(0, owner)[row];
      moment += p.partial(1, owner)[row];
      maximum = fmaxf(maximum, p.partial(2, owner)[row]);
    }
    if (label < 0) return;
    const float exponent = *p.inverse_temperature * kLog2e, offset = pass == 0 ? kWeightOffset : 0;
    label_weight = ptx::ex2_approx(fmaf(label_score - base, exponent, -offset));
  }
  __device__ __forceinline__ float weight() const { return others + label_weight; }
};

// Writes the operator's results of a row. In the first pass weights are as small as 2^-offset, and the sum
// is relative to the label's. It is rounded once: a quotient of two sums that are nearly equal, each rounded
// already, would round up more often than down.
__device__ __forceinline__ void store_sums(const ProductRowsArgs& p, int pass, int32_t row,
                                           const ProductRowSums& sums) {
  const float moved = sums.label_score - sums.base, factor = p.factor[row];
  float reference = sums.base, weight = sums.weight(), moment = sums.moment;
  if (pass == 0 && sums.label_weight > 0) {
    reference = sums.label_score;
    moment = (moment - moved * sums.others) / sums.label_weight;
    weight = 1 + sums.others / sums.label_weight;
  } else if (pass == 0) {
    const float larger = exp2f(kWeightOffset);
    weight *= larger;
    moment *= larger;
  } else if (sums.label_weight > 0) {
    moment = fmaf(sums.label_weight, moved, moment);
  }
  const float scale = factor == 0 ? 0 : factor / sums.weight();
  const float found[] = {reference, weight, moment, 0, sums.label_score, scale};
#pragma unroll
  for (int i = 0; i < 6; ++i) p.sums[int64_t{i} * p.rows + row] = found[i];
}

// Writes the row of q times factor / sum. Returns whether all of it is finite.
__device__ __forceinline__ bool scale_row(const ProductRowsArgs& p, int32_t row, float scale) {
  bool finite = true;
  for (int at = kVec * (threadIdx.x % 32); at < p.d; at += 32 * kVec) {
    const Vec q = Vec::load(p.q + row * p.q_stride + at);
    uint4 scaled{};
    uint32_t* words[] = {&scaled.x, &scaled.y, &scaled.z, &scaled.w};
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const float2 x = q.pair(i);
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x.x * scale, x.y * scale);
      finite = finite && isfinite(__low2float(pair)) && isfinite(__high2float(pair));
      *words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    ptx::st_global_vec(p.scaled_q + int64_t{row} * p.d + at, scaled);
  }
  return __all_sync(kFullWarp, finite);
}

// A row that is left out: weights of 0, whatever its scores are.
__device__ __forceinline__ void clear_row(const ProductRowsArgs& p, int32_t row) {
  const int lane = threadIdx.x % 32;
  __nv_bfloat16* weights = p.weights + row * p.weight_stride;
  for (int32_t at = kVec * lane; at < p.columns; at += 32 * kVec) {
    if (at + kVec <= p.columns) {
      ptx::st_global_vec(weights + at, uint4{});
    } else {
      for (int32_t i = at; i < p.columns; ++i) weights[i] = __ushort_as_bfloat16(0);
    }
  }
  if (p.scaled_q == nullptr) return;
  for (int at = kVec * lane; at < p.d; at += 32 * kVec)
    ptx::st_global_vec(p.scaled_q + int64_t{row} * p.d + at, uint4{});
}

__global__ void __launch_bounds__(kThreads)
    softmax_finish_rows(const __grid_constant__ ProductRowsArgs p, int pass) {
  if (pass > 0 && *p.overflow == 0) return;
  const int32_t row = row_of_warp();
  if (row >= p.rows) return;
  const int lane = threadIdx.x % 32, label = label_column(p.labels, row, p.columns);
  const ProductRowSums sums(p, pass, row, label);
  const float factor = p.factor[row], weight = sums.weight();
  if (lane == 0) {
    store_sums(p, pass, row, sums);
    if (pass == 0) p.base[1][row] = sums.maximum;
  }
  if (factor == 0) {
    clear_row(p, row);
    return;
  }
  bool good = weight >= exp2f(kLeastSum) && weight <= exp2f(kMostSum);
  if (p.scaled_q != nullptr) good = scale_row(p, row, factor / weight) && good;
  if (lane != 0) return;
  // The label's weight less the sum.
  if (label >= 0) p.weights[row * p.weight_stride + label] = __float2bfloat16_rn(-sums.others);
  if (pass == 0 && !good) *p.overflow = 1;
}

unsigned blocks_of(const ProductRowsArgs& args) {
  return static_cast<unsigned>((args.rows + kRowsOfBlock - 1) / kRowsOfBlock);
}

}  // namespace

cudaError_t launch_label_scores(const ProductRowsArgs& args, cudaStream_t stream) {
  softmax_label_scores<<<blocks_of(args), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_finish_rows(const ProductRowsArgs& args, int pass, cudaStream_t stream) {
  softmax_finish_rows<<<blocks_of(args), kThreads, 0, stream>>>(args, pass);
  return cudaGetLastError();
}

}  // namespace late_interaction
