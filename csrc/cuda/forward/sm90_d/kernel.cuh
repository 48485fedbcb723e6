// MaxSim forward on Hopper for few query rows: documents on the M side of wgmma, query rows on its N side.
//
//                        kColumns query rows (up to 128), resident in shared memory
//                      +-----------------------------------------------+
//   64 or 128 tokens   |                one warpgroup                  |  -> running max (and winner)
//   of a document      |                                               |     of each query row,
//                      +-----------------------------------------------+     element by element
//
// A query of 32 tokens wastes no row of the tensor cores this way, and the call is bound by reading D once.
// So TMA must never wait: the ring takes all the shared memory there is, and each warpgroup has a share of
// it. While one warpgroup waits for its wgmma, its barriers or the end of its document, the others take what
// has arrived.
//
//     several documents a block: one to a team     one document a block: a tile to each warpgroup
//     of one warpgroup                             of the only team
//
//     document 0  ==>        warpgroup 0           tile 0  ==>        warpgroup 0
//     document 1  ==>  ring  warpgroup 1           tile 1  ==>  ring  warpgroup 1
//     document 2  ==>        warpgroup 2           tile 2  ==>        warpgroup 2
//        ...                    ...                  ...                 ...
//
// Who owns what
//   block      one a multiprocessor, persistent: every gridDim.x-th document of an only query, or a
//              contiguous range of (row tile, document). A row tile is a query with its documents, or the
//              rows of a listed pair (listed_pairs.cuh), which change with the document.
//   team       p.members warpgroups, and every p.teams-th document of the block.
//   producer   one thread a team, in different warps of the last warpgroup, which keeps few registers: TMA
//              loads. So teams whose documents differ in length do not wait for each other. TMA also brings
//              the tokens' mask and scales: an ordinary load would take microseconds behind the TMA loads
//              that are under way.
//   warpgroup  a share of the ring, and every p.members-th tile of the team. A stage is two k chunks of 64
//              tokens; or, of embeddings of one k chunk, 128 tokens.
//   warp       16 tokens of each 64. At a document's end one of the team's warps, in turn, merges the maxima
//              of all, scales, sums and stores them, while the others go on.
//   lane       the running maxima of kColumns / 4 query rows over the tokens it sees.
#pragma once

#include <type_traits>

#include "../../../plan/kernel_limits.h"
#include "../../primitives/code_fold.cuh"
#include "../../ptx/mma.cuh"
#include "../listed_pairs.cuh"
#include "../sm90_pipeline.cuh"
#include "token_scale_tma.h"

namespace late_interaction {

struct DocumentScheduler;

struct Sm90DRegisters {
  int consumer, producer;  // of a thread, after setmaxnreg
};

// A launch gives all warps equally many, and consumers take what the producers' warpgroup can spare.
// Producers of listed pairs need more, to look up pairs.
constexpr Sm90DRegisters sm90_d_registers(int warpgroups, bool listed) {
  return warpgroups == 4   ? (listed ? Sm90DRegisters{104, 64} : Sm90DRegisters{112, 32})
         : warpgroups == 3 ? Sm90DRegisters{152, 56}
                           : Sm90DRegisters{232, 40};
}

template <class Type_, class Element_, int kColumns_, int kKChunks_, bool kWinners_, bool kListed_ = false>
struct Sm90DTile {
  using Args = TokenScaleArgs;
  using Scheduler = DocumentScheduler;
  static constexpr bool kListed = kListed_;
  using Type = Type_;
  using Element = Element_;
  using Accumulator = typename Type::Accumulator;
  static constexpr bool kWinners = kWinners_, kPacked = true;
  static constexpr bool kQuantized = sizeof(Element) == 1;  // tokens have scales, else they may be normalized
  static constexpr int kColumns = kColumns_;
  static constexpr Sm90DShape kShape = sm90_d_shape(kColumns, kKChunks_, kWinners, kListed);
  static constexpr int kKChunks = kShape.k_chunks, kTokens = kShape.tokens;  // of a stage
  static constexpr int kBlocks = kTokens / 64;
  static constexpr int kKChunkElements = kKChunkBytes / sizeof(Element);
  static constexpr int kWarpgroups = kShape.warpgroups;  // that multiply, at most
  static constexpr int kWarps = 4;                       // of a warpgroup
  static constexpr int kGroupThreads = 32 * kWarps;
  static constexpr int kThreads = (kWarpgroups + 1) * kGroupThreads;
  static constexpr Sm90DRegisters kRegisters = sm90_d_registers(kWarpgroups, kListed);
  static constexpr int kRows = kColumns, kWarpRows = kColumns;  // query rows
  static constexpr int kHeld = kColumns / 4, kLaneRows = kColumns / 32;
  static constexpr uint32_t kQKChunkBytes = kColumns * kKChunkBytes;
  static constexpr uint32_t kDKChunkBytes = kTokens * kKChunkBytes;
  static constexpr uint32_t kStageBytes = kKChunks * kDKChunkBytes;
  static constexpr uint32_t kTokenScaleBytes = token_scale_bytes(kShape, kQuantized);
  static_assert(kQKChunkBytes % 1024 == 0, "swizzled rows come in groups of eight");

