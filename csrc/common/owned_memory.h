// Where a block that owns document tokens in the backward keeps what, in bytes from the start of its shared
// memory. The planner lays it out (plan/backward.cpp); the kernel looks it up (backward_owned.cuh).
#pragma once

#include <cstdint>

namespace late_interaction {

struct OwnedMemory {
  int32_t staged = 0;   // tokens of a chunk of winners; before it, what every block has
  int32_t origins = 0;  // and whose they are
  int32_t kept = 0;     // gradients of the document's scores
  int32_t starts = 0;   // first place of each token, and one behind the last
  int32_t next = 0;     // next free place of each token
  int32_t cursors = 0;  // the same for each warp
  int32_t list = 0;     // winners in the order of their tokens
};

}  // namespace late_interaction
