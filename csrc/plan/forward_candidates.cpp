#include "forward_candidates.h"

#include <algorithm>
#include <span>

#include "kernel_limits.h"

namespace late_interaction {

namespace {

constexpr int kMaxStages = 8;
constexpr int64_t kMaxExactToken = int64_t{1} << 24;      // sm90_q and sm90_q_longd keep tokens in fp32
constexpr int64_t kWgmmaReserve = 2048, kBarriers = 512;  // what is left for barriers, what they take

// Inverse norms, places of rows and the exchange between warps, as the kernel lays them out before the ring.
int64_t exchange_bytes(const Sm80Shape& tile) {
  return 4 * tile.columns + 8 * (tile.warps_n + 1) * tile.rows;
}

// The partials that a query's sum falls into: how many blocks of `rows` rows a query of Lq rows can touch.
int64_t count_partials(const Sizes& s, int64_t rows) {
  if (s.layout == Layout::per_query || s.Lq % rows == 0) return std::max<int64_t>(1, ceil_div(s.Lq, rows));
  if (rows % s.Lq == 0 || s.Nq * s.Lq <= rows) return 1;
  return ceil_div(s.Lq - 1, rows) + 1;
}

// A ring as deep as the shared memory of `blocks` blocks a multiprocessor allows; 0 where not even two stages
// fit.
int stages_that_fit(int64_t resident, int64_t stage, int blocks, const Device& device) {
  const int64_t reserved = 1024;  // the system's own share of each block
  const int64_t capacity = std::min<int64_t>(device.smem_per_block, device.smem_per_sm / blocks - reserved);
  const int64_t stages = (capacity - resident) / stage;
  return stages < 2 ? 0 : static_cast<int>(std::min<int64_t>(stages, kMaxStages));
}

struct Fit {
  int stages = 0, blocks = 0;
  bool stream_q = false;
};

// Q stays resident if three stages and, where registers allow them, two blocks a multiprocessor still fit;
// else it streams. One block with a resident Q beats streaming only where streaming cannot have two either.
Fit fit(const Sm80Shape& shape, int64_t k_chunks, const Device& device) {
  const int64_t extra = exchange_bytes(shape);
  const int64_t resident = extra + k_chunks * shape.rows * kKChunkBytes;
  const int64_t d_stage = shape.columns * kKChunkBytes;
  const int64_t qd_stage = (shape.columns + shape.rows) * kKChunkBytes;
  for (int blocks = shape.blocks_per_sm; blocks >= 2; --blocks) {
    const int stages = stages_that_fit(resident, d_stage, blocks, device);
    if (stages >= 3) return {stages, blocks, false};
  }
  const int streamed = shape.blocks_per_sm < 2 ? 0 : stages_that_fit(extra, qd_stage, 2, device);
  if (streamed >= 3) return {streamed, 2, true};
  const int alone = stages_that_fit(resident, d_stage, 1, device);
  if (alone >= 3) return {alone, 1, false};
  return {stages_that_fit(extra, qd_stage, 1, device), 1, true};
}

int64_t count_row_tiles(const Sizes& s, int64_t rows) {
  return s.layout == Layout::in_batch ? ceil_div(s.Nq * s.Lq, rows) : s.Nq * ceil_div(s.Lq, rows);
}

// Each split has two tiles at least, so that one that ends with its document is no shorter than a tile. No
// one knows packed documents' lengths, and what is kept of masked ones.
bool may_split(const Sizes& s, int64_t tile, int num_splits, bool packed_or_compacted) {
  return num_splits == 1 || (!packed_or_compacted && ceil_div(s.Ld, tile) >= 2 * num_splits);
}

// Persistent, one block a multiprocessor.
void share_out(const Sizes& s, ForwardPlan& plan, const Device& device) {
  plan.blocks_per_sm = 1;
  plan.row_tiles = count_row_tiles(s, plan.rows);
  plan.work_tiles = plan.row_tiles * s.N * plan.num_splits;
  plan.grid = std::min<int64_t>(plan.work_tiles, device.sm_count);
  plan.partials =
      static_cast<int>(plan.num_splits == 1 ? count_partials(s, plan.partial_rows)
                                            : ceil_div(std::max<int64_t>(s.Lq, 1), plan.partial_rows));
}

// The width, in document tokens, that fits Ld, of those allowed: a tile costs its columns, and some for
// starting and ending it. `once`: and what a block waits for its first tile and folds its last one with
// nothing beside that, in quarters of a column. spared(width): columns that a document's last tile has less.
// The first of equals.
template <class Allowed, class Spared>
int fit_width(const Sizes& s, Compute compute, int64_t documents_a_block, int once, Allowed allowed,
              Spared spared) {
  const auto widths = compute == Compute::int8 ? std::span<const int>(kInt8TileWidths) : kTileWidths;
  const auto cost = [&](int width) {
    const int64_t columns = ceil_div(s.Ld, width) * (width + 16) - spared(width);
    return documents_a_block * columns + width * once / 4;
  };
  int best = 0;
  for (const int width : widths) {
    if (allowed(width) && (best == 0 || cost(width) < cost(best))) best = width;
  }
  return best;
}

// Documents of different lengths. Dealing them out takes a rank, which reads all lengths for each.
void deal(const Sizes& s, ForwardPlan& plan, const Device& device) {
  constexpr int64_t kMostRanked = 2048;
  const int64_t hands = device.sm_count / std::max<int64_t>(plan.row_tiles, 1);
  plan.lpt = hands >= 4 && s.N >= hands && s.N <= kMostRanked;
  if (plan.lpt) plan.grid = hands * plan.row_tiles;
}

bool serves_wgmma(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  return device.wgmma && traits.tma_compatible && s.Ld <= kMaxExactToken;
}

// Columns of a tile that short documents share: each has whole blocks of eight, and lies in those of a warp.
void share_tiles(const Sizes& s, const ForwardTraits& traits, const Sm80Shape& shape, ForwardPlan& plan) {
  const int64_t columns = 8 * ceil_div(std::max<int64_t>(s.Ld, 1), 8);
  const int64_t docs = shape.columns / shape.warps_n / columns;  // of a warp
  if (docs < 2 || element_bytes(plan.compute) != 2 || !traits.tma_compatible || traits.packed) return;
  auto& config = std::get<Sm80Config>(plan.config);
  config.docs = static_cast<int>(docs * shape.warps_n);
  config.columns = static_cast<int>(columns);
}

}  // namespace

std::optional<ForwardPlan> plan_sm80(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                     Sm80Tile tile, bool ffma) {
  const Compute given = compute_for(traits.dtype, traits.precision);
  const bool full_accuracy = given == Compute::tf32x3;
  if (is_quantized(traits.dtype) || (traits.packed && tile != Sm80Tile::thin) || (ffma && !full_accuracy)) {
    return std::nullopt;
  }
  const Compute compute = ffma ? Compute::fp32 : given;
  const Sm80Shape shape = sm80_shape(tile, full_accuracy);
  ForwardPlan plan;
  plan.kernel = ForwardKernel::sm80;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kKChunkBytes));
  const Fit f = fit(shape, plan.k_chunks, device);
  plan.config = Sm80Config{tile, f.stream_q};
  plan.stages = f.stages;
  plan.blocks_per_sm = f.blocks;
  const int64_t stage = (shape.columns + (f.stream_q ? shape.rows : 0)) * kKChunkBytes;
  const int64_t q = f.stream_q ? 0 : int64_t{plan.k_chunks} * shape.rows * kKChunkBytes;
  plan.smem_bytes = static_cast<int>(exchange_bytes(shape) + q + f.stages * stage);
  plan.rows = shape.rows;
  plan.tokens = shape.columns;
  plan.partial_rows = shape.warp_rows;
  plan.row_tiles = count_row_tiles(s, shape.rows);
  share_tiles(s, traits, shape, plan);
  plan.work_tiles = plan.row_tiles * ceil_div(s.N, plan.as<Sm80Config>().docs);
  plan.grid = std::min<int64_t>(plan.work_tiles, static_cast<int64_t>(f.blocks) * device.sm_count);
  plan.partials = static_cast<int>(count_partials(s, shape.warp_rows));
  return plan;
}

