// The CUDA side of every operator: parse, plan, allocate, launch. Nothing here waits for the device.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "../common/tensors.h"
#include "../plan/copies.h"
#include "../plan/recompute.h"
#include "backward.h"
#include "calls.h"
#include "device.h"
#include "forward.h"
#include "half_copies.h"
#include "outer_rows.h"
#include "project_rows.h"
#include "stream.h"
#include "unit_rows.h"
#include "won_rows.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;
using Parts = RecomputePlan::Parts;

Multiplied multiplied(const Inputs& in, const std::string& precision, int device) {
  return plan_copies(in.sizes, in.dtype, parse_precision(precision), in.d_mask.data != nullptr,
                     device_properties(device));
}

cudaError_t launch_mma(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  switch (plan.compute) {
    case Compute::bf16:
      return launch_forward_bf16(args, plan, stream);
    case Compute::fp16:
      return launch_forward_fp16(args, plan, stream);
    case Compute::tf32:
      return launch_forward_tf32(args, plan, stream);
    case Compute::tf32x3:
      return launch_forward_tf32x3(args, plan, stream);
    case Compute::fp64:
      return launch_forward_fp64(args, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_wgmma_rows(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const TensorMaps maps = make_tensor_maps(args, plan);
  switch (plan.compute) {
    case Compute::bf16:
      return launch_wgmma_rows_bf16(args, maps, plan, stream);
    case Compute::fp16:
      return launch_wgmma_rows_fp16(args, maps, plan, stream);
    case Compute::e4m3:
      return launch_wgmma_rows_e4m3(args, maps, plan, stream);
    case Compute::e5m2:
      return launch_wgmma_rows_e5m2(args, maps, plan, stream);
    case Compute::int8:
      return launch_wgmma_rows_int8(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_wgmma_documents(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const TensorMaps maps = make_tensor_maps(args, plan);
  switch (plan.compute) {
    case Compute::bf16:
      return launch_wgmma_documents_bf16(args, maps, plan, stream);
    case Compute::fp16:
      return launch_wgmma_documents_fp16(args, maps, plan, stream);
    case Compute::e4m3:
      return launch_wgmma_documents_e4m3(args, maps, plan, stream);
    case Compute::e5m2:
      return launch_wgmma_documents_e5m2(args, maps, plan, stream);
    case Compute::int8:
      return launch_wgmma_documents_int8(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_wgmma_split(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const TensorMaps maps = make_tensor_maps(args, plan);
  switch (plan.compute) {
    case Compute::e4m3:
      return launch_wgmma_split_e4m3(args, maps, plan, stream);
    case Compute::e5m2:
      return launch_wgmma_split_e5m2(args, maps, plan, stream);
    case Compute::int8:
      return launch_wgmma_split_int8(args, maps, plan, stream);
    case Compute::bf16:
      return launch_wgmma_split_bf16(args, maps, plan, stream);
    case Compute::fp16:
      return launch_wgmma_split_fp16(args, maps, plan, stream);
    case Compute::tf32:
      return launch_wgmma_split_tf32(args, maps, plan, stream);
    case Compute::tf32x3:
      return launch_wgmma_exact(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_forward(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  switch (plan.tile) {
    case Tile::wgmma_rows:
      return launch_wgmma_rows(args, plan, stream);
    case Tile::wgmma_documents:
      return launch_wgmma_documents(args, plan, stream);
    case Tile::wgmma_split:
      return launch_wgmma_split(args, plan, stream);
    default:
      return launch_mma(args, plan, stream);
  }
}

std::vector<int64_t> shape_of_documents(const Sizes& s) {
  if (s.layout == Layout::in_batch) return {s.N, s.Ld, s.d};
  return {s.Nq, s.N, s.Ld, s.d};
}

// Room for the visits of documents, and for the copies that some of them read.
struct VisitRoom {
  Tensor visits;
  OptionalTensor tokens, factors, origins;
  CopyRoom copies{};

  VisitRoom(const Inputs& in, const ForwardPlan& plan, const Tensor& like)
      : visits(new_tensor(like, {in.sizes.documents(), 4}, ScalarType::Int)) {
    if (!plan.copied) return;
    const int64_t documents = in.sizes.documents(), least = plan.columns;
    const int64_t slot = in.packed ? least : std::max(in.sizes.Ld, least);
    const int64_t bytes = in.sizes.d * element_bytes(in.dtype);
    tokens = new_tensor(like, {documents, slot, bytes}, ScalarType::Byte);
    origins = new_tensor(like, {documents, slot}, ScalarType::Int);
    if (plan.scaled) factors = new_tensor(like, {documents, slot}, ScalarType::Float);
    copies = {static_cast<uint4*>(tokens->data_ptr()),
              factors ? static_cast<float*>(factors->data_ptr()) : nullptr,
              static_cast<int32_t*>(origins->data_ptr()),
              static_cast<int32_t>(slot),
              static_cast<int32_t>(least),
              static_cast<int32_t>(bytes / 16)};
  }
  Visit* data() const { return static_cast<Visit*>(visits.data_ptr()); }
};

// Works out where packed documents lie, whose each query token is, and how blocks share them.
void index_packed(const Inputs& in, const ForwardPlan& plan, const PackedRoom& room, const VisitRoom& visits,
                  const Tensor& unit_ends, ForwardArgs& args, cudaStream_t stream) {
  PackedIndex index = room.index(in);
  if (plan.tile == Tile::wgmma_rows || plan.tile == Tile::wgmma_documents) {
    index.visits = visits.data();
    index.unit_ends = unit_ends.numel() > 0 ? static_cast<int32_t*>(unit_ends.data_ptr()) : nullptr;
    index.blocks = plan.grid;
    index.row_tiles = plan.row_tiles;
    // Half of its last tile, and its end.
    index.document_tokens = 16 + (plan.tile == Tile::wgmma_rows ? plan.columns / 2 : 16);
    index.dealt = plan.dealt;
    index.copies = visits.copies;
    index.rows = static_cast<const uint4*>(in.D.data);
    index.row_stride = in.D.token_stride * element_bytes(in.dtype) / 16;
  }
  check(launch_packed_index(index, stream), "index of packed sequences");
  args.packed = true;
  args.queries = static_cast<int32_t>(index.queries);
  args.q_offsets = index.q_offsets;
  args.row_queries = index.row_queries;
  args.spans = index.spans;
  args.unit_ends = index.unit_ends;
  args.visits = index.visits;
  args.copies = index.copies;
}

// What similarities are multiplied by, as kernels/factors.cuh has it.
struct Factors {
  ScaleView q, d;
  const float* shared = nullptr;
};

// A document of mean length stands for all of them.
ForwardPlan plan_call(const Inputs& in, const ForwardTraits& traits, int device) {
  if (!in.packed) return plan_forward(in.sizes, traits, device_properties(device));
  Sizes mean = in.sizes;
  mean.Ld = std::max<int64_t>(1, mean.Ld / mean.N);
  if (in.dtype == Dtype::fp64) mean.Nq = in.packed->queries;
  return plan_forward(mean, traits, device_properties(device));
}

// Fills scores, and winners where given; or, of packed inputs, what `pick` picks from them. The inputs are in
// the dtype that they multiply in.
void forward_into(const Inputs& in, bool normalize, const Factors& factors, Precision precision,
                  const Tensor& like, const Tensor& scores, const OptionalTensor& winners,
                  const PairPick* pick = nullptr) {
  const Sizes& s = in.sizes;
  const int device = like.get_device_index();
  const cudaStream_t stream = current_stream(device);
  // Nothing to find: every score is an empty sum, every winner the sentinel.
  if (scores.numel() == 0 || s.Lq == 0 || s.Ld == 0) {
    fill_zero(scores, stream);
    if (winners) fill_sentinel(*winners, stream);
    return;
  }
  const ForwardTraits traits = traits_of(in, precision, normalize || factors.d.data != nullptr);
  const ForwardPlan plan = plan_call(in, traits, device);
  STD_TORCH_CHECK(plan.grid <= INT32_MAX, "late_interaction: more than 2^31 - 1 fp64 scores in one call");
  ForwardArgs args{};
  args.layout = s.layout;
  args.N = s.N;
  args.Nq = static_cast<int32_t>(s.Nq);
  args.Lq = static_cast<int32_t>(s.Lq);
  args.Ld = static_cast<int32_t>(s.Ld);
  args.d = static_cast<int32_t>(s.d);
  args.Q = in.Q;
  args.D = in.D;
  args.q_mask = in.q_mask;
  args.d_mask = in.d_mask;
  args.normalize = normalize;
  args.q_aligned = aligned(in.Q, in);
  args.d_aligned = aligned(in.D, in);
  args.q_factors = factors.q;
  args.d_factors = factors.d;
  args.shared_factor = factors.shared;
  args.wide_winners = wide_winners(s.Ld);
  args.winners = winners ? winners->data_ptr() : nullptr;
  args.parts = plan.parts;
  args.chunks = plan.chunks;
  args.stages = plan.stages;
  args.stream_q = plan.stream_q;
  args.cluster = plan.cluster;
  args.row_tiles = plan.row_tiles;
  args.units = plan.units;
  OptionalTensor q_inverse, d_inverse;
  if (normalize && plan.tile != Tile::none && plan.tile != Tile::wgmma_documents) {  // which do it themselves
    BackwardArgs rows{};
    rows.layout = s.layout;
    rows.N = s.N;
    rows.Nq = args.Nq;
    rows.Lq = args.Lq;
    rows.Ld = args.Ld;
    rows.d = args.d;
    rows.Q = in.Q;
    rows.D = in.D;
    const auto norms = [&](bool documents, int64_t count) {
      const Tensor inverse = new_tensor(scores, {count}, ScalarType::Float);
      check(launch_inverse_norms(rows, in.dtype, documents, inverse.data_ptr(), stream), "norms");
      return inverse;
    };
    q_inverse = norms(false, s.Nq * s.Lq);
    args.q_factors = {static_cast<const float*>(q_inverse->data_ptr()), 0, s.Lq, 1};
    if (plan.tile == Tile::wgmma_rows || plan.tile == Tile::wgmma_split) {
      d_inverse = norms(true, s.documents() * s.Ld);
      const int64_t query_stride = s.layout == Layout::per_query ? s.N * s.Ld : 0;
      args.d_factors = {static_cast<const float*>(d_inverse->data_ptr()), query_stride, s.Ld, 1};
    }
  }
  std::optional<PackedRoom> packed;
  std::optional<VisitRoom> visits;
  OptionalTensor unit_ends;
  if (in.packed) {
    packed.emplace(in, scores);
    visits.emplace(in, plan, scores);
    unit_ends = new_tensor(scores, {plan.units <= INT32_MAX ? plan.grid : 0}, ScalarType::Int);
    index_packed(in, plan, *packed, *visits, *unit_ends, args, stream);
    // A block of its own for each query and document: tokens of no query have none.
    if (plan.tile == Tile::none && winners) fill_sentinel(*winners, stream);
  } else if (plan.trimmed || plan.copied) {
    visits.emplace(in, plan, scores);
    check(launch_visits(args, s.documents(), visits->copies, visits->data(), stream), "visits");
    args.visits = visits->data();
    args.copies = visits->copies;
  }
  // Of packed queries no one knows how many parts they have, but where these lie they need no more than this.
  const bool in_parts = in.packed ? plan.tile != Tile::none && s.Lq > plan.part_rows : plan.parts > 1;
  if (in.packed) args.parts = 1;
  const auto pick_from = [&](const Tensor& grid, int part_rows) {
    PairPick from = *pick;
    from.grid = static_cast<const float*>(grid.const_data_ptr());
    from.grid_winners = args.winners;
    from.part_rows = part_rows;
    check(launch_pick_pairs(from, stream), "picked pairs");
  };
  if (!in_parts) {
    args.scores = scores.data_ptr();
    check(launch_forward(args, plan, stream), "forward");
    if (pick != nullptr) pick_from(scores, 0);
    return;
  }
  if (in.packed) {
    const int64_t warps = (s.Lq + plan.part_rows - 1) / plan.part_rows;
    const Tensor parts = new_tensor(scores, {warps + in.packed->queries, s.N}, ScalarType::Float);
    args.scores = parts.data_ptr();
    check(launch_forward(args, plan, stream), "forward");
    if (pick != nullptr) return pick_from(parts, plan.part_rows);
    float* sums = static_cast<float*>(scores.data_ptr());
    check(launch_sum_packed_parts(args, plan.part_rows, sums, stream), "sum of parts");
    return;
  }
  const Tensor parts = new_tensor(scores, {s.Nq, plan.parts, s.N}, ScalarType::Float);
  args.scores = parts.data_ptr();
  check(launch_forward(args, plan, stream), "forward");
  check(launch_sum_parts(args, plan, static_cast<float*>(scores.data_ptr()), stream), "sum of parts");
}

// The same for inputs that multiply as they are or as copies.
void score_into(const Tensor& Q, const Tensor& D, const OptionalTensor& q_mask, const OptionalTensor& d_mask,
                const Inputs& in, bool normalize, const Multiplied& how, const Tensor& scores,
                const OptionalTensor& winners) {
  if (how.copies == Copies::none) {
    forward_into(in, normalize, {}, how.precision, Q, scores, winners);
    return;
  }
  if (how.copies != Copies::scaled_fp16) {
    const ScalarType type = how.copies == Copies::bf16 ? ScalarType::BFloat16 : ScalarType::Half;
    const Tensor half_Q = torch::stable::to(Q, type), half_D = torch::stable::to(D, type);
    const Inputs copies = parse_inputs(half_Q, half_D, q_mask, d_mask);
    forward_into(copies, normalize, {}, how.precision, Q, scores, winners);
    return;
  }
  const Sizes& s = in.sizes;
  const Tensor half_Q = new_tensor(Q, {s.Nq, s.Lq, s.d}, ScalarType::Half);
  const Tensor half_D = new_tensor(D, shape_of_documents(s), ScalarType::Half);
  const Tensor factors = new_tensor(Q, {s.Nq * s.Lq + 2}, ScalarType::Float);
  float* of_rows = static_cast<float*>(factors.data_ptr());
  float* of_documents = of_rows + s.Nq * s.Lq;
  const HalfCopies copies{.Q = in.Q,
                          .D = in.D,
                          .d_mask = in.d_mask,
                          .half_Q = half_Q.data_ptr(),
                          .half_D = half_D.data_ptr(),
                          .q_factors = of_rows,
                          .d_factor = of_documents,
                          .largest = reinterpret_cast<uint32_t*>(of_documents + 1)};
  check(launch_half_copies(copies, s, normalize, current_stream(Q.get_device_index())), "fp16 copies");
  const Factors scales{{of_rows, 0, s.Lq, 1}, {}, of_documents};
  const Inputs halves = parse_inputs(half_Q, half_D, q_mask, d_mask);
  forward_into(halves, false, normalize ? Factors{} : scales, how.precision, Q, scores, winners);
}

}  // namespace

void pick_from_grid(const PairInputs& in, Precision precision, const PairPick& pick, const Tensor& like) {
  const Tensor grid = new_tensor(like, {in.pairs.queries, in.pairs.documents}, ScalarType::Float);
  OptionalTensor winners;
  if (pick.winners != nullptr) {
    winners = new_tensor(like, {in.sizes.N, in.sizes.Lq}, winner_type(in.sizes.Ld));
  }
  forward_into(in, false, {}, precision, like, grid, winners, &pick);
}

namespace {

std::tuple<Tensor, OptionalTensor> forward(const Tensor& Q, const Tensor& D, const OptionalTensor& q_mask,
                                           const OptionalTensor& d_mask, bool normalize,
                                           const std::string& precision_name, bool want_winners) {
  const Inputs in = parse_inputs(Q, D, q_mask, d_mask);
  const Multiplied how = multiplied(in, precision_name, Q.get_device_index());
  const DeviceGuard guard(Q.get_device_index());
  const Sizes& s = in.sizes;
  const Tensor scores = new_tensor(Q, {s.Nq, s.N}, score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) winners = new_tensor(Q, {s.Nq, s.N, s.Lq}, winner_type(s.Ld));
  score_into(Q, D, q_mask, d_mask, in, normalize, how, scores, winners);
  return {scores, winners};
}

std::tuple<Tensor, OptionalTensor> forward_varlen(const Tensor& Q, const Tensor& D,
                                                  const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d,
                                                  const std::string& precision_name, bool want_winners) {
  const Precision precision = parse_precision(precision_name);
  Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  const DeviceGuard guard(Q.get_device_index());
  const Tensor scores = new_tensor(Q, {in.packed->queries, in.sizes.N}, score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) winners = new_tensor(Q, {in.sizes.N, in.sizes.Lq}, winner_type(in.sizes.Ld));
  if (const auto type = converted(in.dtype, precision)) {
    const Tensor half_Q = torch::stable::to(Q, *type), half_D = torch::stable::to(D, *type);
    in = parse_packed(half_Q, half_D, cu_seqlens_q, cu_seqlens_d);
    forward_into(in, false, {}, precision, Q, scores, winners);
  } else {
    forward_into(in, false, {}, precision, Q, scores, winners);
  }
  return {scores, winners};
}

Tensor maxsim_varlen(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d, std::string precision) {
  return std::get<0>(forward_varlen(Q, D, cu_seqlens_q, cu_seqlens_d, precision, false));
}

std::tuple<Tensor, Tensor> maxsim_varlen_winners(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                                                 std::string precision) {
  auto [scores, winners] = forward_varlen(Q, D, cu_seqlens_q, cu_seqlens_d, precision, true);
  return {scores, *winners};
}

Tensor maxsim(Tensor Q, Tensor D, OptionalTensor q_mask, OptionalTensor d_mask, bool normalize,
              std::string precision, std::string backward) {
  parse_backward(backward);
  return std::get<0>(forward(Q, D, q_mask, d_mask, normalize, precision, false));
}

std::tuple<Tensor, Tensor> maxsim_winners(Tensor Q, Tensor D, OptionalTensor q_mask, OptionalTensor d_mask,
                                          bool normalize, std::string precision, std::string backward) {
  parse_backward(backward);
  auto [scores, winners] = forward(Q, D, q_mask, d_mask, normalize, precision, true);
  return {scores, *winners};
}

bool one_for_all(const ScaleView& scale) {
  return scale.query_stride == 0 && scale.item_stride == 0 && scale.token_stride == 0;
}

// Whether codes are multiplied as they are.
bool has_kernel(const Inputs& in, bool scaled, int device) {
  const Sizes& s = in.sizes;
  if (s.Nq == 0 || s.N == 0 || s.Lq == 0 || s.Ld == 0) return true;  // nothing is
  const ForwardTraits traits = traits_of(in, Precision::highest, scaled);
  return plan_forward(s, traits, device_properties(device)).tile != Tile::copies;
}

// By way of float32 copies, in Python.
Tensor maxsim_dequantized(const Tensor& Q, const Tensor& D, const Tensor& scale_Q, const Tensor& scale_D,
                          const OptionalTensor& q_mask, const OptionalTensor& d_mask) {
  using torch::stable::detail::from;
  std::array<StableIValue, 6> stack{from(Q),       from(D),      from(scale_Q),
                                    from(scale_D), from(q_mask), from(d_mask)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("late_interaction::maxsim_dequantized", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor maxsim_quantized(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                        OptionalTensor d_mask) {
  const QuantizedInputs in = parse_quantized_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask);
  const DeviceGuard guard(Q.get_device_index());
  // No factor is negative, so one that all documents' tokens share waits until their maximum is found.
  const bool shared = one_for_all(in.d_scale);
  const Factors factors{in.q_scale, shared ? ScaleView{} : in.d_scale, shared ? in.d_scale.data : nullptr};
  if (!has_kernel(in, !shared, Q.get_device_index())) {
    return maxsim_dequantized(Q, D, scale_Q, scale_D, q_mask, d_mask);
  }
  const Tensor scores = new_tensor(Q, {in.sizes.Nq, in.sizes.N}, ScalarType::Float);
  forward_into(in, false, factors, Precision::highest, Q, scores, std::nullopt);
  return scores;
}

// And from the sizes, the gradients of the scores and the winners.
void take_winners(BackwardArgs& args, const Sizes& s, const Tensor& grad_scores, const Tensor& winners) {
  args.layout = s.layout;
  args.N = s.N;
  args.Nq = static_cast<int32_t>(s.Nq);
  args.Lq = static_cast<int32_t>(s.Lq);
  args.Ld = static_cast<int32_t>(s.Ld);
  args.d = static_cast<int32_t>(s.d);
  args.by_Lq = Divider(static_cast<uint32_t>(s.Lq));
  args.grad = grad_scores.const_data_ptr();
  args.grad_query_stride = grad_scores.stride(0);
  args.grad_item_stride = grad_scores.stride(1);
  args.winners = winners.const_data_ptr();
  args.wide_winners = wide_winners(s.Ld);
  args.winners_in_fours =
      !args.wide_winners && s.Lq % 4 == 0 && reinterpret_cast<uintptr_t>(args.winners) % 8 == 0;
}

// Where the gradients of a backward go, and how D comes.
struct Destinations {
  Tensor grad_Q, grad_D;        // with zero elements: not needed
  OptionalTensor unit_inverse;  // D holds unit rows, these are the inverse norms that they had
  OptionalTensor won;           // which tokens hold a gradient
  // grad_Q of several calls with documents of their own: summed up here, and finished by the last one.
  OptionalTensor q_sums = std::nullopt;
  bool first = true, last = true;
};

void backward_into(const Inputs& in, const Tensor& grad_scores, const Tensor& winners, bool normalize,
                   Backward method, const Destinations& to) {
  const Sizes& s = in.sizes;
  const Tensor& like = grad_scores;
  const int device = like.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const ScalarType sum_type = score_type(in.dtype);
  const bool need_grad_Q = to.grad_Q.numel() > 0, need_grad_D = to.grad_D.numel() > 0;
  if (winners.numel() == 0 || s.Ld == 0 || s.d == 0) {
    fill_zero(to.grad_Q, stream);
    fill_zero(to.grad_D, stream);
    if (to.won) fill_zero(*to.won, stream);
    return;
  }

  const int64_t element = element_bytes(in.dtype), vector = element == 8 ? 16 : 4 * element;
  const bool vectors =
      reads_in_pieces(in.Q, s.d, element, vector) && reads_in_pieces(in.D, s.d, element, vector);
  const bool through_norm = normalize || to.unit_inverse;
  const BackwardPlan plan =
      plan_backward(s, in.dtype, vectors, through_norm, method, device_properties(device));
  STD_TORCH_CHECK(plan.gather_grid + plan.owned_grid <= INT32_MAX,
                  "late_interaction: more than 2^31 - 1 blocks in one backward");

  BackwardArgs args{};
  take_winners(args, s, grad_scores, winners);
  take_plan(args, plan);
  if (s.layout == Layout::in_batch) {  // tokens that win often may be neighbours: each goes to another block
    args.token_step = plan.tiles;
    args.by_step = Divider(static_cast<uint32_t>(plan.tiles));
  }
  args.Q = in.Q;
  args.D = in.D;
  args.grad_Q = need_grad_Q ? to.grad_Q.data_ptr() : nullptr;
  args.grad_D = need_grad_D ? to.grad_D.data_ptr() : nullptr;
  args.won = to.won ? static_cast<uint8_t*>(to.won->data_ptr()) : nullptr;

  OptionalTensor q_inverse, d_inverse, q_sums = to.q_sums, d_sums;
  if (normalize) {
    q_inverse = new_tensor(like, {s.Nq * s.Lq}, sum_type);
    d_inverse = new_tensor(like, {s.documents() * s.Ld}, sum_type);
    check(launch_inverse_norms(args, in.dtype, false, q_inverse->data_ptr(), stream), "norms of Q");
    check(launch_inverse_norms(args, in.dtype, true, d_inverse->data_ptr(), stream), "norms of D");
    args.q_inverse = q_inverse->data_ptr();
    args.d_inverse = d_inverse->data_ptr();
  }
  if (to.unit_inverse) {
    args.d_inverse = to.unit_inverse->data_ptr();
    args.unit_documents = true;
  }
  if (need_grad_Q && plan.finish_later && !q_sums) q_sums = new_tensor(like, {s.Nq * s.Lq * s.d}, sum_type);
  if (q_sums) {
    args.grad_Q_sums = q_sums->data_ptr();
    args.adds_to_sums = !to.first;
  }
  const bool scatter = need_grad_D && plan.method == Backward::unified;
  if (scatter || (need_grad_D && plan.finish_later)) {
    d_sums = new_tensor(like, {s.documents() * s.Ld * s.d}, sum_type);
    if (scatter) fill_zero(*d_sums, stream);
    args.grad_D_sums = d_sums->data_ptr();
  }

  if (scatter) {
    check(launch_unified(args, in.dtype, plan, stream), "gradients");
  } else {
    const auto launch = [&](bool grad_Q, bool grad_D) {
      if (!grad_Q && !grad_D) return;
      BackwardArgs part = args;
      if (!grad_Q) part.grad_Q = nullptr;
      part.owned_blocks = grad_D ? static_cast<int32_t>(plan.owned_grid) : 0;
      check(launch_lowmem(part, in.dtype, plan, stream), "gradients");
    };
    const bool in_place = need_grad_D && to.grad_D.data_ptr() == in.D.data;
    if (in_place) launch(need_grad_Q, false);  // which reads D, before grad_D takes its place
    launch(need_grad_Q && !in_place, need_grad_D);
  }
  const bool finished = normalize ? !q_sums : args.grad_Q_sums == nullptr || args.grad_Q_sums == args.grad_Q;
  if (!finished && to.last) check(launch_finish(args, in.dtype, false, stream), "grad_Q in the dtype of Q");
  if (d_sums) check(launch_finish(args, in.dtype, true, stream), "grad_D in the dtype of D");
}

// Room for the gradients that are needed; the others have no elements.
std::tuple<Tensor, Tensor> new_gradients(const Tensor& Q, const Tensor& D, const Sizes& s, bool need_grad_Q,
                                         bool need_grad_D) {
  const std::vector<int64_t> shape_Q{s.Nq, s.Lq, s.d}, none{0};
  return {new_tensor(Q, need_grad_Q ? shape_Q : none, Q.scalar_type()),
          new_tensor(D, need_grad_D ? shape_of_documents(s) : none, D.scalar_type())};
}

std::tuple<Tensor, Tensor> maxsim_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor winners,
                                           bool normalize, std::string backward, bool need_grad_Q,
                                           bool need_grad_D) {
  const Inputs in = parse_inputs(Q, D, std::nullopt, std::nullopt);
  check_backward_inputs(grad_scores, Q, winners, in);
  const DeviceGuard guard(Q.get_device_index());
  const auto [grad_Q, grad_D] = new_gradients(Q, D, in.sizes, need_grad_Q, need_grad_D);
  backward_into(in, grad_scores, winners, normalize, parse_backward(backward),
                {.grad_Q = grad_Q, .grad_D = grad_D, .unit_inverse = std::nullopt, .won = std::nullopt});
  return {grad_Q, grad_D};
}

Tensor part_of(const Tensor& x, int64_t start, int64_t length) {
  if (length == x.size(0)) return x;
  Tensor whole = x;
  return torch::stable::narrow(whole, 0, start, length);
}

OptionalTensor part_of(const OptionalTensor& x, int64_t start, int64_t length) {
  return x ? OptionalTensor(part_of(*x, start, length)) : std::nullopt;
}

std::tuple<Tensor, Tensor> maxsim_backward_recompute(Tensor grad_scores, Tensor Q, Tensor D,
                                                     OptionalTensor q_mask, OptionalTensor d_mask,
                                                     bool normalize, std::string precision,
                                                     std::string backward, bool need_grad_Q,
                                                     bool need_grad_D) {
  // Who keeps no winners wants the memory.
  const Backward method =
      parse_backward(backward) == Backward::unified ? Backward::unified : Backward::lowmem;
  const Inputs in = parse_inputs(Q, D, q_mask, d_mask);
  const Sizes& s = in.sizes;
  check_grad_scores(grad_scores, Q, in);
  const DeviceGuard guard(Q.get_device_index());
  const bool in_batch = s.layout == Layout::in_batch;
  const ScalarType sum_type = score_type(in.dtype);
  const bool summed_in_place = sum_type == Q.scalar_type();
  // Half-precision copies, and copies of the tokens that a mask keeps.
  const Multiplied how = multiplied(in, precision, Q.get_device_index());
  const bool halved = how.copies != Copies::none;
  const int64_t copy = s.Ld * (2 * s.d + 8), norms = normalize ? 4 * s.Ld : 0;
  const RecomputeBytes bytes{.sum = summed_in_place ? 0 : 4,
                             .query = halved ? s.Lq * (2 * s.d + 4) : 0,
                             .forward = norms + (int64_t{halved} + d_mask.has_value()) * copy,
                             .backward = norms};
  const RecomputePlan plan = method == Backward::unified
                                 ? RecomputePlan{Parts::none, s.Nq, s.N}
                                 : plan_recompute(s, bytes, need_grad_Q && need_grad_D);

  Tensor grad_Q, grad_D;
  OptionalTensor sums;
  bool allocated = false;
  // Winners of some queries with some documents, found again, and what follows from them.
  const auto take = [&](int64_t i, int64_t queries, int64_t j, int64_t documents, bool to_Q, bool to_D) {
    const auto of_documents = [&](const auto& x) {
      return in_batch ? part_of(x, j, documents) : part_of(x, i, queries);
    };
    const Tensor part_Q = part_of(Q, i, queries), part_D = of_documents(D);
    const OptionalTensor part_q_mask = part_of(q_mask, i, queries), part_d_mask = of_documents(d_mask);
    const Inputs part = parse_inputs(part_Q, part_D, part_q_mask, part_d_mask);
    const Tensor winners = new_tensor(Q, {queries, documents, s.Lq}, winner_type(s.Ld));
    {
      const Tensor scores = new_tensor(Q, {queries, documents}, sum_type);
      score_into(part_Q, part_D, part_q_mask, part_d_mask, part, normalize, how, scores, winners);
    }
    if (!allocated) {
      std::tie(grad_Q, grad_D) = new_gradients(Q, D, s, need_grad_Q, need_grad_D);
      if (plan.parts == Parts::documents) {
        sums = summed_in_place ? grad_Q : new_tensor(Q, {s.Nq, s.Lq, s.d}, sum_type);
      }
      allocated = true;
    }
    Tensor grads = part_of(grad_scores, i, queries);
    if (documents < s.N) grads = torch::stable::narrow(grads, 1, j, documents);
    const Tensor none = new_tensor(Q, {0}, Q.scalar_type());
    backward_into(part, grads, winners, normalize, method,
                  {.grad_Q = to_Q ? part_of(grad_Q, i, queries) : none,
                   .grad_D = to_D ? of_documents(grad_D) : none,
                   .unit_inverse = std::nullopt,
                   .won = std::nullopt,
                   .q_sums = sums,
                   .first = j == 0,
                   .last = j + documents == s.N});
  };
  const auto take_queries = [&](bool to_Q, bool to_D) {
    for (int64_t i = 0; i < s.Nq; i += plan.queries) {
      take(i, std::min(plan.queries, s.Nq - i), 0, s.N, to_Q, to_D);
    }
  };
  const auto take_documents = [&](bool to_Q, bool to_D) {
    for (int64_t j = 0; j < s.N; j += plan.documents) {
      take(0, s.Nq, j, std::min(plan.documents, s.N - j), to_Q, to_D);
    }
  };

  switch (plan.parts) {
    case Parts::none:
      take(0, s.Nq, 0, s.N, need_grad_Q, need_grad_D);
      break;
    case Parts::queries:
      take_queries(need_grad_Q, need_grad_D);
      break;
    case Parts::documents:
      take_documents(true, true);
      break;
    case Parts::apart:
      if (need_grad_Q) take_queries(true, false);
      if (need_grad_D) take_documents(false, true);
      break;
  }
  return {grad_Q, grad_D};
}

std::tuple<Tensor, Tensor> maxsim_backward_unit_(Tensor grad_scores, Tensor Q, Tensor D,
                                                 OptionalTensor inverse, Tensor winners, bool need_grad_Q,
                                                 bool need_grad_D) {
  const Inputs in = parse_inputs(Q, D, std::nullopt, std::nullopt);
  check_backward_inputs(grad_scores, Q, winners, in);
  const Sizes& s = in.sizes;
  STD_TORCH_CHECK(s.layout == Layout::in_batch && D.is_contiguous(),
                  "late_interaction: D must be a contiguous [Nd, Ld, d]");
  STD_TORCH_CHECK(
      !inverse || (inverse->dim() == 1 && inverse->size(0) == s.N * s.Ld && inverse->is_contiguous() &&
                   same_place(*inverse, D) && inverse->scalar_type() == score_type(in.dtype)),
      "late_interaction: inverse must be what unit_rows_ returned");
  const DeviceGuard guard(Q.get_device_index());
  const Tensor none = new_tensor(Q, {0}, Q.scalar_type());
  const Destinations to{
      .grad_Q = need_grad_Q ? new_tensor(Q, {s.Nq, s.Lq, s.d}, Q.scalar_type()) : none,
      .grad_D = need_grad_D ? D : none,
      .unit_inverse = inverse,
      .won = need_grad_D ? OptionalTensor(new_tensor(Q, {s.N * s.Ld}, ScalarType::Bool)) : std::nullopt};
  backward_into(in, grad_scores, winners, false, Backward::lowmem, to);
  return {to.grad_Q, to.won ? *to.won : new_tensor(Q, {0}, ScalarType::Bool)};
}

void check_rows(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "late_interaction: ", name,
                  " must be a contiguous [rows, d]");
}

Tensor unit_rows_(Tensor x) {
  check_rows(x, "x");
  const Dtype dtype = parse_dtype(x.scalar_type());
  const int device = x.get_device_index();
  const DeviceGuard guard(device);
  const Tensor inverse = new_tensor(x, {x.size(0)}, score_type(dtype));
  if (x.numel() > 0) {
    check(launch_unit_rows(dtype, x.mutable_data_ptr(), x.size(0), x.size(1), inverse.mutable_data_ptr(),
                           current_stream(device)),
          "unit rows");
  }
  return inverse;
}

// Rows of whole, aligned 16 bytes of half precision.
bool in_whole_pieces(const Tensor& x) {
  return (x.stride(1) == 1 || x.size(1) == 1) && x.size(1) % 8 == 0 && x.stride(0) % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

bool can_project_rows(Tensor hidden, Tensor W, OptionalTensor b) {
  const ScalarType dtype = hidden.scalar_type();
  return device_properties(hidden.get_device_index()).wgmma &&
         (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half) && W.scalar_type() == dtype &&
         (!b || (b->scalar_type() == dtype && b->is_contiguous())) && hidden.dim() == 2 && W.dim() == 2 &&
         in_whole_pieces(hidden) && in_whole_pieces(W) && W.size(0) % 8 == 0 && W.size(0) <= kProjectedDims &&
         W.size(1) <= INT32_MAX && hidden.size(0) <= INT32_MAX;
}

Tensor project_rows_(Tensor rows, Tensor hidden, Tensor W, OptionalTensor b, OptionalTensor wanted,
                     bool normalize) {
  check_rows(rows, "rows");
  STD_TORCH_CHECK(can_project_rows(hidden, W, b),
                  "late_interaction: can_project_rows says no to these hidden, W and b");
  STD_TORCH_CHECK(rows.size(0) == hidden.size(0) && rows.size(1) == W.size(0) &&
                      hidden.size(1) == W.size(1) && rows.scalar_type() == hidden.scalar_type(),
                  "late_interaction: rows must be [rows, d], hidden [rows, d_model] and W [d, d_model]");
  STD_TORCH_CHECK(!b || (b->dim() == 1 && b->size(0) == W.size(0)), "late_interaction: b must be [d]");
  STD_TORCH_CHECK(!wanted || (wanted->dim() == 1 && wanted->size(0) == rows.size(0) &&
                              wanted->is_contiguous() && wanted->scalar_type() == ScalarType::Bool),
                  "late_interaction: wanted must be a contiguous bool [rows]");
  STD_TORCH_CHECK(same_place(rows, hidden) && same_place(W, hidden) && (!b || same_place(*b, hidden)) &&
                      (!wanted || same_place(*wanted, hidden)),
                  "late_interaction: rows, hidden, W, b and wanted must be on one device");
  const int device = hidden.get_device_index();
  const DeviceGuard guard(device);
  const Tensor inverse = new_tensor(rows, {normalize ? rows.size(0) : 0}, ScalarType::Float);
  if (rows.numel() == 0) return inverse;
  const ProjectArgs args{.hidden = hidden.const_data_ptr(),
                         .bias = b ? b->const_data_ptr() : nullptr,
                         .wanted = wanted ? static_cast<const uint8_t*>(wanted->const_data_ptr()) : nullptr,
                         .out = rows.mutable_data_ptr(),
                         .inverse = normalize ? static_cast<float*>(inverse.mutable_data_ptr()) : nullptr,
                         .rows = rows.size(0),
                         .hidden_stride = hidden.stride(0),
                         .d = static_cast<int32_t>(W.size(0)),
                         .d_model = static_cast<int32_t>(W.size(1))};
  const Dtype dtype = parse_dtype(rows.scalar_type());
  const Compute compute = dtype == Dtype::bf16 ? Compute::bf16 : Compute::fp16;
  const ProjectMaps maps{
      .hidden =
          make_row_map(args.hidden, compute, args.rows, args.d_model, args.hidden_stride, kHiddenBoxRows),
      .weight = make_row_map(W.const_data_ptr(), compute, args.d, args.d_model, W.stride(0), kProjectedDims)};
  check(launch_project_rows(dtype, args, maps, device_properties(device).sm_count, current_stream(device)),
        "project rows");
  return inverse;
}

Tensor won_rows(Tensor winners, int64_t Ld) {
  STD_TORCH_CHECK(winners.dim() == 3 && winners.is_contiguous(),
                  "late_interaction: winners must be a contiguous [Nq, Nd, Lq]");
  const bool wide = winners.element_size() == 4;
  STD_TORCH_CHECK(wide || winners.element_size() == 2,
                  "late_interaction: winners must be as a forward saved");
  const int device = winners.get_device_index();
  const DeviceGuard guard(device);
  const Tensor won = new_tensor(winners, {winners.size(1) * Ld}, ScalarType::Bool);
  fill_zero(won, current_stream(device));
  if (won.numel() > 0 && winners.numel() > 0) {
    check(launch_won_rows(winners.const_data_ptr(), wide, winners.size(0), winners.size(1), winners.size(2),
                          Ld, static_cast<uint8_t*>(won.mutable_data_ptr()), current_stream(device)),
          "won rows");
  }
  return won;
}

void outer_rows_(Tensor parts, Tensor grad, Tensor hidden, Tensor wanted, bool fresh) {
  check_rows(grad, "grad");
  const Dtype dtype = parse_dtype(grad.scalar_type());
  const int64_t rows = grad.size(0), d = grad.size(1);
  STD_TORCH_CHECK(dtype == Dtype::bf16 || dtype == Dtype::fp16,
                  "late_interaction: grad must be bfloat16 or float16");
  STD_TORCH_CHECK(hidden.dim() == 2 && hidden.size(0) == rows && hidden.scalar_type() == grad.scalar_type(),
                  "late_interaction: hidden must be [rows, d_model], as grad is [rows, d]");
  const int64_t d_model = hidden.size(1);
  STD_TORCH_CHECK(in_whole_pieces(grad) && in_whole_pieces(hidden),
                  "late_interaction: rows of grad and hidden must be whole, aligned 16 bytes");
  STD_TORCH_CHECK(wanted.dim() == 1 && wanted.size(0) == rows && wanted.is_contiguous() &&
                      wanted.scalar_type() == ScalarType::Bool,
                  "late_interaction: wanted must be a contiguous bool [rows]");
  STD_TORCH_CHECK(parts.dim() == 3 && parts.size(1) == d && parts.size(2) == d_model &&
                      parts.is_contiguous() && parts.scalar_type() == ScalarType::Float,
                  "late_interaction: parts must be a contiguous float32 [splits, d, d_model]");
  STD_TORCH_CHECK(same_place(parts, grad) && same_place(hidden, grad) && same_place(wanted, grad),
                  "late_interaction: parts, grad, hidden and wanted must be on one device");
  STD_TORCH_CHECK(d <= INT32_MAX && d_model <= INT32_MAX && parts.size(0) <= 65535,
                  "late_interaction: too many splits, or too long rows");
  if (parts.numel() == 0) return;
  const int device = grad.get_device_index();
  const DeviceGuard guard(device);
  const OuterArgs args{.grad = grad.const_data_ptr(),
                       .hidden = hidden.const_data_ptr(),
                       .wanted = static_cast<const uint8_t*>(wanted.const_data_ptr()),
                       .parts = static_cast<float*>(parts.mutable_data_ptr()),
                       .rows = rows,
                       .hidden_stride = hidden.stride(0),
                       .d = static_cast<int32_t>(d),
                       .d_model = static_cast<int32_t>(d_model),
                       .splits = static_cast<int32_t>(parts.size(0)),
                       .fresh = fresh};
  check(launch_outer_rows(dtype, device_properties(device).wgmma, args, current_stream(device)),
        "outer rows");
}

std::tuple<Tensor, Tensor> maxsim_varlen_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor cu_seqlens_q,
                                                  Tensor cu_seqlens_d, Tensor winners, bool need_grad_Q,
                                                  bool need_grad_D) {
  const Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  check_varlen_backward_inputs(grad_scores, Q, winners, in);
  const Sizes& s = in.sizes;
  const int device = Q.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const ScalarType type = Q.scalar_type();
  const auto shape = [&](bool needed, int64_t tokens) {
    return needed ? std::vector<int64_t>{tokens, s.d} : std::vector<int64_t>{0};
  };
  const Tensor grad_Q = new_tensor(Q, shape(need_grad_Q, s.Lq), type);
  const Tensor grad_D = new_tensor(D, shape(need_grad_D, s.Ld), type);
  if (grad_scores.numel() == 0 || winners.numel() == 0 || s.Ld == 0 || s.d == 0) {
    fill_zero(grad_Q, stream);
    fill_zero(grad_D, stream);
    return {grad_Q, grad_D};
  }

  const int64_t element = element_bytes(in.dtype), vector = element == 8 ? 16 : 4 * element;
  const bool vectors =
      reads_in_pieces(in.Q, s.d, element, vector) && reads_in_pieces(in.D, s.d, element, vector);
  Sizes mean = s;
  mean.Ld = std::max<int64_t>(1, s.Ld / s.N);
  BackwardPlan plan =
      plan_backward(mean, in.dtype, vectors, false, Backward::lowmem, device_properties(device));
  plan.owned_grid = s.Ld / plan.tile_tokens + s.N + 2;  // see packed_tile in kernels/backward_owned.cuh
  STD_TORCH_CHECK(plan.gather_grid + plan.owned_grid <= INT32_MAX,
                  "late_interaction: more than 2^31 - 1 blocks in one backward");

  const PackedRoom room(in, Q);
  const PackedIndex index = room.index(in);
  check(launch_packed_index(index, stream), "index of packed sequences");
  BackwardArgs args{};
  take_winners(args, s, grad_scores, winners);
  take_plan(args, plan);
  args.grads_kept = 0;  // those of all queries with a document: too many
  args.Q = in.Q;
  args.D = in.D;
  args.packed = true;
  args.spans = index.spans;
  args.row_queries = index.row_queries;
  args.grad_Q = need_grad_Q ? grad_Q.data_ptr() : nullptr;
  args.grad_D = need_grad_D ? grad_D.data_ptr() : nullptr;
  args.owned_blocks = need_grad_D ? static_cast<int32_t>(plan.owned_grid) : 0;
  if (need_grad_Q || need_grad_D) check(launch_lowmem(args, in.dtype, plan, stream), "gradients");
  return {grad_Q, grad_D};
}

}  // namespace

}  // namespace late_interaction

STABLE_TORCH_LIBRARY_IMPL(late_interaction, CUDA, m) {
  m.impl("can_project_rows", TORCH_BOX(&late_interaction::can_project_rows));
  m.impl("project_rows_", TORCH_BOX(&late_interaction::project_rows_));
  m.impl("unit_rows_", TORCH_BOX(&late_interaction::unit_rows_));
  m.impl("won_rows", TORCH_BOX(&late_interaction::won_rows));
  m.impl("maxsim_backward_unit_", TORCH_BOX(&late_interaction::maxsim_backward_unit_));
  m.impl("outer_rows_", TORCH_BOX(&late_interaction::outer_rows_));
  m.impl("maxsim", TORCH_BOX(&late_interaction::maxsim));
  m.impl("maxsim_winners", TORCH_BOX(&late_interaction::maxsim_winners));
  m.impl("maxsim_backward", TORCH_BOX(&late_interaction::maxsim_backward));
  m.impl("maxsim_backward_recompute", TORCH_BOX(&late_interaction::maxsim_backward_recompute));
  m.impl("maxsim_varlen", TORCH_BOX(&late_interaction::maxsim_varlen));
  m.impl("maxsim_varlen_winners", TORCH_BOX(&late_interaction::maxsim_varlen_winners));
  m.impl("maxsim_varlen_backward", TORCH_BOX(&late_interaction::maxsim_varlen_backward));
  m.impl("maxsim_quantized", TORCH_BOX(&late_interaction::maxsim_quantized));
}

STABLE_TORCH_LIBRARY_IMPL(late_interaction, CompositeExplicitAutograd, m) {
  m.impl("cuda_capability", TORCH_BOX(&late_interaction::cuda_capability));
}
