#include <iterator>

#include "plan.h"

namespace late_interaction {

namespace {

struct ComputeFacts {
  const char* name;
  int bytes;  // of an element
};

// By enumerator, in the order of plan.h.
constexpr ComputeFacts kFacts[] = {{"bf16", 2}, {"fp16", 2}, {"tf32", 4}, {"3xtf32", 4}, {"fp64", 8},
                                   {"e4m3", 1}, {"e5m2", 1}, {"int8", 1}, {"fp32", 4}};
static_assert(std::size(kFacts) == kComputes);

}  // namespace

Compute compute_for(Dtype dtype, Precision precision) {
  // By enumerator, in the order of common/problem.h.
  constexpr Compute kOfFp32[] = {Compute::tf32x3, Compute::tf32, Compute::bf16, Compute::fp16};
  const Compute of_fp32 = kOfFp32[static_cast<int>(precision)];
  const Compute of_dtypes[] = {Compute::bf16, Compute::fp16, of_fp32,      Compute::fp64,
                               Compute::e4m3, Compute::e5m2, Compute::int8};
  return of_dtypes[static_cast<int>(dtype)];
}

int64_t element_bytes(Compute compute) { return kFacts[static_cast<int>(compute)].bytes; }

std::string name_of(Compute compute) { return kFacts[static_cast<int>(compute)].name; }

}  // namespace late_interaction
