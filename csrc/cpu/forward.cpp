// MaxSim forward: who owns what.
//
//            documents j0 .. j1 of the item, tile by tile
//          +---------------------------------------------+
//   row    |  panel 0: 2 vectors of query rows           |   An item is a range of queries times a range of
//   block  |  panel 1                                    |   documents. One thread owns it, and with it
//          |  ...                                        |   scores[i0:i1, j0:j1] and their winners.
//          +---------------------------------------------+
//
//   Queries are flattened to rows, so short ones fill a panel together; masked query tokens take no row.
//
//   for each row block:        pack its rows into panels (once)
//     for each document:
//       for each tile:         list the valid tokens, where they lie; those that need conversion or have
//         for each panel:      strided dims go to the thread's tile buffer; then the kernel of
//           score_tile         microkernel.inc.h folds the tile into the running maxima
//       sum the maxima of each query, write scores and winners
//
// A thread's memory: one row block of panels, one tile, and a maximum and a winner per row. With fewer pairs
// than threads an item is a part of a pair; the maxima of all parts are kept, and merged at the end.
#include "forward.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "../common/arithmetic.h"
#include "cache_blocking.h"
#include "kernels.h"
#include "parallel.h"
#include "tile_stage.h"
#include "weights.h"

namespace late_interaction::cpu {
namespace {

const Multiplier& choose_multiplier(const Kernels& k, const ForwardCall& call) {
  if (call.compared_bits) return k.hamming;
  if (call.dtype == Dtype::fp64) return k.f64;
  if (call.dtype == Dtype::int8 && k.has_int8 && call.sizes.d <= kMaxInt8Dims) return k.int8;
  // Where bf16 pairs multiply at no gain, fp32 is the better answer to "medium" too. fp16, asked for or
  // stored, always multiplies as fp32: a CPU gains nothing from rounding first.
  // A bf16 holds every one-byte code, so their products are exact there too.
  const bool bf16 = call.dtype == Dtype::bf16 || is_quantized(call.dtype) ||
                    (call.dtype == Dtype::fp32 && call.precision == Precision::medium);
  return bf16 && k.has_bf16 ? k.bf16 : k.f32;
}

// True if a query token's maximum is multiplied: by the inverse norm or the scale of the codes, or by its
// weight.
bool scales(const ForwardCall& call) { return call.normalize || call.q_scale.data || call.q_weights.data; }

// Sums the maxima of one query and one document. Four chains, so that additions overlap; the index among the
// query's kept tokens decides the chain, so the sum does not depend on how the query was cut.
class ScoreSum {
 public:
  void add(double x) { chain_[count_++ % 4] += x; }

  // Adds x[0], x[1], ..., times their scales if there are some.
  template <class Real>
  void add(const Real* x, const Real* scales, int64_t count) {
    if (scales) {
      add_each(count, [&](int64_t n) { return double{x[n] * scales[n]}; });
    } else {
      add_each(count, [&](int64_t n) { return double{x[n]}; });
    }
  }

  double total() const { return (chain_[0] + chain_[1]) + (chain_[2] + chain_[3]); }

 private:
  template <class F>
  void add_each(int64_t count, const F& at) {
    int64_t n = 0;
    while (n < count && count_ % 4 != 0) add(at(n++));
    double chain[4] = {chain_[0], chain_[1], chain_[2], chain_[3]};
    for (; n + 4 <= count; n += 4, count_ += 4) {
      for (int k = 0; k < 4; ++k) chain[k] += at(n + k);
    }
    std::copy_n(chain, 4, chain_);
    while (n < count) add(at(n++));
  }

  double chain_[4] = {};
  int64_t count_ = 0;
};

// The maxima of split pairs, by query token.
template <class Real>
struct SplitMaxima {
  std::unique_ptr<Real[]> best;       // [pairs, token_splits, Lq]
  std::unique_ptr<int32_t[]> winner;  // the same; the sentinel where nothing was scored
  std::unique_ptr<Real[]> scale;      // [pairs, Lq]: scales of the query tokens' maxima

