// A thread owns a range of documents. It folds the rows of the table that a document's codes name into one
// row of maxima, and sums that.
#include "centroid_scores.h"

#include <algorithm>
#include <limits>

#include "../common/arithmetic.h"
#include "parallel.h"

namespace late_interaction::cpu {
namespace {

constexpr int64_t kDocumentsPerItem = 16;
constexpr int64_t kRowsAhead = 8;  // rows lie anywhere: ask for them early
constexpr int64_t kLine = 64;

template <class Real>
class Worker {
 public:
  explicit Worker(const CentroidScoresCall& call)
      : call_(call), table_(static_cast<const Real*>(call.table)) {
    thread_scratch().reset(Scratch::size_of<Real>(call.Lq));
    best_ = thread_scratch().take<Real>(call.Lq);
  }

  void operator()(int64_t item) {
    const int64_t end = std::min((item + 1) * kDocumentsPerItem, call_.documents);
    for (int64_t j = item * kDocumentsPerItem; j < end; ++j) {
      static_cast<Real*>(call_.scores)[j] =
          call_.lengths[j] == 0 ? Real{0} : score(call_.codes + j * call_.room, call_.lengths[j]);
    }
  }

 private:
  const Real* row(int32_t code) const {
    return table_ + (code >= 0 && code < call_.centroids ? code : 0) * call_.Lq;
  }

  Real score(const int32_t* codes, int64_t count) {
    std::fill_n(best_, call_.Lq, -std::numeric_limits<Real>::infinity());
    for (int64_t n = 0; n < count; ++n) {
      const char* later = reinterpret_cast<const char*>(row(codes[std::min(n + kRowsAhead, count - 1)]));
      for (int64_t byte = 0; byte < int64_t(call_.Lq * sizeof(Real)); byte += kLine) {
        __builtin_prefetch(later + byte, 0, 3);
      }
      const Real* x = row(codes[n]);
      for (int64_t k = 0; k < call_.Lq; ++k) best_[k] = replaces_maximum(x[k], best_[k]) ? x[k] : best_[k];
    }
    Real sum = 0;
    for (int64_t k = 0; k < call_.Lq; ++k) sum += best_[k];
    return sum;
  }

  const CentroidScoresCall& call_;
  const Real* table_;
  Real* best_;
};

template <class Real>
void run(const CentroidScoresCall& call) {
  const int64_t threads = threads_for(double(call.documents) * double(call.room) * double(call.Lq));
  for_each_item(ceil_div(call.documents, kDocumentsPerItem), threads, [&] { return Worker<Real>(call); });
}

}  // namespace

void centroid_scores(const CentroidScoresCall& call) { call.fp64 ? run<double>(call) : run<float>(call); }

}  // namespace late_interaction::cpu
