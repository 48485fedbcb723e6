// Shared memory that kernels are let have (csrc/cuda/runtime/dynamic_smem.h), with functions in place of the
// CUDA runtime's: what it was asked, and what it allows now.
#include "../../csrc/cuda/runtime/dynamic_smem.h"

#include <atomic>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

namespace {

constexpr int kKernels = 1500;

std::mutex mutex;
std::map<std::pair<const void*, int>, int> allowed;
std::atomic<int> asked{0};
std::atomic<bool> refuses{false};
thread_local int device = 0;
char kernels[kKernels];

int allowed_now(const void* kernel) {
  const std::lock_guard lock(mutex);
  const auto found = allowed.find({kernel, device});
  return found == allowed.end() ? 0 : found->second;
}

}  // namespace

extern "C" cudaError_t cudaGetDevice(int* out) {
  *out = device;
  return cudaSuccess;
}

extern "C" cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  if (refuses) return cudaErrorInvalidValue;
  ++asked;
  const std::lock_guard lock(mutex);
  allowed[{kernel, device}] = bytes;
  return cudaSuccess;
}

using late_interaction::allow_dynamic_smem;

namespace {

// Eight threads, two devices: whatever the others ask for, a kernel may have what was asked for last.
void test_threads_do_not_take_from_each_other() {
  std::atomic<int> short_of{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 8; ++seed) {
    threads.emplace_back([&short_of, state = seed * 7919]() mutable {
      for (int i = 0; i < 20000; ++i) {
        state = state * 1664525u + 1013904223u;
        const void* kernel = kernels + (state >> 8) % kKernels;
        const int bytes = static_cast<int>((state >> 4) % 200000);
        device = static_cast<int>(state >> 31);
        if (allow_dynamic_smem(kernel, bytes) != cudaSuccess || allowed_now(kernel) < bytes) ++short_of;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(short_of == 0);
}

void test_the_runtime_is_asked_once() {
  const int before = asked;
  for (device = 0; device < 2; ++device) {
    for (const char& kernel : kernels)
      EXPECT(allow_dynamic_smem(&kernel, allowed_now(&kernel)) == cudaSuccess);
  }
  EXPECT(asked == before);
  device = 2;
  EXPECT(allow_dynamic_smem(kernels, 1) == cudaSuccess && asked == before + 1);
}

void test_what_was_refused_is_asked_again() {
  refuses = true;
  EXPECT(allow_dynamic_smem(kernels, 1 << 30) == cudaErrorInvalidValue);
  refuses = false;
  EXPECT(allow_dynamic_smem(kernels, 1 << 30) == cudaSuccess && allowed_now(kernels) == 1 << 30);
}

}  // namespace

int main() {
  test_threads_do_not_take_from_each_other();
  test_the_runtime_is_asked_once();
  test_what_was_refused_is_asked_again();
  return failures > 0;
}
