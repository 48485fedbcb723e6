// The CPU side of the operators on residual-compressed documents: tensors in, plain calls out.
#include "../common/plaid_tensors.h"

#include <vector>

#include "../common/registration.h"
#include "backward.h"
#include "centroid_scores.h"
#include "forward.h"

namespace late_interaction::cpu {
namespace {

// Owns the memory that a ResidualTokens points to.
class Documents {
 public:
  Documents(const ResidualInputs& in, const Tensor& codes, const Tensor& residuals, const Tensor& extents,
            const Tensor& centroids, const Tensor& bucket_weights, int64_t nbits)
      : codes_(torch::stable::contiguous(codes)),
        residuals_(torch::stable::contiguous(residuals)),
        centroids_(torch::stable::contiguous(centroids)),
        weights_(torch::stable::contiguous(bucket_weights)),
        nbits_(static_cast<int>(nbits)) {
    const Tensor ends = torch::stable::contiguous(extents);
    if (ends.scalar_type() == ScalarType::Int) {
      read_extents(static_cast<const int32_t*>(ends.const_data_ptr()), in);
    } else {
      read_extents(static_cast<const int64_t*>(ends.const_data_ptr()), in);
    }
  }

  ResidualTokens tokens() const {
    ResidualTokens x;
    x.codes = static_cast<const int32_t*>(codes_.const_data_ptr());
    x.residuals = static_cast<const uint8_t*>(residuals_.const_data_ptr());
    x.bytes = residuals_.size(residuals_.dim() - 1);
    x.weights = static_cast<const float*>(weights_.const_data_ptr());
    x.nbits = nbits_;
    x.centroids = centroids_.const_data_ptr();
    x.centroid_dtype = parse_dtype(centroids_.scalar_type());
    x.centroid_count = centroids_.size(0);
    x.starts = starts_.data();
    x.lengths = lengths_.data();
    return x;
  }

 private:
  template <class Index>
  void read_extents(const Index* extents, const ResidualInputs& in) {
    const Sizes& s = in.sizes;
    for (int64_t j = 0; j < s.N; ++j) {
      const int64_t start = in.packed ? int64_t{extents[j]} : j * s.Ld;
      const int64_t end = in.packed ? int64_t{extents[j + 1]} : start + extents[j];
      const int64_t room = in.packed ? s.Ld : start + s.Ld;
      STD_TORCH_CHECK(0 <= start && start <= end && end <= room, "late_interaction: extents must ",
                      in.packed ? "not decrease and lie within [0, " : "lie within [0, ", s.Ld,
                      "], got extents[", j, "] = ", int64_t{extents[j]},
                      in.packed ? " before " + std::to_string(extents[j + 1]) : std::string());
      starts_.push_back(start);
      lengths_.push_back(end - start);
    }
  }

