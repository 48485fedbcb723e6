// Blocks of MUVERA's encodings: for each repetition the sums of the tokens of each partition, projected. The
// steps, and the order of every sum, are those of csrc/cpu/muvera.cpp:
//
//   block    some jobs of one sequence. It copies the sequence's tokens to shared memory if they fit, up to
//            stage_dims dims at a time; else warps read global memory
//   warp     job after job: 32 partitions of a repetition, one a lane
//     count    tokens of each partition and the first of them: six ballots for 32 tokens
//     nearest  of empty partitions, by exchanges between lanes
//     list     of a segment of tokens: those of partition 0, then of partition 1, ...
//     sum      partition by partition, two dims a lane: a list's rows are read one after another
//     project  sums from shared memory; a lane has four columns of some partitions in registers
//
// Tokens are summed before they are projected, so a repetition takes as many products as it has partitions,
// not tokens. Sums of later dims are added to the products that the output holds already.
#pragma once

#include <cstdint>

#include "../../common/problem.h"
#include "../primitives/argmax.cuh"
#include "../primitives/element.cuh"
#include "../primitives/prefix_sum.cuh"

namespace late_interaction {

inline constexpr int kJobPartitions = 32;
inline constexpr int kSumDims = 64;             // that a warp sums at a time
inline constexpr int kSumPitch = kSumDims + 4;  // lanes that read one column of four dims each meet all banks
inline constexpr int kListTokens = 512;
inline constexpr int kListed = 4;  // tokens that are added at a time: lists begin at multiples of it
inline constexpr int kMostStageDims = 128;
inline constexpr int kMostBlockWarps = 16;  // their 128 registers a thread are all of a multiprocessor's
inline constexpr int kLaneRows = 8;         // neighbouring partitions are of so many lanes
inline constexpr uint64_t kFurther = uint64_t{1} << 32;  // a step of Hamming distance, above every token
inline constexpr uint64_t kNoToken = uint64_t{1} << 62;

template <class T>
struct BlockArgs {
  const T* tokens;
  int64_t item_stride, token_stride, dim_stride;
  MaskView mask;
  const int32_t* offsets;  // or null: each sequence has `length` tokens
  int64_t length, rows;    // rows of all sequences
  int64_t first, count;    // sequences
  int32_t d, k_sim;
  int32_t jobs, chunks;     // jobs of a sequence, and of each repetition
  int64_t groups;           // of jobs, a block each
  const uint16_t* codes;    // [repetitions, rows], or null: all are 0
  const float* projection;  // [repetitions, d, columns] at a multiple of 16 bytes, or null
  int32_t d_proj, columns;
  bool average, fill_empty;
  float scale;
  bool vectors;  // four elements of a row can be read at once
  int32_t stage_dims, stage_bytes;
  float* out;           // [count, dims]
  int32_t* not_finite;  // [count] or null
  int64_t dims;
};

struct WarpSmem {
  alignas(16) float sums[kJobPartitions * kSumPitch];
  unsigned long long nearest[kJobPartitions];
  alignas(8) uint16_t list[kListTokens + kJobPartitions * (kListed - 1)];
};

template <class T>
struct Sequence {
  const T* tokens;
  const uint8_t* mask;  // or null
  const uint16_t* codes;
  int32_t length;
  float* out;

  __device__ __forceinline__ Sequence(const BlockArgs<T>& args, int64_t index) {
    const int64_t item = args.first + index;
    int64_t row = item * args.length;
    length = static_cast<int32_t>(args.length);
    tokens = args.tokens + item * args.item_stride;
    if (args.offsets != nullptr) {  // clamped, so that nobody reads outside of the tokens
      row = min(max(int64_t{args.offsets[item]}, int64_t{0}), args.rows);
      const int64_t end = min(max(int64_t{args.offsets[item + 1]}, row), args.rows);
      length = static_cast<int32_t>(end - row);
      tokens = args.tokens + row * args.token_stride;
    }
    mask = args.mask.data == nullptr ? nullptr : args.mask.data + item * args.mask.item_stride;
    codes = args.codes == nullptr ? nullptr : args.codes + row;
    out = args.out + index * args.dims;
  }

