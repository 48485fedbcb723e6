// Launches Ward's clustering, a block a document.
#include <algorithm>

#include "../../common/arithmetic.h"
#include "../runtime/dynamic_smem.h"
#include "kernel.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

constexpr int64_t kWorkspaceBytes = int64_t{6} << 30;  // at most, but for one block

template <class Real>
cudaError_t plan(const WardCut& call, int64_t longest, const Device& device, WardLaunch& launch) {
  constexpr int64_t kTileBytes = kWardTile * (kWardTile + 1) * sizeof(Real);
  constexpr int64_t kStaticBytes = 1024;  // no less than what the kernel declares
  const int64_t state = ward_state_bytes(longest);
  const bool fits = state + kStaticBytes <= device.smem_per_block;
  launch.state_bytes = fits ? 0 : state;
  launch.smem_bytes = static_cast<int>(std::max(kTileBytes, fits ? state : 0));
  cudaError_t error = allow_dynamic_smem(reinterpret_cast<const void*>(ward_cut<Real>), launch.smem_bytes);
  if (error != cudaSuccess) return error;
  int resident = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, ward_cut<Real>, kWardThreads,
                                                        launch.smem_bytes);
  if (error != cudaSuccess) return error;
  const int64_t bytes =
      longest * (longest * int64_t{sizeof(double)} + int64_t{sizeof(WardMerge)}) + launch.state_bytes;
  const int64_t affordable = std::max<int64_t>(kWorkspaceBytes / std::max<int64_t>(bytes, 1), 1);
  launch.blocks = std::min({call.documents, int64_t{device.sm_count} * std::max(resident, 1), affordable});
  launch.workspace_bytes = launch.blocks * bytes;
  return cudaSuccess;
}

template <class Real>
cudaError_t run(const WardCut& call, int64_t longest, const WardLaunch& launch, void* workspace,
                cudaStream_t stream) {
  double* distances = static_cast<double*>(workspace);
  auto* merges = reinterpret_cast<WardMerge*>(distances + launch.blocks * longest * longest);
  char* state = reinterpret_cast<char*>(merges + launch.blocks * longest);
  const WardArgs<Real> args{.similarities = static_cast<const Real*>(call.similarities),
                            .offsets = call.offsets,
                            .clusters = call.clusters,
                            .labels = call.labels,
                            .found = call.found,
                            .documents = static_cast<int32_t>(call.documents),
                            .tokens = call.tokens,
                            .cells = call.cells,
                            .distances = distances,
                            .merges = merges,
                            .state = launch.state_bytes == 0 ? nullptr : state,
                            .longest = longest,
                            .state_bytes = launch.state_bytes};
  ward_cut<Real><<<static_cast<unsigned>(launch.blocks), kWardThreads, launch.smem_bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t plan_ward_cut(const WardCut& call, int64_t longest, const Device& device, WardLaunch& launch) {
  return call.dtype == Dtype::fp64 ? plan<double>(call, longest, device, launch)
                                   : plan<float>(call, longest, device, launch);
}

cudaError_t launch_ward_cut(const WardCut& call, int64_t longest, const WardLaunch& launch, void* workspace,
                            cudaStream_t stream) {
  return call.dtype == Dtype::fp64 ? run<double>(call, longest, launch, workspace, stream)
                                   : run<float>(call, longest, launch, workspace, stream);
}

}  // namespace late_interaction
