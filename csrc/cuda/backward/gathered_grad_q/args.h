// The arguments of grad_q_gathered.
#pragma once

#include "../../../plan/backward/gathered_grad_q.h"
#include "../args.h"

namespace late_interaction {

struct GatheredGradQArgs : BackwardArgs {
  // As in GatheredGradQPlan.
  int32_t slices, octets, stages;
  int32_t tile_bytes, winner_bytes, side_bytes;  // of a stage: documents, winners, and with these gradients
  int32_t query_octets, all_octets;  // of a query, whose last one may lack rows, and of all queries
  Divider by_query_octets;
  int64_t query_winner_bytes;  // from a query's winners to the next one's
};

}  // namespace late_interaction
