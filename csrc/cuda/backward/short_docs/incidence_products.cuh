// Gradients of short documents and the queries that share them, as products of 0 and 1 with embeddings
// (wgmma).
//
//   grad_D[j, t] = sum over i of grad[i, j] * sum over s with winner[i, j, s] == t of Q[i, s]
//   grad_Q[i, s] = sum over j of grad[i, j] * D[j, winner[i, j, s]]
//
//                     embeddings of an item, in shared memory (TMA): K = its tokens, N = dims
//                   +--------------------------+
//    owned rows,    |  products of a unit      |  * grad[row's item, item]  -> added to the row's sums,
//    0 or 1 in      |  (fp32, registers)       |                               in registers
//    registers      +--------------------------+
//
// Of grad_D, owned rows are document tokens and an item is a query; of grad_Q, owned rows are query tokens
// and an item is a document. Operand A of wgmma is made in registers of the winners: 1 where a row and a
// token of the item belong together. The gradient of their score is multiplied to the products in fp32.
//
// Who owns what
//   block     up to kIncidenceRows rows. The blocks of a cluster have the same ones, each with a range of
//             the units.
//   unit      up to 16 * kSteps tokens of an item, filled up with zeros
//   producer  a warp that loads units' embeddings (TMA), and three that take turns to copy winners and
//             gradients to a stage (cp.async), as they lie in memory
//   consumer  three warpgroups, 64 rows each
//
// At the end sums go to shared memory, and the blocks of a cluster add them up in the order of their ranks,
// each a share of the rows: the same bits in every run. 0 times a number that is not finite leaves a NaN, so
// sums that are not finite are computed again, one winner after the other.
#pragma once

#include "../../primitives/row_vector.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/ld_cluster.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/pdl.cuh"
#include "incidence_look_up.cuh"
#include "incidence_words.cuh"

namespace late_interaction {

inline constexpr int kIncidenceThreads = 512, kIncidenceConsumers = 384;

// Products of a warpgroup's rows with a stage's units, added to its sums.
template <class Tile>
struct IncidenceSums {
  static constexpr int kRegs = Tile::kDims / 2;
  float x[kRegs];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int k = 0; k < kRegs; ++k) x[k] = 0.0f;
  }

  // Adds the products of a unit, whose embeddings lie at `tile`, a descriptor's lower word, times what
  // `read_grads` reads for the two rows. It and `read_next` read while products are under way, or, where
  // operand A leaves no registers, after them.
  template <class F, class G>
  __device__ __forceinline__ void add(const uint32_t (&a)[Tile::kSteps][4], uint32_t tile, F read_grads,
                                      G read_next) {
    constexpr bool kLate = Tile::kSteps > 2;
    float grads[2];
    float products[kRegs];
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Tile::kSteps; ++k) {
      ptx::RegisterWgmmaShape<Tile::kDims>::template issue<typename IncidenceWgmma<typename Tile::T>::type>(
          products, a[k], ptx::smem_desc_mn_major(tile + (k * 2048 >> 4)), k > 0);
    }
    ptx::wgmma_commit();
    if (!kLate) read_grads(grads);
    read_next();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int k = 0; k < kRegs; ++k) asm volatile("" : "+f"(products[k])::"memory");
    if (kLate) read_grads(grads);
#pragma unroll
    for (int k = 0; k < kRegs; ++k) x[k] = fmaf(grads[k / 2 % 2], products[k], x[k]);
  }

  __device__ __forceinline__ void put(float* to) const {
    const int lane = ptx::tid_x() % 32;
#pragma unroll
    for (int n = 0; n < Tile::kDims / 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<float2*>(to + (lane / 4 + 8 * h) * Tile::kSumWidth + 8 * n + 2 * (lane % 4)) = {
            x[4 * n + 2 * h], x[4 * n + 2 * h + 1]};
      }
    }
  }
};

// The winners that a unit holds for a lane's two rows, as codes, in pairs: each row's own (grad_Q), or those
// of the unit's query rows, in the order of operand A (grad_D).
template <class Tile>
using UnitWinners = uint32_t[Tile::kGradQ ? 2 : 4 * Tile::kSteps];

// The two rows that a consumer lane owns, eight rows apart: their tokens, and where a stage holds their
// winners and gradients.
template <class Tile>
struct OwnedRows {
  using Words = IncidenceWords<typename Tile::T>;
  // grad_Q: token 2c of an item and the next one. grad_D: each row's own token, twice; of no row a NaN, which
  // equals nothing.
  uint32_t tokens[Tile::kGradQ ? 1 : 2];
  // From the first run of a unit to what each row reads of its own, and, from bit 16 on, where that run lies
  // within 16 bytes with item 0. Of aligned runs of grad_D, at[0] is what the lane reads for its warp.
  uint32_t at[2];
  uint32_t grads = 0;  // where the rows' gradients are among those of a unit, 16 bits each