  SplitMaxima(const Cut& c, const Sizes& s) {
    if (!c.splits_pairs()) return;
    const int64_t rows = s.Nq * s.N * s.Lq;
    best.reset(new Real[rows * c.token_splits]);
    winner.reset(new int32_t[rows * c.token_splits]);
    scale.reset(new Real[rows]);
    std::fill_n(winner.get(), rows * c.token_splits, kSentinel);
  }
};

// A query's tokens in the row block: [first_token, end_token), of which `rows` are kept.
struct Segment {
  int64_t query;
  int64_t first_token, end_token;
  int64_t first_row, rows;
};

template <class Real, class Index>
class Worker {
 public:
  Worker(const ForwardCall& call, const Kernels& k, const Multiplier& m, const Cut& c,
         const SplitMaxima<Real>& splits)
      : call_(call), s_(call.sizes), rows_kernels_(row_kernels<Real>(k)), m_(m), c_(c), splits_(splits) {
    panel_rows_ = 2 * m.lanes;
    if (call.packed) q_offsets_ = call.packed->q_offsets;
    element_ = element_bytes(call.dtype);
    const int64_t block = c.block_rows;
    Scratch& memory = thread_scratch();
    memory.start(TileStage<Real>::bytes(call, m, c), Array{block * c.row_bytes, panels_},
                 Array{c.row_bytes, packed_row_}, Array{block, best_}, Array{block, query_scale_},
                 Array{block, winner_}, Array{block, row_token_});
    documents_.emplace(call, k, m, c, memory);
    if (c.steps > ceil_div(s_.d, m.step_dims)) {  // packing does not write the steps behind the last
      std::memset(packed_row_, 0, static_cast<size_t>(c.row_bytes));
    }
  }
  ~Worker() {
    if (m_.release) m_.release();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void operator()(int64_t item) { c_.splits_pairs() ? score_split(item) : score_pairs(item); }

 private:
  void score_pairs(int64_t item) {
    const int64_t i0 = item / c_.document_items * c_.queries;
    const int64_t j0 = first_document(item % c_.document_items);
    const int64_t i1 = std::min(i0 + c_.queries, s_.Nq);
    const int64_t j1 = first_document(item % c_.document_items + 1);
    open_sums_.clear();
    for (int64_t query = i0, token = 0; query < i1;) {
      next_block(query, token, i1, s_.Lq);
      if (token > 0) open_sums_.resize(j1 - j0);
      for (int64_t j = j0; j < j1; ++j) {
        const bool scored = score_document(j, 0, documents_->document_length(j));
        for (const Segment& segment : segments_) {
          ScoreSum fresh;
          const bool whole = segment.first_token == 0 && segment.end_token == query_length(segment.query);
          finish(segment, j, scored, whole ? fresh : open_sums_[j - j0]);
        }
      }
    }
  }

  // Returns where the n-th range of documents begins. Packed documents are cut into ranges of about as many
  // tokens.
  int64_t first_document(int64_t n) const {
    if (!call_.packed || n == c_.document_items) return std::min(n * c_.documents, s_.N);
    const int32_t *begin = call_.packed->d_offsets, *end = begin + s_.N;
    const int64_t tokens = *end - *begin;
    return std::lower_bound(begin, end, *begin + tokens * n / c_.document_items) - begin;
  }

  int64_t query_length(int64_t query) const {
    return q_offsets_ ? q_offsets_[query + 1] - q_offsets_[query] : s_.Lq;
  }
  // A query token's index in the query, or among all packed queries' tokens.
  int64_t query_index(int64_t query, int64_t token) const {
    return q_offsets_ ? q_offsets_[query] + token : token;
  }
  // The index of the winner of a query's first token in document j.
  int64_t winner_index(int64_t query, int64_t j) const {
    return q_offsets_ ? j * s_.Lq + q_offsets_[query] : (query * s_.N + j) * s_.Lq;
  }

  void score_split(int64_t item) {
    const int64_t token_split = item % c_.token_splits, row_split = item / c_.token_splits % c_.row_splits;
    const int64_t pair = item / (c_.token_splits * c_.row_splits);
    const int64_t end_row = s_.Lq * (row_split + 1) / c_.row_splits;
    int64_t query = pair / s_.N, token = s_.Lq * row_split / c_.row_splits;
    while (query == pair / s_.N) {
      next_block(query, token, query + 1, end_row);
      for (int64_t row = 0; scales(call_) && token_split == 0 && row < rows_; ++row) {
        splits_.scale[pair * s_.Lq + row_token_[row]] = query_scale_[row];
      }
      if (!score_document(pair % s_.N, s_.Ld * token_split / c_.token_splits,
                          s_.Ld * (token_split + 1) / c_.token_splits)) {
        continue;
      }
      const int64_t out = (pair * c_.token_splits + token_split) * s_.Lq;
      for (int64_t row = 0; row < rows_; ++row) {
        splits_.best[out + row_token_[row]] = best_[row];
        splits_.winner[out + row_token_[row]] = static_cast<int32_t>(winner_[row]);
      }
    }
  }

  // Collects and packs rows from (query, token) on, tokens below end_token (and the query's end) of queries
  // below end, and moves both past them.
  void next_block(int64_t& query, int64_t& token, int64_t end, int64_t end_token) {
    rows_ = 0;
    segments_.clear();
    while (query < end && rows_ < c_.block_rows) {
      Segment segment{query, token, token, rows_, 0};
      const int64_t query_end = std::min(end_token, query_length(query));
      for (; token < query_end && rows_ < c_.block_rows; ++token) {
        if (!keeps(call_.q_mask, 0, query, token)) continue;
        pack_query_row(query, token);
        row_token_[rows_++] = static_cast<Index>(token);
      }
      segment.end_token = token;
      segment.rows = rows_ - segment.first_row;
      segments_.push_back(segment);
      if (token == query_end) {
        ++query;
        token = 0;
      }
    }
    // The lanes of the last panel that hold no row compute with zeros, and nobody looks.
    for (int64_t row = rows_; row < round_up(rows_, panel_rows_); ++row) scatter_row(row, nullptr);
  }

  void pack_query_row(int64_t query, int64_t token) {
    const int64_t index = query_index(query, token);
    const char* x = token_at(call_.Q, element_, 0, query, index);
    const auto pack = m_.pack_query ? m_.pack_query : m_.pack_row;
    pack(x, call_.dtype, call_.Q.dim_stride, s_.d, packed_row_);
    scatter_row(rows_, packed_row_);
    if (!scales(call_)) return;
    Real& scale = query_scale_[rows_];
    scale = 1;
    if (call_.normalize) {
      const int64_t here = 0;
      rows_kernels_.inverse_norms(x, &here, 1, call_.dtype, call_.Q.dim_stride, s_.d, &scale);
      if (scale == 0) scatter_row(rows_, nullptr);  // its products may overflow, and it counts as zeros
    } else if (call_.q_scale.data) {
      scale = checked_scale(*scale_at(call_.q_scale, 0, query, token));
    }
    scale = weighted(call_.q_weights, query, index, scale);
  }

  // Rows lie across a panel: [step][row].
  void scatter_row(int64_t row, const char* packed) {
    char* panel = panels_ + row / panel_rows_ * panel_rows_ * c_.row_bytes;
    if (m_.step_bytes == 4) {
      scatter(reinterpret_cast<uint32_t*>(panel) + row % panel_rows_, packed);
    } else {
      scatter(reinterpret_cast<uint64_t*>(panel) + row % panel_rows_, packed);
    }
  }

  template <class Step>
  void scatter(Step* lane, const char* packed) {
    const Step* step = reinterpret_cast<const Step*>(packed);
    for (int64_t k = 0; k < c_.steps; ++k) lane[k * panel_rows_] = step ? step[k] : Step{0};
  }

  // Folds the valid tokens of document j in [token, end) into best_ and winner_. False: there is none.
  bool score_document(int64_t j, int64_t token, int64_t end) {
    const int64_t query = segments_.front().query;  // in_batch views have query_stride 0
    bool any = false;
    while (rows_ > 0 && token < end) {
      const int64_t count = documents_->gather(query, j, token, end);
      if (count == 0) break;
      if (!any) {
        std::fill_n(best_, round_up(rows_, panel_rows_), -std::numeric_limits<Real>::infinity());
        std::fill_n(winner_, round_up(rows_, panel_rows_), Index{documents_->first_token()});
        any = true;
      }
      score(query, j, token, end, count);
    }
    return any;
  }

  void score(int64_t query, int64_t j, int64_t next, int64_t end, int64_t count) {
    Tile& tile = documents_->tile(query, j, next, end, count);
    for (int64_t row = 0; row < rows_; row += panel_rows_) {
      tile.panel = panels_ + row * c_.row_bytes;
      tile.vectors = rows_ - row > m_.lanes ? 2 : 1;
      tile.best = best_ + row;
      tile.winner = winner_ + row;
      (row == 0 && tile.source ? documents_->widening() : m_.score_tile)(tile);
      tile.ahead_step = 0;
    }
  }

  void finish(const Segment& segment, int64_t j, bool scored, ScoreSum& sum) const {
    if (scored) {
      const Real* scale = scales(call_) ? query_scale_ + segment.first_row : nullptr;
      sum.add(best_ + segment.first_row, scale, segment.rows);
    }
    if (segment.end_token == query_length(segment.query)) {
      static_cast<Real*>(call_.scores)[segment.query * s_.N + j] = static_cast<Real>(sum.total());
      sum = ScoreSum();
    }
    if (!call_.winners) return;
    const int64_t index = winner_index(segment.query, j);
    if (call_.wide || wide_winners(s_.Ld)) {
      write_winners(static_cast<int32_t*>(call_.winners) + index, segment, scored);
    } else {
      write_winners(static_cast<uint16_t*>(call_.winners) + index, segment, scored);
    }
  }

  template <class Out>
  void write_winners(Out* out, const Segment& segment, bool scored) const {
    const bool all_kept = segment.rows == segment.end_token - segment.first_token;
    if (!scored || !all_kept)
      std::fill(out + segment.first_token, out + segment.end_token, static_cast<Out>(kSentinel));
    if (!scored) return;
    const Index* winner = winner_ + segment.first_row;
    if (all_kept) {
      for (int64_t row = 0; row < segment.rows; ++row)
        out[segment.first_token + row] = static_cast<Out>(winner[row]);
    } else {
      const Index* token = row_token_ + segment.first_row;
      for (int64_t row = 0; row < segment.rows; ++row) out[token[row]] = static_cast<Out>(winner[row]);
    }
  }

  const ForwardCall& call_;
  const Sizes& s_;
  const RowKernels<Real>& rows_kernels_;
  const Multiplier& m_;
  const Cut& c_;
  const SplitMaxima<Real>& splits_;
  const int32_t* q_offsets_ = nullptr;  // of packed queries
  int64_t panel_rows_, element_;
  // The row block.
  int64_t rows_ = 0;
  std::vector<Segment> segments_;
  std::vector<ScoreSum> open_sums_;  // by document, while a query goes on in the next block
  char* panels_;
  Real* query_scale_;
  Index* row_token_;
  Real* best_;
  Index* winner_;
  char* packed_row_;
  std::optional<TileStage<Real>> documents_;  // made when the thread's memory is there
};

// Merges the maxima over a document's splits, first tokens first: a later one must be greater, and the first
// NaN stays.
template <class Real>
void merge_splits(const ForwardCall& call, const Cut& c, const SplitMaxima<Real>& splits) {
  const Sizes& s = call.sizes;
  for (int64_t pair = 0; pair < s.Nq * s.N; ++pair) {
    ScoreSum sum;
    for (int64_t token = 0; token < s.Lq; ++token) {
      Real best = 0;
      int32_t winner = kSentinel;
      for (int64_t split = 0; split < c.token_splits; ++split) {
        const int64_t n = (pair * c.token_splits + split) * s.Lq + token;
        if (splits.winner[n] == kSentinel) continue;
        const Real x = splits.best[n];
        if (winner == kSentinel || replaces_maximum(x, best)) {
          best = x;
          winner = splits.winner[n];
        }
      }
      if (winner != kSentinel) sum.add(scales(call) ? best * splits.scale[pair * s.Lq + token] : best);
      if (call.winners && wide_winners(s.Ld)) {
        static_cast<int32_t*>(call.winners)[pair * s.Lq + token] = winner;
      } else if (call.winners) {
        static_cast<uint16_t*>(call.winners)[pair * s.Lq + token] = static_cast<uint16_t>(winner);
      }
    }
    static_cast<Real*>(call.scores)[pair] = static_cast<Real>(sum.total());
  }
}

template <class Real, class Index>
void run(const ForwardCall& call, const Kernels& k, const Multiplier& m, const Cut& c, int64_t threads) {
  const SplitMaxima<Real> splits(c, call.sizes);
  for_each_item(c.items(), threads, [&] { return Worker<Real, Index>(call, k, m, c, splits); });
  if (c.splits_pairs()) merge_splits(call, c, splits);
}

}  // namespace

void forward(const ForwardCall& call) {
  const Sizes& s = call.sizes;
  if (s.Nq == 0 || s.N == 0) return;
  const Kernels& k = kernels();
  const Multiplier& m = choose_multiplier(k, call);
  Sizes mean = s;  // of a sequence
  if (call.packed) {
    if (call.packed->q_offsets) mean.Lq = ceil_div(s.Lq, s.Nq);
    mean.Ld = ceil_div(s.Ld, s.N);
  } else if (call.residual) {
    mean.Ld =
        ceil_div(std::accumulate(call.residual->lengths, call.residual->lengths + s.N, int64_t{0}), s.N);
  }
  const double pairs = double(s.Nq) * double(s.N);
  const int64_t threads = threads_for(pairs * double(mean.Lq) * double(mean.Ld) * double(s.d));
  const Cut c = call.packed || call.residual ? cut_ragged(mean, m, threads) : cut_forward(s, m, threads);
  if (call.dtype == Dtype::fp64) {
    run<double, int64_t>(call, k, m, c, threads);
  } else {
    run<float, int32_t>(call, k, m, c, threads);
  }
}

}  // namespace late_interaction::cpu
