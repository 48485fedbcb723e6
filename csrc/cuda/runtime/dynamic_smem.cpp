#include "dynamic_smem.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace late_interaction {

namespace {

constexpr int kDevices = 64;
constexpr size_t kSlots = 4096;  // more than there are kernels, by devices of a machine

// An entry of the table: `bytes` of dynamic shared memory are allowed to a kernel on a device, which `key`
// names. Once `key` is set it stays.
struct Allowed {
  std::atomic<uint64_t> key{0};
  std::atomic<int> bytes{0};
};

// An address leaves the upper bits for the device.
uint64_t key_of(const void* kernel, int device) {
  return reinterpret_cast<uintptr_t>(kernel) | uint64_t{static_cast<unsigned>(device) + 1} << 56;
}

std::array<Allowed, kSlots> slots;
std::mutex mutex;  // for adding a slot, or asking the runtime

// The key's slot, or the empty one that it would take; null: all are taken.
Allowed* find(uint64_t key) {
  size_t at = (key ^ key >> 56) * 0x9E3779B97F4A7C15u >> 52;
  static_assert(kSlots == size_t{1} << 12);
  for (size_t tries = 0; tries < kSlots; ++tries, at = (at + 1) % kSlots) {
    const uint64_t found = slots[at].key.load(std::memory_order_acquire);
    if (found == key || found == 0) return &slots[at];
  }
  return nullptr;
}

cudaError_t ask_runtime(const void* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace

cudaError_t allow_dynamic_smem(const void* kernel, int bytes) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= kDevices) return ask_runtime(kernel, bytes);
  const uint64_t key = key_of(kernel, device);
  const Allowed* known = find(key);
  if (known != nullptr && known->key.load(std::memory_order_acquire) == key &&
      known->bytes.load(std::memory_order_acquire) >= bytes) {
    return cudaSuccess;
  }
  const std::lock_guard lock(mutex);  // or a thread that wants less could have the last word
  Allowed* slot = find(key);
  if (slot == nullptr) return ask_runtime(kernel, bytes);
  if (slot->key.load() == key && slot->bytes.load() >= bytes) return cudaSuccess;
  const cudaError_t refused = ask_runtime(kernel, bytes);
  if (refused != cudaSuccess) return refused;
  slot->bytes.store(bytes, std::memory_order_release);
  slot->key.store(key, std::memory_order_release);
  return cudaSuccess;
}

}  // namespace late_interaction
