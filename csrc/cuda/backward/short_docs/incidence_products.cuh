// Gradients of short documents and the queries that share them, by tensor cores.
//
//   grad_D[j, t] = sum over i of grad[i, j] * sum over s with winner[i, j, s] == t of Q[i, s]
//   grad_Q[i, s] = sum over j of grad[i, j] * D[j, winner[i, j, s]]
//
//                     embeddings of an item, in shared memory: K = its tokens, N = dims
//                   +--------------------------+
//    owned rows,    |  products of a unit      |  * grad[row's item, item]  -> added to the row's sums,
//    0 or 1 in      |  (fp32, registers)       |                               in registers
//    registers      +--------------------------+
//
// Of grad_D, owned rows are document tokens and an item is a query; of grad_Q, owned rows are query tokens
// and an item is a document. Operand A of wgmma is made in registers from winners: 1 where one of row and
// item token is the other's winner. Products are multiplied by the gradient of the score in fp32.
//
// grad_Q of bf16 has another tile (GatherTile), which reads the winning tokens alone from shared memory:
// gather_consumer.cuh. There a unit is a document.
//
// Who owns what
//   block     up to kIncidenceRows rows. The blocks of a cluster share rows, each with a range of the units.
//   unit      up to 16 * kSteps tokens of an item, filled up with zeros
//   producer  a warp that loads units' embeddings (TMA), and three that take turns to copy winners and
//             gradients to a stage (cp.async), unpermuted
//   consumer  three warpgroups, 64 rows each; of blocks of 128 rows, the third only writes
//
// Without TMA, clusters and wgmma (Tile::kTma), before sm_90: four warps copy embeddings too, mma.sync
// multiplies (mma_consumer.cuh), and another kernel adds the sums of blocks that share rows.
//
// At the end sums go to shared memory, and the blocks of a cluster add them up in the order of their ranks,
// each a share of the rows: the same bits in every run. 0 times a number that is not finite is NaN, so sums
// that are not finite are computed again, one winner after the other.
#pragma once

#include "../../ptx/pdl.cuh"
#include "block_rows.cuh"
#include "gather_consumer.cuh"
#include "incidence_look_up.cuh"
#include "mma_consumer.cuh"

