// MaxSim forward on Hopper for many query rows with long embeddings, streamed in k chunks of 128 bytes.
//
//                   kColumns tokens of a document, one k chunk of their embeddings a stage of the ring
//                 +--------------------------------------------------+
//   256 rows of   |  warpgroup 0: rows   0..127, as two blocks of 64 |  += products of this k chunk; after
//   Q, one k      |  warpgroup 1: rows 128..255, as two blocks of 64 |  the last one: running max (and
//   chunk of them +--------------------------------------------------+  winner) of each row, in registers
//
// Who owns what
//   cluster    one or two blocks, persistent. The two blocks take neighbouring documents against the same
//              query rows, and each loads half of a k chunk of the rows for both. 256 rows and 152 tokens a
//              chunk would be 42 bytes a clock and multiprocessor, more than the L2 cache gives; this way
//              they are 30.
//   block      one document at a time. Rows that are short enough stay in shared memory, and the ring brings
//              tokens alone; such a block has no partner, and walks the documents of one row tile.
//   producer   one thread of warpgroup 2, which keeps few registers: all TMA loads.
//   token-scale producer
//              the next warp of warpgroup 2, with kMaskedOrScaled only. It writes the limits (masks) and the
//              scales (inverse norms, or quantization scales) of a tile's tokens to a ring of their own.
//   consumer   each of warpgroups 0 and 1: both its blocks of 64 rows against every stage.
//   warp       32 neighbouring query rows. Of a warpgroup's 128 rows, a block of 64 has every other eight, so
//              that a warp's 16 rows of one block are neighbours of its 16 rows of the other.
//
// The accumulators hold one tile, so a warpgroup has no wgmma in flight while it folds its second block. The
// other warpgroup then has the tensor cores alone. Warpgroup 1 starts one k chunk later: the warpgroup that
// folds loses the lead that the other one gains, and regains it when the other one folds. A document is
// finished under the wgmma of the next document's first k chunk.
//
//     warpgroup 0   multiply ... | multiply last | fold | multiply first, finish | multiply ...
//     warpgroup 1   multiply ...       | multiply last          | fold | multiply first, finish | ...
//
// TMA rounds fp32 to TF32 as it loads (runtime/tma_descriptors.cpp).
//
// The last tile of a document is moved back to end with the document: a token that is seen twice changes
// neither the maximum nor, since ties keep the earlier one, the winner. So only documents shorter than a tile
// have columns past their end, which are left out like masked ones.
//
// mbarriers: full and empty for each stage, for the resident Q tile, and for token masks and scales. Each
// consumer warp of the whole cluster arrives on the empty mbarrier of a stage, since the next loads write to
// all blocks of the cluster. Each lane arrives for the token masks and scales that it wrote or read.
#pragma once

#include "../../primitives/fold.cuh"
#include "../sm90_pipeline.cuh"

