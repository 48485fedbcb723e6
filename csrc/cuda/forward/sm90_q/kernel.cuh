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
//   consumer   each of warpgroups 0 and 1: both its blocks of 64 rows against every stage.
//   producer   one thread of warpgroup 2, which keeps few registers: TMA loads of Q tiles and of the ring's
//              stages.
//   token-scale producer
//              the next warp of warpgroup 2, where columns do not count alike: it writes each stage's token
//              mask (kMasked) and token scales (kScaled: inverse norms, or scales of quantized tokens).
//   epilogue   the other two warps of warpgroup 2, one for each consumer. At the end of a document a consumer
//              leaves the maxima of its 128 rows in the EpilogueBuffer and goes on; its epilogue warp
//              resolves, sums and stores them while the wgmma of the next document run.
//
// The tensor cores do not wait for a fold: one consumer folds while the other consumer's wgmma run. For
// longer folds, the body of the loop has unroll_tiles tiles, in which a consumer folds one block while the
// wgmma of the other block are in flight.
//
//     block 0   multiply t | fold t         | multiply t+1       | fold t+1 ...
//     block 1              | multiply t     | fold t, epilogue?  | multiply t+1 ...
//
// No wgmma may be in flight across the back edge of a loop (ptxas would serialize them all): after the last
// tile of the body this warpgroup has none in flight.
//
// A consumer reads the tokens of a document's DocRange (../doc_ranges/doc_range.h): of a masked document from
// the first kept token to the last; of a compacted one the kept tokens alone. The last tile is moved back to
// end with the range: a token that is seen twice changes neither the maximum nor, since ties keep the earlier
// token, the argmax. So columns are masked one by one only where a document is not compacted and has a mask,
// or is shorter than its tile.
//
// Where all columns of a range count alike (kDocRanges), the last tile is a narrower tail, if the remaining
// tokens fit one. Scores without winners have a brief tail, too. Beside each stage the producer writes the
// StageTile of the next one, so that a consumer knows a tile's width before it waits for the tile.
//
//     a document of 240 tokens   |<------ tile, 152 ------>|
//                                                   |<-- tail, 104 -->|
//
// Packed documents have ranges, too. One that is shorter than its only tile, or tail, has columns behind it
// that do not count, mostly tokens of the next document: the StageTile says so, and the consumer overwrites
// their similarities before it folds (leave_out). Packed codes have scales in any case: of 1, if none are
// given.
//
// mbarriers: full and empty for each stage, and for the Q tile. Each consumer warp arrives once on an empty
// mbarrier. If columns have masks or scales, each consumer lane does, since each reads different ones, and
// each lane of the token-scale producer arrives on the full mbarrier.
#pragma once

#include "../../../plan/kernel_limits.h"
#include "../../primitives/code_fold.cuh"
#include "../../primitives/fold.cuh"
#include "../sm90_pipeline.cuh"
#include "epilogue_warp.cuh"

namespace late_interaction {

struct Sm90QPolicy {
  bool three_at_once;  // a fold takes the maximum of three numbers an instruction
  bool reads_ahead;    // a consumer reads scales one tile before it multiplies by them
  int unroll_tiles;    // tiles in the body of the loop
  bool staggered;      // the second consumer begins with a single tile
  bool looks_early;    // a consumer of packed codes reads what lies beside the next stage before it folds
};

// Has a parameter for each trait of a tile that its schedule depends on.
constexpr Sm90QPolicy sm90_q_policy(int columns, int k_chunks, bool quantized, bool float_sums, bool winners,
                                    bool masked, bool scaled, bool doc_ranges) {
  Sm90QPolicy policy{};
  // Quantized tokens have no winners. Floats that were multiplied fold faster two an instruction than three.
  policy.three_at_once = quantized && !(scaled && float_sums);
  // Shared memory is busy with the wgmma, so scales are read early where there are registers for it.
  policy.reads_ahead =
      scaled && !masked && !winners && (doc_ranges || (quantized ? k_chunks == 1 : columns <= 128));
  // One: the shortest fold hides behind the other warpgroup's wgmma, and a short body is fetched faster.
  // Four: longer folds also need wgmma of the same warpgroup. Two: registers are short, or four bodies do not
  // fit the instruction cache.
  const bool shortest_fold = !masked && !scaled && !quantized && !winners;
  const bool long_body = (masked || scaled) && (quantized || winners || (masked && scaled));
  policy.unroll_tiles = shortest_fold || (masked && winners && !scaled) ? 1 : long_body ? 2 : 4;
  // Without it both consumers would wait for their wgmma at once.
  policy.staggered = quantized && scaled && !policy.three_at_once;
  // Measured: int8 takes a tenth longer the other way, fp8 a twentieth this way.
  policy.looks_early = !float_sums;
  return policy;
}

// kMasked: some tokens may not count, or a document may be shorter than a tile. kScaled: each token has a
// scale, an inverse norm or a quantization scale. kDocRanges: documents have ranges, and all columns that
// hold their tokens count alike. kTail: columns of a tail; kColumns: no tile is narrower.
template <class Type_, class Element_, int kColumns_, int kKChunks_, bool kWinners_, bool kMasked_,
          bool kScaled_, bool kDocRanges_, int kTail_>
struct Sm90QTile {
  using Type = Type_;
  using Element = Element_;
  using Accumulator = typename Type::Accumulator;
  static constexpr int kColumns = kColumns_;
  static constexpr int kKChunks = kKChunks_;
  static constexpr bool kWinners = kWinners_, kPacked = true;
  static constexpr bool kMasked = kMasked_, kScaled = kScaled_, kMaskedOrScaled = kMasked || kScaled;
  static constexpr bool kQuantized = sizeof(Element) == 1;
  static constexpr bool kDocRanges = kDocRanges_, kPackedCodes = kDocRanges && kScaled;
  // All documents have Ld tokens, none compacted.
  static constexpr bool kWhole = has_whole(sizeof(Element), kMasked, kScaled) && !kDocRanges;
  static constexpr int kTail = kTail_;
  static constexpr int kBrief = kDocRanges && !kWinners ? brief_width(kColumns) : kTail;
  // Each document has two tiles, the second one narrower.
  static constexpr bool kTwoWidths = kWhole && kTail < kColumns;
  static constexpr Sm90QPolicy kPolicy =
      sm90_q_policy(kColumns, kKChunks, kQuantized, std::is_same_v<Accumulator, float>, kWinners, kMasked,
                    kScaled, kDocRanges);
  using Best = std::conditional_t<kPolicy.three_at_once, CodeMaximumFold<Similarity<Accumulator, kScaled>>,
                                  MaximumFold<kWinners>>;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // A launch gives each of the 384 threads 168, which warpgroups then share out.
  static constexpr int kConsumerRegisters = 224, kHelperRegisters = 56;
  static constexpr int kFirstEpilogueWarp = kThreads / 32 - kConsumers;
  static constexpr int kRows = 128 * kConsumers, kWarpRows = 128;
  static constexpr int kHeld = 4, kLaneRows = 4;  // rows of a consumer's lane, of an epilogue warp's
  static constexpr int kKChunkElements = kKChunkBytes / sizeof(Element);
  static constexpr uint32_t kQKChunkBytes = kRows * kKChunkBytes;
  static constexpr uint32_t kStageKChunkBytes = kColumns * kKChunkBytes;
  static constexpr uint32_t kStageBytes = kKChunks * kStageKChunkBytes;
  // A stage also holds a bit for each column, those of one lane of a quad together, then the columns' scales.
  static constexpr int kMaskWords = kMasked ? (kColumns / 4 + 31) / 32 : 0;
  static constexpr uint32_t kMaskBytes = 16 * kMaskWords;
  static constexpr uint32_t kTokenScaleBytes = kMaskBytes + (kScaled ? 4 * scale_columns(kColumns) : 0);

