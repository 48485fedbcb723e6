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
//   loader     one thread of warpgroup 2, which keeps few registers: TMA loads of Q tiles and of the
//              ring's stages.
//   mender     the next warp of it, where tokens are not all alike: it overwrites those of a stage that do
//              not count (kMasked), and brings the factors of its columns (kScaled: inverse norms, or
//              scales).
//   finishers  the other two warps of it, one for each consumer: at the end of a document a consumer leaves
//              the maxima of its 128 rows in shared memory and goes on, and its finisher treats, sums and
//              stores them under the products of the next document.
//
// The tensor cores need not wait for a fold. Products are issued only as fast as they are taken, so that one
// consumer folds while the other issues. For folds that take longer, the body of the loop has kTogether
// tiles: inside it a consumer has one block in flight while it folds the other.
//
//     block 0   multiply t | fold t         | multiply t+1       | fold t+1 ...
//     block 1              | multiply t     | fold t, hand over? | multiply t+1 ...
//
// Products may not be in flight over the back edge of a loop (ptxas would serialize them all): behind the
// last of the tiles nothing of this warpgroup is in flight.
//
// Of a document the tokens are visited that its Visit names (kernels/visits.h): of a masked one those from
// the first to the last that counts; or, from a copy, only those that do. The last tile is moved back to end
// with them: a token that is seen twice changes neither the maximum nor, since ties keep the earlier one, the
// winner. For the same reason no fold knows of masks: a token that does not count, or lies behind a document
// that is shorter than a tile, becomes a copy of the document's first one that does.
//
//     landed     a . b c . . d e      what the copy engine brought
//     full       a a b c a a d e      what is multiplied
//
// Barriers: full/empty for each stage, and for the Q tile; with kMasked, the copy engine completes `landed`,
// and the mender makes the stage full. Each warp arrives once on an empty barrier; with kScaled, each lane
// does, which has read factors of its own. So does each lane of the mender. Beside a stage the loader leaves
// a note of what its tile is: so consumers need not look up documents.
#pragma once

#include "fold.cuh"
#include "fold_codes.cuh"
#include "hopper.cuh"
#include "rows_finisher.cuh"

namespace late_interaction {

// kMasked: some tokens of a document may not count; or it may be shorter than a tile.
// kScaled: each column's similarities have a factor of their own: its token's inverse norm, or its scale.
template <class Type_, class Element_, int kColumns_, int kChunks_, bool kWinners_, bool kMasked_,
          bool kScaled_>
struct WgmmaRowsTile {
  using Type = Type_;
  using Element = Element_;
  using Accumulator = typename Type::Accumulator;
  static constexpr int kColumns = kColumns_;
  static constexpr int kChunks = kChunks_;
  static constexpr bool kWinners = kWinners_, kPacked = true;
  static constexpr bool kMasked = kMasked_, kScaled = kScaled_;
  // The first token of a masked document may be one that does not count; else a kernel before trims them.
  static constexpr bool kFindsFirst = kMasked && !kScaled && !std::is_same_v<Element_, int8_t>;
  static constexpr bool kQuantized = sizeof(Element) == 1;
  // Of a row, so far. Floats that were multiplied meet faster two an instruction than three.
  static constexpr bool kThreeAtOnce = kQuantized && !(kScaled && std::is_same_v<Accumulator, float>);
  using Best =
      std::conditional_t<kThreeAtOnce, RowMaximum<Similarity<Accumulator, kScaled>>, RowBest<kWinners>>;
  // Factors are read a tile ahead where there are registers for it.
  static constexpr bool kReadsAhead = kScaled && !kWinners && (kQuantized ? kChunks == 1 : kColumns <= 128);
  // Tiles in the body of the loop. The shortest fold hides behind the other warpgroup's products, and a short
  // body is fetched faster; longer folds need products of their own warpgroup beside them. Half of them where
  // registers are short, or where four bodies would no longer stay at hand.
  static constexpr int kTogether = [] {
    if (!kScaled && !kQuantized && !kWinners) return 1;
    return kScaled && (kQuantized || kWinners) ? 2 : 4;
  }();
  // The second consumer begins with a single tile, so that the two do not wait for their products at once.
  static constexpr bool kStaggered = kQuantized && kScaled && !kThreeAtOnce;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + 1),
                       kFirstFinisher = kThreads / 32 - kConsumers;  // a warp
  // All warps share what the launch gave the block: 168 registers for each of 384 threads.
  static constexpr int kConsumerRegisters = 224, kHelperRegisters = 56;
  static constexpr int kRows = 128 * kConsumers, kWarpRows = 128;
  static constexpr int kHeld = 4, kOwned = 4;  // rows of a consumer's lane, of a finisher's
  static constexpr int kChunkElements = kChunkRowBytes / sizeof(Element);
  static constexpr uint32_t kQChunkBytes = kRows * kChunkRowBytes;
  static constexpr uint32_t kStageChunkBytes = kColumns * kChunkRowBytes;
  static constexpr uint32_t kStageBytes = kChunks * kStageChunkBytes;
  static constexpr uint32_t kFactorBytes = kScaled ? 4 * kColumns : 0;  // of a stage