  __device__ __forceinline__ bool kept(const BlockArgs<T>& args, int32_t token) const {
    return mask == nullptr || mask[token * args.mask.token_stride] != 0;
  }
};

// ---- tokens ----

// Two dims of a token, counted from the first dim of the stage, from shared memory, ...
template <class S>
struct StagedRows {
  const S* tokens;
  int32_t pitch;  // a multiple of 4; zeros past the dims

  __device__ __forceinline__ float2 pair(int32_t token, int32_t dim) const {
    return widen(*reinterpret_cast<const PairOf<S>*>(tokens + token * pitch + dim));
  }
};

// ... or from global memory.
template <class T>
struct GlobalRows {
  const T* tokens;
  int64_t token_stride, dim_stride;
  int32_t width;

  __device__ __forceinline__ float2 pair(int32_t token, int32_t dim) const {
    const T* from = tokens + token * token_stride + dim * dim_stride;
    const float second = dim + 1 < width ? static_cast<float>(widen(from[dim_stride])) : 0.0f;
    return {static_cast<float>(widen(from[0])), second};
  }
};

template <class T>
struct alignas(sizeof(T) == 8 ? 8 : 4 * sizeof(T)) FourElements {
  T element[4];
};

// A lane's four dims of a token; zeros past the stage's dims, and of no token.
template <class T>
__device__ __forceinline__ FourElements<T> load_four(const BlockArgs<T>& args, const Sequence<T>& sequence,
                                                     int32_t token, int32_t first, int32_t width) {
  const int32_t dim = threadIdx.x % 32 * 4;
  FourElements<T> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.element[i] = narrow<T>(0);
  if (token >= sequence.length || dim >= width || !sequence.kept(args, token)) return four;
  const T* from = sequence.tokens + token * args.token_stride + (first + dim) * args.dim_stride;
  if (args.vectors) return *reinterpret_cast<const FourElements<T>*>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (dim + i < width) four.element[i] = from[i * args.dim_stride];
  }
  return four;
}

// Copies a stage's dims to shared memory, unless `to` is null. Returns whether one of this thread's elements
// is not finite as float32.
template <class T>
__device__ __forceinline__ bool stage_tokens(const BlockArgs<T>& args, const Sequence<T>& sequence,
                                             int32_t first, int32_t width, int32_t pitch, Staged<T>* to) {
  constexpr int kRowsInFlight = 4;
  const int32_t warps = blockDim.x / 32, dim = threadIdx.x % 32 * 4;
  bool not_finite = false;
  for (int32_t token = threadIdx.x / 32; token < sequence.length; token += kRowsInFlight * warps) {
    FourElements<T> rows[kRowsInFlight];
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      rows[r] = load_four(args, sequence, token + r * warps, first, width);
    }
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      FourElements<Staged<T>> four;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto x = static_cast<float>(widen(rows[r].element[i]));
        not_finite |= (__float_as_uint(x) & 0x7F800000u) == 0x7F800000u;
        four.element[i] = narrow<Staged<T>>(x);
      }
      const int32_t at = token + r * warps;
      if (to != nullptr && at < sequence.length && dim < pitch) {
        *reinterpret_cast<FourElements<Staged<T>>*>(to + at * pitch + dim) = four;
      }
    }
  }
  return not_finite;
}

// ---- a job's tokens, by partition ----

struct Job {
  int32_t repetition;
  uint32_t chunk;
  int32_t partitions;
  int64_t offset;  // of its numbers in an encoding
};

template <class T>
__device__ __forceinline__ int64_t offset_of_job(const BlockArgs<T>& args, int32_t job) {
  const int64_t d_block = args.projection != nullptr ? args.d_proj : args.d;
  const int64_t partitions = int64_t{job / args.chunks} << args.k_sim;
  return (partitions + job % args.chunks * kJobPartitions) * d_block;
}

template <class T>
__device__ __forceinline__ Job job_at(const BlockArgs<T>& args, int32_t index) {
  return {index / args.chunks, static_cast<uint32_t>(index % args.chunks),
          min(kJobPartitions, 1 << args.k_sim), offset_of_job(args, index)};
}