namespace late_interaction {

// How inputs multiply: as they are, or fp32 as three products (fp32_3xtf32.cuh, fp32_3xfp16.cuh).
enum class LongDMath { plain, fp32_3xtf32, fp32_3xfp16 };

struct LongDPolicy {
  int row_blocks;          // blocks of 64 query rows of a consumer
  int box_rows;            // query rows of a TMA box
  int terms;               // numbers of an element in the operands: one, or high and low
  bool clusters;           // two blocks may load query rows for each other
  bool splits_tf32;        // a warpgroup splits each stage in high and low
  int promotion_interval;  // steps of 32 bytes that the tensor cores sum; 0: all of an embedding
  int consumer_registers;  // of a thread, after setmaxnreg
  int helper_registers;
};

// row_blocks          two, so that a consumer reads tokens once for 128 rows; one, where promoted sums take
//                     the registers of the second block.
// box_rows            half of a row tile, which a block of a cluster loads; 3xTF32 has no clusters.
// promotion_interval  bounds the bias of sums that the tensor cores truncate.
// ..._registers       a launch gives 168 for each of 384 threads, or 128 for each of 512 with the
//                     tf32_splitter. Consumers take what helpers can spare, and narrow tiles need less.
constexpr LongDPolicy long_d_policy(LongDMath math, int columns) {
  const bool narrow = columns <= 104;
  // row_blocks, box_rows, terms, clusters, splits_tf32, promotion_interval, registers
  return math == LongDMath::plain         ? LongDPolicy{2, 128, 1, true, false, 0, 232, 40}
         : math == LongDMath::fp32_3xfp16 ? LongDPolicy{1, 64, 2, true, false, 2, 232, 40}
         : narrow                         ? LongDPolicy{1, 128, 1, false, true, 2, 200, 56}
                                          : LongDPolicy{1, 128, 1, false, true, 2, 216, 40};
}

// Element: of the inputs, from which rare rows are computed again. kMaskedOrScaled: some columns are left out
// (masked tokens, or the columns past the end of a short document), or columns have scales.
template <LongDMath kMath, class Type_, class Element_, int kColumns_, bool kWinners_, bool kMaskedOrScaled_>
struct LongDTile {
  using Type = Type_;
  using Element = Element_;
  using Accumulator = typename Type::Accumulator;
  static constexpr LongDPolicy kPolicy = long_d_policy(kMath, kColumns_);
  static constexpr int kColumns = kColumns_;
  static constexpr bool kWinners = kWinners_, kMaskedOrScaled = kMaskedOrScaled_, kPacked = false;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + (kPolicy.splits_tf32 ? 2 : 1));
  static constexpr int kWarpRows = 16 * kPolicy.row_blocks, kRows = 4 * kWarpRows * kConsumers;
  static constexpr int kHeld = 2 * kPolicy.row_blocks, kLaneRows = 1;
  static constexpr int kKChunkElements = kKChunkBytes / (kPolicy.terms == 2 ? 2 : sizeof(Element));
  static constexpr uint32_t kQTermBytes = kRows * kKChunkBytes, kDTermBytes = kColumns * kKChunkBytes;
  static constexpr uint32_t kQBytes = kPolicy.terms * kQTermBytes, kDBytes = kPolicy.terms * kDTermBytes;
  static constexpr int kCopies = kPolicy.splits_tf32 ? 2 : 1;  // of a stage's operands

  // A lane holds rows 8 * block + 16 * half + lane / 4 of the warp's two blocks, in the order of 2 * block +
  // half. With one block the even lanes of a quad have a row each, which odd lanes repeat.
  static __device__ __forceinline__ int slot(int warp, int lane, int) {
    if (kPolicy.row_blocks == 1 && lane % 2 != 0) return kRows;
    const int held = lane % 4;
    return warp * kWarpRows + held % 2 * 16 + held / 2 * 8 + lane / 4;
  }
};

template <class Type, class Element, int kColumns, bool kWinners, bool kMaskedOrScaled>
using Sm90QLongDTile = LongDTile<LongDMath::plain, Type, Element, kColumns, kWinners, kMaskedOrScaled>;

// A document against a row tile.
struct LongDWorkTile {
  int32_t tile, j;
  bool counts;  // false: the other block has the last document, and this one multiplies it to keep step
};

// A cluster's work tiles. With resident rows: a contiguous range, documents innermost. With streamed rows:
// every k-th work tile of k clusters, so that all clusters together work on a few row tiles by a few
// documents, and L2 serves most loads. The range lies in shared memory: a consumer has no registers for it.
struct LongDScheduler {
  static constexpr uint32_t kBand = 8;  // row tiles
  static constexpr uint32_t kBytes = 32;
  uint32_t address;

  __device__ __forceinline__ uint32_t first() const { return ptx::ld_shared(address); }
  __device__ __forceinline__ uint32_t end() const { return ptx::ld_shared(address + 4); }
  __device__ __forceinline__ uint32_t step() const { return ptx::ld_shared(address + 8); }
  __device__ __forceinline__ uint32_t groups() const { return ptx::ld_shared(address + 12); }

