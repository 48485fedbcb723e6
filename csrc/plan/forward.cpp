#include <algorithm>
#include <span>

#include "documents_shape.h"
#include "halves.h"
#include "plan.h"

namespace late_interaction {

namespace {

constexpr int64_t kChunkBytes = 128;
constexpr int kMaxStages = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Inverse norms and the exchange between warps, as the kernel lays them out before the ring.
int64_t exchange_bytes(const TileShape& tile) {
  const int64_t warps_n = tile.threads / 32 / (tile.rows / tile.warp_rows);
  return 4 * tile.columns + 8 * warps_n * tile.rows;
}

int blocks_by_registers(Tile tile) { return tile == Tile::thin ? 3 : 2; }

// The pieces that a query's sum falls into: how many blocks of `rows` rows a query of Lq rows can touch.
int64_t count_parts(const Sizes& s, int64_t rows) {
  if (s.layout == Layout::per_query || s.Lq % rows == 0) return std::max<int64_t>(1, ceil_div(s.Lq, rows));
  if (rows % s.Lq == 0) return 1;
  return ceil_div(s.Lq - 1, rows) + 1;
}

// A ring as deep as the shared memory of `blocks` blocks a multiprocessor allows; 0 where not even two stages
// fit.
int stages_that_fit(int64_t resident, int64_t stage, int blocks, const Device& device) {
  const int64_t reserved = 1024;  // the system's own share of each block
  const int64_t room = std::min<int64_t>(device.smem_per_block, device.smem_per_sm / blocks - reserved);
  const int64_t stages = (room - resident) / stage;
  return stages < 2 ? 0 : static_cast<int>(std::min<int64_t>(stages, kMaxStages));
}

struct Fit {
  int stages = 0, blocks = 0;
  bool stream_q = false;
};

// Q stays resident if three stages and two blocks a multiprocessor still fit; else it streams. One block with
// a resident Q beats streaming only where streaming cannot have two blocks either.
Fit fit(const TileShape& shape, Tile tile, int64_t chunks, const Device& device) {
  const int64_t extra = exchange_bytes(shape);
  const int64_t resident = extra + chunks * shape.rows * kChunkBytes;
  const int64_t d_stage = shape.columns * kChunkBytes;
  const int64_t qd_stage = (shape.columns + shape.rows) * kChunkBytes;
  for (int blocks = blocks_by_registers(tile); blocks >= 2; --blocks) {
    const int stages = stages_that_fit(resident, d_stage, blocks, device);
    if (stages >= 3) return {stages, blocks, false};
  }
  const int streamed = stages_that_fit(extra, qd_stage, 2, device);
  if (streamed >= 3) return {streamed, 2, true};
  const int alone = stages_that_fit(resident, d_stage, 1, device);
  if (alone >= 3) return {alone, 1, false};
  return {stages_that_fit(extra, qd_stage, 1, device), 1, true};
}

int64_t count_row_tiles(const Sizes& s, int64_t rows) {
  return s.layout == Layout::in_batch ? ceil_div(s.Nq * s.Lq, rows) : s.Nq * ceil_div(s.Lq, rows);
}

ForwardPlan plan_tile(const Sizes& s, Compute compute, Tile tile, const Device& device) {
  const TileShape shape = tile_shape(tile, compute);
  ForwardPlan plan;
  plan.compute = compute;
  plan.tile = tile;
  plan.chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kChunkBytes));
  const Fit f = fit(shape, tile, plan.chunks, device);
  plan.stages = f.stages;
  plan.stream_q = f.stream_q;
  plan.blocks_per_sm = f.blocks;
  const int64_t stage = (shape.columns + (f.stream_q ? shape.rows : 0)) * kChunkBytes;
  const int64_t q = f.stream_q ? 0 : plan.chunks * shape.rows * kChunkBytes;
  plan.smem_bytes = static_cast<int>(exchange_bytes(shape) + q + f.stages * stage);
  plan.rows = shape.rows;
  plan.columns = shape.columns;
  plan.part_rows = shape.warp_rows;
  plan.row_tiles = count_row_tiles(s, shape.rows);
  plan.units = plan.row_tiles * s.N;
  plan.grid = std::min<int64_t>(plan.units, static_cast<int64_t>(f.blocks) * device.sm_count);
  plan.parts = static_cast<int>(count_parts(s, shape.warp_rows));
  return plan;
}

