// grad_q_gathered, as the host calls it.
#pragma once

#include <cuda_runtime.h>

#include "../../../plan/backward/gathered_grad_q.h"
#include "../args.h"

namespace late_interaction {

struct GatheredGradQArgs : BackwardArgs, GatheredGradQPlan {
  int32_t tile_bytes, winner_bytes, side_bytes;  // of a stage: documents, winners, and with these gradients
  int32_t query_octets, all_octets;  // of a query, whose last one may lack rows, and of all queries
  Divider by_query_octets;
  int64_t query_winner_bytes;  // from a query's winners to the next one's
};

// Defined in launch.cuh, instantiated in instances/.
template <class T>
cudaError_t launch_gathered_grad_q(const BackwardArgs& args, const GatheredGradQPlan& plan,
                                   cudaStream_t stream);

}  // namespace late_interaction
