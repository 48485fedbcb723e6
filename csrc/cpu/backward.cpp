// MaxSim backward from saved winners: who owns what.
//
//   grad_Q   A thread owns a range of query rows (i, s) and a float sum for each. It walks the documents in
//            order, a few at a time so that they stay in cache for all rows of the range, and adds
//            grad[i, j] * D[j, winner(i, j, s)]. Of residual-compressed documents it decompresses the
//            winners.
//
//   grad_D   A thread owns a range of tokens of one document. It sorts the winners that fall into the range
//            by token (counting sort, stable: within a token by query, then by query token), then forms one
//            token's sum of grad[i, j] * Q[i, s] after the other and writes each row once.
//
// Every sum is taken in an order that the inputs alone decide, so the gradients are the same bit for bit
// whatever the number of threads. That is what "lowmem" promises and it is also the fastest way here, so
// "auto", "lowmem" and "unified" are this one kernel on CPU.
//
// A winner outside [0, Ld), the sentinel included, sends no gradient.
#include "backward.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "../common/arithmetic.h"
#include "kernels.h"
#include "parallel.h"
#include "weights.h"

namespace late_interaction::cpu {
namespace {

constexpr int64_t kSumBytes = 256 << 10;       // of grad_Q sums: they and
constexpr int64_t kDocumentBytes = 384 << 10;  // the documents they gather from, or winners, stay in L2
constexpr int64_t kMaxDocuments = 64;
constexpr int64_t kItemsPerThread = 8;

// What both gradients read. Real: the type of sums; Index: the type of saved winners.
template <class Real, class Index>
struct Context {
  const BackwardCall& call;
  const Sizes& s;
  const RowKernels<Real>& rows;
  int64_t element;
  // With normalize: 1 / max(norm, eps) of every query token [Nq, Lq] and document token [documents, Ld].
  const Real* query_inverse_norm = nullptr;
  const Real* document_inverse_norm = nullptr;
  // [Nq, Lq]: factors of query rows in grad_D, inverse norms times weights. Null: 1.
  const Real* query_scale = nullptr;
  const int64_t* row_queries = nullptr;  // packed: of each query token, -1 for those of no query

  // Query and token of a row of Q. A packed token is counted through all queries.
  int64_t query_of(int64_t row) const { return row_queries ? row_queries[row] : row / s.Lq; }
  int64_t token_of(int64_t row) const { return row_queries ? row : row % s.Lq; }

  int64_t row_of(int64_t i, int64_t token) const { return row_queries ? token : i * s.Lq + token; }

  // Where a token's row lies, in bytes from Q.data or D.data.
  int64_t query_offset(int64_t i, int64_t token) const {
    return (i * call.Q.item_stride + token * call.Q.token_stride) * element;
  }
  int64_t document_offset(int64_t i, int64_t j, int64_t token) const {
    if (call.packed) return (call.packed->d_offsets[j] + token) * call.D.token_stride * element;
    return (i * call.D.query_stride + j * call.D.item_stride + token * call.D.token_stride) * element;
  }
  int64_t document_length(int64_t j) const {
    if (call.residual) return call.residual->lengths[j];
    return call.packed ? call.packed->d_offsets[j + 1] - call.packed->d_offsets[j] : s.Ld;
  }
  // The row of grad_D of a document's first token.
  int64_t first_row(int64_t document) const {
    return call.packed ? call.packed->d_offsets[document] : document * s.Ld;
  }
  int64_t document_index(int64_t i, int64_t j) const {
    return s.layout == Layout::per_query ? i * s.N + j : j;
  }
  const Index* winners(int64_t i, int64_t j) const {
    return static_cast<const Index*>(call.winners) + (call.packed ? j : i * s.N + j) * s.Lq;
  }
  Real grad(int64_t i, int64_t j) const {
    return static_cast<const Real*>(call.grad_scores)[i * call.grad_query_stride + j * call.grad_item_stride];
  }
  void normalize(Real* sum, const TokenView& x, int64_t offset, const Real* inverse_norm, int64_t row) const {
    if (!call.normalize) return;
    rows.through_normalize(sum, inverse_norm[row], static_cast<const char*>(x.data) + offset, call.dtype,
                           x.dim_stride, s.d);
  }
  // Writes row `row` of grad_Q and the gradient of its weight, from the gradient at a weight of 1. `room`
  // holds d numbers.
  void write_query(Real* sum, int64_t row, Real* room) const {
    const int64_t i = query_of(row), token = token_of(row), offset = query_offset(i, token);
    if (call.grad_weights) {
      const Real product = product_with_row(rows, sum, call.Q, offset, call.dtype, s.d, room);
      static_cast<Real*>(call.grad_weights)[row] =
          call.normalize ? product * query_inverse_norm[row] : product;
    }
    normalize(sum, call.Q, offset, query_inverse_norm, row);
    if (call.q_weights.data) {
      const Real weight = weight_at<Real>(call.q_weights, i, token);
      for (int64_t k = 0; k < s.d; ++k) sum[k] *= weight;
    }
    rows.write(sum, s.d, call.dtype, static_cast<char*>(call.grad_Q) + row * s.d * element);
  }
  // Writes the sum, taken through the token's normalization, to row `row` of grad.
  void write(Real* sum, const TokenView& x, int64_t offset, const Real* inverse_norm, void* grad,
             int64_t row) const {
    normalize(sum, x, offset, inverse_norm, row);
    rows.write(sum, s.d, call.dtype, static_cast<char*>(grad) + row * s.d * element);
  }
  // A token that won nothing (or a query token that is masked, whatever it holds).
  void write_zero(void* grad, int64_t row) const {
    std::memset(static_cast<char*>(grad) + row * s.d * element, 0, s.d * element);
  }
};

template <class Real, class Index>
class QueryWorker {
 public:
  QueryWorker(const Context<Real, Index>& context, int64_t rows_per_item)
      : x_(context), rows_per_item_(rows_per_item) {
    const int64_t document_bytes = (x_.call.residual ? 1 : x_.s.Ld) * x_.s.d * x_.element;
    documents_ = std::clamp<int64_t>(kDocumentBytes / std::max<int64_t>(document_bytes, 1), 1, kMaxDocuments);
    const int64_t decompressed = x_.call.residual ? documents_ * x_.s.d : 0;
    thread_scratch().start(Array{rows_per_item * x_.s.d, sums_}, Array{rows_per_item, won_},
                           Array{documents_, scales_}, Array{documents_, inverse_norms_},
                           Array{documents_, offsets_}, Array{x_.s.d, room_},
                           Array{decompressed, decompressed_}, Array{decompressed * x_.element, rounded_});
  }