// Documents so short that a ring and barriers take longer than their products, against few query rows or with
// little to do at all: kernels/forward_direct.cuh. Its plan is a thin tile without a ring.
//
// Without it, the sweep of random shapes shows, wgmma_documents takes 0.43 us of a multiprocessor for any
// document of up to 64 tokens, and wgmma_rows at least 7 us for any call on a few hundred rows.
bool worth_direct(const Sizes& s, Compute compute, const ForwardTraits& traits) {
  constexpr int64_t kShort = 64, kShortWithoutCopyEngine = 128, kLongestEmbedding = 2 * kChunkBytes;
  constexpr double kLittleWork = 5e8;
  const int64_t rows = s.layout == Layout::in_batch ? s.Nq * s.Lq : s.Lq;
  return (compute == Compute::bf16 || compute == Compute::fp16) && !traits.packed && !traits.scaled &&
         s.d * element_bytes(compute) <= kLongestEmbedding &&
         s.Ld <= (traits.copy_engine ? kShort : kShortWithoutCopyEngine) &&
         (rows <= 32 || 2.0 * s.Nq * s.Lq * s.N * s.Ld * s.d <= kLittleWork);
}

ForwardPlan plan_direct(const Sizes& s, Compute compute, const Device& device) {
  ForwardPlan plan;
  plan.compute = compute;
  plan.tile = Tile::thin;
  plan.chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kChunkBytes));
  plan.rows = plan.part_rows = 32;
  plan.columns = s.Ld <= 8 ? 8 : 32;
  plan.blocks_per_sm = plan.columns == 8 ? 3 : 2;
  plan.row_tiles = count_row_tiles(s, plan.rows);
  plan.units = plan.row_tiles * s.N;
  plan.grid = std::min<int64_t>(plan.units, static_cast<int64_t>(plan.blocks_per_sm) * device.sm_count);
  plan.parts = plan.row_tiles == 1 ? 1 : static_cast<int>(count_parts(s, plan.part_rows));
  return plan;
}

constexpr int64_t kMaxExactToken = int64_t{1} << 24;  // wgmma_rows and wgmma_split keep tokens in fp32
constexpr int64_t kWgmmaReserve = 2048;               // alignment and barriers

// Persistent, one block a multiprocessor.
void share_out(const Sizes& s, ForwardPlan& plan, const Device& device) {
  plan.blocks_per_sm = 1;
  plan.row_tiles = count_row_tiles(s, plan.rows);
  plan.units = plan.row_tiles * s.N;
  plan.grid = std::min<int64_t>(plan.units, device.sm_count);
  plan.parts = static_cast<int>(count_parts(s, plan.part_rows));
}

// The width that fits Ld, of those allowed: a tile costs its columns, and some for starting and ending it.
// The first of equals.
template <class Allowed>
int fit_columns(const Sizes& s, Compute compute, Allowed allowed) {
  const auto widths = compute == Compute::int8 ? std::span<const int>(kInt8TileWidths) : kTileWidths;
  const auto cost = [&](int columns) { return ceil_div(s.Ld, columns) * (columns + 16); };
  int best = 0;
  for (const int columns : widths) {
    if (allowed(columns) && (best == 0 || cost(columns) < cost(best))) best = columns;
  }
  return best;
}

// Whether a kernel before copies the tokens that count of documents with a mask, of documents shorter than a
// tile, and of packed ones, which may be. A token costs the copy 2 * 256 bytes, and products without a mask
// save about a quarter of what its products with the query rows take, which at 1000 of them is as long;
// beside that, no time goes to masked tokens. And the copy is a kernel more.
bool worth_copying(const Sizes& s, Compute compute, const ForwardTraits& traits) {
  constexpr int64_t kEnoughRows = 1024, kWidestTile = 160, kMostRoom = int64_t{1} << 30;
  constexpr double kEnoughWork = 2e10;
  const int64_t rows = s.layout == Layout::in_batch ? s.Nq * s.Lq : s.Lq;
  const int64_t slot = traits.packed ? kWidestTile : std::max(s.Ld, kWidestTile);
  return (traits.masked || traits.packed || s.Ld < 80) && rows >= kEnoughRows &&
         2.0 * s.Nq * s.Lq * s.N * s.Ld * s.d >= kEnoughWork &&
         s.documents() * slot * s.d * element_bytes(compute) <= kMostRoom;
}

