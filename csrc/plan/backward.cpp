#include <algorithm>

#include "plan.h"

namespace late_interaction {

namespace {

constexpr int kGatherWarps = 8;
constexpr int kOwnedWarps = 8;
constexpr int kMaxPieces = 8;      // that a warp holds of a row read in vectors
constexpr int kElementPieces = 4;  // and of one read element by element
constexpr int kMaxTileTokens = 1024;
constexpr int kMinTileTokens = 64;
constexpr int kFewEntries = 512;
constexpr int kMaxList = 8192;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Dims of one piece of an embedding: 32 lanes by 4 elements, or 2 in fp64.
int piece_dims(Dtype dtype) { return dtype == Dtype::fp64 ? 64 : 128; }

int pieces_for(int64_t d, Dtype dtype) {
  int pieces = 1;
  while (pieces < kMaxPieces && pieces * piece_dims(dtype) < d) pieces *= 2;
  return pieces;
}

// As many warps to a query token as it takes to fill the device, while each still has a few documents.
int gather_split(const Sizes& s, const Device& device) {
  const int64_t wanted = 32 * static_cast<int64_t>(device.sm_count);
  int split = 1;
  while (split < kGatherWarps && s.Nq * s.Lq * split < wanted && s.N >= 16 * split) split *= 2;
  return split;
}

void plan_owned(const Sizes& s, Dtype dtype, const Device& device, BackwardPlan& plan) {
  const int64_t entries = s.layout == Layout::in_batch ? s.Nq * s.Lq : s.Lq;
  const int64_t documents = s.documents();
  plan.segments = static_cast<int>(std::clamp<int64_t>(entries / 64, 1, kOwnedWarps));
  // Documents are cut into tiles of tokens where there are few of them, so that every multiprocessor has two
  // blocks. Each tile reads all winners of its document again, two bytes each; where those are few, and a
  // block does little but write zeros, smaller blocks even out the last wave.
  const int64_t for_size = ceil_div(s.Ld, kMaxTileTokens);
  const int64_t wanted_blocks = (entries <= kFewEntries ? 12 : 2) * static_cast<int64_t>(device.sm_count);
  const int64_t for_blocks =
      std::min(ceil_div(wanted_blocks, std::max<int64_t>(documents, 1)), ceil_div(s.Ld, kMinTileTokens));
  const int64_t tiles = std::max<int64_t>({for_size, for_blocks, 1});
  plan.tile_tokens = static_cast<int>(std::max<int64_t>(1, ceil_div(s.Ld, tiles)));
  plan.tiles = static_cast<int>(ceil_div(s.Ld, plan.tile_tokens));
  const int64_t carry = static_cast<int64_t>(kOwnedWarps) * plan.pieces * 512;
  const int64_t order = 4 * (plan.tile_tokens + 1 + static_cast<int64_t>(plan.segments) * plan.tile_tokens);
  const int64_t listed = dtype == Dtype::fp64 ? 16 : 8;  // an entry and what it counts
  const int64_t room = device.smem_per_block - carry - order - 1024;
  plan.list_capacity =
      static_cast<int>(std::max<int64_t>(1, std::min({entries, int64_t{kMaxList}, room / listed})));
  plan.owned_smem_bytes = static_cast<int>(carry + order + listed * plan.list_capacity);
  plan.owned_grid = documents * plan.tiles;
}

// Measured on an H200 (bench/results): ordering winners does not pay for a small step, nor where each
// document has so many query tokens that a block orders them in several rounds. Documents of one query alone
// are mostly rows of zeros, which lowmem writes once and unified three times.
Backward faster_method(const Sizes& s) {
  constexpr int64_t kSmallStep = 65536, kLongQuery = 512;
  if (s.layout == Layout::per_query) return Backward::lowmem;
  return s.Nq * s.N * s.Lq <= kSmallStep || s.Lq >= kLongQuery ? Backward::unified : Backward::lowmem;
}

}  // namespace

BackwardPlan plan_backward(const Sizes& s, Dtype dtype, bool vectors, bool normalize, Backward method,
                           const Device& device) {
  BackwardPlan plan;
  plan.method = method == Backward::automatic ? faster_method(s) : method;
  plan.vectors = vectors;
  plan.pieces = vectors ? pieces_for(s.d, dtype) : kElementPieces;
  // The Jacobian of the normalization needs a whole row; longer rows are summed first.
  plan.finish_later = normalize && s.d > plan.pieces * piece_dims(dtype);
  plan.split = gather_split(s, device);
  plan.gather_grid = ceil_div(s.Nq * s.Lq * plan.split, kGatherWarps);
  plan_owned(s, dtype, device, plan);
  return plan;
}

}  // namespace late_interaction
