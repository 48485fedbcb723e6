// A block for each row: its sums, and its weights while the row is still in shared memory.
//
//   pass 1   global memory -> registers -> sums of the thread, and shared memory for the first `held` groups
//   sums     the block's maximum, then its sums relative to it
//   pass 2   shared memory (or, behind `held`, L2) -> weights
//
// Every thread reads back only its own writes to shared memory.
#include <algorithm>
#include <type_traits>

#include "../primitives/element_dispatch.h"
#include "../ptx/before_sm80.cuh"
#include "../runtime/launch_config.cuh"
#include "softmax.cuh"

namespace late_interaction {

namespace {

constexpr int kMostThreads = 512, kLeastThreads = 128;
constexpr int kAhead = 4;                   // groups that a thread has in flight
constexpr int kGroupsOfThread = 8;          // at which a row gets more threads
constexpr int kSharedOfBlock = 110 * 1024;  // two blocks share a multiprocessor: one reads, one writes

// Adds up the sums of all threads, in the order of warps. Every thread has the result.
__device__ SoftmaxSums sum_over_block(SoftmaxSums sums, float scale) {
  constexpr int kMostWarps = kMostThreads / 32;
  __shared__ float maxima[kMostWarps];
  __shared__ float4 partials[kMostWarps];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const float of_warp = warp_max(sums.maximum);
  if (threadIdx.x % 32 == 0) maxima[warp] = of_warp;
  __syncthreads();
  float maximum = maxima[0];
#pragma unroll 1
  for (int w = 1; w < warps; ++w) maximum = fmaxf(maximum, maxima[w]);
  sums.move_to(maximum, scale);
  sums.weight = warp_sum(sums.weight);
  sums.moment = warp_sum(sums.moment);
  sums.total = warp_sum(sums.total);
  if (threadIdx.x % 32 == 0) partials[warp] = sums.packed();
  __syncthreads();
  SoftmaxSums all = SoftmaxSums::of(partials[0]);
#pragma unroll 1
  for (int w = 1; w < warps; ++w) {
    const SoftmaxSums other = SoftmaxSums::of(partials[w]);
    all.weight += other.weight;
    all.moment += other.moment;
    all.total += other.total;
  }
  return all;
}

template <int kVec>
__device__ __forceinline__ void add_group(SoftmaxSums& sums, const ScoreGroup<kVec>& group, float scale) {
  float maximum = sums.maximum;
#pragma unroll
  for (int e = 0; e < kVec; ++e) maximum = fmaxf(maximum, group.x[e]);
  sums.move_to(maximum, scale);
#pragma unroll
  for (int e = 0; e < kVec; ++e) sums.add(group.x[e], scale);
}

// Turns a row's scores into weights.
struct RowWeights {
  float maximum, factor, weight_scale, shift, of_label, scale;
  int label;

  __device__ __forceinline__ RowWeights(const SoftmaxSums& sums, float factor, float smoothing, int columns,
                                        int label, float scale)
      : maximum(sums.maximum),
        factor(factor),
        weight_scale(factor / sums.weight),
        shift(factor * (smoothing / static_cast<float>(columns))),
        of_label(factor * (1.0f - smoothing)),
        scale(scale),
        label(label) {}

  __device__ __forceinline__ float operator()(float score, int column) const {
    float weight = fmaf(exp_relative(score - maximum, scale), weight_scale, -shift);
    if (column == label) weight -= of_label;
    return factor == 0.0f ? 0.0f : weight;
  }
};

template <class Out, int kVec>
__device__ __forceinline__ void write_group(const RowWeights& of, const ScoreGroup<kVec>& group, int at,
                                            Out* out) {
  float weights[kVec];
#pragma unroll
  for (int e = 0; e < kVec; ++e) weights[e] = of(group.x[e], at * kVec + e);
  store_weights<Out, kVec>(out, at, weights);
}

// Out: void without weights.
template <class Out, int kVec>
__global__ void __launch_bounds__(kMostThreads, ptx::kBeforeSm80 ? 2 : 3)
    softmax_rows(const __grid_constant__ RowPassArgs args, int held) {
  constexpr bool kWrites = !std::is_void_v<Out>;
  extern __shared__ float4 shared[];
  const ScoreMatrix& in = args.scores;
  const int row = blockIdx.x, thread = threadIdx.x, threads = blockDim.x;
  const float* scores = in.data + row * in.stride;
  const auto* groups = reinterpret_cast<const ScoreGroup<kVec>*>(scores);
  auto* kept = reinterpret_cast<ScoreGroup<kVec>*>(shared);
  const int count = in.columns / kVec, behind = count * kVec + thread;  // a column behind the last group
  const float scale = *in.inverse_temperature * kLog2e;

  SoftmaxSums sums;
  for (int first = thread; first < count; first += kAhead * threads) {
    ScoreGroup<kVec> ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = first + i * threads;
      if (at < count) ahead[i] = groups[at];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = first + i * threads;
      if (at >= count) break;
      if (kWrites && at < held) kept[at] = ahead[i];
      add_group(sums, ahead[i], scale);
    }
  }
  const ScoreGroup<1> last{behind < in.columns ? scores[behind] : 0.0f};
  if (behind < in.columns) add_group(sums, last, scale);
  const SoftmaxSums all = sum_over_block(sums, scale);
  if (thread == 0) all.store(args.sums, in.rows, row);

  if constexpr (kWrites) {
    const WeightMatrix& to = args.weights;
    const RowWeights of(all, args.factor[row], to.smoothing, in.columns,
                        label_column(to.labels, row, in.columns), scale);
    Out* out = static_cast<Out*>(to.data) + row * to.stride;
    const int end = min(held, count);
    int at = thread;
#pragma unroll 4
    for (; at < end; at += threads) write_group<Out, kVec>(of, kept[at], at, out);
#pragma unroll 4
    for (; at < count; at += threads) write_group<Out, kVec>(of, groups[at], at, out);
    if (behind < in.columns) out[behind] = narrow<Out>(of(last.x[0], behind));
  }
}

template <class Out, int kVec>
cudaError_t launch_rows(const RowPassArgs& args, cudaStream_t stream) {
  const int count = args.scores.columns / kVec;
  int threads = kLeastThreads;
  while (threads < kMostThreads && threads * kGroupsOfThread < count) threads *= 2;
  constexpr int kGroupBytes = sizeof(ScoreGroup<kVec>);
  const int most = std::min(kSharedOfBlock, args.smem_per_block - 4096) / kGroupBytes;
  const int held = std::is_void_v<Out> ? 0 : std::min(count, most);
  return launch(softmax_rows<Out, kVec>, {args.scores.rows, threads, held * kGroupBytes, false}, stream, args,
                held);
}

template <int kVec>
cudaError_t launch_rows(const RowPassArgs& args, cudaStream_t stream) {
  if (args.weights.data == nullptr) return launch_rows<void, kVec>(args, stream);
  return with_narrow_element(args.weights.dtype,
                             [&]<class Out>() { return launch_rows<Out, kVec>(args, stream); });
}

}  // namespace

cudaError_t launch_softmax_rows(const RowPassArgs& args, cudaStream_t stream) {
  return args.scores.vectors ? launch_rows<4>(args, stream) : launch_rows<1>(args, stream);
}

}  // namespace late_interaction
