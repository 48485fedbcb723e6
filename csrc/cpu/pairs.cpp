// Listed pairs of packed queries and documents: who owns what.
//
//   forward   Most of all there are: every query meets every document in one call, and the list is picked
//             from those scores. Else each pair is scored by a call, and a thread takes one after the other.
//   grad_Q    A thread owns a query, and walks its pairs in the order of the list for each of its tokens.
//   grad_D    A thread owns a document. It sorts the winners of its pairs by token (stable: within a token by
//             pair, then by query token), and forms one token's sum after the other.
//
// Every gradient row is written once, from a sum in an order that the list alone decides.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../common/arithmetic.h"
#include "../common/forms.h"
#include "../common/pair_tensors.h"
#include "forward.h"
#include "kernels.h"
#include "op_helpers.h"
#include "parallel.h"
#include "weights.h"

namespace late_interaction::cpu {
namespace {

struct PairGradients {
  const void* grad_scores;  // [pairs]
  int64_t grad_stride;
  const void* winners;  // [pairs, winner_stride]
  int64_t winner_stride;
  void *grad_Q, *grad_D, *grad_weights;  // null: not wanted
};

struct Range {
  int64_t first, length;
};

Range query_of(const Pairs& p, int64_t pair) {
  if (p.scattered) return {0, p.q_tokens};
  const int32_t i = p.query[pair];
  return {p.q_offsets[i], p.q_offsets[i + 1] - p.q_offsets[i]};
}

Range document_of(const Pairs& p, int64_t pair) {
  if (p.scattered) return {p.starts[pair], p.lengths[pair]};
  const int32_t j = p.document[pair];
  return {p.d_offsets[j], p.d_offsets[j + 1] - p.d_offsets[j]};
}

// Winners in the width that documents of Ld tokens have.
int32_t get_winner(const void* winners, int64_t Ld, int64_t index) {
  if (wide_winners(Ld)) return static_cast<const int32_t*>(winners)[index];
  const uint16_t winner = static_cast<const uint16_t*>(winners)[index];
  return winner == kNarrowSentinel ? kSentinel : winner;
}

void set_winner(void* winners, int64_t Ld, int64_t index, int32_t winner) {
  if (wide_winners(Ld)) {
    static_cast<int32_t*>(winners)[index] = winner;
  } else {
    static_cast<uint16_t*>(winners)[index] = static_cast<uint16_t>(winner);
  }
}

ForwardCall call_of(const PairInputs& in, Precision precision) {
  ForwardCall call;
  call.sizes = in.sizes;
  call.dtype = in.dtype;
  call.precision = precision;
  call.Q = in.Q;
  call.Q.item_stride = 0;
  call.D = in.D;
  call.q_weights = in.q_weights;
  return call;
}

void forward_grid(const PairInputs& in, Precision precision, void* scores, void* winners,
                  int64_t winner_stride) {
  const Pairs& p = in.pairs;
  const int64_t score = in.dtype == Dtype::fp64 ? 8 : 4, winner = wide_winners(in.sizes.Ld) ? 4 : 2;
  std::vector<char> all(p.queries * p.documents * score);
  std::vector<char> all_winners(winners != nullptr ? p.documents * in.sizes.Lq * winner : 0, char(0xFF));
  ForwardCall call = call_of(in, precision);
  call.packed = in.packed;
  call.sizes.Nq = p.queries;
  call.scores = all.data();
  call.winners = winners != nullptr ? all_winners.data() : nullptr;
  forward(call);
  for (int64_t pair = 0; pair < p.count; ++pair) {
    const int64_t i = p.query[pair], j = p.document[pair];
    std::memcpy(static_cast<char*>(scores) + pair * score, &all[(i * p.documents + j) * score], score);
    const Range rows = query_of(p, pair);
    if (winners == nullptr || rows.length == 0) continue;  // memcpy must not be given a null pointer
    std::memcpy(static_cast<char*>(winners) + pair * winner_stride * winner,
                all_winners.data() + (j * in.sizes.Lq + rows.first) * winner, rows.length * winner);
  }
}

class PairScorer {
 public:
  PairScorer(const PairInputs& in, Precision precision, void* scores, void* winners, int64_t winner_stride)
      : in_(in), all_(call_of(in, precision)), winner_stride_(winner_stride) {
    all_.scores = scores;
    all_.winners = winners;
  }

