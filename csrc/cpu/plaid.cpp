// The CPU side of the operators on residual-compressed documents: tensors in, plain calls out.
#include "../common/plaid_tensors.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "../common/arithmetic.h"
#include "../common/forms.h"
#include "../common/registration.h"
#include "backward.h"
#include "forward.h"
#include "parallel.h"

namespace late_interaction::cpu {
namespace {

// Owns the memory that a ResidualTokens points to.
class Documents {
 public:
  Documents(const ResidualInputs& in, const ResidualTensors& x)
      : codes_(torch::stable::contiguous(x.codes)),
        residuals_(torch::stable::contiguous(x.residuals)),
        centroids_(torch::stable::contiguous(x.centroids)),
        weights_(torch::stable::contiguous(x.bucket_weights)),
        nbits_(static_cast<int>(x.nbits)) {
    const Tensor ends = torch::stable::contiguous(x.extents);
    if (ends.scalar_type() == ScalarType::Int) {
      read_extents(data_of<int32_t>(ends), in);
    } else {
      read_extents(data_of<int64_t>(ends), in);
    }
  }

  ResidualTokens tokens() const {
    ResidualTokens x;
    x.codes = data_of<int32_t>(codes_);
    x.residuals = data_of<uint8_t>(residuals_);
    x.bytes = residuals_.size(residuals_.dim() - 1);
    x.weights = data_of<float>(weights_);
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

// Either direction describes its inputs so. They point into `documents`.
template <class Call>
Call call_of(const ResidualInputs& in, const Tensor& Q, const Documents& documents, bool normalize) {
  Call call;
  call.sizes = in.sizes;
  call.residual = documents.tokens();
  call.dtype = in.dtype;
  call.normalize = normalize;
  call.Q = view_tokens(Q);
  call.wide = wide_winners(in);
  return call;
}

ScoresAndWinners score(const ResidualTensors& x, bool normalize, const std::string& precision,
                       bool want_winners) {
  const ResidualInputs in = parse_residual_inputs(x);
  const Sizes& s = in.sizes;
  const Documents documents(in, x);
  auto call = call_of<ForwardCall>(in, x.Q, documents, normalize);
  call.precision = parse_precision(precision);
  const Tensor scores = new_tensor(x.Q, {s.Nq, s.N}, score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) winners = new_tensor(x.Q, {s.Nq, s.N, s.Lq}, winner_type(in));
  call.scores = scores.mutable_data_ptr();
  call.winners = winners ? winners->mutable_data_ptr() : nullptr;
  forward(call);
  return {scores, winners};
}

Tensor grad_of_queries(const Tensor& grad_scores, const ResidualTensors& x, const Tensor& winners,
                       bool normalize) {
  const ResidualInputs in = parse_residual_inputs(x);
  check_residual_winners(grad_scores, x.Q, winners, in);
  const Documents documents(in, x);
  const Tensor grad_Q = new_tensor(x.Q, {in.sizes.Nq, in.sizes.Lq, in.sizes.d}, x.Q.scalar_type());
  auto call = call_of<BackwardCall>(in, x.Q, documents, normalize);
  call.grad_scores = grad_scores.const_data_ptr();
  call.grad_query_stride = grad_scores.stride(0);
  call.grad_item_stride = grad_scores.stride(1);
  call.winners = winners.const_data_ptr();
  call.grad_Q = grad_Q.mutable_data_ptr();
  backward(call);
  return grad_Q;
}

// Scores documents by their centroids alone: a thread folds the rows of `table` that a document's codes name
// into one row of maxima, and sums that. A code that is out of range counts as 0; a document without tokens
// scores 0.
template <class Real>
class CentroidScorer {
 public:
  CentroidScorer(const Tensor& table, const Tensor& codes, const int64_t* lengths, const Tensor& scores)
      : table_(data_of<Real>(table)),
        centroids_(table.size(0)),
        Lq_(table.size(1)),
        codes_(data_of<int32_t>(codes)),
        documents_(codes.size(0)),
        room_(codes.size(1)),
        lengths_(lengths),
        scores_(mutable_data_of<Real>(scores)) {
    thread_scratch().start(Array{Lq_, best_});
  }

  void operator()(int64_t item) {
    const int64_t end = std::min((item + 1) * kDocumentsPerItem, documents_);
    for (int64_t j = item * kDocumentsPerItem; j < end; ++j) {
      scores_[j] = lengths_[j] == 0 ? Real{0} : score(codes_ + j * room_, lengths_[j]);
    }
  }

  static void run(const Tensor& table, const Tensor& codes, const int64_t* lengths, const Tensor& scores) {
    const int64_t documents = codes.size(0);
    const int64_t threads = threads_for(double(documents) * double(codes.size(1)) * double(table.size(1)));
    for_each_item(ceil_div(documents, kDocumentsPerItem), threads,
                  [&] { return CentroidScorer(table, codes, lengths, scores); });
  }

 private:
  static constexpr int64_t kDocumentsPerItem = 16;
  static constexpr int64_t kRowsAhead = 8;  // rows lie anywhere: ask for them early
  static constexpr int64_t kLine = 64;

  const Real* row(int32_t code) const { return table_ + (code >= 0 && code < centroids_ ? code : 0) * Lq_; }

  Real score(const int32_t* codes, int64_t count) {
    std::fill_n(best_, Lq_, -std::numeric_limits<Real>::infinity());
    for (int64_t n = 0; n < count; ++n) {
      const char* later = reinterpret_cast<const char*>(row(codes[std::min(n + kRowsAhead, count - 1)]));
      for (int64_t byte = 0; byte < int64_t(Lq_ * sizeof(Real)); byte += kLine) {
        __builtin_prefetch(later + byte, 0, 3);
      }
      const Real* x = row(codes[n]);
      for (int64_t k = 0; k < Lq_; ++k) best_[k] = replaces_maximum(x[k], best_[k]) ? x[k] : best_[k];
    }
    Real sum = 0;
    for (int64_t k = 0; k < Lq_; ++k) sum += best_[k];
    return sum;
  }

  const Real* table_;  // [centroids, Lq]: similarities
  const int64_t centroids_, Lq_;
  const int32_t* codes_;  // [documents, room]
  const int64_t documents_, room_;
  const int64_t* lengths_;  // [documents]
  Real* scores_;            // [documents]
  Real* best_;
};

Tensor plaid_approx_score(Tensor query_centroid_scores, Tensor codes, Tensor doc_lengths) {
  check_centroid_scores(query_centroid_scores, codes, doc_lengths);
  const Tensor table = torch::stable::contiguous(query_centroid_scores);
  const Tensor rows = torch::stable::contiguous(codes), lengths = torch::stable::contiguous(doc_lengths);
  const bool wide = lengths.scalar_type() == ScalarType::Long;
  const Tensor scores = new_tensor(table, {codes.size(0)}, table.scalar_type());
  std::vector<int64_t> counts;
  for (int64_t j = 0; j < codes.size(0); ++j) {
    const int64_t count = wide ? data_of<int64_t>(lengths)[j] : data_of<int32_t>(lengths)[j];
    STD_TORCH_CHECK(0 <= count && count <= codes.size(1),
                    "late_interaction: doc_lengths must lie within [0, ", codes.size(1), "], got ", count);
    counts.push_back(count);
  }
  const bool fp64 = table.scalar_type() == ScalarType::Double;
  (fp64 ? CentroidScorer<double>::run : CentroidScorer<float>::run)(table, rows, counts.data(), scores);
  return scores;
}

}  // namespace
}  // namespace late_interaction::cpu

LATE_INTERACTION_LIBRARY_IMPL(CPU, m) {
  late_interaction::ResidualForms<&late_interaction::cpu::score,
                                  &late_interaction::cpu::grad_of_queries>::add_to(m);
  m.impl("plaid_approx_score", TORCH_BOX(&late_interaction::cpu::plaid_approx_score));
}
