// MaxSim forward on Hopper for many query rows: query rows on the M side of wgmma.
//
//                         kColumns tokens of a document, a stage of the ring
//                     +--------------------------------------------------+
//   256 query rows,   |  warpgroup 0: rows   0..127, as blocks of 64     |  -> running max (and
//   resident in       |  warpgroup 1: rows 128..255, as blocks of 64     |     winner) of each row,
//   shared memory     +--------------------------------------------------+     in registers
//
// Who owns what
//   block      one a multiprocessor, persistent: a contiguous range of (row tile, document).
//   producer   one thread of warpgroup 2, which keeps few registers: TMA loads of Q tiles and of the
//              ring's stages.
//   consumer   each of warpgroups 0 and 1: both its blocks of 64 rows against every stage. It issues
//              both products, waits for the first, folds it into the maxima while the second
//              multiplies, waits, hands the stage back, folds the second.
//   warp       32 neighbouring query rows: 16 of either block. Q is loaded in boxes of 16 rows to
//              make it so, and a query of 32 tokens is summed inside one warp.
//
// Barriers: full/empty for each stage, and for the Q tile. Each warp arrives once on an empty barrier.
#pragma once

#include "hopper.cuh"

namespace late_interaction {

template <class Type_, class Element_, int kColumns_, int kChunks_>
struct WgmmaRowsTile {
  using Type = Type_;
  using Element = Element_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kChunks = kChunks_;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kRows = 128 * kConsumers, kWarpRows = 32;
  static constexpr int kHeld = 4, kOwned = 1;
  static constexpr int kWords = (kColumns + 31) / 32;
  static constexpr uint32_t kQChunkBytes = kRows * kChunkRowBytes;
  static constexpr uint32_t kStageChunkBytes = kColumns * kChunkRowBytes;

  static __device__ __forceinline__ int slot(int warp, int lane, int o) {
    return slot_after_quad<kWarpRows, kOwned>(warp, lane, o);
  }
};

// Columns of a tile that count, 32 a word; all lanes get the same.
template <int kColumns, int kWords>
__device__ __forceinline__ bool valid_columns(uint32_t (&valid)[kWords], const ForwardArgs& p,
                                              const uint8_t* mask, int32_t t) {
  bool all = true;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    constexpr uint32_t kAll = ~uint32_t{0};
    const uint32_t whole = 32 * (w + 1) <= kColumns ? kAll : kAll >> (32 * (w + 1) - kColumns);
    const int32_t left = p.Ld - t - 32 * w;
    uint32_t bits = left >= 32 ? kAll : left <= 0 ? 0 : (1u << left) - 1;
    if (mask != nullptr) {
      const int32_t at = t + 32 * w + threadIdx.x % 32;
      bits &= __ballot_sync(kFullWarp, at < p.Ld && mask[at * p.d_mask.token_stride] != 0);
    }
    valid[w] = bits & whole;
    all = all && valid[w] == whole;
  }
  return all;
}

// Folds a block of 64 rows: the lane's two rows of it. Three instructions an element with winners (compare,
// max, select of an immediate), one without.
template <int kColumns, int kWords, bool kWinners, bool kSome>
__device__ __forceinline__ void fold_rows(const float (&c)[kColumns / 2], float* maximum, int32_t* token,
                                          int32_t first_token, const uint32_t (&valid)[kWords]) {
  const int shift = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int32_t found = -1;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float value = c[4 * n + 2 * half + e];
        if constexpr (kSome) {
          value = (valid[n / 4] >> (8 * (n % 4) + e + shift)) & 1 ? value : -INFINITY;
        }
        if constexpr (kWinners) found = value > maximum[half] ? 8 * n + e : found;
        maximum[half] = max_keeping_nan(maximum[half], value);
      }
    }
    if constexpr (kWinners) token[half] = found >= 0 ? first_token + found + shift : token[half];
  }
}

template <class Tile>
__device__ __forceinline__ void scale_columns(float (&c)[Tile::kColumns / 2], const float* inverse,
                                              int32_t left) {
#pragma unroll
  for (int n = 0; n < Tile::kColumns / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * n + 2 * (threadIdx.x % 4) + e;
      const float scale = column < left ? inverse[column] : 0.0f;
      c[4 * n + e] *= scale;
      c[4 * n + 2 + e] *= scale;
    }
  }
}

