// Plans of the backward of short documents (cuda/backward/short_docs), and the constants that they share with
// the kernels. No CUDA, no PyTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../plan.h"

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

// ---- many queries with many documents: each gradient as products of 0 and 1 ----

inline constexpr int64_t kShortDocTokens = 64;  // of a document, at most

inline constexpr int kIncidenceRows = 192;     // rows of a block, at most: tokens of documents, or of queries
inline constexpr int kIncidenceFewRows = 128;  // of a block of grad_Q, where more blocks end sooner
inline constexpr int kIncidenceStageRows = 64;      // tokens of items in a stage, at most
inline constexpr int kIncidenceWinnerBytes = 6144;  // winners of a stage
inline constexpr int kIncidenceSideBytes = kIncidenceWinnerBytes + 512;  // and gradients
inline constexpr int kMostIncidenceDocs = 32;                            // documents of a block of grad_D
inline constexpr int kMostIncidenceStages = 8;
inline constexpr int kMostIncidenceQuerySteps = 2;   // of a unit of grad_D, as registers allow
inline constexpr int kMostIncidenceDims = 128;       // of a block
inline constexpr int64_t kLeastIncidenceQuery = 15;  // tokens of a query
inline constexpr int kMostIncidenceQueries = 16;     // whose tokens are rows of a block of grad_Q
inline constexpr int kIncidenceUnitVecs = 64;        // vectors of 16 bytes for their winners of a unit

// grad_Q of bf16, gathered: a stage has eight documents, whose winners lie an odd number of vectors apart, so
// that reads of one query row's winners with all of them share no bank.
inline constexpr int kGatherDocs = 8;
inline constexpr int kGatherUnitVecs = kIncidenceUnitVecs + 1;
inline constexpr int kGatherWinnerBytes = kGatherDocs * kGatherUnitVecs * 16;
inline constexpr int kGatherSideBytes = kGatherWinnerBytes + 4 * kGatherDocs * kMostIncidenceQueries;

// Embeddings of a stage: 128 bytes of each document's tokens, and as many zeros.
constexpr int gather_tile_bytes(int Ld) { return (Ld + 1) * kGatherDocs * 128; }

// Units of a stage.
constexpr int incidence_stage_units(int steps) { return kIncidenceStageRows / (16 * steps); }

// Vectors of 16 bytes that hold so many neighbouring winners, up to `offset` bytes behind a multiple of 16.
constexpr int incidence_run_vecs(int winners, int offset) { return (2 * winners + offset + 15) / 16; }

struct IncidencePlan {
  bool grad_q = false;   // else grad_D
  bool gathers = false;  // grad_Q of bf16, where a unit is a document
  bool tma = false;      // TMA, clusters and wgmma (sm_90a); else cp.async, partial sums and mma.sync
  int steps = 1;         // of 16 tokens of an item, which a gradient is multiplied to at once: a unit
  int units = 1;         // of an item
  int slices = 1;        // blocks that share rows, each some dims
  int slice_dims = 0;    // 64, 96 or 128; gathered, 48 or 64
  int block_docs = 0;    // grad_D: documents of a block
  int block_rows = 0;
  int cluster = 1;  // blocks that share rows, each some units: a cluster, where there are clusters
  int stages = 0;   // of the ring
  int64_t rows = 0, all_units = 0, grid = 0;
  int smem_bytes = 0;
  bool pdl = false;
};

// aligned: rows of items (of D for grad_Q, of Q for grad_D) can be read 16 bytes at a time.
std::optional<IncidencePlan> plan_incidence(const Sizes& sizes, Dtype dtype, bool aligned, bool grad_q,
                                            const Device& device);

// Which of these a backward takes, whose sums all end with it.
struct ShortDocsPlans {
  std::optional<LoneQueryPlan> lone;
  std::optional<IncidencePlan> grad_q, grad_d;

  bool serve_any() const { return lone || grad_q || grad_d; }
  bool serve_both() const { return lone || (grad_q && grad_d); }
};

// aligned: rows of Q and of D can be read 16 bytes at a time.
ShortDocsPlans plan_short_docs(const Sizes& sizes, Dtype dtype, bool aligned, bool normalize, Backward method,
                               const Device& device);

std::string explain(const ShortDocsPlans& plans);

}  // namespace late_interaction