  void operator()(int64_t pair) {
    const Range rows = query_of(in_.pairs, pair), tokens = document_of(in_.pairs, pair);
    const int64_t element = element_bytes(in_.dtype);
    const auto from = [&](const TokenView& view, int64_t token) {
      return static_cast<const char*>(view.data) + token * view.token_stride * element;
    };
    ForwardCall call = all_;
    call.sizes = {Layout::in_batch, 1, 1, rows.length, tokens.length, in_.sizes.d};
    call.Q.data = from(in_.Q, rows.first);
    call.D.data = from(in_.D, tokens.first);
    if (in_.q_weights.data) {
      call.q_weights.data = static_cast<const char*>(in_.q_weights.data) +
                            rows.first * in_.q_weights.token_stride * (in_.dtype == Dtype::fp64 ? 8 : 4);
    }
    call.scores = static_cast<char*>(all_.scores) + pair * (in_.dtype == Dtype::fp64 ? 8 : 4);
    if (all_.winners != nullptr) {
      winners_.resize(rows.length * 4);
      call.winners = winners_.data();
    }
    forward(call);
    if (all_.winners == nullptr) return;
    for (int64_t s = 0; s < rows.length; ++s) {  // winners may be narrower than the output
      set_winner(all_.winners, in_.sizes.Ld, pair * winner_stride_ + s,
                 get_winner(winners_.data(), tokens.length, s));
    }
  }

 private:
  const PairInputs& in_;
  ForwardCall all_;
  int64_t winner_stride_;
  std::vector<char> winners_;
};

// The pairs sorted by name (query or document), stably; name k has [begins[k], begins[k + 1]).
struct Runs {
  std::vector<int64_t> order, begins;

  Runs(const int32_t* names, int64_t pairs, int64_t count) : order(pairs), begins(count + 1) {
    for (int64_t pair = 0; pair < pairs; ++pair) ++begins[names[pair] + 1];
    for (int64_t k = 0; k < count; ++k) begins[k + 1] += begins[k];
    std::vector<int64_t> next(begins.begin(), begins.end() - 1);
    for (int64_t pair = 0; pair < pairs; ++pair) order[next[names[pair]]++] = pair;
  }
};

// Rows to be added up, and their factors.
template <class Real>
struct Picked {
  std::vector<Real> scales;
  std::vector<int64_t> offsets;
};

template <class Real>
class PairBackward {
 public:
  PairBackward(const PairInputs& in, const PairGradients& call)
      : in_(in),
        p_(in.pairs),
        call_(call),
        rows_(row_kernels<Real>(kernels())),
        element_(element_bytes(in.dtype)) {}

  void query(const Runs& runs, int64_t i) const {
    const int64_t d = in_.sizes.d, first = p_.q_offsets[i];
    std::vector<Real> sum(d), room(d);
    Picked<Real> picked;
    for (int64_t row = first; row < p_.q_offsets[i + 1] && row - first < call_.winner_stride; ++row) {
      picked.scales.clear();
      picked.offsets.clear();
      for (int64_t k = runs.begins[i]; k < runs.begins[i + 1]; ++k) {
        const int64_t pair = runs.order[k];
        const Range tokens = document_of(p_, pair);
        const int32_t winner = winner_of(pair, row - first);
        if (winner < 0 || winner >= tokens.length) continue;
        picked.scales.push_back(grad(pair));
        picked.offsets.push_back((tokens.first + winner) * in_.D.token_stride * element_);
      }
      if (picked.scales.empty()) continue;  // the gradients are zero already
      add(sum, picked, 0, picked.scales.size(), in_.D);
      if (call_.grad_weights != nullptr) {
        static_cast<Real*>(call_.grad_weights)[row] = product_with_row(
            rows_, sum.data(), in_.Q, row * in_.Q.token_stride * element_, in_.dtype, d, room.data());
        for (Real& x : sum) x *= weight_at<Real>(in_.q_weights, 0, row);
      }
      write(sum, call_.grad_Q, row);
    }
  }

  void document(const Runs& runs, int64_t j) const {
    const Range tokens{p_.d_offsets[j], p_.d_offsets[j + 1] - p_.d_offsets[j]};
    std::vector<int64_t> ends(tokens.length + 1);
    for_each_winner(runs, j, tokens, [&](int64_t, int64_t, int32_t t) { ++ends[t + 1]; });
    for (int64_t t = 0; t < tokens.length; ++t) ends[t + 1] += ends[t];
    Picked<Real> picked{std::vector<Real>(ends.back()), std::vector<int64_t>(ends.back())};
    // ends[t] is where the list of token t starts so far; placing a row moves it on.
    for_each_winner(runs, j, tokens, [&](int64_t pair, int64_t row, int32_t t) {
      picked.scales[ends[t]] = grad(pair) * weight_at<Real>(in_.q_weights, 0, row);
      picked.offsets[ends[t]++] = row * in_.Q.token_stride * element_;
    });
    std::vector<Real> sum(in_.sizes.d);
    for (int64_t t = 0, begin = 0; t < tokens.length; begin = ends[t++]) {
      if (begin == ends[t]) continue;  // the gradient is zero already
      add(sum, picked, begin, ends[t], in_.Q);
      write(sum, call_.grad_D, tokens.first + t);
    }
  }