  __device__ __forceinline__ void deal(const ForwardArgs& p) const {
    const uint32_t clusters = gridDim.x / p.cluster, cluster = blockIdx.x / p.cluster;
    ptx::st_shared(address, p.stream_q ? cluster : static_cast<uint32_t>(p.work_tiles * cluster / clusters));
    ptx::st_shared(address + 4, static_cast<uint32_t>(p.stream_q ? p.work_tiles
                                                                 : p.work_tiles * (cluster + 1) / clusters));
    ptx::st_shared(address + 8, p.stream_q ? clusters : 1);
    ptx::st_shared(address + 12, static_cast<uint32_t>((p.N + p.cluster - 1) / p.cluster));
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

// The token mask and scales of a tile: a limit and a scale for each column, and which of the two to apply.
template <class Tile>
struct LongDTokenScales {
  static constexpr uint32_t kLimits = 0, kScales = 4 * Tile::kColumns, kKind = 2 * kScales;
  static constexpr uint32_t kBytes = Tile::kMaskedOrScaled ? kKind + 16 : 0;
  static constexpr int kStages = 2;

  // A limit of minus infinity leaves a column out. Other columns have plus infinity, which turns NaN into an
  // infinity, and finish_document computes rows with an infinite maximum again. Either takes one instruction.
  enum Kind : uint32_t { kPlain, kLimited, kScaled, kLimitedAndScaled };

  static constexpr bool limits(uint32_t kind) { return kind == kLimited || kind == kLimitedAndScaled; }
  static constexpr bool scales(uint32_t kind) { return kind == kScaled || kind == kLimitedAndScaled; }
};

// Shared memory of a block, in this order: the Q tile where it is resident, the ring, token masks and scales,
// the scheduler, mbarriers. A stage of the ring holds tokens, and streamed query rows behind them.
template <class Tile>
struct LongDShared {
  uint32_t q, first_stage, stage_bytes, token_scales, barriers;
  int stages;
  LongDScheduler scheduler;

  __device__ __forceinline__ LongDShared(const uint8_t* base, const ForwardArgs& p) {
    stages = p.stages;
    stage_bytes = Tile::kCopies * (Tile::kDBytes + (p.stream_q ? Tile::kQBytes : 0));
    q = ptx::smem_address(base);
    first_stage = q + (p.stream_q ? 0 : p.k_chunks * Tile::kQBytes);
    token_scales = first_stage + stages * stage_bytes;
    scheduler.address = token_scales + LongDTokenScales<Tile>::kStages * LongDTokenScales<Tile>::kBytes;
    barriers = scheduler.address + LongDScheduler::kBytes;
  }

  __device__ __forceinline__ uint32_t stage(int i) const { return first_stage + i * stage_bytes; }
  __device__ __forceinline__ uint32_t token_scale_stage(int i) const {
    return token_scales + i * LongDTokenScales<Tile>::kBytes;
  }
  __device__ __forceinline__ Ring q_ring() const { return {barriers}; }
  __device__ __forceinline__ Ring token_scale_ring() const { return {barriers + 16}; }
  __device__ __forceinline__ Ring ring() const { return {barriers + 48}; }
  __device__ __forceinline__ uint32_t split(int i) const { return barriers + 48 + 16 * stages + 8 * i; }
};

// The first token of a tile: the last tile is moved back to end with the document.
template <class Tile>
__device__ __forceinline__ int32_t long_d_tile_begin(const ForwardArgs& p, int32_t t) {
  return max(0, min(t, p.Ld - Tile::kColumns));
}

// Folds the lane's two rows of a block of 64.
template <class Tile, uint32_t kKind>
__device__ __forceinline__ void fold_scaled_columns(const typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                                    MaximumFold<Tile::kWinners>* rows, float token,
                                                    const float* zeros, uint32_t token_scales) {
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
      // Sums of int8 products become floats, whose 24 bits hold all of a sum up to d = 1024.
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
__device__ __forceinline__ void fold_scaled_tile(const typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                                 MaximumFold<Tile::kWinners>* rows, float token,
                                                 const float* zeros, uint32_t token_scales, uint32_t kind) {
  using TokenScales = LongDTokenScales<Tile>;
  if (kind == TokenScales::kPlain) {
    fold_scaled_columns<Tile, TokenScales::kPlain>(c, rows, token, zeros, token_scales);
  } else if constexpr (Tile::kMaskedOrScaled) {
    if (kind == TokenScales::kLimited) {
      fold_scaled_columns<Tile, TokenScales::kLimited>(c, rows, token, zeros, token_scales);
    } else if (kind == TokenScales::kScaled) {
      fold_scaled_columns<Tile, TokenScales::kScaled>(c, rows, token, zeros, token_scales);
    } else {
      fold_scaled_columns<Tile, TokenScales::kLimitedAndScaled>(c, rows, token, zeros, token_scales);
    }
  }
}

template <class Tile>
struct LongDProducer {
  const ForwardArgs& p;
  const TensorMaps& maps;
  const LongDShared<Tile>& smem;

  // Loads a k chunk of query rows, or, as one of two blocks, half of it for both.
  __device__ __forceinline__ void load_rows(uint32_t to, uint32_t full, const RowTile& tile, int k_chunk) {
    constexpr int kBoxRows = Tile::kPolicy.box_rows;
    const int first = first_query_token(p, tile), dim = k_chunk * Tile::kKChunkElements;
    for (int term = 0; term < Tile::kPolicy.terms; ++term, to += Tile::kQTermBytes) {
      if (Tile::kPolicy.clusters && p.cluster == 2) {
        const uint32_t rank = ptx::cluster_ctarank();
        ptx::tma_load_4d_multicast(3, to + rank * kBoxRows * kKChunkBytes, &maps.Q, full, dim,
                                   first + kBoxRows * rank, tile.query, term);
        continue;
      }
      for (int box = 0; box < Tile::kRows / kBoxRows; ++box) {
        ptx::tma_load_4d(to + box * kBoxRows * kKChunkBytes, &maps.Q, full, dim, first + kBoxRows * box,
                         tile.query, term);
      }
    }
  }

  // Loads a k chunk of tokens. In maps of two terms the documents of all queries are one dimension.
  __device__ __forceinline__ void load_tokens(uint32_t to, uint32_t full, const RowTile& tile, int k_chunk,
                                              int32_t begin, int32_t j) {
    const int dim = k_chunk * Tile::kKChunkElements;
    if constexpr (Tile::kPolicy.terms == 1) {
      ptx::tma_load_4d(to, &maps.D, full, dim, begin, j, tile.query);
    } else {
      const int32_t document = document_index(p, tile.query, j);
      ptx::tma_load_4d(to, &maps.D, full, dim, begin, document, 0);
      ptx::tma_load_4d(to + Tile::kDTermBytes, &maps.D, full, dim, begin, document, 1);
    }
  }

  __device__ void run() {
    PipelineState state;
    PipelineState q_state;
    int32_t resident = -1;
    for (uint32_t next = smem.scheduler.first(); next < smem.scheduler.end(); next += smem.scheduler.step()) {
      const LongDWorkTile work_tile = smem.scheduler(p, next);
      const RowTile tile = row_tile(p, work_tile.tile, Tile::kRows);
      if (!p.stream_q && work_tile.tile != resident) {
        resident = work_tile.tile;
        smem.q_ring().producer_acquire(q_state);
        q_state.advance(1);
        smem.q_ring().producer_expect(0, p.k_chunks * Tile::kQBytes);
        for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk) {
          load_rows(smem.q + k_chunk * Tile::kQBytes, smem.q_ring().full(0), tile, k_chunk);
        }
      }
      for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) {
        const int32_t begin = long_d_tile_begin<Tile>(p, t);
        for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk) {
          const uint32_t to = smem.stage(state.stage), full = smem.ring().full(state.stage);
          smem.ring().producer_acquire(state);
          smem.ring().producer_expect(state.stage, smem.stage_bytes / Tile::kCopies);
          if (p.stream_q) load_rows(to + Tile::kDBytes, full, tile, k_chunk);
          load_tokens(to, full, tile, k_chunk, begin, work_tile.j);
          state.advance(p.stages);
        }
      }
    }
  }
};