  static __device__ __forceinline__ int slot(int warp, int lane, int o) {
    return kWarpRows * warp + 32 * (lane / 8) + 8 * o + lane % 8;
  }
};

// Shared memory of a block, in this order: the Q tile, the ring, token masks and scales, epilogue buffers,
// EpilogueRows, mbarriers, StageTiles, and consumers' spilled values.
template <class Tile>
struct Sm90QShared {
  static constexpr uint32_t kEpilogueBytes =
      Tile::kConsumers * (EpilogueBuffer<Tile>::kBytes + sizeof(EpilogueRows<Tile>));
  static constexpr uint32_t kBarrierBytes = 256, kSpillBytes = 12;  // of all stages; of a thread
  static constexpr uint32_t kKept = kEpilogueBytes + kBarrierBytes + 128 * Tile::kConsumers * kSpillBytes;
  uint32_t q, first_stage, token_scales, epilogue_buffers, barriers;
  EpilogueRows<Tile>* epilogue_rows;

  __device__ __forceinline__ Sm90QShared(uint8_t* base, int stages)
      : q(ptx::smem_address(base)),
        first_stage(q + Tile::kKChunks * Tile::kQKChunkBytes),
        token_scales(first_stage + stages * Tile::kStageBytes),
        epilogue_buffers(token_scales + stages * Tile::kTokenScaleBytes),
        barriers(epilogue_buffers + kEpilogueBytes),
        epilogue_rows(reinterpret_cast<EpilogueRows<Tile>*>(
            base + (epilogue_buffers - q) + Tile::kConsumers * EpilogueBuffer<Tile>::kBytes)) {}

  __device__ __forceinline__ uint32_t spill(int i) const {
    return barriers + kBarrierBytes + kSpillBytes * ptx::tid_x() + 4 * i;
  }
  __device__ __forceinline__ uint32_t stage(int i) const { return first_stage + i * Tile::kStageBytes; }
  __device__ __forceinline__ uint32_t token_scales_of(int i) const {
    return token_scales + i * Tile::kTokenScaleBytes;
  }
  __device__ __forceinline__ Ring q_ring() const { return {barriers}; }
  __device__ __forceinline__ EpilogueBuffer<Tile> epilogue_buffer(int consumer) const {
    return {epilogue_buffers + consumer * EpilogueBuffer<Tile>::kBytes,
            {barriers + (1 + consumer * EpilogueBuffer<Tile>::kStages) * Ring::kBytes}};
  }
  __device__ __forceinline__ Ring ring() const {
    return {barriers + (1 + Tile::kConsumers * EpilogueBuffer<Tile>::kStages) * Ring::kBytes};
  }
  __device__ __forceinline__ uint32_t stage_tile(int i) const {
    return ring().barriers + 8 * Ring::kBytes + 4 * i;  // behind kMostStages
  }
};

enum class Width : uint32_t { none, full, tail, brief };

// A tile of a document range.
struct StageTile {
  int32_t begin;  // first token; below 0: the tile begins at 0, and its last -begin columns do not count
  Width width;    // none: no tile follows against the same rows
  bool ends;      // the last tile of the document range; beside a stage: whether the stage's own tile is

  __device__ __forceinline__ uint32_t packed() const {
    return 8u * begin + 2 * static_cast<uint32_t>(width) + (ends ? 1 : 0);
  }
  // From lane 0, so that the compiler knows that all lanes have the same.
  static __device__ __forceinline__ StageTile unpacked(uint32_t word) {
    word = __shfl_sync(kFullWarp, word, 0);
    return {static_cast<int32_t>(word) >> 3, Width{word / 2 % 4}, word % 2 != 0};
  }
};

// Tiles of a document. An empty document has one tile, whose maxima are dropped.
template <class Tile>
__device__ __forceinline__ int32_t count_tiles(int32_t length) {
  return max(1, (length + Tile::kColumns - 1) / Tile::kColumns);
}

// The first token of the tile at t of a document range: the last tile is moved back to end with the range.
// See StageTile::begin.
template <class Tile>
__device__ __forceinline__ int32_t tile_begin(int32_t length, int32_t t, int32_t columns = Tile::kColumns) {
  const int32_t begin = min(t, length - columns);
  return Tile::kDocRanges ? begin : max(0, begin);
}

// The width of the tile at token t: a tail's, where the tokens that remain fit one.
template <class Tile>
__device__ __forceinline__ Width tile_width(int32_t length, int32_t t) {
  if (Tile::kBrief < Tile::kTail && length - t <= Tile::kBrief) return Width::brief;
  return Tile::kTail < Tile::kColumns && length - t <= Tile::kTail ? Width::tail : Width::full;
}

template <class Tile>
__device__ __forceinline__ int32_t columns_of(Width width) {
  return width == Width::brief ? Tile::kBrief : width == Width::tail ? Tile::kTail : Tile::kColumns;
}

template <class Tile>
__device__ __forceinline__ StageTile tile_at(int32_t length, int32_t t) {
  const Width width = tile_width<Tile>(length, t);
  return {tile_begin<Tile>(length, t, columns_of<Tile>(width)), width, t + Tile::kColumns >= length};
}

// The index of a column's scale in its stage. Neighbours are swapped: accumulators of even columns are in
// even registers, and a load puts its first number into an even register. Swapped, the operands of a product
// are in different banks, and it reads both at once. kFours, of packed codes: the four that a lane sees of
// 16 columns lie together. Padded codes, which read two at a time, took a twentieth longer that way.
template <bool kFours>
__device__ __forceinline__ uint32_t scale_index(uint32_t column) {
  if (!kFours) return column ^ 1;
  return column / 16 * 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + (column % 2 ^ 1);
}

// The token mask and scales of a stage, for the lane that sees columns 8 * n + 2 * (lane % 4) + {0, 1}: bit
// 2 * n + e of `kept` says whether such a column counts, and scales(n) are the two scales. With reads_ahead
// the scale of the next tile replaces each scale after use.
template <class Tile>
struct ColumnScales {
  static constexpr bool kHeld = Tile::kPolicy.reads_ahead;
  uint32_t kept[Tile::kMasked ? Tile::kMaskWords : 1];
  float2 held[kHeld ? Tile::kColumns / 8 : 1];
  uint32_t lane_scales;  // address of the scales of this lane's columns

