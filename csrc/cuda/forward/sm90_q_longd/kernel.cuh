// MaxSim forward on Hopper for many query rows with long embeddings, which go by in chunks of 128 bytes.
//
//                   kColumns tokens of a document, a chunk of their embeddings a stage of the ring
//                 +--------------------------------------------------+
//   256 rows of   |  warpgroup 0: rows   0..127, as two blocks of 64 |  += products of this chunk; behind
//   Q, a chunk    |  warpgroup 1: rows 128..255, as two blocks of 64 |  the last one: running max (and
//   of them       +--------------------------------------------------+  winner) of each row, in registers
//
// Who owns what
//   cluster    one or two blocks, persistent. Two take neighbouring documents against the same query
//              rows, and each brings half of a chunk of the rows, for both. (256 rows and 152 tokens a
//              chunk would be 42 bytes a clock and multiprocessor, more than the L2 cache gives; so they
//              are 30.)
//   block      a document at a time. Rows that are short enough stay in shared memory, and the ring brings
//              tokens alone; a block then has no partner, and walks the documents of one row tile.
//   producer   one thread of warpgroup 2, which keeps few registers: all TMA loads.
//   token-scale producer
//              kMaskedOrScaled only: the next warp of warpgroup 2. It writes the limits (masks) and scales
//              (inverse norms, or quantization scales) of a tile's tokens, in a ring of its own.
//   consumer   each of warpgroups 0 and 1: both its blocks of 64 rows against every stage.
//   warp       32 neighbouring query rows. A block of 64 takes every other group of eight rows of its
//              warpgroup's 128, so that the 16 rows that a warp has of either block lie together.
//
// The accumulators hold one tile, so nothing of a warpgroup is in flight while it folds its second block. The
// other warpgroup then has the tensor cores to itself: it starts a chunk later, and stays behind, since who
// folds loses of its lead what the other gains, and gets it back when that one folds. A document is finished
// under the wgmma of the next one's first chunk.
//
//     warpgroup 0   multiply ... | multiply last | fold | multiply first, finish | multiply ...
//     warpgroup 1   multiply ...       | multiply last          | fold | multiply first, finish | ...
//
// fp32 is rounded to TF32 on its way through TMA (see runtime/tma_descriptors.cpp).
//
// A document's last tile is moved back to end with the document: a token that is seen twice changes neither
// the maximum nor, since ties keep the earlier one, the winner. So only documents shorter than a tile have
// columns to leave out for that.
//
// Barriers: full/empty for each stage, for the resident Q tile, and for token masks and scales. The empty
// barrier of a stage hears from each consumer warp of the whole cluster, since the next copies go to all its
// blocks. Of token masks and scales each lane says itself that it has written or read it.
#pragma once

#include "../../primitives/argmax_fold.cuh"
#include "../sm90_pipeline.cuh"

namespace late_interaction {

// kMaskedOrScaled: some columns are left out (masked tokens, or what lies behind the end of a short
// document), or columns have scales of their own (inverse norms, scales).
template <class Type_, class Element_, int kColumns_, bool kWinners_, bool kMaskedOrScaled_>
struct Sm90QLongDTile {
  using Type = Type_;
  using Element = Element_;
  using Accumulator = typename Type::Accumulator;
  static constexpr int kColumns = kColumns_;
  static constexpr bool kWinners = kWinners_, kMaskedOrScaled = kMaskedOrScaled_, kPacked = false;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kRows = 128 * kConsumers, kWarpRows = 32;
  static constexpr int kHeld = 4, kLaneRows = 1;
  static constexpr int kKChunkElements = kKChunkBytes / sizeof(Element);
  static constexpr uint32_t kQBytes = kRows * kKChunkBytes, kDBytes = kColumns * kKChunkBytes;  // a chunk
  static constexpr int kCopies = 1;  // of what a stage receives: fp32_3xtf32.cuh has two

