// The stages of a forward: plan, norms, document ranges, kernel, sums of partials. Nothing here waits for the
// device.
#include "run.h"

#include <cuda_runtime.h>

#include "../pairs/index.h"
#include "../primitives/row_norms.h"
#include "../runtime/device.h"
#include "../runtime/plan_override.h"
#include "../runtime/stream.h"
#include "../varlen/workspace.h"
#include "launch.h"
#include "operands/fp16_normalized.h"
#include "operands/fp16_scaled.h"

namespace late_interaction {

namespace {

// Token ranges of documents, and the compacted tokens that some of them read.
struct DocRangeBuffers {
  Tensor doc_ranges;
  OptionalTensor tokens, token_scales, positions;
  CompactedTokens compacted{};

  DocRangeBuffers(const Inputs& in, const ForwardPlan& plan, const Tensor& like)
      : doc_ranges(new_tensor(like, {in.sizes.documents(), 4}, ScalarType::Int)) {
    if (!plan.compacted) return;
    const int64_t documents = in.sizes.documents(), least = plan.columns;
    const int64_t slot = in.packed ? least : std::max(in.sizes.Ld, least);
    const int64_t bytes = in.sizes.d * element_bytes(in.dtype);
    tokens = new_tensor(like, {documents, slot, bytes}, ScalarType::Byte);
    positions = new_tensor(like, {documents, slot}, ScalarType::Int);
    if (plan.scaled) token_scales = new_tensor(like, {documents, slot}, ScalarType::Float);
    compacted = {static_cast<uint4*>(tokens->data_ptr()),
                 token_scales ? static_cast<float*>(token_scales->data_ptr()) : nullptr,
                 static_cast<int32_t*>(positions->data_ptr()),
                 static_cast<int32_t>(slot),
                 static_cast<int32_t>(least),
                 static_cast<int32_t>(bytes / 16)};
  }
  DocRange* data() const { return static_cast<DocRange*>(doc_ranges.data_ptr()); }
};

// Ranges of split documents, and the maxima of each query row over each of them.
struct SplitBuffers {
  Tensor doc_ranges, maxima;

  SplitBuffers(const Sizes& s, const ForwardPlan& plan, const Tensor& like)
      : doc_ranges(new_tensor(like, {s.documents() * plan.num_splits, 4}, ScalarType::Int)),
        maxima(new_tensor(like, {s.N * plan.num_splits, s.Nq * s.Lq, 2}, ScalarType::Float)) {}

