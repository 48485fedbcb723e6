// scores[i, j] = sum_s max_t <Q[i, s], unit(hidden[j, t] W^T + b)> for a few query rows.
//
// As project.cuh, up to the 64 projected rows of a warpgroup. These stay in registers: rounded, they are
// operand A of mma.sync, 16 rows a warp; operand B is the query rows, resident in shared memory. A warp takes
// the maxima over those of its 16 rows that belong to one document, and merges them into global memory by
// atomic maxima of integers that are ordered as the floats: the result does not depend on the order. A second
// kernel adds the maxima up.
//
//      shared memory:  the ring of project.cuh, then [query rows][256 bytes], 16-byte vectors swizzled
//                      by the row.
#include "../primitives/ordered_key.cuh"
#include "../ptx/cache_policy.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/wgmma.cuh"
#include "../runtime/launch_config.cuh"
#include "project.cuh"

namespace late_interaction {

struct ScoreTile : ProjectTile {
  static constexpr int kSharedBytes = kRingBytes + kScoredRows * kProjectedDims * 2;
};

template <class Mma>
struct ScoreRows {
  using T = typename Mma::Element;
  static constexpr int kVecs = kProjectedDims / 8;  // of 16 bytes, in a row

  const ScoreArgs& p;
  uint32_t queries;  // in shared memory
  int rows;          // of Q, in whole eights

  __device__ __forceinline__ uint32_t at(int row, int vec16) const {
    return queries + row * (kVecs * 16) + ((vec16 ^ row & 7) * 16);
  }

  // By all threads of the block: loads query rows, and zeros past the last row and dim.
  __device__ __forceinline__ void fetch() const {
    const int count = p.queries * p.Lq;
    for (int k = threadIdx.x; k < rows * kVecs; k += blockDim.x) {
      const int row = k / kVecs, vec16 = k % kVecs;
      const bool exists = row < count && vec16 * 8 < p.project.d;
      const T* from = static_cast<const T*>(p.Q) + (exists ? int64_t{row} * p.project.d + vec16 * 8 : 0);
      ptx::cp_async_16(at(row, vec16), from, exists ? 16 : 0);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }

  // Multiplies 16 rows of a warp with eight query rows.
  __device__ __forceinline__ void multiply(ptx::Accumulator& s, const typename Mma::A (&a)[kVecs / 2],
                                           int first_query) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kVecs / 4; ++k) {
      uint32_t w[4];
      ptx::ldmatrix_x4(w, at(first_query + lane % 8, 4 * k + lane / 8));
      Mma::multiply(s, a[2 * k], Mma::operand_b(w[0], w[1]));
      Mma::multiply(s, a[2 * k + 1], Mma::operand_b(w[2], w[3]));
    }
  }

  // Scores 16 projected rows of this warp, from row `first` on and before `end`, counted over all documents.
  __device__ __forceinline__ void score(const typename Mma::A (&a)[kVecs / 2], int first, int end) const {
    if (first >= end) return;
    const int quad = threadIdx.x % 32 / 4;
    const int first_document = first / p.Ld, last_document = (min(first + 16, end) - 1) / p.Ld;
    int document[2];  // of this lane's two rows; -1: they do not count
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + half * 8 + quad;
      const bool counts = row < end && (p.d_mask == nullptr || p.d_mask[row] != 0);
      document[half] = counts ? row / p.Ld : -1;
    }
#pragma unroll 1
    for (int query = 0; query < rows; query += 8) {
      ptx::Accumulator s = {0.0f, 0.0f, 0.0f, 0.0f};
      multiply(s, a, query);
#pragma unroll 1
      for (int j = first_document; j <= last_document; ++j) {
        const bool upper = document[0] == j, lower = document[1] == j;
        if (!__any_sync(kFullWarp, upper || lower)) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float best = max_keeping_nan(upper ? s[e] : -INFINITY, lower ? s[2 + e] : -INFINITY);
#pragma unroll
          for (int offset = 4; offset < 32; offset *= 2) {
            best = max_keeping_nan(best, __shfl_xor_sync(kFullWarp, best, offset));
          }
          const int row = query + 2 * (threadIdx.x % 4) + e, count = p.queries * p.Lq;
          if (quad == 0 && row < count)
            atomicMax(p.best + int64_t{j} * count + row, OrderedKey<float>::of(best));
        }
      }
    }
  }
};