  // A lane holds rows 8 * block + 16 * half + lane / 4 of its warp's, in the order of 2 * block + half.
  static __device__ __forceinline__ int slot(int warp, int lane, int) {
    const int held = lane % 4;
    return warp * kWarpRows + held % 2 * 16 + held / 2 * 8 + lane / 4;
  }
};

// What a block does next: a document against a row tile.
struct LongDWorkTile {
  int32_t tile, j;
  bool counts;  // else the cluster's last document was the other block's, and this one only keeps step
};

// A cluster's work tiles. Resident rows: a contiguous range, documents innermost. Streamed ones: every k-th
// work tile, so that what all clusters work on at a time is some row tiles by some documents, and L2 serves
// most. They lie in shared memory, and are read anew each time: a consumer has no registers to keep them in.
struct LongDScheduler {
  static constexpr uint32_t kBand = 8;  // row tiles
  static constexpr uint32_t kBytes = 32;
  uint32_t at;

  __device__ __forceinline__ uint32_t first() const { return ptx::ld_shared(at); }
  __device__ __forceinline__ uint32_t end() const { return ptx::ld_shared(at + 4); }
  __device__ __forceinline__ uint32_t step() const { return ptx::ld_shared(at + 8); }
  __device__ __forceinline__ uint32_t groups() const { return ptx::ld_shared(at + 12); }

  __device__ __forceinline__ void deal(const ForwardArgs& p) const {
    const uint32_t clusters = gridDim.x / p.cluster, mine = blockIdx.x / p.cluster;
    ptx::st_shared(at, p.stream_q ? mine : static_cast<uint32_t>(p.work_tiles * mine / clusters));
    ptx::st_shared(at + 4,
                   static_cast<uint32_t>(p.stream_q ? p.work_tiles : p.work_tiles * (mine + 1) / clusters));
    ptx::st_shared(at + 8, p.stream_q ? clusters : 1);
    ptx::st_shared(at + 12, static_cast<uint32_t>((p.N + p.cluster - 1) / p.cluster));
  }

  __device__ __forceinline__ LongDWorkTile operator()(const ForwardArgs& p, uint32_t work_tile) const {
    const uint32_t groups = this->groups();
    uint32_t tile, group;
    if (p.stream_q) {
      const uint32_t band = work_tile / (kBand * groups), in_band = work_tile - band * kBand * groups;
      const uint32_t width = min(kBand, static_cast<uint32_t>(p.row_tiles) - band * kBand);
      group = in_band / width;
      tile = band * kBand + in_band - group * width;
    } else {
      tile = work_tile / groups;
      group = work_tile - tile * groups;
    }
    const int32_t j = static_cast<int32_t>(group * p.cluster + ptx::cluster_ctarank());
    const int32_t last = static_cast<int32_t>(p.N) - 1;
    return {static_cast<int32_t>(tile), min(j, last), j <= last};
  }
};

// The token mask and scales of a tile, as the token-scale producer writes it: of each column a limit and a
// scale, and how much of that there is to apply.
template <class Tile>
struct LongDTokenScales {
  static constexpr uint32_t kLimits = 0, kScales = 4 * Tile::kColumns, kKind = 2 * kScales;
  static constexpr uint32_t kBytes = Tile::kMaskedOrScaled ? kKind + 16 : 0;
  static constexpr int kStages = 2;

  // A limit of minus infinity leaves a column out, whatever its token holds; the others are plus infinity,
  // which makes an infinity of NaN: finish_document then looks at the row itself. One instruction either way.
  enum Kind : uint32_t { kPlain, kLimited, kScaled, kLimitedAndScaled };

  static constexpr bool limits(uint32_t kind) { return kind == kLimited || kind == kLimitedAndScaled; }
  static constexpr bool scales(uint32_t kind) { return kind == kScaled || kind == kLimitedAndScaled; }
};

// Shared memory of a block, in this order: the Q tile where it is resident, the ring, token masks and scales,
// the block's work tiles, barriers. A stage of the ring: tokens, and behind them query rows where those are
// not resident.
template <class Tile>
struct LongDShared {
  uint32_t q, ring, stage_bytes, token_scales, barriers;
  int stages;
  LongDScheduler scheduler;

  __device__ __forceinline__ LongDShared(const uint8_t* base, const ForwardArgs& p) {
    stages = p.stages;
    stage_bytes = Tile::kCopies * (Tile::kDBytes + (p.stream_q ? Tile::kQBytes : 0));
    q = ptx::smem_address(base);
    ring = q + (p.stream_q ? 0 : p.k_chunks * Tile::kQBytes);
    token_scales = ring + stages * stage_bytes;
    scheduler.at = token_scales + LongDTokenScales<Tile>::kStages * LongDTokenScales<Tile>::kBytes;
    barriers = scheduler.at + LongDScheduler::kBytes;
  }

