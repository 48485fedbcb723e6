#include "cache_blocking.h"

#include <algorithm>

#include "../common/arithmetic.h"

namespace late_interaction::cpu {
namespace {

constexpr int64_t kPanelBytes = 256 << 10;  // of a row block: stays in L2
constexpr int64_t kMaxBlockRows = 1024;
constexpr int64_t kTileBytes = 96 << 10;  // of a tile: in L2 too, its groups in L1; passages stay whole
constexpr int64_t kMaxTileTokens = 384;
constexpr int64_t kItemsPerThread = 8;    // enough to even out, few enough to pack Q rarely
constexpr double kMinItemWork = 1 << 20;  // multiply-adds
constexpr int64_t kMinSplitTokens = 256;

// How many pieces of `work` make an item worth taking, up to `most`.
int64_t pieces_worth(double work, int64_t most) {
  return static_cast<int64_t>(std::clamp(kMinItemWork / std::max(work, 1.0), 1.0, double(most)));
}

// The k-steps of a dot product of d dims, in parts of one length where the multiplier wants them.
int64_t steps_of(int64_t d, const Multiplier& m) {
  const int64_t steps = ceil_div(d, m.step_dims);
  if (m.part_steps == 0) return steps;
  const int64_t parts = std::max<int64_t>(ceil_div(steps, m.part_steps), 1);
  return std::max<int64_t>(round_up(steps, parts), 1);
}

}  // namespace

Cut cut_forward(const Sizes& s, const Multiplier& m, int64_t threads) {
  Cut c;
  c.steps = steps_of(s.d, m);
  c.row_bytes = std::max<int64_t>(c.steps * m.step_bytes, 1);
  const int64_t panel_rows = 2 * m.lanes;
  const int64_t group = m.group_tokens;
  c.block_rows = std::clamp(kPanelBytes / c.row_bytes / panel_rows * panel_rows, panel_rows, kMaxBlockRows);
  c.tile_tokens = std::clamp(kTileBytes / c.row_bytes / group * group, group, kMaxTileTokens);
  c.tile_tokens = std::min(c.tile_tokens, std::max(round_up(s.Ld, group), group));

  // As many queries as fill a block, all documents; then fewer documents, then fewer queries, until there
  // are items for all threads.
  const int64_t wanted = threads <= 1 ? 1 : threads * kItemsPerThread;
  const double pair_work = double(s.Lq) * double(s.Ld) * double(s.d);
  const int64_t fit = std::max<int64_t>(c.block_rows / std::max<int64_t>(s.Lq, 1), 1);
  c.queries = s.layout == Layout::per_query ? 1 : std::min(fit, s.Nq);
  c.query_items = ceil_div(s.Nq, c.queries);
  c.documents = std::clamp(ceil_div(s.N, ceil_div(wanted, c.query_items)),
                           pieces_worth(pair_work * double(c.queries), s.N), s.N);
  c.document_items = ceil_div(s.N, c.documents);
  c.queries = std::clamp(ceil_div(s.Nq, ceil_div(wanted, c.document_items)),
                         std::min(pieces_worth(pair_work * double(c.documents), s.Nq), c.queries), c.queries);
  c.query_items = ceil_div(s.Nq, c.queries);

  const int64_t pairs = s.Nq * s.N;
  if (threads > 1 && pairs < 2 * threads && pair_work >= 2 * kMinItemWork) {
    c.queries = c.documents = 1;
    c.query_items = s.Nq;
    c.document_items = s.N;
    const int64_t splits = std::min(ceil_div(wanted, pairs), static_cast<int64_t>(pair_work / kMinItemWork));
    c.token_splits = std::clamp<int64_t>(splits, 1, ceil_div(s.Ld, kMinSplitTokens));
    c.row_splits = std::clamp<int64_t>(ceil_div(splits, c.token_splits), 1, ceil_div(s.Lq, panel_rows));
  }

  // A query longer than a block is walked in even blocks.
  const int64_t rows = std::max<int64_t>(ceil_div(c.queries * s.Lq, c.row_splits), 1);
  c.block_rows = std::min(c.block_rows, round_up(ceil_div(rows, ceil_div(rows, c.block_rows)), panel_rows));
  return c;
}

Cut cut_ragged(const Sizes& mean, const Multiplier& m, int64_t threads) {
  Cut c = cut_forward(mean, m, threads);
  c.row_splits = c.token_splits = 1;
  return c;
}

}  // namespace late_interaction::cpu
