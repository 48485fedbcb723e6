#include "project_and_score.cuh"

#include <algorithm>

namespace late_interaction {

namespace {

template <class Type, class Mma>
cudaError_t launch(const ScoreArgs& args, const ProjectMaps& maps, int sm_count, cudaStream_t stream) {
  const auto kernel = project_scores<Type, Mma>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ScoreTile::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t blocks = project_blocks(args.project.rows, sm_count);
  kernel<<<static_cast<unsigned>(blocks), ScoreTile::kThreads, ScoreTile::kSharedBytes, stream>>>(args, maps);
  const int64_t sums = (int64_t{args.queries} * args.documents + 7) / 8;
  sum_best<<<static_cast<unsigned>(sums), 256, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_project_scores(Dtype dtype, const ScoreArgs& args, const ProjectMaps& maps, int sm_count,
                                  cudaStream_t stream) {
  return dtype == Dtype::bf16 ? launch<ptx::WgmmaBf16, ptx::MmaBf16>(args, maps, sm_count, stream)
                              : launch<ptx::WgmmaFp16, ptx::MmaFp16>(args, maps, sm_count, stream);
}

}  // namespace late_interaction
