// Launches grad_q_gathered for one element type. Each of instances/ instantiates it once.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "../../runtime/tma_descriptors.h"
#include "kernel.cuh"

namespace late_interaction {

inline GatheredGradQArgs gathered_args(const BackwardArgs& common, const GatheredGradQPlan& plan) {
  GatheredGradQArgs args{};
  static_cast<BackwardArgs&>(args) = common;
  static_cast<GatheredGradQPlan&>(args) = plan;
  const int docs = gathered_docs(plan.tma);
  args.tile_bytes = gathered_tile_bytes(common.Ld, docs);
  args.winner_bytes = plan.octets * gathered_winner_bytes(docs);
  args.side_bytes = plan.octets * gathered_side_bytes(docs);
  args.query_octets = (common.Lq + kGatheredOctetRows - 1) / kGatheredOctetRows;
  args.all_octets = common.Nq * args.query_octets;
  args.by_query_octets = Divider(static_cast<uint32_t>(args.query_octets));
  args.query_winner_bytes = 2 * common.winners_stride * common.Lq;
  return args;
}

template <class T>
cudaError_t launch_gathered_grad_q(const BackwardArgs& common, const GatheredGradQPlan& plan,
                                   cudaStream_t stream) {
  const GatheredGradQArgs args = gathered_args(common, plan);
  const bool aligned = common.Lq % kGatheredOctetRows == 0 && is_aligned(common.winners, 16);
  const LaunchShape shape{plan.grid, kGatheredThreads, plan.smem_bytes, plan.pdl};
  if (!plan.tma) {
    const auto kernel =
        aligned ? grad_q_gathered<T, true, CpAsyncDocuments> : grad_q_gathered<T, false, CpAsyncDocuments>;
    return launch(kernel, shape, stream, args, CpAsyncDocuments{});
  }
  // A box has a token of each document of a stage, and then the next token: documents are the inner axis.
  const uint32_t box[3] = {kGatheredDims, TmaDocuments::kDocs, static_cast<uint32_t>(args.Ld) + 1};
  const CUtensorMap map =
      make_box_map(args.D.data, Compute::bf16, args.d,
                   {{{args.N, args.D.item_stride}, {args.Ld, args.D.token_stride}, kNoAxis}}, box);
  const auto kernel =
      aligned ? grad_q_gathered<T, true, TmaDocuments> : grad_q_gathered<T, false, TmaDocuments>;
  return launch(kernel, shape, stream, args, TmaDocuments{map});
}

}  // namespace late_interaction
