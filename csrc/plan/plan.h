// The planner: which kernel, tile and grid a CUDA launch gets. It is plain host arithmetic, so plans can be
// read, printed and tested without a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../common/arithmetic.h"
#include "device.h"
#include "kernel_limits.h"

namespace late_interaction {

// The type that the kernel multiplies in.
enum class Compute { bf16, fp16, tf32, tf32x3, fp64, e4m3, e5m2, int8, fp32 };  // fp32: by FFMA

Compute compute_for(Dtype dtype, Precision precision);
int64_t element_bytes(Compute compute);

inline constexpr int kComputes = 9;

struct ForwardKernel;  // forward/kernel.h

struct ForwardPlan {
  const ForwardKernel* kernel = nullptr;
  Compute compute = Compute::bf16;
  int rows = 0;            // query rows of a tile
  int tokens = 0;          // document tokens of a tile
  int k_chunks = 0;        // 128-byte slices of an embedding; a stage of the ring holds one or two
  int stages = 0;          // depth of the ring
  int num_splits = 1;      // ranges that each document is split into
  int split_tokens = 0;    // tokens of such a range, where the kernel finds the ranges
  bool lpt = false;        // packed: documents go to the blocks of a row tile longest first
  int smem_bytes = 0;      // dynamic shared memory of a block
  int blocks_per_sm = 0;   // blocks that a multiprocessor holds at a time
  int64_t row_tiles = 0;   // tiles of query rows
  int64_t work_tiles = 0;  // (row tile, split of a document) pairs; a block takes a contiguous range
  int64_t grid = 0;        // blocks
  int partial_rows = 0;    // query rows of a partial: of one warp, or of a block that combines splits
  int partials = 1;        // partial sums of a query's score; more than one need a second, small kernel

  // For some kernels.
  int steps = 0;            // products of 32 bytes that an embedding takes, where instances differ in it
  bool many_rows = false;   // the wider of a kernel's two tiles of query rows
  int teams = 1;            // teams of warpgroups, or of warps, each with other documents
  int members = 1;          // of a team, which share a document, or a work tile
  int cluster = 1;          // blocks of a cluster, which load query rows for each other
  bool stream_q = false;    // Q streams through the ring with D instead of staying in shared memory
  int docs = 1;             // documents that share a tile
  int doc_columns = 0;      // columns of each of them
  bool masked = false;      // columns of a tile may be masked one by one
  bool scaled = false;      // each column of a tile has a scale
  bool trimmed = false;     // a kernel before finds the first and the last kept token of each document
  bool compacted = false;   // a kernel before copies each document's kept tokens, so that no column is masked
  bool tails = false;       // the last tile of a document is a narrower tail where what remains fits it
  bool two_widths = false;  // each document has two tiles, of which the second is second_width() wide
  int end_tokens = 32;      // packed: a document's end takes as long as so many tokens, for equal shares
};

// Inputs of a forward plan beside sizes and device.
struct ForwardTraits {
  Dtype dtype = Dtype::bf16;
  Precision precision = Precision::highest;
  bool masked = false;        // documents have a mask
  bool packed = false;        // documents may differ in length: Ld is the mean
  bool ragged = false;        // packed documents do, as the number of their tokens says
  bool scaled = false;        // each document token has a scale (normalize, or a given one)
  bool given_scales = false;  // the caller gives those scales, so kernels that find norms do not serve
  // TMA can describe the inputs: strides are multiples of 16 bytes, and the rows of Q have one stride.
  bool tma_compatible = true;
  // Operands are two fp16 numbers for each fp32 element; sizes are those of the fp32 inputs.
  bool two_terms = false;
};

ForwardPlan plan_forward(const Sizes& sizes, const ForwardTraits& traits, const Device& device);

// In a batch of one query every document belongs to that query alone, and has few winners: the backward finds
// them without a sort (backward/grad_d_single_query.cuh), and writes zeros nearly everywhere.
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

// vectors: Q and D allow vector loads.
BackwardPlan plan_backward(const Sizes& sizes, Dtype dtype, bool vectors, bool normalize, Backward method,
                           const Device& device);

// grad_Q of many query rows, by a kernel without grad_D: documents pass through shared memory.
struct TiledGradQPlan {
  int slices = 0;  // blocks that share a row tile, each with some of the dims
  int64_t grid = 0;
  int smem_bytes = 0;
  bool pdl = false;  // as in BackwardPlan
};

// None where the gather of plan_backward is faster. aligned: TMA could read the rows (16 bytes).
std::optional<TiledGradQPlan> plan_tiled_grad_q(const Sizes& sizes, Dtype dtype, bool aligned,
                                                const Device& device);

// One line a decision.
std::string explain(const Sizes& sizes, const ForwardPlan& plan);
std::string explain_rates(const ForwardPlan& plan, const Device& device);
std::string explain(const Sizes& sizes, const BackwardPlan& plan);
std::string explain(const std::optional<TiledGradQPlan>& plan);  // nothing, where there is none

std::string name_of(Compute compute);
std::string name_of(Backward method);

}  // namespace late_interaction
