#include "../../../plan/forward/kernel.h"
#include "../../../plan/forward/tiles.h"
#include "../../../plan/text.h"
#include "../sm90_plans.h"

namespace late_interaction {

extern const ForwardKernel sm90_q_longd, sm90_3xtf32, sm90_3xfp16;

// Query rows on the M side, embeddings in k chunks. Q stays in shared memory if that leaves a ring deep
// enough; else it streams, and two blocks that take neighbouring documents bring each other half of it. Full
// accuracy takes half the rows, since sums take registers too, and two terms an element. tf32x3: the low
// terms are made in the ring, and three products for each chunk leave time to stream Q in every block.
// fp16x2: both terms are copied, of Q as well.
std::optional<ForwardPlan> plan_sm90_q_longd(const Sizes& s, const ForwardTraits& traits,
                                             const Device& device, bool paired, int tokens) {
  const Compute compute = compute_for(traits.dtype, traits.precision);
  if (!serves_wgmma(s, traits, device) || traits.packed || compute == Compute::fp64) return std::nullopt;
  const bool fp16x2 = traits.two_terms, tf32x3 = compute == Compute::tf32x3, exact = tf32x3 || fp16x2;
  ForwardPlan plan;
  plan.kernel = tf32x3 ? &sm90_3xtf32 : fp16x2 ? &sm90_3xfp16 : &sm90_q_longd;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kKChunkBytes));
  plan.rows = exact ? 128 : 256;
  plan.partial_rows = exact ? 16 : 32;
  const auto allowed = [&](int width) {
    return width <= kWidestSplitTile && (tokens == 0 || width == tokens);
  };
  plan.tokens = fit_width(compute, 1, 0, allowed, [&](int width) { return tiles_cost(s.Ld, width, width); });
  if (plan.tokens == 0) return std::nullopt;
  plan.masked = traits.masked || s.Ld < plan.tokens;
  plan.scaled = traits.scaled;
  constexpr int64_t kUnitsAndBarriers = 512;
  const int64_t token_scales = plan.masked || plan.scaled ? 2 * (8 * plan.tokens + 16) : 0;
  const int64_t beside = token_scales + kUnitsAndBarriers, capacity = device.smem_per_block - beside;
  const int64_t k_chunk = (exact ? 2 : 1) * kKChunkBytes;  // of a token
  const int64_t q = int64_t{plan.k_chunks} * plan.rows * k_chunk, d_stage = plan.tokens * k_chunk;
  plan.stream_q = tf32x3 || (capacity - q) / d_stage < (fp16x2 ? 3 : 4);
  const int64_t resident = plan.stream_q ? 0 : q;
  const int64_t stage = d_stage + (plan.stream_q ? plan.rows * k_chunk : 0);
  plan.stages = static_cast<int>(std::min<int64_t>((capacity - resident) / stage, kMostStages));
  plan.smem_bytes = static_cast<int>(resident + plan.stages * stage + beside);
  plan.blocks_per_sm = 1;  // persistent
  share_out(s, plan, device);
  if (paired && plan.stream_q && !tf32x3 && device.sm_count >= 2) {
    plan.cluster = 2;
    plan.work_tiles = plan.row_tiles * ceil_div(s.N, 2);
    plan.grid = 2 * std::min<int64_t>(plan.work_tiles, device.sm_count / 2);
  }
  if (plan.work_tiles > INT32_MAX) return std::nullopt;
  return plan;
}

namespace {

// The three kernels share one set of plans; each takes the plans of its type.
template <const ForwardKernel& kKernel>
void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  for (const int tokens : tile_widths(compute_for(traits.dtype, traits.precision))) {
    for (const bool paired : {false, true}) {
      const auto plan = plan_sm90_q_longd(s, traits, device, paired, tokens);
      if (plan && plan->kernel == &kKernel) plans.push_back(*plan);
    }
  }
}

std::string short_name(const ForwardPlan& plan) {
  return joined("split ", plan.tokens, plan.cluster > 1 ? " paired" : "");
}

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  return {.tile = "wgmma, query rows on its M side, embeddings in chunks",
          .ring = ring_of_chunks(plan, (plan.kernel->two_terms ? 2 : 1) * kKChunkBytes),
          .q = joined(plan.stream_q ? "streams through the ring with D" : "stays in shared memory",
                      plan.cluster > 1 ? ", half of it from the other block of a cluster" : ""),
          .why = joined(rows_share(s, plan), "; ", ceil_div(s.Ld, plan.tokens), " x ", plan.tokens,
                        " tokens cover ", s.Ld, "; embeddings of ", plan.k_chunks,
                        " x 128 bytes go by in chunks")};
}

}  // namespace

const ForwardKernel sm90_q_longd{.name = "sm90_q_longd",
                                 .enumerate = enumerate<sm90_q_longd>,
                                 .short_name = short_name,
                                 .text = text,
                                 .scales_documents = true,
                                 .takes_fp16_copies = true};
const ForwardKernel sm90_3xtf32{.name = "sm90_3xtf32",
                                .enumerate = enumerate<sm90_3xtf32>,
                                .short_name = short_name,
                                .text = text,
                                .scales_documents = true};
const ForwardKernel sm90_3xfp16{.name = "sm90_3xfp16",
                                .enumerate = enumerate<sm90_3xfp16>,
                                .short_name = short_name,
                                .text = text,
                                .two_terms = true,
                                .scales_documents = true};

}  // namespace late_interaction
