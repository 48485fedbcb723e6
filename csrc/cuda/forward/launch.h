// The forward kernels, as the host calls them. Each returns the launch's error and waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include "../../plan/plan.h"
#include "args.h"
#include "tma_args.h"

namespace late_interaction {

// Defined in dispatch.cpp: launches the kernel that the plan names.
cudaError_t launch_forward(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);

cudaError_t launch_forward_bf16(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_forward_fp16(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_forward_tf32(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_forward_tf32x3(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_forward_fp64(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream);

// sm_90a: query rows, or documents, on the M side of wgmma; split: query rows, and their embeddings in
// pieces.
cudaError_t launch_wgmma_rows_bf16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                   cudaStream_t stream);
cudaError_t launch_wgmma_rows_fp16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                   cudaStream_t stream);
cudaError_t launch_wgmma_rows_e4m3(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                   cudaStream_t stream);
cudaError_t launch_wgmma_rows_e5m2(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                   cudaStream_t stream);
cudaError_t launch_wgmma_rows_int8(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                   cudaStream_t stream);
cudaError_t launch_wgmma_documents_bf16(const ForwardArgs& args, const TensorMaps& maps,
                                        const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_wgmma_documents_fp16(const ForwardArgs& args, const TensorMaps& maps,
                                        const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_wgmma_documents_e4m3(const ForwardArgs& args, const TensorMaps& maps,
                                        const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_wgmma_documents_e5m2(const ForwardArgs& args, const TensorMaps& maps,
                                        const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_wgmma_documents_int8(const ForwardArgs& args, const TensorMaps& maps,
                                        const ForwardPlan& plan, cudaStream_t stream);

cudaError_t launch_wgmma_split_bf16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                    cudaStream_t stream);
cudaError_t launch_wgmma_split_fp16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                    cudaStream_t stream);
cudaError_t launch_wgmma_split_tf32(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                    cudaStream_t stream);
cudaError_t launch_wgmma_split_e4m3(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                    cudaStream_t stream);
cudaError_t launch_wgmma_split_e5m2(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                    cudaStream_t stream);
cudaError_t launch_wgmma_split_int8(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                    cudaStream_t stream);
// The same for fp32 at full accuracy.
cudaError_t launch_wgmma_exact(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);
// What the mask leaves of each of [documents]: the tokens from the first that it keeps to the last. Where
// `copies` has room, only those that count; tokens then lie in whole 16 bytes, at most 16 of them.
cudaError_t launch_visits(const ForwardArgs& args, int64_t documents, const CopyRoom& copies, Visit* visits,
                          cudaStream_t stream);

// Of documents that are cut into args.pieces of whole tiles of `tile_tokens`: the visits [documents *
// pieces]. A mask's last tokens at either end of a piece are left out.
cudaError_t launch_piece_visits(const ForwardArgs& args, int tile_tokens, Visit* visits, cudaStream_t stream);

// Query rows that one block joins: of more, a query's score is left in parts [Nq, args.parts, documents].
inline constexpr int kJoinedRows = 128;
// scores, and winners where args has them, of documents whose pieces left their maxima.
cudaError_t launch_join_pieces(const ForwardArgs& args, float* scores, cudaStream_t stream);

// scores[i, j] = sum over p of parts[i, p, j], in order.
cudaError_t launch_sum_parts(const ForwardArgs& args, const ForwardPlan& plan, float* scores,
                             cudaStream_t stream);

}  // namespace late_interaction