constexpr int kReserved = 1024;  // the system's own share of each block's shared memory

// Products of 32 bytes that an embedding takes in sm80_q and sm80_d; 0: they do not take the call.
int sm80_steps(const Sizes& s, const ForwardTraits& traits, bool fp16x2 = false) {
  constexpr int64_t kLongestDocument = int64_t{1} << 27;  // they count half groups of 16 tokens in fp32
  const int64_t element = element_bytes(compute_for(traits.dtype, traits.precision));
  const bool listed = traits.packed && s.layout == Layout::per_query;
  if (element > 2 || !traits.tma_compatible || listed || s.Ld > kLongestDocument || s.N == 0 ||
      (element == 1 && s.d > kMostCodes)) {
    return 0;
  }
  if (fp16x2) return s.d <= kMostFp16x2Dims ? kFp16x2Steps : 0;
  return mma_steps(s.d * element);
}

// Whole tokens in a ring, for a block. fp16x2: for plan_3xfp16.
std::optional<ForwardPlan> plan_sm80_q(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       bool many_rows, bool fp16x2) {
  const int steps = sm80_steps(s, traits, fp16x2);
  if (steps == 0) return std::nullopt;
  const bool fp8 = traits.dtype == Dtype::e4m3 || traits.dtype == Dtype::e5m2;
  const int operand_steps = fp8 ? 2 * steps : steps;
  const Sm80QShape shape = sm80_q_shape(many_rows, operand_steps);
  const bool turns = sm80_q_takes_turns(many_rows, fp8 || traits.dtype == Dtype::int8, fp16x2, false);
  ForwardPlan plan;
  plan.kernel = fp16x2 ? ForwardKernel::sm80_3xfp16 : ForwardKernel::sm80_q;
  plan.compute = compute_for(traits.dtype, traits.precision);
  plan.config = Sm80QConfig{many_rows, steps};
  plan.rows = 16 * shape.row_blocks * shape.warps;
  plan.tokens = sm80_q_tokens(many_rows, operand_steps, turns, false);
  plan.partial_rows = 16 * shape.row_blocks;
  plan.k_chunks = static_cast<int>(ceil_div(steps, 4));
  plan.stages = shape.ring_tokens / plan.tokens;
  plan.smem_bytes = sm80_q_smem_bytes(shape, steps);
  if (plan.smem_bytes > device.smem_per_block) return std::nullopt;
  plan.blocks_per_sm = std::min(shape.blocks_per_sm, device.smem_per_sm / (plan.smem_bytes + kReserved));
  plan.row_tiles = count_row_tiles(s, plan.rows);
  plan.work_tiles = plan.row_tiles * s.N;
  plan.grid = std::min<int64_t>(plan.work_tiles, int64_t{plan.blocks_per_sm} * device.sm_count);
  plan.partials = static_cast<int>(count_partials(s, plan.partial_rows));
  return plan;
}