  static __device__ __forceinline__ int slot(int, int lane, int o) { return 32 * o + lane; }

  struct NoTokens {};
  struct Tokens {
    int32_t token[kWarps][kColumns];
  };
  struct Maxima : std::conditional_t<kWinners, Tokens, NoTokens> {
    float maximum[kWarps][kColumns];
  };
  using Exchange = Maxima[2][kWarpgroups];

  using Products = Accumulator[kBlocks][kColumns / 2];  // of a lane
};

// Shared memory of a block, in this order: the ring, a share for each warpgroup; Q, once or for each team;
// the token mask and scales of each stage, if there are any; the exchange; mbarriers.
template <class Tile>
struct Sm90DShared {
  uint32_t first_stage, q, q_bytes, token_scales, barriers;
  int share, stages;
  bool one_q;
  typename Tile::Exchange& exchange;

  __device__ __forceinline__ Sm90DShared(const ForwardArgs& p, uint8_t* shared)
      : exchange(*reinterpret_cast<typename Tile::Exchange*>(
            shared + p.stages * (Tile::kStageBytes + (masked_or_scaled(p) ? Tile::kTokenScaleBytes : 0)) +
            (p.row_tiles == 1 ? 1 : p.teams) * p.k_chunks * Tile::kQKChunkBytes)) {
    first_stage = ptx::smem_address(shared);
    q = first_stage + p.stages * Tile::kStageBytes;
    q_bytes = p.k_chunks * Tile::kQKChunkBytes;
    token_scales = ptx::smem_address(&exchange) - p.stages * Tile::kTokenScaleBytes;
    barriers = ptx::smem_address(&exchange) + sizeof(exchange);
    share = p.stages / (p.teams * p.members);
    stages = p.stages;
    one_q = p.row_tiles == 1;
  }

  static __device__ __forceinline__ bool masked_or_scaled(const ForwardArgs& p) {
    return !Tile::kListed && (p.d_mask.data != nullptr || (Tile::kQuantized && p.d_scales.data != nullptr));
  }

  __device__ __forceinline__ uint32_t stage(int warpgroup, const PipelineState& state) const {
    return first_stage + (warpgroup * share + state.stage) * Tile::kStageBytes;
  }
  // The address of a stage's token mask.
  __device__ __forceinline__ uint32_t mask_of(int warpgroup, const PipelineState& state) const {
    return token_scales + (warpgroup * share + state.stage) * Tile::kTokenScaleBytes;
  }
  __device__ __forceinline__ uint32_t scales_of(int warpgroup, const PipelineState& state) const {
    return mask_of(warpgroup, state) + mask_bytes(Tile::kShape);
  }
  __device__ __forceinline__ Ring ring() const { return {barriers}; }
  // A warpgroup's state in the whole ring.
  __device__ __forceinline__ PipelineState ring_state(int warpgroup, const PipelineState& state) const {
    return {warpgroup * share + state.stage, state.parity};
  }
  __device__ __forceinline__ int q_owner(int team) const { return one_q ? 0 : team; }
  __device__ __forceinline__ uint32_t query(int team) const { return q + q_owner(team) * q_bytes; }
  // A consumer thread fills it, after a barrier of the team.
  __device__ __forceinline__ Ring q_ring(int team) const {
    return {barriers + Ring::kBytes * (stages + q_owner(team))};
  }

  __device__ __forceinline__ void init_barriers() const {
    ring().init(stages, 1, Tile::kWarps);
    q_ring(0).init(Tile::kWarpgroups, 1, 1);
    ptx::fence_mbarrier_init();
  }
};

// Walks a block's documents: a range of (row tile, document), or every p.document_step-th of an only query.
struct DocumentScheduler {
  int32_t left;  // work tiles from here to the block's last
  int32_t row_tile, j;

