#include "split_docs.h"

#include <algorithm>

#include "forward_candidates.h"

namespace late_interaction {

namespace {

// What a multiprocessor of an H200 does in a microsecond: operations on two bytes an element; bytes that it
// reads while it is the only one, and while all read and share 4.38 TB/s.
constexpr double kProducts = 6e6, kReadAlone = 55e3, kReadTogether = 33e3;

// Microseconds that a tile takes a block, while few others read, and while all do.
struct TileTime {
  double alone, together;
};

TileTime tile_time(const Sizes& s, const ForwardPlan& plan) {
  const bool documents = plan.kernel == ForwardKernel::sm90_d;
  const double tokens = plan.tokens, bytes = element_bytes(plan.compute);
  const double products =
      2.0 * plan.rows * tokens * (plan.k_chunks * 64) / kProducts;  // two bytes an element
  if (!documents) return {products, products};
  const double read = tokens * s.d * bytes;
  return {std::max(products, read / kReadAlone), std::max(products, read / kReadTogether)};
}

}  // namespace

// A call takes as long as its busiest block, but no less than all its tiles take all blocks. So of the
// numbers of splits those are looked at that give each block one, two, ... work tiles and leave few blocks
// idle: the fewest of about equal ones, since blocks that begin together read the same tokens for other rows,
// from L2. Reads are slower where a block has one work tile, all of whose tokens one thread asks for (on an
// H200, 5%).
int worthwhile_splits(const Sizes& s, const ForwardPlan& whole, const Device& device) {
  constexpr int64_t kMostWorkTiles = 8;  // of a block; with more, few multiprocessors idle at the end
  constexpr int64_t kMostWaves = 16;     // the same, once they are split
  constexpr double kEnd = 1.5;  // tiles: a split's first copies and last fold have nothing beside them
  constexpr double kCombine = 5.0, kEach = 1.0;  // microseconds: kernels before and behind; of a block's unit
  constexpr double kLong = 2.0;                  // microseconds, of a tile
  constexpr double kOneReader = 1.05, kEqual = 0.97, kGain = 0.95;
  const int64_t blocks = device.sm_count, work_tiles = whole.row_tiles * s.N;
  const bool documents = whole.kernel == ForwardKernel::sm90_d;
  const int64_t tiles = ceil_div(s.Ld, whole.tokens);
  const TileTime tile = tile_time(s, whole);
  const int64_t fewest = tile.alone < kLong ? 4 : 2;  // tiles of a split, else it is little but its ends
  if (tiles < 2 * fewest || work_tiles > kMostWorkTiles * blocks) return 1;
  const double together = 1.0 * work_tiles * tiles / blocks * tile.together;
  const auto time = [&](int64_t num_splits) {
    const int64_t waves = ceil_div(work_tiles * num_splits, blocks), each = ceil_div(tiles, num_splits);
    const double all = together * (documents && waves == 1 ? kOneReader : 1.0);
    const double busiest = waves * (each + kEnd) * tile.alone;
    return std::max(all + kEach * waves, busiest) + (num_splits > 1 ? kCombine : 0.0);
  };
  const double uncut = time(1);
  int64_t best = 1;
  double least = kGain * uncut;
  for (int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const int64_t num_splits = std::min(waves * blocks / work_tiles, tiles / fewest);
    if (num_splits < 2 || num_splits == best) continue;
    const double taken = time(num_splits);
    if (taken >= (best == 1 ? 1.0 : kEqual) * least) continue;
    best = num_splits;
    least = taken;
  }
  return static_cast<int>(best);
}

}  // namespace late_interaction