  static __device__ __forceinline__ int slot(int warp, int lane, int o) {
    return kWarpRows * warp + 32 * o + lane;
  }
};

// Shared memory of a block, in this order: the Q tile, the ring, factors of its columns, what consumers hand
// over, what finishers note, barriers and notes of stages, and what consumers note.
template <class Tile>
struct RowsShared {
  static constexpr uint32_t kFinishBytes =
      Tile::kConsumers * (Handover<Tile>::kBytes + 32 * sizeof(FinishersNotes<Tile>));
  static constexpr uint32_t kBarrierBytes = 288, kNoteBytes = 8;  // of all stages; of a thread
  static constexpr uint32_t kKept = kFinishBytes + kBarrierBytes + 128 * Tile::kConsumers * kNoteBytes;
  uint32_t q, ring, factors, handovers, barriers;
  FinishersNotes<Tile>* finishers;

  __device__ __forceinline__ RowsShared(uint8_t* base, int stages)
      : q(ptx::smem_address(base)),
        ring(q + Tile::kChunks * Tile::kQChunkBytes),
        factors(ring + stages * Tile::kStageBytes),
        handovers(factors + stages * Tile::kFactorBytes),
        barriers(handovers + kFinishBytes),
        finishers(reinterpret_cast<FinishersNotes<Tile>*>(base + (handovers - q) +
                                                          Tile::kConsumers * Handover<Tile>::kBytes)) {}

  __device__ __forceinline__ uint32_t note(int i) const {
    return barriers + kBarrierBytes + kNoteBytes * ptx::thread() + 4 * i;
  }
  __device__ __forceinline__ uint32_t stage(int i) const { return ring + i * Tile::kStageBytes; }
  __device__ __forceinline__ uint32_t factors_of(int i) const { return factors + i * Tile::kFactorBytes; }
  __device__ __forceinline__ uint32_t q_full() const { return barriers; }
  __device__ __forceinline__ uint32_t q_empty() const { return barriers + 8; }
  __device__ __forceinline__ Handover<Tile> handover(int consumer) const {
    return {handovers + consumer * Handover<Tile>::kBytes, barriers + 16 + 16 * consumer};
  }
  __device__ __forceinline__ uint32_t full(int i) const { return barriers + 48 + 16 * i; }
  __device__ __forceinline__ uint32_t empty(int i) const { return barriers + 56 + 16 * i; }
  __device__ __forceinline__ uint32_t landed(int i) const {
    return Tile::kMasked ? barriers + 176 + 8 * i : full(i);
  }
  __device__ __forceinline__ uint32_t tile_note(int i) const { return barriers + 240 + 4 * i; }
};

// What a stage holds: the place of its first token in the visit, and whether the document ends there.
struct TileNote {
  uint32_t bits;

  static __device__ __forceinline__ TileNote of(int32_t begin, bool ends) {
    return {2u * begin + (ends ? 1 : 0)};
  }
  __device__ __forceinline__ float begin() const { return static_cast<float>(bits / 2); }
  __device__ __forceinline__ bool ends() const { return bits % 2 != 0; }
};