// One warp: lane l writes for tokens l, l + 32, ... of each tile.
template <class Tile>
__device__ void produce_token_scales(const ForwardArgs& p, const LongDShared<Tile>& smem) {
  using TokenScales = LongDTokenScales<Tile>;
  constexpr int kRounds = (Tile::kColumns + 31) / 32;
  const int lane = threadIdx.x % 32;
  PipelineState state;
  for (uint32_t next = smem.scheduler.first(); next < smem.scheduler.end(); next += smem.scheduler.step()) {
    const LongDWorkTile work_tile = smem.scheduler(p, next);
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
      smem.token_scale_ring().producer_acquire(state);
      const uint32_t token_scales = smem.token_scale_stage(state.stage);
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
      smem.token_scale_ring().producer_commit(state.stage);
      state.advance(TokenScales::kStages);
    }
  }
}

// Waits for the token mask and scales of the next tile; returns the kind, and sets the lane's address. Even
// if the kind is always kPlain the compiler must not know it: without a branch it would move the fold behind
// the wait for the wgmma that the fold is to overlap.
template <class Tile>
__device__ __forceinline__ uint32_t take_token_scales(const LongDShared<Tile>& smem,
                                                      const PipelineState& state, float zero,
                                                      uint32_t& token_scales) {
  token_scales = smem.token_scale_stage(state.stage) + threadIdx.x % 4 * 8;
  if constexpr (!Tile::kMaskedOrScaled) return __float_as_uint(zero);
  smem.token_scale_ring().consumer_wait(state);
  return ptx::ld_shared(smem.token_scale_stage(state.stage) + LongDTokenScales<Tile>::kKind);
}

