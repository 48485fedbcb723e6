// The planner's view of the current device, asked for once.
#pragma once

#include <cstdint>
#include <optional>

#include "../../plan/plan.h"

namespace late_interaction {

Device device_properties(int device);

// Refuses a call that no kernel serves on 7.5, which has less shared memory than any other.
void require_sm80(const Device& device, const char* call);

// Whether kernels may start on the current device while the one before them ends: pdl_wait is compiled
// for 9.0 and newer alone, so that is asked of the loaded code (usable_capability).
bool supports_pdl();

// Whether the memory bus is as narrow as that of an H100 (5,120 bits). On a wider one, that of an H200,
// sm90_d took 5 to 8% longer where L2 fetched 256 bytes at a miss of a 128-byte box of TMA and documents
// were read once (bench/results/README.md).
bool has_narrow_memory_bus();

// For tests: plan as for an older compute capability from now on, on every device and thread; 0 ends that,
// nothing changes nothing. Returns what the current device is planned as.
int64_t cuda_capability(std::optional<int64_t> force);

}  // namespace late_interaction