// Tiles of a document; an empty one has one too, whose maxima are dropped.
template <class Tile>
__device__ __forceinline__ int32_t count_tiles(int32_t length) {
  return max(1, (length + Tile::kColumns - 1) / Tile::kColumns);
}

// Where in its visit tile t begins: the last tile is moved back to end with the document.
template <class Tile>
__device__ __forceinline__ int32_t tile_begin(int32_t length, int32_t t) {
  return max(0, min(t, length - Tile::kColumns));
}

// Where the factor of a column lies among those of its stage: neighbours swap places. Accumulators of even
// columns are in even registers, and a load of two puts its first number into an even register: so a product
// has its operands in different banks, and reads both at once.
__device__ __forceinline__ int factor_place(int column) { return column ^ 1; }

// The factors of a stage's columns, for the lane that sees columns 8 * n + 2 * (lane % 4) + {0, 1}. Shared
// memory is busy with the products, so where there are registers for it a factor is read a tile ahead, in the
// place of the one that was used last.
template <class Tile>
struct ColumnFactors {
  float2 ahead[Tile::kReadsAhead ? Tile::kColumns / 8 : 1];
  uint32_t mine;  // where the factors of this lane's columns lie

  __device__ __forceinline__ void enter(uint32_t factors) { mine = factors + ptx::thread() % 4 * 8; }
  __device__ __forceinline__ float2 load(int n) const {
    const float2 swapped = ptx::load_shared_pair(mine + n * 32);
    return {swapped.y, swapped.x};
  }
  __device__ __forceinline__ float2 get(int n) const { return Tile::kReadsAhead ? ahead[n] : load(n); }
};

// fold(n, x): of columns 8 * n + 2 * (lane % 4) + {0, 1} the similarities x[row half]. used(n): their factors
// have been.
template <class Tile, class Used, class Fold>
__device__ __forceinline__ void for_columns(const typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                            const ColumnFactors<Tile>& of, Used used, Fold fold) {
#pragma unroll
  for (int n = 0; n < Tile::kColumns / 8; ++n) {
    float2 factors{1.0f, 1.0f};
    if constexpr (Tile::kScaled) factors = of.get(n);
    Similarity<typename Tile::Accumulator, Tile::kScaled> x[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x[half][0] = similarity<Tile::kScaled>(c[4 * n + 2 * half], factors.x);
      x[half][1] = similarity<Tile::kScaled>(c[4 * n + 2 * half + 1], factors.y);
    }
    fold(n, x);
    used(n);
  }
}

// Folds a block of 64 rows: the lane's two rows of it.
template <class Tile, class Used>
__device__ __forceinline__ void fold_block(const typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                           RowBest<Tile::kWinners>* rows, float token, const float* zeros,
                                           const ColumnFactors<Tile>& factors, Used used) {
  const float first_token[2] = {token + zeros[0], token + zeros[1]};
  for_columns<Tile>(c, factors, used, [&](int n, const float (&x)[2][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half].fold(x[half][0], x[half][1], first_token[half], 8.0f * n, zeros[0]);
    }
  });
}

// The same, three numbers an instruction.
template <class Tile, class Used, class Value>
__device__ __forceinline__ void fold_block(const typename Tile::Accumulator (&c)[Tile::kColumns / 2],
                                           RowMaximum<Value>* rows, float, const float*,
                                           const ColumnFactors<Tile>& factors, Used used) {
  Value seen[2][Tile::kColumns / 4];
  int32_t top[2] = {rows[0].order(), rows[1].order()};
  for_columns<Tile>(c, factors, used, [&](int n, const Value(&x)[2][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      seen[half][2 * n] = x[half][0];
      seen[half][2 * n + 1] = x[half][1];
      top[half] = RowMaximum<Value>::highest(top[half], x[half][0], x[half][1]);
    }
  });
  RowMaximum<Value>::take(rows, top, seen);
}

