#include "device.h"

#include <cuda_runtime.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <mutex>

namespace late_interaction {

namespace {

constexpr int kMaxDevices = 64;

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, name, device);
  STD_TORCH_CHECK(error == cudaSuccess, "late_interaction: CUDA device ", device, ": ",
                  cudaGetErrorString(error));
  return value;
}

Device query(int device) {
  Device properties;
  properties.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                          attribute(cudaDevAttrComputeCapabilityMinor, device);
  STD_TORCH_CHECK(properties.capability >= 80, "late_interaction: CUDA device ", device,
                  " has compute capability ", properties.capability / 10, ".", properties.capability % 10,
                  "; the kernels need 8.0 or newer");
  properties.sm_count = attribute(cudaDevAttrMultiProcessorCount, device);
  properties.smem_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  properties.smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
#ifdef LATE_INTERACTION_SM90A
  properties.wgmma = properties.capability == 90;
#else
  properties.wgmma = false;
#endif
  return properties;
}

}  // namespace

const Device& device_properties(int device) {
  static std::array<Device, kMaxDevices> known;
  static std::array<std::once_flag, kMaxDevices> asked;
  STD_TORCH_CHECK(device >= 0 && device < kMaxDevices, "late_interaction: CUDA device ", device,
                  " is out of range");
  std::call_once(asked[device], [device] { known[device] = query(device); });
  return known[device];
}

}  // namespace late_interaction