  __device__ __forceinline__ uint32_t stage(int i) const { return ring + i * stage_bytes; }
  __device__ __forceinline__ uint32_t token_scale_stage(int i) const {
    return token_scales + i * LongDTokenScales<Tile>::kBytes;
  }
  __device__ __forceinline__ uint32_t q_full() const { return barriers; }
  __device__ __forceinline__ uint32_t q_empty() const { return barriers + 8; }
  __device__ __forceinline__ uint32_t token_scale_full(int i) const { return barriers + 16 + 16 * i; }
  __device__ __forceinline__ uint32_t token_scale_empty(int i) const { return barriers + 24 + 16 * i; }
  __device__ __forceinline__ uint32_t full(int i) const { return barriers + 48 + 16 * i; }
  __device__ __forceinline__ uint32_t empty(int i) const { return barriers + 56 + 16 * i; }
  __device__ __forceinline__ uint32_t cut(int i) const { return barriers + 48 + 16 * stages + 8 * i; }
};

// Where a tile begins: the last one of a document is moved back to end with it.
template <class Tile>
__device__ __forceinline__ int32_t long_d_tile_begin(const ForwardArgs& p, int32_t t) {
  return max(0, min(t, p.Ld - Tile::kColumns));
}

// Folds a block of 64 rows: the lane's two rows of it.
template <class Tile, uint32_t kKind>
__device__ __forceinline__ void fold_columns(const typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                             RowBest<Tile::kWinners>* rows, float token, const float* zeros,
                                             uint32_t token_scales) {
  using TokenScales = LongDTokenScales<Tile>;
  const float first_token[2] = {token + zeros[0], token + zeros[1]};
#pragma unroll
  for (int n = 0; n < Tile::kColumns / 8; ++n) {
    float2 limit, scale;
    if constexpr (TokenScales::limits(kKind)) {
      limit = ptx::ld_shared_v2_f32(token_scales + TokenScales::kLimits + n * 32);
    }
    if constexpr (TokenScales::scales(kKind)) {
      scale = ptx::ld_shared_v2_f32(token_scales + TokenScales::kScales + n * 32);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // (Sums of int8 products as floats, which hold 24 bits: all of one up to d = 1024.)
      auto a = static_cast<float>(c[4 * n + 2 * half]), b = static_cast<float>(c[4 * n + 2 * half + 1]);
      if constexpr (TokenScales::scales(kKind)) {
        a *= scale.x;
        b *= scale.y;
      }
      if constexpr (TokenScales::limits(kKind)) {
        a = fminf(a, limit.x);
        b = fminf(b, limit.y);
      }
      rows[half].fold(a, b, first_token[half], 8.0f * n, zeros[0]);
    }
  }
}

template <class Tile>
__device__ __forceinline__ void fold_tile(const typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                          RowBest<Tile::kWinners>* rows, float token, const float* zeros,
                                          uint32_t token_scales, uint32_t kind) {
  using TokenScales = LongDTokenScales<Tile>;
  if (kind == TokenScales::kPlain) {
    fold_columns<Tile, TokenScales::kPlain>(c, rows, token, zeros, token_scales);
  } else if constexpr (Tile::kMaskedOrScaled) {
    if (kind == TokenScales::kLimited) {
      fold_columns<Tile, TokenScales::kLimited>(c, rows, token, zeros, token_scales);
    } else if (kind == TokenScales::kScaled) {
      fold_columns<Tile, TokenScales::kScaled>(c, rows, token, zeros, token_scales);
    } else {
      fold_columns<Tile, TokenScales::kLimitedAndScaled>(c, rows, token, zeros, token_scales);
    }
  }
}

template <class Tile>
struct LongDProducer {
  const ForwardArgs& p;
  const TensorMaps& maps;
  const LongDShared<Tile>& at;

