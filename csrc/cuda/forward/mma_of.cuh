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
struct MmaOf<Compute::int8> : std::type_identity<ptx::MmaInt8> {};
template <>
struct MmaOf<Compute::e4m3> : std::type_identity<ptx::MmaFp8<__nv_fp8_e4m3>> {};
template <>
struct MmaOf<Compute::e5m2> : std::type_identity<ptx::MmaFp8<__nv_fp8_e5m2>> {};
template <>
struct MmaOf<Compute::tf32> : std::type_identity<ptx::MmaTf32> {};
template <>
struct MmaOf<Compute::tf32x3> : std::type_identity<ptx::Mma3xTf32> {};
template <>
struct MmaOf<Compute::fp32> : std::type_identity<ptx::Ffma> {};

// Bytes that the operand of a row takes, for each 32 of its embedding.
template <class Mma>
constexpr int operand_bytes() {
  constexpr bool kWidened =
      sizeof(typename Mma::Element) == 1 && !std::is_same_v<typename Mma::Element, int8_t>;
  return kWidened ? 64 : 32;
}

}  // namespace late_interaction
