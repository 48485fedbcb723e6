// What the backward of packed sequences and that of listed pairs of them have in common.
#pragma once

#include "../../plan/l2_parts.h"
#include "../backward/launch.h"
#include "../backward/run.h"
#include "../primitives/row_norms.h"
#include "../runtime/stream.h"
#include "workspace.h"

namespace late_interaction {

// [tokens, d], and [tokens] of weights, which are needed where Q is; with no elements: not needed.
struct PackedGradients {
  Tensor Q, D;
  OptionalTensor weights;
  bool adds = false;  // Q and D are sums in score_type, which the gradients are added to

  PackedGradients(const Tensor& of_Q, const Tensor& of_D, const Tensor* of_weights, bool need_Q, bool need_D)
      : Q(like(of_Q, need_Q)), D(like(of_D, need_D)) {
    if (of_weights != nullptr) weights = like(*of_weights, need_Q);
  }

  // none: a tensor without elements.
  PackedGradients(const OptionalTensor& q_sums, const OptionalTensor& d_sums, const Tensor& none)
      : Q(q_sums.value_or(none)), D(d_sums.value_or(none)), adds(true) {}

  void clear(cudaStream_t stream) const {
    if (adds) return;
    fill_zero(Q, stream);
    fill_zero(D, stream);
    if (weights) fill_zero(*weights, stream);
  }

 private:
  static Tensor like(const Tensor& x, bool needed) {
    return new_tensor(x, needed ? shape_of(x) : std::vector<int64_t>{0}, x.scalar_type());
  }
};

// Blocks that own documents: see packed_tile in backward/grad_d_segmented.cuh.
inline int64_t packed_grad_d_grid(const Sizes& s, const BackwardPlan& plan) {
  return s.Ld / plan.tile_tokens + s.N + 2;
}

// Fills in what the kernels' arguments say of packed sequences, and the plan's numbers.
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

// The weights of packed query tokens, as the kernels of the backward take them; and, unless the kernels
// finish them, the sums that grad_Q and the gradient of the weights are finished from. Without weights there
// is nothing to do.
class PackedWeights {
 public:
  PackedWeights(const Inputs& in, const PackedGradients& to, bool finished_by_kernels, cudaStream_t stream)
      : in_(in), to_(to), stream_(stream) {
    if (!to.weights) return;
    if (to.Q.numel() > 0 && !finished_by_kernels)
      sums_ = new_tensor(to.Q, {in.sizes.Lq, in.sizes.d}, score_type(in.dtype));
    scales_at_ = in.q_weights.data;
    if (in.q_weights.token_stride == 1) return;
    scales_ = new_tensor(to.Q, {in.sizes.Lq}, score_type(in.dtype));
    scales_at_ = scales_->data_ptr();
    check(launch_weighted_scales(rows(), in.q_weights, nullptr, in.dtype, scales_->data_ptr(), stream),
          "weights of Q");
  }

  const OptionalTensor& sums() const { return sums_; }

  void add_to(BackwardArgs& args) const {
    args.q_inverse = scales_at_;
    if (sums_) {
      args.grad_Q_sums = sums_->data_ptr();
    } else if (to_.weights && to_.Q.numel() > 0) {
      args.grad_weights = to_.weights->data_ptr();
    }
  }

  // grad_Q and the gradient of the weights, from the sums.
  void finish() const {
    if (!sums_) return;
    const GradientSums from{sums_->data_ptr(), nullptr,       false,
                            to_.Q.data_ptr(),  in_.q_weights, to_.weights->data_ptr()};
    check(launch_finish_gradients(rows(), in_.sizes.d, in_.dtype, from, stream_), "grad_Q in the dtype of Q");
  }

 private:
  RowsView rows() const { return query_rows(in_.Q, in_.sizes); }

  const Inputs& in_;
  const PackedGradients& to_;
  const cudaStream_t stream_;
  OptionalTensor scales_, sums_;
  const void* scales_at_ = nullptr;  // of all rows, behind each other
};

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
  if (to.adds) {
    args.grad_Q_sums = args.grad_Q;
    args.grad_D_sums = args.grad_D;
    args.adds_to_sums = args.adds_to_d_sums = true;
  }
  args.grad_d_blocks = need_D ? static_cast<int32_t>(plan.grad_d_grid) : 0;
  const PackedWeights weights(in, to, finishes_weighted_rows(plan, in.dtype), stream);
  weights.add_to(args);
  check(launch_lowmem(args, in.dtype, plan, stream), "gradients");
  weights.finish();
}

// ---- batches that are larger than L2 (backward_parts.cpp) ----

// grad_scores, winners: those of the call.
struct PackedBackward {
  const Inputs& in;
  const Tensor &grad_scores, &winners;
  const Device& device;
};

// One gradient after the other, as packed_backward_parts has cut them.
void packed_gradients_by_parts(const PackedBackward& call, const PackedParts& parts,
                               const PackedGradients& to, cudaStream_t stream);

}  // namespace late_interaction