// Whole tokens in a ring for each warp. All warps of a block share a document: more of them are under way at
// its end than with a document a warp, but short ones do not pay for the merge.
std::optional<ForwardPlan> plan_sm80_d(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       int members) {
  constexpr int kBlocksPerSm = 2;  // as registers allow
  constexpr int64_t kShort = 64;
  const int steps = sm80_steps(s, traits);
  if (steps == 0) return std::nullopt;
  ForwardPlan plan;
  plan.kernel = ForwardKernel::sm80_d;
  plan.compute = compute_for(traits.dtype, traits.precision);
  const bool fp8 = traits.dtype == Dtype::e4m3 || traits.dtype == Dtype::e5m2;
  const bool wide = rows_per_document(s) > 32 && sm80_d_has_wide_tile(steps, fp8);
  plan.rows = plan.partial_rows = wide ? 64 : 32;
  plan.tokens = kSm80DTokens;
  plan.k_chunks = static_cast<int>(ceil_div(steps, 4));
  plan.stages = sm80_d_stages(steps);
  plan.smem_bytes = sm80_d_smem_bytes(steps, wide);
  if (plan.smem_bytes + kReserved > device.smem_per_block) return std::nullopt;
  plan.blocks_per_sm = std::min(kBlocksPerSm, device.smem_per_sm / (plan.smem_bytes + 2 * kReserved));
  plan.row_tiles = count_row_tiles(s, plan.rows);
  plan.work_tiles = plan.row_tiles * s.N;
  const int64_t blocks = int64_t{plan.blocks_per_sm} * device.sm_count;
  if (members == 0) members = s.Ld > kShort ? kSm80DWarps : 1;
  plan.config = Sm80DConfig{steps, members};
  plan.grid = std::min(ceil_div(plan.work_tiles, members > 1 ? 1 : kSm80DWarps), blocks);
  plan.partials = static_cast<int>(count_partials(s, plan.partial_rows));
  return plan;
}

