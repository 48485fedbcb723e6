// The CUDA side of the operators on residual-compressed documents: parse, plan, allocate, launch. Nothing
// here waits for the device.
#include "launch.h"

#include <torch/csrc/stable/accelerator.h>

#include "../../common/arithmetic.h"
#include "../../common/plaid_tensors.h"
#include "../../common/registration.h"
#include "../forward/launch.h"
#include "../primitives/row_norms.h"
#include "../runtime/check.h"
#include "../runtime/device.h"
#include "../runtime/stream.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kCentroidBytes = 64;  // what a row of centroids is a multiple of, for the tile kernel

Integers integers(const Tensor& x) { return {x.const_data_ptr(), x.scalar_type() == ScalarType::Long}; }

// The dtype that a call computes in: fp32 may multiply in half precision, and the inputs are converted then.
ScalarType computed_type(const Tensor& Q, Precision precision) {
  const ScalarType type = Q.scalar_type();
  if (type != ScalarType::Float) return type;
  if (precision == Precision::medium) return ScalarType::BFloat16;
  return precision == Precision::fp16 ? ScalarType::Half : type;
}

// A call's inputs as the kernels read them, dense; nothing is copied that is so already.
struct DenseInputs {
  Tensor Q, codes, residuals, extents, centroids, weights;

  DenseInputs(const Tensor& given_Q, const Tensor& codes, const Tensor& residuals, const Tensor& extents,
              const Tensor& given_centroids, const Tensor& weights, ScalarType type)
      : Q(torch::stable::to(given_Q, type)),
        codes(torch::stable::contiguous(codes)),
        residuals(torch::stable::contiguous(residuals)),
        extents(torch::stable::contiguous(extents)),
        centroids(torch::stable::to(given_centroids, type)),
        weights(torch::stable::contiguous(weights)) {
    const int64_t whole = kCentroidBytes / static_cast<int64_t>(centroids.element_size());
    const int64_t missing = (whole - centroids.size(1) % whole) % whole;
    if (missing > 0) centroids = torch::stable::pad(centroids, {0, missing});
    centroids = torch::stable::contiguous(centroids);
    if (!is_aligned(centroids.const_data_ptr(), 16)) centroids = torch::stable::clone(centroids);
  }

