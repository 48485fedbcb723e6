// A copy of many bytes that nobody on this CPU will read soon.
#pragma once

#include <cstdint>

namespace late_interaction::cpu {

// On all of PyTorch's threads; `from` and `to` do not overlap.
void copy_past_cache(uint8_t* to, const uint8_t* from, int64_t bytes);

}  // namespace late_interaction::cpu
