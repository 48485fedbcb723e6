// The plan of grad_D with the rows of Q from shared memory (cuda/backward/tiled_grad_d), and what it and the
// kernel must agree on. No CUDA, no PyTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../plan.h"

namespace late_interaction {

inline constexpr int kGradDStages = 3;
inline constexpr int kGradDReadAhead = 2;  // entries behind a list that are read, and not added

// A list has its entries in the order of keys: so many of each consumer, not all in use.
inline constexpr int kGradDConsumerKeys = 32;

// How the warps of a block share its documents: two, or one of up to twice as many tokens. With TMA, warps
// that have sums take registers from others (sm_90a); else all have 128, so more warps have sums, of fewer
// tokens each, and those that list winners also copy the rows of Q (cp.async).
struct GradDShape {
  int docs;
  bool tma;
  int rows;                                                           // query rows of a stage
  constexpr int tokens() const { return tma ? 30 : 26; }              // of a warp that has sums, at most
  constexpr int consumers() const { return (tma ? 12 : 14) / docs; }  // warps of a document that have sums
  constexpr int producers() const {                                   // and those that list its winners
    return tma ? (docs == 1 ? 3 : 2) : 2 / docs;
  }
  constexpr int keys() const { return kGradDConsumerKeys * consumers(); }
  constexpr int most_tokens() const { return tokens() * consumers(); }

  // Bytes of shared memory beside the ring: lists, their ends, counts, and mbarriers.
  constexpr int list_bytes() const {
    return (kGradDStages * docs * (8 * (rows + kGradDReadAhead) + 2 * keys()) +
            4 * docs * producers() * keys() + 16 * kGradDStages + 127) /
           128 * 128;
  }
};

// Documents of a block, by their tokens.
constexpr int grad_d_docs(int64_t Ld, bool tma) { return Ld <= GradDShape{2, tma, 0}.most_tokens() ? 2 : 1; }

// The rows of a stage that there are kernels of: the first with TMA, the others without.
inline constexpr int kGradDStageRows[] = {256, 192, 96};

struct TiledGradDPlan {
  GradDShape shape{};
  int64_t grid = 0;
  int smem_bytes = 0;
  bool pdl = false;
};

// None where plan_backward's way is. aligned: the rows of Q are contiguous, from a multiple of 16 bytes on.
std::optional<TiledGradDPlan> plan_tiled_grad_d(const Sizes& sizes, Dtype dtype, bool aligned,
                                                const Device& device);

std::string explain(const std::optional<TiledGradDPlan>& plan);  // nothing, where there is none

}  // namespace late_interaction
