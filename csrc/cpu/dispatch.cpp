// Which instruction set runs: asked of the CPU once, or forced by tests.
#include <atomic>
#include <stdexcept>

#include "kernels.h"

namespace late_interaction::cpu {
namespace {

struct Candidate {
  const char* name;
  bool (*supported)();
  void (*fill)(Kernels&);
};

// Best first.
const Candidate kCandidates[] = {
#if defined(__x86_64__)
    {"avx512_bf16",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512bf16");
     },
     fill_avx512_bf16},
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     },
     fill_avx512},
    {"avx2",
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     },
     fill_avx2},
#endif
    {"portable", [] { return true; }, fill_portable},
};
constexpr int kCount = sizeof(kCandidates) / sizeof(kCandidates[0]);

struct Tables {
  Kernels table[kCount];
  bool supported[kCount];
  int best = kCount - 1;

  Tables() {
    for (int i = kCount - 1; i >= 0; --i) {
      supported[i] = kCandidates[i].supported();
      if (!supported[i]) continue;
      kCandidates[i].fill(table[i]);
      table[i].name = kCandidates[i].name;
      best = i;
    }
  }
};

const Tables& tables() {
  static const Tables all;
  return all;
}

std::atomic<int> forced{-1};

}  // namespace

const Kernels& kernels() {
  const int i = forced.load(std::memory_order_relaxed);
  return tables().table[i >= 0 ? i : tables().best];
}

std::string force_isa(const std::string& name) {
  int found = -1;
  for (int i = 0; i < kCount && !name.empty(); ++i) {
    if (name == kCandidates[i].name && tables().supported[i]) found = i;
  }
  if (found < 0 && !name.empty()) {
    throw std::runtime_error("late_interaction: this CPU (or build) has no '" + name +
                             "' kernels; cpu_isa takes '', 'portable', 'avx2', 'avx512' or 'avx512_bf16'");
  }
  forced.store(found);
  return kernels().name;
}

template <>
const RowKernels<float>& row_kernels<float>(const Kernels& k) {
  return k.rows32;
}

template <>
const RowKernels<double>& row_kernels<double>(const Kernels& k) {
  return k.rows64;
}

}  // namespace late_interaction::cpu