  void operator()(int64_t item) {
    const Sizes& s = x_.s;
    const int64_t first = item * rows_per_item_;
    const int64_t end = std::min(first + rows_per_item_, s.Nq * s.Lq);
    std::fill_n(sums_, (end - first) * s.d, Real{0});
    std::fill_n(won_, end - first, char{0});
    TokenView D = x_.call.D;
    if (x_.call.residual) {
      D.data = rounded_;
      D.dim_stride = 1;
    }
    for (int64_t j = 0; j < s.N; j += documents_) {
      for (int64_t row = first; row < end; ++row) {
        const int64_t count = gather(x_.query_of(row), x_.token_of(row), j, std::min(j + documents_, s.N));
        won_[row - first] |= count > 0;
        if (x_.call.residual) decompress(count);
        x_.rows.add_rows(sums_ + (row - first) * s.d, scales_, offsets_, count, D.data, x_.call.dtype,
                         D.dim_stride, s.d);
      }
    }
    for (int64_t row = first; row < end; ++row) {
      if (won_[row - first]) {
        x_.write_query(sums_ + (row - first) * s.d, row, room_);
      } else {
        x_.write_zero(x_.call.grad_Q, row);
        if (x_.call.grad_weights) static_cast<Real*>(x_.call.grad_weights)[row] = 0;
      }
    }
  }

 private:
  // The rows of documents j0 .. j1 that won query token (i, token), and their factors.
  int64_t gather(int64_t i, int64_t token, int64_t j0, int64_t j1) {
    const Sizes& s = x_.s;
    int64_t count = 0;
    for (int64_t j = j0; j < j1 && i >= 0; ++j) {
      const uint64_t t = static_cast<uint64_t>(static_cast<int64_t>(x_.winners(i, j)[token]));
      if (t >= static_cast<uint64_t>(x_.document_length(j))) continue;
      scales_[count] = x_.grad(i, j);
      if (x_.call.residual) {
        offsets_[count++] = x_.call.residual->starts[j] + static_cast<int64_t>(t);
        continue;
      }
      if (x_.call.normalize) scales_[count] *= x_.document_inverse_norm[x_.document_index(i, j) * s.Ld + t];
      offsets_[count++] = x_.document_offset(i, j, t);
    }
    return count;
  }

