#include "../../../plan/forward/kernel.h"
#include "../../../plan/forward/tiles.h"
#include "../../../plan/measured/h200.h"
#include "../../../plan/text.h"
#include "../sm90_plans.h"

namespace late_interaction {

extern const ForwardKernel sm80_stream;

// Codes of 128 bytes, a run of documents to each warp.
std::optional<ForwardPlan> plan_sm80_stream(const Sizes& s, const ForwardTraits& traits,
                                            const Device& device) {
  if (!traits.packed || s.layout != Layout::in_batch || !is_quantized(traits.dtype) || traits.masked ||
      !traits.tma_compatible || !device.sm80() || s.d != kCodeStreamBytes || s.N == 0 ||
      s.N > INT32_MAX / 2 || rows_per_document(s) > 32) {
    return std::nullopt;
  }
  ForwardPlan plan;
  plan.kernel = &sm80_stream;
  plan.compute = compute_for(traits.dtype, traits.precision);
  plan.k_chunks = 1;
  plan.rows = plan.partial_rows = 32;
  plan.tokens = 32;
  plan.stages = kCodeStreamStages;
  plan.smem_bytes = kSm80DWarps * plan.stages * kCodeStreamStageBytes;
  plan.blocks_per_sm = std::min(code_stream_blocks(plan.compute == Compute::int8, device.wgmma),
                                device.smem_per_sm / (plan.smem_bytes + kReserved));
  plan.row_tiles = 1;
  plan.work_tiles = s.N;
  plan.grid = std::min<int64_t>(int64_t{plan.blocks_per_sm} * device.sm_count, ceil_div(s.N, kSm80DWarps));
  return plan;
}

namespace {

void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  if (const auto plan = plan_sm80_stream(s, traits, device)) plans.push_back(*plan);
}

std::optional<double> cost(const Sizes& s, const ForwardTraits& traits, const ForwardPlan& plan,
                           const Device& device) {
  return mma_microseconds(s, plan, device, h200::kCodeStream,
                          {plan.grid * kSm80DWarps, ceil_div(s.Ld, plan.tokens),
                           is_fp8(traits.dtype) && rates_of(device).fp8 == 0 ? 1.0 : 0.5});
}

std::string short_name(const ForwardPlan&) { return "codes stream"; }

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  return {.tile = "mma.sync, documents on its M side",
          .ring = joined(plan.stages, " stages of ", plan.tokens, " tokens for each warp"),
          .q = "stays in registers",
          .why = rows_meet(s) + ": as many as a warp holds, and packed codes, which each warp streams"};
}

}  // namespace

const ForwardKernel sm80_stream{
    .name = "sm80_stream", .enumerate = enumerate, .cost = cost, .short_name = short_name, .text = text};

}  // namespace late_interaction