  // Chunk `chunk` of query rows to `to`: all of them, or of two blocks each half for both.
  __device__ __forceinline__ void copy_rows(uint32_t to, uint32_t full, const RowTile& tile, int k_chunk) {
    const int first = first_query_token(p, tile), dim = k_chunk * Tile::kKChunkElements;
    const auto place = [&](int half) { return to + half * 128 * kKChunkBytes; };
    if (p.cluster == 2) {
      const uint32_t rank = ptx::cluster_ctarank();
      ptx::tma_load_4d_multicast(3, place(rank), &maps.Q, full, dim, first + 128 * rank, tile.query, 0);
    } else {
      for (int half = 0; half < Tile::kRows / 128; ++half) {
        ptx::tma_load_4d(place(half), &maps.Q, full, dim, first + 128 * half, tile.query, 0);
      }
    }
  }

  __device__ void run() {
    PipelineState place;
    uint32_t q_parity = 0;
    int32_t resident = -1;
    for (uint32_t next = at.scheduler.first(); next < at.scheduler.end(); next += at.scheduler.step()) {
      const LongDWorkTile work_tile = at.scheduler(p, next);
      const RowTile tile = row_tile(p, work_tile.tile, Tile::kRows);
      if (!p.stream_q && work_tile.tile != resident) {
        resident = work_tile.tile;
        ptx::mbarrier_wait_parity(at.q_empty(), q_parity ^ 1);
        q_parity ^= 1;
        ptx::mbarrier_arrive_expect_tx(at.q_full(), p.k_chunks * Tile::kQBytes);
        for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk) {
          copy_rows(at.q + k_chunk * Tile::kQBytes, at.q_full(), tile, k_chunk);
        }
      }
      for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) {
        const int32_t begin = long_d_tile_begin<Tile>(p, t);
        for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk) {
          const uint32_t to = at.stage(place.stage), full = at.full(place.stage);
          ptx::mbarrier_wait_parity(at.empty(place.stage), place.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(full, at.stage_bytes / Tile::kCopies);
          if (p.stream_q) copy_rows(to + Tile::kDBytes, full, tile, k_chunk);
          ptx::tma_load_4d(to, &maps.D, full, k_chunk * Tile::kKChunkElements, begin, work_tile.j,
                           tile.query);
          place.advance(p.stages);
        }
      }
    }
  }
};

// One warp: lane l looks at tokens l, l + 32, ... of each tile.
template <class Tile>
__device__ void produce_token_scales(const ForwardArgs& p, const LongDShared<Tile>& at) {
  using TokenScales = LongDTokenScales<Tile>;
  constexpr int kRounds = (Tile::kColumns + 31) / 32;
  const int lane = threadIdx.x % 32;
  PipelineState place;
  for (uint32_t next = at.scheduler.first(); next < at.scheduler.end(); next += at.scheduler.step()) {
    const LongDWorkTile work_tile = at.scheduler(p, next);
    const RowTile tile = row_tile(p, work_tile.tile, Tile::kRows);
    const uint8_t* mask = document_mask(p, tile.query, work_tile.j);
    const float* doc_scales = document_scales(p.d_scales, tile.query, work_tile.j);
    for (int32_t first = 0; first < p.Ld; first += Tile::kColumns) {
      const int32_t begin = long_d_tile_begin<Tile>(p, first);
      float scale[kRounds];
      bool keep[kRounds], all = true, ones = true;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int column = 32 * i + lane;
        const int32_t t = begin + column;
        keep[i] = t < p.Ld && (mask == nullptr || mask[t * p.d_mask.token_stride] != 0);
        scale[i] =
            t < p.Ld && doc_scales != nullptr ? usable_scale(doc_scales[t * p.d_scales.token_stride]) : 1.0f;
        all = all && (keep[i] || column >= Tile::kColumns);
        ones = ones && scale[i] == 1.0f;
      }
      all = __all_sync(kFullWarp, all);
      ones = __all_sync(kFullWarp, ones);
      ptx::mbarrier_wait_parity(at.token_scale_empty(place.stage), place.parity ^ 1);
      const uint32_t token_scales = at.token_scale_stage(place.stage);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int column = 32 * i + lane;
        if (column < Tile::kColumns) {
          const float limit = keep[i] ? INFINITY : -INFINITY;
          ptx::st_shared(token_scales + TokenScales::kLimits + column * 4, __float_as_uint(limit));
          ptx::st_shared(token_scales + TokenScales::kScales + column * 4, __float_as_uint(scale[i]));
        }
      }
      if (lane == 0) {
        ptx::st_shared(token_scales + TokenScales::kKind,
                       all    ? ones ? TokenScales::kPlain : TokenScales::kScaled
                       : ones ? TokenScales::kLimited
                              : TokenScales::kLimitedAndScaled);
      }
      ptx::mbarrier_arrive(at.token_scale_full(place.stage));
      place.advance(TokenScales::kStages);
    }
  }
}

