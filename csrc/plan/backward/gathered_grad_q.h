// The plan of grad_Q of many query rows, whose winners' rows ldmatrix reads from shared memory
// (cuda/backward/gathered_grad_q), and what it and the kernel must agree on. No CUDA, no PyTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../plan.h"

namespace late_interaction {

inline constexpr int kGatheredDims = 32;        // of an embedding, that a block has
inline constexpr int kGatheredOctetRows = 8;    // query rows of one query, four columns of an accumulator
inline constexpr int kGatheredWarps = 12;       // that add up
inline constexpr int kGatheredMostOctets = 12;  // of a warp, as registers allow
inline constexpr int kGatheredMostStages = 4;
inline constexpr int kGatheredSumPadding = 8;  // floats between rows of sums in shared memory

// Documents of a stage: eight where TMA brings them (sm_90), four where threads do: less shared memory.
constexpr int gathered_docs(bool tma) { return tma ? 8 : 4; }

// Bytes of an octet's winners and of its gradients with the documents of a stage.
constexpr int gathered_winner_bytes(int docs) { return 2 * docs * kGatheredOctetRows; }
constexpr int gathered_side_bytes(int docs) { return gathered_winner_bytes(docs) + 4 * docs; }

// Bytes of a stage's documents: their tokens, and one of zeros behind them.
constexpr int gathered_tile_bytes(int64_t Ld, int docs) {
  return static_cast<int>(Ld + 1) * docs * 2 * kGatheredDims;
}

struct GatheredGradQPlan {
  bool tma = false;
  int slices = 0;  // blocks that share query rows, each with some of the dims
  int octets = 0;  // of a block
  int stages = 0;
  int smem_bytes = 0;
  int64_t grid = 0;
  bool pdl = false;
};

// None where another way is faster, or the kernel does not serve. aligned: TMA can read the rows of D.
std::optional<GatheredGradQPlan> plan_gathered_grad_q(const Sizes& sizes, Dtype dtype, bool aligned,
                                                      const Device& device);

std::string explain(const std::optional<GatheredGradQPlan>& plan);  // nothing, where there is none

}  // namespace late_interaction