  __device__ __forceinline__ OwnedRows(const IncidenceArgs& p, int32_t first_row) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
    if constexpr (Tile::kGradQ) {
      tokens[0] = pair_of(0x4000) + 2 * (lane % 4) * 0x00010001 + 0x00010000;
#pragma unroll
      for (int h = 0; h < 2; ++h) own_query_row(p, first_row, row + lane / 4 + 8 * h, h);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) own_document_row(p, first_row, row + lane / 4 + 8 * h, h);
      if (p.run_offset == 0) at[0] = doc_of(p, row + lane % 16) * p.run_vecs * 16 + lane / 16 * 16;
    }
#pragma unroll
    for (uint32_t& token : tokens) asm volatile("" : "+r"(token));  // a register, not computed every time
  }

  // Reads the rows' gradients of the u-th unit of a stage.
  __device__ __forceinline__ void read_grads(const IncidenceArgs& p, uint32_t stage_grads, int u,
                                             float (&found)[2]) const {
    const int unit = u * (Tile::kGradQ ? kMostIncidenceQueries : p.block_docs);
    found[0] = __uint_as_float(ptx::ld_shared(stage_grads + 4 * unit + (grads & 0xFFFF)));
    found[1] = __uint_as_float(ptx::ld_shared(stage_grads + 4 * unit + (grads >> 16)));
  }

  // Reads the winners of the u-th unit of a stage, that of a certain item, for the rows. kAligned: runs start
  // at multiples of 16 bytes.
  template <bool kAligned>
  __device__ __forceinline__ void read(const IncidenceArgs& p, uint32_t winners, int u, int32_t item,
                                       UnitWinners<Tile>& codes) const {
    const auto place = [&](int h) {
      if (kAligned) return at[h];
      const auto step = Tile::kGradQ ? 2u * p.Lq : static_cast<uint32_t>(p.query_bytes);
      return (at[h] & 0xFFFF) + (((at[h] >> 16) + static_cast<uint32_t>(item) * step) & 15);
    };
    if constexpr (Tile::kGradQ) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        codes[h] = ptx::ld_shared_u16(winners + u * kIncidenceUnitVecs * 16 + place(h));
      }
    } else if constexpr (kAligned) {
#pragma unroll
      for (int k = 0; k < Tile::kSteps; ++k) {
        uint32_t words[4];
        ptx::ldmatrix_x4(words, winners + u * p.block_docs * p.run_vecs * 16 + at[0] + 32 * k);
#pragma unroll
        for (int m = 0; m < 4; ++m) codes[4 * k + m] = words[m];
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t from = winners + u * p.block_docs * p.run_vecs * 16 + place(h);
#pragma unroll
        for (int k = 0; k < 2 * Tile::kSteps; ++k) {
          codes[2 * k + h] = ptx::ld_shared_u16(from + 16 * k) | ptx::ld_shared_u16(from + 16 * k + 2) << 16;
        }
      }
    }
  }

  // The rows' words of operand A: for each step, of the low and of the high row, those of tokens 2c, 2c + 1,
  // and then of 2c + 8, 2c + 9.
  __device__ __forceinline__ void compare(const UnitWinners<Tile>& codes,
                                          uint32_t (&a)[Tile::kSteps][4]) const {
#pragma unroll
    for (int k = 0; k < 4 * Tile::kSteps; ++k) {
      if constexpr (Tile::kGradQ) {
        a[k / 4][k % 4] = Words::equal(pair_of(token_code(codes[k % 2])), tokens[0] + k / 2 * 0x00080008);
      } else {
        a[k / 4][k % 4] = Words::equal(codes[k] | pair_of(token_code(0)), tokens[k % 2]);
      }
    }
  }

 private:
  __device__ __forceinline__ void own_query_row(const IncidenceArgs& p, int32_t first_row, int row, int h) {
    const BlockQueries queries(p, first_row);
    const auto at_most = static_cast<int32_t>(p.rows - 1);
    const int32_t whole = min(first_row + row, at_most);
    const int32_t i = p.by_Lq.quotient(whole), query = i - queries.first, begin = queries.begin(query);
    at[h] = queries.first_vec(query) * 16 + 2 * (whole - i * p.Lq - begin) +
            ((low_bits(first_winner(p, i, 0, begin)) & 15) << 16);
    grads |= 4 * query << 16 * h;
  }

  static __device__ __forceinline__ int doc_of(const IncidenceArgs& p, int row) {
    const int doc = row / p.Ld;
    return doc < p.block_docs ? doc : 0;
  }

  __device__ __forceinline__ void own_document_row(const IncidenceArgs& p, int32_t first_row, int row,
                                                   int h) {
    const int doc = doc_of(p, row), t = row - doc * p.Ld;
    tokens[h] = t < p.Ld ? pair_of(token_code(t)) : 0xFFFFFFFF;
    at[h] = doc * p.run_vecs * 16 + threadIdx.x % 4 * 4 +
            ((low_bits(first_winner(p, 0, first_row / p.Ld + doc, 0)) & 15) << 16);
    grads |= 4 * doc << 16 * h;
  }
};