  __device__ __forceinline__ void enter(uint32_t token_scales) {
    const uint32_t quad = ptx::tid_x() % 4;
    if constexpr (Tile::kMasked) {
#pragma unroll
      for (int w = 0; w < Tile::kMaskWords; ++w) {
        kept[w] = ptx::ld_shared(token_scales + (quad * Tile::kMaskWords + w) * 4);
      }
    }
    if constexpr (Tile::kScaled) lane_scales = token_scales + Tile::kMaskBytes + quad * 8;
  }

  __device__ __forceinline__ float2 load(int n) const {
    const float2 swapped = ptx::ld_shared_v2_f32(lane_scales + n * 32);
    return {swapped.y, swapped.x};
  }
  __device__ __forceinline__ float2 scales(int n) const { return kHeld ? held[n] : load(n); }
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int n = 0; n < Tile::kColumns / 8; ++n) held[n] = load(n);
  }

  // The similarities that leave_out writes, times these scales, are -infinity.
  template <int kFirst, int kWidth>
  __device__ __forceinline__ void leave_out(int32_t count) {
    const int32_t kept = count - 2 * static_cast<int32_t>(ptx::tid_x() % 4);
#pragma unroll
    for (int n = kFirst / 8; n < kWidth / 8; ++n) {
      if (8 * n >= kept) held[n].x = FLT_MAX;
      if (8 * n + 1 >= kept) held[n].y = FLT_MAX;
    }
  }

  // The same for scales that lie in fours: reads those of columns 8 * n to 8 * n + 15; of all from 8 * kFirst
  // on.
  __device__ __forceinline__ void enter_fours(uint32_t token_scales) {
    lane_scales = token_scales + static_cast<uint32_t>(ptx::tid_x()) % 4 * 16;
  }
  __device__ __forceinline__ void hold_four(int n) {
    const float4 swapped = ptx::ld_shared_v4_f32(lane_scales + n * 32);
    held[n] = {swapped.y, swapped.x};
    if (n + 1 < Tile::kColumns / 8) held[n + 1] = {swapped.w, swapped.z};
  }
  template <int kFirst = 0>
  __device__ __forceinline__ void hold_fours() {
#pragma unroll
    for (int n = kFirst; n < Tile::kColumns / 8; n += 2) hold_four(n);
  }

  // Bits 1 to 6 of the result are the six bits from column 8 * n on: a single instruction makes predicates of
  // them. The compiler must not know the source, or it tests bit by bit.
  __device__ __forceinline__ uint32_t six_bits(int n) const {
    const int first = 2 * n, word = first / 32, shift = first % 32;
    uint32_t bits = shift == 0 ? kept[word] << 1 : kept[word] >> (shift - 1);
    if (shift > 26 && word + 1 < Tile::kMaskWords) {
      bits = __funnelshift_r(kept[word], kept[word + 1], shift - 1);
    }
    asm volatile("" : "+r"(bits));
    return bits;
  }
};

// Calls fold(n, x, keeps) for columns 8 * n + 2 * (lane % 4) + {0, 1}: their similarities x[row half], and
// whether they count; then used(n), when scales(n) are no longer needed.
template <class Tile, int kWidth, class Used, class Fold>
__device__ __forceinline__ void for_columns(const typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                            const ColumnScales<Tile>& token_scales, Used used, Fold fold) {
  constexpr int kPairs = kWidth / 8;
#pragma unroll
  for (int first = 0; first < kPairs; first += 3) {
    bool keeps[3][2] = {};
    if constexpr (Tile::kMasked) {
      const uint32_t bits = token_scales.six_bits(first);
#pragma unroll
      for (int i = 0; i < 6; ++i) keeps[i / 2][i % 2] = (bits & (2u << i)) != 0;
    }
#pragma unroll
    for (int n = first; n < min(first + 3, kPairs); ++n) {
      float2 scales{1.0f, 1.0f};
      if constexpr (Tile::kScaled) scales = token_scales.scales(n);
      Similarity<typename Tile::Accumulator, Tile::kScaled> x[2][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[half][0] = similarity<Tile::kScaled>(c[4 * n + 2 * half], scales.x);
        x[half][1] = similarity<Tile::kScaled>(c[4 * n + 2 * half + 1], scales.y);
      }
      fold(n, x, keeps[n - first]);
      used(n);
    }
  }
}