  __device__ __forceinline__ DocumentScheduler(const TokenScaleArgs& p, int first) {
    if (p.document_step > 1) {
      left = static_cast<int32_t>((p.work_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
      row_tile = 0;
      j = static_cast<int32_t>(blockIdx.x);
    } else {
      const WorkRange range = WorkRange::of_block(p);
      left = static_cast<int32_t>(range.end - range.work_tile);
      row_tile = p.row_tiles == 1 ? 0 : static_cast<int32_t>(range.work_tile / p.N);
      j = static_cast<int32_t>(range.work_tile - row_tile * p.N);
    }
    advance(p, first);
  }
  __device__ __forceinline__ void advance(const TokenScaleArgs& p, int work_tiles) {
    left -= work_tiles;
    j += work_tiles * p.document_step;
    while (j >= p.N && p.row_tiles > 1) {
      j -= static_cast<int32_t>(p.N);
      ++row_tile;
    }
  }
  // Changes where the row tile changes.
  __device__ __forceinline__ int32_t rows_id() const { return row_tile; }
};

// Walks the listed pairs of a block's range, and of each pair the tiles of query rows.
template <int kRows>
struct PairScheduler {
  static constexpr int32_t row_tile = 0;
  int32_t left, j;  // pairs from here to the end of the range; the pair
  int32_t begun;    // rows of the pair's query in the tiles before
  Span rows, tokens;

  __device__ __forceinline__ PairScheduler(const PairArgs& p, int first) {
    const WorkRange range = WorkRange::of_block(p);
    left = static_cast<int32_t>(range.end - range.work_tile);
    j = static_cast<int32_t>(range.work_tile);
    step(p, first);
  }
  __device__ __forceinline__ void step(const PairArgs& p, int pairs) {
    left -= pairs;
    j += pairs;
    begun = 0;
    rows = tokens = Span{0, 0};
    if (left <= 0) return;
    rows = p.rows[j];
    tokens = p.spans[j];
  }
  __device__ __forceinline__ void advance(const PairArgs& p, int pairs) {
    begun += kRows;
    if (begun >= rows.length) step(p, pairs);
  }
  __device__ __forceinline__ int64_t rows_id() const {
    return static_cast<int64_t>(rows.first + begun) << 32 | static_cast<uint32_t>(rows.length - begun);
  }
};

template <class Tile>
struct Sm90DPairsTile : Listed<Tile> {
  using Scheduler = PairScheduler<Tile::kRows>;
};

__device__ __forceinline__ DocRange doc_range_of(const ForwardArgs& p, int32_t row_tile, int32_t j) {
  if (p.doc_ranges == nullptr) return {0, p.Ld, j, 0};
  return p.doc_ranges[document_index(p, row_tile, j)];
}

// The scheduler's current document, or split of one.
__device__ __forceinline__ DocRange scheduled_doc_range(const ForwardArgs& p,
                                                        const DocumentScheduler& scheduler) {
  if (scheduler.left <= 0) return {0, p.Ld, scheduler.j, 0};
  return doc_range_of(p, scheduler.row_tile, scheduler.j);
}

template <int kRows>
__device__ __forceinline__ DocRange scheduled_doc_range(const ForwardArgs& p,
                                                        const PairScheduler<kRows>& scheduler) {
  return {scheduler.tokens.first, scheduler.tokens.length, scheduler.j, 0};
}

// ---- producers ----

// Bytes of a tile's token mask and scales, which TMA brings with the first stage. Listed pairs have none.
template <class Tile>
__device__ __forceinline__ uint32_t token_scales_of_tile(const typename Tile::Args& p) {
  uint32_t bytes = 0;
  if constexpr (!Tile::kListed) {
    if (p.mask.rides) bytes += Tile::kTokens + 16;
    if (Tile::kQuantized && p.scales.rides) bytes += 4 * Tile::kTokens + 16;
  }
  return bytes;
}

template <class Tile>
__device__ __forceinline__ void load_token_scales(const typename Tile::Args& p,
                                                  const Sm90DShared<Tile>& memory, int warpgroup,
                                                  const PipelineState& state,
                                                  const typename Tile::Scheduler& scheduler, int32_t document,
                                                  int32_t token) {
  if constexpr (!Tile::kListed) {
    const auto copy = [&](uint32_t to, const auto& line) {
      const int32_t first = line.begin(scheduler.row_tile, document) + token;
      ptx::tma_load_1d(to, &line.map, memory.ring().full(memory.ring_state(warpgroup, state).stage),
                       first & -line.kWhole);
    };
    if (p.mask.rides) copy(memory.mask_of(warpgroup, state), p.mask);
    if (Tile::kQuantized && p.scales.rides) copy(memory.scales_of(warpgroup, state), p.scales);
  }
}

template <class Tile>
__device__ __forceinline__ void load_documents(const typename Tile::Args& p, const TensorMaps& maps,
                                               const Sm90DShared<Tile>& memory, int team) {
  constexpr int kTails = Tile::kTokens / kTailTokens;  // of a tile
  PipelineState first;  // of the next tile's stages, in a member's share of the ring
  int member = 0;
  for (typename Tile::Scheduler scheduler(p, team); scheduler.left > 0; scheduler.advance(p, p.teams)) {
    const DocRange doc_range = scheduled_doc_range(p, scheduler);
    int32_t token = doc_range.first;
    for (int32_t left = doc_range.length; left > 0; left -= Tile::kTokens, token += Tile::kTokens) {
      PipelineState state = first;
      // Behind a packed document lie tokens of others: the last tile comes in small boxes, those with tokens.
      const int tails = p.packed ? min((left + kTailTokens - 1) / kTailTokens, kTails) : kTails;
      const CUtensorMap* map = tails == kTails ? &maps.D : &maps.D_tail;
      const int boxes = tails == kTails ? 1 : tails;
      for (int k_chunk = 0; k_chunk < p.k_chunks; k_chunk += Tile::kKChunks) {
        const int warpgroup = team * p.members + member;
        const PipelineState ring_state = memory.ring_state(warpgroup, state);
        const uint32_t bytes = tails * (Tile::kStageBytes / kTails);
        memory.ring().producer_acquire(ring_state);
        if (k_chunk == 0) {
          memory.ring().producer_expect(ring_state.stage, bytes + token_scales_of_tile<Tile>(p));
          load_token_scales<Tile>(p, memory, warpgroup, state, scheduler, doc_range.document, token);
        } else {
          memory.ring().producer_expect(ring_state.stage, bytes);
        }
#pragma unroll 1
        for (int i = 0; i < boxes; ++i) {
#pragma unroll
          for (int c = 0; c < Tile::kKChunks; ++c) {
            ptx::tma_load_4d(
                memory.stage(warpgroup, state) + c * Tile::kDKChunkBytes + i * kTailTokens * kKChunkBytes,
                map, memory.ring().full(ring_state.stage), (k_chunk + c) * Tile::kKChunkElements,
                token + i * kTailTokens, p.packed ? 0 : doc_range.document, scheduler.row_tile);
          }
        }
        state.advance(memory.share);
      }
      if (++member == p.members) {
        member = 0;
        first = state;
      }
    }
  }
}

// ---- consumers ----

// One thread loads a row tile, once no warp reads the tile before.
template <class Tile>
__device__ __forceinline__ void load_query(const ForwardArgs& p, const TensorMaps& maps,
                                           const Sm90DShared<Tile>& memory, int team, const RowTile& tile) {
  const Ring ring = memory.q_ring(team);
  ring.producer_expect(0, memory.q_bytes);
  for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk) {
    ptx::tma_load_4d(memory.query(team) + k_chunk * Tile::kQKChunkBytes, &maps.Q, ring.full(0),
                     k_chunk * Tile::kKChunkElements, first_query_token(p, tile), tile.query, 0);
  }
}

// Scales the lane's rows by their inverse norms, taken from Q in shared memory.
template <class Tile>
__device__ __forceinline__ void normalize_rows(const ForwardArgs& p, uint32_t q, LaneRows<Tile>& lane_rows) {
  using Element = typename Tile::Element;
  constexpr int kElements = 16 / sizeof(Element);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    float squares = 0.0f;
#pragma unroll 1
    for (int vec = 0; vec < 8 * p.k_chunks; ++vec) {
      const uint32_t row = q + vec / 8 * Tile::kQKChunkBytes + Tile::slot(0, lane, o) * kKChunkBytes;
      union {
        uint4 words;
        Element element[kElements];
      } x;
      // Neighbouring lanes read different vectors, in different banks.
      x.words = ptx::ld_shared_v4_b32(row + ((vec + lane) % 8 << 4));
#pragma unroll
      for (int k = 0; k < kElements; ++k) squares = fmaf(widen(x.element[k]), widen(x.element[k]), squares);
    }
    if (lane_rows.scale[o] != kMaskedRow)
      lane_rows.scale[o] = finite_or_nan(lane_rows.scale[o] * inverse_norm(squares));
  }
}

// Indices, in the boxes that come with a tile, of the mask and the scale of the lane's first token.
struct TokenScaleIndices {
  int32_t mask, scale;
};

// The mask and scales of the lane's tokens: of each block, lane / 4 and lane / 4 + 8 of the warp's 16.
template <class Tile>
struct LaneTokenScales {
  uint8_t keeps[Tile::kBlocks][2];
  float scales[Tile::kBlocks][2];