template <class Tile>
__device__ __forceinline__ void load_rows(const ForwardArgs& p, const TensorMaps& maps, const RowTile& tile,
                                          const RowsShared<Tile>& at, uint32_t q_parity) {
  ptx::wait(at.q_empty(), q_parity ^ 1);
  ptx::arrive_expecting(at.q_full(), Tile::kChunks * Tile::kQChunkBytes);
  const int first = first_query_token(p, tile);
  for (int group = 0; group < Tile::kConsumers; ++group) {
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      ptx::copy_box(at.q + chunk * Tile::kQChunkBytes + group * 128 * kChunkRowBytes, &maps.Q, at.q_full(),
                    chunk * Tile::kChunkElements, first + 128 * group, tile.query, 0);
    }
  }
}

// One thread: Q tiles and documents, by TMA.
template <class Tile>
__device__ void load_tiles(const ForwardArgs& p, const TensorMaps& maps, const RowsShared<Tile>& at) {
  RingPlace place;
  uint32_t q_parity = 0;
  for (UnitRange range = UnitRange::mine(p); range.unit < range.end; q_parity ^= 1) {
    const RowTileUnits part = RowTileUnits::take(p, range, Tile::kRows);
    load_rows<Tile>(p, maps, part.tile, at, q_parity);
    for (int32_t j = part.first_j; j < part.end_j; ++j) {
      const Visit visit = visit_at(p, part.tile, j);
      const CUtensorMap* map = visit.copied() ? &maps.copies : &maps.D;
      const int32_t item = visit.copied() || p.packed ? 0 : visit.document;
      const int32_t outer = visit.copied() ? 0 : part.tile.query;
      for (int32_t t = 0; t < max(visit.length, 1); t += Tile::kColumns) {
        const int32_t begin = tile_begin<Tile>(visit.length, t);
        const uint32_t landed = at.landed(place.stage);
        ptx::wait(at.empty(place.stage), place.parity ^ 1);
        ptx::store_shared(at.tile_note(place.stage),
                          TileNote::of(begin, t + Tile::kColumns >= visit.length).bits);
        ptx::arrive_expecting(landed, Tile::kStageBytes);
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
          ptx::copy_box(at.stage(place.stage) + chunk * Tile::kStageChunkBytes, map, landed,
                        chunk * Tile::kChunkElements, visit.begin() + begin, item, outer);
        }
        place.advance(p.stages);
      }
    }
  }
}

// One warp: lane l looks up columns l, l + 32, ... of each stage. It asks memory before it waits for the stage.
template <class Tile>
struct Mender {
  using Element = typename Tile::Element;
  static constexpr int kWords = (Tile::kColumns + 31) / 32;  // of a bit for each column
  static constexpr int kRowLanes = 8 * Tile::kChunks, kRowsOfWarp = 32 / kRowLanes;

  const ForwardArgs& p;
  const RowsShared<Tile>& at;
  RingPlace place;
  // The first token of the document that counts: this lane's 16 bytes of it, and its factor. In registers, since
  // reading shared memory beside the products takes long.
  float4 first_piece;
  float first_factor;

