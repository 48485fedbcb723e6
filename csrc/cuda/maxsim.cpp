// The CUDA side of the forward operators: parse, plan, allocate, launch. Nothing here waits for the device.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "../common/tensors.h"
#include "backward.h"
#include "calls.h"
#include "device.h"
#include "forced_plan.h"
#include "forward.h"
#include "half_copies.h"
#include "halves.h"
#include "stream.h"
#include "unit_copies.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;

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

// Room for the visits of documents that are cut, and for what they leave of each query row.
struct PieceRoom {
  Tensor visits, maxima;

  PieceRoom(const Sizes& s, const ForwardPlan& plan, const Tensor& like)
      : visits(new_tensor(like, {s.documents() * plan.pieces, 4}, ScalarType::Int)),
        maxima(new_tensor(like, {s.N * plan.pieces, s.Nq * s.Lq, 2}, ScalarType::Float)) {}

  // Documents become their pieces.
  void list(const ForwardPlan& plan, ForwardArgs& args, cudaStream_t stream) const {
    args.N *= plan.pieces;
    args.pieces = plan.pieces;
    args.maxima = static_cast<Maximum*>(maxima.data_ptr());
    auto* listed = static_cast<Visit*>(visits.data_ptr());
    check(launch_piece_visits(args, plan.tile_tokens(), listed, stream), "pieces of documents");
    args.visits = listed;
  }
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
ForwardPlan plan_call(const Inputs& in, const ForwardTraits& traits, bool winners, int device) {
  const Device& properties = device_properties(device);
  if (!in.packed) return chosen_plan(in.sizes, traits, winners, properties);
  Sizes mean = in.sizes;
  mean.Ld = std::max<int64_t>(1, mean.Ld / mean.N);
  if (in.dtype == Dtype::fp64) mean.Nq = in.packed->queries;
  return chosen_plan(mean, traits, winners, properties);
}

// Fills scores, and winners where given; or, of packed inputs, what `pick` picks from them. The inputs are in
// the dtype that they multiply in, or are multiplied by the halves that were made of them.
void forward_into(const Inputs& in, bool normalize, const Factors& factors, Precision precision,
                  const Tensor& like, const Tensor& scores, const OptionalTensor& winners,
                  const PairPick* pick = nullptr, const HalfTokens* halves = nullptr) {
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
  const ForwardPlan plan = halves != nullptr
                               ? *plan_halves(s, traits.masked, !normalize, device_properties(device))
                               : plan_call(in, traits, winners.has_value(), device);
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
  // Some kernels do it themselves, but not for pieces that meet elsewhere; and halves are copies of unit
  // rows.
  const bool asks_for_norms =
      plan.tile != Tile::none && (plan.tile != Tile::wgmma_documents || plan.pieces > 1);
  if (normalize && asks_for_norms && halves == nullptr) {
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
  std::optional<PieceRoom> pieces;
  OptionalTensor unit_ends;
  if (plan.pieces > 1) {
    pieces.emplace(s, plan, scores);
    pieces->list(plan, args, stream);
  } else if (in.packed) {
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
    check(launch_pick_pairs(from, device_properties(device), stream), "picked pairs");
  };
  const auto launch = [&] {
    check(halves == nullptr ? launch_forward(args, plan, stream)
                            : launch_wgmma_halves(args, make_half_maps(args, *halves, plan), plan, stream),
          "forward");
  };
  if (pieces) {
    launch();
    const Tensor sums = in_parts ? new_tensor(scores, {s.Nq, plan.parts, s.N}, ScalarType::Float) : scores;
    check(launch_join_pieces(args, static_cast<float*>(sums.data_ptr()), stream), "joined pieces");
    if (!in_parts) return;
    ForwardArgs parts{};
    parts.layout = Layout::per_query;  // every query has all of its parts
    parts.N = s.N;
    parts.Nq = args.Nq;
    parts.parts = plan.parts;
    parts.scores = sums.data_ptr();
    check(launch_sum_parts(parts, plan, static_cast<float*>(scores.data_ptr()), stream), "sum of parts");
    return;
  }
  if (!in_parts) {
    args.scores = scores.data_ptr();
    launch();
    if (pick != nullptr) pick_from(scores, 0);
    return;
  }
  if (in.packed) {
    const int64_t warps = (s.Lq + plan.part_rows - 1) / plan.part_rows;
    const Tensor parts = new_tensor(scores, {warps + in.packed->queries, s.N}, ScalarType::Float);
    args.scores = parts.data_ptr();
    launch();
    if (pick != nullptr) return pick_from(parts, plan.part_rows);
    float* sums = static_cast<float*>(scores.data_ptr());
    check(launch_sum_packed_parts(args, plan.part_rows, sums, stream), "sum of parts");
    return;
  }
  const Tensor parts = new_tensor(scores, {s.Nq, plan.parts, s.N}, ScalarType::Float);
  args.scores = parts.data_ptr();
  launch();
  check(launch_sum_parts(args, plan, static_cast<float*>(scores.data_ptr()), stream), "sum of parts");
}

}  // namespace

Multiplied multiplied(const Inputs& in, const std::string& precision, bool normalize, int device) {
  return plan_copies(in.sizes, in.dtype, parse_precision(precision), in.d_mask.data != nullptr, normalize,
                     device_properties(device));
}

// The same for inputs that multiply as they are or as copies.
void score_into(const Tensor& Q, const Tensor& D, const OptionalTensor& q_mask, const OptionalTensor& d_mask,
                const Inputs& in, bool normalize, const Multiplied& how, const Tensor& scores,
                const OptionalTensor& winners) {
  if (how.copies == Copies::none) {
    forward_into(in, normalize, {}, how.precision, Q, scores, winners);
    return;
  }
  if (how.copies == Copies::bf16 || how.copies == Copies::fp16) {
    const ScalarType type = how.copies == Copies::bf16 ? ScalarType::BFloat16 : ScalarType::Half;
    const Tensor half_Q = torch::stable::to(Q, type), half_D = torch::stable::to(D, type);
    const Inputs copies = parse_inputs(half_Q, half_D, q_mask, d_mask, in.paired);
    forward_into(copies, normalize, {}, how.precision, Q, scores, winners);
    return;
  }
  const Sizes& s = in.sizes;
  const bool two = how.copies == Copies::halves;
  const int64_t width = two ? (s.d + 7) / 8 * 8 : s.d;  // TMA wants whole 16 bytes
  std::vector<int64_t> shape_Q = shape_of_queries(in), shape_D = shape_of_documents(in);
  shape_Q.back() = shape_D.back() = width;
  if (two) {
    shape_Q.insert(shape_Q.begin(), 2);
    shape_D.insert(shape_D.begin(), 2);
  }
  const Tensor half_Q = new_tensor(Q, shape_Q, ScalarType::Half);
  const Tensor half_D = new_tensor(D, shape_D, ScalarType::Half);
  const cudaStream_t stream = current_stream(Q.get_device_index());
  if (how.copies == Copies::unit_fp16) {
    const Tensor factors = new_tensor(Q, {s.Nq * s.Lq}, ScalarType::Float);
    float* of_rows = static_cast<float*>(factors.data_ptr());
    const UnitCopies copies{in.dtype, in.Q, in.D, half_Q.data_ptr(), half_D.data_ptr(), of_rows};
    check(launch_unit_copies(copies, s, stream), "copies of unit rows");
    const Inputs units = parse_inputs(half_Q, half_D, q_mask, d_mask, in.paired);
    forward_into(units, false, {{of_rows, 0, s.Lq, 1}, {}}, how.precision, Q, scores, winners);
    return;
  }
  const bool of_tokens = two && !normalize;
  const int64_t rows = s.Nq * s.Lq, tokens = of_tokens ? s.documents() * s.Ld : 0;
  const Tensor factors = new_tensor(Q, {rows + tokens + 2}, ScalarType::Float);
  float* of_rows = static_cast<float*>(factors.data_ptr());
  float* of_documents = of_rows + rows;
  float* of_each_token = of_documents + 2;
  const HalfCopies copies{.Q = in.Q,
                          .D = in.D,
                          .d_mask = in.d_mask,
                          .half_Q = half_Q.data_ptr(),
                          .half_D = half_D.data_ptr(),
                          .pieces = two ? 2 : 1,
                          .width = width,
                          .q_factors = of_rows,
                          .d_factor = of_documents,
                          .d_factors = of_each_token,
                          .largest = reinterpret_cast<uint32_t*>(of_documents + 1)};
  check(launch_half_copies(copies, s, normalize, stream), "fp16 copies");
  Factors scales{{of_rows, 0, s.Lq, 1}, {}, of_documents};
  if (of_tokens) {
    const int64_t query_stride = s.layout == Layout::per_query ? s.N * s.Ld : 0;
    scales.d = {of_each_token, query_stride, s.Ld, 1};
  }
  if (two) {
    const HalfTokens halves{half_Q.data_ptr(), half_D.data_ptr(), width};
    forward_into(in, normalize, scales, how.precision, Q, scores, winners, nullptr, &halves);
    return;
  }
  const Inputs halves = parse_inputs(half_Q, half_D, q_mask, d_mask, in.paired);
  forward_into(halves, false, scales, how.precision, Q, scores, winners);
}

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
                                           const std::string& precision_name, bool paired,
                                           bool want_winners) {
  const Inputs in = parse_inputs(Q, D, q_mask, d_mask, paired);
  const Multiplied how = multiplied(in, precision_name, normalize, Q.get_device_index());
  const DeviceGuard guard(Q.get_device_index());
  const Tensor scores = new_tensor(Q, shape_of_scores(in), score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) winners = new_tensor(Q, shape_of_winners(in), winner_type(in.sizes.Ld));
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
              std::string precision, std::string backward, bool paired) {
  parse_backward(backward);
  return std::get<0>(forward(Q, D, q_mask, d_mask, normalize, precision, paired, false));
}

