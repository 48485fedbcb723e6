// The stages of a backward: plan, norms, gradients, the cast to the inputs' dtype. Nothing here waits for the
// device.
#include "run.h"

#include <cuda_runtime.h>

#include <bit>

#include "../../plan/l2_parts.h"
#include "../primitives/row_norms.h"
#include "../runtime/device.h"
#include "../runtime/stream.h"
#include "gathered_grad_q/args.h"
#include "launch.h"
#include "short_docs/run.h"
#include "tiled_grad_d/launch.h"

namespace late_interaction {

int32_t winners_at_once(const void* winners, int64_t count, int64_t Ld) {
  const auto fit = [&](int64_t n) {
    return !wide_winners(Ld) && count % n == 0 && reinterpret_cast<uintptr_t>(winners) % (2 * n) == 0;
  };
  return fit(4) ? 4 : fit(2) ? 2 : 1;
}

void take_plan(BackwardArgs& args, const BackwardPlan& plan) {
  args.split_bits = std::bit_width(static_cast<unsigned>(plan.split)) - 1;
  args.segments = plan.segments;
  args.segment_bits = std::bit_width(static_cast<unsigned>(plan.segments)) - 1;
  args.warp_capacity = plan.chunk / plan.segments;
  args.chunk = plan.chunk;
  args.compact = plan.compact;
  args.grads_kept = plan.grads_kept;
  args.narrow_list = plan.narrow_list;
  args.memory = plan.memory;
  args.tile_tokens = plan.tile_tokens;
  args.tiles = plan.tiles;
  args.by_tiles = Divider(static_cast<uint32_t>(plan.tiles));
  args.token_step = 1;
  args.by_step = Divider(1);
  args.list_capacity = plan.list_capacity;
}

void take_winners(BackwardArgs& args, const Sizes& s, const Tensor& grad_scores, const Tensor& winners) {
  args.layout = s.layout;
  args.N = s.N;
  args.Nq = static_cast<int32_t>(s.Nq);
  args.Lq = static_cast<int32_t>(s.Lq);
  args.Ld = static_cast<int32_t>(s.Ld);
  args.d = static_cast<int32_t>(s.d);
  args.by_Lq = Divider(static_cast<uint32_t>(s.Lq));
  args.by_N = Divider(static_cast<uint32_t>(s.N));
  args.grad = grad_scores.const_data_ptr();
  args.grad_query_stride = grad_scores.stride(0);
  args.grad_item_stride = grad_scores.dim() == 1 ? 0 : grad_scores.stride(1);
  args.winners = winners.const_data_ptr();
  args.winners_stride = winners.dim() == 3 && s.Lq > 0 ? winners.stride(0) / s.Lq : s.N;
  args.wide_winners = wide_winners(s.Ld);
  args.winners_at_once = winners_at_once(args.winners, s.Lq, s.Ld);
}

namespace {

bool has_weights(const Inputs& in) { return in.q_weights.data != nullptr; }

// The kernels' arguments, but for the plan. Where the call has sums, gradients are added to them.
BackwardArgs backward_args(const GradientCall& call) {
  const Destinations& to = call.to;
  BackwardArgs args{};
  take_winners(args, call.s, call.grad_scores, call.winners);
  args.Q = call.in.Q;
  args.D = call.in.D;
  if (call.need_grad_Q()) args.grad_Q = to.grad_Q.data_ptr();
  if (call.need_grad_D()) args.grad_D = to.grad_D.data_ptr();
  if (to.q_sums) args.grad_Q_sums = to.q_sums->data_ptr();
  if (to.d_sums) args.grad_D_sums = to.d_sums->data_ptr();
  args.adds_to_sums = to.q_sums && !to.first;
  args.adds_to_d_sums = to.d_sums && !to.d_first;
  return args;
}

// grad_Q in the dtype of Q, and the gradient of its weights, from args.grad_Q_sums.
void finish_queries(const GradientCall& call, const BackwardArgs& args, const OptionalTensor& inverse) {
  GradientSums sums{args.grad_Q_sums, inverse ? inverse->data_ptr() : nullptr, false, args.grad_Q};
  sums.weights = call.in.q_weights;
  if (call.to.grad_weights) sums.grad_weights = call.to.grad_weights->data_ptr();
  check(launch_finish_gradients(query_rows(call.in.Q, call.s), call.s.d, call.in.dtype, sums, call.stream),
        "grad_Q in the dtype of Q");
}

// grad_D in the dtype of D, from args.grad_D_sums, which `sums` holds.
void finish_documents(const GradientCall& call, const BackwardArgs& args, const Tensor& sums) {
  if (args.d_inverse != nullptr) {
    const GradientSums from{args.grad_D_sums, args.d_inverse, args.normalized_documents, args.grad_D};
    check(
        launch_finish_gradients(document_rows(call.in.D, call.s), call.s.d, call.in.dtype, from, call.stream),
        "grad_D in the dtype of D");
  } else if (args.grad_D_sums != args.grad_D) {
    Tensor grad_D = call.to.grad_D;  // only rounding is left, for which PyTorch has a kernel
    torch::stable::copy_(grad_D, sums);
  }
}

// Puts the weights of all rows, contiguous, into args.q_inverse, times its inverse norms. The result must
// live until the kernels that read it are launched.
OptionalTensor take_weights(const GradientCall& call, BackwardArgs& args) {
  const WeightView& weights = call.in.q_weights;
  if (!has_weights(call.in)) return std::nullopt;
  const bool behind_each_other =
      weights.token_stride == 1 && (call.s.Nq == 1 || weights.item_stride == call.s.Lq);
  if (behind_each_other && args.q_inverse == nullptr) {
    args.q_inverse = weights.data;
    return std::nullopt;
  }
  const RowsView rows = query_rows(call.in.Q, call.s);
  const Tensor scales = new_tensor(call.grad_scores, {rows.rows}, score_type(call.in.dtype));
  check(launch_weighted_scales(rows, weights, args.q_inverse, call.in.dtype, scales.data_ptr(), call.stream),
        "weights of Q");
  args.q_inverse = scales.data_ptr();
  return scales;
}

// Inverse norms, of Q times weights; they must live until the kernels that read them are launched.
struct InverseNorms {
  OptionalTensor q, d, weighted_q;
};

InverseNorms find_norms(const GradientCall& call, BackwardArgs& args) {
  InverseNorms made;
  const auto norms = [&](const RowsView& rows, const char* of) {
    const Tensor inverse = new_tensor(call.grad_scores, {rows.rows}, score_type(call.in.dtype));
    check(launch_inverse_norms(rows, call.s.d, call.in.dtype, inverse.data_ptr(), call.stream), of);
    return inverse;
  };
  if (call.normalize) {
    made.q = norms(query_rows(call.in.Q, call.s), "norms of Q");
    made.d = norms(document_rows(call.in.D, call.s), "norms of D");
    args.q_inverse = made.q->data_ptr();
    args.d_inverse = made.d->data_ptr();
  }
  made.weighted_q = take_weights(call, args);
  if (call.to.unit_inverse) {
    args.d_inverse = call.to.unit_inverse->data_ptr();
    args.normalized_documents = true;
  }
  return made;
}

// New fp32 sums of grad_Q before rounding, if it needs some and the call has none.
OptionalTensor new_query_sums(const GradientCall& call, bool needed, BackwardArgs& args) {
  if (!needed || call.to.q_sums) return std::nullopt;
  const Tensor sums =
      new_tensor(call.grad_scores, {call.s.Nq * call.s.Lq * call.s.d}, call.grad_scores.scalar_type());
  args.grad_Q_sums = sums.data_ptr();
  return sums;
}

// New sums of grad_D likewise, as zeros where kernels add to them.
OptionalTensor new_document_sums(const GradientCall& call, const BackwardPlan& plan, BackwardArgs& args) {
  if (!call.need_grad_D() || call.to.d_sums) return std::nullopt;
  const bool scatter = plan.method == Backward::unified;
  if (!scatter && !plan.finish_later) return std::nullopt;
  const ScalarType sum_type = score_type(call.in.dtype);
  const bool in_their_dtype = sum_type == call.to.grad_D.scalar_type() && args.d_inverse == nullptr;
  const Tensor sums =
      in_their_dtype ? call.to.grad_D : new_tensor(call.grad_scores, shape_of_documents(call.in), sum_type);
  if (scatter) fill_zero(sums, call.stream);
  args.grad_D_sums = sums.data_ptr();
  return sums;
}

void launch_gradients(const GradientCall& call, const BackwardPlan& plan, const BackwardArgs& args) {
  const bool need_grad_Q = call.need_grad_Q(), need_grad_D = call.need_grad_D();
  if (need_grad_D && plan.method == Backward::unified) {
    check(launch_unified(args, call.in.dtype, plan, call.stream), "gradients");
    return;
  }
  const auto launch = [&](bool grad_Q, bool grad_D) {
    if (!grad_Q && !grad_D) return;
    BackwardArgs part = args;
    if (!grad_Q) part.grad_Q = nullptr;
    part.grad_d_blocks = grad_D ? static_cast<int32_t>(plan.grad_d_grid) : 0;
    check(launch_lowmem(part, call.in.dtype, plan, call.stream), "gradients");
  };
  const bool in_place = need_grad_D && call.to.grad_D.data_ptr() == call.in.D.data;
  if (in_place) launch(need_grad_Q, false);  // reads D, before grad_D overwrites it
  launch(need_grad_Q && !in_place, need_grad_D);
}

// True if the kernels finish grad_Q of rows with weights. Else it is left as sums.
bool finishes_weighted_rows(const GradientCall& call, const BackwardPlan& plan) {
  const Destinations& to = call.to;
  return has_weights(call.in) && !call.normalize && !to.unit_inverse && !to.q_sums && !to.d_sums &&
         plan.method == Backward::lowmem && finishes_weighted_rows(plan, call.in.dtype);
}

void gradients_at_once(const GradientCall& call) {
  const Destinations& to = call.to;
  const bool scaled = call.normalize || to.unit_inverse;
  const BackwardPlan plan =
      plan_backward(call.s, call.in.dtype, reads_in_vectors(call.in), scaled, call.method, call.device);
  check_grid(plan.gather_grid + plan.grad_d_grid);
  BackwardArgs args = backward_args(call);
  take_plan(args, plan);
  if (call.s.layout == Layout::in_batch) {
    // Tokens that win often may be neighbours: each goes to another block.
    args.token_step = plan.tiles;
    args.by_step = Divider(static_cast<uint32_t>(plan.tiles));
  }
  const InverseNorms norms = find_norms(call, args);
  const bool weighs_rows = finishes_weighted_rows(call, plan);
  const bool sums_needed =
      call.need_grad_Q() && (plan.finish_later || (has_weights(call.in) && !weighs_rows));
  const OptionalTensor q_sums = new_query_sums(call, sums_needed, args),
                       d_sums = new_document_sums(call, plan, args);
  if (weighs_rows && to.grad_weights) args.grad_weights = to.grad_weights->data_ptr();
  launch_gradients(call, plan, args);
  const bool rounded = !call.normalize && args.grad_Q_sums == args.grad_Q;
  if (args.grad_Q_sums != nullptr && !rounded && to.last) finish_queries(call, args, norms.q);
  if (args.grad_D_sums != nullptr && to.d_last) finish_documents(call, args, d_sums ? *d_sums : *to.d_sums);
}

// Sets the output for the gradients of weights, if they are needed; for several slices of dims, returns
// partials.
OptionalTensor weight_partials(const GradientCall& call, const TiledGradQPlan& plan, BackwardArgs& args) {
  if (!call.to.grad_weights) return std::nullopt;
  if (plan.slices == 1) {
    args.grad_weights = call.to.grad_weights->data_ptr();
    return std::nullopt;
  }
  const Tensor partials =
      new_tensor(call.grad_scores, {plan.slices, call.s.Nq * call.s.Lq}, ScalarType::Float);
  args.grad_weights = partials.data_ptr();
  return partials;
}

// grad_Q by tiles of query rows, where that is faster. Returns whether it was.
bool tiled_grad_q(const GradientCall& call) {
  if (!call.need_grad_Q() || call.normalize || call.method == Backward::unified) return false;
  const Inputs& in = call.in;
  const bool aligned = readable_in_vectors(in.D, call.s.d, element_bytes(in.dtype), 16);
  const auto plan = plan_tiled_grad_q(call.s, in.dtype, aligned, call.device);
  if (!plan) return false;
  check_grid(plan->grid);
  BackwardArgs args = backward_args(call);
  const OptionalTensor weights = take_weights(call, args);
  const OptionalTensor partials = weight_partials(call, *plan, args);
  check(launch_grad_q_tiled(args, in.dtype, *plan, call.stream), "grad_Q");
  if (call.to.q_sums && call.to.last) finish_queries(call, args, std::nullopt);
  if (partials) {
    check(launch_sum_slices(static_cast<const float*>(partials->data_ptr()), plan->slices,
                            call.s.Nq * call.s.Lq, static_cast<float*>(call.to.grad_weights->data_ptr()),
                            call.stream),
          "gradients of weights");
  }
  return true;
}

// grad_Q of winners' rows that ldmatrix reads from shared memory, where that is faster. Returns whether it
// was.
bool gathered_grad_q(const GradientCall& call) {
  const Inputs& in = call.in;
  if (!call.need_grad_Q() || call.normalize || has_weights(in) || call.method == Backward::unified)
    return false;
  const bool described = readable_in_vectors(in.D, call.s.d, element_bytes(in.dtype), 16) &&
                         fits_tensor_map(in.D, call.s.Ld, call.s.N, in.dtype);
  const auto plan = plan_gathered_grad_q(call.s, in.dtype, described, call.device);
  if (!plan) return false;
  const BackwardArgs args = backward_args(call);
  check(launch_gathered_grad_q<__nv_bfloat16>(args, *plan, call.stream), "grad_Q");
  if (call.to.q_sums && call.to.last) finish_queries(call, args, std::nullopt);
  return true;
}

// grad_D with rows of Q from shared memory, where that is faster. Returns whether it was.
bool tiled_grad_d(const GradientCall& call) {
  if (!call.need_grad_D() || call.normalize || has_weights(call.in) || call.method == Backward::unified ||
      call.to.unit_inverse) {
    return false;
  }
  const TokenView& Q = call.in.Q;
  const Sizes& s = call.s;
  const bool contiguous = Q.token_stride == s.d && Q.item_stride == s.Lq * s.d && is_aligned(Q.data, 16) &&
                          readable_in_vectors(Q, s.d, element_bytes(call.in.dtype), 16) &&
                          !wide_winners(s.Ld);
  const auto plan = plan_tiled_grad_d(s, call.in.dtype, contiguous, call.device);
  if (!plan) return false;
  const BackwardArgs args = backward_args(call);
  const cudaError_t launched = call.in.dtype == Dtype::bf16
                                   ? TiledGradDLauncher<__nv_bfloat16>::grad_d(args, *plan, call.stream)
                                   : TiledGradDLauncher<__half>::grad_d(args, *plan, call.stream);
  check(launched, "grad_D");
  if (call.to.d_sums && call.to.d_last) finish_documents(call, args, *call.to.d_sums);
  return true;
}

Inputs part_of(const Inputs& in, int64_t query, int64_t queries, int64_t document, int64_t documents) {
  Inputs part = in;
  const int64_t element = element_bytes(in.dtype);
  part.sizes.Nq = queries;
  part.sizes.N = documents;
  part.Q.data = static_cast<const uint8_t*>(in.Q.data) + query * in.Q.item_stride * element;
  part.D.data = static_cast<const uint8_t*>(in.D.data) + document * in.D.item_stride * element;
  if (has_weights(in)) {
    const int64_t weight = in.dtype == Dtype::fp64 ? 8 : 4;
    part.q_weights.data =
        static_cast<const uint8_t*>(in.q_weights.data) + query * in.q_weights.item_stride * weight;
  }
  return part;
}

Tensor some_of(const Tensor& x, int64_t dim, int64_t start, int64_t length) {
  if (x.numel() == 0 || length == x.size(dim)) return x;
  Tensor whole = x;
  return torch::stable::narrow(whole, dim, start, length);
}

// Part by part, each of which stays in L2. grad_D of some documents is finished before others begin; grad_Q
// is summed over all.
void gradients_by_parts(const GradientCall& call, const BatchPart& most) {
  const Sizes& s = call.s;
  const Destinations& to = call.to;
  const ScalarType sum_type = score_type(call.in.dtype);
  const bool in_place = sum_type == to.grad_Q.scalar_type() && !call.normalize && !has_weights(call.in);
  const auto new_sums = [&](bool needed, int64_t items, int64_t tokens) {
    return new_tensor(call.grad_scores, {needed ? items : 0, tokens, s.d}, sum_type);
  };
  const Tensor q_sums = to.q_sums  ? *to.q_sums
                        : in_place ? to.grad_Q
                                   : new_sums(call.need_grad_Q(), s.Nq, s.Lq);
  const Tensor d_sums = new_sums(call.need_grad_D() && !in_place && !to.d_sums, most.documents, s.Ld);
  const auto document_sums = [&](const Tensor& grad_D, int64_t j, int64_t documents) {
    if (to.d_sums) return some_of(*to.d_sums, 0, j, documents);
    return in_place ? grad_D : some_of(d_sums, 0, 0, documents);
  };
  for (int64_t j = 0; j < s.N; j += most.documents) {
    const int64_t documents = std::min(most.documents, s.N - j);
    const Tensor grad_D = some_of(to.grad_D, 0, j, documents);
    for (int64_t i = 0; i < s.Nq; i += most.queries) {
      const int64_t queries = std::min(most.queries, s.Nq - i);
      const auto of_part = [&](const Tensor& x) {
        return some_of(some_of(x, 0, i, queries), 1, j, documents);
      };
      const Inputs in = part_of(call.in, i, queries, j, documents);
      const Tensor grads = of_part(call.grad_scores), winners = of_part(call.winners);
      Destinations part{.grad_Q = some_of(to.grad_Q, 0, i, queries), .grad_D = grad_D};
      if (to.grad_weights) part.grad_weights = some_of(*to.grad_weights, 0, i, queries);
      if (call.need_grad_Q()) part.q_sums = some_of(q_sums, 0, i, queries);
      part.first = to.first && j == 0;
      part.last = to.last && j + documents == s.N;
      if (call.need_grad_D()) part.d_sums = document_sums(grad_D, j, documents);
      part.d_first = to.d_first && i == 0;
      part.d_last = to.d_last && i + queries == s.Nq;
      gradients_at_once(
          {in, in.sizes, grads, winners, call.normalize, Backward::lowmem, part, call.device, call.stream});
    }
  }
}

}  // namespace

void backward_into(const Inputs& in, const Tensor& grad_scores, const Tensor& winners, bool normalize,
                   Backward method, const Destinations& to) {
  // Kernels of documents that one query alone meets cannot add to sums of earlier calls.
  const bool sums_go_on = to.q_sums || to.d_sums || to.unit_inverse;
  const Sizes s = sums_go_on ? in.sizes : with_own_documents(in.sizes);
  const int index = grad_scores.get_device_index();
  const cudaStream_t stream = current_stream(index);
  if (winners.numel() == 0 || s.Ld == 0) {
    fill_zero(to.grad_Q, stream);
    if (!to.d_sums) fill_zero(to.grad_D, stream);
    if (to.grad_weights) fill_zero(*to.grad_weights, stream);
    return;
  }
  const Device device = device_properties(index);
  const bool plain = !normalize && !has_weights(in) && !sums_go_on && method != Backward::unified;
  Destinations rest = to;  // what is still to be computed
  const GradientCall call{in, s, grad_scores, winners, normalize, method, rest, device, stream};
  if (plain && lone_query_gradients(call)) return;
  const auto none = [&] { return new_tensor(grad_scores, {0}, to.grad_Q.scalar_type()); };
  const bool q_by_products = plain && short_docs_grad_q(call);
  if (q_by_products || gathered_grad_q(call) || tiled_grad_q(call)) {
    rest.grad_Q = none();
    rest.q_sums = std::nullopt;
    if (!call.need_grad_D()) return;
  }
  // If grad_D overwrites D, grad_Q comes first.
  const bool overwrites_D = to.grad_D.numel() > 0 && to.grad_D.data_ptr() == in.D.data;
  const bool free_to_write = !call.need_grad_Q() || !overwrites_D;
  if (free_to_write &&
      ((plain && short_docs_grad_d(call, q_by_products && !overwrites_D)) || tiled_grad_d(call))) {
    rest.grad_D = none();
    rest.d_sums = std::nullopt;
    if (!call.need_grad_Q()) return;
  }
  const BackwardReads reads = call.need_grad_Q() ? BackwardReads::both_sides : BackwardReads::queries;
  const BatchPart part = backward_part(s, in.dtype, device, reads, to.q_sums || to.d_sums);
  const bool whole = part.queries >= s.Nq && part.documents >= s.N;
  const bool scatter =
      plan_backward(s, in.dtype, reads_in_vectors(in), normalize || to.unit_inverse, method, device).method ==
      Backward::unified;
  if (whole || scatter || to.unit_inverse || overwrites_D) return gradients_at_once(call);
  gradients_by_parts(call, part);
}

std::tuple<Tensor, Tensor> new_gradients(const Tensor& Q, const Inputs& in, bool need_grad_Q,
                                         bool need_grad_D) {
  const std::vector<int64_t> none{0};
  return {new_tensor(Q, need_grad_Q ? shape_of_queries(in) : none, Q.scalar_type()),
          new_tensor(Q, need_grad_D ? shape_of_documents(in) : none, Q.scalar_type())};
}

}  // namespace late_interaction