template <class Type, class Mma>
__global__ void __launch_bounds__(ScoreTile::kThreads, 1)
    project_scores(const __grid_constant__ ScoreArgs p, const __grid_constant__ ProjectMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = typename Mma::Element;
  using Tile = ScoreTile;
  extern __shared__ uint8_t shared[];
  __shared__ alignas(8) uint64_t barriers[Tile::Stages::kBarriers];
  __shared__ alignas(8) float bias[kProjectedDims];
  Tile::Stages ring(shared, barriers);
  const ScoreRows<Mma> scores{p, ring.behind(), (p.queries * p.Lq + 7) / 8 * 8};
  fill_bias<T>(bias, p.project);
  scores.fetch();
  if (threadIdx.x == 0) ring.init(1, 4 * Tile::kWarpgroups);
  __syncthreads();

  // Numbers of rows fit 32 bits.
  const auto first = static_cast<int>(p.project.rows * blockIdx.x / gridDim.x);
  const int count = static_cast<int>(p.project.rows * (blockIdx.x + 1) / gridDim.x) - first;
  const ProjectRows<Type, T> rows{{},    p.project, ptx::smem_address(bias),        nullptr,
                                  first, count,     ptx::cache_policy_evict_first()};
  split_warpgroups(
      threadIdx.x / 128 == Tile::kWarpgroups, [&] { rows.copy_tiles(maps, ring); },
      [&] {
        rows.multiply_tiles(ring, [&](float (&c)[Tile::kAccumulators], int from, int end) {
          const float upper = rows.scale_of_row(c, 0, p.normalize),
                      lower = rows.scale_of_row(c, 1, p.normalize);
          typename Mma::A a[kProjectedDims / 16];
#pragma unroll
          for (int k = 0; k < kProjectedDims / 16; ++k) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const float* x = c + 4 * (2 * k + n);
              const bool exists = 16 * k + 8 * n < p.project.d;  // zeros of W make NaN of infinities
              a[k].r[2 * n] = exists ? pack_pair<T>(upper * x[0], upper * x[1]) : 0;
              a[k].r[2 * n + 1] = exists ? pack_pair<T>(lower * x[2], lower * x[3]) : 0;
            }
          }
          scores.score(a, first + from + threadIdx.x / 32 % 4 * 16, first + end);
        });
      });
#endif
}

// A warp for each score.
__global__ void __launch_bounds__(256) sum_best(const __grid_constant__ ScoreArgs p) {
  const int64_t at = (int64_t{blockIdx.x} * 256 + threadIdx.x) / 32;
  if (at >= int64_t{p.queries} * p.documents) return;
  const int64_t query = at / p.documents, document = at % p.documents;
  const int64_t first = query * p.Lq;
  float sum = 0.0f;
  for (int s = threadIdx.x % 32; s < p.Lq; s += 32) {
    const uint32_t best = p.best[document * p.queries * p.Lq + first + s];
    const bool counts = best != 0 && (p.q_mask == nullptr || p.q_mask[first + s] != 0);
    sum += counts ? OrderedKey<float>::number(best) : 0.0f;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) p.scores[at] = sum;
}

namespace {

template <class Type, class Mma>
cudaError_t launch_scores(const ScoreArgs& args, const ProjectMaps& maps, int sm_count, cudaStream_t stream) {
  const LaunchShape shape{project_blocks(args.project.rows, sm_count), ScoreTile::kThreads,
                          ScoreTile::kSharedBytes, false};
  const cudaError_t error = launch(project_scores<Type, Mma>, shape, stream, args, maps);
  if (error != cudaSuccess) return error;
  const int64_t sums = (int64_t{args.queries} * args.documents + 7) / 8;
  sum_best<<<static_cast<unsigned>(sums), 256, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_project_scores(Dtype dtype, const ScoreArgs& args, const ProjectMaps& maps, int sm_count,
                                  cudaStream_t stream) {
  return dtype == Dtype::bf16 ? launch_scores<ptx::WgmmaBf16, ptx::MmaBf16>(args, maps, sm_count, stream)
                              : launch_scores<ptx::WgmmaFp16, ptx::MmaFp16>(args, maps, sm_count, stream);
}

}  // namespace late_interaction