  // Whether columns count: of columns 32 * w and on, lane w has the bits.
  __device__ __forceinline__ uint32_t look(const uint8_t* mask, Span span, int32_t t) const {
    const int lane = ptx::thread() % 32;
    bool kept[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int32_t token = tile_begin<Tile>(span.length, t) + 32 * w + lane;
      kept[w] = token < span.length &&
                (mask == nullptr || mask[(span.first + token) * p.d_mask.token_stride] != 0);
    }
    uint32_t mine = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t bits = __ballot_sync(kFullWarp, kept[w]);
      if (lane == w) mine = bits;
    }
    return mine;
  }

  // Where this lane's 16 bytes of the first rows lie in the stage, as the copy engine mixes them: one row for
  // each kRowLanes lanes. Those of the rows `row` on, a multiple of that many: piece_of(first, row).
  __device__ __forceinline__ uint32_t first_pieces() const {
    const int lane = ptx::thread() % kRowLanes, row = row_of_lane();
    return at.stage(place.stage) + lane / 8 * Tile::kStageChunkBytes + row * kChunkRowBytes +
           ((lane ^ row) % 8) * 16;
  }
  static __device__ __forceinline__ uint32_t piece_of(uint32_t first, int row) {
    return (first ^ (row % 8 * 16)) + row * kChunkRowBytes;
  }
  static __device__ __forceinline__ int row_of_lane() { return ptx::thread() % 32 / kRowLanes; }

  // Of a document's first tile. Where nothing counts, NaN: a finisher looks into that.
  __device__ __forceinline__ void take_first(const RowTile& rows, int32_t document, int32_t token) {
    if (token == 0) {
      const uint32_t from = at.stage(place.stage) + ptx::thread() % kRowLanes / 8 * Tile::kStageChunkBytes;
      first_piece = ptx::load_shared_quad(from + ptx::thread() % 8 * 16);
      return;
    }
    const float fill = token < 0 ? __uint_as_float(0xFFFFFFFF) : 0.0f;  // NaN of whatever the elements are
    first_piece = {fill, fill, fill, fill};
    const int element = ptx::thread() % kRowLanes * (16 / sizeof(Element));
    if (token < 0 || element >= p.d) return;
    const auto* row = static_cast<const Element*>(p.D.data) + document_offset(p, rows.query, document) +
                      token * p.D.token_stride;
    first_piece = *reinterpret_cast<const float4*>(row + element);
  }

  // Rows that do not count become the first one that does. One warp has the time of a tile for it, which
  // a walk from bit to bit would exceed: so there is a store for every row, and most are left out.
  __device__ __forceinline__ void mend(uint32_t kept_of_lane) const {
    const uint32_t first = first_pieces();
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t missing = ~__shfl_sync(kFullWarp, kept_of_lane, w);
      if (missing == 0) continue;
      const uint32_t mine = missing >> row_of_lane();
#pragma unroll
      for (int bit = 0; bit < min(32, Tile::kColumns - 32 * w); bit += kRowsOfWarp) {
        if (mine >> bit & 1) ptx::store_shared_quad(piece_of(first, 32 * w + bit), first_piece);
      }
    }
    ptx::publish_to_products();
  }

  // Of a row that does not count, that of the first token.
  __device__ __forceinline__ void bring_factors(const float* factors, int64_t stride, Span span, int32_t t,
                                                uint32_t kept_of_lane) {
    const int lane = ptx::thread() % 32;
    float mine[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int32_t token = tile_begin<Tile>(span.length, t) + 32 * w + lane;
      mine[w] = token < span.length ? usable_factor(factors[(span.first + token) * stride]) : 0.0f;
    }
    if (Tile::kMasked && t == 0) first_factor = __shfl_sync(kFullWarp, mine[0], 0);
    ptx::wait(at.empty(place.stage), place.parity ^ 1);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (Tile::kMasked) {
        if (!(__shfl_sync(kFullWarp, kept_of_lane, w) >> lane & 1)) mine[w] = first_factor;
      }
      const int column = 32 * w + lane;
      if (column < Tile::kColumns) {
        ptx::store_shared(at.factors_of(place.stage) + 4 * factor_place(column), __float_as_uint(mine[w]));
      }
    }
  }

  __device__ __forceinline__ void run() {
    const UnitRange range = UnitRange::mine(p);
    auto documents = static_cast<int32_t>(range.end - range.unit);
    auto tile = static_cast<int32_t>(range.unit / p.N), j = static_cast<int32_t>(range.unit % p.N);
    for (; documents > 0; ++tile, j = 0) {
      const RowTile rows = row_tile(p, tile, Tile::kRows);
      for (; j < p.N && documents > 0; ++j, --documents) {
        const Visit visit = visit_at(p, rows, j);
        const Span span{visit.begin(), visit.length};
        int32_t first = 0;  // of the visit, the first token that counts
        for (int32_t t = 0; t < max(span.length, 1); t += Tile::kColumns) {
          uint32_t kept = 0;
          if constexpr (Tile::kMasked) {
            kept = look(document_mask(p, rows.query, visit.document), span, t);
          }
          if constexpr (Tile::kFindsFirst) {
            const bool known = t > 0 || span.length == 0 || (__shfl_sync(kFullWarp, kept, 0) & 1);
            if (!known) first = first_kept(p, rows.query, visit.document);
          }
          if constexpr (Tile::kScaled) {
            const bool copied = visit.copied();
            bring_factors(copied ? p.copies.factors : document_factors(p, rows.query, visit.document),
                          copied ? 1 : p.d_factors.token_stride, span, t, kept);
          }
          if constexpr (Tile::kMasked) {
            ptx::wait(at.landed(place.stage), place.parity);
            if (span.length > 0) {  // else nothing counts
              if (t == 0) take_first(rows, visit.document, first);
              mend(kept);
            }
          }
          ptx::arrive(at.full(place.stage));
          place.advance(p.stages);
        }
      }
    }
  }
};

