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
//   loader     one thread of warpgroup 2, which keeps few registers: TMA loads of Q tiles and of the
//              ring's stages.
//   weigher    kWeighed only: the next warp of warpgroup 2. It brings what a stage's tokens count: the bits
//              of the mask, and the factors of their similarities (inverse norms).
//   consumer   each of warpgroups 0 and 1: both its blocks of 64 rows against every stage.
//   warp       32 neighbouring query rows: 16 of either block. Q is loaded in boxes of 16 rows to
//              make it so, and a query of 32 tokens is summed inside one warp.
//
// The tensor cores never wait for a fold: a consumer always has one block in flight while it folds the other.
//
//     block 0   multiply t | fold t         | multiply t+1       | fold t+1 ...
//     block 1              | multiply t     | fold t, end of document?      ...
//
// Products may not be in flight over the back edge of a loop (ptxas would serialize them all), so the body of
// the loop takes kTogether tiles, and only behind the last of them nothing of this warpgroup is in flight.
//
// A document's last tile is moved back to end with the document: a token that is seen twice changes neither
// the maximum nor, since ties keep the earlier one, the winner. So only documents shorter than a tile have
// columns to leave out (kWeighed).
//
// Barriers: full/empty for each stage, and for the Q tile. Each warp arrives once on an empty barrier.
#pragma once

#include "hopper.cuh"

namespace late_interaction {

// kMasked: some columns are left out: masked tokens, or what lies behind the end of a short document.
// kScaled: each column's similarities have a factor of their own: its token's inverse norm.
template <class Type_, class Element_, int kColumns_, int kChunks_, bool kWinners_, bool kMasked_,
          bool kScaled_>
struct WgmmaRowsTile {
  using Type = Type_;
  using Element = Element_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kChunks = kChunks_;
  static constexpr bool kWinners = kWinners_;
  static constexpr bool kMasked = kMasked_, kScaled = kScaled_, kWeighed = kMasked || kScaled;
  static constexpr int kTogether = kScaled ? 2 : 4;  // with factors, four need more registers than there are
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kRows = 128 * kConsumers, kWarpRows = 32;
  static constexpr int kHeld = 4, kOwned = 1;
  static constexpr uint32_t kQChunkBytes = kRows * kChunkRowBytes;
  static constexpr uint32_t kStageChunkBytes = kColumns * kChunkRowBytes;
  static constexpr uint32_t kStageBytes = kChunks * kStageChunkBytes;
  // Of a stage: for each lane of a quad a bit for each of its columns, then the columns' factors.
  static constexpr int kMaskWords = kMasked ? (kColumns / 4 + 23) / 24 : 0;
  static constexpr uint32_t kMaskBytes = 4 * 4 * kMaskWords;
  static constexpr uint32_t kWeightBytes = kMaskBytes + (kScaled ? 4 * kColumns : 0);

  static __device__ __forceinline__ int slot(int warp, int lane, int o) {
    return slot_after_quad<kWarpRows, kOwned>(warp, lane, o);
  }
};

// Shared memory of a block, in this order: the Q tile, the ring, what the ring's tokens count, the consumers'
// own rows (read once a document: in registers they would crowd out the accumulators), barriers.
template <class Tile>
struct RowsShared {
  uint32_t q, ring, weights, barriers;
  OwnedRows<Tile>* own;

  __device__ __forceinline__ RowsShared(uint8_t* base, int stages)
      : q(ptx::smem_address(base)),
        ring(q + Tile::kChunks * Tile::kQChunkBytes),
        weights(ring + stages * Tile::kStageBytes),
        barriers(weights + stages * Tile::kWeightBytes + 128 * Tile::kConsumers * sizeof(OwnedRows<Tile>)),
        own(reinterpret_cast<OwnedRows<Tile>*>(base + (weights - q) + stages * Tile::kWeightBytes)) {}

  __device__ __forceinline__ uint32_t stage(int i) const { return ring + i * Tile::kStageBytes; }
  __device__ __forceinline__ uint32_t weight(int i) const { return weights + i * Tile::kWeightBytes; }
  __device__ __forceinline__ uint32_t q_full() const { return barriers; }
  __device__ __forceinline__ uint32_t q_empty() const { return barriers + 8; }
  __device__ __forceinline__ uint32_t full(int i) const { return barriers + 16 + 16 * i; }
  __device__ __forceinline__ uint32_t empty(int i) const { return barriers + 24 + 16 * i; }
};

// Where a tile begins: the last one of a document is moved back to end with it.
template <class Tile>
__device__ __forceinline__ int32_t tile_begin(const ForwardArgs& p, int32_t t) {
  return max(0, min(t, p.Ld - Tile::kColumns));
}

// The best of one query row so far, over the columns that its lane sees. Columns are folded in pairs, and
// the token is known up to which of its pair it was: `first` is what the pair's first column had.
template <bool kWinners>
struct RowBest {
  float value;
  float pair;  // token of the winning pair's first column; in fp32, where it costs no integer instruction
  float first;