std::tuple<Tensor, Tensor> maxsim_winners(Tensor Q, Tensor D, OptionalTensor q_mask, OptionalTensor d_mask,
                                          bool normalize, std::string precision, std::string backward,
                                          bool paired) {
  parse_backward(backward);
  auto [scores, winners] = forward(Q, D, q_mask, d_mask, normalize, precision, paired, true);
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

}  // namespace

}  // namespace late_interaction

STABLE_TORCH_LIBRARY_IMPL(late_interaction, CUDA, m) {
  m.impl("maxsim", TORCH_BOX(&late_interaction::maxsim));
  m.impl("maxsim_winners", TORCH_BOX(&late_interaction::maxsim_winners));
  m.impl("maxsim_varlen", TORCH_BOX(&late_interaction::maxsim_varlen));
  m.impl("maxsim_varlen_winners", TORCH_BOX(&late_interaction::maxsim_varlen_winners));
  m.impl("maxsim_quantized", TORCH_BOX(&late_interaction::maxsim_quantized));
}

STABLE_TORCH_LIBRARY_IMPL(late_interaction, CompositeExplicitAutograd, m) {
  m.impl("cuda_capability", TORCH_BOX(&late_interaction::cuda_capability));
  m.impl("forced_plan", TORCH_BOX(&late_interaction::forced_plan));
}