template <class Tile>
struct RowsConsumer {
  static constexpr int kAccumulators = Tile::kColumns / 2;
  using Accumulator = typename Tile::Accumulator;
  const ForwardArgs& p;
  const RowsShared<Tile>& at;
  const Handover<Tile> handover;
  uint32_t q_blocks;  // this warpgroup's rows of the Q tile
  RingPlace place;
  typename Tile::Best best[Tile::kHeld];
  ColumnFactors<Tile> factors;
  uint32_t handed;  // documents, so far

  __device__ __forceinline__ void multiply(Accumulator (&c)[kAccumulators], int block) {
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

  // Notes, for what would crowd out accumulators: the row tile, and what the tile at hand is.
  enum Note { kTile, kAtHand };
  __device__ __forceinline__ void note(Note what, uint32_t value) const {
    ptx::store_shared(at.note(what), value);
  }
  __device__ __forceinline__ uint32_t noted(Note what) const { return ptx::load_shared(at.note(what)); }
  __device__ __forceinline__ int32_t row_tile_at_hand() const { return static_cast<int32_t>(noted(kTile)); }

  // One lane reads, which is the one that gives the stage back.
  __device__ __forceinline__ TileNote tile_at_hand() const {
    const uint32_t bits = threadIdx.x % 32 == 0 ? ptx::load_shared(at.tile_note(place.stage)) : 0;
    return {__shfl_sync(kFullWarp, bits, 0)};
  }

  __device__ __forceinline__ void wait_for_stage() const { ptx::wait(at.full(place.stage), place.parity); }

  // The next kTiles tiles; behind them there are `more`.
  template <int kTiles>
  __device__ __forceinline__ void take_tiles(bool more) {
    Accumulator c[2][kAccumulators];
    if constexpr (!Tile::kReadsAhead) wait_for_stage();
    multiply(c[0], 0);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      multiply(c[1], 1);
      const TileNote tile = tile_at_hand();
      const float first_token = tile.begin() + static_cast<float>(2 * (ptx::thread() % 4));
      if constexpr (Tile::kScaled) note(kAtHand, tile.bits);  // factors leave no room to keep it
      if constexpr (Tile::kScaled && !Tile::kReadsAhead) factors.enter(at.factors_of(place.stage));
      ptx::wait_products<1>();
      // The compiler may not know that this is always so: a fold without a branch before it would be moved,
      // in part, behind the wait for the products that it is to overlap; or its factors before it, all of
      // them.
      if ((i + 1 < kTiles && !Tile::kScaled) || __float_as_uint(p.zeros[0]) == 0)
        fold_block<Tile>(c[0], best, first_token, p.zeros, factors, [](int) {});
      const RingPlace folded = place;
      place.advance(p.stages);
      if (i + 1 < kTiles) {
        wait_for_stage();
        multiply(c[0], 0);
        ptx::wait_products<1>();
      } else {
        if (Tile::kReadsAhead && more) wait_for_stage();
        ptx::wait_products<0>();
      }
      constexpr bool kReadsHere = Tile::kScaled && !Tile::kReadsAhead;
      if (!kReadsHere && (Tile::kScaled || threadIdx.x % 32 == 0)) ptx::arrive(at.empty(folded.stage));
      if constexpr (Tile::kReadsAhead) factors.enter(at.factors_of(place.stage));
      fold_block<Tile>(c[1], best + 2, first_token, p.zeros + 2, factors, [&](int n) {
        if constexpr (Tile::kReadsAhead) {
          if (i + 1 < kTiles || more) factors.ahead[n] = factors.load(n);
          if (n % 4 == 3) __syncwarp();  // else the compiler would put them all at the end
        }
      });
      if (kReadsHere) ptx::arrive(at.empty(folded.stage));
      if (Tile::kScaled ? TileNote{noted(kAtHand)}.ends() : tile.ends()) handover.give(best, handed++ & 1);
    }
  }

