// The plan of grad_D with the rows of Q from shared memory (cuda/backward/tiled_grad_d), and what it and the
// kernel must agree on. No CUDA, no PyTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../plan.h"

namespace late_interaction {

inline constexpr int kGradDDocs = 2;       // documents of a block
inline constexpr int kGradDConsumers = 6;  // warps of a document that have sums
inline constexpr int kGradDProducers = 2;  // and those that list its winners
inline constexpr int kGradDTokens = 30;    // document tokens of a consumer, at most
inline constexpr int kGradDRows = 256;     // query rows of a stage
inline constexpr int kGradDStages = 3;
inline constexpr int kGradDReadAhead = 2;  // entries behind a list that are read, and not added

// A list has its entries in the order of keys: so many of each consumer, not all in use.
inline constexpr int kGradDConsumerKeys = 32;
inline constexpr int kGradDKeys = kGradDConsumerKeys * kGradDConsumers;

// Bytes of shared memory beside the ring: lists, their ends, counts, and mbarriers.
inline constexpr int kGradDListBytes =
    (kGradDStages * kGradDDocs * (8 * (kGradDRows + kGradDReadAhead) + 2 * kGradDKeys) +
     4 * kGradDDocs * kGradDProducers * kGradDKeys + 16 * kGradDStages + 127) /
    128 * 128;

struct TiledGradDPlan {
  int64_t grid = 0;
  int smem_bytes = 0;
};

// None where plan_backward's way is. aligned: the rows of Q are contiguous, from a multiple of 16 bytes on.
std::optional<TiledGradDPlan> plan_tiled_grad_d(const Sizes& sizes, Dtype dtype, bool aligned,
                                                const Device& device);

std::string explain(const std::optional<TiledGradDPlan>& plan);  // nothing, where there is none

}  // namespace late_interaction
