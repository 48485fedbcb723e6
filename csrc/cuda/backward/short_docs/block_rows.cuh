// The rows of a block of incidence_products.cuh, the units that it adds up for them, and how the blocks of a
// cluster add up their sums and write them.
#pragma once

#include "../../primitives/row_vector.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/pdl.cuh"
#include "incidence_stage.cuh"
#include "incidence_words.cuh"

namespace late_interaction {

inline constexpr int kIncidenceThreads = 512, kIncidenceConsumers = 384;

// A block's share of the work. Producers compute it again from ctaid_x(), and so do consumers after the
// products: else ptxas keeps the fields in registers, of which consumers have none left.
template <class Tile>
struct BlockWork {
  uint32_t rank, tile;
  int32_t first_row, first_dim;
  int32_t begin, end;  // units

  __device__ __forceinline__ BlockWork(const IncidenceArgs& p, uint32_t block) {
    const uint32_t tile_slice = p.by_cluster.quotient(block);
    rank = block - tile_slice * p.cluster;
    tile = p.by_slices.quotient(tile_slice);
    first_row = static_cast<int32_t>(tile * p.block_rows);
    first_dim = static_cast<int32_t>(tile_slice - tile * p.slices) * Tile::kDims;
    begin = first_unit(p, rank);
    end = first_unit(p, rank + 1);
  }

  static __device__ __forceinline__ int32_t first_unit(const IncidenceArgs& p, uint32_t rank) {
    return static_cast<int32_t>(p.block_units * rank + p.by_cluster.quotient(p.more_units * rank));
  }
};

// Writes eight dims of an owned row, added up one winner after the other.
template <class Tile>
__device__ __noinline__ void write_row_one_by_one(const IncidenceArgs& p, int64_t row, int dim,
                                                  typename Tile::T* to) {
  using T = typename Tile::T;
  float sum[8] = {};
  const int length = Tile::kGradQ ? p.Lq : p.Ld;
  const int64_t owner = row / length, token = row - owner * length;
  const int64_t items = Tile::kGradQ ? p.N : p.Nq;
  for (int64_t item = 0; item < items; ++item) {
    const int64_t i = Tile::kGradQ ? owner : item, j = Tile::kGradQ ? item : owner;
    const auto* winners = static_cast<const uint16_t*>(p.winners) + (i * p.winners_stride + j) * p.Lq;
    const float grad = static_cast<const float*>(p.grad)[i * p.grad_query_stride + j * p.grad_item_stride];
    const int first = Tile::kGradQ ? static_cast<int>(token) : 0, last = Tile::kGradQ ? first + 1 : p.Lq;
    for (int s = first; s < last; ++s) {
      const int w = winners[s];
      if (Tile::kGradQ ? w >= p.Ld : w != token) continue;
      const T* x = static_cast<const T*>(p.items.data) + item * p.items.item_stride +
                   (Tile::kGradQ ? w : s) * p.items.token_stride + dim;
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] = fmaf(grad, widen(x[k]), sum[k]);
    }
  }
  ptx::st_global_vec(to, packed_vec<T>(sum));
}

// Sums eight floats of shared memory over the blocks of the cluster, in the order of their ranks.
template <bool kClusters>
__device__ __forceinline__ void sum_of_cluster(int cluster, uint32_t from, float (&sum)[8]) {
  const auto take = [&](const float4& low, const float4& high, bool first) {
    const float term[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) sum[k] = first ? term[k] : sum[k] + term[k];
  };
  if (cluster == 1) {
    take(ptx::ld_shared_v4_f32(from), ptx::ld_shared_v4_f32(from + 16), true);
    return;
  }
  if constexpr (kClusters) {
#pragma unroll 4
    for (int rank = 0; rank < cluster; ++rank) {
      const uint32_t there = ptx::mapa(from, rank);
      take(ptx::ld_shared_cluster_v4_f32(there), ptx::ld_shared_cluster_v4_f32(there + 16), rank == 0);
    }
  }
}

// Writes eight dims of an owned row, if their sum is finite. Else they are added up again.
template <class Tile>
__device__ __forceinline__ void write_sum(const IncidenceArgs& p, int64_t row, int dim,
                                          const float (&sum)[8]) {
  auto* to = static_cast<typename Tile::T*>(p.out) + row * p.d + dim;
  if (all_finite(sum)) {
    ptx::st_global_vec(to, packed_vec<typename Tile::T>(sum));
  } else {
    write_row_one_by_one<Tile>(p, row, dim, to);
  }
}

// Adds up this block's share of the rows over the blocks of the cluster, and writes it. Without clusters, a
// block that shares rows writes partial sums to memory.
template <class Tile>
__device__ __forceinline__ void write_rows(const IncidenceArgs& p, uint32_t memory, uint32_t rank,
                                           int64_t first_row, int first_dim) {
  const int rows = static_cast<int>(min(int64_t{p.block_rows}, p.rows - first_row));
  constexpr int kVecs = Tile::kDims / 8;
  const int vecs = min(Tile::kDims, p.d - first_dim) / 8;
  const int sharers = Tile::kTma ? p.cluster : 1, share = Tile::kTma ? static_cast<int>(rank) : 0;
  const int end = rows * kVecs * (share + 1) / sharers;
#pragma unroll 2
  for (int v = rows * kVecs * share / sharers + ptx::tid_x(); v < end; v += kIncidenceConsumers) {
    const int row = v / kVecs, vec = v - row * kVecs;
    if (vec >= vecs) continue;
    const uint32_t from = memory + (row * Tile::kSumWidth + 8 * vec) * 4;
    float sum[8];
    sum_of_cluster<Tile::kTma>(sharers, from, sum);
    if (!Tile::kTma && p.cluster > 1) {
      auto* to = reinterpret_cast<float4*>(p.partials + (rank * p.rows + first_row + row) * p.d + first_dim +
                                           8 * vec);
      to[0] = {sum[0], sum[1], sum[2], sum[3]}, to[1] = {sum[4], sum[5], sum[6], sum[7]};
    } else {
      write_sum<Tile>(p, first_row + row, first_dim + 8 * vec, sum);
    }
  }
}

// Adds up these partial sums, in the order of the blocks. A thread has eight dims of a row.
template <class Tile>
__global__ void __launch_bounds__(kIncidenceConsumers)
    sum_incidence_partials(const __grid_constant__ IncidenceArgs p) {
  ptx::pdl_wait_and_launch_dependents();
  const int vecs = p.d / 8;
  const int64_t v = int64_t{blockIdx.x} * kIncidenceConsumers + threadIdx.x, row = v / vecs;
  if (row >= p.rows) return;
  const auto* from = reinterpret_cast<const float4*>(p.partials + 8 * v);
  float sum[8] = {};
#pragma unroll 4
  for (int rank = 0; rank < p.cluster; ++rank, from += p.rows * vecs * 2) {
    const float4 low = from[0], high = from[1];
    const float term[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) sum[k] += term[k];
  }
  write_sum<Tile>(p, row, static_cast<int>(v - row * vecs) * 8, sum);
}

}  // namespace late_interaction
