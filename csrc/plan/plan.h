// Which kernel, which tile, which grid: every choice a CUDA launch needs, made on the host by plain
// arithmetic, so that it can be read, printed and tested on a machine without a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "../common/problem.h"
#include "kernel_limits.h"

namespace late_interaction {

// The part of a device that a plan depends on.
struct Device {
  int capability = 90;              // 10 * major + minor
  int sm_count = 132;               // multiprocessors
  int smem_per_sm = 228 * 1024;     // bytes of shared memory
  int smem_per_block = 227 * 1024;  // bytes one block may opt in to
  bool wgmma = true;                // sm_90a code is at hand, and this is the GPU for it
};

// A device of this capability, by the published figures; used where no device is present.
Device device_of_capability(int capability, int sm_count);

// The type that the kernel multiplies in.
enum class Compute { bf16, fp16, tf32, tf32x3, fp64, e4m3, e5m2, int8 };

Compute compute_for(Dtype dtype, Precision precision);
int64_t element_bytes(Compute compute);

// Tiles of the tensor-core forwards: rows of Q by tokens of D that one block multiplies at a time (half the
// tokens in tf32x3, whose operands take twice the registers).
enum class Tile {
  wide,          // 256 x 64: four warps below each other
  mid,           // 128 x 128: two by two warps
  thin,          // 32 x 128: four warps side by side, for one short query
  sm90_q,        // sm_90a: 256 query rows x `columns` tokens
  sm90_q_longd,  // sm_90a: the same for embeddings too long for it, streamed by k chunk
  sm90_d,        // sm_90a: `tokens` tokens x `columns` query rows
  none,          // fp64: no tensor-core tile
  copies,        // quantized tokens without a kernel of their own: converted to float32
};

struct TileShape {
  int rows, columns, threads;
  int warp_rows;  // rows of one warp, which sums them to one partial of a query's score
};
TileShape tile_shape(Tile tile, Compute compute);

struct ForwardPlan {
  Compute compute = Compute::bf16;
  Tile tile = Tile::wide;
  int rows = 0;            // query rows of a tile
  int columns = 0;         // tokens of a tile; sm90_d: query rows it has room for
  int tokens = 0;          // sm90_d: tokens of a tile
  int k_chunks = 0;        // 128-byte slices of an embedding; a stage of the ring holds one or two
  int stages = 0;          // depth of the ring
  int cluster = 1;         // sm90_q_longd: blocks of a cluster, which share loads of query rows
  bool masked = false;     // sm90_q, sm90_q_longd: columns of a tile may be masked one by one
  bool trimmed = false;    // sm90_q: a kernel before finds the first and last kept token of each document
  bool compacted = false;  // sm90_q: a kernel before copies its kept tokens, so that no column is masked
  int num_splits = 1;      // sm90_q, sm90_d: ranges that each document is split into
  bool lpt = false;        // packed: documents go to the blocks of a row tile longest first
  int teams = 0;           // sm90_d: teams of warpgroups, each with documents of its own
  int members = 0;         // sm90_d: warpgroups that share a document's tiles; short_docs: warps
  bool scaled = false;     // sm90_q, sm90_q_longd: each column of a tile has a scale
  bool stream_q = false;   // Q streams through the ring with D instead of staying in shared memory
  int smem_bytes = 0;      // dynamic shared memory of a block
  int blocks_per_sm = 0;   // resident together
  int64_t row_tiles = 0;   // tiles of query rows
  int64_t work_tiles = 0;  // (row tile, split of a document) pairs; a block takes a contiguous range
  int64_t grid = 0;        // blocks
  int partial_rows = 0;    // query rows that are summed together: those of one warp, or of a block that
                           // combines splits
  int partials = 1;        // partial sums of a query's score; > 1 needs a second, small kernel

