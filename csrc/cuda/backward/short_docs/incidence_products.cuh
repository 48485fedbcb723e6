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
//   block     kOwnedRows rows; the blocks of a cluster have the same ones, each with a range of the units
//   unit      up to 16 * kSteps tokens of an item, filled up with zeros
//   producer  a warp that loads units' embeddings (TMA), and three that take turns to look up winners and
//             gradients for a stage
//   consumer  three warpgroups, 64 rows each
//
// At the end sums go to shared memory, and the blocks of a cluster add them up in the order of their ranks,
// each a share of the rows: the same bits in every run. 0 times a number that is not finite leaves a NaN, so
// sums that are not finite are computed again, one winner after the other.
#pragma once

#include "../../../plan/short_docs_backward.h"
#include "../../primitives/pipeline_state.cuh"
#include "../../primitives/row_vector.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/ld_cluster.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/pdl.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "args.h"
#include "incidence_words.cuh"

namespace late_interaction {

inline constexpr int kIncidenceThreads = 512, kIncidenceConsumers = 384, kLookUpWarps = 3;

template <class T>
struct IncidenceWgmma;
template <>
struct IncidenceWgmma<__nv_bfloat16> : std::type_identity<ptx::WgmmaBf16> {};
template <>
struct IncidenceWgmma<__half> : std::type_identity<ptx::WgmmaFp16> {};

template <class T_, bool kGradQ_, int kSteps_, int kDims_>
struct IncidenceTile {
  using T = T_;
  static constexpr bool kGradQ = kGradQ_;
  // Consumers read the winners of the next unit while they multiply this one, where registers allow.
  static constexpr bool kAhead = kSteps_ == 1;
  static constexpr int kSteps = kSteps_, kDims = kDims_, kColumns = (kDims + 63) / 64;
  static constexpr int kUnitRows = 16 * kSteps, kUnits = kIncidenceStageRows / kUnitRows,
                       kStageRows = kUnits * kUnitRows;
  static constexpr int kColumnBytes = kStageRows * 128, kTileBytes = kColumns * kColumnBytes;
  static constexpr int kSumWidth = kDims + 4;
};

template <class Tile>
struct IncidenceShared {
  uint32_t ring, barriers;
  int stages;
  __device__ __forceinline__ uint32_t tile(int stage) const { return ring + stage * Tile::kTileBytes; }
  __device__ __forceinline__ uint32_t side(int stage) const {
    return ring + stages * Tile::kTileBytes + stage * kIncidenceSideBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 16 * stage + 8; }
};

// One thread: the embeddings of the units [unit, end).
template <class Tile>
__device__ __forceinline__ void load_units(const IncidenceArgs& p, const CUtensorMap& map,
                                           const IncidenceShared<Tile>& memory, int32_t unit, int32_t end,
                                           int first_dim) {
  PipelineState at;
  for (; unit < end; unit += Tile::kUnits) {
    ptx::mbarrier_wait_parity(memory.empty(at.stage), at.parity ^ 1);
    const int units = min(Tile::kUnits, end - unit);
    ptx::mbarrier_arrive_expect_tx(memory.full(at.stage), units * Tile::kColumns * Tile::kUnitRows * 128);
    for (int u = 0; u < units; ++u) {
      const int32_t item = p.by_units.quotient(unit + u),
                    first = (unit + u - item * p.units) * Tile::kUnitRows;
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c) {
        ptx::tma_load_4d(memory.tile(at.stage) + c * Tile::kColumnBytes + u * Tile::kUnitRows * 128, &map,
                         memory.full(at.stage), first_dim + 64 * c, first, item, 0);
      }
    }
    at.advance(memory.stages);
  }
}

// Winners and gradients of a stage, looked up by a warp: it holds a batch of them before it has the stage to
// put them in, so that several loads are under way and none waits for a consumer.

// grad_D: codes [unit][document][row] in 16 bits, then gradients [unit][document].
template <class Tile>
struct RowLookUp {
  static constexpr int kPairs = Tile::kUnitRows / 2, kPlaces = 32 / kPairs, kBatch = 4, kGrads = Tile::kUnits;
  const IncidenceArgs& p;
  int32_t first_j;
  uint32_t words[kBatch];
  float grads[kGrads];

  __device__ __forceinline__ int places() const { return Tile::kUnits * p.block_docs; }