  static __device__ __forceinline__ int32_t token(int32_t first_token, int block, int half) {
    return first_token + 64 * block + 8 * half;
  }
  __device__ __forceinline__ LaneTokenScales(int32_t length, int32_t first_token) {
#pragma unroll
    for (int i = 0; i < 2 * Tile::kBlocks; ++i) {
      keeps[i / 2][i % 2] = token(first_token, i / 2, i % 2) < length;
      scales[i / 2][i % 2] = 1.0f;
    }
  }
  // Loads what TMA cannot bring, before the wait for the tile.
  __device__ __forceinline__ void load(const TokenScaleArgs& p, int32_t row_tile, int32_t j,
                                       int32_t first_token) {
    const bool mask_apart = p.d_mask.data != nullptr && !p.mask.rides;
    const bool scales_apart = Tile::kQuantized && p.d_scales.data != nullptr && !p.scales.rides;
    if (!mask_apart && !scales_apart) return;
    const DocRange doc_range = doc_range_of(p, row_tile, j);
    first_token += doc_range.first;
    if (mask_apart) {
      const uint8_t* mask = document_mask(p, row_tile, doc_range.document);
#pragma unroll
      for (int i = 0; i < 2 * Tile::kBlocks; ++i) {
        const int32_t index = token(first_token, i / 2, i % 2);
        if (keeps[i / 2][i % 2] != 0) keeps[i / 2][i % 2] = mask[index * p.d_mask.token_stride];
      }
    }
    if (scales_apart) {
      const float* all = document_scales(p.d_scales, row_tile, doc_range.document);
#pragma unroll
      for (int i = 0; i < 2 * Tile::kBlocks; ++i) {
        const int32_t index = token(first_token, i / 2, i % 2);
        scales[i / 2][i % 2] = index < p.Ld ? all[index * p.d_scales.token_stride] : 0.0f;
      }
    }
  }
  // Loads what came with the tile. Returns bits of all that it loads.
  __device__ __forceinline__ uint32_t take(const TokenScaleArgs& p, uint32_t mask, uint32_t all,
                                           const TokenScaleIndices& first) {
    uint32_t loaded = 0;
    if (p.mask.rides) {
#pragma unroll
      for (int i = 0; i < 2 * Tile::kBlocks; ++i) {
        const uint32_t four = ptx::ld_shared(mask + token(first.mask, i / 2, i % 2) / 4 * 4);
        if ((four >> 8 * (first.mask % 4) & 0xFF) == 0) keeps[i / 2][i % 2] = 0;
        loaded |= four;
      }
    }
    if (Tile::kQuantized && p.scales.rides) {
#pragma unroll
      for (int i = 0; i < 2 * Tile::kBlocks; ++i) {
        const uint32_t scale = ptx::ld_shared(all + 4 * token(first.scale, i / 2, i % 2));
        scales[i / 2][i % 2] = __uint_as_float(scale);
        loaded |= scale;
      }
    }
    return loaded;
  }
};

// Squared norms of a warp's tokens: the diagonal of tokens x tokens, for which the tensor cores have time. A
// lane holds some elements of that product; `of` finds the diagonal ones.
template <class Tile>
struct TokenGram {
  using Mma = std::conditional_t<std::is_same_v<typename Tile::Element, __half>, ptx::MmaFp16, ptx::MmaBf16>;
  ptx::Accumulator low[Tile::kBlocks] = {}, high[Tile::kBlocks] = {};  // against tokens 0..7, and 8..15