  // Tiles of documents [first, end).
  __device__ __forceinline__ int32_t count_all_tiles(int32_t first, int32_t end) const {
    if (p.visits == nullptr) return (end - first) * count_tiles<Tile>(p.Ld);
    const RowTile rows = row_tile(p, row_tile_at_hand(), Tile::kRows);
    int32_t tiles = 0;
    for (int32_t j = first + ptx::thread() % 32; j < end; j += 32) {
      tiles += count_tiles<Tile>(visit_at(p, rows, j).length);
    }
    return warp_sum(tiles);
  }

  __device__ __forceinline__ void run() {
    const int64_t begin = UnitRange::mine(p).unit;
    note(kTile, static_cast<int32_t>(begin / p.N));
    int32_t first = static_cast<int32_t>(begin % p.N);
    handed = 0;
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) best[h].clear();
    for (uint32_t q_parity = 0;; q_parity ^= 1, first = 0) {
      // Worked out anew for each row tile, which is rarer than a register is dear.
      const int64_t documents = UnitRange::mine(p, ptx::block()).end - row_tile_at_hand() * p.N - first;
      if (documents <= 0) break;
      ptx::wait(at.q_full(), q_parity);
      // From lane 0: so the compiler knows that all take as many.
      int32_t left = __shfl_sync(
          kFullWarp, count_all_tiles(first, static_cast<int32_t>(min(p.N, first + documents))), 0);
      if constexpr (Tile::kReadsAhead) {
        wait_for_stage();
        factors.enter(at.factors_of(place.stage));
#pragma unroll
        for (int n = 0; n < Tile::kColumns / 8; ++n) factors.ahead[n] = factors.load(n);
      }
      if (Tile::kStaggered && ptx::thread() >= 128 && left > 0) take_tiles<1>(left-- > 1);
      for (; left >= Tile::kTogether; left -= Tile::kTogether)
        take_tiles<Tile::kTogether>(left > Tile::kTogether);
      for (; left > 0; --left) take_tiles<1>(left > 1);
      if (threadIdx.x % 32 == 0) ptx::arrive(at.q_empty());
      note(kTile, row_tile_at_hand() + 1);
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
      ptx::init_barrier(at.full(stage), Tile::kMasked ? 32 : Tile::kScaled ? 1 + 32 : 1);
      if constexpr (Tile::kMasked) ptx::init_barrier(at.landed(stage), 1);
      ptx::init_barrier(at.empty(stage), (Tile::kScaled ? 128 : 4) * Tile::kConsumers);
    }
    for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) at.handover(consumer).init_barriers();
    ptx::init_barrier(at.q_full(), 1);
    ptx::init_barrier(at.q_empty(), 4 * Tile::kConsumers);
    ptx::publish_barriers();
  }
  __syncthreads();
  ptx::wait_for_earlier_kernels();

  // From lane 0: so the compiler knows that a warp takes one branch, and keeps addresses in uniform
  // registers.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == Tile::kConsumers) {
    ptx::give_registers<Tile::kHelperRegisters>();
    const int helper = threadIdx.x - 128 * Tile::kConsumers;
    if (helper == 0) {
      load_tiles<Tile>(p, maps, at);
      ptx::let_next_kernel_start();
    }
    if constexpr (Tile::kMasked || Tile::kScaled) {
      if (helper / 32 == 1) Mender<Tile>{p, at}.run();
    }
    const int consumer = threadIdx.x / 32 - Tile::kFirstFinisher;
    if (consumer >= 0) {
      finish_documents<Tile>(p, at.handover(consumer), at.finishers[32 * consumer + threadIdx.x % 32]);
    }
  } else {
    ptx::take_registers<Tile::kConsumerRegisters>();
    RowsConsumer<Tile> consumer{p, at, at.handover(warpgroup), at.q + 2 * warpgroup * 64 * kChunkRowBytes};
    consumer.run();
  }
#endif
}

}  // namespace late_interaction
