// The products of mma.sync for each type that the planner names.
#pragma once

#include <type_traits>

#include "../../plan/plan.h"
#include "../ptx/mma.cuh"

namespace late_interaction {

template <Compute kCompute>
struct MmaOf;
template <>
struct MmaOf<Compute::bf16> : std::type_identity<ptx::MmaBf16> {};
template <>
struct MmaOf<Compute::fp16> : std::type_identity<ptx::MmaFp16> {};
template <>
struct MmaOf<Compute::tf32> : std::type_identity<ptx::MmaTf32> {};
template <>
struct MmaOf<Compute::tf32x3> : std::type_identity<ptx::Mma3xTf32> {};

}  // namespace late_interaction
