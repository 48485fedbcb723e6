// The type of tokens in registers and shared memory: as in global memory, but float32 for float64.
#pragma once

#include <type_traits>

namespace late_interaction {

template <class T>
using Staged = std::conditional_t<std::is_same_v<T, double>, float, T>;

}  // namespace late_interaction
