#include <algorithm>
#include <bit>

#include "../common/arithmetic.h"
#include "plan.h"

namespace late_interaction {

namespace {

constexpr int kWarps = 8;             // of a block, whatever it does
constexpr int kMaxFragments = 8;      // that a warp holds of a row read in vectors
constexpr int kElementFragments = 4;  // and of one read element by element
constexpr int kFragmentBytes = 512;   // of a fragment in the type of sums
constexpr int kMaxTileTokens = 2048;
constexpr int kMinTileTokens = 32;
constexpr int64_t kSingleQueryBytes = 32 * 1024;  // of gradients, of a tile of such a document
constexpr int64_t kMaxChunk = 8192;
constexpr int kCacheBytes = 64 * 1024;  // that a multiprocessor's rows in flight and rows read again want
constexpr int kReservedBytes = 1024;    // of each block's shared memory, that CUDA takes

static_assert(kSingleQueryWinners == 32 * kWarps);

// Dims of one fragment of an embedding: 32 lanes by 4 elements, or 2 in fp64.
int fragment_dims(Dtype dtype) { return dtype == Dtype::fp64 ? 64 : 128; }

int fragments_for(int64_t d, Dtype dtype) {
  if (dtype == Dtype::fp64) return kMaxFragments;  // one kernel for all lengths
  int fragments = 1;
  while (fragments < kMaxFragments && fragments * fragment_dims(dtype) < d) fragments *= 2;
  return fragments;
}

// As many warps to a query token as it takes to fill the device, while each still has a few documents.
int gather_split(const Sizes& s, const Device& device) {
  const int64_t wanted = 32 * static_cast<int64_t>(device.sm_count);
  int split = 1;
  while (split < kWarps && s.Nq * s.Lq * split < wanted && s.N >= 16 * split) split *= 2;
  return split;
}

// Blocks that the kernels leave registers for on a multiprocessor.
int resident_blocks(Dtype dtype, int fragments) { return fragments > 1 || dtype == Dtype::fp64 ? 1 : 3; }

// Sums and gather queues of the warps (backward/grad_rows.cuh). scatter: queued rows are added to as well.
int block_smem(int fragments, bool scatter) {
  return kWarps * (fragments * kFragmentBytes + 32 * 16 * (scatter ? 2 : 1));
}

// Winners that fall to a document.
int64_t winners_of_document(const Sizes& s) { return s.layout == Layout::in_batch ? s.Nq * s.Lq : s.Lq; }

// Blocks of a document: `least` to `most`, and within those as few as give every multiprocessor two.
int64_t clamp_tiles(const Sizes& s, const Device& device, int64_t least, int64_t most) {
  const int64_t documents = std::max<int64_t>(s.documents(), 1);
  const int64_t for_blocks = (2 * int64_t{device.sm_count} + documents / 2) / documents;
  return std::clamp(for_blocks, least, std::max(least, most));
}

void cut_documents(const Sizes& s, int64_t tiles, BackwardPlan& plan) {
  const int64_t tokens = std::max<int64_t>(1, ceil_div(s.Ld, tiles));
  plan.tile_tokens = static_cast<int>(tokens);
  plan.tiles = static_cast<int>(ceil_div(s.Ld, tokens));
  plan.grad_d_grid = std::max<int64_t>(s.documents(), 1) * plan.tiles;
}

// Documents of one query alone: nearly all gradients are zeros (backward/grad_d_single_query.cuh).
void plan_single_query(const Sizes& s, Dtype dtype, const Device& device, BackwardPlan& plan) {
  const int64_t bytes = s.Ld * s.d * element_bytes(dtype);
  const int64_t least = std::max({int64_t{1}, ceil_div(s.Ld, kMaxTileTokens), bytes / kSingleQueryBytes});
  cut_documents(s, clamp_tiles(s, device, least, ceil_div(s.Ld, kMinTileTokens)), plan);
  plan.single_query = true;
  plan.chunk = static_cast<int>(ceil_div(s.Lq, 32) * 32);
  SegmentedSmem& memory = plan.memory;
  memory.staged = block_smem(plan.row_fragments, false);
  memory.starts = memory.staged + 2 * plan.chunk;
  plan.lowmem_smem_bytes = memory.starts + 4 * plan.tile_tokens;
}

// Cuts documents into tiles of tokens, a block each. Every tile orders all winners of its document, so tiles
// are as large as they can be while every multiprocessor has two blocks and the winners that fall to a tile,
// if they spread evenly, fit the list in one round.
void plan_many(const Sizes& s, Dtype dtype, const Device& device, BackwardPlan& plan) {
  const int64_t entries = winners_of_document(s);
  // Rows in flight pass through L1, which is the memory that shared memory leaves; 7.5 leaves 32 KiB.
  const int64_t shared_memory =
      device.sm80() ? std::max(device.smem_per_sm - kCacheBytes, device.smem_per_sm / 2) : device.smem_per_sm;
  const int64_t space =
      std::min<int64_t>(device.smem_per_block,
                        shared_memory / resident_blocks(dtype, plan.row_fragments) - kReservedBytes) /
      16 * 16;
  plan.segments =
      static_cast<int>(std::bit_floor(static_cast<uint64_t>(std::clamp<int64_t>(entries / 64, 1, kWarps))));
  plan.narrow_list = entries <= 65536;
  const int64_t listed = plan.narrow_list ? 2 : 4;
  const int64_t grads = s.layout == Layout::in_batch ? s.Nq : 1;
  const int64_t sum_bytes = dtype == Dtype::fp64 ? 8 : 4;
  plan.grads_kept = static_cast<int>(sum_bytes * grads <= space / 8 ? grads : 0);

  SegmentedSmem& memory = plan.memory;
  // Winners come to shared memory before they are in order: if a document has several tiles, this tile's
  // winners alone, with room in each warp for a quarter more than an even share, if the list holds them then.
  const int64_t unit = 32 * plan.segments;
  const auto lay_out = [&](int64_t tiles, bool compact) {
    const int64_t tokens = ceil_div(s.Ld, tiles);
    plan.compact = compact;
    const int64_t staged = compact ? std::min({entries, 5 * ceil_div(entries, 4 * tiles) + unit, space})
                                   : std::min({entries, space / 6, kMaxChunk});
    plan.chunk = static_cast<int>(ceil_div(staged, unit) * unit);
    memory.staged = block_smem(plan.row_fragments, false);
    memory.origins = memory.staged + 2 * plan.chunk;
    memory.kept = memory.staged + (compact ? 4 : 2) * plan.chunk;
    memory.starts = memory.kept + static_cast<int>(sum_bytes) * plan.grads_kept;
    memory.next = memory.starts + static_cast<int>(4 * (tokens + 1));
    memory.cursors = memory.next + static_cast<int>(4 * tokens);
    memory.list = memory.cursors + static_cast<int>(4 * tokens * plan.segments);
    return (space - memory.list) / listed;  // how many winners the list holds
  };
  // A quarter more than an even share, for winners that are not spread so evenly.
  const auto wanted = [&](int64_t tiles) { return std::min(entries, 5 * ceil_div(entries, 4 * tiles) + 64); };

  const int64_t least = std::max<int64_t>(1, ceil_div(s.Ld, kMaxTileTokens));
  const int64_t most = std::max(ceil_div(s.Ld, kMinTileTokens), least);
  const int64_t fewest = clamp_tiles(s, device, least, most);
  const auto fits = [&](int64_t tiles, bool compact) { return lay_out(tiles, compact) >= wanted(tiles); };
  int64_t tiles = fewest;
  while (tiles < most && !fits(tiles, false)) ++tiles;
  // Leaving out the winners of other tiles pays, measured on an H200: more than additional tiles cost, if
  // otherwise a tile would look at all winners twice, for want of memory.
  int64_t compact = std::max<int64_t>(fewest, 2);
  while (compact < most && !fits(compact, true)) ++compact;
  const bool leave_out = compact <= most && fits(compact, true) &&
                         (compact == tiles || entries > std::min(space / 6, kMaxChunk));
  cut_documents(s, leave_out ? compact : tiles, plan);
  // Where there is memory, for twice as many: one token may win often.
  const int64_t capacity = lay_out(plan.tiles, leave_out);
  plan.list_capacity =
      static_cast<int>(std::max<int64_t>(1, std::min({capacity, entries, 2 * wanted(plan.tiles)})));
  int owned = memory.list + static_cast<int>(listed) * plan.list_capacity;
  // Registers allow a third block of rows of two fragments. Measured on an H200: with this many winners a
  // document its rows in flight are too many for L1, of 256 dims a fifth slower.
  constexpr int64_t kManyWinners = 5120;
  if (plan.row_fragments == 2 && entries >= kManyWinners) {
    owned = std::max(owned, std::min(device.smem_per_block, device.smem_per_sm / 3 - kReservedBytes + 16));
  }
  plan.lowmem_smem_bytes = std::max((owned + 15) / 16 * 16, plan.gather_smem_bytes);
}

// Measured on an H200: ordering winners by chunks, twice for every tile, does not pay if a query has many.
bool is_faster_unified(const Sizes& s, const BackwardPlan& lowmem) {
  constexpr int64_t kLongQuery = 512;
  return s.layout == Layout::in_batch && s.Lq >= kLongQuery && !lowmem.compact &&
         lowmem.chunk < winners_of_document(s);
}

}  // namespace

BackwardPlan plan_backward(const Sizes& s, Dtype dtype, bool vectors, bool normalize, Backward method,
                           const Device& device) {
  if (method == Backward::automatic) {
    const BackwardPlan lowmem = plan_backward(s, dtype, vectors, normalize, Backward::lowmem, device);
    if (!is_faster_unified(s, lowmem)) return lowmem;
    return plan_backward(s, dtype, vectors, normalize, Backward::unified, device);
  }
  BackwardPlan plan;
  plan.method = method;
  plan.vectors = vectors;
  plan.row_fragments = vectors ? fragments_for(s.d, dtype) : kElementFragments;
  // The Jacobian of the normalization needs a whole row; longer rows are summed first.
  plan.finish_later = normalize && s.d > plan.row_fragments * fragment_dims(dtype);
  plan.split = gather_split(s, device);
  plan.gather_grid = ceil_div(s.Nq * s.Lq * plan.split, kWarps);
  plan.gather_smem_bytes = block_smem(plan.row_fragments, plan.method == Backward::unified);
  plan.pdl = device.pdl();
  if (s.layout == Layout::per_query && s.Lq <= kSingleQueryWinners) {
    plan_single_query(s, dtype, device, plan);
  } else {
    plan_many(s, dtype, device, plan);
  }
  return plan;
}

// Chosen where it is faster than the gather, by bytes read and by how full tiles are: a block reads a
// document once for kTiledRows rows; the gather reads a row for each of them.
std::optional<TiledGradQPlan> plan_tiled_grad_q(const Sizes& s, Dtype dtype, bool aligned,
                                                const Device& device) {
  constexpr int64_t kFewestDocuments = 64;
  const bool served = s.layout == Layout::in_batch && aligned &&
                      (dtype == Dtype::bf16 || dtype == Dtype::fp16) && s.d % 8 == 0 &&
                      s.Ld <= kMostTiledTokens && s.N >= kFewestDocuments;
  if (!served) return std::nullopt;
  const int64_t groups = ceil_div(s.Lq, kGroupRows);
  TiledGradQPlan plan;
  plan.slices = static_cast<int>(ceil_div(s.d, kSliceDims));
  plan.grid = ceil_div(s.Nq * groups, kTiledRows / kGroupRows) * plan.slices;
  plan.smem_bytes = static_cast<int>(2 * kSliceDims * (1 + kTiledStages * s.Ld));
  plan.pdl = device.pdl();
  const int64_t waves = ceil_div(plan.grid, device.sm_count);
  // The fraction of lanes and of multiprocessors that has work.
  const double full =
      static_cast<double>(s.Lq * s.d * plan.grid) /
      static_cast<double>(groups * kGroupRows * plan.slices * kSliceDims * waves * device.sm_count);
  if (plan.smem_bytes > device.smem_per_block || full < 0.75) return std::nullopt;
  return plan;
}

}  // namespace late_interaction