int64_t tokens_at_once(const ForwardPlan& plan) {
  const auto* sm80_d = std::get_if<Sm80DConfig>(&plan.config);
  return plan.tokens * (sm80_d != nullptr ? sm80_d->members : 1);
}

std::optional<ForwardPlan> split_sm80(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                      ForwardPlan plan, int num_splits) {
  const auto* sm80_q = std::get_if<Sm80QConfig>(&plan.config);
  const auto* sm80_d = std::get_if<Sm80DConfig>(&plan.config);
  const auto* sm80 = std::get_if<Sm80Config>(&plan.config);
  const bool splits = (sm80_q != nullptr && !sm80_q->many_rows && plan.kernel == ForwardKernel::sm80_q) ||
                      (sm80_d != nullptr && sm80_d->members > 1) ||
                      (sm80 != nullptr && sm80->tile == Sm80Tile::thin && sm80->docs == 1 &&
                       plan.compute != Compute::tf32x3 && plan.compute != Compute::fp32);
  const int64_t tile = tokens_at_once(plan);
  if (!splits || !may_split(s, tile, num_splits, traits.packed)) return std::nullopt;
  plan.split_tokens = static_cast<int>(ceil_div(ceil_div(s.Ld, num_splits), tile) * tile);
  plan.num_splits = static_cast<int>(ceil_div(s.Ld, plan.split_tokens));
  plan.partial_rows = kCombineRows;
  plan.work_tiles = plan.row_tiles * s.N * plan.num_splits;
  plan.grid = std::min(plan.work_tiles, int64_t{plan.blocks_per_sm} * device.sm_count);
  plan.partials = static_cast<int>(ceil_div(std::max<int64_t>(s.Lq, 1), plan.partial_rows));
  return plan;
}

// 32 query rows, and no ring. A warp holds its query rows in registers; of longer ones, slices.
std::optional<ForwardPlan> plan_sm80_short_docs(const Sizes& s, const ForwardTraits& traits,
                                                const Device& device, int tokens) {
  constexpr int64_t kLongestEmbedding = 2 * kKChunkBytes;
  constexpr int kWarps = 4;
  const Compute compute = compute_for(traits.dtype, traits.precision);
  if ((compute != Compute::bf16 && compute != Compute::fp16) || traits.packed || traits.scaled ||
      (s.d * element_bytes(compute) > kLongestEmbedding && (tokens != 8 || !traits.tma_compatible))) {
    return std::nullopt;
  }
  ForwardPlan plan;
  plan.kernel = ForwardKernel::sm80_short_docs;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kKChunkBytes));
  plan.rows = plan.partial_rows = 32;
  plan.tokens = tokens != 0 ? tokens : s.Ld <= 8 ? 8 : 32;
  plan.blocks_per_sm = short_docs_blocks(plan.tokens, plan.k_chunks);
  plan.row_tiles = count_row_tiles(s, plan.rows);
  plan.work_tiles = plan.row_tiles * s.N;
  plan.grid = std::min<int64_t>(plan.work_tiles, static_cast<int64_t>(plan.blocks_per_sm) * device.sm_count);
  plan.config = Sm80ShortDocsConfig{plan.grid == plan.work_tiles && s.Ld > plan.tokens ? kWarps : 1};
  plan.partials = static_cast<int>(count_partials(s, plan.partial_rows));
  return plan;
}

