#include "../../../plan/forward/kernel.h"
#include "../../../plan/forward/mma_plans.h"
#include "../../../plan/forward/tiles.h"
#include "../../../plan/measured/h200.h"
#include "../../../plan/text.h"

namespace late_interaction {

extern const ForwardKernel sm80;

namespace {

Sm80Tile tile_of(const ForwardPlan& plan) { return plan.many_rows ? Sm80Tile::wide : Sm80Tile::thin; }

// Bytes before the ring: inverse norms, addresses of rows and the exchange between warps.
int64_t exchange_bytes(const Sm80Shape& tile) {
  return 4 * tile.columns + 8 * (tile.warps_n + 1) * tile.rows;
}

// A ring as deep as shared memory for `blocks` blocks a multiprocessor allows; 0: not even two stages fit.
int stages_that_fit(int64_t resident, int64_t stage, int blocks, const Device& device) {
  const int64_t capacity = std::min<int64_t>(device.smem_per_block, device.smem_per_sm / blocks - kReserved);
  const int64_t stages = (capacity - resident) / stage;
  return stages < 2 ? 0 : static_cast<int>(std::min<int64_t>(stages, kMostStages));
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

// Lets short documents share a tile: each has whole blocks of eight columns, of one warp.
void share_tiles(const Sizes& s, const ForwardTraits& traits, const Sm80Shape& shape, ForwardPlan& plan) {
  const int64_t columns = 8 * ceil_div(std::max<int64_t>(s.Ld, 1), 8);
  const int64_t docs = shape.columns / shape.warps_n / columns;  // of a warp
  if (docs < 2 || element_bytes(plan.compute) != 2 || !traits.tma_compatible || traits.packed) return;
  plan.docs = static_cast<int>(docs * shape.warps_n);
  plan.doc_columns = static_cast<int>(columns);
}

std::optional<ForwardPlan> plan_tile(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                     Compute compute, bool wide) {
  if (is_quantized(traits.dtype) || traits.two_terms || compute == Compute::fp64 || (traits.packed && wide)) {
    return std::nullopt;
  }
  const bool full_accuracy = compute == Compute::tf32x3 || compute == Compute::fp32;
  ForwardPlan plan;
  plan.kernel = &sm80;
  plan.compute = compute;
  plan.many_rows = wide;
  const Sm80Shape shape = sm80_shape(tile_of(plan), full_accuracy);
  plan.k_chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kKChunkBytes));
  const Fit f = fit(shape, plan.k_chunks, device);
  if (f.stages == 0) return std::nullopt;
  plan.stream_q = f.stream_q;
  plan.stages = f.stages;
  plan.blocks_per_sm = f.blocks;
  const int64_t stage = (shape.columns + (f.stream_q ? shape.rows : 0)) * kKChunkBytes;
  const int64_t q = f.stream_q ? 0 : int64_t{plan.k_chunks} * shape.rows * kKChunkBytes;
  plan.smem_bytes = static_cast<int>(exchange_bytes(shape) + q + f.stages * stage);
  plan.rows = shape.rows;
  plan.tokens = shape.columns;
  plan.partial_rows = shape.warp_rows;
  share_tiles(s, traits, shape, plan);
  share_out(s, plan, device);
  return plan;
}

// fp32 at full accuracy is multiplied by FFMA too, without the tensor cores.
void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  const Compute given = compute_for(traits.dtype, traits.precision);
  for (const bool wide : {false, true}) {
    for (const Compute compute : {given, Compute::fp32}) {
      if (compute == Compute::fp32 && given != Compute::tf32x3) continue;
      if (compute == Compute::tf32x3 && !device.sm80()) continue;  // no code
      const auto whole = plan_tile(s, traits, device, compute, wide);
      if (!whole) continue;
      plans.push_back(*whole);
      if (!wide && whole->docs == 1 && given != Compute::tf32x3) {
        add_splits(s, traits, device, *whole, plans);
      }
    }
  }
}

std::optional<double> cost(const Sizes& s, const ForwardTraits& traits, const ForwardPlan& plan,
                           const Device& device) {
  if (compute_for(traits.dtype, traits.precision) == Compute::tf32x3) {
    const FullAccuracyRates rates = full_accuracy_rates(device);
    const bool ffma = !device.wgmma && rates.ffma > rates.tf32x3;
    if (ffma != (plan.compute == Compute::fp32)) return std::nullopt;
  }
  // It knows no scales but norms that it finds, so it takes such calls where no other kernel does.
  const double last = traits.scaled ? 1e9 : 0.0;
  const bool shared = plan.docs > 1;
  return last +
         mma_microseconds(s, plan, device,
                          plan.many_rows ? (shared ? h200::kWideShared : h200::kWide)
                                         : (shared ? h200::kThinShared : h200::kThin),
                          {plan.grid, ceil_div(tokens_in_turn(s, plan), plan.tokens), 1.0 * plan.k_chunks});
}

std::string short_name(const ForwardPlan& plan) {
  return joined(plan.many_rows ? "wide" : "thin", plan.compute == Compute::fp32 ? " fp32" : "",
                plan.docs > 1 ? " shared" : "", cut_name(plan));
}

std::string why(const Sizes& s, const ForwardPlan& plan) {
  if (plan.compute == Compute::fp32) {
    return "float32 at full accuracy, which FFMA multiplies faster than this device's tensor cores; " +
           rows_meet(s);
  }
  const bool whole = s.d * element_bytes(plan.compute) % 16 == 0;
  const char* portable = !whole ? "d is no whole number of 16 bytes, which wgmma needs"
                         : element_bytes(plan.compute) == 4
                             ? "float32 products of few query rows, or on this device"
                             : "no wgmma kernel for this d and device";
  return joined(portable, ": mma.sync; ", rows_meet(s),
                plan.docs > 1 ? joined("; a tile has ", plan.docs, " short documents") : "");
}

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  return {.tile = plan.many_rows ? "wide" : "thin",
          .ring = ring_of_chunks(plan),
          .q = plan.stream_q ? "streams through the ring with D" : "stays in shared memory",
          .why = why(s, plan)};
}

}  // namespace

const ForwardKernel sm80{
    .name = "sm80", .enumerate = enumerate, .cost = cost, .short_name = short_name, .text = text};

}  // namespace late_interaction
