// XTR's selection on the CPU, one row at a time:
//
//   cells      |......|......|......|   one query token's similarities with the tokens of all documents
//   segments   |  max |  max |  max |   the k-th largest maximum is a lower bound of the threshold, since
//                                       at least k cells reach it
//   candidates   . .      .    . . .    the cells that reach it; the k-th largest of them is the threshold
//
// Almost all cells are read twice and compared once; only candidates, about k of them, are sorted out
// further.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../common/arithmetic.h"
#include "../common/registration.h"
#include "../common/xtr_tensors.h"
#include "parallel.h"

namespace late_interaction::cpu {

namespace {

constexpr int64_t kSegment = 16;  // cells: few enough that a segment seldom holds two of the k largest

// The order of torch.topk: NaN is above every number, and two NaN tie.
template <class Real>
bool above(Real a, Real b) {
  return a > b || (std::isnan(a) && !std::isnan(b));
}

template <class Real>
Real kth_largest(Real* values, int64_t count, int64_t k) {
  std::nth_element(values, values + k - 1, values + count, above<Real>);
  return values[k - 1];
}

template <class Real>
class RowSelector {
 public:
  explicit RowSelector(const XtrSelection& call)
      : call_(call), tokens_(call.tokens()), segments_(ceil_div(tokens_, kSegment)) {
    thread_scratch().start(Array{tokens_, cells_}, Array{tokens_, sorted_}, Array{tokens_, candidates_},
                           Array{segments_, segment_maxima_}, Array{segments_, sorted_maxima_});
  }

  void operator()(int64_t row) {
    read_row(row);
    find_candidates();
    find_threshold();
    maxima_ = static_cast<Real*>(call_.maxima) + row * call_.documents;
    winners_ = call_.winners + row * call_.documents;
    write_documents();
    if (call_.zero_unless_all) count_zeros();
  }

 private:
  static constexpr Real kMasked = std::numeric_limits<Real>::lowest();

  bool counts(int64_t cell) const { return call_.d_mask == nullptr || call_.d_mask[cell] != 0; }

  void read_row(int64_t row) {
    const Real* given = static_cast<const Real*>(call_.similarities) + row * call_.row_stride;
    if (call_.d_mask == nullptr) {
      std::copy(given, given + tokens_, cells_);
    } else {
      for (int64_t i = 0; i < tokens_; ++i) cells_[i] = call_.d_mask[i] != 0 ? given[i] : kMasked;
    }
  }

  void find_candidates() {
    count_ = 0;
    if (call_.k > segments_) {
      for (int64_t i = 0; i < tokens_; ++i) candidates_[count_++] = static_cast<int32_t>(i);
      return;
    }
    for (int64_t s = 0; s < segments_; ++s) segment_maxima_[s] = segment_maximum(s);
    std::copy(segment_maxima_, segment_maxima_ + segments_, sorted_maxima_);
    const Real bound = kth_largest(sorted_maxima_, segments_, call_.k);
    for (int64_t s = 0; s < segments_; ++s) {
      if (above(bound, segment_maxima_[s])) continue;
      const int64_t end = std::min((s + 1) * kSegment, tokens_);
      for (int64_t i = s * kSegment; i < end; ++i) {
        if (!above(bound, cells_[i])) candidates_[count_++] = static_cast<int32_t>(i);
      }
    }
  }

  Real segment_maximum(int64_t segment) const {
    const int64_t begin = segment * kSegment, end = std::min(begin + kSegment, tokens_);
    Real maximum = cells_[begin];
    for (int64_t i = begin + 1; i < end; ++i) {
      if (replaces_maximum(cells_[i], maximum)) maximum = cells_[i];
    }
    return maximum;
  }

  // Finds the threshold, and the last selected one of the cells equal to it.
  void find_threshold() {
    for (int64_t c = 0; c < count_; ++c) sorted_[c] = cells_[candidates_[c]];
    threshold_ = kth_largest(sorted_, count_, call_.k);
    int64_t left = call_.k;
    for (int64_t c = 0; c < count_; ++c) left -= above(cells_[candidates_[c]], threshold_);
    last_tie_ = tokens_;
    // PyLate multiplies similarities by the selection, and NaN * 0 is NaN: every NaN counts, selected or not.
    if (call_.zero_unless_all && std::isnan(threshold_)) return;
    for (int64_t c = 0; c < count_; ++c) {
      const int64_t cell = candidates_[c];
      if (ties(cell) && --left == 0) {
        last_tie_ = cell;
        return;
      }
    }
  }

  bool ties(int64_t cell) const {
    return !above(cells_[cell], threshold_) && !above(threshold_, cells_[cell]);
  }

  bool selects(int64_t cell) const {
    return above(cells_[cell], threshold_) || (ties(cell) && cell <= last_tie_);
  }

  void write_documents() {
    std::fill(maxima_, maxima_ + call_.documents, Real{0});
    std::fill(winners_, winners_ + call_.documents, kSentinel);
    for (int64_t c = 0; c < count_; ++c) {
      const int64_t cell = candidates_[c];
      if (!selects(cell) || !counts(cell)) continue;
      const int64_t document = cell / call_.Ld;
      if (winners_[document] == kSentinel || replaces_maximum(cells_[cell], maxima_[document])) {
        maxima_[document] = cells_[cell];
        winners_[document] = static_cast<int32_t>(cell - document * call_.Ld);
      }
    }
  }

  // Cells that are not selected count as 0, so a document keeps a maximum that is not positive only if all of
  // its cells are selected, masked ones too.
  void count_zeros() {
    for (int64_t document = 0; document < call_.documents; ++document) {
      if (maxima_[document] > 0 || std::isnan(maxima_[document])) continue;
      const int64_t begin = document * call_.Ld;
      bool all = true;
      for (int64_t i = begin; all && i < begin + call_.Ld; ++i) all = selects(i);
      if (!all) {
        maxima_[document] = 0;
        winners_[document] = kSentinel;
      } else if (winners_[document] == kSentinel) {
        maxima_[document] = kMasked;
      }
    }
  }

  const XtrSelection& call_;
  const int64_t tokens_, segments_;
  Real* cells_;           // [tokens]: the row, masked cells at their number
  Real* sorted_;          // [tokens]: candidates, in no order of cells
  int32_t* candidates_;   // [tokens]: cells in rising order
  Real* segment_maxima_;  // [segments]
  Real* sorted_maxima_;   // [segments]
  int64_t count_ = 0;     // of candidates
  Real threshold_{};
  int64_t last_tie_ = 0;
  Real* maxima_ = nullptr;
  int32_t* winners_ = nullptr;
};

template <class Real>
void select_rows(const XtrSelection& call) {
  const double work = static_cast<double>(call.rows) * static_cast<double>(call.tokens()) * 8;
  for_each_item(call.rows, threads_for(work), [&] { return RowSelector<Real>(call); });
}

void xtr_select_(Tensor similarities, OptionalTensor d_mask, int64_t Ld, int64_t k, bool zero_unless_all,
                 Tensor maxima, Tensor winners) {
  const XtrSelection call =
      parse_xtr_selection(similarities, d_mask, Ld, k, zero_unless_all, maxima, winners);
  call.dtype == Dtype::fp64 ? select_rows<double>(call) : select_rows<float>(call);
}

}  // namespace

}  // namespace late_interaction::cpu

LATE_INTERACTION_LIBRARY_IMPL(CPU, m) {
  m.impl("xtr_select_", TORCH_BOX(&late_interaction::cpu::xtr_select_));
}