// Documents of different lengths. Dealing them out takes a rank, which reads all lengths for each.
void deal(const Sizes& s, ForwardPlan& plan, const Device& device) {
  constexpr int64_t kMostRanked = 2048;
  const int64_t hands = device.sm_count / std::max<int64_t>(plan.row_tiles, 1);
  plan.dealt = hands >= 4 && s.N >= hands && s.N <= kMostRanked;
  if (plan.dealt) plan.grid = hands * plan.row_tiles;
}

// Query rows on the M side. The tile's width is fitted to Ld: least padding first, then the wider one.
ForwardPlan plan_wgmma_rows(const Sizes& s, Compute compute, const ForwardTraits& traits,
                            const Device& device) {
  ForwardPlan plan;
  plan.compute = compute;
  plan.tile = Tile::wgmma_rows;
  plan.chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kChunkBytes));
  plan.rows = 256;
  plan.part_rows = 128;
  plan.scaled = traits.scaled;
  plan.copied = worth_copying(s, compute, traits);
  const auto masked = [&](int columns) {
    return !plan.copied && (traits.masked || traits.packed || s.Ld < columns);
  };
  plan.columns = fit_columns(
      s, compute, [&](int columns) { return columns <= widest_tile(masked(columns), plan.scaled); });
  plan.masked = masked(plan.columns);
  // Worth a kernel of its own where the products take tens of microseconds.
  constexpr double kWorthTrimming = 4e10;
  plan.trimmed = traits.masked && !plan.copied && 2.0 * s.Nq * s.Lq * s.N * s.Ld * s.d >= kWorthTrimming;
  const int64_t q = plan.chunks * plan.rows * kChunkBytes;
  const int64_t stage = plan.chunks * plan.columns * kChunkBytes + (plan.masked ? 32 : 0) +
                        (plan.scaled ? 4 * plan.columns : 0);
  plan.stages =
      static_cast<int>(std::min<int64_t>((device.smem_per_block - kRowsKept - q) / stage, kMaxStages));
  plan.smem_bytes = static_cast<int>(q + plan.stages * stage + kRowsKept);
  share_out(s, plan, device);
  if (traits.packed) deal(s, plan, device);
  return plan;
}

// Query rows on the M side, and their embeddings in chunks. Q stays in shared memory where that leaves a ring
// deep enough; else it streams, and two blocks that take neighbouring documents bring each other half of it.
// Full accuracy takes half the rows, since sums take registers too, and two parts of an element.
// tf32x3: the low parts are made in the ring, and three products for each chunk leave it the time to stream Q
// in every block. halves: both parts are copied, of Q as well.
ForwardPlan plan_wgmma_split(const Sizes& s, Compute compute, const ForwardTraits& traits,
                             const Device& device, bool halves = false) {
  const bool exact = compute == Compute::tf32x3;
  ForwardPlan plan;
  plan.compute = compute;
  plan.tile = Tile::wgmma_split;
  plan.chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kChunkBytes));
  plan.rows = exact || halves ? 128 : 256;
  plan.part_rows = exact || halves ? 16 : 32;
  plan.columns = fit_columns(s, compute, [](int columns) { return columns <= kWidestSplitTile; });
  plan.masked = traits.masked || s.Ld < plan.columns;
  plan.scaled = traits.scaled;
  constexpr int64_t kUnitsAndBarriers = 512;
  const int64_t weights = plan.masked || plan.scaled ? 2 * (8 * plan.columns + 16) : 0;
  const int64_t beside = weights + kUnitsAndBarriers, room = device.smem_per_block - beside;
  const int64_t chunk = (exact || halves ? 2 : 1) * kChunkBytes;  // of a token
  const int64_t q = plan.chunks * plan.rows * chunk, d_stage = plan.columns * chunk;
  plan.stream_q = exact || (room - q) / d_stage < (halves ? 3 : 4);
  const int64_t resident = plan.stream_q ? 0 : q;
  const int64_t stage = d_stage + (plan.stream_q ? plan.rows * chunk : 0);
  plan.stages = static_cast<int>(std::min<int64_t>((room - resident) / stage, kMaxStages));
  plan.smem_bytes = static_cast<int>(resident + plan.stages * stage + beside);
  share_out(s, plan, device);
  // With an odd number of documents one of two blocks idles at the end of each row tile.
  if (plan.stream_q && !exact && device.sm_count >= 2 && (s.N % 2 == 0 || s.N >= 16)) {
    plan.cluster = 2;
    plan.units = plan.row_tiles * ceil_div(s.N, 2);
    plan.grid = 2 * std::min<int64_t>(plan.units, device.sm_count / 2);
  }
  return plan;
}