// A ring for each warp, of tiles of up to 32 tokens.
std::optional<ForwardPlan> plan_sm90_stream(const Sizes& s, const ForwardTraits& traits,
                                            const Device& device) {
  constexpr int kWidest = 32;
  const Compute compute = compute_for(traits.dtype, traits.precision);
  if ((compute != Compute::bf16 && compute != Compute::fp16) || traits.packed || traits.scaled ||
      !serves_wgmma(s, traits, device) || s.d > kKChunkBytes || s.d % 8 != 0 || s.Ld == 0 ||
      s.N > INT32_MAX / 2 || rows_per_document(s) > 32 || (s.layout == Layout::per_query && s.Nq > 1)) {
    return std::nullopt;
  }
  ForwardPlan plan;
  plan.kernel = ForwardKernel::sm90_stream;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(2 * s.d, kKChunkBytes));
  plan.rows = plan.partial_rows = 32;
  plan.tokens = static_cast<int>(8 * ceil_div(ceil_div(s.Ld, ceil_div(s.Ld, kWidest)), 8));
  const int64_t stage = int64_t{plan.k_chunks} * plan.tokens * kKChunkBytes;
  const int warps = stream_warps(plan.tokens, plan.k_chunks);
  plan.stages = kStreamStages;
  plan.smem_bytes = static_cast<int>(warps * plan.stages * stage);
  plan.blocks_per_sm = 1;
  plan.row_tiles = 1;
  plan.work_tiles = s.N;
  plan.grid = std::min<int64_t>(device.sm_count, ceil_div(s.N, warps));
  return plan;
}

// Query rows on the M side. The tile's width is fitted to Ld: least padding first, then the wider one.
std::optional<ForwardPlan> plan_sm90_q(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       bool compacted, int tokens, int num_splits) {
  const Compute compute = compute_for(traits.dtype, traits.precision);
  const int64_t element = element_bytes(compute);
  if (!serves_wgmma(s, traits, device) || element > 2 || s.d * element > 2 * kKChunkBytes)
    return std::nullopt;
  ForwardPlan plan;
  plan.kernel = ForwardKernel::sm90_q;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(s.d * element, kKChunkBytes));
  plan.rows = 256;
  plan.partial_rows = 128;
  const auto masked = [&](int width) {
    return !compacted && (traits.masked || traits.packed || s.Ld < width);
  };
  const auto two_widths = [&](int width) {
    const bool whole = !traits.packed && !compacted && num_splits == 1;
    return whole && has_tails(element, masked(width), traits.scaled) && s.Ld > width &&
           s.Ld <= width + second_width(width);
  };
  const int64_t documents_a_block = ceil_div(count_row_tiles(s, plan.rows) * s.N, device.sm_count);
  const auto allowed = [&](int width) {
    return width <= widest_tile(masked(width), traits.scaled) && (tokens == 0 || width == tokens);
  };
  const auto spared = [&](int width) { return two_widths(width) ? width - second_width(width) : 0; };
  plan.tokens = fit_width(s, compute, documents_a_block, 5, allowed, spared);
  if (plan.tokens == 0) return std::nullopt;
  if (!may_split(s, plan.tokens, num_splits, traits.packed || compacted)) return std::nullopt;
  plan.num_splits = num_splits;
  // Worth a kernel of its own where the products take tens of microseconds.
  constexpr double kWorthTrimming = 4e10;
  const Sm90QConfig config{
      .masked = masked(plan.tokens),
      .scaled = traits.scaled,
      .trimmed = traits.masked && !compacted && (operations(s) >= kWorthTrimming || num_splits > 1),
      .compacted = compacted,
      .two_widths = spared(plan.tokens) > 0};
  plan.config = config;
  const int64_t q = int64_t{plan.k_chunks} * plan.rows * kKChunkBytes;
  const int64_t stage = int64_t{plan.k_chunks} * plan.tokens * kKChunkBytes + (config.masked ? 32 : 0) +
                        (config.scaled ? 4 * plan.tokens : 0);
  plan.stages =
      static_cast<int>(std::min<int64_t>((device.smem_per_block - kRowsKept - q) / stage, kMaxStages));
  plan.smem_bytes = static_cast<int>(q + plan.stages * stage + kRowsKept);
  share_out(s, plan, device);
  if (traits.packed) deal(s, plan, device);
  return plan;
}

