// The plan of a call on residual-compressed documents.
#pragma once

#include "plan.h"

namespace late_interaction {

struct ResidualPlan {
  Compute compute = Compute::bf16;
  bool by_warp = false;    // no tensor cores: fp64, and embeddings whose query rows do not fit
  bool any = false;        // the tile that takes any alignment and finds winners
  int columns = 0;         // query rows that a tile has space for
  int chunks = 0;          // 64-byte chunks of an embedding
  int step = 2;            // of those, that a lane holds
  int column_blocks = 0;   // eights of query rows in use
  int partials = 1;        // partial sums of a query's score; > 1 needs a second, small kernel
  int64_t row_tiles = 0;   // of query rows
  int64_t work_tiles = 0;  // (tile of query rows, document) pairs
  // Documents of more than twice split_tokens tokens are split into ranges of as many; 0: none is. At most
  // so many splits, and documents that are split.
  int64_t split_tokens = 0, most_splits = 0, most_split_docs = 0;
  int smem_bytes = 0;  // dynamic shared memory of a block
  int64_t grid = 0;    // blocks, persistent
};

// sizes.Ld: tokens that each document has space for; packed: that all of them have together.
// whole: an embedding's residual is whole chunks, and aligned for them.
ResidualPlan plan_residual(const Sizes& sizes, bool packed, Dtype dtype, Precision precision, bool whole,
                           bool winners, const Device& device);

// One line a decision.
std::string explain(const Sizes& sizes, const ResidualPlan& plan, int nbits);

// Bytes of shared memory for the kernel's exchange between warps, at most.
constexpr int residual_exchange_bytes(int columns) { return 72 * columns + 128; }

// The table of a lookup: half precision looks up bytes, fp32 buckets.
constexpr int residual_table_bytes(bool half) { return half ? 256 * 128 : 256 * 4; }

}  // namespace late_interaction