  // Decompresses the tokens at offsets_ (counted through all documents), and rounds them to the dtype of Q,
  // as the forward reads them. offsets_ then says where their rows lie.
  void decompress(int64_t count) {
    const int64_t d = x_.s.d;
    x_.rows.decompress(*x_.call.residual, offsets_, count, d, decompressed_, d);
    for (int64_t n = 0; n < count; ++n) {
      offsets_[n] = n * d * x_.element;
      x_.rows.write(decompressed_ + n * d, d, x_.call.dtype, rounded_ + offsets_[n]);
    }
    if (!x_.call.normalize) return;
    x_.rows.inverse_norms(rounded_, offsets_, count, x_.call.dtype, 1, d, inverse_norms_);
    for (int64_t n = 0; n < count; ++n) scales_[n] *= inverse_norms_[n];
  }

  const Context<Real, Index>& x_;
  int64_t rows_per_item_, documents_;
  Real* sums_;
  char* won_;
  Real* scales_;
  int64_t* offsets_;
  Real* room_;
  // Residual-compressed documents: the winners of a query token in `documents_` of them.
  Real* inverse_norms_;
  Real* decompressed_;
  char* rounded_;
};

template <class Real, class Index>
class DocumentWorker {
 public:
  // Documents of up to Ld tokens.
  DocumentWorker(const Context<Real, Index>& context, int64_t Ld, int64_t tokens_per_item)
      : x_(context), tokens_per_item_(tokens_per_item), ranges_(ceil_div(Ld, tokens_per_item)) {
    queries_ = x_.s.layout == Layout::per_query ? 1 : x_.s.Nq;
    const int64_t most = queries_ * x_.s.Lq;
    thread_scratch().start(Array{x_.s.d, sum_}, Array{tokens_per_item + 1, end_}, Array{most, scales_},
                           Array{most, offsets_});
  }

  void operator()(int64_t item) {
    const Sizes& s = x_.s;
    const int64_t document = item / ranges_;
    const int64_t first = item % ranges_ * tokens_per_item_;
    const int64_t j = s.layout == Layout::per_query ? document % s.N : document;
    const int64_t count = std::min(tokens_per_item_, x_.document_length(j) - first);
    if (count <= 0) return;
    const int64_t i0 = s.layout == Layout::per_query ? document / s.N : 0;
    sort(i0, j, first, count);
    for (int64_t t = 0, begin = 0; t < count; begin = end_[t++]) {
      const int64_t row = x_.first_row(document) + first + t;
      if (begin == end_[t]) {
        x_.write_zero(x_.call.grad_D, row);
        continue;
      }
      std::fill_n(sum_, s.d, Real{0});
      x_.rows.add_rows(sum_, scales_ + begin, offsets_ + begin, end_[t] - begin, x_.call.Q.data,
                       x_.call.dtype, x_.call.Q.dim_stride, s.d);
      x_.write(sum_, x_.call.D, x_.document_offset(i0, j, first + t), x_.document_inverse_norm,
               x_.call.grad_D, row);
    }
  }

 private:
  // Lists the query rows that each token of the range won, and their factors: token t's end at end_[t].
  void sort(int64_t i0, int64_t j, int64_t first, int64_t count) {
    std::fill_n(end_, count + 1, int64_t{0});
    for_each_winner(i0, j, first, count, [&](int64_t, int64_t, uint64_t t) { ++end_[t + 1]; });
    for (int64_t t = 1; t <= count; ++t) end_[t] += end_[t - 1];
    // end_[t] is where t's list starts so far; placing a row moves it on.
    for_each_winner(i0, j, first, count, [&](int64_t i, int64_t token, uint64_t t) {
      const int64_t n = end_[t]++;
      scales_[n] = x_.grad(i, j);
      if (x_.query_scale) scales_[n] *= x_.query_scale[x_.row_of(i, token)];
      offsets_[n] = x_.query_offset(i, token);
    });
  }

  template <class F>
  void for_each_winner(int64_t i0, int64_t j, int64_t first, int64_t count, const F& f) const {
    for (int64_t i = i0; i < i0 + queries_; ++i) {
      const Index* winner = x_.winners(i, j);
      for (int64_t token = 0; token < x_.s.Lq; ++token) {
        const uint64_t t = static_cast<uint64_t>(static_cast<int64_t>(winner[token]) - first);
        const int64_t query = x_.row_queries ? x_.row_queries[token] : i;
        if (t < static_cast<uint64_t>(count) && query >= 0) f(query, token, t);
      }
    }
  }

