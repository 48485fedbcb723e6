// What the backward of packed sequences and that of listed pairs of them have in common.
#pragma once

#include "../backward/launch.h"
#include "../backward/run.h"
#include "../runtime/stream.h"
#include "workspace.h"

namespace late_interaction {

// [tokens, d]; with no elements: not needed.
struct PackedGradients {
  Tensor Q, D;

  PackedGradients(const Tensor& of_Q, const Tensor& of_D, bool need_Q, bool need_D)
      : Q(like(of_Q, need_Q)), D(like(of_D, need_D)) {}

  void clear(cudaStream_t stream) const {
    fill_zero(Q, stream);
    fill_zero(D, stream);
  }

 private:
  static Tensor like(const Tensor& x, bool needed) {
    const auto shape = needed ? std::vector<int64_t>{x.size(0), x.size(1)} : std::vector<int64_t>{0};
    return new_tensor(x, shape, x.scalar_type());
  }
};

// Blocks that own documents: see packed_tile in backward/grad_d_segmented.cuh.
inline int64_t packed_grad_d_grid(const Sizes& s, const BackwardPlan& plan) {
  return s.Ld / plan.tile_tokens + s.N + 2;
}

// What the kernels' arguments say of packed sequences, and the plan's numbers.
template <class Args>
void take_packed(Args& args, const Inputs& in, const BackwardPlan& plan, const PackedIndex& index) {
  take_plan(args, plan);
  args.grads_kept = 0;  // those of all queries with a document: too many
  args.Q = in.Q;
  args.D = in.D;
  args.packed = true;
  args.spans = index.spans;
  args.row_queries = index.row_queries;
}

// plan: for documents of mean length. args: with the winners and their gradients.
template <class Args>
void launch_packed(const Inputs& in, BackwardPlan plan, Args args, const PackedGradients& to,
                   cudaStream_t stream) {
  plan.grad_d_grid = packed_grad_d_grid(in.sizes, plan);
  STD_TORCH_CHECK(plan.gather_grid + plan.grad_d_grid <= INT32_MAX,
                  "late_interaction: more than 2^31 - 1 blocks in one backward");
  const bool need_Q = to.Q.numel() > 0, need_D = to.D.numel() > 0;
  if (!need_Q && !need_D) return;
  const PackedIndexBuffers buffers(in, to.Q);
  const PackedIndex index = buffers.index(in);
  check(launch_packed_index(index, stream), "index of packed sequences");
  take_packed(args, in, plan, index);
  args.grad_Q = need_Q ? to.Q.data_ptr() : nullptr;
  args.grad_D = need_D ? to.D.data_ptr() : nullptr;
  args.grad_d_blocks = need_D ? static_cast<int32_t>(plan.grad_d_grid) : 0;
  check(launch_lowmem(args, in.dtype, plan, stream), "gradients");
}

}  // namespace late_interaction