  // Two neighbouring rows of a unit with a document, at each of the lane's places from `first` on.
  __device__ __forceinline__ void load_words(int32_t unit, int32_t end, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int place = first + k * kPlaces + lane / kPairs;
      const int u = p.by_docs.quotient(place), doc = place - u * p.block_docs;
      const int32_t i = p.by_units.quotient(unit + u);
      const int s = (unit + u - i * p.units) * Tile::kUnitRows + 2 * (lane % kPairs);
      const bool meets = place < places() && unit + u < end && first_j + doc < p.N;
      const auto* from =
          static_cast<const uint16_t*>(p.winners) + (i * p.winners_stride + first_j + doc) * p.Lq + s;
      if (p.winners_at_once > 1) {
        words[k] = meets && s < p.Lq ? *reinterpret_cast<const uint32_t*>(from) : ~0u;
      } else {
        const uint32_t low = meets && s < p.Lq ? from[0] : kNoWinner;
        const uint32_t high = meets && s + 1 < p.Lq ? from[1] : kNoWinner;
        words[k] = low | high << 16;
      }
    }
  }

  __device__ __forceinline__ void put_words(uint32_t side, int first) const {
    const int lane = threadIdx.x % 32;
    if (lane / kPairs >= kPlaces) return;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int place = first + k * kPlaces + lane / kPairs;
      if (place < places()) {
        ptx::st_shared(side + (place * kPairs + lane % kPairs) * 4, words[k] | pair_of(token_code(0)));
      }
    }
  }

  __device__ __forceinline__ void load(int32_t unit, int32_t end) {
    load_words(unit, end, 0);
#pragma unroll
    for (int k = 0; k < kGrads; ++k) {
      const int place = 32 * k + threadIdx.x % 32;
      const int u = p.by_docs.quotient(place), doc = place - u * p.block_docs;
      const int32_t i = p.by_units.quotient(unit + u);
      const bool meets = place < places() && unit + u < end && first_j + doc < p.N;
      grads[k] = meets ? static_cast<const float*>(
                             p.grad)[i * p.grad_query_stride + (first_j + doc) * p.grad_item_stride]
                       : 0.0f;
    }
  }

  __device__ __forceinline__ void put(int32_t unit, int32_t end, uint32_t side) {
#pragma unroll
    for (int k = 0; k < kGrads; ++k) {
      const int place = 32 * k + threadIdx.x % 32;
      if (place >= places()) break;
      ptx::st_shared(side + (places() * kPairs + place) * 4, __float_as_uint(grads[k]));
    }
    put_words(side, 0);
    for (int first = kBatch * kPlaces; first < places(); first += kBatch * kPlaces) {
      load_words(unit, end, first);
      put_words(side, first);
    }
  }
};

// grad_Q: (code twice, gradient) [unit][owned row].
template <class Tile>
struct WinnerLookUp {
  static constexpr int kLaneRows = kIncidenceRows / 32, kBatch = Tile::kUnits == 2 ? 2 : 1;
  const IncidenceArgs& p;
  int64_t first_row;
  uint32_t winners[kBatch][kLaneRows];
  float grads[kBatch][kLaneRows];

  __device__ __forceinline__ void load_batch(int32_t unit, int32_t end) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const auto row = static_cast<uint32_t>(first_row + 32 * r + threadIdx.x % 32);
      const bool exists = row < static_cast<uint32_t>(p.rows);
      const int64_t i = exists ? p.by_Lq.quotient(row) : 0, s = exists ? row - i * p.Lq : 0;
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int64_t j = unit + u;
        const bool meets = exists && j < end;
        winners[u][r] = meets ? static_cast<const uint16_t*>(p.winners)[(i * p.winners_stride + j) * p.Lq + s]
                              : kNoWinner;
        grads[u][r] =
            meets ? static_cast<const float*>(p.grad)[i * p.grad_query_stride + j * p.grad_item_stride]
                  : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void put_batch(uint32_t side) const {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        const uint32_t at = side + (u * kIncidenceRows + 32 * r + threadIdx.x % 32) * 8;
        ptx::st_shared_v2_b32(at, {pair_of(token_code(winners[u][r])), __float_as_uint(grads[u][r])});
      }
    }
  }

  __device__ __forceinline__ void load(int32_t unit, int32_t end) { load_batch(unit, end); }

  __device__ __forceinline__ void put(int32_t unit, int32_t end, uint32_t side) {
    put_batch(side);
#pragma unroll 1
    for (int u = kBatch; u < Tile::kUnits; u += kBatch) {
      load_batch(unit + u, end);
      put_batch(side + u * kIncidenceRows * 8);
    }
  }
};