// Folds the lane's two rows of a block of 64.
template <class Tile, int kWidth, class Used>
__device__ __forceinline__ void fold_block(const typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                           MaximumFold<Tile::kWinners>* rows, float token, const float* zeros,
                                           const ColumnScales<Tile>& token_scales, Used used) {
  const float first_token[2] = {token + zeros[0], token + zeros[1]};
  for_columns<Tile, kWidth>(c, token_scales, used,
                            [&](int n, const float (&x)[2][2], const bool (&keeps)[2]) {
                              if constexpr (Tile::kMasked && !Tile::kWinners) {
#pragma unroll
                                for (int e = 0; e < 2; ++e) {
                                  if (keeps[e]) {  // once for both rows
                                    rows[0].value = larger(rows[0].value, x[0][e]);
                                    rows[1].value = larger(rows[1].value, x[1][e]);
                                  }
                                }
                              } else {
#pragma unroll
                                for (int half = 0; half < 2; ++half) {
                                  const float a = !Tile::kMasked || keeps[0] ? x[half][0] : -INFINITY;
                                  const float b = !Tile::kMasked || keeps[1] ? x[half][1] : -INFINITY;
                                  rows[half].fold(a, b, first_token[half], 8.0f * n, zeros[0]);
                                }
                              }
                            });
}

// The same with the maximum of three numbers an instruction.
template <class Tile, int kWidth, class Used, class Value>
__device__ __forceinline__ void fold_block(const typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                           CodeMaximumFold<Value>* rows, float, const float*,
                                           const ColumnScales<Tile>& token_scales, Used used) {
  Value seen[2][kWidth / 4];
  int32_t top[2] = {rows[0].order(), rows[1].order()};
  for_columns<Tile, kWidth>(c, token_scales, used, [&](int n, const Value(&x)[2][2], const bool (&keeps)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Tile::kMasked) {
        rows[half].fold_kept(x[half][0], keeps[0]);
        rows[half].fold_kept(x[half][1], keeps[1]);
      } else {
        seen[half][2 * n] = x[half][0];
        seen[half][2 * n + 1] = x[half][1];
        top[half] = CodeMaximumFold<Value>::highest(top[half], x[half][0], x[half][1]);
      }
    }
  });
  if constexpr (!Tile::kMasked) CodeMaximumFold<Value>::take(rows, top, seen);
}

// The first column that may not count in a tile of kWidth: documents that fit a tail have no wider tile.
template <class Tile, int kWidth>
__device__ constexpr int first_left_out() {
  return kWidth > Tile::kTail ? Tile::kTail : kWidth > Tile::kBrief ? Tile::kBrief : 0;
}

// Overwrites the similarities of columns that do not count in a tile that has some.
template <class Tile, int kWidth>
__device__ __forceinline__ void leave_out(typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                          const StageTile& tile) {
  using Accumulator = typename Tile::Accumulator;
  constexpr Accumulator kNone = CodeMaximumFold<Accumulator>::kNone;
  const int32_t kept = kWidth + tile.begin - 2 * static_cast<int32_t>(ptx::tid_x() % 4);
#pragma unroll
  for (int n = first_left_out<Tile, kWidth>() / 8; n < kWidth / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * n + e >= kept) c[4 * n + e] = c[4 * n + 2 + e] = kNone;
    }
  }
}

// Loads a tail of a packed document that begins at token `first`, in small boxes, those with tokens of it: a
// whole box would read as many tokens of other documents as well.
template <class Tile>
__device__ __forceinline__ void load_tail(const TensorMaps& maps, const Sm90QShared<Tile>& smem, int stage,
                                          const StageTile& tile, int32_t first) {
  constexpr uint32_t kBoxBytes = kTailTokens * kKChunkBytes;
  const int32_t count = columns_of<Tile>(tile.width) + min(tile.begin, 0);
  const int32_t boxes = max(1, (count + kTailTokens - 1) / kTailTokens);
  smem.ring().producer_expect(stage, boxes * Tile::kKChunks * kBoxBytes);
#pragma unroll 1
  for (int32_t i = 0; i < boxes; ++i) {
#pragma unroll
    for (int k_chunk = 0; k_chunk < Tile::kKChunks; ++k_chunk) {
      ptx::tma_load_4d(smem.stage(stage) + k_chunk * Tile::kStageKChunkBytes + i * kBoxBytes, &maps.D_tail,
                       smem.ring().full(stage), k_chunk * Tile::kKChunkElements, first + i * kTailTokens, 0,
                       0);
    }
  }
}

// The producer, one thread: loads Q tiles and the tiles of documents.
template <class Tile>
__device__ void load_tiles(const ForwardArgs& p, const TensorMaps& maps, const Sm90QShared<Tile>& smem) {
  PipelineState state, q_state;
  for (WorkRange range = WorkRange::of_block(p); range.work_tile < range.end; q_state.advance(1)) {
    const RowTileItems items = take_row_tile_items(range.work_tile, range.end, int64_t{p.N});
    const RowTile rows = row_tile(p, items.row_tile, Tile::kRows);
    load_q_tile<Tile>(
        maps.Q, smem.q, smem.q_ring(), q_state, [&] { return first_query_token(p, rows); }, rows.query);
    DocRange following;
    if constexpr (Tile::kPackedCodes) following = doc_range_at<Tile>(p, rows, items.first);
    for (int32_t j = items.first; j < items.end; ++j) {
      const DocRange doc_range = Tile::kPackedCodes ? following : doc_range_at<Tile>(p, rows, j);
      if (Tile::kPackedCodes && j + 1 < items.end) following = doc_range_at<Tile>(p, rows, j + 1);
      const CUtensorMap* map = doc_range.compacted() ? &maps.compacted : &maps.D;
      const int32_t item = doc_range.compacted() || p.packed ? 0 : doc_range.document;
      const int32_t outer = doc_range.compacted() ? 0 : rows.query;
      for (int32_t t = 0; t < max(doc_range.length, 1); t += Tile::kColumns) {
        const StageTile tile = tile_at<Tile>(doc_range.length, t);
        smem.ring().producer_acquire(state);
        if constexpr (Tile::kDocRanges) {
          StageTile next{0, Width::none, true};
          if (!tile.ends) {
            next = tile_at<Tile>(doc_range.length, t + Tile::kColumns);
          } else if (j + 1 < items.end) {
            if constexpr (!Tile::kPackedCodes) following = doc_range_at<Tile>(p, rows, j + 1);
            next = tile_at<Tile>(following.length, 0);
          }
          next.ends = tile.ends;
          ptx::st_shared(smem.stage_tile(state.stage), next.packed());
        }
        if (Tile::kDocRanges && p.packed && tile.width != Width::full) {
          load_tail<Tile>(maps, smem, state.stage, tile, doc_range.first + max(tile.begin, 0));
        } else {
          smem.ring().producer_expect(state.stage, Tile::kStageBytes);
          for (int k_chunk = 0; k_chunk < Tile::kKChunks; ++k_chunk) {
            ptx::tma_load_4d(smem.stage(state.stage) + k_chunk * Tile::kStageKChunkBytes, map,
                             smem.ring().full(state.stage), k_chunk * Tile::kKChunkElements,
                             doc_range.begin() + max(tile.begin, 0), item, outer);
          }
        }
        state.advance(p.stages);
      }
    }
  }
}