template <class Tile, bool kWinners>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_wgmma_rows(const __grid_constant__ ForwardArgs p,
                              const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t q_base = ptx::smem_address(shared);
  const uint32_t ring = q_base + Tile::kChunks * Tile::kQChunkBytes;
  constexpr uint32_t kStageBytes = Tile::kChunks * Tile::kStageChunkBytes;
  const uint32_t barriers = ring + p.stages * kStageBytes;
  const auto full = [&](int stage) { return barriers + 16 * stage; };
  const auto empty = [&](int stage) { return barriers + 16 * stage + 8; };
  const uint32_t q_full = barriers + 16 * p.stages, q_empty = q_full + 8;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < p.stages; ++stage) {
      ptx::init_barrier(full(stage), 1);
      ptx::init_barrier(empty(stage), 4 * Tile::kConsumers);
    }
    ptx::init_barrier(q_full, 1);
    ptx::init_barrier(q_empty, 4 * Tile::kConsumers);
    ptx::publish_barriers();
  }
  __syncthreads();

  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  UnitRange range = UnitRange::mine(p);
  RingPlace place;
  uint32_t q_parity = 0;

  if (warpgroup == Tile::kConsumers) {  // producer
    ptx::give_registers<24>();
    if (threadIdx.x != 128 * Tile::kConsumers) return;
    while (range.unit < range.end) {
      const RowTileUnits part = RowTileUnits::take(p, range, Tile::kRows);
      ptx::wait(q_empty, q_parity ^ 1);
      ptx::arrive_expecting(q_full, Tile::kChunks * Tile::kQChunkBytes);
      const int first = first_query_token(p, part.tile);
      for (int box = 0; box < Tile::kRows / 16; ++box) {
        // Box (warpgroup, block of 64, warp) of shared memory holds 16 rows of that warp's 32.
        const int group = box / 8, block = box / 4 % 2, of_warp = box % 4;
        const int row = group * 128 + of_warp * 32 + block * 16;
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
          ptx::copy_box(q_base + chunk * Tile::kQChunkBytes + box * 16 * kChunkRowBytes, &maps.Q, q_full,
                        chunk * kChunkDims, first + row, part.tile.query, 0);
        }
      }
      q_parity ^= 1;
      for (int32_t j = part.first_j; j < part.end_j; ++j) {
        for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) {
          ptx::wait(empty(place.stage), place.parity ^ 1);
          ptx::arrive_expecting(full(place.stage), kStageBytes);
          for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
            ptx::copy_box(ring + place.stage * kStageBytes + chunk * Tile::kStageChunkBytes, &maps.D,
                          full(place.stage), chunk * kChunkDims, t, j, part.tile.query);
          }
          place.advance(p.stages);
        }
      }
    }
    return;
  }

  // consumers
  ptx::take_registers<240>();
  while (range.unit < range.end) {
    const RowTileUnits part = RowTileUnits::take(p, range, Tile::kRows);
    OwnedRows<Tile> own;
    own.take(p, part.tile, warp);
    ptx::wait(q_full, q_parity);
    q_parity ^= 1;
    for (int32_t j = part.first_j; j < part.end_j; ++j) {
      const uint8_t* mask = document_mask(p, part.tile.query, j);
      float maximum[Tile::kHeld];
      int32_t token[Tile::kHeld];
#pragma unroll
      for (int h = 0; h < Tile::kHeld; ++h) {
        maximum[h] = -INFINITY;
        token[h] = kSentinel;
      }
      for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) {
        uint32_t valid[Tile::kWords];
        const bool all = valid_columns<Tile::kColumns>(valid, p, mask, t);
        ptx::wait(full(place.stage), place.parity);
        float c[2][Tile::kColumns / 2];
        const uint32_t d_stage = ring + place.stage * kStageBytes;
        ptx::fence_products();
#pragma unroll
        for (int block = 0; block < 2; ++block) {
#pragma unroll
          for (int k = 0; k < 4 * Tile::kChunks; ++k) {
            const uint32_t q =
                q_base + (k / 4) * Tile::kQChunkBytes + (2 * warpgroup + block) * 64 * kChunkRowBytes;
            const uint32_t d = d_stage + (k / 4) * Tile::kStageChunkBytes;
            ptx::WgmmaShape<Tile::kColumns>::template issue<typename Tile::Type>(
                c[block], ptx::matrix_of_rows(q + 32 * (k % 4)), ptx::matrix_of_rows(d + 32 * (k % 4)),
                k > 0);
          }
          ptx::commit_products();
        }
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          if (block == 0) {
            ptx::wait_products<1>();
          } else {
            ptx::wait_products<0>();
            if (lane == 0) ptx::arrive(empty(place.stage));
          }
          if (p.normalize) {
            scale_columns<Tile>(c[block], p.d_inverse + document_index(p, part.tile, j) * p.Ld + t, p.Ld - t);
          }
          if (all) {
            fold_rows<Tile::kColumns, Tile::kWords, kWinners, false>(c[block], maximum + 2 * block,
                                                                     token + 2 * block, t, valid);
          } else {
            fold_rows<Tile::kColumns, Tile::kWords, kWinners, true>(c[block], maximum + 2 * block,
                                                                    token + 2 * block, t, valid);
          }
        }
        place.advance(p.stages);
      }
      reduce_quad<Tile::kHeld, kWinners>(maximum, token);
      finish_document<typename Tile::Element, Tile, kWinners>(p, part.tile, own, warp, j, maximum, token);
    }
    if (lane == 0) ptx::arrive(q_empty);
  }
#endif
}

}  // namespace late_interaction
