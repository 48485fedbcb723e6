// What the planner needs to know of the device at hand, asked for once.
#pragma once

#include <cstdint>
#include <optional>

#include "../../plan/plan.h"

namespace late_interaction {

Device device_properties(int device);

// Whether kernels may start on the current device while the one before them ends.
bool supports_pdl();

// Whether L2 should fetch 256 bytes at a miss of a 128-byte box of TMA, or those 128 alone. An H200,
// whose memory bus is wider than the 5,120 bits of an H100, took 5 to 8% longer with 256 where it read
// documents once (bench/results/README.md).
bool fetches_256_bytes();

// For tests: plan as for an older compute capability from now on, on every device and thread; 0 ends that,
// nothing changes nothing. Returns what the current device is planned as.
int64_t cuda_capability(std::optional<int64_t> force);

}  // namespace late_interaction
