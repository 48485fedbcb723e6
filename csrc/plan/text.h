// The words of explain_plan.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

namespace late_interaction {

// The parts one after the other, numbers in decimal.
template <class... Parts>
std::string joined(const Parts&... parts) {
  std::string out;
  const auto add = [&](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      out += std::to_string(part);
    } else {
      out += part;
    }
  };
  (add(parts), ...);
  return out;
}

// "1 tile", "2 tiles".
inline std::string counted(int64_t count, const std::string& what) {
  return joined(count, " ", what, count == 1 ? "" : "s");
}

}  // namespace late_interaction