  __device__ __forceinline__ void add(uint32_t stage) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % Tile::kWarps * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < 4 * Tile::kKChunks; ++i) {
      const int k_chunk = i / 4, vec = 2 * (i % 4) + lane / 16;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        uint32_t w[4];
        ptx::ldmatrix_x4(w, stage + k_chunk * Tile::kDKChunkBytes + (row + 64 * block) * kKChunkBytes +
                                ((vec ^ (row & 7)) << 4));
        const auto tokens = Mma::operand_a(w);
        Mma::multiply(low[block], tokens, Mma::operand_b(w[0], w[2]));
        Mma::multiply(high[block], tokens, Mma::operand_b(w[1], w[3]));
      }
    }
  }

  // The squared norm of token lane / 4 (+ 8, if half) of a block. Lane i / 2 of quad i holds element (i, i).
  __device__ __forceinline__ float of(int block, int half) const {
    const int lane = threadIdx.x % 32, i = lane / 4;
    const float (&c)[4] = half == 0 ? low[block] : high[block];
    return __shfl_sync(kFullWarp, i % 2 == 0 ? c[2 * half] : c[2 * half + 1], lane / 4 * 4 + i / 2);
  }
};

// The products of a tile, summed over the stages of its embeddings.
template <class Tile>
__device__ __forceinline__ void multiply_tile(const typename Tile::Args& p, const Sm90DShared<Tile>& memory,
                                              int warpgroup, uint32_t q, PipelineState& state,
                                              typename Tile::Products& c, TokenGram<Tile>& squares,
                                              LaneTokenScales<Tile>& token_scales,
                                              const TokenScaleIndices& indices) {
  for (int first_chunk = 0; first_chunk < p.k_chunks; first_chunk += Tile::kKChunks) {
    memory.ring().consumer_wait(memory.ring_state(warpgroup, state));
    const uint32_t stage = memory.stage(warpgroup, state);
    const uint32_t tokens = ptx::smem_desc_low(stage);
    const uint32_t rows = ptx::smem_desc_low(q + first_chunk * Tile::kQKChunkBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * Tile::kKChunks; ++i) {
      const int k_chunk = i / 4, k = i % 4;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        ptx::WgmmaShape<Tile::kColumns>::template issue<typename Tile::Type>(
            c[block],
            ptx::smem_desc_k_major(tokens + (k_chunk * Tile::kDKChunkBytes + block * 64 * kKChunkBytes) / 16 +
                                   2 * k),
            ptx::smem_desc_k_major(rows + k_chunk * Tile::kQKChunkBytes / 16 + 2 * k),
            first_chunk > 0 || i > 0);
      }
    }
    ptx::wgmma_commit();
    if (!Tile::kQuantized && p.normalize) squares.add(stage);
    uint32_t loaded = 0;
    if constexpr (!Tile::kListed) {
      if (first_chunk == 0) {
        loaded = token_scales.take(p, memory.mask_of(warpgroup, state), memory.scales_of(warpgroup, state),
                                   indices);
      }
    }
    ptx::wgmma_wait<0>();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      memory.ring().consumer_release(memory.ring_state(warpgroup, state).stage, loaded);
    state.advance(memory.share);
  }
}

