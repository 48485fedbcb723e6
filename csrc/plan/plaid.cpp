#include "plaid.h"

#include <algorithm>

#include "../common/arithmetic.h"

namespace late_interaction {

namespace {

constexpr int64_t kChunkBytes = 64;

// The shared memory of a block with room for so many query rows.
int64_t smem_bytes(bool half, int64_t chunks, int64_t rows) {
  return residual_exchange_bytes(static_cast<int>(std::max<int64_t>(rows, 32))) + residual_table_bytes(half) +
         rows * (chunks | 1) * kChunkBytes;
}

// Blocks that share a multiprocessor's memory; each takes 1 KiB more than it asks for.
int64_t blocks_that_fit(int64_t smem, const Device& device) {
  return smem > device.smem_per_block ? 0 : device.smem_per_sm / (smem + 1024);
}

// A block that begins with the last whole document, or with the last split, keeps the others waiting for half
// or a quarter of its time so far.
void plan_cut(ResidualPlan& plan, const Sizes& s, bool packed, int64_t blocks) {
  constexpr int64_t kLeast = 256;  // tokens: a split's end costs as much as some 64
  const int64_t tokens = packed ? s.Ld : s.N * s.Ld;
  const int64_t split = std::max(kLeast, ceil_div(tokens * plan.row_tiles, 4 * blocks));
  if (s.Ld <= 2 * split) return;
  plan.split_tokens = split;
  plan.most_split_docs = tokens / (2 * split);
  plan.most_splits = tokens / split + plan.most_split_docs;
}

}  // namespace

ResidualPlan plan_residual(const Sizes& s, bool packed, Dtype dtype, Precision precision, bool whole,
                           bool winners, const Device& device) {
  ResidualPlan plan;
  plan.compute = compute_for(dtype, precision);
  const bool half = plan.compute == Compute::bf16 || plan.compute == Compute::fp16;
  plan.chunks = static_cast<int>(ceil_div(s.d * element_bytes(plan.compute), kChunkBytes));
  const auto fit = [&](int64_t rows) { return blocks_that_fit(smem_bytes(half, plan.chunks, rows), device); };

  plan.by_warp = plan.compute == Compute::fp64 || fit(8) == 0;
  if (plan.by_warp) {
    plan.work_tiles = s.Nq * s.N;
    plan.grid = std::min<int64_t>(plan.work_tiles, int64_t{16} * device.sm_count);
    return plan;
  }
  const bool even = plan.chunks % 2 == 0, thirds = plan.chunks % 3 == 0;
  plan.any = winners || !half || !whole || !(even || thirds) || fit(32) < 2;
  if (!plan.any && !even) plan.step = 3;
  plan.columns = 32;
  if (plan.any) {
    int64_t rows = std::min<int64_t>(32, 8 * ceil_div(s.Nq * s.Lq, 8));
    while (fit(rows) == 0) rows -= 8;
    plan.column_blocks = static_cast<int>(rows / 8);
  } else {
    // Each tile of query rows decompresses the documents again: wide ones where there are rows for them.
    if (s.Nq * s.Lq > 32 && plan.step == 2 && fit(64) >= 2) plan.columns = 64;
    plan.column_blocks = plan.columns / 8;
  }
  // As the kernels' registers allow (ResidualTile::kBlocksPerSm).
  const bool few = !device.pdl() || plan.columns > 32;
  const int64_t resident = few ? 2 : half && plan.step == 2 ? 4 : 3;
  const int64_t rows = 8 * plan.column_blocks;
  plan.partials = static_cast<int>(s.Lq > rows ? ceil_div(s.Lq, rows) : 1);
  plan.row_tiles = s.Lq > rows ? s.Nq * plan.partials : ceil_div(s.Nq, rows / s.Lq);
  plan.work_tiles = s.N * plan.row_tiles;
  plan.smem_bytes = static_cast<int>(smem_bytes(half, plan.chunks, rows));
  const int64_t blocks = std::min(resident, fit(rows)) * device.sm_count;
  plan_cut(plan, s, packed, blocks);
  plan.grid = std::min(plan.work_tiles + plan.most_splits * plan.row_tiles, blocks);
  return plan;
}

}  // namespace late_interaction