// What a block computes. Producers read the index of the block a second time (ctaid_x). Consumers do the same
// once they have multiplied. ptxas would otherwise keep these fields in registers, and consumers have none
// left.
template <class Tile>
struct BlockWork {
  uint32_t rank, tile;
  int32_t first_row, first_dim;
  int32_t begin, end;  // units

  __device__ __forceinline__ BlockWork(const IncidenceArgs& p, uint32_t block) {
    const uint32_t part = p.by_cluster.quotient(block);
    rank = block - part * p.cluster;
    tile = p.by_slices.quotient(part);
    first_row = static_cast<int32_t>(tile * p.block_rows);
    first_dim = static_cast<int32_t>(part - tile * p.slices) * Tile::kDims;
    begin = first_unit(p, rank);
    end = first_unit(p, rank + 1);
  }

  static __device__ __forceinline__ int32_t first_unit(const IncidenceArgs& p, uint32_t rank) {
    return static_cast<int32_t>(p.block_units * rank + p.by_cluster.quotient(p.more_units * rank));
  }
};

template <bool kAligned, class Tile>
__device__ __forceinline__ void consume_units(const IncidenceArgs& p, const IncidenceShared<Tile>& memory,
                                              const OwnedRows<Tile>& rows, int32_t unit, int32_t end,
                                              IncidenceSums<Tile>& sums) {
  // The winners of the next unit are read while this one is multiplied, where registers allow.
  constexpr bool kAhead = kAligned && Tile::kUnits > 1 && (Tile::kGradQ || Tile::kSteps == 1);
  PipelineState at;
  for (; unit < end; unit += Tile::kUnits) {
    ptx::mbarrier_wait_parity(memory.full(at.stage), at.parity);
    const uint32_t tile = ptx::smem_desc_low_mn_major(memory.tile(at.stage), Tile::kColumnBytes),
                   winners = memory.winners(at.stage), grads = memory.grads(at.stage);
    UnitWinners<Tile> codes;
    const auto read = [&](int u) {
      const int32_t item = Tile::kGradQ ? unit + u : p.by_units.quotient(unit + u);
      rows.template read<kAligned>(p, winners, u, item, codes);
    };
    if (kAhead) read(0);
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) {
      if (unit + u >= end) break;
      if (!kAhead) read(u);
      uint32_t a[Tile::kSteps][4];
      rows.compare(codes, a);
      sums.add(
          a, tile + (u * Tile::kUnitRows * 128 >> 4),
          [&](float (&found)[2]) { rows.read_grads(p, grads, u, found); },
          [&] {
            if (kAhead && u + 1 < Tile::kUnits) read(u + 1);
          });
    }
    ptx::mbarrier_arrive(memory.empty(at.stage));
    at.advance(memory.stages);
  }
}

template <class Tile>
__device__ __forceinline__ void consume(const IncidenceArgs& p, const IncidenceShared<Tile>& memory,
                                        IncidenceSums<Tile>& sums) {
  const BlockWork<Tile> work(p, blockIdx.x);
  const OwnedRows<Tile> rows(p, work.first_row);
  sums.clear();
  if (p.run_offset == 0) {
    consume_units<true>(p, memory, rows, work.begin, work.end, sums);
  } else {
    consume_units<false>(p, memory, rows, work.begin, work.end, sums);
  }
}

// Eight dims of an owned row, one winner after the other.
template <class Tile>
__device__ __noinline__ void sum_row_one_by_one(const IncidenceArgs& p, int64_t row, int dim,
                                                float (&sum)[8]) {
  using T = typename Tile::T;
#pragma unroll
  for (int k = 0; k < 8; ++k) sum[k] = 0.0f;
  const int length = Tile::kGradQ ? p.Lq : p.Ld;
  const int64_t owner = row / length, own = row - owner * length;
  const int64_t items = Tile::kGradQ ? p.N : p.Nq;
  for (int64_t item = 0; item < items; ++item) {
    const int64_t i = Tile::kGradQ ? owner : item, j = Tile::kGradQ ? item : owner;
    const auto* winners = static_cast<const uint16_t*>(p.winners) + (i * p.winners_stride + j) * p.Lq;
    const float grad = static_cast<const float*>(p.grad)[i * p.grad_query_stride + j * p.grad_item_stride];
    const int first = Tile::kGradQ ? static_cast<int>(own) : 0, last = Tile::kGradQ ? first + 1 : p.Lq;
    for (int s = first; s < last; ++s) {
      const int w = winners[s];
      if (Tile::kGradQ ? w >= p.Ld : w != own) continue;
      const T* x = static_cast<const T*>(p.items.data) + item * p.items.item_stride +
                   (Tile::kGradQ ? w : s) * p.items.token_stride + dim;
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] = fmaf(grad, widen(x[k]), sum[k]);
    }
  }
}