  __device__ __forceinline__ void clear() {
    value = -INFINITY;
    pair = -1.0f;
    first = 0.0f;
  }

  __device__ __forceinline__ int32_t token() const {
    return pair < 0.0f ? kSentinel : static_cast<int32_t>(pair) + (first == value ? 0 : 1);
  }

  // Two and a half instructions an element with winners: max, compare and max of a pair on the ALU, and two
  // predicated ones on the otherwise idle FMA pipe. One without.
  // `zero` is one that the compiler does not know, else it would make a select of the copy, on the ALU.
  __device__ __forceinline__ void fold(float a, float b, float first_token, float column, float zero) {
    if constexpr (kWinners) {
      asm("{\n.reg .pred better;\n.reg .f32 m;\n"
          "max.NaN.f32 m, %3, %4;\n"
          "setp.gt.f32 better, m, %0;\n"
          "@better add.f32 %1, %5, %6;\n"
          "@better add.f32 %2, %3, %7;\n"
          "max.NaN.f32 %0, %0, m;\n}\n"
          : "+f"(value), "+f"(pair), "+f"(first)
          : "f"(a), "f"(b), "f"(first_token), "f"(column), "f"(zero));
    } else {
      value = max_keeping_nan(max_keeping_nan(value, a), b);
    }
  }
};

// What the columns of a stage count, for one lane: bit 2 * (n % 12) + e of word n / 12 says whether column 8 * n
// + 2 * (lane % 4) + e, as the accumulators have it, is kept. (24 bits a word, tested from the low end: seven
// at a time become predicates in one instruction.)
template <class Tile>
struct ColumnWeights {
  uint32_t kept[Tile::kMasked ? Tile::kMaskWords : 1];
  float2 factor[Tile::kScaled ? Tile::kColumns / 8 : 1];  // of columns 8 * n + 2 * (lane % 4) + {0, 1}

  __device__ __forceinline__ void load(uint32_t weights) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int w = 0; w < Tile::kMaskWords; ++w) {
      kept[w] = ptx::load_shared(weights + (quad * Tile::kMaskWords + w) * 4);
    }
    if constexpr (Tile::kScaled) {
#pragma unroll
      for (int n = 0; n < Tile::kColumns / 8; ++n) {
        factor[n] = ptx::load_shared_pair(weights + Tile::kMaskBytes + quad * 8 + n * 32);
      }
    }
  }

  __device__ __forceinline__ bool keeps(int n, int e) const {
    return (kept[n / 12] & (1u << (n % 12 * 2 + e))) != 0;
  }
};

// Folds a block of 64 rows: the lane's two rows of it.
template <class Tile>
__device__ __forceinline__ void fold_block(const float (&c)[Tile::kColumns / 2], RowBest<Tile::kWinners>* rows,
                                           float token, const float* zeros,
                                           const ColumnWeights<Tile>& weights) {
  const float first_token[2] = {token + zeros[0], token + zeros[1]};
#pragma unroll
  for (int n = 0; n < Tile::kColumns / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        x[e] = c[4 * n + 2 * half + e];
        if constexpr (Tile::kScaled) x[e] *= e == 0 ? weights.factor[n].x : weights.factor[n].y;
        if constexpr (Tile::kMasked) x[e] = weights.keeps(n, e) ? x[e] : -INFINITY;
      }
      rows[half].fold(x[0], x[1], first_token[half], 8.0f * n, zeros[0]);
    }
  }
}