// A consumer learns what the next tile's columns count: where it stands, for this lane, and of which kind it
// is. Even where that is always the plain one the compiler must not know it: a fold without a branch before
// it would be moved behind the wait for the wgmma that it is to overlap.
template <class Tile>
__device__ __forceinline__ uint32_t take_token_scales(const LongDShared<Tile>& at, const PipelineState& place,
                                                      float zero, uint32_t& token_scales) {
  token_scales = at.token_scale_stage(place.stage) + threadIdx.x % 4 * 8;
  if constexpr (!Tile::kMaskedOrScaled) return __float_as_uint(zero);
  ptx::mbarrier_wait_parity(at.token_scale_full(place.stage), place.parity);
  return ptx::ld_shared(at.token_scale_stage(place.stage) + LongDTokenScales<Tile>::kKind);
}

template <class Tile>
__device__ __forceinline__ void return_token_scales(const LongDShared<Tile>& at, PipelineState& place) {
  if constexpr (Tile::kMaskedOrScaled) {
    ptx::mbarrier_arrive(at.token_scale_empty(place.stage));
    place.advance(LongDTokenScales<Tile>::kStages);
  }
}

// The row tile of a work tile, where they are resident.
template <class Tile>
__device__ __forceinline__ void await_rows(const ForwardArgs& p, const LongDShared<Tile>& at, uint32_t now) {
  const uint32_t first = at.scheduler.first();
  const int32_t tile = at.scheduler(p, now).tile;
  if (now != first) {
    if (tile == at.scheduler(p, now - 1).tile) return;
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(at.q_empty());
  }
  ptx::mbarrier_wait_parity(at.q_full(), (tile - at.scheduler(p, first).tile) & 1);
}

template <class Tile>
struct LongDConsumer {
  static constexpr int kAccumulators = Tile::kColumns / 2;
  using Accumulator = typename Tile::Accumulator;
  static constexpr int kStartBarrier = 1;  // of warpgroup 1
  const ForwardArgs& p;
  const LongDShared<Tile>& at;
  bool leads;  // warpgroup 1 waits for this one's first chunk
  PipelineState place, token_scale_state;
  RowBest<Tile::kWinners> best[Tile::kHeld];

