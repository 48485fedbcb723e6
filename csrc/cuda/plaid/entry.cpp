// The CUDA side of the operators on residual-compressed documents: parse, plan, allocate, launch. Nothing
// here waits for the device.
#include "launch.h"

#include "../../common/arithmetic.h"
#include "../../common/forms.h"
#include "../../common/plaid_tensors.h"
#include "../../common/registration.h"
#include "../forward/launch.h"
#include "../primitives/row_norms.h"
#include "../runtime/op_helpers.h"

namespace late_interaction {

namespace {

constexpr int64_t kCentroidBytes = 64;  // what a row of centroids is a multiple of, for the tile kernel

Integers integers(const Tensor& x) { return {x.const_data_ptr(), x.scalar_type() == ScalarType::Long}; }

// A call's inputs as the kernels read them, dense; nothing is copied that is so already.
struct DenseInputs {
  Tensor Q, codes, residuals, extents, centroids, weights;
  int64_t nbits;

  DenseInputs(const ResidualTensors& x, ScalarType type)
      : Q(torch::stable::to(x.Q, type)),
        codes(torch::stable::contiguous(x.codes)),
        residuals(torch::stable::contiguous(x.residuals)),
        extents(torch::stable::contiguous(x.extents)),
        centroids(torch::stable::to(x.centroids, type)),
        weights(torch::stable::contiguous(x.bucket_weights)),
        nbits(x.nbits) {
    const int64_t whole = kCentroidBytes / static_cast<int64_t>(centroids.element_size());
    const int64_t missing = (whole - centroids.size(1) % whole) % whole;
    if (missing > 0) centroids = torch::stable::pad(centroids, {0, missing});
    centroids = torch::stable::contiguous(centroids);
    if (!is_aligned(centroids.const_data_ptr(), 16)) centroids = torch::stable::clone(centroids);
  }

  ResidualArgs args(const ResidualInputs& in, bool normalize) const {
    const Sizes& s = in.sizes;
    const int64_t row = centroids.size(1) * centroids.element_size();
    STD_TORCH_CHECK(centroids.size(0) * row <= UINT32_MAX,
                    "late_interaction: centroids must be 4 GiB at most");
    ResidualArgs args{};
    CompressedDocuments& c = args.documents;
    c.N = s.N;
    c.packed = in.packed;
    c.extents = integers(extents);
    c.capacity = s.Ld;
    c.codes = data_of<int32_t>(codes);
    c.residuals = data_of<uint8_t>(residuals);
    c.residual_row = static_cast<uint32_t>((s.d * nbits + 7) / 8);
    c.centroids = centroids.const_data_ptr();
    c.centroid_count = static_cast<uint32_t>(centroids.size(0));
    c.centroid_row = static_cast<uint32_t>(row);
    c.weights = data_of<float>(weights);
    c.nbits = static_cast<int>(nbits);
    args.Q = view_tokens(Q);
    args.Nq = static_cast<int32_t>(s.Nq);
    args.Lq = static_cast<int32_t>(s.Lq);
    args.d = static_cast<int32_t>(s.d);
    args.normalize = normalize;
    args.wide_winners = wide_winners(in);
    return args;
  }

  // A token's residual is whole chunks of 32 dims, and a lane's share of one is aligned.
  bool whole(int64_t d) const { return d % 32 == 0 && is_aligned(residuals.const_data_ptr(), nbits); }
};

// What the blocks of the tile kernel share: the counter of work tiles, and what becomes of documents that are
// split.
class SharedWork {
 public:
  SharedWork(const ResidualPlan& plan, const Tensor& like)
      : arrivals_(plan.most_split_docs * plan.row_tiles),
        maxima_(arrivals_ * 8 * plan.column_blocks),
        zeros_(new_tensor(like, {maxima_ + (arrivals_ + 3 + 1) / 2}, ScalarType::Long)),
        splits_(new_tensor(like, {plan.most_splits, sizeof(DocumentSplit)}, ScalarType::Byte)) {}

  cudaError_t prepare(ResidualArgs& args, const ResidualPlan& plan, cudaStream_t stream) const {
    args.split_docs.maxima = static_cast<unsigned long long*>(zeros_.data_ptr());
    args.split_docs.arrivals = reinterpret_cast<int32_t*>(args.split_docs.maxima + maxima_);
    args.split_docs.counts = args.split_docs.arrivals + arrivals_;
    args.tickets = args.split_docs.counts + 2;
    const cudaError_t error = cudaMemsetAsync(zeros_.data_ptr(), 0, 8 * zeros_.numel(), stream);
    if (error != cudaSuccess || plan.split_tokens == 0) return error;
    args.split_docs.tokens = static_cast<int32_t>(plan.split_tokens);
    args.split_docs.most = static_cast<int32_t>(plan.most_splits);
    args.split_docs.splits = static_cast<DocumentSplit*>(splits_.data_ptr());
    return launch_split_docs(args, stream);
  }