template <class Tile>
__device__ __forceinline__ void return_token_scales(const LongDShared<Tile>& smem, PipelineState& state) {
  if constexpr (Tile::kMaskedOrScaled) {
    smem.token_scale_ring().consumer_release(state.stage);
    state.advance(LongDTokenScales<Tile>::kStages);
  }
}

// Waits for the row tile of a work tile, where rows are resident.
template <class Tile>
__device__ __forceinline__ void await_rows(const ForwardArgs& p, const LongDShared<Tile>& smem,
                                           uint32_t now) {
  const uint32_t first = smem.scheduler.first();
  const int32_t tile = smem.scheduler(p, now).tile;
  if (now != first) {
    if (tile == smem.scheduler(p, now - 1).tile) return;
    if (threadIdx.x % 32 == 0) smem.q_ring().consumer_release(0);
  }
  smem.q_ring().consumer_wait({0, static_cast<uint32_t>(tile - smem.scheduler(p, first).tile) & 1});
}

// A consumer warpgroup. Self::take_tile(now, t) multiplies and folds the tile at token t of work tile `now`.
template <class Tile, class Self>
struct LongDConsumerBase {
  static constexpr int kAccumulators = Tile::kColumns / 2;
  static constexpr int kStartBarrier = 1;  // of warpgroup 1
  using Accumulator = typename Tile::Accumulator;
  const ForwardArgs& p;
  const LongDShared<Tile>& smem;
  int me;      // which of the consumers
  bool leads;  // warpgroup 1 waits for the first k chunk of this one
  PipelineState state, token_scale_state;
  MaximumFold<Tile::kWinners> best[Tile::kHeld];

  __device__ __forceinline__ LongDConsumerBase(const ForwardArgs& args, const LongDShared<Tile>& shared,
                                               int warpgroup)
      : p(args), smem(shared), me(warpgroup), leads(warpgroup == 0) {}

  // Lets the other consumer begin.
  __device__ __forceinline__ void let_follow() {
    if (!leads) return;
    leads = false;
    ptx::named_barrier_arrive(kStartBarrier, 256);
  }

  // Returns a stage to the producers of all blocks of the cluster: lane r tells block r.
  __device__ __forceinline__ void release(int stage) const {
    const int lane = threadIdx.x % 32;
    if constexpr (!Tile::kPolicy.clusters) {
      if (lane == 0) smem.ring().consumer_release(stage);
    } else if (lane < p.cluster) {
      smem.ring().consumer_release_cluster(stage, lane);
    }
  }

  // If a document begins at token t of work tile `now`, finishes the document before it.
  __device__ __forceinline__ void finish_previous(uint32_t now, int32_t t) {
    if (t == 0 && now != smem.scheduler.first()) finish(smem.scheduler(p, now - smem.scheduler.step()));
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
    LaneRows<Tile> lane_rows;
    lane_rows.take(p, tile, threadIdx.x / 32);
    finish_document<typename Tile::Element, Tile, Tile::kWinners>(p, tile, lane_rows, threadIdx.x / 32,
                                                                  work_tile.j, maximum, token);
  }

  __device__ __forceinline__ void run() {
    if (!leads) ptx::named_barrier_sync(kStartBarrier, 256);
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) best[h].clear();
    uint32_t now = smem.scheduler.first();
    for (; now < smem.scheduler.end(); now += smem.scheduler.step()) {
      if (!p.stream_q) await_rows<Tile>(p, smem, now);
      for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) static_cast<Self&>(*this).take_tile(now, t);
    }
    finish(smem.scheduler(p, now - smem.scheduler.step()));
  }
};

template <class Tile>
struct LongDConsumer : LongDConsumerBase<Tile, LongDConsumer<Tile>> {
  using Base = LongDConsumerBase<Tile, LongDConsumer<Tile>>;
  using Base::Base;
  using Base::smem, Base::best, Base::kAccumulators, Base::p, Base::state, Base::token_scale_state;
  using typename Base::Accumulator;

