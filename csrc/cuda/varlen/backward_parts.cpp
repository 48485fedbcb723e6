// grad_Q and grad_D of packed sequences, each in launches of its own, whose rows stay in L2:
//
//   grad_Q   documents [first, first + count) in one launch with all rows of Q; spans, winners and gradients
//            of scores are those from `first` on. A sum in fp32 goes on from launch to launch.
//   grad_D   rows [first, first + count) of Q in one launch with all documents. The kernel finds the winners
//            of a document behind those of the one before it, so those of the rows are copied together. All
//            documents have sums in fp32: where their tokens begin, only the device knows.
#include <cuda_runtime.h>

#include <algorithm>

#include "backward.h"

namespace late_interaction {

namespace {

const void* advanced(const void* data, int64_t bytes) { return static_cast<const uint8_t*>(data) + bytes; }

// Where a gradient is summed before it is rounded: itself, in fp32.
Tensor sums_of(const Tensor& gradient) {
  if (gradient.scalar_type() == ScalarType::Float) return gradient;
  return new_tensor(gradient, {gradient.size(0), gradient.size(1)}, ScalarType::Float);
}

void round_sums(const Tensor& sums, Tensor gradient) {
  if (sums.data_ptr() != gradient.data_ptr()) torch::stable::copy_(gradient, sums);
}

class Launches {
 public:
  Launches(const PackedBackward& call, const PackedIndex& index, const PackedWeights& weights,
           cudaStream_t stream)
      : call_(call), index_(index), weights_(weights), stream_(stream) {}

  // adds: the gradient is a sum in fp32, which this one is added to.
  void grad_Q(const Tensor& gradient, int64_t most, bool adds) const {
    const Sizes& s = call_.in.sizes;
    const bool whole = most >= s.N && !weights_.sums() && !adds;
    const Tensor sums = whole ? gradient : weights_.sums() ? *weights_.sums() : sums_of(gradient);
    for (int64_t first = 0; first < s.N; first += most) {
      const int64_t documents = std::min(most, s.N - first);
      const BackwardPlan plan = plan_of(documents, s.Lq);
      BackwardArgs args = arguments(plan);
      args.N = documents;
      args.by_N = Divider(static_cast<uint32_t>(documents));
      args.winners = advanced(args.winners, first * s.Lq * winner_bytes());
      args.grad = advanced(args.grad, first * args.grad_item_stride * int64_t{sizeof(float)});
      args.spans += first;
      args.grad_Q = gradient.data_ptr();
      args.grad_Q_sums = whole ? nullptr : sums.data_ptr();
      args.adds_to_sums = adds || first > 0;
      check(launch_lowmem(args, call_.in.dtype, plan, stream_), "grad_Q");
    }
    if (weights_.sums()) {
      weights_.finish();
    } else if (!whole) {
      round_sums(sums, gradient);
    }
  }

  void grad_D(const Tensor& gradient, int64_t most, bool adds) const {
    const Sizes& s = call_.in.sizes;
    const bool all_rows = most >= s.Lq, whole = all_rows && !adds;
    const Tensor sums = whole ? gradient : sums_of(gradient);
    const Tensor some = new_tensor(gradient, {all_rows ? 0 : s.N * most}, call_.winners.scalar_type());
    for (int64_t first = 0; first < s.Lq; first += most) {
      const int64_t rows = std::min(most, s.Lq - first);
      const BackwardPlan plan = plan_of(s.N, rows);
      STD_TORCH_CHECK(plan.grad_d_grid <= INT32_MAX,
                      "late_interaction: more than 2^31 - 1 blocks in one backward");
      BackwardArgs args = arguments(plan);
      if (!all_rows) {
        copy_winners_of_rows(some, first, rows);
        args.winners = some.const_data_ptr();
      }
      args.Lq = static_cast<int32_t>(rows);
      args.by_Lq = Divider(static_cast<uint32_t>(rows));
      args.winners_at_once = winners_at_once(args.winners, rows, s.Ld);
      args.Q.data = advanced(args.Q.data, first * args.Q.token_stride * element_bytes(call_.in.dtype));
      args.row_queries += first;
      if (args.q_inverse != nullptr) {
        args.q_inverse = advanced(args.q_inverse, first * int64_t{sizeof(float)});
      }
      args.grad_D = gradient.data_ptr();
      args.grad_D_sums = whole ? nullptr : sums.data_ptr();
      args.adds_to_d_sums = adds || first > 0;
      args.grad_d_blocks = static_cast<int32_t>(plan.grad_d_grid);
      check(launch_lowmem(args, call_.in.dtype, plan, stream_), "grad_D");
    }
    if (!whole) round_sums(sums, gradient);
  }

 private:
  int64_t winner_bytes() const { return static_cast<int64_t>(call_.winners.element_size()); }

  BackwardPlan plan_of(int64_t documents, int64_t rows) const {
    Sizes s = call_.in.sizes;
    s.N = documents;
    s.Lq = rows;
    s.Ld = mean_document(call_.in.sizes);
    BackwardPlan plan = plan_backward(s, call_.in.dtype, reads_in_vectors(call_.in),
                                      call_.in.q_weights.data != nullptr, Backward::lowmem, call_.device);
    plan.grad_d_grid = packed_grad_d_grid(call_.in.sizes, plan);
    return plan;
  }

  // The arguments for all rows and documents, without a gradient to compute.
  BackwardArgs arguments(const BackwardPlan& plan) const {
    BackwardArgs args{};
    take_winners(args, call_.in.sizes, call_.grad_scores, call_.winners);
    take_packed(args, call_.in, plan, index_);
    weights_.add_to(args);
    return args;
  }

  // Copies the winners of rows [first, first + rows) in all documents to `to`, [documents, rows].
  void copy_winners_of_rows(const Tensor& to, int64_t first, int64_t rows) const {
    const Sizes& s = call_.in.sizes;
    const size_t bytes = rows * winner_bytes();
    check(cudaMemcpy2DAsync(to.data_ptr(), bytes,
                            advanced(call_.winners.const_data_ptr(), first * winner_bytes()),
                            s.Lq * winner_bytes(), bytes, s.N, cudaMemcpyDeviceToDevice, stream_),
          "winners of some rows");
  }

  const PackedBackward& call_;
  const PackedIndex& index_;
  const PackedWeights& weights_;
  const cudaStream_t stream_;
};

}  // namespace

void packed_gradients_by_parts(const PackedBackward& call, const PackedParts& parts,
                               const PackedGradients& to, cudaStream_t stream) {
  if (to.Q.numel() == 0 && to.D.numel() == 0) return;
  const PackedIndexBuffers buffers(call.in, to.Q);
  const PackedIndex index = buffers.index(call.in);
  check(launch_packed_index(index, stream), "index of packed sequences");
  const PackedWeights weights(call.in, to, false, stream);
  const Launches launches(call, index, weights, stream);
  if (to.Q.numel() > 0) launches.grad_Q(to.Q, parts.documents, to.adds);
  if (to.D.numel() > 0) launches.grad_D(to.D, parts.rows, to.adds);
}

}  // namespace late_interaction