 private:
  Real grad(int64_t pair) const {
    return static_cast<const Real*>(call_.grad_scores)[pair * call_.grad_stride];
  }
  int32_t winner_of(int64_t pair, int64_t s) const {
    return get_winner(call_.winners, in_.sizes.Ld, pair * call_.winner_stride + s);
  }

  template <class F>
  void for_each_winner(const Runs& runs, int64_t j, Range tokens, const F& f) const {
    for (int64_t k = runs.begins[j]; k < runs.begins[j + 1]; ++k) {
      const int64_t pair = runs.order[k];
      const Range rows = query_of(p_, pair);
      for (int64_t s = 0; s < std::min(rows.length, call_.winner_stride); ++s) {
        const int32_t t = winner_of(pair, s);
        if (t >= 0 && t < tokens.length) f(pair, rows.first + s, t);
      }
    }
  }

  // The sum of these rows of x.
  void add(std::vector<Real>& sum, const Picked<Real>& picked, int64_t begin, int64_t end,
           const TokenView& x) const {
    std::fill(sum.begin(), sum.end(), Real{0});
    rows_.add_rows(sum.data(), picked.scales.data() + begin, picked.offsets.data() + begin, end - begin,
                   x.data, in_.dtype, x.dim_stride, in_.sizes.d);
  }
  void write(const std::vector<Real>& sum, void* grad, int64_t row) const {
    rows_.write(sum.data(), in_.sizes.d, in_.dtype, static_cast<char*>(grad) + row * in_.sizes.d * element_);
  }