// Divides the products of the lane's tokens by their norms.
template <class Tile>
__device__ __forceinline__ void normalize_tokens(typename Tile::Products& c, const TokenGram<Tile>& squares) {
#pragma unroll
  for (int block = 0; block < Tile::kBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = fminf(rsqrtf(squares.of(block, half)), 1e12f);
#pragma unroll
      for (int h = 0; h < Tile::kHeld; ++h) c[block][4 * (h / 2) + 2 * half + h % 2] *= inverse;
    }
  }
}

// Folds the lane's tokens of a tile, in their order, into the maxima of its query rows.
template <class Tile>
__device__ __forceinline__ void fold_tokens(const typename Tile::Products& c, float (&maximum)[Tile::kHeld],
                                            int32_t (&token)[Tile::kHeld], int32_t first_token,
                                            const LaneTokenScales<Tile>& token_scales) {
#pragma unroll
  for (int block = 0; block < Tile::kBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool valid = token_scales.keeps[block][half] != 0;
      const int32_t token_index = token_scales.token(first_token, block, half);
      const float scale = Tile::kQuantized ? usable_scale(token_scales.scales[block][half]) : 1.0f;
#pragma unroll
      for (int h = 0; h < Tile::kHeld; ++h) {
        const float value = similarity<Tile::kQuantized>(c[block][4 * (h / 2) + 2 * half + h % 2], scale);
        if constexpr (Tile::kWinners) token[h] = valid && value > maximum[h] ? token_index : token[h];
        if (valid) maximum[h] = max_keeping_nan(maximum[h], value);
      }
    }
  }
}

// Stores the results of reduce_halving for the warp that merges.
template <class Tile>
__device__ __forceinline__ void hand_over(typename Tile::Maxima& to, const float (&maximum)[Tile::kHeld],
                                          const int32_t (&token)[Tile::kHeld]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % Tile::kWarps;
#pragma unroll
  for (int h = 0; h < Tile::kHeld / 8; ++h) {
    const int column = slot_after_halving<Tile::kHeld / 8>(lane, h);
    to.maximum[warp][column] = maximum[h];
    if constexpr (Tile::kWinners) to.token[warp][column] = token[h];
  }
}