// One warp, for packed codes: lane l copies the scales of columns l, l + 32, ... Those of two tiles are under
// way, since tiles are shorter than the latency of memory.
template <class Tile>
struct DocRangeScaleProducer {
  static constexpr int kRounds = (Tile::kColumns + 31) / 32;

  struct Scales {
    float of_column[kRounds];
    bool loaded = false;
  };

  const ForwardArgs& p;
  const Sm90QShared<Tile>& smem;
  PipelineState state;
  int32_t documents, j;           // left, with the one at hand; the index of the one behind it
  int32_t t;                      // the next tile's first token in the document at hand
  DocRange doc_range, following;  // of the document at hand, of the one behind it

  __device__ __forceinline__ DocRangeScaleProducer(const ForwardArgs& args, const Sm90QShared<Tile>& shared)
      : p(args), smem(shared) {
    const WorkRange range = WorkRange::of_block(p);
    documents = static_cast<int32_t>(range.end - range.work_tile);
    if (documents <= 0) return;
    j = static_cast<int32_t>(range.work_tile % p.N);
    following = p.doc_ranges[j];
    enter_document();
  }

  __device__ __forceinline__ void enter_document() {
    doc_range = following;
    t = 0;
    if (++j == p.N) j = 0;
    if (documents > 1) following = p.doc_ranges[j];
  }

  // The scale of a column that does not count may be any number: leave_out overwrites it.
  __device__ __forceinline__ void load_next(Scales& scales) {
    scales.loaded = documents > 0;
    if (!scales.loaded) return;
    const int lane = threadIdx.x % 32;
    const StageTile tile = tile_at<Tile>(doc_range.length, t);
    const bool given = p.d_scales.data != nullptr;
    const int32_t count = given ? columns_of<Tile>(tile.width) + min(tile.begin, 0) : 0;
    const int64_t token = doc_range.first + max(tile.begin, 0) + lane;
    const float* from = p.d_scales.data + token * p.d_scales.token_stride;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      scales.of_column[i] = 32 * i + lane < count ? *from : 1.0f;
      from += 32 * p.d_scales.token_stride;
    }
    t += Tile::kColumns;
    if (t < doc_range.length) return;
    --documents;
    enter_document();
  }

  __device__ __forceinline__ void store(const Scales& scales) {
    const int lane = threadIdx.x % 32;
    smem.ring().producer_acquire(state);
    const uint32_t at = smem.token_scales_of(state.stage) + 4 * scale_index<true>(lane);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (32 * i + lane < Tile::kColumns) {
        ptx::st_shared(at + 128 * i, __float_as_uint(usable_scale(scales.of_column[i])));
      }
    }
    smem.ring().producer_commit(state.stage);
    state.advance(p.stages);
  }

  __device__ __forceinline__ void run() {
    Scales even, odd;
    do {
      if (even.loaded) store(even);
      load_next(even);
      if (odd.loaded) store(odd);
      load_next(odd);
    } while (even.loaded);
  }
};

// One warp: lane l writes the mask and scales of columns l, l + 32, ..., loaded before it waits for a stage.
template <class Tile>
struct TokenScaleProducer {
  static constexpr int kRounds = (Tile::kColumns + 31) / 32;

  const ForwardArgs& p;
  const Sm90QShared<Tile>& smem;
  PipelineState state;

  struct Columns {
    bool kept[kRounds];
    float scale[kRounds];
  };

  __device__ __forceinline__ Columns load_columns(const uint8_t* mask, const float* scales, int64_t stride,
                                                  Span span, int32_t t) const {
    Columns loaded;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int32_t token = span.first + tile_begin<Tile>(span.length, t) + 32 * i + ptx::tid_x() % 32;
      const bool exists = token < span.first + span.length && 32 * i + ptx::tid_x() % 32 < Tile::kColumns;
      if constexpr (Tile::kMasked) {
        loaded.kept[i] = exists && (mask == nullptr || mask[token * p.d_mask.token_stride] != 0);
      }
      if constexpr (Tile::kScaled) loaded.scale[i] = exists ? usable_scale(scales[token * stride]) : 0.0f;
    }
    return loaded;
  }

  __device__ __forceinline__ void store(const Columns& loaded) {
    const int lane = ptx::tid_x() % 32;
    const uint32_t token_scales = smem.token_scales_of(state.stage);
    if constexpr (Tile::kMasked) {
      uint32_t words[Tile::kMaskWords] = {};
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const uint32_t bits = __ballot_sync(kFullWarp, loaded.kept[i]);
        // A lane of a quad sees two of each eight columns: eight bits hold those of 32 columns.
        uint32_t lane_bits = (bits >> (2 * (lane % 4))) & 0x03030303u;
        lane_bits = (lane_bits | lane_bits >> 6 | lane_bits >> 12 | lane_bits >> 18) & 0xFF;
        words[i / 4] |= lane_bits << (8 * (i % 4));
      }
#pragma unroll
      for (int w = 0; w < Tile::kMaskWords; ++w) {
        if (lane < 4) ptx::st_shared(token_scales + (lane * Tile::kMaskWords + w) * 4, words[w]);
      }
    }
    if constexpr (Tile::kScaled) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int column = 32 * i + lane;
        if (column < Tile::kColumns) {
          ptx::st_shared(token_scales + Tile::kMaskBytes + 4 * scale_index<false>(column),
                         __float_as_uint(loaded.scale[i]));
        }
      }
    }
    smem.ring().producer_commit(state.stage);
    state.advance(p.stages);
  }

  __device__ __forceinline__ void run() {
    const WorkRange range = WorkRange::of_block(p);
    int64_t documents = range.end - range.work_tile;
    int32_t tile = static_cast<int32_t>(range.work_tile / p.N),
            j = static_cast<int32_t>(range.work_tile % p.N);
    for (; documents > 0; ++tile, j = 0) {
      const RowTile rows = row_tile(p, tile, Tile::kRows);
      for (; j < p.N && documents > 0; ++j, --documents) {
        const DocRange doc_range = doc_range_at<Tile>(p, rows, j);
        const uint8_t* mask = document_mask(p, rows.query, doc_range.document);
        const float* scales = doc_range.compacted()
                                  ? p.compacted.scales
                                  : document_scales(p.d_scales, rows.query, doc_range.document);
        const int64_t stride = doc_range.compacted() ? 1 : p.d_scales.token_stride;
        // Compacted tokens fill a tile: the last one is repeated.
        const Span span{doc_range.begin(),
                        doc_range.compacted() ? max(doc_range.length, Tile::kColumns) : doc_range.length};
        for (int32_t t = 0; t < max(span.length, 1); t += Tile::kColumns) {
          const Columns loaded = load_columns(mask, scales, stride, span, t);
          smem.ring().producer_acquire(state);
          store(loaded);
        }
      }
    }
  }
};