// 32 tokens, one a lane, and which of them belong to the lane's partition.
struct TokenBatch {
  uint32_t lane_tokens;  // of the partition of this lane
  uint32_t low;          // partition of the lane's token within the job
  bool counts;           // the lane's token is one of the job

  template <class T>
  __device__ __forceinline__ TokenBatch(const BlockArgs<T>& args, const Sequence<T>& sequence, const Job& job,
                                        int32_t first, int32_t end) {
    const uint32_t lane = threadIdx.x % 32;
    const int32_t token = first + static_cast<int32_t>(lane);
    const bool kept = token < end && sequence.kept(args, token);
    const uint32_t code =
        kept && sequence.codes != nullptr ? sequence.codes[job.repetition * args.rows + token] : 0;
    low = code % kJobPartitions;
    counts = kept && code / kJobPartitions == job.chunk;
    lane_tokens = __ballot_sync(kFullWarp, counts);
#pragma unroll
    for (int bit = 0; bit < 5; ++bit) {
      const uint32_t set = __ballot_sync(kFullWarp, (low >> bit & 1) != 0);
      lane_tokens &= (lane >> bit & 1) != 0 ? set : ~set;
    }
  }
};

struct PartitionCount {
  int32_t tokens = 0;  // of this lane's partition
  int32_t first = -1;  // the lowest
};

template <class T>
__device__ __forceinline__ PartitionCount count_tokens(const BlockArgs<T>& args, const Sequence<T>& sequence,
                                                       const Job& job, int32_t begin, int32_t end) {
  PartitionCount count;
  for (int32_t at = begin; at < end; at += 32) {
    const TokenBatch batch(args, sequence, job, at, end);
    if (count.first < 0 && batch.lane_tokens != 0) count.first = at + __ffs(batch.lane_tokens) - 1;
    count.tokens += __popc(batch.lane_tokens);
  }
  return count;
}

// The token that an empty partition of this lane takes, or -1: there is none. A partition's key is the least
// (distance, token); partitions that differ in a bit exchange keys, with the distance increased by one.
template <class T>
__device__ __forceinline__ int32_t find_nearest(const BlockArgs<T>& args, const Sequence<T>& sequence,
                                                const Job& job, const PartitionCount& count, WarpSmem& smem) {
  const int lane = threadIdx.x % 32;
  if (!__any_sync(kFullWarp, lane < job.partitions && count.tokens == 0)) return -1;
  unsigned long long key = count.tokens > 0 ? static_cast<unsigned long long>(count.first) : kNoToken;
  if (args.chunks > 1) {  // tokens of other jobs may be nearer: first by the upper bits
    smem.nearest[lane] = kNoToken;
    __syncwarp();
    for (int32_t token = lane; token < sequence.length; token += 32) {
      if (!sequence.kept(args, token)) continue;
      const uint32_t code = sequence.codes[job.repetition * args.rows + token];
      const int distance = __popc(code / kJobPartitions ^ job.chunk);
      atomicMin(&smem.nearest[code % kJobPartitions], distance * kFurther + token);
    }
    __syncwarp();
    key = smem.nearest[lane];
  }
  for (int bit = 1; bit < job.partitions; bit *= 2) {
    const unsigned long long other = __shfl_xor_sync(kFullWarp, key, bit) + kFurther;
    key = other < key ? other : key;
  }
  return key >= kNoToken ? -1 : static_cast<int32_t>(key & 0xFFFFFFFFu);
}

// The index where the list of this lane's partition begins.
__device__ __forceinline__ int32_t place_of_list(int32_t tokens) {
  const int32_t padded = (tokens + kListed - 1) / kListed * kListed;
  return sum_up_to_lane(padded) - padded;
}