// The host does not know how long packed documents are: half as long again as the mean, most of them, and
// longer ones have several slots.
std::optional<ForwardPlan> plan_sm90_q_short(const Sizes& s, const ForwardTraits& traits,
                                             const Device& device, int span) {
  constexpr int kFewestStages = 2;
  const Compute compute = compute_for(traits.dtype, traits.precision);
  const bool halves = compute == Compute::bf16 || compute == Compute::fp16;
  if (!halves || !serves_wgmma(s, traits, device) || traits.scaled || s.d > kMostShortDims ||
      s.Ld > kShortTiles.back().span || (traits.packed && s.layout == Layout::per_query)) {
    return std::nullopt;
  }
  const ShortTile tile = short_tile(span != 0 ? span : traits.packed ? 3 * s.Ld / 2 : s.Ld);
  if (!traits.packed && tile.span != short_tile(s.Ld).span) return std::nullopt;
  ForwardPlan plan;
  plan.kernel = ForwardKernel::sm90_q_short;
  plan.compute = compute;
  plan.rows = 256;
  plan.partial_rows = 128;
  plan.tokens = tile.span * tile.docs;
  const Sm90QShortConfig config{.span = tile.span, .masked = traits.masked || traits.packed};
  plan.config = config;
  plan.k_chunks = static_cast<int>(ceil_div(short_steps(s.d, config.masked), 4));
  const int64_t beside = plan.k_chunks * plan.rows * kKChunkBytes + short_epilogue_bytes(tile.docs);
  const int64_t stage = plan.k_chunks * plan.tokens * kKChunkBytes + (config.masked ? 4 * plan.tokens : 0);
  plan.stages = static_cast<int>(std::min<int64_t>((device.smem_per_block - beside) / stage, kMaxStages));
  if (plan.stages < kFewestStages) return std::nullopt;
  plan.smem_bytes = static_cast<int>(beside + plan.stages * stage);
  share_out(s, plan, device);
  const int64_t slots = traits.packed ? s.N + s.N * (s.Ld + 1) / tile.span : s.N;
  plan.work_tiles = plan.row_tiles * ceil_div(slots, tile.docs);
  plan.grid = std::min<int64_t>(plan.work_tiles, device.sm_count);
  if (plan.work_tiles > INT32_MAX) return std::nullopt;
  return plan;
}

