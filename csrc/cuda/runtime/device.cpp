#include "device.h"

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <string_view>

#include "../../common/registration.h"
#include "loaded_code.h"

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

bool is_geforce(int device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  STD_TORCH_CHECK(error == cudaSuccess, "late_interaction: CUDA device ", device, ": ",
                  cudaGetErrorString(error));
  return std::string_view(properties.name).find("GeForce") != std::string_view::npos;
}

struct RealDevice : Device {
  int hardware_capability = 0;  // may be newer than the code that it runs, and is planned as
  int memory_bus_bits = 0;
};

#ifdef LATE_INTERACTION_SM90A
constexpr bool kHasSm90aCode = true;
#else
constexpr bool kHasSm90aCode = false;
#endif

// Returns the capability that a device is planned as. A device of 9.0 or newer that runs code for an older
// capability is planned as that: it lacks the kernels of 9.0a, and instructions of 9.0 were compiled out.
// Hopper without code for 9.0a is planned as 8.9. An older device is planned by its capability, which 8.0
// code serves; 7.5's does not, and is planned as that.
int usable_capability(int capability, int code) {
  if (capability < 90 && code >= 80) return capability;
  if (code < 90) return code;
  return capability == 90 && !kHasSm90aCode ? 89 : capability;
}

RealDevice query(int device) {
  RealDevice properties;
  properties.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                          attribute(cudaDevAttrComputeCapabilityMinor, device);
  STD_TORCH_CHECK(properties.capability >= 75, "late_interaction: CUDA device ", device,
                  " has compute capability ", properties.capability / 10, ".", properties.capability % 10,
                  "; the kernels need 7.5 or newer");
  properties.sm_count = attribute(cudaDevAttrMultiProcessorCount, device);
  properties.smem_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  properties.smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  properties.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  properties.geforce = is_geforce(device);
  properties.memory_bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth, device);
  const torch::stable::accelerator::DeviceGuard guard(device);
  properties.hardware_capability = properties.capability;
  properties.capability = usable_capability(properties.capability, loaded_code_capability());
  properties.wgmma = properties.capability == 90;
  return properties;
}

const RealDevice& real_properties(int device) {
  static std::array<RealDevice, kMaxDevices> known;
  static std::array<std::once_flag, kMaxDevices> asked;
  STD_TORCH_CHECK(device >= 0 && device < kMaxDevices, "late_interaction: CUDA device ", device,
                  " is out of range");
  std::call_once(asked[device], [device] { known[device] = query(device); });
  return known[device];
}

std::atomic<int> forced{0};

constexpr std::array kKnown = {75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121};

// Says whether this device has the instructions that a device of that capability is planned with: wgmma for
// 9.0, launches that begin early and copies by TMA from there on. Code for 7.5 lacks kernels of 8.0's plans.
bool can_be_planned_as(const Device& real, int capability) {
  if (std::find(kKnown.begin(), kKnown.end(), capability) == kKnown.end()) return false;
  if (capability < 90) return capability < 80 || real.sm80();
  return capability == 90 ? real.wgmma : real.capability >= 90;
}

// A device of this capability with as many multiprocessors, and no more memory than this one. It is a
// GeForce if this one is.
Device planned_as(const Device& real, int capability) {
  Device device = device_of_capability(capability, real.sm_count, real.geforce);
  device.smem_per_sm = std::min(device.smem_per_sm, real.smem_per_sm);
  device.smem_per_block = std::min(device.smem_per_block, real.smem_per_block);
  device.l2_bytes = std::min(device.l2_bytes, real.l2_bytes);
  device.wgmma = device.wgmma && real.wgmma;
  return device;
}

}  // namespace

Device device_properties(int device) {
  const RealDevice& real = real_properties(device);
  const int capability = forced.load(std::memory_order_relaxed);
  const bool forces =
      capability != 0 && capability != real.hardware_capability && can_be_planned_as(real, capability);
  if (forces) return planned_as(real, capability);
  return real;
}

void require_sm80(const Device& device, const char* call) {
  STD_TORCH_CHECK(device.sm80(), "late_interaction: ", call,
                  " needs compute capability 8.0 or newer; this GPU is planned as ", device.capability / 10,
                  ".", device.capability % 10);
}

bool supports_pdl() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && device_properties(device).pdl();
}

bool has_narrow_memory_bus() {
  constexpr int kWidestOfH100 = 5120;
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && real_properties(device).memory_bus_bits <= kWidestOfH100;
}

int64_t cuda_capability(std::optional<int64_t> force) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  STD_TORCH_CHECK(error == cudaSuccess, "late_interaction: no CUDA device: ", cudaGetErrorString(error));
  if (force) {
    const RealDevice& real = real_properties(device);
    const bool fits = *force > 0 && *force < 1000 && can_be_planned_as(real, static_cast<int>(*force));
    STD_TORCH_CHECK(
        *force == 0 || *force == real.capability || fits,
        "late_interaction: cuda_capability takes 0, or a known compute capability whose instructions "
        "this device of ",
        real.capability, " has, as 75, 80 or 89; got ", *force);
    forced.store(static_cast<int>(*force), std::memory_order_relaxed);
  }
  return device_properties(device).capability;
}

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cuda_capability", TORCH_BOX(&late_interaction::cuda_capability));
}
