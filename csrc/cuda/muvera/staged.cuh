// The type of tokens in registers and shared memory: as in global memory, but float32 for float64.
#pragma once

namespace late_interaction {

template <class T>
struct StagedOf {
  using type = T;
};
template <>
struct StagedOf<double> {
  using type = float;
};
template <class T>
using Staged = typename StagedOf<T>::type;

}  // namespace late_interaction
