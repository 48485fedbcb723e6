// Functions that the entries of several CPU operators share.
#pragma once

#include <cstring>

#include "../common/forms.h"
#include "../common/tensors.h"

namespace late_interaction::cpu {

// Checks what offsets say, which on the CPU can be looked at.
inline void check_offsets(const int32_t* offsets, int64_t sequences, int64_t tokens, const char* name) {
  int64_t before = 0;
  for (int64_t i = 0; i <= sequences; ++i) {
    STD_TORCH_CHECK(before <= offsets[i] && offsets[i] <= tokens, "late_interaction: ", name,
                    " must not decrease and lie within [0, ", tokens, "], got ", name, "[", i,
                    "] = ", offsets[i], " after ", before);
    before = offsets[i];
  }
}

inline void check_packed_offsets(const Inputs& in) {
  check_offsets(in.packed->q_offsets, in.packed->queries, in.sizes.Lq, "cu_seqlens_q");
  check_offsets(in.packed->d_offsets, in.sizes.N, in.sizes.Ld, "cu_seqlens_d");
}

// Fills winners with the sentinel, all bits set: no call writes winners of tokens that belong to no query. An
// empty tensor has a null pointer, which memset must not be given.
inline void fill_with_sentinel(const Tensor& winners) {
  if (winners.numel() == 0) return;
  std::memset(winners.mutable_data_ptr(), 0xFF, winners.numel() * winners.element_size());
}

// Allocates the gradients of packed tokens.
inline Gradients packed_gradients(const Tensor& Q, const Inputs& in, bool need_grad_Q, bool need_grad_D) {
  const std::vector<int64_t> none{0}, of_Q{in.sizes.Lq, in.sizes.d}, of_D{in.sizes.Ld, in.sizes.d};
  Gradients to{new_tensor(Q, need_grad_Q ? of_Q : none, Q.scalar_type()),
               new_tensor(Q, need_grad_D ? of_D : none, Q.scalar_type())};
  // Weights of no token have no memory either.
  const bool need_weights = in.q_weights.data != nullptr && need_grad_Q;
  to.weights = new_tensor(Q, {need_weights ? in.sizes.Lq : 0}, score_type(in.dtype));
  return to;
}

// Null where a gradient was not asked for, and has no elements.
inline void* destination(const OptionalTensor& gradient) {
  return gradient && gradient->numel() > 0 ? gradient->mutable_data_ptr() : nullptr;
}

}  // namespace late_interaction::cpu