template <class Tile>
struct Sm90QConsumer {
  using Accumulator = typename Tile::Accumulator;
  const ForwardArgs& p;
  const Sm90QShared<Tile>& smem;
  const EpilogueBuffer<Tile> epilogue_buffer;
  uint32_t q_blocks;  // this warpgroup's rows of the Q tile
  PipelineState state;
  typename Tile::Best best[Tile::kHeld];
  ColumnScales<Tile> token_scales;
  int32_t t;        // the current tile's first token in its document range
  StageTile tile;   // the current tile, where documents have ranges; its `ends` is that of the one before
  StageTile next;   // of packed codes: what lies beside the current stage
  uint32_t handed;  // documents left to the epilogue warp so far

  template <int kWidth>
  __device__ __forceinline__ void multiply(Accumulator (&c)[Tile::kColumns / 2], int block) {
    // The first wgmma overwrites them. But where tiles of two widths meet, ptxas does not know that the old
    // values are dead, and would keep them.
    if constexpr (Tile::kDocRanges || Tile::kTwoWidths) {
#pragma unroll
      for (Accumulator& x : c) x = 0;
    }
    multiply_rows<typename Tile::Type, kWidth, 4 * Tile::kKChunks, Tile::kQKChunkBytes,
                  Tile::kStageKChunkBytes>(reinterpret_cast<Accumulator(&)[kWidth / 2]>(c),
                                           q_blocks + block * 64 * kKChunkBytes, smem.stage(state.stage));
  }
  // Zero, but not to the compiler. It computes values that are equal in all lanes between wgmma, and each
  // such pause lets in wgmma of the other consumer, until both consumers wait at once. So where folds are so
  // short that only wgmma keep the consumers apart, it must not know that the stage is such a value: plain
  // calls took a tenth longer.
  static __device__ __forceinline__ int unknown_zero() { return ptx::tid_x() >> 12; }

  // Index and length of the current document range, and the row tile: registers are for accumulators.
  enum SmemSpill { kItem, kLength, kTile };
  __device__ __forceinline__ void spill(SmemSpill what, uint32_t value) const {
    ptx::st_shared(smem.spill(what), value);
  }
  __device__ __forceinline__ int32_t spilled(SmemSpill what) const {
    return static_cast<int32_t>(ptx::ld_shared(smem.spill(what)));
  }
  __device__ __forceinline__ RowTile rows_at_hand() const { return row_tile(p, spilled(kTile), Tile::kRows); }

  __device__ __forceinline__ int32_t length() const { return Tile::kWhole ? p.Ld : spilled(kLength); }

  __device__ __forceinline__ void enter(int32_t j) {
    t = 0;
    if constexpr (Tile::kWhole) return;
    spill(kItem, j);
    spill(kLength, doc_range_at<Tile>(p, rows_at_hand(), j).length);
  }

  __device__ __forceinline__ void wait_for_stage() const { smem.ring().consumer_wait(state); }

  // The StageTile beside the current stage. Lane 0 reads it, since lane 0 releases the stage; where tokens
  // have scales, all lanes do.
  __device__ __forceinline__ uint32_t read_stage_tile(int stage) const {
    uint32_t word = 0;
    if (Tile::kScaled || ptx::tid_x() % 32 == 0) word = ptx::ld_shared(smem.stage_tile(stage));
    return word;
  }

  // The current tile, of kWidth columns.
  template <int kWidth>
  __device__ __forceinline__ StageTile tile_at_hand() const {
    if constexpr (Tile::kDocRanges) return tile;
    if constexpr (Tile::kTwoWidths) {
      if (kWidth == Tile::kColumns) return {0, Width::full, false};
      return {p.Ld - Tile::kTail, Width::tail, true};
    }
    return tile_at<Tile>(length(), t);
  }

