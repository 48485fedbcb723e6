#include "project.cuh"

namespace late_interaction {

namespace {

template <class Type, class T>
cudaError_t launch(const ProjectArgs& args, const ProjectMaps& maps, int sm_count, cudaStream_t stream) {
  const auto kernel = project_rows<Type, T>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ProjectTile::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t blocks = project_blocks(args.rows, sm_count);
  kernel<<<static_cast<unsigned>(blocks), ProjectTile::kThreads, ProjectTile::kSharedBytes, stream>>>(args,
                                                                                                      maps);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_project_rows(Dtype dtype, const ProjectArgs& args, const ProjectMaps& maps, int sm_count,
                                cudaStream_t stream) {
  return dtype == Dtype::bf16 ? launch<ptx::WgmmaBf16, __nv_bfloat16>(args, maps, sm_count, stream)
                              : launch<ptx::WgmmaFp16, __half>(args, maps, sm_count, stream);
}

}  // namespace late_interaction