// A warp's turns among those that look up: every kLookUpWarps-th stage, from `turn` on.
template <class Tile, class LookUp>
__device__ __forceinline__ void look_up(const IncidenceArgs& p, const IncidenceShared<Tile>& memory,
                                        LookUp found, int turn, int32_t unit, int32_t end) {
  PipelineState at;
  for (int skipped = 0; skipped < turn; ++skipped) at.advance(p.stages);
  for (unit += turn * Tile::kUnits; unit < end; unit += kLookUpWarps * Tile::kUnits) {
    found.load(unit, end);
    ptx::mbarrier_wait_parity(memory.empty(at.stage), at.parity ^ 1);
    found.put(unit, end, memory.side(at.stage));
    ptx::mbarrier_arrive(memory.full(at.stage));
    for (int skipped = 0; skipped < kLookUpWarps; ++skipped) at.advance(p.stages);
  }
}

// Products of a warpgroup's rows with a stage's units, added to its sums.
template <class Tile>
struct IncidenceSums {
  using Words = IncidenceWords<typename Tile::T>;
  static constexpr int kRegs = Tile::kDims / 2;
  float x[kRegs];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int k = 0; k < kRegs; ++k) x[k] = 0.0f;
  }

  // Adds the products of a unit, and calls `meanwhile` while they are under way.
  template <class F>
  __device__ __forceinline__ void add(const uint32_t (&a)[Tile::kSteps][4], float low, float high,
                                      uint32_t tile, F meanwhile) {
    float products[kRegs];
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Tile::kSteps; ++k) {
      ptx::RegisterWgmmaShape<Tile::kDims>::template issue<typename IncidenceWgmma<typename Tile::T>::type>(
          products, a[k], ptx::smem_desc_mn_major(tile + k * 2048, Tile::kColumnBytes), k > 0);
    }
    ptx::wgmma_commit();
    meanwhile();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int k = 0; k < kRegs; ++k) asm volatile("" : "+f"(products[k])::"memory");