template <class Tile>
__device__ void load_tiles(const ForwardArgs& p, const TensorMaps& maps, const RowsShared<Tile>& at) {
  RingPlace place;
  uint32_t q_parity = 0;
  for (UnitRange range = UnitRange::mine(p); range.unit < range.end;) {
    const RowTileUnits part = RowTileUnits::take(p, range, Tile::kRows);
    ptx::wait(at.q_empty(), q_parity ^ 1);
    ptx::arrive_expecting(at.q_full(), Tile::kChunks * Tile::kQChunkBytes);
    const int first = first_query_token(p, part.tile);
    for (int box = 0; box < Tile::kRows / 16; ++box) {
      // Box (warpgroup, block of 64, warp) of shared memory holds 16 rows of that warp's 32.
      const int group = box / 8, block = box / 4 % 2, of_warp = box % 4;
      const int row = group * 128 + of_warp * 32 + block * 16;
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        ptx::copy_box(at.q + chunk * Tile::kQChunkBytes + box * 16 * kChunkRowBytes, &maps.Q, at.q_full(),
                      chunk * kChunkDims, first + row, part.tile.query, 0);
      }
    }
    q_parity ^= 1;
    for (int32_t j = part.first_j; j < part.end_j; ++j) {
      for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) {
        ptx::wait(at.empty(place.stage), place.parity ^ 1);
        ptx::arrive_expecting(at.full(place.stage), Tile::kStageBytes);
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
          ptx::copy_box(at.stage(place.stage) + chunk * Tile::kStageChunkBytes, &maps.D, at.full(place.stage),
                        chunk * kChunkDims, tile_begin<Tile>(p, t), j, part.tile.query);
        }
        place.advance(p.stages);
      }
    }
  }
}

// One warp: lane l looks at tokens l, l + 32, ... of each stage.
template <class Tile>
__device__ void weigh_tiles(const ForwardArgs& p, const RowsShared<Tile>& at) {
  constexpr int kRounds = (Tile::kColumns + 31) / 32;
  const int lane = threadIdx.x % 32;
  RingPlace place;
  for (UnitRange range = UnitRange::mine(p); range.unit < range.end;) {
    const RowTileUnits part = RowTileUnits::take(p, range, Tile::kRows);
    for (int32_t j = part.first_j; j < part.end_j; ++j) {
      const uint8_t* mask = document_mask(p, part.tile.query, j);
      const float* factors = Tile::kScaled ? p.d_inverse + document_index(p, part.tile, j) * p.Ld : nullptr;
      for (int32_t tile = 0; tile < p.Ld; tile += Tile::kColumns) {
        const int32_t begin = tile_begin<Tile>(p, tile);
        float factor[kRounds];
        uint32_t kept[Tile::kMasked ? Tile::kMaskWords : 1] = {};
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const int32_t t = begin + 32 * i + lane;
          const bool exists = t < p.Ld && 32 * i + lane < Tile::kColumns;
          if constexpr (Tile::kScaled) factor[i] = exists ? factors[t] : 0.0f;
          if constexpr (!Tile::kMasked) continue;
          const bool keep = exists && (mask == nullptr || mask[t * p.d_mask.token_stride] != 0);
          // Of each eight columns the two of this lane's quad place, moved together: eight bits.
          uint32_t mine = (__ballot_sync(kFullWarp, keep) >> (2 * (lane % 4))) & 0x03030303u;
          mine = (mine | mine >> 6 | mine >> 12 | mine >> 18) & 0xFF;
          kept[i / 3] |= mine << (8 * (i % 3));
        }
        ptx::wait(at.empty(place.stage), place.parity ^ 1);
        const uint32_t weights = at.weight(place.stage);
#pragma unroll
        for (int w = 0; w < Tile::kMaskWords; ++w) {
          if (lane < 4) ptx::store_shared(weights + (lane * Tile::kMaskWords + w) * 4, kept[w]);
        }
        if constexpr (Tile::kScaled) {
#pragma unroll
          for (int i = 0; i < kRounds; ++i) {
            const int column = 32 * i + lane;
            if (column < Tile::kColumns) {
              ptx::store_shared(weights + Tile::kMaskBytes + 4 * column, __float_as_uint(factor[i]));
            }
          }
        }
        __syncwarp();
        if (lane == 0) ptx::arrive(at.full(place.stage));
        place.advance(p.stages);
      }
    }
  }
}

template <class Tile>
struct RowsConsumer {
  static constexpr int kAccumulators = Tile::kColumns / 2;
  const ForwardArgs& p;
  const RowsShared<Tile>& at;
  uint32_t q_blocks;  // this warpgroup's rows of the Q tile
  RingPlace place;
  RowBest<Tile::kWinners> best[Tile::kHeld];
  int32_t tile, j, t;