  // Takes a tile of kWidth columns, whose first block is in flight, and leaves in flight the first block of
  // the next tile, of kNext columns; 0: there is none in this body. `more`: tiles follow this body. Only the
  // last tile of a body may have columns that do not count: elsewhere ptxas would run out of registers.
  template <int kWidth, int kNext>
  __device__ __forceinline__ void take_tile(Accumulator (&c)[2][Tile::kColumns / 2], bool more) {
    static_assert(!Tile::kPackedCodes);  // take_scaled_tile
    multiply<kWidth>(c[1], 1);
    // Before the waits, so that the next tile knows whether the range ends. With scales there is no register
    // for that, nor for the next tile of a document range with winners.
    constexpr bool kReadsLate = Tile::kDocRanges && Tile::kWinners;
    const StageTile now = tile_at_hand<kWidth>();
    StageTile read = now;
    if constexpr (Tile::kDocRanges && !kReadsLate) read = StageTile::unpacked(read_stage_tile(state.stage));
    constexpr bool kMayBeShort = Tile::kDocRanges && kNext == 0;
    const int32_t begin = kMayBeShort ? max(now.begin, 0) : now.begin;
    const float first_token = static_cast<float>(begin + 2 * (ptx::tid_x() % 4));
    if constexpr (Tile::kMaskedOrScaled && !Tile::kPolicy.reads_ahead)
      token_scales.enter(smem.token_scales_of(state.stage));
    ptx::wgmma_wait<1>();
    if constexpr (kMayBeShort) {
      if (__builtin_expect(now.begin < 0, false)) leave_out<Tile, kWidth>(c[0], now);
    }
    // Always true, but not to the compiler: without the branch it would move some of the fold behind the wait
    // for the wgmma that the fold is to overlap, or load all scales before the fold.
    if ((kNext > 0 && !Tile::kScaled) || __float_as_uint(p.zeros[0]) == 0)
      fold_block<Tile, kWidth>(c[0], best, first_token, p.zeros, token_scales, [](int) {});
    const PipelineState folded = state;
    state.advance(p.stages);
    if constexpr (kNext > 0) {
      wait_for_stage();
      multiply<kNext>(c[0], 0);
      ptx::wgmma_wait<1>();
    } else {
      if (Tile::kPolicy.reads_ahead && more) wait_for_stage();
      ptx::wgmma_wait<0>();
    }
    constexpr bool kReadsHere = (Tile::kScaled && !ColumnScales<Tile>::kHeld) || kReadsLate;
    if (!kReadsHere && (Tile::kMaskedOrScaled || threadIdx.x % 32 == 0))
      smem.ring().consumer_release(folded.stage);
    if constexpr (Tile::kPolicy.reads_ahead) token_scales.enter(smem.token_scales_of(state.stage));
    if constexpr (kMayBeShort) {
      if (__builtin_expect(now.begin < 0, false)) leave_out<Tile, kWidth>(c[1], now);
    }
    fold_block<Tile, kWidth>(c[1], best + 2, first_token, p.zeros + 2, token_scales, [&](int n) {
      if constexpr (Tile::kPolicy.reads_ahead) {
        if (kNext > 0 || more) token_scales.held[n] = token_scales.load(n);
        if (n % 4 == 3) __syncwarp();  // else the compiler would move all loads to the end
      }
    });
    if constexpr (kReadsLate) read = StageTile::unpacked(read_stage_tile(folded.stage));
    if (kReadsHere && (Tile::kMaskedOrScaled || threadIdx.x % 32 == 0))
      smem.ring().consumer_release(folded.stage);
    t += Tile::kColumns;
    if (Tile::kScaled ? t >= spilled(kLength) : read.ends) {
      epilogue_buffer.give(best, epilogue_buffer.state(handed++));
      if constexpr (!Tile::kDocRanges) enter(Tile::kWhole ? 0 : spilled(kItem) + 1);
    }
    if constexpr (Tile::kDocRanges) tile = read;
  }

  // A body of the loop: takes kTiles tiles, the last of them kLast columns wide. `more`: tiles follow.
  template <int kTiles, int kLast = Tile::kColumns>
  __device__ __forceinline__ void take_tiles(bool more) {
    constexpr auto kWidth = [](int i) { return i >= kTiles ? 0 : i == kTiles - 1 ? kLast : Tile::kColumns; };
    Accumulator c[2][Tile::kColumns / 2];
    if constexpr (!Tile::kPolicy.reads_ahead && !Tile::kDocRanges) wait_for_stage();
    multiply<kWidth(0)>(c[0], 0);
    [&]<int... kAt>(std::integer_sequence<int, kAt...>) {
      (take_tile<kWidth(kAt), kWidth(kAt + 1)>(c, more), ...);
    }(std::make_integer_sequence<int, kTiles>{});
  }

  // Returns the first tile of the document range at j.
  __device__ __forceinline__ StageTile first_tile(int32_t j) const {
    const int32_t length = doc_range_at<Tile>(p, rows_at_hand(), j).length;
    return StageTile::unpacked(tile_at<Tile>(length, 0).packed());
  }

  // Takes all tiles that a row tile meets, from document `first` on, where documents have ranges. If folds
  // are long, a tail shares a body with the tile before it, so that a block of the tail is in flight while
  // that tile is folded; but a tile with columns that do not count has a body of its own.
  __device__ __forceinline__ void take_doc_range_tiles(int32_t first) {
    tile = first_tile(first);
    do {
      wait_for_stage();
      if (tile.width == Width::tail) {
        take_tiles<1, Tile::kTail>(true);
      } else if (!Tile::kWinners && tile.width == Width::brief) {
        take_tiles<1, Tile::kBrief>(true);
      } else if (Tile::kWinners && tile.begin >= 0 &&
                 StageTile::unpacked(read_stage_tile(state.stage)).width == Width::tail) {
        take_tiles<2, Tile::kTail>(true);
      } else {
        take_tiles<1>(true);
      }
    } while (tile.width != Width::none);
  }

  // Takes a tile of packed codes, kWidth columns wide, whose scales are held, and reads those of the next
  // one. Barriers are tested while wgmma run, since an answer takes a while; as a rule it is that the stage
  // is there, and that the epilogue warp has read the buffer.
  template <int kWidth>
  __device__ __forceinline__ void take_scaled_tile() {
    constexpr bool kEarly = Tile::kPolicy.looks_early;
    Accumulator c[2][Tile::kColumns / 2];
    multiply<kWidth>(c[0], 0);
    multiply<kWidth>(c[1], 1);
    if (__builtin_expect(tile.begin < 0, false)) {
      ptx::wgmma_wait<0>();
      leave_out<Tile, kWidth>(c[0], tile);
      leave_out<Tile, kWidth>(c[1], tile);
      token_scales.template leave_out<first_left_out<Tile, kWidth>(), kWidth>(kWidth + tile.begin);
    }
    const bool more = next.width != Width::none;
    const int folded = state.stage;
    state.advance(p.stages);
    const bool there = smem.ring().consumer_test(state);
    const PipelineState to = epilogue_buffer.state(handed);
    bool free = false;
    uint32_t lane_words = 0, word = 0;
    if constexpr (kEarly) {
      free = epilogue_buffer.ring.producer_test(to);
      lane_words = epilogue_buffer.lane_words(to.stage);
      asm volatile("" : "+r"(lane_words));  // not where it is needed
      if (more && there) word = read_stage_tile(state.stage);
    }
    ptx::wgmma_wait<1>();
    // Always true, but not to the compiler, as in take_tile.
    if (__float_as_uint(p.zeros[0]) == 0)
      fold_block<Tile, kWidth>(c[0], best, 0.0f, p.zeros, token_scales, [](int) {});
    if (__builtin_expect(more && !there, false)) {
      wait_for_stage();
      if constexpr (kEarly) word = read_stage_tile(state.stage);
    }
    if (!kEarly && more) word = read_stage_tile(state.stage);
    ptx::wgmma_wait<0>();
    smem.ring().consumer_release(folded);
    token_scales.enter_fours(smem.token_scales_of(state.stage));
    fold_block<Tile, kWidth>(c[1], best + 2, 0.0f, p.zeros, token_scales, [&](int n) {
      if (more && n % 2 != 0) token_scales.hold_four(n - 1);
      if (n % 4 == 3) __syncwarp();  // else the compiler would move all loads to the end
    });
    if (more) token_scales.template hold_fours<kWidth / 16 * 2>();
    if (next.ends) {
      if (__builtin_expect(!free, false)) epilogue_buffer.ring.producer_acquire(to);
      epilogue_buffer.put(best, to.stage, kEarly ? lane_words : epilogue_buffer.lane_words(to.stage));
      ++handed;
    }
    tile = next;
    next = StageTile::unpacked(word);
  }