  __device__ __forceinline__ void multiply(Accumulator (&c)[kAccumulators], int block, int k_chunk) {
    const uint32_t stage = smem.stage(state.stage);
    const uint32_t rows = p.stream_q ? stage + Tile::kDBytes : smem.q + k_chunk * Tile::kQBytes;
    const uint32_t group_rows = rows + ptx::tid_x() / 128 * 128 * kKChunkBytes;  // of this warpgroup
    const uint32_t q = ptx::smem_desc_low(group_rows + block * 8 * kKChunkBytes),
                   d = ptx::smem_desc_low(stage);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::WgmmaShape<Tile::kColumns>::template issue<typename Tile::Type>(
          c, ptx::smem_desc_k_major<2>(q + k * 32 / 16), ptx::smem_desc_k_major(d + k * 32 / 16),
          k > 0 || k_chunk > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_k_chunk(Accumulator (&c)[2][kAccumulators], int k_chunk) {
    smem.ring().consumer_wait(state);
    ptx::wgmma_fence();
    multiply(c[0], 0, k_chunk);
    multiply(c[1], 1, k_chunk);
  }

  __device__ __forceinline__ void take_tile(uint32_t now, int32_t t) {
    Accumulator c[2][kAccumulators];
    multiply_k_chunk(c, 0);
    this->finish_previous(now, t);
    for (int k_chunk = 1; k_chunk < p.k_chunks; ++k_chunk) {
      const int before = state.stage;
      state.advance(p.stages);
      multiply_k_chunk(c, k_chunk);
      ptx::wgmma_wait<2>();
      this->release(before);
      this->let_follow();
    }
    const float first_token = static_cast<float>(long_d_tile_begin<Tile>(p, t) + 2 * (threadIdx.x % 4));
    uint32_t token_scales;
    const uint32_t kind = take_token_scales<Tile>(smem, token_scale_state, p.zeros[0], token_scales);
    ptx::wgmma_wait<1>();
    fold_scaled_tile<Tile>(c[0], best, first_token, p.zeros, token_scales, kind);
    ptx::wgmma_wait<0>();
    this->release(state.stage);
    this->let_follow();
    state.advance(p.stages);
    fold_scaled_tile<Tile>(c[1], best + 2, first_token, p.zeros + 2, token_scales, kind);
    return_token_scales<Tile>(smem, token_scale_state);
  }
};

// One thread sets up the mbarriers and the scheduler; all threads of the cluster wait for it.
template <class Tile>
__device__ __forceinline__ void init_long_d(const ForwardArgs& p, const LongDShared<Tile>& smem) {
  if (threadIdx.x == 0) {
    smem.ring().init(p.stages, 1, 4 * Tile::kConsumers * p.cluster);
    for (int stage = 0; Tile::kPolicy.splits_tf32 && stage < p.stages; ++stage) {
      ptx::mbarrier_init(smem.split(stage), 128);
    }
    smem.token_scale_ring().init(LongDTokenScales<Tile>::kStages, 32, 128 * Tile::kConsumers);
    smem.q_ring().init(1, 1, 4 * Tile::kConsumers);
    ptx::fence_mbarrier_init();
    smem.scheduler.deal(p);
  }
  __syncthreads();
  ptx::cluster_sync();
}

// A block of any kernel of this folder.
template <class Tile, class Consumer>
__device__ __forceinline__ void forward_long_d(const ForwardArgs& p, const TensorMaps& maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const LongDShared<Tile> smem(shared, p);
  init_long_d<Tile>(p, smem);

  // From lane 0, so that the compiler knows that a warp takes one branch, and keeps addresses in uniform
  // registers.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  const auto produce = [&] {
    ptx::setmaxnreg_dec<Tile::kPolicy.helper_registers>();
    const int helper = threadIdx.x - 128 * Tile::kConsumers;
    if (helper == 0) LongDProducer<Tile>{p, maps, smem}.run();
    if (Tile::kMaskedOrScaled && helper / 32 == 1) produce_token_scales<Tile>(p, smem);
  };
  const auto consume = [&] {
    ptx::setmaxnreg_inc<Tile::kPolicy.consumer_registers>();
    Consumer(p, smem, warpgroup).run();
  };
  // The order of the branches decides which addresses ptxas keeps in uniform registers.
  if constexpr (!Tile::kPolicy.splits_tf32) {
    warpgroup == Tile::kConsumers ? produce() : consume();
  } else if (warpgroup < Tile::kConsumers) {
    consume();
  } else if (warpgroup == Tile::kConsumers) {
    produce();
  } else {
    ptx::setmaxnreg_dec<Tile::kPolicy.helper_registers>();
    split_tf32_stages(p, smem);
  }
  // A block that has exited could not be told that a stage is empty.
  if constexpr (Tile::kPolicy.clusters) ptx::cluster_sync();
#endif
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_sm90_q_longd(const __grid_constant__ ForwardArgs p,
                                const __grid_constant__ TensorMaps maps) {
  forward_long_d<Tile, LongDConsumer<Tile>>(p, maps);
}

}  // namespace late_interaction
