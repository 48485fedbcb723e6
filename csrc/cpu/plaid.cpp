// The CPU side of the forward operators on residual-compressed documents: tensors in, plain calls out.
#include "../common/plaid_tensors.h"

#include <vector>

#include "../common/registration.h"
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
                      in.packed ? "never fall and lie within [0, " : "lie within [0, ", s.Ld,
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
  call.Q.data = Q.const_data_ptr();
  call.Q.item_stride = Q.stride(0);
  call.Q.token_stride = Q.stride(1);
  call.Q.dim_stride = Q.stride(2);
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

}  // namespace
}  // namespace late_interaction::cpu

LATE_INTERACTION_LIBRARY_IMPL(CPU, m) {
  m.impl("maxsim_residual", TORCH_BOX(&late_interaction::cpu::maxsim_residual));
  m.impl("maxsim_residual_winners", TORCH_BOX(&late_interaction::cpu::maxsim_residual_winners));
}
