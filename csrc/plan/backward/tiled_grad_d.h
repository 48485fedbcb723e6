// The plan of grad_D with the rows of Q from shared memory (cuda/backward/tiled_grad_d), and what it and the
// kernel must agree on. No CUDA, no PyTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../plan.h"

namespace late_interaction {

inline constexpr int kGradDWarps = 12;   // of a block, that have sums
inline constexpr int kGradDTokens = 30;  // document tokens of such a warp, at most
inline constexpr int kGradDRows = 256;   // query rows of a stage
inline constexpr int kGradDStages = 3;
inline constexpr int kGradDReadAhead = 2;  // entries behind a list that are read, and not added

// A list has its entries in the order of keys: so many of each consumer, not all in use.
inline constexpr int kGradDConsumerKeys = 32;

// How the warps of a block share its documents: two, or one of up to twice as many tokens.
struct GradDShape {
  int docs;
  constexpr int consumers() const { return kGradDWarps / docs; }  // warps of a document that have sums
  constexpr int producers() const { return docs == 1 ? 3 : 2; }   // and those that list its winners
  constexpr int keys() const { return kGradDConsumerKeys * consumers(); }
  constexpr int most_tokens() const { return kGradDTokens * consumers(); }

  // Bytes of shared memory beside the ring: lists, their ends, counts, and mbarriers.
  constexpr int list_bytes() const {
    return (kGradDStages * docs * (8 * (kGradDRows + kGradDReadAhead) + 2 * keys()) +
            4 * docs * producers() * keys() + 16 * kGradDStages + 127) /
           128 * 128;
  }
};

// Documents of a block, by their tokens.
constexpr int grad_d_docs(int64_t Ld) { return Ld <= GradDShape{2}.most_tokens() ? 2 : 1; }

struct TiledGradDPlan {
  int docs = 0;  // of a block: 2 or 1
  int64_t grid = 0;
  int smem_bytes = 0;
};

// None where plan_backward's way is. aligned: the rows of Q are contiguous, from a multiple of 16 bytes on.
std::optional<TiledGradDPlan> plan_tiled_grad_d(const Sizes& sizes, Dtype dtype, bool aligned,
                                                const Device& device);

std::string explain(const std::optional<TiledGradDPlan>& plan);  // nothing, where there is none

}  // namespace late_interaction