// Adds up what the blocks of the cluster have in shared memory, this one's share of the rows, and writes it.
template <class Tile>
__device__ __forceinline__ void write_rows(const IncidenceArgs& p, uint32_t memory, uint32_t rank,
                                           int64_t first_row, int first_dim) {
  using Words = IncidenceWords<typename Tile::T>;
  const int rows = static_cast<int>(min(int64_t{p.block_rows}, p.rows - first_row));
  const int vecs = min(Tile::kDims, p.d - first_dim) / 8;
  const int end = rows * vecs * (static_cast<int>(rank) + 1) / p.cluster;
  auto* out = static_cast<typename Tile::T*>(p.out) + first_row * p.d + first_dim;
  for (int v = rows * vecs * static_cast<int>(rank) / p.cluster + ptx::tid_x(); v < end;
       v += kIncidenceConsumers) {
    const int row = v / vecs, vec = v - row * vecs;
    const uint32_t from = memory + (row * Tile::kSumWidth + 8 * vec) * 4;
    float sum[8];
    for (int other = 0; other < p.cluster; ++other) {
      const uint32_t there = ptx::mapa(from, other);
      const float4 low = ptx::ld_shared_cluster_v4_f32(there),
                   high = ptx::ld_shared_cluster_v4_f32(there + 16);
      const float term[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] = other == 0 ? term[k] : sum[k] + term[k];
    }
    bool finite = true;
#pragma unroll
    for (int k = 0; k < 8; ++k) finite = finite && fabsf(sum[k]) < INFINITY;
    if (!finite) sum_row_one_by_one<Tile>(p, first_row + row, first_dim + 8 * vec, sum);
    const uint4 words = {Words::pack(sum[0], sum[1]), Words::pack(sum[2], sum[3]),
                         Words::pack(sum[4], sum[5]), Words::pack(sum[6], sum[7])};
    ptx::st_global_vec(out + int64_t{row} * p.d + 8 * vec, words);
  }
}

template <class Tile>
__global__ void __launch_bounds__(kIncidenceThreads, 1)
    short_docs_incidence(const __grid_constant__ IncidenceArgs p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t barriers[2 * kMostIncidenceStages];
  const IncidenceShared<Tile> memory{ptx::smem_address(shared), ptx::smem_address(barriers), p.stages};
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      ptx::mbarrier_init(memory.full(s), 1 + 32);
      ptx::mbarrier_init(memory.empty(s), kIncidenceConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (!p.beside_grad_q) ptx::pdl_wait();
  ptx::pdl_launch_dependents();
  auto* shared_sums = reinterpret_cast<float*>(shared);  // in place of the ring
  if (const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0); warp >= kIncidenceConsumers / 32) {
    ptx::setmaxnreg_dec<56>();
    const int turn = warp - kIncidenceConsumers / 32 - 1;
    const BlockWork<Tile> work(p, ptx::ctaid_x());
    if (turn < 0) {
      load_units<Tile>(p, map, memory, work.begin, work.end, work.first_dim);
    } else if constexpr (Tile::kGradQ) {
      look_up(memory, WinnerLookUp<Tile>(p, work.first_row), turn, work.begin, work.end);
    } else {
      const auto first_j = static_cast<int32_t>(work.tile * p.block_docs);
      look_up(memory, RowLookUp<Tile>{p, first_j}, turn, work.begin, work.end);
    }
    __syncwarp();
    ptx::cluster_sync();
    ptx::cluster_sync();
  } else {
    ptx::setmaxnreg_inc<152>();
    IncidenceSums<Tile> sums;
    consume<Tile>(p, memory, sums);
    ptx::named_barrier_sync(1, kIncidenceConsumers);  // all have left the ring
    sums.put(shared_sums + ptx::tid_x() / 32 * 16 * Tile::kSumWidth);
    ptx::cluster_sync();
    const BlockWork<Tile> work(p, ptx::ctaid_x());
    write_rows<Tile>(p, memory.ring, work.rank, work.first_row, work.first_dim);
    ptx::cluster_sync();  // no block leaves while another reads its sums
  }
  // The next kernel must not start before grad_Q's kernel has ended. The last block waits for that, and this
  // kernel ends with its last block.
  if (p.beside_grad_q && ptx::ctaid_x() == gridDim.x - 1) ptx::pdl_wait();
#endif
}

}  // namespace late_interaction