// Documents on the M side: the ring takes what Q and the exchange between warps leave.
ForwardPlan plan_wgmma_documents(const Sizes& s, Compute compute, int64_t rows_together,
                                 const Device& device) {
  ForwardPlan plan;
  plan.compute = compute;
  plan.tile = Tile::wgmma_documents;
  plan.chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kChunkBytes));
  plan.columns = static_cast<int>(std::max<int64_t>(1, ceil_div(rows_together, 32)) * 32);
  const DocumentsShape shape = documents_shape(plan.columns, plan.chunks);
  plan.chunks = static_cast<int>(ceil_div(plan.chunks, shape.chunks)) * shape.chunks;
  plan.tokens = shape.tokens;
  plan.rows = plan.part_rows = plan.columns;
  share_out(s, plan, device);
  plan.parts = 1;  // no query is cut
  const int64_t documents_a_block =
      std::max<int64_t>(1, ceil_div(plan.units, std::max<int64_t>(plan.grid, 1)));
  // All warpgroups on a block's only document, if a tile is one stage: then all shares of the ring fill. Else
  // each goes its own way, for the end of a document costs every warpgroup that took part in it.
  const bool together = documents_a_block == 1 && plan.chunks == shape.chunks && s.Ld > shape.tokens;
  plan.members = together ? shape.warpgroups : 1;
  // As many teams as find work and leave enough stages to each warpgroup; wide tiles need the warpgroups
  // more. Where every query has its own documents each team holds a Q.
  const int64_t least_share = plan.columns > 64 ? 2 : 3;
  const int64_t stage = shape.chunks * shape.tokens * kChunkBytes;
  const int64_t q = plan.chunks * plan.columns * kChunkBytes;
  const int64_t exchange = shape.warpgroups * 2 * 4 * plan.columns * 8;
  plan.teams = static_cast<int>(std::min<int64_t>(shape.warpgroups / plan.members, documents_a_block));
  for (;; --plan.teams) {
    const int64_t fixed = (plan.row_tiles > 1 ? plan.teams : 1) * q + exchange + kWgmmaReserve;
    const int64_t warpgroups = plan.teams * plan.members;
    const int64_t share = std::max<int64_t>(device.smem_per_block - fixed, 0) / stage / warpgroups;
    if (share < least_share && plan.teams > 1) continue;
    plan.stages = static_cast<int>(share * warpgroups);
    plan.smem_bytes = static_cast<int>(fixed + plan.stages * stage);
    return plan;
  }
}

// Tile work, in elements of S, that the busiest multiprocessor gets: what a compute-bound call waits for.
double busiest_work(const Sizes& s, const ForwardPlan& plan, const Device& device) {
  const double a_unit = static_cast<double>(plan.rows) * ceil_div(s.Ld, plan.columns) * plan.columns;
  const int64_t units_a_block = ceil_div(plan.units, std::max<int64_t>(plan.grid, 1));
  const int64_t blocks_an_sm = ceil_div(plan.grid, device.sm_count);
  return a_unit * units_a_block * blocks_an_sm;
}

}  // namespace

std::optional<ForwardPlan> plan_halves(const Sizes& s, bool masked, const Device& device) {
  if (!device.wgmma || s.Ld > kMaxExactToken) return std::nullopt;
  const ForwardTraits traits{.dtype = Dtype::fp16, .masked = masked};
  const ForwardPlan plan = plan_wgmma_split(s, Compute::fp16, traits, device, true);
  return plan.units <= INT32_MAX ? std::optional(plan) : std::nullopt;
}

