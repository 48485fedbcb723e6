// The planner: which kernel, tile and grid a CUDA launch gets. The host decides it by plain arithmetic, so
// that a plan can be read, printed and tested on a machine without a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "../common/arithmetic.h"
#include "kernel_limits.h"

namespace late_interaction {

// The part of a device that a plan depends on.
struct Device {
  int capability = 90;              // 10 * major + minor
  int sm_count = 132;               // multiprocessors
  int smem_per_sm = 228 * 1024;     // bytes of shared memory
  int smem_per_block = 227 * 1024;  // bytes one block may opt in to
  int64_t l2_bytes = 50 << 20;
  bool wgmma = true;     // sm_90a code is at hand, and this is the GPU for it
  bool geforce = false;  // its name says so: tensor cores then have other rates (rates.h)
};

// A device of this capability, by the published figures; used where no device is present.
Device device_of_capability(int capability, int sm_count, bool geforce = false);

// The type that the kernel multiplies in.
enum class Compute { bf16, fp16, tf32, tf32x3, fp64, e4m3, e5m2, int8, fp32 };  // fp32: by FFMA

Compute compute_for(Dtype dtype, Precision precision);
int64_t element_bytes(Compute compute);

// The forward kernels. explain_plan shows them by these names.
enum class ForwardKernel {
  sm90_q,           // wgmma, query rows on its M side
  sm90_q_short,     // the same with several short documents in a tile
  sm90_q_longd,     // the same for embeddings too long for sm90_q: they are streamed by k chunk
  sm90_3xtf32,      // sm90_q_longd for fp32 at full accuracy: three TF32 products an element
  sm90_3xfp16,      // the same by three fp16 products, of operands converted to two fp16 numbers an element
  sm90_d,           // wgmma, documents on its M side
  sm80,             // mma.sync
  sm80_short_docs,  // mma.sync for documents of a few tokens, which need no ring
  fp64,             // the reference, without tensor cores
  dequantized,      // none takes these quantized tokens: they are converted to float32 and scored as such
  sm90_stream,      // mma.sync for few query rows: a ring of documents for each warp (TMA)
  sm80_q,           // mma.sync, query rows on its M side
  sm80_d,           // mma.sync, documents on its M side: for few query rows
  sm80_3xfp16,      // sm80_q on operands converted to two fp16 numbers an element
};
inline constexpr int kForwardKernels = 14, kComputes = 9;

inline bool has_two_terms(ForwardKernel kernel) {
  return kernel == ForwardKernel::sm90_3xfp16 || kernel == ForwardKernel::sm80_3xfp16;
}

// What each kernel is told beside the plan's common numbers.
struct Sm90QConfig {
  bool masked = false;      // columns of a tile may be masked one by one
  bool scaled = false;      // each column of a tile has a scale
  bool trimmed = false;     // a kernel before finds the first and the last kept token of each document
  bool compacted = false;   // a kernel before copies each document's kept tokens, so that no column is masked
  bool two_widths = false;  // each document has two tiles, of which the second is second_width() wide
};
struct Sm90QShortConfig {
  int span = 0;         // tokens of a document in a tile, which has plan.tokens / span documents
  bool masked = false;  // columns of a tile may be masked one by one; of packed documents they are
};
struct Sm90QLongDConfig {  // sm90_3xtf32 and sm90_3xfp16 too
  bool masked = false, scaled = false;
  bool stream_q = false;  // Q streams through the ring with D instead of staying in shared memory
  int cluster = 1;        // blocks of a cluster, which load query rows for each other
};
struct Sm90DConfig {
  int teams = 1;    // teams of warpgroups, each with documents of its own
  int members = 1;  // warpgroups of a team, which share a document's tiles
};
struct Sm80QConfig {
  bool many_rows = false;  // kernel_limits.h
  int steps = 0;
};
struct Sm80DConfig {
  int steps = 0;    // as above
  int members = 1;  // warps that share a document
};
struct Sm80Config {
  Sm80Tile tile = Sm80Tile::thin;
  bool stream_q = false;  // as in Sm90QLongDConfig
  int docs = 1;           // documents that share a tile
  int columns = 0;        // then: columns of a document
};
struct Sm80ShortDocsConfig {
  int members = 1;  // warps that share a work tile
};

struct ForwardPlan {
  ForwardKernel kernel = ForwardKernel::fp64;
  Compute compute = Compute::bf16;
  std::variant<std::monostate, Sm90QConfig, Sm90QLongDConfig, Sm90DConfig, Sm80Config, Sm80ShortDocsConfig,
               Sm90QShortConfig, Sm80QConfig, Sm80DConfig>
      config;              // the kernel's
  int rows = 0;            // query rows of a tile
  int tokens = 0;          // document tokens of a tile
  int k_chunks = 0;        // 128-byte slices of an embedding; a stage of the ring holds one or two
  int stages = 0;          // depth of the ring
  int num_splits = 1;      // ranges that each document is split into
  int split_tokens = 0;    // sm80_q, sm80_d, sm80: tokens of such a range
  bool lpt = false;        // packed: documents go to the blocks of a row tile longest first
  int smem_bytes = 0;      // dynamic shared memory of a block
  int blocks_per_sm = 0;   // blocks that a multiprocessor holds at a time
  int64_t row_tiles = 0;   // tiles of query rows
  int64_t work_tiles = 0;  // (row tile, split of a document) pairs; a block takes a contiguous range
  int64_t grid = 0;        // blocks
  int partial_rows = 0;    // query rows that are summed together: those of one warp, or of a block that
                           // combines splits
  int partials = 1;        // partial sums of a query's score; more than one need a second, small kernel

  template <class Config>
  const Config& as() const {
    return std::get<Config>(config);
  }
};

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

// grad_Q of many query rows, apart from grad_D: documents pass through shared memory.
struct TiledGradQPlan {
  int slices = 0;  // blocks that share a row tile, each some of the dims
  int64_t grid = 0;
  int smem_bytes = 0;
  bool pdl = false;  // as in BackwardPlan
};

// None where the gather of plan_backward is the way. aligned: TMA could read the rows (16 bytes).
std::optional<TiledGradQPlan> plan_tiled_grad_q(const Sizes& sizes, Dtype dtype, bool aligned,
                                                const Device& device);

// One line a decision.
std::string explain(const Sizes& sizes, const ForwardPlan& plan);
std::string explain_rates(const ForwardPlan& plan, const Device& device);
std::string explain(const Sizes& sizes, const BackwardPlan& plan);
std::string explain(const std::optional<TiledGradQPlan>& plan);  // nothing, where there is none

std::string name_of(Compute compute);
std::string name_of(ForwardKernel kernel);
std::string name_of(Sm80Tile tile);
std::string name_of(Backward method);

}  // namespace late_interaction
