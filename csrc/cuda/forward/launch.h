// The forward kernels, as the host calls them. Each returns the launch's error and waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include "../../plan/plan.h"
#include "args.h"
#include "tma_args.h"

namespace late_interaction {

// Defined in dispatch.cpp: launches the kernel that the plan names.
cudaError_t launch_forward(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);

cudaError_t launch_sm80_bf16(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_sm80_fp16(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_sm80_tf32(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_sm80_tf32x3(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_fp64(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);

// sm_90a. sm90_q: query rows on the M side of wgmma; sm90_d: documents; sm90_q_longd: query rows, with long
// embeddings streamed in slices.
cudaError_t launch_sm90_q_bf16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
cudaError_t launch_sm90_q_fp16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
cudaError_t launch_sm90_q_e4m3(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
cudaError_t launch_sm90_q_e5m2(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
cudaError_t launch_sm90_q_int8(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
cudaError_t launch_sm90_d_bf16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
cudaError_t launch_sm90_d_fp16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
cudaError_t launch_sm90_d_e4m3(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
cudaError_t launch_sm90_d_e5m2(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
cudaError_t launch_sm90_d_int8(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);

cudaError_t launch_sm90_q_longd_bf16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream);
cudaError_t launch_sm90_q_longd_fp16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream);
cudaError_t launch_sm90_q_longd_tf32(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream);
cudaError_t launch_sm90_q_longd_e4m3(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream);
cudaError_t launch_sm90_q_longd_e5m2(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream);
cudaError_t launch_sm90_q_longd_int8(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream);
// sm90_q_longd for fp32 at full accuracy.
cudaError_t launch_sm90_3xtf32(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
// The token range that the mask leaves of each of [documents]: from the first kept token to the last. Where
// `copies` has buffers, the kept tokens alone, compacted; a token then is at most 16 whole vectors of 16
// bytes.
cudaError_t launch_doc_ranges(const ForwardArgs& args, int64_t documents, const CompactedTokens& copies,
                              DocRange* doc_ranges, cudaStream_t stream);

// Of documents that are split into args.num_splits ranges of whole tiles of `tile_tokens`: the ranges
// [documents * num_splits]. A mask's last tokens at either end of a split are left out.
cudaError_t launch_split_doc_ranges(const ForwardArgs& args, int tile_tokens, DocRange* doc_ranges,
                                    cudaStream_t stream);

// Query rows that one block combines: of more, a query's score is left in partials [Nq, args.partials,
// documents].
inline constexpr int kCombineRows = 128;
// scores, and winners where args has them, of documents whose splits left their maxima.
cudaError_t launch_combine_splits(const ForwardArgs& args, float* scores, cudaStream_t stream);

// scores[i, j] = sum over p of partials[i, p, j], in order.
cudaError_t launch_reduce_partials(const ForwardArgs& args, const ForwardPlan& plan, float* scores,
                                   cudaStream_t stream);

}  // namespace late_interaction