  // Does the same as take_doc_range_tiles, where tokens have scales.
  __device__ __forceinline__ void take_scaled_range_tiles(int32_t first) {
    tile = first_tile(first);
    wait_for_stage();
    next = StageTile::unpacked(read_stage_tile(state.stage));
    token_scales.enter_fours(smem.token_scales_of(state.stage));
    token_scales.hold_fours();
    do {
      if (tile.width == Width::full) {
        take_scaled_tile<Tile::kColumns>();
      } else if (tile.width == Width::tail) {
        take_scaled_tile<Tile::kTail>();
      } else {
        take_scaled_tile<Tile::kBrief>();
      }
    } while (tile.width != Width::none);
  }

  // The number of tiles of documents [first, end).
  __device__ __forceinline__ int32_t count_all_tiles(int32_t first, int32_t end) const {
    if (Tile::kWhole || p.doc_ranges == nullptr) return (end - first) * count_tiles<Tile>(p.Ld);
    int32_t tiles = 0;
    for (int32_t j = first + ptx::tid_x() % 32; j < end; j += 32) {
      tiles += count_tiles<Tile>(doc_range_at<Tile>(p, rows_at_hand(), j).length);
    }
    return warp_sum(tiles);
  }

  // Takes all tiles of documents [first, end).
  __device__ __forceinline__ void take_counted_tiles(int32_t first, int32_t end) {
    enter(first);
    // From lane 0, so that the compiler knows that all lanes take as many.
    int32_t left = __shfl_sync(kFullWarp, count_all_tiles(first, end), 0);
    if constexpr (Tile::kPolicy.reads_ahead) {
      wait_for_stage();
      token_scales.enter(smem.token_scales_of(state.stage));
      token_scales.hold();
    }
    if (Tile::kPolicy.staggered && ptx::tid_x() >= 128 && left > 0) take_tiles<1>(left-- > 1);
    if constexpr (Tile::kTwoWidths) {
      for (; left > 0; left -= 2) take_tiles<2, Tile::kTail>(left > 2);
    } else {
      constexpr int kBody = Tile::kPolicy.unroll_tiles;
      for (; left >= kBody; left -= kBody) take_tiles<kBody>(left > kBody);
      for (; left > 0; --left) take_tiles<1>(left > 1);
    }
  }

  __device__ __forceinline__ void run() {
    const int64_t begin = WorkRange::of_block(p).work_tile;
    spill(kTile, static_cast<int32_t>(begin / p.N));
    int32_t first = static_cast<int32_t>(begin % p.N);
    handed = 0;
    if constexpr ((Tile::kWhole || (Tile::kDocRanges && !Tile::kScaled)) && !Tile::kWinners) {
      state.stage = unknown_zero();
    }
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) best[h].clear();
    for (PipelineState q_state;; q_state.advance(1), first = 0) {
      // Computed again for each row tile, since there is no register to keep it in.
      const int64_t documents = WorkRange::of_block(p, ptx::ctaid_x()).end - spilled(kTile) * p.N - first;
      if (documents <= 0) break;
      smem.q_ring().consumer_wait(q_state);
      if constexpr (Tile::kPackedCodes) {
        take_scaled_range_tiles(first);
      } else if constexpr (Tile::kDocRanges) {
        take_doc_range_tiles(first);
      } else {
        take_counted_tiles(first, static_cast<int32_t>(min(p.N, first + documents)));
      }
      if (threadIdx.x % 32 == 0) smem.q_ring().consumer_release(0);
      spill(kTile, spilled(kTile) + 1);
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_sm90_q(const __grid_constant__ ForwardArgs p, const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  Sm90QShared<Tile> smem(shared, p.stages);
  if (threadIdx.x == 0) {
    constexpr bool kBeside = Tile::kMaskedOrScaled;  // of token scales all lanes write and read some
    smem.ring().init(p.stages, kBeside ? 1 + 32 : 1, (kBeside ? 128 : 4) * Tile::kConsumers);
    for (int consumer = 0; consumer < Tile::kConsumers; ++consumer)
      smem.epilogue_buffer(consumer).ring.init(EpilogueBuffer<Tile>::kStages, 128, 32);
    smem.q_ring().init(1, 1, 4 * Tile::kConsumers);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::pdl_wait();

  // From lane 0, so that the compiler knows that a warp takes one branch, and keeps addresses in uniform
  // registers.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == Tile::kConsumers) {
    ptx::setmaxnreg_dec<Tile::kHelperRegisters>();
    const int helper = threadIdx.x - 128 * Tile::kConsumers;
    if (helper == 0) {
      load_tiles<Tile>(p, maps, smem);
      ptx::pdl_launch_dependents();
    }
    if constexpr (Tile::kMaskedOrScaled) {
      using Producer =
          std::conditional_t<Tile::kDocRanges, DocRangeScaleProducer<Tile>, TokenScaleProducer<Tile>>;
      if (helper / 32 == 1) Producer(p, smem).run();
    }
    const int consumer = threadIdx.x / 32 - Tile::kFirstEpilogueWarp;
    if (consumer >= 0) {
      run_epilogue_warp<Tile>(p, smem.epilogue_buffer(consumer), smem.epilogue_rows[consumer]);
    }
  } else {
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    // Values of their own: the compiler would spill what it computes them from.
    if constexpr (Tile::kPackedCodes) asm volatile("" : "+r"(smem.first_stage), "+r"(smem.barriers));
    Sm90QConsumer<Tile> consumer{p, smem, smem.epilogue_buffer(warpgroup),
                                 smem.q + 2 * warpgroup * 64 * kKChunkBytes};
    consumer.run();
  }
#endif
}

}  // namespace late_interaction