  ResidualArgs args(const ResidualInputs& in, int64_t nbits, bool normalize) const {
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
    c.codes = static_cast<const int32_t*>(codes.const_data_ptr());
    c.residuals = static_cast<const uint8_t*>(residuals.const_data_ptr());
    c.residual_row = static_cast<uint32_t>((s.d * nbits + 7) / 8);
    c.centroids = centroids.const_data_ptr();
    c.centroid_count = static_cast<uint32_t>(centroids.size(0));
    c.centroid_row = static_cast<uint32_t>(row);
    c.weights = static_cast<const float*>(weights.const_data_ptr());
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
  bool whole(int64_t d, int64_t nbits) const {
    return d % 32 == 0 && is_aligned(residuals.const_data_ptr(), nbits);
  }
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

// Its parameters are those of the operators.
std::tuple<Tensor, OptionalTensor> score(const Tensor& Q, const Tensor& codes, const Tensor& residuals,
                                         const Tensor& extents, const Tensor& centroids,
                                         const Tensor& bucket_weights, int64_t nbits, bool normalize,
                                         const std::string& precision_name, bool want_winners) {
  const Precision precision = parse_precision(precision_name);
  const ResidualInputs in =
      parse_residual_inputs(Q, codes, residuals, extents, centroids, bucket_weights, nbits);
  const Sizes& s = in.sizes;
  const int device = Q.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const Tensor scores = new_tensor(Q, {s.Nq, s.N}, score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) {
    winners = new_tensor(Q, {s.Nq, s.N, s.Lq}, wide_winners(in) ? ScalarType::Int : ScalarType::Short);
  }
  if (scores.numel() == 0) return {scores, winners};
  if (s.Lq == 0 || s.Ld == 0) {  // nothing to find: every score is an empty sum, every winner the sentinel
    check(cudaMemsetAsync(scores.data_ptr(), 0, scores.numel() * scores.element_size(), stream), "scores");
    if (winners && winners->numel() > 0) {
      check(cudaMemsetAsync(winners->data_ptr(), 0xFF, winners->numel() * winners->element_size(), stream),
            "winners");
    }
    return {scores, winners};
  }

  const ScalarType type = computed_type(Q, precision);
  const DenseInputs dense(Q, codes, residuals, extents, centroids, bucket_weights, type);
  ResidualArgs args = dense.args(in, nbits, normalize);
  const Dtype dtype = parse_dtype(type);
  const bool whole = dense.whole(s.d, nbits);
  const ResidualPlan plan =
      plan_residual(s, in.packed, dtype, precision, whole, want_winners, device_properties(device));
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
  const SharedWork work(plan, Q);
  check(work.prepare(args, plan, stream), "splits of documents");
  if (plan.partials == 1) {
    check(launch_tile(args, plan, stream), "compressed documents");
    return {scores, winners};
  }
  const Tensor partials = new_tensor(Q, {s.Nq, plan.partials, s.N}, ScalarType::Float);
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

Tensor maxsim_residual(Tensor Q, Tensor codes, Tensor residuals, Tensor extents, Tensor centroids,
                       Tensor bucket_weights, int64_t nbits, bool normalize, std::string precision) {
  return std::get<0>(
      score(Q, codes, residuals, extents, centroids, bucket_weights, nbits, normalize, precision, false));
}

std::tuple<Tensor, Tensor> maxsim_residual_winners(Tensor Q, Tensor codes, Tensor residuals, Tensor extents,
                                                   Tensor centroids, Tensor bucket_weights, int64_t nbits,
                                                   bool normalize, std::string precision) {
  auto [scores, winners] =
      score(Q, codes, residuals, extents, centroids, bucket_weights, nbits, normalize, precision, true);
  return {scores, *winners};
}

Tensor maxsim_residual_backward(Tensor grad_scores, Tensor Q, Tensor codes, Tensor residuals, Tensor extents,
                                Tensor centroids, Tensor bucket_weights, Tensor winners, int64_t nbits,
                                bool normalize) {
  const ResidualInputs in =
      parse_residual_inputs(Q, codes, residuals, extents, centroids, bucket_weights, nbits);
  const Sizes& s = in.sizes;
  check_residual_winners(grad_scores, Q, winners, in);
  const int device = Q.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const Tensor grad_Q = new_tensor(Q, {s.Nq, s.Lq, s.d}, Q.scalar_type());
  if (grad_Q.numel() == 0) return grad_Q;
  if (s.N == 0 || s.Ld == 0) {
    check(cudaMemsetAsync(grad_Q.data_ptr(), 0, grad_Q.numel() * grad_Q.element_size(), stream), "grad_Q");
    return grad_Q;
  }
  const DenseInputs dense(Q, codes, residuals, extents, centroids, bucket_weights, Q.scalar_type());
  ResidualArgs args = dense.args(in, nbits, normalize);
  args.winners = winners.data_ptr();
  args.grad = grad_scores.const_data_ptr();
  args.grad_query_stride = grad_scores.stride(0);
  args.grad_item_stride = grad_scores.stride(1);
  const Tensor sums = new_tensor(Q, {s.Nq, s.Lq, s.d}, score_type(in.dtype));
  args.grad_Q_sums = sums.data_ptr();
  check(launch_residual_gather(args, in.dtype, stream), "grad_Q");

  const RowsView rows = query_rows(args.Q, s);
  OptionalTensor inverse;
  if (normalize) {
    inverse = new_tensor(Q, {rows.rows}, score_type(in.dtype));
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
  const ResidualInputs in =
      parse_residual_inputs(Q, codes, residuals, extents, centroids, bucket_weights, kBits);
  const Sizes& s = in.sizes;
  STD_TORCH_CHECK(in.dtype != Dtype::fp64, "late_interaction: Q must be bfloat16, float16 or float32");
  STD_TORCH_CHECK(s.d == kDims, "late_interaction: Q must have 128 dims, got ", s.d);
  STD_TORCH_CHECK(!inverse_norms || (inverse_norms->scalar_type() == ScalarType::Half &&
                                     same_place(*inverse_norms, codes) && inverse_norms->is_contiguous() &&
                                     inverse_norms->numel() == codes.numel()),
                  "late_interaction: inverse_norms must be contiguous float16, a number for each of codes");
  const int device = Q.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const Tensor scores = new_tensor(Q, {s.Nq, s.N}, ScalarType::Float);
  if (scores.numel() > 0 && (s.Lq == 0 || s.Ld == 0)) {
    check(cudaMemsetAsync(scores.data_ptr(), 0, 4 * scores.numel(), stream), "scores");
  }
  if (scores.numel() == 0 || s.Lq == 0 || s.Ld == 0) return scores;
  const DenseInputs dense(Q, codes, residuals, extents, centroids, bucket_weights, ScalarType::Half);
  const Tensor rows = torch::stable::contiguous(torch::stable::to(Q, ScalarType::Float)),
               aligned_residuals = is_aligned(dense.residuals.const_data_ptr(), 16)
                                       ? dense.residuals
                                       : torch::stable::clone(dense.residuals),
               half_rows = new_tensor(Q, {kRows, kDims}, ScalarType::Half),
               query = new_tensor(Q, {static_cast<int64_t>(sizeof(CentroidRowsQuery))}, ScalarType::Byte);
  CentroidRowsArgs args{};
  args.documents = dense.args(in, kBits, false).documents;
  args.inverse_norms = inverse_norms ? inverse_norms->const_data_ptr() : nullptr;
  args.half_rows = half_rows.data_ptr();
  args.query = static_cast<CentroidRowsQuery*>(query.data_ptr());
  args.documents.residuals = static_cast<const uint8_t*>(aligned_residuals.const_data_ptr());
  for (int64_t at = 0; at < s.Nq * s.Lq; at += args.rows) {
    const int64_t i = at / s.Lq, first = at % s.Lq;
    args.Q = static_cast<const float*>(rows.const_data_ptr()) + at * kDims;
    args.rows = static_cast<int32_t>(std::min(kRows, s.Lq - first));
    args.adds = first > 0;
    args.scores = static_cast<float*>(scores.data_ptr()) + i * s.N;
    check(launch_prepare_rows(args, stream), "query rows");
    const Tensor table = torch::stable::matmul(dense.centroids, torch::stable::transpose(half_rows, 0, 1));
    args.centroid_scores = static_cast<const uint4*>(table.const_data_ptr());
    check(launch_centroid_rows(args, device_properties(device).sm_count, stream), "compressed documents");
  }
  return scores;
}

Tensor plaid_approx_score(Tensor query_centroid_scores, Tensor codes, Tensor doc_lengths) {
  const Tensor &table = query_centroid_scores, &lengths = doc_lengths;
  check_centroid_scores(table, codes, lengths);
  const bool fp64 = table.scalar_type() == ScalarType::Double;
  const int device = table.get_device_index();
  const DeviceGuard guard(device);
  const Tensor scores = new_tensor(table, {codes.size(0)}, table.scalar_type());
  if (scores.numel() == 0) return scores;
  const Tensor dense_table = torch::stable::contiguous(table), dense_codes = torch::stable::contiguous(codes),
               dense_lengths = torch::stable::contiguous(lengths);
  ApproxArgs args{};
  args.table = dense_table.const_data_ptr();
  args.count = table.size(0);
  args.Lq = static_cast<int32_t>(table.size(1));
  args.codes = static_cast<const int32_t*>(dense_codes.const_data_ptr());
  args.lengths = integers(dense_lengths);
  args.N = codes.size(0);
  args.capacity = codes.size(1);
  args.scores = scores.data_ptr();
  check(launch_approx_scores(args, fp64, current_stream(device)), "approximate scores");
  return scores;
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("maxsim_residual", TORCH_BOX(&late_interaction::maxsim_residual));
  m.impl("maxsim_residual_winners", TORCH_BOX(&late_interaction::maxsim_residual_winners));
  m.impl("maxsim_residual_backward", TORCH_BOX(&late_interaction::maxsim_residual_backward));
  m.impl("maxsim_residual_normed", TORCH_BOX(&late_interaction::maxsim_residual_normed));
  m.impl("plaid_approx_score", TORCH_BOX(&late_interaction::plaid_approx_score));
}
