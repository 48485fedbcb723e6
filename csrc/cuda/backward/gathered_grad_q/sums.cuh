// The sums of a warp of grad_q_gathered, in registers, and how they are written.
#pragma once

#include "../../primitives/row_vector.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/mma.cuh"
#include "../short_docs/incidence_words.cuh"
#include "stage.cuh"

namespace late_interaction {

// A warp's share of a block's octets.
struct WarpOctets {
  int first, count;
  __device__ __forceinline__ WarpOctets(int octets, int warp)
      : first(octets * warp / kGatheredWarps), count(octets * (warp + 1) / kGatheredWarps - first) {}
};

// Two octets are the columns of each accumulator, which has 8 dims of 16 rows.
struct GatheredSums {
  static constexpr int kBlocks = kGatheredDims / 8, kWidth = kGatheredDims + kGatheredSumPadding;
  ptx::Accumulator x[kGatheredMostOctets / 2][kBlocks];

  // Writes to shared memory, [row of the block][kWidth]. Of stages of four documents, the lane's odd rows
  // have the dims of the block after the next one. Columns 0 and 2 of an octet have rows 0 and 1 and, in the
  // lower half, rows 2 and 3; columns 1 and 3 have rows 4 to 7.
  template <int kDocs>
  __device__ __forceinline__ void put(float* to, const WarpOctets& octets) const {
    const int lane = threadIdx.x % 32, octet = lane % 4 / 2, row = lane % 2, other = kDocs == 4 ? 2 * row : 0;
    to += ((octets.first + octet) * kGatheredOctetRows + row) * kWidth + lane / 4;
#pragma unroll
    for (int g = 0; g < kGatheredMostOctets; g += 2) {
      if (g + octet >= octets.count) break;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        float* const block = to + g * kGatheredOctetRows * kWidth + 8 * (m ^ other);
        block[0] = x[g / 2][m][0];
        block[4 * kWidth] = x[g / 2][m][1];
        block[2 * kWidth] = x[g / 2][m][2];
        block[6 * kWidth] = x[g / 2][m][3];
      }
    }
  }
};

// Adds up eight dims of a query row, one document after the other. In products 0 times a number that is not
// finite is NaN; here only winners are added.
template <class T>
__device__ __noinline__ void sum_one_by_one(const GatheredGradQArgs& p, int64_t i, int s, int dim,
                                            float (&sum)[8]) {
  const auto* winners =
      reinterpret_cast<const uint16_t*>(static_cast<const uint8_t*>(p.winners) + i * p.query_winner_bytes) +
      s;
  const float* grads = static_cast<const float*>(p.grad) + i * p.grad_query_stride;
#pragma unroll
  for (float& x : sum) x = 0.0f;
  for (int64_t j = 0; j < p.N; ++j) {
    const int w = winners[j * p.Lq];
    if (w >= p.Ld) continue;
    const T* x = static_cast<const T*>(p.D.data) + j * p.D.item_stride + w * p.D.token_stride + dim;
    const float grad = grads[j * p.grad_item_stride];
#pragma unroll
    for (int k = 0; k < 8; ++k) sum[k] = fmaf(grad, widen(x[k]), sum[k]);
  }
}

// Writes eight dims of a query row, or adds them to the sums that p.grad_Q_sums holds.
template <class T>
__device__ __forceinline__ void write_dims(const GatheredGradQArgs& p, int64_t at, const float (&sum)[8]) {
  if (p.grad_Q_sums == nullptr) {
    ptx::st_global_vec(static_cast<T*>(p.grad_Q) + at, packed_vec<T>(sum));
    return;
  }
  auto* to = reinterpret_cast<float4*>(static_cast<float*>(p.grad_Q_sums) + at);
  const float4 zeros{}, low = p.adds_to_sums ? to[0] : zeros, high = p.adds_to_sums ? to[1] : zeros;
  to[0] = {low.x + sum[0], low.y + sum[1], low.z + sum[2], low.w + sum[3]};
  to[1] = {high.x + sum[4], high.y + sum[5], high.z + sum[6], high.w + sum[7]};
}

// Writes the block's sums from shared memory. first_octet: index among all octets.
template <class T>
__device__ __forceinline__ void write_summed_rows(const GatheredGradQArgs& p, uint32_t memory,
                                                  int32_t first_octet, int first_dim) {
  constexpr int kVecs = GatheredSums::kBlocks, kWidth = GatheredSums::kWidth;
  const int rows = min(p.octets, p.all_octets - first_octet) * kGatheredOctetRows;
#pragma unroll 2
  for (int v = threadIdx.x; v < rows * kVecs; v += 32 * kGatheredWarps) {
    const int row = v / kVecs, dim = v % kVecs * 8;
    const int32_t octet = first_octet + row / kGatheredOctetRows;
    const int32_t i = p.by_query_octets.quotient(octet);
    const int s = (octet - i * p.query_octets) * kGatheredOctetRows + row % kGatheredOctetRows;
    if (first_dim + dim >= p.d || s >= p.Lq) continue;
    const uint32_t from = memory + (row * kWidth + dim) * 4;
    const float4 low = ptx::ld_shared_v4_f32(from), high = ptx::ld_shared_v4_f32(from + 16);
    float sum[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (!all_finite(sum)) sum_one_by_one<T>(p, i, s, first_dim + dim, sum);
    write_dims<T>(p, (int64_t{i} * p.Lq + s) * p.d + first_dim + dim, sum);
  }
}

}  // namespace late_interaction
