#include "tiles.h"

#include "../text.h"

namespace late_interaction {

bool may_be_timed(const Sizes& s, int num_splits, const Device& device) {
  constexpr int64_t kMostWaves = 8;
  return ceil_div(s.N * num_splits, device.sm_count) <= kMostWaves;
}

int64_t count_row_tiles(const Sizes& s, int64_t rows) {
  return s.layout == Layout::in_batch ? ceil_div(s.Nq * s.Lq, rows) : s.Nq * ceil_div(s.Lq, rows);
}

int64_t count_partials(const Sizes& s, int64_t rows) {
  if (s.layout == Layout::per_query || s.Lq % rows == 0) return std::max<int64_t>(1, ceil_div(s.Lq, rows));
  if (rows % s.Lq == 0 || s.Nq * s.Lq <= rows) return 1;
  return ceil_div(s.Lq - 1, rows) + 1;
}

int combined_partials(const Sizes& s, int partial_rows) {
  return static_cast<int>(ceil_div(std::max<int64_t>(s.Lq, 1), partial_rows));
}

bool may_split(const Sizes& s, int64_t tile, int num_splits, bool packed_or_compacted) {
  return num_splits == 1 || (!packed_or_compacted && ceil_div(s.Ld, tile) >= 2 * num_splits);
}

void share_out(const Sizes& s, ForwardPlan& plan, const Device& device) {
  plan.row_tiles = count_row_tiles(s, plan.rows);
  plan.work_tiles = plan.row_tiles * ceil_div(s.N, plan.docs) * plan.num_splits;
  plan.grid = std::min<int64_t>(plan.work_tiles, int64_t{plan.blocks_per_sm} * device.sm_count);
  plan.partials = plan.num_splits == 1 ? static_cast<int>(count_partials(s, plan.partial_rows))
                                       : combined_partials(s, plan.partial_rows);
}

void deal(const Sizes& s, ForwardPlan& plan, const Device& device) {
  constexpr int64_t kMostRanked = 2048;  // a rank reads all lengths, for each document
  const int64_t hands = device.sm_count / std::max<int64_t>(plan.row_tiles, 1);
  plan.lpt = hands >= 4 && s.N >= hands && s.N <= kMostRanked;
  if (plan.lpt) plan.grid = hands * plan.row_tiles;
}

bool serves_wgmma(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  constexpr int64_t kMaxExactToken = int64_t{1} << 24;
  return device.wgmma && traits.tma_compatible && s.Ld <= kMaxExactToken;
}

std::string rows_meet(const Sizes& s) {
  const int64_t rows = rows_per_document(s);
  return joined(counted(rows, "query row"), rows == 1 ? " meets" : " meet", " each document");
}

std::string rows_share(const Sizes& s, const ForwardPlan& plan) {
  return joined(rows_meet(s), ": ", plan.rows, " of them share what is read of it");
}

std::string by_mma(const Sizes& s) {
  return "no wgmma kernel for this d and device: mma.sync; " + rows_meet(s);
}

std::string ring_of_chunks(const ForwardPlan& plan, int chunk_bytes) {
  return joined(plan.stages, " stages, ", plan.k_chunks, " of ", chunk_bytes,
                " bytes a token to an embedding");
}

std::string cut_name(const ForwardPlan& plan) {
  return plan.num_splits > 1 ? joined(" cut ", plan.num_splits) : "";
}

}  // namespace late_interaction