template <class Tile>
__device__ __forceinline__ void merge_warps(const typename Tile::Maxima* from, int warpgroups,
                                            float (&best)[Tile::kLaneRows],
                                            int32_t (&best_token)[Tile::kLaneRows]) {
  clear_maxima(best, best_token);
  for (int i = 0; i < warpgroups; ++i) {
#pragma unroll
    for (int o = 0; o < Tile::kLaneRows; ++o) {
      const int row = Tile::slot(0, threadIdx.x % 32, o);
#pragma unroll
      for (int w = 0; w < Tile::kWarps; ++w) {
        int32_t other_token = 0;
        if constexpr (Tile::kWinners) other_token = from[i].token[w][row];
        keep_better<Tile::kWinners>(best[o], best_token[o], from[i].maximum[w][row], other_token);
      }
    }
  }
}

// Computes rare rows (forward/epilogue.cuh) of the j-th document range. Looks the range up again, since the
// caller has no registers for it.
template <class E>
__device__ __noinline__ Maximum resolve_rare_doc_range(const ForwardArgs& p, bool rare, int32_t row,
                                                       int32_t row_tile, int32_t query, int32_t j) {
  const DocRange doc_range = doc_range_of(p, row_tile, j);
  const Span tokens = p.maxima != nullptr ? Span{doc_range.argmax_base, doc_range.length}
                                          : whole_document(p, query, doc_range.document);
  return resolve_rare_rows<E>(p, rare, row, query, doc_range.document, tokens);
}

// Finishes a document range, by the warp that merged the maxima.
template <class Tile>
__device__ __forceinline__ void finish_doc_range(const ForwardArgs& p, const RowTile& tile,
                                                 const LaneRows<Tile>& lane_rows, int32_t row_tile, int32_t j,
                                                 const float (&maximum)[Tile::kLaneRows],
                                                 const int32_t (&token)[Tile::kLaneRows]) {
  Maximum best[Tile::kLaneRows];
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    best[o] = {maximum[o], token[o]};
    if (Tile::kWinners && token[o] >= 0) best[o].token += doc_range_of(p, row_tile, j).argmax_base;
    bool rare = !(fabsf(best[o].value) < INFINITY);
    if (!__any_sync(kFullWarp, rare)) continue;
    const int slot = Tile::slot(0, threadIdx.x % 32, o);
    rare = rare && slot < tile.count && keeps_row(p, tile.first + slot);
    const Maximum exact =
        resolve_rare_doc_range<typename Tile::Element>(p, rare, tile.first + slot, row_tile, tile.query, j);
    if (rare) best[o] = exact;
  }
  if (p.maxima != nullptr) {
    leave_maxima<Tile>(p, tile, 0, j, best);
  } else {
    const int32_t document = doc_range_of(p, row_tile, j).document;
    apply_scale_store_argmax<Tile, Tile::kWinners>(p, lane_rows, document, best);
    sum_queries<Tile>(p, lane_rows, document, best);
  }
}

// One warp: merges the maxima of the team's warps, and finishes the document, or the tile of a pair's rows.
template <class Tile>
__device__ __forceinline__ void merge_and_finish(const typename Tile::Args& p, const RowTile& tile,
                                                 const LaneRows<Tile>& lane_rows, int32_t row_tile,
                                                 int32_t begun, int32_t j,
                                                 const typename Tile::Maxima* maxima) {
  float best[Tile::kLaneRows];
  int32_t best_token[Tile::kLaneRows];
  merge_warps<Tile>(maxima, p.members, best, best_token);
  if constexpr (Tile::kListed) {
    finish_pair<typename Tile::Element, Tile, Tile::kWinners>(p, tile, begun, j, best, best_token);
  } else {
    finish_doc_range<Tile>(p, tile, lane_rows, row_tile, j, best, best_token);
  }
}