// Lists the tokens of [begin, end) by partition, counted from begin. This lane's partition begins at
// list_begin.
template <class T>
__device__ __forceinline__ void list_tokens(const BlockArgs<T>& args, const Sequence<T>& sequence,
                                            const Job& job, int32_t begin, int32_t end, int32_t list_begin,
                                            WarpSmem& smem) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // the list before it has been read
  for (int32_t at = begin; at < end; at += 32) {
    const TokenBatch batch(args, sequence, job, at, end);
    const uint32_t same = __shfl_sync(kFullWarp, batch.lane_tokens, static_cast<int>(batch.low));
    const int32_t to = __shfl_sync(kFullWarp, list_begin, static_cast<int>(batch.low));
    if (batch.counts) {
      smem.list[to + __popc(same & ((1u << lane) - 1))] = static_cast<uint16_t>(at + lane - begin);
    }
    list_begin += __popc(batch.lane_tokens);
  }
  __syncwarp();
}

// ---- sums ----

// Dims [first, first + width) of a token, or of a stage.
struct Dims {
  int32_t first, width;
};

template <class Rows>
__device__ __forceinline__ float2 add_listed(const Rows& rows, const uint16_t* list, int32_t count,
                                             int32_t begin, int32_t dim, bool active, float2 sum) {
  for (int32_t i = 0; i < count; i += kListed) {
    const uint2 words = *reinterpret_cast<const uint2*>(list + i);
    const uint32_t tokens[kListed] = {words.x & 0xFFFFu, words.x >> 16, words.y & 0xFFFFu, words.y >> 16};
    float2 x[kListed];
#pragma unroll
    for (int j = 0; j < kListed; ++j) {
      x[j] = active && i + j < count ? rows.pair(begin + static_cast<int32_t>(tokens[j]), dim)
                                     : float2{0.0f, 0.0f};
    }
#pragma unroll
    for (int j = 0; j < kListed; ++j) {  // adding 0 changes no sum: none is -0
      sum.x += x[j].x;
      sum.y += x[j].y;
    }
  }
  return sum;
}

// A lane's partition.
struct Partition {
  int32_t tokens;
  int32_t nearest;  // the token that an empty partition takes, or -1
};

// The sum of partition p before the projection.
template <class T, class Rows>
__device__ __forceinline__ float2 finish_sum(const BlockArgs<T>& args, const Rows& rows,
                                             const Partition& partition, int p, int32_t dim, bool active,
                                             float2 sum) {
  const int32_t tokens = __shfl_sync(kFullWarp, partition.tokens, p);
  const int32_t nearest = __shfl_sync(kFullWarp, partition.nearest, p);
  float factor = args.scale;
  if (tokens == 0) {
    sum = nearest >= 0 && active ? rows.pair(nearest, dim) : float2{0.0f, 0.0f};
    if (nearest < 0) factor = 1.0f;
  } else if (args.average) {
    factor = __fdiv_rn(args.scale, static_cast<float>(tokens));
  }
  return {__fmul_rn(sum.x, factor), __fmul_rn(sum.y, factor)};
}

// Sums the tokens of each partition in shared memory, in the given dims of the stage. With the first dims it
// lists the job's tokens; if the list holds all tokens, it serves later dims.
template <class T, class Rows>
__device__ __forceinline__ void sum_partitions(const BlockArgs<T>& args, const Sequence<T>& sequence,
                                               const Rows& rows, const Job& job, const Partition& partition,
                                               const Dims& dims, WarpSmem& smem) {
  const int lane = threadIdx.x % 32;
  const bool active = 2 * lane < dims.width;
  const bool one_segment = sequence.length <= kListTokens;
  const bool listed = dims.first > 0 && one_segment;
  for (int32_t begin = 0; begin == 0 || begin < sequence.length; begin += kListTokens) {
    const int32_t end = min(begin + kListTokens, sequence.length);
    const int32_t tokens =
        one_segment ? partition.tokens : count_tokens(args, sequence, job, begin, end).tokens;
    const int32_t list_begin = place_of_list(tokens);
    if (!listed) list_tokens(args, sequence, job, begin, end, list_begin, smem);
    const bool last = end == sequence.length;
#pragma unroll 1
    for (int p = 0; p < job.partitions; ++p) {
      const int32_t count = __shfl_sync(kFullWarp, tokens, p);
      const uint16_t* list = smem.list + __shfl_sync(kFullWarp, list_begin, p);
      float2* const at = reinterpret_cast<float2*>(smem.sums + p * kSumPitch) + lane;
      float2 sum = begin == 0 ? float2{0.0f, 0.0f} : *at;
      sum = add_listed(rows, list, count, begin, dims.first + 2 * lane, active, sum);
      if (last) sum = finish_sum(args, rows, partition, p, dims.first + 2 * lane, active, sum);
      *at = sum;
    }
  }
  __syncwarp();
}