  __device__ __forceinline__ void multiply(float (&c)[kAccumulators], int block) {
    const uint32_t q = ptx::matrix_at(q_blocks + block * 64 * kChunkRowBytes),
                   d = ptx::matrix_at(at.stage(place.stage));
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 4 * Tile::kChunks; ++k) {
      ptx::WgmmaShape<Tile::kColumns>::template issue<typename Tile::Type>(
          c, ptx::matrix_of_rows(q + (k / 4 * Tile::kQChunkBytes + k % 4 * 32) / 16),
          ptx::matrix_of_rows(d + (k / 4 * Tile::kStageChunkBytes + k % 4 * 32) / 16), k > 0);
    }
    ptx::commit_products();
  }

  __device__ __forceinline__ void finish() {
    float maximum[Tile::kHeld];
    int32_t token[Tile::kHeld];
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      maximum[h] = best[h].value;
      token[h] = best[h].token();
      best[h].clear();
    }
    reduce_quad<Tile::kHeld, Tile::kWinners>(maximum, token);
    finish_document<typename Tile::Element, Tile, Tile::kWinners>(
        p, row_tile(p, tile, Tile::kRows), at.own[threadIdx.x], threadIdx.x / 32, j, maximum, token);
  }

  template <int kTiles>
  __device__ __forceinline__ void take_tiles() {
    float c[2][kAccumulators];
    ptx::wait(at.full(place.stage), place.parity);
    multiply(c[0], 0);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      multiply(c[1], 1);
      const float first_token = static_cast<float>(tile_begin<Tile>(p, t) + 2 * (threadIdx.x % 4));
      ColumnWeights<Tile> weights;
      if constexpr (Tile::kWeighed) weights.load(at.weight(place.stage));
      ptx::wait_products<1>();
      fold_block<Tile>(c[0], best, first_token, p.zeros, weights);
      const RingPlace folded = place;
      place.advance(p.stages);
      if (i + 1 < kTiles) {
        ptx::wait(at.full(place.stage), place.parity);
        multiply(c[0], 0);
        ptx::wait_products<1>();
      } else {
        ptx::wait_products<0>();
      }
      if (threadIdx.x % 32 == 0) ptx::arrive(at.empty(folded.stage));
      fold_block<Tile>(c[1], best + 2, first_token, p.zeros + 2, weights);
      t += Tile::kColumns;
      if (t >= p.Ld) {
        finish();
        t = 0;
        ++j;
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int32_t tiles_a_document = (p.Ld + Tile::kColumns - 1) / Tile::kColumns;
    uint32_t q_parity = 0;
    const UnitRange range = UnitRange::mine(p);
    int64_t documents = range.end - range.unit;
    tile = static_cast<int32_t>(range.unit / p.N);
    j = static_cast<int32_t>(range.unit % p.N);
    for (; documents > 0; ++tile, j = 0) {
      at.own[threadIdx.x].take(p, row_tile(p, tile, Tile::kRows), threadIdx.x / 32);
      ptx::wait(at.q_full(), q_parity);
      q_parity ^= 1;
      t = 0;
#pragma unroll
      for (int h = 0; h < Tile::kHeld; ++h) best[h].clear();
      const int64_t here = min(p.N - j, documents);
      documents -= here;
      int64_t left = here * tiles_a_document;
      for (; left >= Tile::kTogether; left -= Tile::kTogether) take_tiles<Tile::kTogether>();
      for (; left > 0; --left) take_tiles<1>();
      if (threadIdx.x % 32 == 0) ptx::arrive(at.q_empty());
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_wgmma_rows(const __grid_constant__ ForwardArgs p,
                              const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const RowsShared<Tile> at(shared, p.stages);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < p.stages; ++stage) {
      ptx::init_barrier(at.full(stage), Tile::kWeighed ? 2 : 1);
      ptx::init_barrier(at.empty(stage), 4 * Tile::kConsumers);
    }
    ptx::init_barrier(at.q_full(), 1);
    ptx::init_barrier(at.q_empty(), 4 * Tile::kConsumers);
    ptx::publish_barriers();
  }
  __syncthreads();

  // From lane 0: so the compiler knows that a warp takes one branch, and keeps addresses in uniform registers.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == Tile::kConsumers) {
    ptx::give_registers<40>();
    const int helper = threadIdx.x - 128 * Tile::kConsumers;
    if (helper == 0) load_tiles<Tile>(p, maps, at);
    if (Tile::kWeighed && helper / 32 == 1) weigh_tiles<Tile>(p, at);
  } else {
    ptx::take_registers<232>();
    RowsConsumer<Tile> consumer{p, at, at.q + 2 * warpgroup * 64 * kChunkRowBytes};
    consumer.run();
  }
#endif
}

}  // namespace late_interaction
