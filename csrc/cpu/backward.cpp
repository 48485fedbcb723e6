// MaxSim backward from saved winners: who owns what.
//
//   grad_Q   A thread owns a range of query rows (i, s) and a float sum for each. It walks the documents
//            in order and adds grad[i, j] * D[j, winner(i, j, s)]. A document's rows are in cache for all
//            rows of the range.
//
//   grad_D   A thread owns a range of tokens of one document. It sorts the winners that fall into the range
//            by token (counting sort, stable: within a token by query, then by query token), then forms one
//            token's sum after the other and writes each row once.
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

#include "kernels.h"
#include "parallel.h"

namespace late_interaction::cpu {
namespace {

constexpr int64_t kSumBytes = 256 << 10;  // of grad_Q sums: stays in L2
constexpr int64_t kItemsPerThread = 8;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t element_bytes(Dtype dtype) {
  return dtype == Dtype::fp64 ? 8 : dtype == Dtype::fp32 ? 4 : 2;
}

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

  const char* query_row(int64_t i, int64_t token) const {
    return static_cast<const char*>(call.Q.data) + (i * call.Q.item_stride + token * call.Q.token_stride) * element;
  }
  const char* document_row(int64_t i, int64_t j, int64_t token) const {
    return static_cast<const char*>(call.D.data) +
           (i * call.D.query_stride + j * call.D.item_stride + token * call.D.token_stride) * element;
  }
  int64_t document_index(int64_t i, int64_t j) const {
    return s.layout == Layout::per_query ? i * s.N + j : j;
  }
  const Index* winners(int64_t i, int64_t j) const {
    return static_cast<const Index*>(call.winners) + (i * s.N + j) * s.Lq;
  }
  Real grad(int64_t i, int64_t j) const {
    return static_cast<const Real*>(
        call.grad_scores)[i * call.grad_query_stride + j * call.grad_item_stride];
  }
  void write(Real* sum, const char* x, int64_t x_stride, Real inverse_norm, void* grad, int64_t row) const {
    // A token that nothing was sent to gets zeros whatever it holds: NaN in a masked token stays there.
    const bool sent = std::any_of(sum, sum + s.d, [](Real g) { return g != 0; });
    if (call.normalize && sent) rows.through_normalize(sum, inverse_norm, x, call.dtype, x_stride, s.d);
    rows.write(sum, s.d, call.dtype, static_cast<char*>(grad) + row * s.d * element);
  }
};

template <class Real, class Index>
class QueryWorker {
 public:
  QueryWorker(const Context<Real, Index>& context, int64_t rows_per_item) : x_(context), rows_per_item_(rows_per_item) {
    Scratch& memory = thread_scratch();
    memory.reset(Scratch::size_of<Real>(rows_per_item * x_.s.d));
    sums_ = memory.take<Real>(rows_per_item * x_.s.d);
  }

  void operator()(int64_t item) {
    const Sizes& s = x_.s;
    const int64_t first = item * rows_per_item_;
    const int64_t end = std::min(first + rows_per_item_, s.Nq * s.Lq);
    std::fill_n(sums_, (end - first) * s.d, Real{0});
    for (int64_t j = 0; j < s.N; ++j) {
      for (int64_t row = first; row < end;) {
        const int64_t i = row / s.Lq, token = row % s.Lq;
        const int64_t count = std::min(s.Lq - token, end - row);
        add_document(i, j, token, count, sums_ + (row - first) * s.d);
        row += count;
      }
    }
    for (int64_t row = first; row < end; ++row) {
      const Real r = x_.call.normalize ? x_.query_inverse_norm[row] : Real{1};
      x_.write(sums_ + (row - first) * s.d, x_.query_row(row / s.Lq, row % s.Lq), x_.call.Q.dim_stride, r,
               x_.call.grad_Q, row);
    }
  }

 private:
  void add_document(int64_t i, int64_t j, int64_t token, int64_t count, Real* sum) const {
    const Sizes& s = x_.s;
    const Index* winner = x_.winners(i, j) + token;
    const Real grad = x_.grad(i, j);
    const Real* inverse_norm =
        x_.call.normalize ? x_.document_inverse_norm + x_.document_index(i, j) * s.Ld : nullptr;
    for (int64_t n = 0; n < count; ++n) {
      const uint64_t t = static_cast<uint64_t>(static_cast<int64_t>(winner[n]));
      if (t >= static_cast<uint64_t>(s.Ld)) continue;
      const Real scale = inverse_norm ? grad * inverse_norm[t] : grad;
      x_.rows.add_scaled(sum + n * s.d, scale, x_.document_row(i, j, t), x_.call.dtype, x_.call.D.dim_stride, s.d);
    }
  }

  const Context<Real, Index>& x_;
  int64_t rows_per_item_;
  Real* sums_;
};

template <class Real, class Index>
class DocumentWorker {
 public:
  DocumentWorker(const Context<Real, Index>& context, int64_t tokens_per_item)
      : x_(context), tokens_per_item_(tokens_per_item), ranges_(ceil_div(x_.s.Ld, tokens_per_item)) {
    queries_ = x_.s.layout == Layout::per_query ? 1 : x_.s.Nq;
    Scratch& memory = thread_scratch();
    memory.reset(Scratch::size_of<Real>(x_.s.d) + Scratch::size_of<int64_t>(tokens_per_item + 1) +
                 Scratch::size_of<int64_t>(queries_ * x_.s.Lq));
    sum_ = memory.take<Real>(x_.s.d);
    start_ = memory.take<int64_t>(tokens_per_item + 1);
    sources_ = memory.take<int64_t>(queries_ * x_.s.Lq);
  }