  const PairInputs& in_;
  const Pairs& p_;
  const PairGradients& call_;
  const RowKernels<Real>& rows_;
  int64_t element_;
};

// Multiply-adds of all pairs, as far as that matters: are there enough for more than one thread?
double work_of(const PairInputs& in) {
  const Pairs& p = in.pairs;
  const double documents = std::max<double>(1.0, static_cast<double>(p.documents));
  return double(p.count) * double(in.sizes.d) * double(in.sizes.Ld) / documents;
}

template <class Real>
void run_backward(const PairInputs& in, const PairGradients& call) {
  const Pairs& p = in.pairs;
  const PairBackward<Real> backward(in, call);
  const int64_t threads = threads_for(work_of(in)), row = in.sizes.d * element_bytes(in.dtype);
  if (call.grad_Q != nullptr) {
    std::memset(call.grad_Q, 0, in.sizes.Lq * row);
    if (call.grad_weights != nullptr) std::memset(call.grad_weights, 0, in.sizes.Lq * sizeof(Real));
    const Runs runs(p.query, p.count, p.queries);
    for_each_item(p.queries, threads, [&] { return [&](int64_t i) { backward.query(runs, i); }; });
  }
  if (call.grad_D != nullptr) {
    std::memset(call.grad_D, 0, in.sizes.Ld * row);
    const Runs runs(p.document, p.count, p.documents);
    for_each_item(p.documents, threads, [&] { return [&](int64_t j) { backward.document(runs, j); }; });
  }
}

// Throws where a pair names none, does not lie within the tokens, or has a query of more than longest_query.
void check_pairs(const PairInputs& in, int64_t longest_query) {
  const Pairs& p = in.pairs;
  for (int64_t pair = 0; pair < p.count; ++pair) {
    if (p.scattered) {
      const int64_t start = p.starts[pair], length = p.lengths[pair];
      STD_TORCH_CHECK(start >= 0 && length >= 0 && start + length <= p.d_tokens,
                      "late_interaction: document ", pair, " must lie within the ", p.d_tokens,
                      " tokens of D, got ", length, " from ", start, " on");
      continue;
    }
    const int32_t i = p.query[pair], j = p.document[pair];
    STD_TORCH_CHECK(i >= 0 && i < p.queries && j >= 0 && j < p.documents, "late_interaction: pair ", pair,
                    " must be of ", p.queries, " queries and ", p.documents, " documents, got query ", i,
                    " and document ", j);
    const int64_t length = query_of(p, pair).length;
    STD_TORCH_CHECK(length <= longest_query, "late_interaction: query ", i, " has ", length,
                    " tokens, more than max_seqlen_q = ", longest_query);
  }
}

// scores [pairs], winners [pairs, winner_stride] or null. The pairs have been checked.
void forward_pairs(const PairInputs& in, Precision precision, void* scores, void* winners,
                   int64_t winner_stride) {
  const Pairs& p = in.pairs;
  // The grid packs a query's rows once, not for each pair, but also multiplies pairs that nobody listed.
  const bool most = !p.scattered && 4 * p.count >= 3 * p.queries * p.documents;
  if (most && p.count > 0) return forward_grid(in, precision, scores, winners, winner_stride);
  for_each_item(p.count, threads_for(work_of(in)),
                [&] { return PairScorer(in, precision, scores, winners, winner_stride); });
}

ScoresAndWinners score(const PairInputs& in, const Tensor& Q, std::optional<int64_t> max_seqlen_q,
                       const std::string& precision, bool want_winners) {
  if (!in.pairs.scattered) check_packed_offsets(in);
  check_pairs(in, max_seqlen_q.value_or(in.sizes.Lq));
  const int64_t pairs = in.pairs.count, stride = want_winners ? *max_seqlen_q : 0;
  check_winner_stride(in, stride);
  const Tensor scores = new_tensor(Q, {pairs}, score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) {
    winners = new_tensor(Q, {pairs, stride}, winner_type(in.sizes.Ld));
    fill_with_sentinel(*winners);
  }
  forward_pairs(in, parse_precision(precision), scores.mutable_data_ptr(),
                winners ? winners->mutable_data_ptr() : nullptr, stride);
  return {scores, winners};
}

// Parameters: the operators'.
PairInputs parse(const Tensor& Q, const Tensor& D, const Tensor* weights, const Tensor& cu_seqlens_q,
                 const Tensor& cu_seqlens_d, const Tensor& pair_q, const Tensor& pair_d) {
  PairInputs in = parse_pairs(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
  if (weights != nullptr) take_weights(in, *weights, Q);
  return in;
}

// The parameters are those of the schemas, in the order of ScoreForms.
ScoresAndWinners score_listed(const Tensor& Q, const Tensor& D, const Tensor* weights, bool want_winners,
                              const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d, const Tensor& pair_q,
                              const Tensor& pair_d, std::optional<int64_t> max_seqlen_q,
                              const std::string& precision) {
  return score(parse(Q, D, weights, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d), Q, max_seqlen_q, precision,
               want_winners);
}

Tensor maxsim_spans(Tensor Q, Tensor D, Tensor starts, Tensor lengths, std::string precision) {
  return std::get<0>(score(parse_spans(Q, D, starts, lengths), Q, std::nullopt, precision, false));
}

// The parameters are those of the schemas, in the order of GradientForms.
Gradients gradients(const Tensor& grad_scores, const Tensor& Q, const Tensor& D, const Tensor* weights,
                    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d, const Tensor& pair_q,
                    const Tensor& pair_d, const Tensor& winners, bool need_grad_Q, bool need_grad_D) {
  const PairInputs in = parse(Q, D, weights, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d);
  check_packed_offsets(in);
  check_pairs(in, in.sizes.Lq);
  check_pair_backward_inputs(grad_scores, Q, winners, in);
  const Gradients to = packed_gradients(Q, in, need_grad_Q, need_grad_D);
  const PairGradients call{.grad_scores = grad_scores.const_data_ptr(),
                           .grad_stride = grad_scores.stride(0),
                           .winners = winners.const_data_ptr(),
                           .winner_stride = winners.size(1),
                           .grad_Q = destination(to.Q),
                           .grad_D = destination(to.D),
                           .grad_weights = destination(to.weights)};
  in.dtype == Dtype::fp64 ? run_backward<double>(in, call) : run_backward<float>(in, call);
  return to;
}

}  // namespace
}  // namespace late_interaction::cpu

LATE_INTERACTION_LIBRARY_IMPL(CPU, m) {
  using namespace late_interaction;
  ScoreForms<&cpu::score_listed>::add_to(m, "maxsim_pairs_packed");
  GradientForms<&cpu::gradients>::add_to(m, "maxsim_pairs_packed");
  m.impl("maxsim_spans", TORCH_BOX(&cpu::maxsim_spans));
}