// Query rows on the M side, and their embeddings in chunks. Q stays in shared memory where that leaves a ring
// deep enough; else it streams, and two blocks that take neighbouring documents bring each other half of it.
// Full accuracy takes half the rows, since sums take registers too, and two parts of an element.
// tf32x3: the low parts are made in the ring, and three products for each chunk leave it the time to stream Q
// in every block. fp16x2: both parts are copied, of Q as well.
std::optional<ForwardPlan> plan_sm90_q_longd(const Sizes& s, const ForwardTraits& traits,
                                             const Device& device, bool paired, int tokens, bool fp16x2) {
  const Compute compute = compute_for(traits.dtype, traits.precision);
  if (!serves_wgmma(s, traits, device) || traits.packed || compute == Compute::fp64) return std::nullopt;
  const bool tf32x3 = compute == Compute::tf32x3, exact = tf32x3 || fp16x2;
  ForwardPlan plan;
  plan.kernel = tf32x3   ? ForwardKernel::sm90_3xtf32
                : fp16x2 ? ForwardKernel::sm90_3xfp16
                         : ForwardKernel::sm90_q_longd;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kKChunkBytes));
  plan.rows = exact ? 128 : 256;
  plan.partial_rows = exact ? 16 : 32;
  const auto allowed = [&](int width) {
    return width <= kWidestSplitTile && (tokens == 0 || width == tokens);
  };
  plan.tokens = fit_width(s, compute, 1, 0, allowed, [](int) { return 0; });
  if (plan.tokens == 0) return std::nullopt;
  Sm90QLongDConfig config{.masked = traits.masked || s.Ld < plan.tokens, .scaled = traits.scaled};
  constexpr int64_t kUnitsAndBarriers = 512;
  const int64_t token_scales = config.masked || config.scaled ? 2 * (8 * plan.tokens + 16) : 0;
  const int64_t beside = token_scales + kUnitsAndBarriers, capacity = device.smem_per_block - beside;
  const int64_t k_chunk = (exact ? 2 : 1) * kKChunkBytes;  // of a token
  const int64_t q = int64_t{plan.k_chunks} * plan.rows * k_chunk, d_stage = plan.tokens * k_chunk;
  config.stream_q = tf32x3 || (capacity - q) / d_stage < (fp16x2 ? 3 : 4);
  const int64_t resident = config.stream_q ? 0 : q;
  const int64_t stage = d_stage + (config.stream_q ? plan.rows * k_chunk : 0);
  plan.stages = static_cast<int>(std::min<int64_t>((capacity - resident) / stage, kMaxStages));
  plan.smem_bytes = static_cast<int>(resident + plan.stages * stage + beside);
  share_out(s, plan, device);
  if (paired && config.stream_q && !tf32x3 && device.sm_count >= 2) {
    config.cluster = 2;
    plan.work_tiles = plan.row_tiles * ceil_div(s.N, 2);
    plan.grid = 2 * std::min<int64_t>(plan.work_tiles, device.sm_count / 2);
  }
  plan.config = config;
  if (plan.work_tiles > INT32_MAX) return std::nullopt;
  return plan;
}