Device device_of_capability(int capability, int sm_count) {
  Device device;
  device.capability = capability;
  device.sm_count = sm_count;
  const bool large = capability == 80 || capability == 87;
  const bool hopper = capability >= 90 && capability < 120;
  device.smem_per_sm = (hopper ? 228 : large ? 164 : 100) * 1024;
  device.smem_per_block = device.smem_per_sm - 1024;
  device.wgmma = capability == 90;
  return device;
}

Compute compute_for(Dtype dtype, Precision precision) {
  switch (dtype) {
    case Dtype::bf16:
      return Compute::bf16;
    case Dtype::fp16:
      return Compute::fp16;
    case Dtype::fp64:
      return Compute::fp64;
    case Dtype::e4m3:
      return Compute::e4m3;
    case Dtype::e5m2:
      return Compute::e5m2;
    case Dtype::int8:
      return Compute::int8;
    case Dtype::fp32:
      break;
  }
  switch (precision) {
    case Precision::high:
      return Compute::tf32;
    case Precision::medium:
      return Compute::bf16;
    case Precision::fp16:
      return Compute::fp16;
    case Precision::highest:
      break;
  }
  return Compute::tf32x3;
}

int64_t element_bytes(Compute compute) {
  switch (compute) {
    case Compute::e4m3:
    case Compute::e5m2:
    case Compute::int8:
      return 1;
    case Compute::bf16:
    case Compute::fp16:
      return 2;
    case Compute::tf32:
    case Compute::tf32x3:
      return 4;
    case Compute::fp64:
      break;
  }
  return 8;
}

TileShape tile_shape(Tile tile, Compute compute) {
  const int split = compute == Compute::tf32x3 ? 2 : 1;
  switch (tile) {
    case Tile::wide:
      return {256, 64 / split, 128, 64};
    case Tile::mid:
      return {128, 128 / split, 128, 64};
    case Tile::thin:
      return {32, 128, 128, 32};
    default:
      break;
  }
  return {1, 1, 256, 1};
}

ForwardPlan plan_forward(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  const Compute compute = compute_for(traits.dtype, traits.precision);
  if (compute == Compute::fp64) {
    // One block for each (query, document): the reference path, exact and unhurried.
    ForwardPlan plan;
    plan.compute = compute;
    plan.tile = Tile::none;
    plan.units = plan.grid = s.Nq * s.N;
    return plan;
  }
  if (worth_direct(s, compute, traits)) return plan_direct(s, compute, device);
  const int64_t rows_together = s.layout == Layout::in_batch ? s.Nq * s.Lq : s.Lq;
  if (device.wgmma && traits.copy_engine) {
    const int64_t element = element_bytes(compute), bytes = s.d * element;
    if (rows_together <= 128 && element <= 2) {
      ForwardPlan plan = plan_wgmma_documents(s, compute, rows_together, device);
      if (traits.packed) deal(s, plan, device);
      if (plan.stages >= 4) return plan;
    } else if (bytes <= 2 * kChunkBytes && element <= 2 && s.Ld <= kMaxExactToken) {
      return plan_wgmma_rows(s, compute, traits, device);
    }
    // With a quarter of its rows, a tile's waste outweighs what wgmma is faster.
    const ForwardPlan split = plan_wgmma_split(s, compute, traits, device);
    if (!traits.packed && rows_together > split.rows / 4 && split.units <= INT32_MAX &&
        s.Ld <= kMaxExactToken)
      return split;
  }
  if (is_quantized(traits.dtype)) {
    ForwardPlan plan;
    plan.compute = compute;
    plan.tile = Tile::copies;
    return plan;
  }
  if (traits.packed || rows_together <= tile_shape(Tile::thin, compute).rows) {
    return plan_tile(s, compute, Tile::thin, device);
  }
  const ForwardPlan mid = plan_tile(s, compute, Tile::mid, device);
  if (rows_together <= tile_shape(Tile::mid, compute).rows) return mid;
  // 256 rows read each document tile half as often; 128 rows waste less on a small or ragged problem.
  const ForwardPlan wide = plan_tile(s, compute, Tile::wide, device);
  if (wide.stream_q || wide.blocks_per_sm < mid.blocks_per_sm) return mid;
  return busiest_work(s, wide, device) <= busiest_work(s, mid, device) ? wide : mid;
}

}  // namespace late_interaction
