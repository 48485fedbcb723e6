// The arguments of the backward kernels of short documents.
#pragma once

#include <cstdint>

#include "../../../plan/backward/short_docs.h"
#include "../args.h"

namespace late_interaction {

struct LoneQueryArgs : BackwardArgs, LoneQueryPlan {
  float* partials;  // [blocks, Lq, d] of grad_Q
};

struct IncidenceArgs : BackwardArgs {
  TokenView items;  // D for grad_Q, Q for grad_D
  void* out;        // [rows, d]
  float* partials;  // [cluster, rows, d] of blocks that share rows and are no cluster
  // grad_D: grad_Q's kernel was launched before, and has waited for the inputs of both. So this kernel waits
  // for it at the end alone, and takes the multiprocessors that grad_Q leaves free.
  bool beside_grad_q;
  // As in IncidencePlan, which ptxas spills registers for where the kernels read it itself.
  int64_t rows;
  int32_t slices, units, block_docs, block_rows, warpgroups, cluster, stages;
  Divider by_slices, by_units, by_docs, by_cluster;
  int32_t block_units, more_units;  // all units, divided by the blocks of a cluster, and what is left
  int64_t query_bytes;              // from a query's winners to the next one's
  int32_t run_offset;               // bytes, at most, from a multiple of 16 to a run's first winner
  int32_t run_vecs;                 // grad_D: vectors of a run in a stage
  Divider by_run_vecs;
};

}  // namespace late_interaction