  __device__ __forceinline__ void multiply(Accumulator (&c)[kAccumulators], int block, int k_chunk) {
    const uint32_t stage = at.stage(place.stage);
    const uint32_t rows = p.stream_q ? stage + Tile::kDBytes : at.q + k_chunk * Tile::kQBytes;
    const uint32_t mine = rows + ptx::tid_x() / 128 * 128 * kKChunkBytes;  // this warpgroup's
    const uint32_t q = ptx::smem_desc_low(mine + block * 8 * kKChunkBytes), d = ptx::smem_desc_low(stage);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::WgmmaShape<Tile::kColumns>::template issue<typename Tile::Type>(
          c, ptx::smem_desc_k_major<2>(q + k * 32 / 16), ptx::smem_desc_k_major(d + k * 32 / 16),
          k > 0 || k_chunk > 0);
    }
    ptx::wgmma_commit();
  }

  // To all blocks of the cluster: lane r tells block r.
  __device__ __forceinline__ void release(int stage) {
    const int lane = threadIdx.x % 32;
    if (lane < p.cluster) ptx::mbarrier_arrive_cluster(ptx::mapa(at.empty(stage), lane));
    if (leads) {
      leads = false;
      ptx::named_barrier_arrive(kStartBarrier, 256);
    }
  }

  __device__ __forceinline__ void multiply_k_chunk(Accumulator (&c)[2][kAccumulators], int k_chunk) {
    ptx::mbarrier_wait_parity(at.full(place.stage), place.parity);
    ptx::wgmma_fence();
    multiply(c[0], 0, k_chunk);
    multiply(c[1], 1, k_chunk);
  }

  // A document is finished under the wgmma of the next one's first chunk.
  __device__ __forceinline__ void take_tile(uint32_t now, int32_t t) {
    Accumulator c[2][kAccumulators];
    multiply_k_chunk(c, 0);
    if (t == 0 && now != at.scheduler.first()) finish(at.scheduler(p, now - at.scheduler.step()));
    for (int k_chunk = 1; k_chunk < p.k_chunks; ++k_chunk) {
      const int before = place.stage;
      place.advance(p.stages);
      multiply_k_chunk(c, k_chunk);
      ptx::wgmma_wait<2>();
      release(before);
    }
    const float first_token = static_cast<float>(long_d_tile_begin<Tile>(p, t) + 2 * (threadIdx.x % 4));
    uint32_t token_scales;
    const uint32_t kind = take_token_scales<Tile>(at, token_scale_state, p.zeros[0], token_scales);
    ptx::wgmma_wait<1>();
    fold_tile<Tile>(c[0], best, first_token, p.zeros, token_scales, kind);
    ptx::wgmma_wait<0>();
    release(place.stage);
    place.advance(p.stages);
    fold_tile<Tile>(c[1], best + 2, first_token, p.zeros + 2, token_scales, kind);
    return_token_scales<Tile>(at, token_scale_state);
  }

  __device__ __forceinline__ void finish(const LongDWorkTile& work_tile) {
    float maximum[Tile::kHeld];
    int32_t token[Tile::kHeld];
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      maximum[h] = best[h].value;
      token[h] = best[h].token();
      best[h].clear();
    }
    reduce_quad<Tile::kHeld, Tile::kWinners>(maximum, token);
    if (!work_tile.counts) return;
    const RowTile tile = row_tile(p, work_tile.tile, Tile::kRows);
    LaneRows<Tile> own;
    own.take(p, tile, threadIdx.x / 32);
    finish_document<typename Tile::Element, Tile, Tile::kWinners>(p, tile, own, threadIdx.x / 32, work_tile.j,
                                                                  maximum, token);
  }

  __device__ __forceinline__ void run() {
    if (!leads) ptx::named_barrier_sync(kStartBarrier, 256);
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) best[h].clear();
    uint32_t now = at.scheduler.first();
    for (; now < at.scheduler.end(); now += at.scheduler.step()) {
      if (!p.stream_q) await_rows<Tile>(p, at, now);
      for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) take_tile(now, t);
    }
    finish(at.scheduler(p, now - at.scheduler.step()));
  }
};

// What threads agree on before they part.
template <class Tile>
__device__ __forceinline__ void init_long_d(const ForwardArgs& p, const LongDShared<Tile>& at) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < p.stages; ++stage) {
      ptx::mbarrier_init(at.full(stage), 1);
      ptx::mbarrier_init(at.empty(stage), 4 * Tile::kConsumers * p.cluster);
      if (Tile::kCopies > 1) ptx::mbarrier_init(at.cut(stage), 128);
    }
    for (int stage = 0; stage < LongDTokenScales<Tile>::kStages; ++stage) {
      ptx::mbarrier_init(at.token_scale_full(stage), 32);
      ptx::mbarrier_init(at.token_scale_empty(stage), 128 * Tile::kConsumers);
    }
    ptx::mbarrier_init(at.q_full(), 1);
    ptx::mbarrier_init(at.q_empty(), 4 * Tile::kConsumers);
    ptx::fence_mbarrier_init();
    at.scheduler.deal(p);
  }
  __syncthreads();
  ptx::cluster_sync();
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_sm90_q_longd(const __grid_constant__ ForwardArgs p,
                                const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const LongDShared<Tile> at(shared, p);
  init_long_d<Tile>(p, at);

  // From lane 0: so the compiler knows that a warp takes one branch, and keeps addresses in uniform
  // registers.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == Tile::kConsumers) {
    ptx::setmaxnreg_dec<40>();
    const int helper = threadIdx.x - 128 * Tile::kConsumers;
    if (helper == 0) LongDProducer<Tile>{p, maps, at}.run();
    if (Tile::kMaskedOrScaled && helper / 32 == 1) produce_token_scales<Tile>(p, at);
  } else {
    ptx::setmaxnreg_inc<232>();
    LongDConsumer<Tile> consumer{p, at, warpgroup == 0};
    consumer.run();
  }
  ptx::cluster_sync();  // a block that is gone could not be told that a stage is empty
#endif
}

}  // namespace late_interaction
