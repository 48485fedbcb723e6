#include "../../../plan/forward/kernel.h"
#include "../../../plan/forward/tiles.h"
#include "../../../plan/text.h"
#include "../sm90_plans.h"

namespace late_interaction {

extern const ForwardKernel sm90_q;

namespace {

// Packed documents of different lengths, of which only the mean is known. As in a corpus of passages, many
// are shorter and few are much longer: 3 * mean * u * u, for u spread evenly from 0 to 1.
int64_t ragged_cost(int64_t mean, int width) {
  constexpr int64_t kLengths = 32;
  int64_t all = 0;
  for (int64_t i = 0; i < kLengths; ++i) {
    const int64_t length = 3 * mean * (2 * i + 1) * (2 * i + 1) / (4 * kLengths * kLengths);
    all += tiles_cost(std::max<int64_t>(length, 1), width, tail_width(width));
  }
  return all / kLengths;
}

}  // namespace

// Query rows on the M side. The tile's width is fitted to Ld: least padding first, then the wider one.
std::optional<ForwardPlan> plan_sm90_q(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       bool compacted, int tokens, int num_splits) {
  const Compute compute = compute_for(traits.dtype, traits.precision);
  const int64_t element = element_bytes(compute);
  const bool packed_ranges = takes_packed_ranges(traits, compute);
  if (!serves_wgmma(s, traits, device) || element > 2 || s.d * element > 2 * kKChunkBytes ||
      (compacted && traits.packed)) {
    return std::nullopt;
  }
  ForwardPlan plan;
  plan.kernel = &sm90_q;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(s.d * element, kKChunkBytes));
  plan.rows = 256;
  plan.partial_rows = 128;
  plan.scaled = traits.scaled || (packed_ranges && element == 1);
  const auto masked = [&](int width) {
    return !compacted && !packed_ranges && (traits.masked || traits.packed || s.Ld < width);
  };
  const auto two_widths = [&](int width) {
    const bool whole = !traits.packed && !compacted && num_splits == 1;
    return whole && has_whole(element, masked(width), traits.scaled) && s.Ld > width &&
           s.Ld <= width + second_width(width);
  };
  const int64_t documents_a_block = ceil_div(count_row_tiles(s, plan.rows) * s.N, device.sm_count);
  const auto allowed = [&](int width) {
    return width <= widest_tile(masked(width), plan.scaled, plan.k_chunks, packed_ranges) &&
           (tokens == 0 || width == tokens);
  };
  const auto document_cost = [&](int width) {
    if (packed_ranges && traits.ragged) return ragged_cost(s.Ld, width);
    const int last = two_widths(width) ? second_width(width) : packed_ranges ? tail_width(width) : width;
    return tiles_cost(s.Ld, width, last);
  };
  plan.tokens = fit_width(compute, documents_a_block, 5, allowed, document_cost);
  if (plan.tokens == 0) return std::nullopt;
  if (!may_split(s, plan.tokens, num_splits, traits.packed || compacted)) return std::nullopt;
  plan.num_splits = num_splits;
  // Trimming is a kernel more: worth it if the products take tens of microseconds.
  constexpr double kWorthTrimming = 4e10;
  plan.masked = masked(plan.tokens);
  plan.trimmed = traits.masked && !compacted && (operations(s) >= kWorthTrimming || num_splits > 1);
  plan.compacted = compacted;
  plan.tails = packed_ranges || (compacted && has_whole(element, plan.masked, plan.scaled));
  plan.two_widths = two_widths(plan.tokens) && second_width(plan.tokens) < plan.tokens;
  // Columns of the last tile that hold no token of the document, on average, and what the tile costs beside.
  plan.end_tokens = 16 + plan.tokens / (plan.tails ? 8 : 2);
  const int64_t q = int64_t{plan.k_chunks} * plan.rows * kKChunkBytes;
  const int64_t stage = int64_t{plan.k_chunks} * plan.tokens * kKChunkBytes + (plan.masked ? 32 : 0) +
                        (plan.scaled ? 4 * scale_columns(plan.tokens) : 0);
  plan.stages =
      static_cast<int>(std::min<int64_t>((device.smem_per_block - kRowsKept - q) / stage, kMostStages));
  plan.smem_bytes = static_cast<int>(q + plan.stages * stage + kRowsKept);
  plan.blocks_per_sm = 1;  // persistent
  share_out(s, plan, device);
  if (traits.packed) deal(s, plan, device);
  return plan;
}

namespace {

void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  // Compacting saves masked columns, of which longer documents without a mask have few.
  constexpr int64_t kShortToCopy = 160, kMostCopied = int64_t{1} << 29;  // elements
  const auto add = [&](bool compacted, int tokens, int num_splits) {
    if (const auto plan = plan_sm90_q(s, traits, device, compacted, tokens, num_splits))
      plans.push_back(*plan);
  };
  const bool may_copy = !traits.packed && (traits.masked || s.Ld < kShortToCopy) &&
                        s.documents() * std::max(s.Ld, kShortToCopy) * s.d <= kMostCopied;
  for (const int tokens : tile_widths(compute_for(traits.dtype, traits.precision))) {
    add(false, tokens, 1);
    if (may_copy) add(true, tokens, 1);
  }
  for (const int num_splits : kSplitCounts) {
    if (may_be_timed(s, num_splits, device)) add(false, 0, num_splits);
  }
}

std::string short_name(const ForwardPlan& plan) {
  return joined("rows ", plan.tokens, plan.compacted ? " copied" : "", cut_name(plan));
}

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  const std::string tiles = plan.two_widths ? joined(plan.tokens, " + ", second_width(plan.tokens))
                                            : joined(ceil_div(s.Ld, plan.tokens), " x ", plan.tokens);
  return {.tile = "wgmma, query rows on its M side",
          .ring = ring_of_chunks(plan),
          .q = "stays in shared memory",
          .why = joined(rows_share(s, plan), "; ", tiles, " tokens cover ", s.Ld)};
}

}  // namespace

const ForwardKernel sm90_q{.name = "sm90_q",
                           .enumerate = enumerate,
                           .short_name = short_name,
                           .text = text,
                           .scales_documents = true,
                           .takes_fp16_copies = true,
                           .takes_shares = true};

}  // namespace late_interaction
