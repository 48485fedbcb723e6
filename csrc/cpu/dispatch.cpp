// Which instruction set runs: asked of the CPU once, or forced by tests.
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "kernels.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace late_interaction::cpu {
namespace {

struct Candidate {
  const char* name;
  bool (*supported)();
  void (*fill)(Kernels&);
  bool (*permit)() = nullptr;     // asks the operating system, before the first use
  bool (*preferred)() = nullptr;  // false: taken only by name; null: always true
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// On a Xeon with AMX, float32 products of widened tokens ran at 1.7 times the speed of vdpbf16ps.
bool multiplies_bf16_fast() { return !__builtin_cpu_is("intel"); }

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#elif defined(__aarch64__)
bool has_dotprod() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

bool has_bf16() { return has_dotprod() && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }
#endif

// Best first.
const Candidate kCandidates[] = {
#if defined(__x86_64__)
    {"amx", [] { return has_avx512_bf16() && has_amx(); }, fill_amx, permit_amx, prefers_amx},
    {"avx512_bf16", has_avx512_bf16, fill_avx512_bf16, nullptr, multiplies_bf16_fast},
    {"avx512_vnni", has_avx512_vnni, fill_avx512_vnni},
    {"avx512", has_avx512, fill_avx512},
    {"avx2_vnni", [] { return has_avx2() && __builtin_cpu_supports("avxvnni"); }, fill_avx2_vnni},
    {"avx2", has_avx2, fill_avx2},
#elif defined(__aarch64__)
    {"neon_bf16", has_bf16, fill_neon_bf16},
    {"neon_dotprod", has_dotprod, fill_neon_dotprod},
    {"neon", [] { return true; }, fill_neon},
#endif
    {"portable", [] { return true; }, fill_portable},
};
constexpr int kCount = sizeof(kCandidates) / sizeof(kCandidates[0]);

constexpr const char* kVariable = "LATE_INTERACTION_CPU_ISA";

struct Tables {
  Kernels table[kCount];
  bool supported[kCount];
  int best;

  Tables() {
    for (int i = kCount - 1; i >= 0; --i) {
      supported[i] = kCandidates[i].supported();
      if (!supported[i]) continue;
      table[i] = table[kCount - 1];  // what an instruction set does not fill is portable
      kCandidates[i].fill(table[i]);
      table[i].name = kCandidates[i].name;
    }
    const char* asked = std::getenv(kVariable);
    const bool named = asked != nullptr && *asked != '\0';
    best = named ? find(asked, std::string(kVariable) + " is") : choose();
  }

  int choose() const {
    for (int i = 0; i < kCount; ++i) {
      const Candidate& c = kCandidates[i];
      if (supported[i] && (c.preferred == nullptr || c.preferred()) && permitted(c)) return i;
    }
    return kCount - 1;
  }

  static bool permitted(const Candidate& c) { return c.permit == nullptr || c.permit(); }

  // The table of that name. Throws, with `who` wants it, where this CPU has none.
  int find(const std::string& name, const std::string& who) const {
    std::string names;
    for (int i = 0; i < kCount; ++i) {
      if (!supported[i]) continue;
      if (name == kCandidates[i].name) {
        if (permitted(kCandidates[i])) return i;
        throw std::runtime_error("late_interaction: " + who + " '" + name +
                                 "', which the operating system does not let this process use");
      }
      names += (names.empty() ? "'" : ", '") + std::string(kCandidates[i].name) + "'";
    }
    throw std::runtime_error("late_interaction: " + who + " '" + name.substr(0, 40) +
                             "'; this CPU, with this build, has " + names);
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
  forced.store(name.empty() ? -1 : tables().find(name, "cpu_isa was asked for"));
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