 private:
  int64_t arrivals_, maxima_;
  Tensor zeros_, splits_;
};

cudaError_t launch_tile(const ResidualArgs& args, const ResidualPlan& plan, cudaStream_t stream) {
  switch (plan.compute) {
    case Compute::bf16:
      return launch_residual_bf16(args, plan, stream);
    case Compute::fp16:
      return launch_residual_fp16(args, plan, stream);
    default:
      return launch_residual_fp32(args, plan, stream);
  }
}

// Scores of nothing: every one is an empty sum, every winner the sentinel.
void fill_empty(const Tensor& scores, const OptionalTensor& winners, cudaStream_t stream) {
  fill_zero(scores, stream);
  if (winners) fill_sentinel(*winners, stream);
}

ScoresAndWinners score(const ResidualTensors& x, bool normalize, const std::string& precision_name,
                       bool want_winners) {
  const Precision precision = parse_precision(precision_name);
  const ResidualInputs in = parse_residual_inputs(x);
  const Sizes& s = in.sizes;
  const OnDevice on(x.Q);
  const cudaStream_t stream = on.stream();
  const Tensor scores = new_tensor(x.Q, {s.Nq, s.N}, score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) winners = new_tensor(x.Q, {s.Nq, s.N, s.Lq}, winner_type(in));
  if (scores.numel() == 0) return {scores, winners};
  if (s.Lq == 0 || s.Ld == 0) {
    fill_empty(scores, winners, stream);
    return {scores, winners};
  }

  // fp32 may multiply in half precision, and the inputs are converted then.
  const ScalarType type = converted(in.dtype, precision).value_or(x.Q.scalar_type());
  const DenseInputs dense(x, type);
  ResidualArgs args = dense.args(in, normalize);
  const Dtype dtype = parse_dtype(type);
  const bool whole = dense.whole(s.d);
  const ResidualPlan plan =
      plan_residual(s, in.packed, dtype, precision, whole, want_winners, on.properties());
  STD_TORCH_CHECK(plan.work_tiles + plan.most_splits * plan.row_tiles <= INT32_MAX - (int64_t{1} << 20),
                  "late_interaction: more than 2^31 - 2^20 documents times tiles of query rows in one call");
  args.scores = scores.data_ptr();
  args.winners = winners ? winners->data_ptr() : nullptr;
  args.partials = plan.partials;
  args.column_blocks = plan.column_blocks;
  args.chunks = plan.chunks;
  args.work_tiles = static_cast<int32_t>(plan.work_tiles);
  args.whole = whole;
  if (plan.by_warp) {
    check(launch_residual_by_warp(args, dtype, plan, stream), "compressed documents");
    return {scores, winners};
  }
  args.row_tiles = static_cast<int32_t>(plan.row_tiles);
  const SharedWork work(plan, x.Q);
  check(work.prepare(args, plan, stream), "splits of documents");
  if (plan.partials == 1) {
    check(launch_tile(args, plan, stream), "compressed documents");
    return {scores, winners};
  }
  const Tensor partials = new_tensor(x.Q, {s.Nq, plan.partials, s.N}, ScalarType::Float);
  args.scores = partials.data_ptr();
  check(launch_tile(args, plan, stream), "compressed documents");
  ForwardArgs sums{};
  sums.layout = Layout::per_query;  // every query has all of its partials
  sums.N = s.N;
  sums.Nq = args.Nq;
  sums.Lq = args.Lq;
  sums.partials = plan.partials;
  sums.scores = partials.data_ptr();
  check(launch_reduce_partials(sums, ForwardPlan{}, static_cast<float*>(scores.data_ptr()), s.N, stream),
        "sum of partials");
  return {scores, winners};
}

Tensor grad_of_queries(const Tensor& grad_scores, const ResidualTensors& x, const Tensor& winners,
                       bool normalize) {
  const ResidualInputs in = parse_residual_inputs(x);
  const Sizes& s = in.sizes;
  check_residual_winners(grad_scores, x.Q, winners, in);
  const OnDevice on(x.Q);
  const cudaStream_t stream = on.stream();
  const Tensor grad_Q = new_tensor(x.Q, {s.Nq, s.Lq, s.d}, x.Q.scalar_type());
  if (grad_Q.numel() == 0) return grad_Q;
  if (s.N == 0 || s.Ld == 0) {
    fill_zero(grad_Q, stream);
    return grad_Q;
  }
  const DenseInputs dense(x, x.Q.scalar_type());
  ResidualArgs args = dense.args(in, normalize);
  args.winners = winners.data_ptr();
  args.grad = grad_scores.const_data_ptr();
  args.grad_query_stride = grad_scores.stride(0);
  args.grad_item_stride = grad_scores.stride(1);
  const Tensor sums = new_tensor(x.Q, {s.Nq, s.Lq, s.d}, score_type(in.dtype));
  args.grad_Q_sums = sums.data_ptr();
  check(launch_residual_gather(args, in.dtype, stream), "grad_Q");

  const RowsView rows = query_rows(args.Q, s);
  OptionalTensor inverse;
  if (normalize) {
    inverse = new_tensor(x.Q, {rows.rows}, score_type(in.dtype));
    check(launch_inverse_norms(rows, s.d, in.dtype, inverse->data_ptr(), stream), "norms of Q");
  }
  check(launch_finish_gradients(rows, s.d, in.dtype,
                                {.sums = args.grad_Q_sums,
                                 .inverse = inverse ? inverse->data_ptr() : nullptr,
                                 .unit = false,
                                 .gradients = grad_Q.data_ptr()},
                                stream),
        "grad_Q in the dtype of Q");
  return grad_Q;
}

// Query rows of 32 at a time, whose scores with all documents are added up.
Tensor maxsim_residual_normed(Tensor Q, Tensor codes, Tensor residuals, OptionalTensor inverse_norms,
                              Tensor extents, Tensor centroids, Tensor bucket_weights) {
  constexpr int64_t kBits = 2, kDims = 128, kRows = 32;
  const ResidualTensors x{Q, codes, residuals, extents, centroids, bucket_weights, kBits};
  const ResidualInputs in = parse_residual_inputs(x);
  const Sizes& s = in.sizes;
  STD_TORCH_CHECK(in.dtype != Dtype::fp64, "late_interaction: Q must be bfloat16, float16 or float32");
  STD_TORCH_CHECK(s.d == kDims, "late_interaction: Q must have 128 dims, got ", s.d);
  STD_TORCH_CHECK(!inverse_norms || (inverse_norms->scalar_type() == ScalarType::Half &&
                                     same_place(*inverse_norms, codes) && inverse_norms->is_contiguous() &&
                                     inverse_norms->numel() == codes.numel()),
                  "late_interaction: inverse_norms must be contiguous float16, a number for each of codes");
  const OnDevice on(Q);
  const cudaStream_t stream = on.stream();
  const Tensor scores = new_tensor(Q, {s.Nq, s.N}, ScalarType::Float);
  if (scores.numel() == 0 || s.Lq == 0 || s.Ld == 0) {
    fill_zero(scores, stream);
    return scores;
  }
  const DenseInputs dense(x, ScalarType::Half);
  const Tensor rows = torch::stable::contiguous(torch::stable::to(Q, ScalarType::Float)),
               aligned_residuals = is_aligned(dense.residuals.const_data_ptr(), 16)
                                       ? dense.residuals
                                       : torch::stable::clone(dense.residuals),
               half_rows = new_tensor(Q, {kRows, kDims}, ScalarType::Half),
               query = new_tensor(Q, {static_cast<int64_t>(sizeof(CentroidRowsQuery))}, ScalarType::Byte);
  CentroidRowsArgs args{};
  args.documents = dense.args(in, false).documents;
  args.inverse_norms = inverse_norms ? inverse_norms->const_data_ptr() : nullptr;
  args.half_rows = half_rows.data_ptr();
  args.query = mutable_data_of<CentroidRowsQuery>(query);
  args.documents.residuals = data_of<uint8_t>(aligned_residuals);
  for (int64_t at = 0; at < s.Nq * s.Lq; at += args.rows) {
    const int64_t i = at / s.Lq, first = at % s.Lq;
    args.Q = data_of<float>(rows) + at * kDims;
    args.rows = static_cast<int32_t>(std::min(kRows, s.Lq - first));
    args.adds = first > 0;
    args.scores = mutable_data_of<float>(scores) + i * s.N;
    check(launch_prepare_rows(args, stream), "query rows");
    const Tensor table = torch::stable::matmul(dense.centroids, torch::stable::transpose(half_rows, 0, 1));
    args.centroid_scores = data_of<uint4>(table);
    check(launch_centroid_rows(args, on.properties().sm_count, stream), "compressed documents");
  }
  return scores;
}

Tensor plaid_approx_score(Tensor query_centroid_scores, Tensor codes, Tensor doc_lengths) {
  const Tensor &table = query_centroid_scores, &lengths = doc_lengths;
  check_centroid_scores(table, codes, lengths);
  const bool fp64 = table.scalar_type() == ScalarType::Double;
  const OnDevice on(table);
  const Tensor scores = new_tensor(table, {codes.size(0)}, table.scalar_type());
  if (scores.numel() == 0) return scores;
  const Tensor dense_table = torch::stable::contiguous(table), dense_codes = torch::stable::contiguous(codes),
               dense_lengths = torch::stable::contiguous(lengths);
  ApproxArgs args{};
  args.table = dense_table.const_data_ptr();
  args.count = table.size(0);
  args.Lq = static_cast<int32_t>(table.size(1));
  args.codes = data_of<int32_t>(dense_codes);
  args.lengths = integers(dense_lengths);
  args.N = codes.size(0);
  args.capacity = codes.size(1);
  args.scores = scores.data_ptr();
  check(launch_approx_scores(args, fp64, on.stream()), "approximate scores");
  return scores;
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  late_interaction::ResidualForms<&late_interaction::score, &late_interaction::grad_of_queries>::add_to(m);
  m.impl("maxsim_residual_normed", TORCH_BOX(&late_interaction::maxsim_residual_normed));
  m.impl("plaid_approx_score", TORCH_BOX(&late_interaction::plaid_approx_score));
}