// ---- output ----

// Without a projection sums are the output. dim: the first of them.
template <class T>
__device__ __forceinline__ void store_block_sums(const BlockArgs<T>& args, const Job& job, int32_t dim,
                                                 int32_t width, const WarpSmem& smem, float* out) {
  for (int p = 0; p < job.partitions; ++p) {
    float* row = out + job.offset + int64_t{p} * args.d + dim;
    for (int i = threadIdx.x % 32; i < width; i += 32) row[i] = smem.sums[p * kSumPitch + i];
  }
}

// A lane has four columns of kRows partitions: four lanes share a partition's columns and eight a column's
// partitions. Every number that a lane reads serves kRows or four products.
template <int kRows, class T>
__device__ __forceinline__ void project_columns(const BlockArgs<T>& args, const float* matrix, int32_t width,
                                                const WarpSmem& smem, float (&sums)[kRows][4]) {
  const float* rows = smem.sums + threadIdx.x % kLaneRows * kSumPitch;
  const auto add = [&](int row, float x, const float4& m) {
    sums[row][0] = fmaf(x, m.x, sums[row][0]);
    sums[row][1] = fmaf(x, m.y, sums[row][1]);
    sums[row][2] = fmaf(x, m.z, sums[row][2]);
    sums[row][3] = fmaf(x, m.w, sums[row][3]);
  };
  int k = 0;
#pragma unroll 1  // more numbers on their way would spill registers
  for (; k + 2 <= width; k += 2) {
    float4 m[2];
#pragma unroll
    for (int i = 0; i < 2; ++i, matrix += args.columns) m[i] = __ldg(reinterpret_cast<const float4*>(matrix));
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float2 x = *reinterpret_cast<const float2*>(rows + row * kLaneRows * kSumPitch + k);
      add(row, x.x, m[0]);
      add(row, x.y, m[1]);
    }
  }
  if (k < width) {
    const float4 m = __ldg(reinterpret_cast<const float4*>(matrix));
#pragma unroll
    for (int row = 0; row < kRows; ++row) add(row, rows[row * kLaneRows * kSumPitch + k], m);
  }
}

// Multiplies sums of dims [dim, dim + width), and adds the products to the output, which holds those of
// earlier dims.
template <int kRows, class T>
__device__ __forceinline__ void project(const BlockArgs<T>& args, const Job& job, int32_t dim, int32_t width,
                                        const WarpSmem& smem, float* out) {
  const int lane = threadIdx.x % 32;
  const bool fours = args.d_proj % 4 == 0;
  const int64_t stride = args.d_proj;
#pragma unroll 1
  for (int32_t column = lane / kLaneRows * 4; column < args.d_proj; column += 128 / kLaneRows) {
    const float* matrix = args.projection + (int64_t{job.repetition} * args.d + dim) * args.columns + column;
    const int left = min(4, args.d_proj - column);
    float* const to = out + job.offset + lane % kLaneRows * stride + column;
    float sums[kRows][4];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const bool exists = lane % kLaneRows + row * kLaneRows < job.partitions && dim > 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sums[row][c] = exists && c < left ? to[row * kLaneRows * stride + c] : 0.0f;
      }
    }
    project_columns<kRows>(args, matrix, width, smem, sums);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (lane % kLaneRows + row * kLaneRows >= job.partitions) continue;
      float* const at = to + row * kLaneRows * stride;
      if (fours) {
        *reinterpret_cast<float4*>(at) = {sums[row][0], sums[row][1], sums[row][2], sums[row][3]};
        continue;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < left) at[c] = sums[row][c];
      }
    }
  }
}

// ---- a job, a sequence ----

