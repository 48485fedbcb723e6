// The stages of a forward: convert operands -> plan -> norms -> document ranges -> mainloop -> combine. The
// entries check the inputs before. Nothing here waits for the device.
#include "run.h"

#include <cuda_runtime.h>

#include "../../plan/forward/select.h"
#include "../../plan/l2_parts.h"
#include "../primitives/row_norms.h"
#include "../runtime/device.h"
#include "../runtime/plan_override.h"
#include "../runtime/stream.h"
#include "operands/fp16_normalized.h"
#include "operands/fp16_scaled.h"

namespace late_interaction {

namespace {

// Returns whether TMA can describe both inputs. Rows of Q must lie at even distances.
bool fits_tensor_maps(const Inputs& in) {
  const Sizes& s = in.sizes;
  const bool even =
      s.layout == Layout::per_query || s.Nq == 1 || in.Q.item_stride == s.Lq * in.Q.token_stride;
  return even && fits_tensor_map(in.Q, s.Lq, s.Nq, in.dtype) &&
         fits_tensor_map(in.D, s.Ld, in.packed ? 1 : s.N, in.dtype) &&
         (s.layout == Layout::in_batch || fits_tensor_map(s.Nq, in.D.query_stride, in.dtype));
}

// One scale for each document token, contiguous.
ScaleView document_scales(const Sizes& s, const float* scales) {
  return {scales, s.layout == Layout::per_query ? s.N * s.Ld : 0, s.Ld, 1};
}

float* floats(const Tensor& x) { return static_cast<float*>(x.data_ptr()); }

// The score of the first query with the first document.
float* first_score(const ForwardCall& call) { return floats(call.scores) + call.first_document; }

// ---- plan ----

ForwardPlan plan_call(const ForwardCall& call, const Device& device) {
  const bool scaled = call.normalize || call.token_scales.d.data != nullptr;
  ForwardTraits traits = traits_of(call.in, call.precision, scaled);
  traits.given_scales = call.token_scales.d.data != nullptr;
  if (call.fp16x2 != nullptr) {
    return *plan_3xfp16(call.in.sizes, traits.masked, !call.normalize, device);
  }
  return chosen_plan(call.in.sizes, traits, call.winners.has_value(), device);
}

void take_plan(ForwardArgs& args, const ForwardPlan& plan) {
  args.partials = plan.partials;
  args.k_chunks = plan.k_chunks;
  args.stages = plan.stages;
  args.row_tiles = plan.row_tiles;
  args.work_tiles = plan.work_tiles;
  args.cluster = plan.cluster;
  args.stream_q = plan.stream_q;
  args.teams = plan.teams;
  args.members = plan.members;
  args.tile_docs = plan.docs;
  args.doc_columns = plan.doc_columns;
}

// ---- norms ----

// Inverse norms, kept until the kernels that read them are launched.
struct InverseNorms {
  OptionalTensor q, d;
};

// Some kernels find norms themselves, but not of split documents. Operands of two terms need none.
InverseNorms find_norms(const ForwardCall& call, const ForwardPlan& plan, ForwardArgs& args,
                        cudaStream_t stream) {
  const bool kernel_finds_them = plan.kernel->finds_norms && plan.num_splits == 1;
  if (!call.normalize || kernel_finds_them || call.fp16x2 != nullptr) return {};
  const Sizes& s = call.in.sizes;
  const auto norms = [&](const RowsView& rows) {
    const Tensor inverse = new_tensor(call.scores, {rows.rows}, ScalarType::Float);
    check(launch_inverse_norms(rows, s.d, call.in.dtype, inverse.data_ptr(), stream), "norms");
    return inverse;
  };
  InverseNorms made;
  made.q = norms(query_rows(call.in.Q, s));
  args.q_scales = {floats(*made.q), 0, s.Lq, 1};
  if (plan.kernel->scales_documents) {
    made.d = norms(document_rows(call.in.D, s));
    args.d_scales = document_scales(s, floats(*made.d));
  }
  return made;
}

// ---- document ranges, mainloop, combine ----

void launch_mainloop(const ForwardCall& call, const ForwardPlan& plan, const ForwardArgs& args,
                     cudaStream_t stream) {
  check(ForwardInstance<>::launch({args, plan, stream, call.fp16x2}), "forward");
}

// Documents are whole, or what their mask leaves of them.
void score_documents(const ForwardCall& call, const ForwardPlan& plan, ForwardArgs args, float* sums,
                     cudaStream_t stream) {
  std::optional<DocRangeBuffers> ranges;
  if (plan.trimmed || plan.compacted) {
    ranges.emplace(call.in, plan, call.scores);
    check(launch_doc_ranges(args, call.in.sizes.documents(), ranges->compacted, ranges->data(), stream),
          "document ranges");
    args.doc_ranges = ranges->data();
    args.compacted = ranges->compacted;
  }
  args.scores = sums;
  launch_mainloop(call, plan, args, stream);
}

// Splits each document into ranges, which different blocks score.
void score_splits(const ForwardCall& call, const ForwardPlan& plan, ForwardArgs args, float* sums,
                  cudaStream_t stream) {
  const Sizes& s = call.in.sizes;
  const Tensor maxima = new_tensor(call.scores, {s.N * plan.num_splits, s.Nq * s.Lq, 2}, ScalarType::Float);
  args.N *= plan.num_splits;
  args.num_splits = plan.num_splits;
  args.maxima = static_cast<Maximum*>(maxima.data_ptr());
  args.split_tokens = plan.split_tokens;
  OptionalTensor ranges;
  if (plan.split_tokens == 0) {
    ranges = new_tensor(call.scores, {s.documents() * plan.num_splits, 4}, ScalarType::Int);
    auto* doc_ranges = static_cast<DocRange*>(ranges->data_ptr());
    check(launch_split_doc_ranges(args, plan.tokens, doc_ranges, stream), "splits of documents");
    args.doc_ranges = doc_ranges;
  }
  launch_mainloop(call, plan, args, stream);
  check(launch_combine_splits(args, sums, stream), "combined splits");
}

}  // namespace

ForwardTraits traits_of(const Inputs& in, Precision precision, bool scaled) {
  return {.dtype = in.dtype,
          .precision = precision,
          .masked = in.d_mask.data != nullptr,
          .packed = in.packed.has_value(),
          .scaled = scaled,
          .tma_compatible = aligned(in.Q, in) && aligned(in.D, in) && fits_tensor_maps(in)};
}

void fill_empty(const ForwardCall& call, cudaStream_t stream) {
  fill_zero(call.scores, stream);
  if (call.winners) fill_sentinel(*call.winners, stream);
}

ForwardArgs forward_args(const ForwardCall& call, const ForwardPlan& plan) {
  STD_TORCH_CHECK(plan.grid <= INT32_MAX, "late_interaction: more than 2^31 - 1 fp64 scores in one call");
  const Inputs& in = call.in;
  const Sizes& s = in.sizes;
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
  args.q_weights = in.q_weights;
  args.normalize = call.normalize;
  args.q_aligned = aligned(in.Q, in);
  args.d_aligned = aligned(in.D, in);
  args.q_scales = call.token_scales.q;
  args.d_scales = call.token_scales.d;
  args.shared_scale = call.token_scales.shared;
  args.wide_winners = wide_winners(s.Ld);
  args.scores_stride = args.winners_stride = call.all_documents;
  if (call.winners) {
    const int64_t first = call.first_document * s.Lq * (args.wide_winners ? 4 : 2);
    args.winners = static_cast<uint8_t*>(call.winners->data_ptr()) + first;
  }
  take_plan(args, plan);
  return args;
}

DocRangeBuffers::DocRangeBuffers(const Inputs& in, const ForwardPlan& plan, const Tensor& like)
    : doc_ranges(new_tensor(like, {in.sizes.documents(), 4}, ScalarType::Int)) {
  if (!plan.compacted) return;
  const int64_t documents = in.sizes.documents(), least = plan.tokens;
  const int64_t slot = std::max(in.sizes.Ld, least);
  const int64_t bytes = in.sizes.d * element_bytes(in.dtype);
  tokens = new_tensor(like, {documents, slot, bytes}, ScalarType::Byte);
  positions = new_tensor(like, {documents, slot}, ScalarType::Int);
  if (plan.scaled) token_scales = new_tensor(like, {documents, slot}, ScalarType::Float);
  compacted = {static_cast<uint4*>(tokens->data_ptr()),
               token_scales ? floats(*token_scales) : nullptr,
               static_cast<int32_t*>(positions->data_ptr()),
               static_cast<int32_t>(slot),
               static_cast<int32_t>(least),
               static_cast<int32_t>(bytes / 16)};
}

namespace {

void score_as_planned(const ForwardCall& call, const ForwardPlan& plan, cudaStream_t stream) {
  ForwardArgs args = forward_args(call, plan);
  const InverseNorms norms = find_norms(call, plan, args, stream);
  const Sizes& s = call.in.sizes;
  const bool splits = plan.num_splits > 1;
  float* sums = first_score(call);
  OptionalTensor partials;
  if (plan.partials > 1) {
    partials = new_tensor(call.scores, {s.Nq, plan.partials, s.N}, ScalarType::Float);
    sums = floats(*partials);
    args.scores_stride = s.N;
  }
  splits ? score_splits(call, plan, args, sums, stream) : score_documents(call, plan, args, sums, stream);
  if (!partials) return;
  args.scores = sums;
  if (splits) args.layout = Layout::per_query;  // every query has all of its partials
  check(launch_reduce_partials(args, plan, first_score(call), call.all_documents, stream), "sum of partials");
}

// The inputs of documents [first, first + count) of a batch.
Inputs with_documents(const Inputs& in, int64_t first, int64_t count) {
  Inputs part = in;
  part.sizes.N = count;
  part.D.data = static_cast<const uint8_t*>(in.D.data) + first * in.D.item_stride * element_bytes(in.dtype);
  if (in.d_mask.data != nullptr) part.d_mask.data += first * in.d_mask.item_stride;
  return part;
}

}  // namespace

void forward_into(const ForwardCall& call) {
  const int index = call.scores.get_device_index();
  const cudaStream_t stream = current_stream(index);
  if (call.is_empty()) return fill_empty(call, stream);
  const Device device = device_properties(index);
  const int64_t documents = call.in.sizes.N,
                at_once = documents_at_once(call.in.sizes, call.in.dtype, device);
  if (at_once >= documents || call.fp16x2 != nullptr) {  // whose two terms are all documents each
    return score_as_planned(call, plan_call(call, device), stream);
  }
  for (int64_t first = 0; first < documents; first += at_once) {
    const Inputs some = with_documents(call.in, first, std::min(at_once, documents - first));
    ForwardCall part = call.with(some);
    ScaleView& scales = part.token_scales.d;
    if (scales.data != nullptr) scales.data += first * scales.item_stride;
    part.first_document = first;
    score_as_planned(part, plan_call(part, device), stream);
  }
}

// ---- convert operands ----

OperandConversion operand_conversion(const Inputs& in, const std::string& precision, bool normalize,
                                     int device) {
  return plan_operand_conversion(in.sizes, in.dtype, parse_precision(precision), in.d_mask.data != nullptr,
                                 normalize, device_properties(device));
}

namespace {

// The inputs `in` with other Q and D.
Inputs converted_inputs(const Inputs& in, const Tensor& Q, const Tensor& D) {
  Inputs out = in;
  out.dtype = parse_dtype(Q.scalar_type());
  out.Q = view_tokens(Q);
  out.D = view_tokens(D, in.paired);
  return out;
}

// A tensor [rows of queries or documents, width] of fp16, or of `terms` such.
Tensor new_operand(const Tensor& like, std::vector<int64_t> shape, int64_t terms, int64_t width) {
  shape.back() = width;
  if (terms > 1) shape.insert(shape.begin(), terms);
  return new_tensor(like, shape, ScalarType::Half);
}

// `call` has the inputs as they are.
void score_normalized_fp16(const ForwardCall& call, cudaStream_t stream) {
  const Inputs& in = call.in;
  const Sizes& s = in.sizes;
  const Tensor half_Q = new_operand(call.scores, shape_of_queries(in), 1, s.d);
  const Tensor half_D = new_operand(call.scores, shape_of_documents(in), 1, s.d);
  const Tensor q_scales = new_tensor(call.scores, {s.Nq * s.Lq}, ScalarType::Float);
  const Fp16NormalizedArgs copies{in.dtype,        in.Q, in.D, half_Q.data_ptr(), half_D.data_ptr(),
                                  floats(q_scales)};
  check(launch_fp16_normalized(copies, s, stream), "normalized fp16 operands");
  const Inputs normalized = converted_inputs(in, half_Q, half_D);
  ForwardCall of_unit_rows = call.with(normalized);
  of_unit_rows.normalize = false;
  of_unit_rows.token_scales = {{floats(q_scales), 0, s.Lq, 1}, {}};
  forward_into(of_unit_rows);
}

// `call` has the inputs as they are. terms: fp16 numbers an element.
void score_scaled_fp16(const ForwardCall& call, int terms, cudaStream_t stream) {
  const Inputs& in = call.in;
  const Sizes& s = in.sizes;
  const bool two = terms == 2;
  const int64_t width = two ? round_up(s.d, 8) : s.d;  // TMA wants whole 16 bytes
  const Tensor half_Q = new_operand(call.scores, shape_of_queries(in), terms, width);
  const Tensor half_D = new_operand(call.scores, shape_of_documents(in), terms, width);
  const bool of_tokens = two && !call.normalize;
  const int64_t rows = s.Nq * s.Lq, tokens = of_tokens ? s.documents() * s.Ld : 0;
  const Tensor token_scales = new_tensor(call.scores, {rows + tokens + 2}, ScalarType::Float);
  float* of_rows = floats(token_scales);
  float* of_documents = of_rows + rows;
  float* of_each_token = of_documents + 2;
  const Fp16ScaledArgs copies{.Q = in.Q,
                              .D = in.D,
                              .d_mask = in.d_mask,
                              .half_Q = half_Q.data_ptr(),
                              .half_D = half_D.data_ptr(),
                              .terms = terms,
                              .width = width,
                              .q_scales = of_rows,
                              .d_scale_of_all = of_documents,
                              .d_scales = of_each_token,
                              .largest = reinterpret_cast<uint32_t*>(of_documents + 1)};
  check(launch_fp16_scaled(copies, s, call.normalize, stream), "scaled fp16 operands");
  TokenScaleViews scales{{of_rows, 0, s.Lq, 1}, {}, of_documents};
  if (of_tokens) scales.d = document_scales(s, of_each_token);
  const Fp16x2Tokens fp16x2{half_Q.data_ptr(), half_D.data_ptr(), width, rows * width,
                            s.documents() * s.Ld * width};
  const Inputs scaled = two ? in : converted_inputs(in, half_Q, half_D);
  ForwardCall of_copies = call.with(scaled);
  of_copies.normalize = two && call.normalize;
  of_copies.token_scales = scales;
  of_copies.fp16x2 = two ? &fp16x2 : nullptr;
  forward_into(of_copies);
}

}  // namespace

// The copies are made of Q and D; the rest is what an operator has parsed of its call.
void score_into(const Tensor& Q, const Tensor& D, const Inputs& in, bool normalize,
                const OperandConversion& how, const Tensor& scores, const OptionalTensor& winners) {
  const ForwardCall call{
      .in = in, .precision = how.precision, .normalize = normalize, .scores = scores, .winners = winners};
  const cudaStream_t stream = current_stream(Q.get_device_index());
  switch (how.copies) {
    case Copies::none:
      return forward_into(call);
    case Copies::bf16:
    case Copies::fp16: {
      const ScalarType type = how.copies == Copies::bf16 ? ScalarType::BFloat16 : ScalarType::Half;
      const Tensor half_Q = torch::stable::to(Q, type), half_D = torch::stable::to(D, type);
      return forward_into(call.with(converted_inputs(in, half_Q, half_D)));
    }
    case Copies::normalized_fp16:
      return score_normalized_fp16(call, stream);
    case Copies::scaled_fp16:
      return score_scaled_fp16(call, 1, stream);
    case Copies::fp16x2:
      return score_scaled_fp16(call, 2, stream);
  }
}

}  // namespace late_interaction