// Documents on the M side: the ring takes what Q and the exchange between warps leave.
std::optional<ForwardPlan> plan_sm90_d(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       int members, int num_splits, bool winners, bool listed) {
  constexpr int kWidest = 128, kFewestStages = 4;
  const Compute compute = compute_for(traits.dtype, traits.precision);
  if (!device.wgmma || !traits.tma_compatible || rows_per_document(s) > kWidest ||
      element_bytes(compute) > 2) {
    return std::nullopt;
  }
  ForwardPlan plan;
  plan.kernel = ForwardKernel::sm90_d;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kKChunkBytes));
  plan.rows = static_cast<int>(std::max<int64_t>(1, ceil_div(rows_per_document(s), 32)) * 32);
  const Sm90DShape shape = sm90_d_shape(plan.rows, plan.k_chunks, winners, listed);
  if (members > shape.warpgroups) return std::nullopt;
  plan.k_chunks = static_cast<int>(ceil_div(plan.k_chunks, shape.k_chunks)) * shape.k_chunks;
  plan.tokens = shape.tokens;
  if (!may_split(s, plan.tokens, num_splits, traits.packed)) return std::nullopt;
  plan.num_splits = num_splits;
  plan.partial_rows = plan.rows;
  share_out(s, plan, device);
  plan.partials = 1;  // no query is split
  const int64_t documents_a_block =
      std::max<int64_t>(1, ceil_div(plan.work_tiles, std::max<int64_t>(plan.grid, 1)));
  const int64_t tiles = ceil_div(ceil_div(s.Ld, shape.tokens), num_splits);
  const int64_t stage = shape.k_chunks * shape.tokens * kKChunkBytes;
  const int64_t q = int64_t{plan.k_chunks} * plan.rows * kKChunkBytes;
  const int64_t exchange = shape.warpgroups * 2 * 4 * plan.rows * 8;
  // Where every query has its own documents each team holds a Q.
  const auto fixed = [&](int teams) {
    return (plan.row_tiles > 1 ? teams : 1) * q + exchange + kWgmmaReserve;
  };
  const auto share = [&](int teams, int of) {  // stages of a warpgroup
    return std::max<int64_t>(device.smem_per_block - fixed(teams), 0) / stage / (teams * of);
  };
  // As many teams as find work and leave enough stages to each warpgroup; wide tiles need the warpgroups
  // more.
  const int64_t least_share = plan.rows > 64 ? 2 : 3;
  const auto teams_of = [&](int of) {
    int teams = static_cast<int>(std::min<int64_t>(shape.warpgroups / of, documents_a_block));
    while (teams > 1 && share(teams, of) < least_share) --teams;
    return teams;
  };
  // Tiles that a warpgroup takes one after the other, and the end of a document that all who took part in it
  // wait for.
  const auto waves = [&](int of) {
    return ceil_div(documents_a_block, teams_of(of)) * (ceil_div(tiles, of) + 1);
  };
  Sm90DConfig config{.members = std::max(members, 1)};
  const bool few = documents_a_block <= (plan.rows <= 64 ? 5 : 1) || teams_of(1) == 1;
  const int64_t enough = plan.k_chunks == shape.k_chunks ? 3 : 4;  // stages; a tile may be several
  for (const int more : {2, 3}) {
    const bool possible = members == 0 && few && more <= shape.warpgroups && share(1, more) >= enough;
    if (possible && waves(more) < waves(config.members)) config.members = more;
  }
  config.teams = teams_of(config.members);
  plan.config = config;
  // Token masks and scales lie in what is left over, and takes stages where that is too little. Nobody asks
  // for the winners of quantized ones, half of the exchange.
  const bool quantized = is_quantized(traits.dtype),
             masked_or_scaled = traits.masked || (traits.scaled && quantized);
  const int64_t token_scales = masked_or_scaled ? token_scale_bytes(shape, quantized) : 0;
  const int64_t left_over = masked_or_scaled ? kWgmmaReserve - kBarriers + (quantized ? exchange / 2 : 0) : 0;
  const int64_t resident = fixed(config.teams) - left_over, warpgroups = config.teams * config.members;
  plan.stages = static_cast<int>(
      warpgroups * std::min(share(config.teams, config.members),
                            (device.smem_per_block - resident) / (stage + token_scales) / warpgroups));
  plan.smem_bytes = static_cast<int>(resident + plan.stages * (stage + token_scales));
  if (plan.stages < kFewestStages) return std::nullopt;
  if (traits.packed) deal(s, plan, device);
  return plan;
}

ForwardPlan with_warpgroups_left(const ForwardPlan& plan, const Sizes& s, const ForwardTraits& traits,
                                 const Device& device, bool winners, bool listed) {
  if (plan.kernel != ForwardKernel::sm90_d) return plan;
  const int all = sm90_d_shape(plan.rows, plan.k_chunks, false, false).warpgroups;
  if (sm90_d_shape(plan.rows, plan.k_chunks, winners, listed).warpgroups == all) return plan;
  return *plan_sm90_d(s, traits, device, 0, plan.num_splits, winners, listed);
}

}  // namespace late_interaction