// Encodes the dims of a stage, which rows begin with, for one job.
template <class T, class Rows>
__device__ __forceinline__ void encode_job(const BlockArgs<T>& args, const Sequence<T>& sequence,
                                           const Rows& rows, const Job& job, const Dims& stage,
                                           WarpSmem& smem) {
  const PartitionCount count = count_tokens(args, sequence, job, 0, sequence.length);
  Partition partition{count.tokens, -1};
  if (args.average && args.fill_empty) partition.nearest = find_nearest(args, sequence, job, count, smem);
  for (int32_t sub = 0; sub < stage.width; sub += kSumDims) {
    const int32_t dim = stage.first + sub, width = min(kSumDims, stage.width - sub);
    sum_partitions(args, sequence, rows, job, partition, {sub, width}, smem);
    if (args.projection == nullptr) {
      store_block_sums(args, job, dim, width, smem, sequence.out);
    } else if (job.partitions > 16) {
      project<4>(args, job, dim, width, smem, sequence.out);
    } else if (job.partitions > 8) {
      project<2>(args, job, dim, width, smem, sequence.out);
    } else {
      project<1>(args, job, dim, width, smem, sequence.out);
    }
    __syncwarp();  // before the sums are overwritten
  }
}

template <class T, class Rows>
__device__ __forceinline__ void encode_jobs(const BlockArgs<T>& args, const Sequence<T>& sequence,
                                            const Rows& rows, int32_t begin, int32_t end, const Dims& stage,
                                            WarpSmem& smem) {
  const auto warps = static_cast<int32_t>(blockDim.x / 32);
  for (int32_t job = begin + static_cast<int32_t>(threadIdx.x / 32); job < end; job += warps) {
    encode_job(args, sequence, rows, job_at(args, job), stage, smem);
  }
}

template <class T>
__device__ __forceinline__ void encode_sequence(const BlockArgs<T>& args, int64_t index, int32_t begin,
                                                int32_t end, WarpSmem& smem, Staged<T>* stage) {
  const Sequence<T> sequence(args, index);
  const int32_t pitch = (min(args.stage_dims, args.d) + 3) / 4 * 4;
  const bool fits = sequence.length * int64_t{pitch} * int64_t{sizeof(Staged<T>)} <= args.stage_bytes;
  bool not_finite = false;
  for (int32_t first = 0; first < args.d; first += args.stage_dims) {
    const int32_t width = min(args.stage_dims, args.d - first);
    __syncthreads();  // all warps are done with the dims before
    not_finite = stage_tokens(args, sequence, first, width, pitch, fits ? stage : nullptr);
    not_finite = __syncthreads_or(not_finite) != 0;
    if (not_finite) break;
    if (fits) {
      encode_jobs(args, sequence, StagedRows<Staged<T>>{stage, pitch}, begin, end, {first, width}, smem);
    } else {
      const GlobalRows<T> rows{sequence.tokens + first * args.dim_stride, args.token_stride, args.dim_stride,
                               width};
      encode_jobs(args, sequence, rows, begin, end, {first, width}, smem);
    }
  }
  if (threadIdx.x == 0 && args.not_finite != nullptr) args.not_finite[index] = not_finite;
  if (!not_finite) return;
  const int64_t last = offset_of_job(args, end);
  for (int64_t i = offset_of_job(args, begin) + threadIdx.x; i < last; i += blockDim.x) {
    sequence.out[i] = __int_as_float(0x7FC00000);
  }
}

template <class T>
__global__ void __launch_bounds__(kMostBlockWarps * 32)
    muvera_blocks(const __grid_constant__ BlockArgs<T> args) {
  extern __shared__ uint4 shared[];
  auto* warps = reinterpret_cast<WarpSmem*>(shared);
  auto* stage = reinterpret_cast<Staged<T>*>(warps + blockDim.x / 32);
  for (int64_t item = blockIdx.x; item < args.count * args.groups; item += gridDim.x) {
    const int64_t group = item % args.groups;
    const auto begin = static_cast<int32_t>(group * args.jobs / args.groups);
    const auto end = static_cast<int32_t>((group + 1) * args.jobs / args.groups);
    encode_sequence(args, item / args.groups, begin, end, warps[threadIdx.x / 32], stage);
  }
}

}  // namespace late_interaction