namespace late_interaction {

// The sums that a consumer of a tile keeps in registers.
template <class Tile>
struct SumsOf : std::type_identity<IncidenceSums<Tile>> {};
template <class Tile>
  requires(Tile::kGathers)
struct SumsOf<Tile> : std::type_identity<GatherSums<Tile>> {};

template <bool kAligned, class Tile>
using ProductsOf = std::conditional_t<Tile::kTma, UnitPipeline<kAligned, Tile>, MmaPipeline<kAligned, Tile>>;

template <class Tile>
__device__ __forceinline__ void consume(const IncidenceArgs& p, const typename Tile::Shared& memory,
                                        typename SumsOf<Tile>::type& sums) {
  const BlockWork<Tile> work(p, blockIdx.x);
  const bool aligned = p.run_offset == 0;
  if constexpr (Tile::kGathers) {
    sums = {};
    if (aligned) {
      GatherPipeline<true, Tile>(p, memory, work.first_row, work.begin, work.end).add_to(sums);
    } else {
      GatherPipeline<false, Tile>(p, memory, work.first_row, work.begin, work.end).add_to(sums);
    }
  } else {
    const OwnedRows<Tile> rows(p, work.first_row);
    sums = {};
    if (aligned) {
      ProductsOf<true, Tile>(p, memory, rows, work.begin, work.end).add_to(sums);
    } else {
      ProductsOf<false, Tile>(p, memory, rows, work.begin, work.end).add_to(sums);
    }
  }
}

template <class Tile>
__device__ __forceinline__ void produce(const IncidenceArgs& p, const typename Tile::Map& map,
                                        const typename Tile::Shared& memory, int warp) {
  const int turn = warp - (Tile::kTma ? 1 : 0);
  const BlockWork<Tile> work(p, ptx::ctaid_x());
  if constexpr (Tile::kTma) {
    if (turn < 0) {
      if constexpr (Tile::kGathers) {
        return load_incidence_documents(map, memory, work.begin, work.end, work.first_dim);
      } else {
        return load_units<Tile>(p, map, memory, work.begin, work.end, work.first_dim);
      }
    }
  }
  if constexpr (Tile::kGradQ) {
    look_up<Tile>(memory, IncidenceLookUp<Tile>(p, work.first_row), turn, work.begin, work.end,
                  work.first_dim);
  } else {
    const auto first_j = static_cast<int32_t>(work.tile * p.block_docs);
    look_up<Tile>(memory, RowLookUp<Tile>{p, first_j}, turn, work.begin, work.end, work.first_dim);
  }
}

template <class Tile>
__device__ __forceinline__ void run_block(const IncidenceArgs& p, const typename Tile::Map& map,
                                          uint8_t* shared, const typename Tile::Shared& memory) {
  const bool clusters = Tile::kTma && p.cluster > 1;
  auto* shared_sums = reinterpret_cast<float*>(shared);  // over the ring
  if (const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0); warp >= kIncidenceConsumers / 32) {
    if constexpr (Tile::kTma) ptx::setmaxnreg_dec<56>();
    produce<Tile>(p, map, memory, warp - kIncidenceConsumers / 32);
    __syncwarp();
    if constexpr (Tile::kTma) {
      if (!clusters) return;
      ptx::cluster_sync();
      ptx::cluster_sync_relaxed();
    }
  } else {
    if constexpr (Tile::kTma) ptx::setmaxnreg_inc<152>();
    const bool has_rows = warp / 4 < p.warpgroups;
    typename SumsOf<Tile>::type sums;
    if (has_rows) consume<Tile>(p, memory, sums);
    ptx::named_barrier_sync(1, kIncidenceConsumers);  // all have left the ring
    if (has_rows) sums.put(shared_sums + ptx::tid_x() / 32 * 16 * Tile::kSumWidth);
    if (!clusters) ptx::named_barrier_sync(1, kIncidenceConsumers);
    if constexpr (Tile::kTma) {
      if (clusters) ptx::cluster_sync();
    }
    const BlockWork<Tile> work(p, ptx::ctaid_x());
    write_rows<Tile>(p, memory.first_stage, work.rank, work.first_row, work.first_dim);
    if constexpr (Tile::kTma) {
      if (clusters) ptx::cluster_sync_relaxed();  // no block leaves while another reads its sums
    }
  }
}

template <class Tile>
__global__ void __launch_bounds__(kIncidenceThreads, 1)
    short_docs_incidence(const __grid_constant__ IncidenceArgs p,
                         const __grid_constant__ typename Tile::Map map) {
  if constexpr (ptx::kIsSm90a || (!Tile::kTma && !ptx::kBeforeSm80)) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t barriers[2 * kMostIncidenceStages];
    const typename Tile::Shared memory(p, ptx::smem_address(shared), ptx::smem_address(barriers));
    if (threadIdx.x == 0) {
      memory.init(p.stages, Tile::kTma + 32, 128 * p.warpgroups);
      if constexpr (Tile::kTma) ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (Tile::kTma) {
      if (!p.beside_grad_q) ptx::pdl_wait();
      ptx::pdl_launch_dependents();
    } else {
      ptx::pdl_wait_and_launch_dependents();
    }
    run_block<Tile>(p, map, shared, memory);
    // The next kernel must not start before grad_Q's kernel has ended. The last block waits for that, and
    // this kernel ends with its last block.
    if constexpr (Tile::kTma) {
      if (p.beside_grad_q && ptx::ctaid_x() == gridDim.x - 1) ptx::pdl_wait();
    }
  } else {
    __trap();
  }
}

}  // namespace late_interaction
