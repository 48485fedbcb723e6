#include "../runtime/launch_config.cuh"
#include "project.cuh"

namespace late_interaction {

cudaError_t launch_project_rows(Dtype dtype, const ProjectArgs& args, const ProjectMaps& maps, int sm_count,
                                cudaStream_t stream) {
  const auto kernel = dtype == Dtype::bf16 ? project_rows<ptx::WgmmaBf16, __nv_bfloat16>
                                           : project_rows<ptx::WgmmaFp16, __half>;
  const LaunchShape shape{project_blocks(args.rows, sm_count), ProjectTile::kThreads,
                          ProjectTile::kSharedBytes, false};
  return launch(kernel, shape, stream, args, maps);
}

}  // namespace late_interaction