// A consumer warpgroup.
template <class Tile>
__device__ __forceinline__ void score_documents(const typename Tile::Args& p, const TensorMaps& maps,
                                                const Sm90DShared<Tile>& memory, int warpgroup) {
  const int team = warpgroup / p.members, member = warpgroup % p.members;
  const int barrier = 1 + team, team_threads = p.members * Tile::kGroupThreads;
  const int thread = threadIdx.x - team * team_threads;  // of the team
  const int32_t lane_token = 16 * (thread / 32 % Tile::kWarps) + thread % 32 / 4;
  const int32_t step = p.members * Tile::kTokens;

  // The members take tiles in turn, across the ends of documents.
  int first_tile = member;  // this warpgroup's first tile of the current document; may lie past its end

  PipelineState state;
  uint32_t q_parity = 0;
  int turn = 0;  // of the team's warps
  RowTile tile;
  LaneRows<Tile> lane_rows;
  typename Tile::Scheduler scheduler(p, team);
  decltype(scheduler.rows_id()) held_rows = -1;
  int32_t next_length = scheduled_doc_range(p, scheduler).length;
  while (scheduler.left > 0) {
    if constexpr (Tile::kListed) tile = pair_tile<Tile>(scheduler.rows, scheduler.begun);
    if (scheduler.rows_id() != held_rows) {
      held_rows = scheduler.rows_id();
      if constexpr (!Tile::kListed) {
        tile = row_tile(p, held_rows, Tile::kRows);
        lane_rows.take(p, tile, 0);
      }
      ptx::named_barrier_sync(barrier, team_threads);
      if (memory.q_owner(team) == team && thread == 0) load_query<Tile>(p, maps, memory, team, tile);
      memory.q_ring(team).consumer_wait({0, q_parity});
      q_parity ^= 1;
      if (!Tile::kQuantized && p.normalize) normalize_rows<Tile>(p, memory.query(team), lane_rows);
    }
    const int32_t j = scheduler.j, rows = Tile::kListed ? 0 : static_cast<int32_t>(held_rows);
    const int32_t length = next_length;
    int32_t begun = 0;
    if constexpr (Tile::kListed) begun = scheduler.begun;
    scheduler.advance(p, p.teams);
    next_length = scheduled_doc_range(p, scheduler).length;
    int32_t t = first_tile * Tile::kTokens;
    first_tile -= (length + Tile::kTokens - 1) / Tile::kTokens % p.members;
    if (first_tile < 0) first_tile += p.members;

    TokenScaleIndices indices{lane_token, lane_token};
    if constexpr (!Tile::kListed) {
      const DocRange doc_range = doc_range_of(p, rows, j);
      indices.mask += p.mask.shift(rows, doc_range);
      indices.scale += p.scales.shift(rows, doc_range);
    }
    float maximum[Tile::kHeld];
    int32_t token[Tile::kHeld];
    clear_maxima(maximum, token);
    for (; t < length; t += step) {
      LaneTokenScales<Tile> token_scales(length, t + lane_token);
      if constexpr (!Tile::kListed) token_scales.load(p, rows, j, t + lane_token);
      typename Tile::Products products;
      TokenGram<Tile> squares;
      multiply_tile<Tile>(p, memory, warpgroup, memory.query(team), state, products, squares, token_scales,
                          indices);
      if constexpr (!Tile::kQuantized) {
        if (p.normalize) normalize_tokens<Tile>(products, squares);
      }
      fold_tokens<Tile>(products, maximum, token, t + lane_token, token_scales);
    }

    // Over the eight lanes that hold the same query rows.
    reduce_halving<16, 3, Tile::kHeld, Tile::kWinners>(maximum, token);
    // Two buffers: a warp that still reads one document's maxima has not joined the barrier of the next.
    typename Tile::Maxima* maxima = &memory.exchange[turn % 2][team * p.members];
    hand_over<Tile>(maxima[member], maximum, token);
    ptx::named_barrier_sync(barrier, team_threads);
    if (turn == thread / 32) merge_and_finish<Tile>(p, tile, lane_rows, rows, begun, j, maxima);
    if (++turn == team_threads / 32) turn = 0;
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_sm90_d(const __grid_constant__ typename Tile::Args p,
                          const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const Sm90DShared<Tile> memory(p, shared);
  // From lane 0, so that the compiler knows that all lanes have the same.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / Tile::kGroupThreads, 0);
  constexpr int kBarriersReady = 15;

  if (warpgroup == Tile::kWarpgroups) {
    ptx::setmaxnreg_dec<Tile::kRegisters.producer>();
    const int thread = threadIdx.x - Tile::kWarpgroups * Tile::kGroupThreads, team = thread / 32;
    if (thread == 0) memory.init_barriers();
    if (thread == 32) {
      ptx::prefetch_tensormap(&maps.D);
      ptx::prefetch_tensormap(&maps.Q);
    }
    __syncwarp();
    ptx::named_barrier_sync(kBarriersReady, Tile::kThreads);
    if (thread % 32 != 0 || team >= p.teams) return;
    ptx::pdl_wait();
    load_documents<Tile>(p, maps, memory, team);
    if (team == 0) ptx::pdl_launch_dependents();
  } else {
    ptx::setmaxnreg_inc<Tile::kRegisters.consumer>();
    ptx::named_barrier_sync(kBarriersReady, Tile::kThreads);
    if (warpgroup >= p.teams * p.members) return;
    ptx::pdl_wait();
    score_documents<Tile>(p, maps, memory, warpgroup);
  }
#endif
}

}  // namespace late_interaction