  Tensor codes_, residuals_, centroids_, weights_;
  int nbits_;
  std::vector<int64_t> starts_, lengths_;
};

TokenView query_view(const Tensor& Q) {
  TokenView x;
  x.data = Q.const_data_ptr();
  x.item_stride = Q.stride(0);
  x.token_stride = Q.stride(1);
  x.dim_stride = Q.stride(2);
  return x;
}

// Parameters: the operators'.
std::tuple<Tensor, Tensor> score(const Tensor& Q, const Tensor& codes, const Tensor& residuals,
                                 const Tensor& extents, const Tensor& centroids, const Tensor& bucket_weights,
                                 int64_t nbits, bool normalize, const std::string& precision,
                                 bool with_winners) {
  const ResidualInputs in =
      parse_residual_inputs(Q, codes, residuals, extents, centroids, bucket_weights, nbits);
  const Sizes& s = in.sizes;
  const Documents documents(in, codes, residuals, extents, centroids, bucket_weights, nbits);
  ForwardCall call;
  call.sizes = s;
  call.residual = documents.tokens();
  call.dtype = in.dtype;
  call.precision = parse_precision(precision);
  call.normalize = normalize;
  call.Q = query_view(Q);
  Tensor scores = new_tensor(Q, {s.Nq, s.N}, score_type(in.dtype));
  call.scores = scores.mutable_data_ptr();
  if (!with_winners) {
    forward(call);
    return {scores, scores};
  }
  Tensor winners = new_tensor(Q, {s.Nq, s.N, s.Lq}, wide_winners(in) ? ScalarType::Int : ScalarType::Short);
  call.winners = winners.mutable_data_ptr();
  call.wide = wide_winners(in);
  forward(call);
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
  return score(Q, codes, residuals, extents, centroids, bucket_weights, nbits, normalize, precision, true);
}

Tensor maxsim_residual_backward(Tensor grad_scores, Tensor Q, Tensor codes, Tensor residuals, Tensor extents,
                                Tensor centroids, Tensor bucket_weights, Tensor winners, int64_t nbits,
                                bool normalize) {
  const ResidualInputs in =
      parse_residual_inputs(Q, codes, residuals, extents, centroids, bucket_weights, nbits);
  check_residual_winners(grad_scores, Q, winners, in);
  const Documents documents(in, codes, residuals, extents, centroids, bucket_weights, nbits);
  Tensor grad_Q = new_tensor(Q, {in.sizes.Nq, in.sizes.Lq, in.sizes.d}, Q.scalar_type());
  BackwardCall call;
  call.sizes = in.sizes;
  call.residual = documents.tokens();
  call.dtype = in.dtype;
  call.normalize = normalize;
  call.Q = query_view(Q);
  call.grad_scores = grad_scores.const_data_ptr();
  call.grad_query_stride = grad_scores.stride(0);
  call.grad_item_stride = grad_scores.stride(1);
  call.winners = winners.const_data_ptr();
  call.wide = wide_winners(in);
  call.grad_Q = grad_Q.mutable_data_ptr();
  backward(call);
  return grad_Q;
}

Tensor plaid_approx_score(Tensor query_centroid_scores, Tensor codes, Tensor doc_lengths) {
  check_centroid_scores(query_centroid_scores, codes, doc_lengths);
  const Tensor table = torch::stable::contiguous(query_centroid_scores);
  const Tensor rows = torch::stable::contiguous(codes), lengths = torch::stable::contiguous(doc_lengths);
  const bool wide = lengths.scalar_type() == ScalarType::Long;
  Tensor scores = new_tensor(table, {codes.size(0)}, table.scalar_type());
  std::vector<int64_t> counts;
  for (int64_t j = 0; j < codes.size(0); ++j) {
    const int64_t count = wide ? static_cast<const int64_t*>(lengths.const_data_ptr())[j]
                               : static_cast<const int32_t*>(lengths.const_data_ptr())[j];
    STD_TORCH_CHECK(0 <= count && count <= codes.size(1),
                    "late_interaction: doc_lengths must lie within [0, ", codes.size(1), "], got ", count);
    counts.push_back(count);
  }
  centroid_scores({.table = table.const_data_ptr(),
                   .fp64 = table.scalar_type() == ScalarType::Double,
                   .centroids = table.size(0),
                   .Lq = table.size(1),
                   .codes = static_cast<const int32_t*>(rows.const_data_ptr()),
                   .documents = codes.size(0),
                   .room = codes.size(1),
                   .lengths = counts.data(),
                   .scores = scores.mutable_data_ptr()});
  return scores;
}

}  // namespace
}  // namespace late_interaction::cpu

LATE_INTERACTION_LIBRARY_IMPL(CPU, m) {
  m.impl("maxsim_residual", TORCH_BOX(&late_interaction::cpu::maxsim_residual));
  m.impl("maxsim_residual_winners", TORCH_BOX(&late_interaction::cpu::maxsim_residual_winners));
  m.impl("maxsim_residual_backward", TORCH_BOX(&late_interaction::cpu::maxsim_residual_backward));
  m.impl("plaid_approx_score", TORCH_BOX(&late_interaction::cpu::plaid_approx_score));
}