  void operator()(int64_t item) {
    const Sizes& s = x_.s;
    const int64_t document = item / ranges_;
    const int64_t first = item % ranges_ * tokens_per_item_;
    const int64_t count = std::min(tokens_per_item_, s.Ld - first);
    const int64_t i0 = s.layout == Layout::per_query ? document / s.N : 0;
    const int64_t j = s.layout == Layout::per_query ? document % s.N : document;
    sort(i0, j, first, count);

    for (int64_t t = 0; t < count; ++t) {
      const int64_t row = document * s.Ld + first + t;
      const int64_t begin = t == 0 ? 0 : start_[t - 1], end = start_[t];
      if (begin == end) {
        std::memset(static_cast<char*>(x_.call.grad_D) + row * s.d * x_.element, 0, s.d * x_.element);
        continue;
      }
      std::fill_n(sum_, s.d, Real{0});
      for (int64_t n = begin; n < end; ++n) {
        const int64_t i = i0 + sources_[n] / s.Lq, token = sources_[n] % s.Lq;
        Real scale = x_.grad(i, j);
        if (x_.call.normalize) scale *= x_.query_inverse_norm[i * s.Lq + token];
        x_.rows.add_scaled(sum_, scale, x_.query_row(i, token), x_.call.dtype, x_.call.Q.dim_stride, s.d);
      }
      const Real r = x_.call.normalize ? x_.document_inverse_norm[row] : Real{1};
      x_.write(sum_, x_.document_row(i0, j, first + t), x_.call.D.dim_stride, r, x_.call.grad_D, row);
    }
  }

 private:
  // sources_: the query rows whose winner lies in the range, by token; start_[t] ends token t's.
  void sort(int64_t i0, int64_t j, int64_t first, int64_t count) {
    std::fill_n(start_, count + 1, int64_t{0});
    for_each_winner(i0, j, first, count, [&](int64_t, uint64_t t) { ++start_[t + 1]; });
    for (int64_t t = 1; t <= count; ++t) start_[t] += start_[t - 1];
    // Placing moves each start on to its end, which is the next token's start.
    for_each_winner(i0, j, first, count, [&](int64_t source, uint64_t t) { sources_[start_[t]++] = source; });
  }

  template <class F>
  void for_each_winner(int64_t i0, int64_t j, int64_t first, int64_t count, const F& f) const {
    for (int64_t i = 0; i < queries_; ++i) {
      const Index* winner = x_.winners(i0 + i, j);
      for (int64_t token = 0; token < x_.s.Lq; ++token) {
        const uint64_t t = static_cast<uint64_t>(static_cast<int64_t>(winner[token]) - first);
        if (t < static_cast<uint64_t>(count)) f(i * x_.s.Lq + token, t);
      }
    }
  }

  const Context<Real, Index>& x_;
  int64_t tokens_per_item_, ranges_, queries_;
  Real* sum_;
  int64_t* start_;
  int64_t* sources_;
};

// 1 / max(norm, eps) of every token of a view, in the order of a contiguous tensor.
template <class Real>
std::unique_ptr<Real[]> inverse_norms(const TokenView& x, int64_t queries, int64_t items, int64_t tokens,
                                      const BackwardCall& call, const RowKernels<Real>& rows, int64_t threads) {
  const int64_t total = queries * items * tokens, element = element_bytes(call.dtype);
  std::unique_ptr<Real[]> norms(new Real[total]);
  constexpr int64_t kChunk = 256;
  for_each_item(ceil_div(total, kChunk), threads, [&] {
    return [&](int64_t chunk) {
      int64_t offsets[kChunk];
      const int64_t first = chunk * kChunk, count = std::min(kChunk, total - first);
      for (int64_t n = 0; n < count; ++n) {
        const int64_t token = (first + n) % tokens, item = (first + n) / tokens;
        offsets[n] = (item / items * x.query_stride + item % items * x.item_stride + token * x.token_stride) * element;
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
    document_norms = inverse_norms<Real>(call.D, s.layout == Layout::per_query ? s.Nq : 1, s.N, s.Ld, call, x.rows,
                                         threads);
    x.query_inverse_norm = query_norms.get();
    x.document_inverse_norm = document_norms.get();
  }

  if (call.grad_Q && rows > 0) {
    const int64_t fit = std::max<int64_t>(kSumBytes / std::max<int64_t>(s.d * sizeof(Real), 1), 1);
    const int64_t rows_per_item = std::clamp<int64_t>(ceil_div(rows, items), 1, fit);
    for_each_item(ceil_div(rows, rows_per_item), threads,
                  [&] { return QueryWorker<Real, Index>(x, rows_per_item); });
  }
  if (call.grad_D && documents * s.Ld > 0) {
    const int64_t ranges = std::clamp<int64_t>(threads <= 1 ? 1 : ceil_div(items, documents), 1, ceil_div(s.Ld, 64));
    const int64_t tokens_per_item = ceil_div(s.Ld, ranges);
    for_each_item(documents * ceil_div(s.Ld, tokens_per_item), threads,
                  [&] { return DocumentWorker<Real, Index>(x, tokens_per_item); });
  }
}

}  // namespace

void backward(const BackwardCall& call) {
  const bool wide = wide_winners(call.sizes.Ld);
  if (call.dtype == Dtype::fp64) {
    wide ? run<double, int32_t>(call) : run<double, uint16_t>(call);
  } else {
    wide ? run<float, int32_t>(call) : run<float, uint16_t>(call);
  }
}

}  // namespace late_interaction::cpu