  // Document tokens of a tile, which are its rows where documents take the M side.
  int tile_tokens() const { return tile == Tile::sm90_d ? tokens : columns; }
};

// Whether a plan is one for forward/sm80/kernel_short_docs.cuh: a thin tile without a ring.
inline bool is_short_docs(const ForwardPlan& plan) { return plan.tile == Tile::thin && plan.stages == 0; }

// tail_width of a plan; 0: all its tiles are alike.
inline int tail_of(const ForwardPlan& plan) {
  const bool tails = plan.tile == Tile::sm90_q && plan.compacted &&
                     has_tails(element_bytes(plan.compute), plan.masked, plan.scaled);
  return tails ? tail_width(plan.columns) : 0;
}

// What a forward plan depends on besides sizes.
struct ForwardTraits {
  Dtype dtype = Dtype::bf16;
  Precision precision = Precision::highest;
  bool masked = false;  // documents have a mask
  bool packed = false;  // and lengths of their own: sizes are those of a document of mean length
  bool scaled = false;  // documents' tokens have scales of their own (normalize, a scale a token)
  // TMA can describe the inputs: strides are multiples of 16 bytes, and the rows of Q have one stride.
  bool tma_compatible = true;
};

ForwardPlan plan_forward(const Sizes& sizes, const ForwardTraits& traits, const Device& device);

// Tokens of a tile of sm90_q, or sm90_q_longd. wgmma multiplies int8 in widths of whole 16.
inline constexpr std::array kTileWidths = {152, 128, 104, 80};
inline constexpr std::array kInt8TileWidths = {160, 144, 128, 112, 80};

// sm90_q: bytes of shared memory beside the Q tile, the ring, and token masks and scales.
inline constexpr int kRowsKept = 18 * 1024;

// The widest tiles that leave their kernels the registers they need.
inline constexpr int kWidestSplitTile = 152;
constexpr int widest_tile(bool masked, bool scaled) { return masked && scaled ? 104 : masked ? 152 : 160; }

// In a batch of one query every document belongs to that query alone. It has few winners, so the backward
// finds them without a sort (backward/grad_d_single_query.cuh), and writes zeros nearly everywhere.
inline Sizes with_own_documents(Sizes s) {
  if (s.Nq == 1 && s.Lq <= kSingleQueryWinners) s.layout = Layout::per_query;
  return s;
}

struct BackwardPlan {
  Backward method = Backward::lowmem;  // lowmem or unified, never automatic
  bool vectors = true;                 // rows are read in vectors; else element by element
  int row_fragments = 1;               // slices of an embedding that a warp holds in registers
  bool finish_later = false;           // gradients are summed in fp32 first and normalized by a second kernel
  bool pdl = false;                    // its blocks may start while the kernel before it ends
  // gather: grad_Q, and in unified grad_D with it
  int split = 1;  // warps that share a query token's documents
  int64_t gather_grid = 0;
  int gather_smem_bytes = 0;
  // grad_D in lowmem, by destination (grad_d_segmented)
  bool single_query = false;  // each document belongs to one query: grad_d_single_query
  int segments = 1;           // warps that sort winners
  int chunk = 0;              // winners in shared memory at a time
  bool compact = false;       // winners of the block's tile alone are kept there
  int tile_tokens = 0;        // document tokens a block owns
  int tiles = 0;              // blocks a document is cut into
  int list_capacity = 0;      // winners it orders at a time
  bool narrow_list = true;    // in 16 bits each
  int grads_kept = 0;         // gradients of scores that a block keeps in shared memory
  SegmentedSmem memory;       // of a block
  int64_t grad_d_grid = 0;
  int lowmem_smem_bytes = 0;  // of a block of either kind: one kernel has both
};

// vectors: Q and D are aligned and dense enough for vector loads.
BackwardPlan plan_backward(const Sizes& sizes, Dtype dtype, bool vectors, bool normalize, Backward method,
                           const Device& device);

// One line a decision.
std::string explain(const Sizes& sizes, const ForwardPlan& plan);
std::string explain(const Sizes& sizes, const BackwardPlan& plan);

std::string name_of(Compute compute);
std::string name_of(Tile tile);
std::string name_of(Backward method);

}  // namespace late_interaction
