// Parts of the plans of all forward kernels: how rows and documents fall into tiles, and tiles to blocks.
#pragma once

#include <algorithm>
#include <span>

#include "../plan.h"

namespace late_interaction {

// Query rows that each document token is multiplied with.
inline int64_t rows_per_document(const Sizes& s) { return s.layout == Layout::in_batch ? s.Nq * s.Lq : s.Lq; }

inline double similarities(const Sizes& s) { return 1.0 * s.Nq * s.Lq * s.N * s.Ld; }

inline double operations(const Sizes& s) { return 2.0 * s.d * similarities(s); }

inline constexpr int kMostStages = 8;   // of a ring
inline constexpr int kReserved = 1024;  // bytes of each block's shared memory that CUDA takes

// Numbers of splits that are timed, and preferred for it.
inline constexpr int kSplitCounts[] = {2, 3, 5, 16, 33, 132};

// True where documents are split, by any kernel, into no more pieces than multiprocessors take in turn.
bool may_be_timed(const Sizes& s, int num_splits, const Device& device);

int64_t count_row_tiles(const Sizes& s, int64_t rows);

// The partials that a query's sum falls into: how many blocks of `rows` rows a query of Lq rows can touch.
int64_t count_partials(const Sizes& s, int64_t rows);

// The partials of a query whose splits are combined.
int combined_partials(const Sizes& s, int partial_rows);

// True if each split has two tiles at least, so that a document's last split is no shorter than a tile. The
// host knows neither packed documents' lengths nor how many tokens a mask keeps.
bool may_split(const Sizes& s, int64_t tile, int num_splits, bool packed_or_compacted);

// Gives each block some work tiles, as many blocks as a multiprocessor holds (blocks_per_sm).
void share_out(const Sizes& s, ForwardPlan& plan, const Device& device);

// Gives documents of different lengths out longest first, if there are blocks enough.
void deal(const Sizes& s, ForwardPlan& plan, const Device& device);

// Tokens of a tile that the kernels of wgmma have instances for.
inline std::span<const int> tile_widths(Compute compute) {
  return compute == Compute::int8 ? std::span<const int>(kInt8TileWidths) : kTileWidths;
}

// Returns the cost of the tiles of a document of `length` tokens: each costs its columns, and some more for
// its start and end. tail: columns of the last tile, where the remaining tokens fit it.
inline int64_t tiles_cost(int64_t length, int width, int tail) {
  constexpr int kEnds = 16;
  const int64_t tiles = ceil_div(length, width), remaining = length - (tiles - 1) * width;
  return tiles * (width + kEnds) - (remaining <= tail ? width - tail : 0);
}

// The allowed width, in document tokens, of the lowest cost; the first of equals. document_cost(width): what
// a document costs; `once` is the cost, in quarters of a column, of a block's first wait and last fold, which
// nothing overlaps.
template <class Allowed, class DocumentCost>
int fit_width(Compute compute, int64_t documents_a_block, int once, Allowed allowed,
              DocumentCost document_cost) {
  const auto cost = [&](int width) { return documents_a_block * document_cost(width) + width * once / 4; };
  int best = 0;
  for (const int width : tile_widths(compute)) {
    if (allowed(width) && (best == 0 || cost(width) < cost(best))) best = width;
  }
  return best;
}

// True where a kernel of wgmma that loads by TMA can take the call. It keeps tokens in fp32.
bool serves_wgmma(const Sizes& s, const ForwardTraits& traits, const Device& device);

inline bool is_half(Compute compute) { return compute == Compute::bf16 || compute == Compute::fp16; }
inline bool is_fp8(Dtype dtype) { return dtype == Dtype::e4m3 || dtype == Dtype::e5m2; }

// ---- words of explain_plan ----

// "32 query rows meet each document".
std::string rows_meet(const Sizes& s);

// rows_meet, and how many rows a tile has.
std::string rows_share(const Sizes& s, const ForwardPlan& plan);

// "no wgmma kernel for this d and device: mma.sync; 32 query rows meet each document".
std::string by_mma(const Sizes& s);

// The ring of a kernel that takes embeddings by k chunk.
std::string ring_of_chunks(const ForwardPlan& plan, int chunk_bytes = kKChunkBytes);

// " cut 4": documents are split.
std::string cut_name(const ForwardPlan& plan);

}  // namespace late_interaction