  const Context<Real, Index>& x_;
  int64_t tokens_per_item_, ranges_, queries_;
  Real* sum_;
  int64_t* end_;
  Real* scales_;
  int64_t* offsets_;
};

// 1 / max(norm, eps) of every token of a view, in the order of a contiguous tensor.
template <class Real>
std::unique_ptr<Real[]> inverse_norms(const TokenView& x, int64_t queries, int64_t items, int64_t tokens,
                                      const BackwardCall& call, const RowKernels<Real>& rows,
                                      int64_t threads) {
  const int64_t total = queries * items * tokens, element = element_bytes(call.dtype);
  std::unique_ptr<Real[]> norms(new Real[total]);
  constexpr int64_t kChunk = 256;
  for_each_item(ceil_div(total, kChunk), threads, [&] {
    return [&](int64_t chunk) {
      int64_t offsets[kChunk];
      const int64_t first = chunk * kChunk, count = std::min(kChunk, total - first);
      for (int64_t n = 0; n < count; ++n) {
        const int64_t token = (first + n) % tokens, item = (first + n) / tokens;
        offsets[n] =
            (item / items * x.query_stride + item % items * x.item_stride + token * x.token_stride) * element;
      }
      rows.inverse_norms(x.data, offsets, count, call.dtype, x.dim_stride, call.sizes.d, norms.get() + first);
    };
  });
  return norms;
}

template <class Real, class Index>
void run(const BackwardCall& call) {
  const Sizes& s = call.sizes;
  Context<Real, Index> x{call, s, row_kernels<Real>(kernels()), element_bytes(call.dtype)};
  const int64_t rows = s.Nq * s.Lq, documents = s.documents();
  const int64_t threads = threads_for(double(rows) * double(s.N) * double(s.d));
  const int64_t items = threads * kItemsPerThread;

  std::unique_ptr<Real[]> query_norms, document_norms;
  if (call.normalize) {
    query_norms = inverse_norms<Real>(call.Q, 1, s.Nq, s.Lq, call, x.rows, threads);
    x.query_inverse_norm = query_norms.get();
    if (!call.residual) {
      document_norms = inverse_norms<Real>(call.D, s.layout == Layout::per_query ? s.Nq : 1, s.N, s.Ld, call,
                                           x.rows, threads);
      x.document_inverse_norm = document_norms.get();
    }
  }

  x.query_scale = x.query_inverse_norm;
  std::unique_ptr<Real[]> query_scale;
  if (call.q_weights.data) {
    query_scale.reset(new Real[rows]);
    for (int64_t row = 0; row < rows; ++row) {  // of packed ones, Nq is 1
      const Real weight = weight_at<Real>(call.q_weights, row / s.Lq, row % s.Lq);
      query_scale[row] = call.normalize ? weight * x.query_inverse_norm[row] : weight;
    }
    x.query_scale = query_scale.get();
  }

  std::unique_ptr<int64_t[]> row_queries;
  int64_t Ld = s.Ld;  // the longest document's
  if (call.packed) {
    row_queries.reset(new int64_t[rows]);
    std::fill_n(row_queries.get(), rows, int64_t{-1});
    const Packed& packed = *call.packed;
    for (int64_t i = 0; i < packed.queries; ++i)
      std::fill(row_queries.get() + packed.q_offsets[i], row_queries.get() + packed.q_offsets[i + 1], i);
    x.row_queries = row_queries.get();
    Ld = 0;
    for (int64_t j = 0; j < s.N; ++j) Ld = std::max(Ld, x.document_length(j));
    if (call.grad_D) std::memset(call.grad_D, 0, s.Ld * s.d * x.element);  // tokens of no document, too
  }

  if (call.grad_Q && rows > 0) {
    const int64_t fit = std::max<int64_t>(kSumBytes / std::max<int64_t>(s.d * sizeof(Real), 1), 1);
    const int64_t rows_per_item = std::clamp<int64_t>(ceil_div(rows, items), 1, fit);
    for_each_item(ceil_div(rows, rows_per_item), threads,
                  [&] { return QueryWorker<Real, Index>(x, rows_per_item); });
  }
  if (call.grad_D && documents * Ld > 0) {
    const int64_t ranges =
        std::clamp<int64_t>(threads <= 1 ? 1 : ceil_div(items, documents), 1, ceil_div(Ld, 64));
    const int64_t tokens_per_item = ceil_div(Ld, ranges);
    for_each_item(documents * ceil_div(Ld, tokens_per_item), threads,
                  [&] { return DocumentWorker<Real, Index>(x, Ld, tokens_per_item); });
  }
}

}  // namespace

void backward(const BackwardCall& call) {
  const bool wide = call.wide || wide_winners(call.sizes.Ld);
  if (call.dtype == Dtype::fp64) {
    wide ? run<double, int32_t>(call) : run<double, uint16_t>(call);
  } else {
    wide ? run<float, int32_t>(call) : run<float, uint16_t>(call);
  }
}

}  // namespace late_interaction::cpu