  // Documents become their splits.
  void list(const ForwardPlan& plan, ForwardArgs& args, cudaStream_t stream) const {
    args.N *= plan.num_splits;
    args.num_splits = plan.num_splits;
    args.maxima = static_cast<Maximum*>(maxima.data_ptr());
    auto* listed = static_cast<DocRange*>(doc_ranges.data_ptr());
    check(launch_split_doc_ranges(args, plan.tile_tokens(), listed, stream), "splits of documents");
    args.doc_ranges = listed;
  }
};

// Works out where packed documents lie, whose each query token is, and how blocks share them.
void index_packed(const Inputs& in, const ForwardPlan& plan, const PackedIndexBuffers& buffers,
                  const DocRangeBuffers& doc_ranges, const Tensor& work_tile_ends, ForwardArgs& args,
                  cudaStream_t stream) {
  PackedIndex index = buffers.index(in);
  if (plan.tile == Tile::sm90_q || plan.tile == Tile::sm90_d) {
    index.doc_ranges = doc_ranges.data();
    index.work_tile_ends =
        work_tile_ends.numel() > 0 ? static_cast<int32_t*>(work_tile_ends.data_ptr()) : nullptr;
    index.blocks = plan.grid;
    index.row_tiles = plan.row_tiles;
    // Half of its last tile, and its end.
    index.document_tokens = 16 + (plan.tile == Tile::sm90_q ? plan.columns / 2 : 16);
    index.lpt = plan.lpt;
    index.compacted = doc_ranges.compacted;
    index.rows = static_cast<const uint4*>(in.D.data);
    index.row_stride = in.D.token_stride * element_bytes(in.dtype) / 16;
  }
  check(launch_packed_index(index, stream), "index of packed sequences");
  args.packed = true;
  args.queries = static_cast<int32_t>(index.queries);
  args.q_offsets = index.q_offsets;
  args.row_queries = index.row_queries;
  args.spans = index.spans;
  args.work_tile_ends = index.work_tile_ends;
  args.doc_ranges = index.doc_ranges;
  args.compacted = index.compacted;
}

// A document of mean length stands for all of them.
ForwardPlan plan_call(const Inputs& in, const ForwardTraits& traits, bool winners, int device) {
  const Device& properties = device_properties(device);
  if (!in.packed) return chosen_plan(in.sizes, traits, winners, properties);
  Sizes mean = in.sizes;
  mean.Ld = std::max<int64_t>(1, mean.Ld / mean.N);
  if (in.dtype == Dtype::fp64) mean.Nq = in.packed->queries;
  return chosen_plan(mean, traits, winners, properties);
}

}  // namespace

void forward_into(const Inputs& in, bool normalize, const TokenScaleViews& token_scales, Precision precision,
                  const Tensor& like, const Tensor& scores, const OptionalTensor& winners,
                  const PairPick* pick, const Fp16x2Tokens* fp16x2) {
  const Sizes& s = in.sizes;
  const int device = like.get_device_index();
  const cudaStream_t stream = current_stream(device);
  // Empty: every score is an empty sum, every winner the sentinel.
  if (scores.numel() == 0 || s.Lq == 0 || s.Ld == 0) {
    fill_zero(scores, stream);
    if (winners) fill_sentinel(*winners, stream);
    return;
  }
  const ForwardTraits traits = traits_of(in, precision, normalize || token_scales.d.data != nullptr);
  const ForwardPlan plan = fp16x2 != nullptr
                               ? *plan_3xfp16(s, traits.masked, !normalize, device_properties(device))
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
  args.q_scales = token_scales.q;
  args.d_scales = token_scales.d;
  args.shared_scale = token_scales.shared;
  args.wide_winners = wide_winners(s.Ld);
  args.winners = winners ? winners->data_ptr() : nullptr;
  args.partials = plan.partials;
  args.k_chunks = plan.k_chunks;
  args.stages = plan.stages;
  args.stream_q = plan.stream_q;
  args.cluster = plan.cluster;
  args.row_tiles = plan.row_tiles;
  args.work_tiles = plan.work_tiles;
  OptionalTensor q_inverse, d_inverse;
  // sm90_d computes norms itself, but not where a second kernel combines splits. fp16x2 operands are
  // normalized already.
  const bool asks_for_norms = plan.tile != Tile::none && (plan.tile != Tile::sm90_d || plan.num_splits > 1);
  if (normalize && asks_for_norms && fp16x2 == nullptr) {
    const auto norms = [&](const RowsView& rows) {
      const Tensor inverse = new_tensor(scores, {rows.rows}, ScalarType::Float);
      check(launch_inverse_norms(rows, s.d, in.dtype, inverse.data_ptr(), stream), "norms");
      return inverse;
    };
    q_inverse = norms(query_rows(in.Q, s));
    args.q_scales = {static_cast<const float*>(q_inverse->data_ptr()), 0, s.Lq, 1};
    if (plan.tile == Tile::sm90_q || plan.tile == Tile::sm90_q_longd) {
      d_inverse = norms(document_rows(in.D, s));
      const int64_t query_stride = s.layout == Layout::per_query ? s.N * s.Ld : 0;
      args.d_scales = {static_cast<const float*>(d_inverse->data_ptr()), query_stride, s.Ld, 1};
    }
  }
  std::optional<PackedIndexBuffers> packed;
  std::optional<DocRangeBuffers> doc_ranges;
  std::optional<SplitBuffers> splits;
  OptionalTensor work_tile_ends;
  if (plan.num_splits > 1) {
    splits.emplace(s, plan, scores);
    splits->list(plan, args, stream);
  } else if (in.packed) {
    packed.emplace(in, scores);
    doc_ranges.emplace(in, plan, scores);
    work_tile_ends = new_tensor(scores, {plan.work_tiles <= INT32_MAX ? plan.grid : 0}, ScalarType::Int);
    index_packed(in, plan, *packed, *doc_ranges, *work_tile_ends, args, stream);
    // The fp64 kernel has a block for each query and document, so it skips tokens outside all queries.
    if (plan.tile == Tile::none && winners) fill_sentinel(*winners, stream);
  } else if (plan.trimmed || plan.compacted) {
    doc_ranges.emplace(in, plan, scores);
    check(launch_doc_ranges(args, s.documents(), doc_ranges->compacted, doc_ranges->data(), stream),
          "document ranges");
    args.doc_ranges = doc_ranges->data();
    args.compacted = doc_ranges->compacted;
  }
  // The host does not know how many partials packed queries have; this is an upper bound.
  const bool in_partials =
      in.packed ? plan.tile != Tile::none && s.Lq > plan.partial_rows : plan.partials > 1;
  if (in.packed) args.partials = 1;
  const auto pick_from = [&](const Tensor& grid, int partial_rows) {
    PairPick from = *pick;
    from.grid = static_cast<const float*>(grid.const_data_ptr());
    from.grid_winners = args.winners;
    from.partial_rows = partial_rows;
    check(launch_pick_pairs(from, device_properties(device), stream), "picked pairs");
  };
  const auto launch = [&] {
    check(fp16x2 == nullptr ? launch_forward(args, plan, stream)
                            : launch_sm90_3xfp16(args, make_fp16x2_maps(args, *fp16x2, plan), plan, stream),
          "forward");
  };
  if (splits) {
    launch();
    const Tensor sums =
        in_partials ? new_tensor(scores, {s.Nq, plan.partials, s.N}, ScalarType::Float) : scores;
    check(launch_combine_splits(args, static_cast<float*>(sums.data_ptr()), stream), "combined splits");
    if (!in_partials) return;
    ForwardArgs partials{};
    partials.layout = Layout::per_query;  // every query has all of its partials
    partials.N = s.N;
    partials.Nq = args.Nq;
    partials.partials = plan.partials;
    partials.scores = sums.data_ptr();
    check(launch_reduce_partials(partials, plan, static_cast<float*>(scores.data_ptr()), stream),
          "sum of partials");
    return;
  }
  if (!in_partials) {
    args.scores = scores.data_ptr();
    launch();
    if (pick != nullptr) pick_from(scores, 0);
    return;
  }
  if (in.packed) {
    const int64_t warps = (s.Lq + plan.partial_rows - 1) / plan.partial_rows;
    const Tensor partials = new_tensor(scores, {warps + in.packed->queries, s.N}, ScalarType::Float);
    args.scores = partials.data_ptr();
    launch();
    if (pick != nullptr) return pick_from(partials, plan.partial_rows);
    float* sums = static_cast<float*>(scores.data_ptr());
    check(launch_reduce_packed_partials(args, plan.partial_rows, sums, stream), "sum of partials");
    return;
  }
  const Tensor partials = new_tensor(scores, {s.Nq, plan.partials, s.N}, ScalarType::Float);
  args.scores = partials.data_ptr();
  launch();
  check(launch_reduce_partials(args, plan, static_cast<float*>(scores.data_ptr()), stream),
        "sum of partials");
}

OperandConversion operand_conversion(const Inputs& in, const std::string& precision, bool normalize,
                                     int device) {
  return plan_operand_conversion(in.sizes, in.dtype, parse_precision(precision), in.d_mask.data != nullptr,
                                 normalize, device_properties(device));
}

void score_into(const Tensor& Q, const Tensor& D, const OptionalTensor& q_mask, const OptionalTensor& d_mask,
                const Inputs& in, bool normalize, const OperandConversion& how, const Tensor& scores,
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
  const bool two = how.copies == Copies::fp16x2;
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
  if (how.copies == Copies::normalized_fp16) {
    const Tensor token_scales = new_tensor(Q, {s.Nq * s.Lq}, ScalarType::Float);
    float* of_rows = static_cast<float*>(token_scales.data_ptr());
    const Fp16NormalizedArgs copies{in.dtype, in.Q, in.D, half_Q.data_ptr(), half_D.data_ptr(), of_rows};
    check(launch_fp16_normalized(copies, s, stream), "normalized fp16 operands");
    const Inputs normalized = parse_inputs(half_Q, half_D, q_mask, d_mask, in.paired);
    forward_into(normalized, false, {{of_rows, 0, s.Lq, 1}, {}}, how.precision, Q, scores, winners);
    return;
  }
  const bool of_tokens = two && !normalize;
  const int64_t rows = s.Nq * s.Lq, tokens = of_tokens ? s.documents() * s.Ld : 0;
  const Tensor token_scales = new_tensor(Q, {rows + tokens + 2}, ScalarType::Float);
  float* of_rows = static_cast<float*>(token_scales.data_ptr());
  float* of_documents = of_rows + rows;
  float* of_each_token = of_documents + 2;
  const Fp16ScaledArgs copies{.Q = in.Q,
                              .D = in.D,
                              .d_mask = in.d_mask,
                              .half_Q = half_Q.data_ptr(),
                              .half_D = half_D.data_ptr(),
                              .terms = two ? 2 : 1,
                              .width = width,
                              .q_scales = of_rows,
                              .d_scale_of_all = of_documents,
                              .d_scales = of_each_token,
                              .largest = reinterpret_cast<uint32_t*>(of_documents + 1)};
  check(launch_fp16_scaled(copies, s, normalize, stream), "scaled fp16 operands");
  TokenScaleViews scales{{of_rows, 0, s.Lq, 1}, {}, of_documents};
  if (of_tokens) {
    const int64_t query_stride = s.layout == Layout::per_query ? s.N * s.Ld : 0;
    scales.d = {of_each_token, query_stride, s.Ld, 1};
  }
  if (two) {
    const Fp16x2Tokens fp16x2{half_Q.data_ptr(), half_D.data_ptr(), width};
    forward_into(in, normalize, scales, how.precision, Q, scores, winners, nullptr, &fp16x2);
    return;
  }
  const Inputs converted_in = parse_inputs(half_Q, half_D, q_mask, d_mask, in.paired);
  forward_into(converted_in, false, scales, how.precision, Q, scores, winners);
}

}  // namespace late_interaction
