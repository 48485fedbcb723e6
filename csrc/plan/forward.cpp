#include <algorithm>

#include "forward_kernels.h"

namespace late_interaction {

namespace {

// Documents so short that a ring and barriers take longer than their products, against few query rows or with
// little to do at all.
//
// Without it, the sweep of random shapes shows, wgmma_documents takes 0.43 us of a multiprocessor for any
// document of up to 64 tokens, and wgmma_rows at least 7 us for any call on a few hundred rows.
bool worth_direct(const Sizes& s, const ForwardTraits& traits) {
  constexpr int64_t kShort = 64, kShortWithoutCopyEngine = 128;
  constexpr double kLittleWork = 5e8;
  return s.Ld <= (traits.copy_engine ? kShort : kShortWithoutCopyEngine) &&
         (rows_together(s) <= 32 || products(s) <= kLittleWork);
}

// Whether a kernel before copies the tokens that count of documents with a mask, of documents shorter than a
// tile, and of packed ones, which may be. A token costs the copy 2 * 256 bytes, and products without a mask
// save about a quarter of what its products with the query rows take, which at 1000 of them is as long;
// beside that, no time goes to masked tokens. And the copy is a kernel more.
bool worth_copying(const Sizes& s, Compute compute, const ForwardTraits& traits) {
  constexpr int64_t kEnoughRows = 1024, kWidestTile = 160, kMostRoom = int64_t{1} << 30;
  constexpr double kEnoughWork = 2e10;
  const int64_t slot = traits.packed ? kWidestTile : std::max(s.Ld, kWidestTile);
  return (traits.masked || traits.packed || s.Ld < 80) && rows_together(s) >= kEnoughRows &&
         products(s) >= kEnoughWork && s.documents() * slot * s.d * element_bytes(compute) <= kMostRoom;
}

// With an odd number of documents one of two blocks idles at the end of each row tile.
bool worth_pairing(const Sizes& s) { return s.N % 2 == 0 || s.N >= 16; }

// Tile work, in elements of S, that the busiest multiprocessor gets: what a compute-bound call waits for.
double busiest_work(const Sizes& s, const ForwardPlan& plan, const Device& device) {
  const double a_unit = static_cast<double>(plan.rows) * ceil_div(s.Ld, plan.columns) * plan.columns;
  const int64_t units_a_block = ceil_div(plan.units, std::max<int64_t>(plan.grid, 1));
  const int64_t blocks_an_sm = ceil_div(plan.grid, device.sm_count);
  return a_unit * units_a_block * blocks_an_sm;
}

}  // namespace

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
  if (worth_direct(s, traits)) {
    if (const auto direct = plan_direct(s, traits, device)) return *direct;
  }
  if (const auto documents = plan_wgmma_documents(s, traits, device)) return *documents;
  if (rows_together(s) > 128) {
    if (const auto rows = plan_wgmma_rows(s, traits, device, worth_copying(s, compute, traits))) return *rows;
  }
  const auto split = plan_wgmma_split(s, traits, device, worth_pairing(s));
  // With a quarter of its rows, a tile's waste outweighs what wgmma is faster.
  if (split && rows_together(s) > split->rows / 4) return *split;
  if (is_quantized(traits.dtype)) {
    ForwardPlan plan;
    plan.compute = compute;
    plan.tile = Tile::copies;
    return plan;
  }
  const auto plan = [&](Tile tile) { return *plan_mma(s, traits, device, tile); };
  if (traits.packed || rows_together(s) <= tile_shape(Tile::thin, compute).rows) return plan(Tile::thin);
  const ForwardPlan mid = plan(Tile::mid);
  if (rows_together(s) <= tile_shape(Tile::mid, compute).rows) return mid;
  // 256 rows read each document tile half as often; 128 rows waste less on a small or ragged problem.
  const ForwardPlan wide = plan(Tile::wide);
  if (wide.stream_q || wide.blocks_per_sm < mid.blocks_per_sm) return mid;
  return busiest_work(s, wide, device) <= busiest_work(s, mid, device) ? wide : mid;
}

}  // namespace late_interaction
