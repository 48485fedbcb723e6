// Plans of the backward of short documents (cuda/backward/short_docs), and what they and the kernels must
// agree on. No CUDA, no PyTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan.h"

namespace late_interaction {

// ---- one query with many documents: both gradients in one kernel ----

inline constexpr int kLoneSliceDims = 64;       // dims of an embedding that a warp has, at most
inline constexpr int64_t kLoneQueryRows = 32;   // of the query
inline constexpr int64_t kLoneDocTokens = 128;  // of a document, at most

// Warps of a block, by the steps of 16 query rows: as many as registers allow.
constexpr int lone_query_warps(int row_steps) { return row_steps == 1 ? 16 : 8; }

struct LoneQueryPlan {
  int row_steps = 1;   // of 16 query rows
  int slices = 1;      // warps that share a document, each some dims
  int slice_dims = 0;  // a multiple of 8
  int64_t grid = 0;
  int smem_bytes = 0;
  bool pdl = false;
};

// None where the kernels of plan_backward are the way. aligned: rows of D can be read 16 bytes at a time.
std::optional<LoneQueryPlan> plan_lone_query(const Sizes& sizes, Dtype dtype, bool aligned,
                                             const Device& device);

// ---- many queries with many documents: grad_Q ----

inline constexpr int kShortWarps = 8;  // of a block, each with 32 query rows
inline constexpr int kShortBlocksPerSm = 2;
inline constexpr int kShortSliceDims = 64;  // dims of an embedding that a block has, at most
inline constexpr int kShortDocsAtOnce = 4;  // documents of a stage that a warp has, at most
inline constexpr int kShortStages = 3;
inline constexpr int64_t kShortDocTokens = 64;  // of a document, at most

struct ShortGradQPlan {
  int slices = 1;      // blocks that share a row tile, each some dims
  int slice_dims = 0;  // a multiple of 8
  int groups = 1;      // of warps, that share the documents of a block
  int cluster = 1;     // blocks that share the documents
  int stage_docs = 0;  // documents of a stage, of all groups
  int rows = 0;        // query rows of a block
  int64_t grid = 0;
  int smem_bytes = 0;
  bool pdl = false;
};

std::optional<ShortGradQPlan> plan_short_grad_q(const Sizes& sizes, Dtype dtype, bool aligned,
                                                const Device& device);

// ---- the same: grad_D ----

inline constexpr int kProductWarps = 8;       // of a block
inline constexpr int kProductSliceDims = 64;  // dims of an embedding that a warp has, at most
inline constexpr int kProductStageRows = 64;  // query rows of a stage
inline constexpr int kProductStages = 3;

struct ShortGradDPlan {
  int docs = 1, blocks = 1;  // documents of a warp; and tokens of each, in blocks of eight
  int row_steps = 1;         // of 16 rows of a query that a gradient is multiplied to at once
  int units = 1;             // such steps of a query
  int slices = 1;            // warps that share documents, each some dims
  int slice_dims = 0;        // 48 or 64
  int block_docs = 0;        // documents of a block
  int cluster = 1;           // blocks that share documents, each a range of the queries
  int row_bytes = 0;         // of a query row in shared memory
  int sum_width = 0;         // floats of a row of sums there
  int64_t grid = 0;
  int smem_bytes = 0;
  bool pdl = false;
};

// aligned: rows of Q can be read 16 bytes at a time.
std::optional<ShortGradDPlan> plan_short_grad_d(const Sizes& sizes, Dtype dtype, bool aligned,
                                                const Device& device);

// Which of these a backward takes, whose sums all end with it.
struct ShortDocsPlans {
  std::optional<LoneQueryPlan> lone;
  std::optional<ShortGradQPlan> grad_q;
  std::optional<ShortGradDPlan> grad_d;

  bool serve_any() const { return lone || grad_q || grad_d; }
  bool serve_both() const { return lone || (grad_q && grad_d); }
};

// aligned: rows of Q and of D can be read 16 bytes at a time.
ShortDocsPlans plan_short_docs(const Sizes& sizes, Dtype dtype, bool aligned, bool normalize, Backward method,
                               const Device& device);

std::string explain(const ShortDocsPlans& plans);

}  // namespace late_interaction