#pragma unroll
    for (int k = 0; k < kRegs; ++k) x[k] = fmaf(k & 2 ? high : low, products[k], x[k]);
  }

  __device__ __forceinline__ void put(float* to) const {
    const int lane = threadIdx.x % 32;
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

// The winners and the gradient that a unit holds for one owned row. Winners are codes, in pairs: the row's
// own (grad_Q), or those of the unit's query rows (grad_D).
template <class Tile>
struct RowWinners {
  uint32_t codes[Tile::kGradQ ? 1 : 2 * Tile::kSteps];
  float grad;
};

// A row that a consumer lane owns: its token, and where a stage holds its winners and its gradient.
template <class Tile>
struct OwnedRow {
  using Words = IncidenceWords<typename Tile::T>;
  uint32_t token;  // grad_D: the row's token, twice; none: a NaN, which equals nothing
  uint32_t at;     // in the side of a stage
  uint32_t grad;

  __device__ __forceinline__ OwnedRow(const IncidenceArgs& p, int row) {
    if constexpr (Tile::kGradQ) {
      token = pair_of(0x4000) + 2 * (threadIdx.x % 4) * 0x00010001 + 0x00010000;
      at = row * 8;
      grad = at + 4;
    } else {
      const int doc = row / p.Ld, t = row - doc * p.Ld;
      const bool exists = doc < p.block_docs;
      token = exists ? pair_of(token_code(t)) : 0xFFFFFFFF;
      at = (exists ? doc : 0) * Tile::kUnitRows * 2 + threadIdx.x % 4 * 4;
      grad = Tile::kUnits * p.block_docs * Tile::kUnitRows * 2 + (exists ? doc : 0) * 4;
    }
  }

  // Reads what a unit of a stage has for the row.
  __device__ __forceinline__ void read(const IncidenceArgs& p, uint32_t side, int u,
                                       RowWinners<Tile>& winners) const {
    if constexpr (Tile::kGradQ) {
      const uint2 entry = ptx::ld_shared_v2_b32(side + at + u * kIncidenceRows * 8);
      winners.codes[0] = entry.x;
      winners.grad = __uint_as_float(entry.y);
    } else {
      const uint32_t from = side + at + u * p.block_docs * Tile::kUnitRows * 2;
      winners.grad = __uint_as_float(ptx::ld_shared(side + grad + u * p.block_docs * 4));
#pragma unroll
      for (int k = 0; k < 2 * Tile::kSteps; ++k) winners.codes[k] = ptx::ld_shared(from + 16 * k);
    }
  }

  // The row's words of operand A: for each step those of tokens 2c, 2c + 1 and of 2c + 8, 2c + 9.
  __device__ __forceinline__ void compare(const RowWinners<Tile>& winners, int half,
                                          uint32_t (&a)[Tile::kSteps][4]) const {
#pragma unroll
    for (int k = 0; k < 2 * Tile::kSteps; ++k) {
      a[k / 2][half + k % 2 * 2] = Tile::kGradQ ? Words::equal(winners.codes[0], token + k * 0x00080008)
                                                : Words::equal(winners.codes[k], token);
    }
  }
};

template <class Tile>
__device__ __forceinline__ void consume(const IncidenceArgs& p, const IncidenceShared<Tile>& memory,
                                        int32_t unit, int32_t end, IncidenceSums<Tile>& sums) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const OwnedRow<Tile> low(p, row), high(p, row + 8);
  PipelineState at;
  for (; unit < end; unit += Tile::kUnits) {
    ptx::mbarrier_wait_parity(memory.full(at.stage), at.parity);
    const int units = min(Tile::kUnits, end - unit);
    const uint32_t side = memory.side(at.stage);
    RowWinners<Tile> low_next, high_next;
    low.read(p, side, 0, low_next);
    high.read(p, side, 0, high_next);
#pragma unroll 1
    for (int u = 0; u < units; ++u) {
      uint32_t a[Tile::kSteps][4];
      if (!Tile::kAhead) {
        low.read(p, side, u, low_next);
        high.read(p, side, u, high_next);
      }
      low.compare(low_next, 0, a);
      high.compare(high_next, 1, a);
      const int ahead = min(u + 1, units - 1);
      sums.add(a, low_next.grad, high_next.grad, memory.tile(at.stage) + u * Tile::kUnitRows * 128, [&] {
        if (!Tile::kAhead) return;
        low.read(p, side, ahead, low_next);
        high.read(p, side, ahead, high_next);
      });
    }
    ptx::mbarrier_arrive(memory.empty(at.stage));
    at.advance(memory.stages);
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
  for (int v = rows * vecs * static_cast<int>(rank) / p.cluster + threadIdx.x; v < end;
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
  const uint32_t part = blockIdx.x / p.cluster, rank = blockIdx.x % p.cluster;
  const uint32_t tile = part / p.slices;
  const int first_dim = static_cast<int>(part % p.slices) * Tile::kDims;
  const auto begin = static_cast<int32_t>(p.all_units * rank / p.cluster);
  const auto end = static_cast<int32_t>(p.all_units * (rank + 1) / p.cluster);
  const int64_t first_row = int64_t{tile} * p.block_rows;
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      ptx::mbarrier_init(memory.full(s), 1 + 32);
      ptx::mbarrier_init(memory.empty(s), kIncidenceConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::pdl_wait_and_launch_dependents();
  auto* shared_sums = reinterpret_cast<float*>(shared);  // in place of the ring
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp >= kIncidenceConsumers / 32) {
    ptx::setmaxnreg_dec<56>();
    const int turn = warp - kIncidenceConsumers / 32 - 1;
    if (turn < 0) {
      if (threadIdx.x % 32 == 0) load_units<Tile>(p, map, memory, begin, end, first_dim);
    } else if constexpr (Tile::kGradQ) {
      look_up<Tile>(p, memory, WinnerLookUp<Tile>{p, first_row}, turn, begin, end);
    } else {
      const auto first_j = static_cast<int32_t>(tile * p.block_docs);
      look_up<Tile>(p, memory, RowLookUp<Tile>{p, first_j}, turn, begin, end);
    }
    __syncwarp();
    ptx::cluster_sync();
    ptx::cluster_sync();
  } else {
    ptx::setmaxnreg_inc<152>();
    IncidenceSums<Tile> sums;
    sums.clear();
    consume<Tile>(p, memory, begin, end, sums);
    ptx::named_barrier_sync(1, kIncidenceConsumers);  // all have left the ring
    sums.put(shared_sums + warp * 16 * Tile::kSumWidth);
    ptx::cluster_sync();
    write_rows<Tile>(p, memory.ring, rank, first_row, first_dim);
    ptx::cluster_sync();  // no block leaves while another reads its sums
  }
#endif
}

}  // namespace late_interaction
