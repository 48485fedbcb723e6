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
#include <vector>

#include "../common/arithmetic.h"
#include "cache_blocking.h"
#include "kernels.h"
#include "parallel.h"

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

// Similarities and maxima are multiplied by a number a token: its inverse norm, or the scale of its code.
bool scales(const ForwardCall& call) { return call.normalize || call.q_scale.data; }

float scale_at(const ScaleView& scale, int64_t query, int64_t item, int64_t token) {
  const float x =
      scale.data[query * scale.query_stride + item * scale.item_stride + token * scale.token_stride];
  constexpr float kMax = std::numeric_limits<float>::max();
  return x >= 0 && x <= kMax ? x : std::numeric_limits<float>::quiet_NaN();
}

// Sums the maxima of one query and one document. Four chains, so that additions overlap; a maximum's place
// among the query's kept tokens decides its chain, so the sum does not depend on how the query was cut.
class ScoreSum {
 public:
  void add(double x) { chain_[count_++ % 4] += x; }
  double total() const { return (chain_[0] + chain_[1]) + (chain_[2] + chain_[3]); }

 private:
  double chain_[4] = {};
  int64_t count_ = 0;
};

// What the parts of split pairs leave behind, all by query token.
template <class Real>
struct Parts {
  std::unique_ptr<Real[]> best;       // [pairs, token_parts, Lq]
  std::unique_ptr<int32_t[]> winner;  // the same; the sentinel where nothing was scored
  std::unique_ptr<Real[]> scale;      // [pairs, Lq]: the query tokens' inverse norms or scales

  Parts(const Cut& c, const Sizes& s) {
    if (!c.splits_pairs()) return;
    const int64_t rows = s.Nq * s.N * s.Lq;
    best.reset(new Real[rows * c.token_parts]);
    winner.reset(new int32_t[rows * c.token_parts]);
    scale.reset(new Real[rows]);
    std::fill_n(winner.get(), rows * c.token_parts, kSentinel);
  }
};

// Rows of residual-compressed documents that are decompressed at a time: they stay in L1.
constexpr int64_t kRowsAtOnce = 16;

// Part of one query in the row block: tokens [first_token, end_token), of which `rows` are kept.
struct Segment {
  int64_t query;
  int64_t first_token, end_token;
  int64_t first_row, rows;
};

const char* token_at(const TokenView& x, int64_t bytes, int64_t query, int64_t item, int64_t token) {
  return static_cast<const char*>(x.data) +
         (query * x.query_stride + item * x.item_stride + token * x.token_stride) * bytes;
}

template <class Real, class Index>
class Worker {
 public:
  Worker(const ForwardCall& call, const Kernels& k, const Multiplier& m, const Cut& c,
         const Parts<Real>& parts)
      : call_(call),
        s_(call.sizes),
        rows_kernels_(row_kernels<Real>(k)),
        m_(m),
        c_(c),
        parts_(parts),
        unpack_codes_(k.unpack_codes) {
    panel_rows_ = 2 * m.lanes;
    element_ = element_bytes(call.dtype);
    in_place_ =
        call.dtype == m.native && !call.d_bits && call.D.dim_stride == 1 && s_.d == c.steps * m.step_dims;
    if (!call.residual && call.D.dim_stride == 1 && s_.d == c.steps * m.step_dims && c.steps % m.lanes == 0) {
      if (m.widening && !call.d_bits) widening_ = m.widening(call.dtype);
      if (m.widening_packed && call.d_bits) widening_ = m.widening_packed(call.d_bits);
    }
    const int64_t block = c.block_rows, tile = c.tile_tokens;
    Scratch& memory = thread_scratch();
    memory.reset(Scratch::size_of<char>(block * c.row_bytes) + Scratch::size_of<char>(tile * c.row_bytes) +
                 Scratch::size_of<char>(c.row_bytes) + 2 * Scratch::size_of<Real>(block) +
                 2 * Scratch::size_of<Index>(block) + Scratch::size_of<Real>(tile) +
                 2 * Scratch::size_of<int64_t>(tile) + 2 * Scratch::size_of<int32_t>(tile) +
                 (kRowsAtOnce + 1) * Scratch::size_of<Real>(row_room()) +
                 Scratch::size_of<uint8_t>(packed_bytes()) + Scratch::size_of<int8_t>(s_.d));
    panels_ = memory.take<char>(block * c.row_bytes);
    tile_ = memory.take<char>(tile * c.row_bytes);
    packed_row_ = memory.take<char>(c.row_bytes);
    best_ = memory.take<Real>(block);
    query_scale_ = memory.take<Real>(block);
    winner_ = memory.take<Index>(block);
    row_token_ = memory.take<Index>(block);
    token_scale_ = memory.take<Real>(tile);
    offsets_ = memory.take<int64_t>(tile);
    packed_offsets_ = memory.take<int64_t>(tile);
    ids_ = memory.take<int32_t>(tile);
    corrections_ = memory.take<int32_t>(tile);
    rounded_ = memory.take<Real>(row_room());
    decompressed_ = memory.take<Real>(kRowsAtOnce * row_room());
    packed_codes_ = memory.take<uint8_t>(packed_bytes());
    codes_ = memory.take<int8_t>(s_.d);
    // One panel needs widened tokens once: two groups of them take turns, and stay in L1.
    const int64_t kept =
        widening_ && block <= panel_rows_ ? std::min<int64_t>(2 * m.group_tokens, tile) : tile;
    for (int64_t n = 0; n < tile; ++n) packed_offsets_[n] = n % kept * c.row_bytes;
    if (c.steps > ceil_div(s_.d, m.step_dims)) {  // packing does not write the steps behind the last
      std::memset(tile_, 0, static_cast<size_t>(tile * c.row_bytes));
      std::memset(packed_row_, 0, static_cast<size_t>(c.row_bytes));
    }
  }
  ~Worker() {
    if (m_.release) m_.release();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void operator()(int64_t item) { c_.splits_pairs() ? score_part(item) : score_pairs(item); }

 private:
  void score_pairs(int64_t item) {
    const int64_t i0 = item / c_.document_items * c_.queries;
    const int64_t j0 = item % c_.document_items * c_.documents;
    const int64_t i1 = std::min(i0 + c_.queries, s_.Nq);
    const int64_t j1 = std::min(j0 + c_.documents, s_.N);
    open_sums_.clear();
    for (int64_t query = i0, token = 0; query < i1;) {
      next_block(query, token, i1, s_.Lq);
      if (token > 0) open_sums_.resize(j1 - j0);
      for (int64_t j = j0; j < j1; ++j) {
        const bool scored = score_document(j, 0, document_length(j));
        for (const Segment& segment : segments_) {
          ScoreSum fresh;
          const bool whole = segment.first_token == 0 && segment.end_token == query_length(segment.query);
          finish(segment, j, scored, whole ? fresh : open_sums_[j - j0]);
        }
      }
    }
  }

  int64_t query_length(int64_t query) const {
    return call_.packed ? call_.packed->q_offsets[query + 1] - call_.packed->q_offsets[query] : s_.Lq;
  }
  int64_t document_length(int64_t j) const {
    if (call_.residual) return call_.residual->lengths[j];
    return call_.packed ? call_.packed->d_offsets[j + 1] - call_.packed->d_offsets[j] : s_.Ld;
  }
  const char* query_token(int64_t query, int64_t token) const {
    return token_at(call_.Q, element_, 0, query, token + (call_.packed ? call_.packed->q_offsets[query] : 0));
  }
  const char* document_token(int64_t query, int64_t j, int64_t token) const {
    return token_at(call_.D, element_, query, j, token + (call_.packed ? call_.packed->d_offsets[j] : 0));
  }
  // The place of the winner of a query's first token in document j.
  int64_t winner_place(int64_t query, int64_t j) const {
    return call_.packed ? j * s_.Lq + call_.packed->q_offsets[query] : (query * s_.N + j) * s_.Lq;
  }

  void score_part(int64_t item) {
    const int64_t token_part = item % c_.token_parts, row_part = item / c_.token_parts % c_.row_parts;
    const int64_t pair = item / (c_.token_parts * c_.row_parts);
    const int64_t end_row = s_.Lq * (row_part + 1) / c_.row_parts;
    int64_t query = pair / s_.N, token = s_.Lq * row_part / c_.row_parts;
    while (query == pair / s_.N) {
      next_block(query, token, query + 1, end_row);
      for (int64_t row = 0; scales(call_) && token_part == 0 && row < rows_; ++row) {
        parts_.scale[pair * s_.Lq + row_token_[row]] = query_scale_[row];
      }
      if (!score_document(pair % s_.N, s_.Ld * token_part / c_.token_parts,
                          s_.Ld * (token_part + 1) / c_.token_parts)) {
        continue;
      }
      const int64_t out = (pair * c_.token_parts + token_part) * s_.Lq;
      for (int64_t row = 0; row < rows_; ++row) {
        parts_.best[out + row_token_[row]] = best_[row];
        parts_.winner[out + row_token_[row]] = static_cast<int32_t>(winner_[row]);
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
      const int64_t its_end = std::min(end_token, query_length(query));
      for (; token < its_end && rows_ < c_.block_rows; ++token) {
        if (!keeps(call_.q_mask, 0, query, token)) continue;
        pack_query_row(query, token);
        row_token_[rows_++] = static_cast<Index>(token);
      }
      segment.end_token = token;
      segment.rows = rows_ - segment.first_row;
      segments_.push_back(segment);
      if (token == its_end) {
        ++query;
        token = 0;
      }
    }
    // The lanes of the last panel that hold no row compute with zeros, and nobody looks.
    for (int64_t row = rows_; row < round_up(rows_, panel_rows_); ++row) scatter_row(row, nullptr);
  }

  void pack_query_row(int64_t query, int64_t token) {
    const char* x = query_token(query, token);
    const auto pack = m_.pack_query ? m_.pack_query : m_.pack_row;
    pack(x, call_.dtype, call_.Q.dim_stride, s_.d, packed_row_);
    scatter_row(rows_, packed_row_);
    if (call_.normalize) {
      const int64_t here = 0;
      rows_kernels_.inverse_norms(x, &here, 1, call_.dtype, call_.Q.dim_stride, s_.d, query_scale_ + rows_);
    } else if (call_.q_scale.data) {
      query_scale_[rows_] = scale_at(call_.q_scale, 0, query, token);
    }
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

  static bool keeps(const MaskView& mask, int64_t query, int64_t item, int64_t token) {
    return !mask.data ||
           mask.data[query * mask.query_stride + item * mask.item_stride + token * mask.token_stride];
  }

  // Folds the valid tokens of document j in [token, end) into best_ and winner_. False: there is none.
  bool score_document(int64_t j, int64_t token, int64_t end) {
    const int64_t query = segments_.front().query;  // in_batch views have query_stride 0
    bool any = false;
    while (rows_ > 0 && token < end) {
      const int64_t count = gather(query, j, token, end);
      if (count == 0) break;
      if (!any) {
        std::fill_n(best_, round_up(rows_, panel_rows_), -std::numeric_limits<Real>::infinity());
        std::fill_n(winner_, round_up(rows_, panel_rows_), Index{ids_[0]});
        any = true;
      }
      score(query, j, token, end, count);
    }
    return any;
  }

  // The next valid tokens into ids_; moves `token` past them.
  int64_t gather(int64_t query, int64_t j, int64_t& token, int64_t end) {
    if (!call_.d_mask.data) {
      const int64_t tiles = ceil_div(end - token, c_.tile_tokens);
      const int64_t count = std::min(round_up(ceil_div(end - token, tiles), m_.group_tokens), end - token);
      for (int64_t n = 0; n < count; ++n) ids_[n] = static_cast<int32_t>(token + n);
      token += count;
      return count;
    }
    int64_t count = 0;
    for (; token < end && count < c_.tile_tokens; ++token) {
      ids_[count] = static_cast<int32_t>(token);
      count += keeps(call_.d_mask, query, j, token);
    }
    return count;
  }

  // Bytes of a token of packed codes.
  int64_t packed_bytes() const { return ceil_div(s_.d * call_.d_bits, 8); }

  // Elements of a decompressed row.
  int64_t row_room() const { return call_.residual ? round_up(s_.d, 16) : 0; }

  // Tokens ids_ [0, padded) of document j to the tile buffer, rounded to the dtype of Q, and their norms.
  void decompress(int64_t j, int64_t padded, Tile& tile) {
    const ResidualTokens& residual = *call_.residual;
    constexpr Dtype kReal = sizeof(Real) == 8 ? Dtype::fp64 : Dtype::fp32;
    const int64_t room = row_room();
    // What packs for a bf16 multiplier rounds to bf16.
    const bool rounds = call_.dtype != kReal && call_.dtype != m_.native;
    for (int64_t n = 0; n < padded; ++n) offsets_[n] = residual.starts[j] + ids_[n];
    for (int64_t first = 0; first < padded; first += kRowsAtOnce) {
      const int64_t count = std::min(padded - first, kRowsAtOnce);
      rows_kernels_.decompress(residual, offsets_ + first, count, s_.d, decompressed_, room);
      for (int64_t n = 0; n < count; ++n) {
        const Real* row = decompressed_ + n * room;
        char* packed = tile_ + (first + n) * c_.row_bytes;
        if (rounds) rows_kernels_.write(row, s_.d, call_.dtype, rounded_);
        m_.pack_row(rounds ? rounded_ : row, rounds ? call_.dtype : kReal, 1, s_.d, packed);
      }
    }
    tile.tokens = tile_;
    tile.offsets = packed_offsets_;
    tile.ahead = tile_;
    if (call_.normalize) {
      rows_kernels_.inverse_norms(tile_, packed_offsets_, padded, m_.native, 1, s_.d, token_scale_);
      tile.token_scales = token_scale_;
    }
  }

  void pack_document_row(const char* token, char* out) {
    if (!call_.d_bits) return m_.pack_row(token, call_.dtype, call_.D.dim_stride, s_.d, out);
    const auto* codes = reinterpret_cast<const uint8_t*>(token);
    if (call_.D.dim_stride != 1) {
      for (int64_t k = 0; k < packed_bytes(); ++k) packed_codes_[k] = codes[k * call_.D.dim_stride];
      codes = packed_codes_;
    }
    unpack_codes_(codes, call_.d_bits, s_.d, codes_);
    m_.pack_row(codes_, call_.dtype, 1, s_.d, out);
  }

  // Tokens ids_ [0, padded) of document j where they lie, or in the tile buffer.
  void stage(int64_t query, int64_t j, int64_t count, int64_t padded, Tile& tile) {
    const char* document = document_token(query, j, 0);
    const int64_t token_bytes = call_.D.token_stride * element_;
    for (int64_t n = 0; n < padded; ++n) offsets_[n] = ids_[n] * token_bytes;
    std::fill(offsets_ + padded, offsets_ + round_up(count, m_.group_tokens), offsets_[count - 1]);
    if (call_.normalize) {
      rows_kernels_.inverse_norms(document, offsets_, padded, call_.dtype, call_.D.dim_stride, s_.d,
                                  token_scale_);
      tile.token_scales = token_scale_;
    } else if (call_.d_scale.data) {
      for (int64_t n = 0; n < padded; ++n) token_scale_[n] = scale_at(call_.d_scale, query, j, ids_[n]);
      tile.token_scales = token_scale_;
    }
    if (in_place_ && (!m_.even_tokens || ids_[count - 1] - ids_[0] == count - 1)) {
      tile.tokens = document;
      tile.offsets = offsets_;
    } else if (widening_) {
      tile.source = document;
      tile.source_offsets = offsets_;
      tile.widened = tile_;
      tile.tokens = tile_;
      tile.offsets = packed_offsets_;
    } else {
      for (int64_t n = 0; n < padded; ++n) {
        pack_document_row(document + offsets_[n], tile_ + n * c_.row_bytes);
      }
      tile.tokens = tile_;
      tile.offsets = packed_offsets_;
    }
    if (m_.correct && tile.source) {
      m_.correct_packed(document, offsets_, padded, call_.d_bits, s_.d, corrections_);
      tile.corrections = corrections_;
    } else if (m_.correct) {
      m_.correct(tile.tokens, tile.offsets, padded, c_.steps, corrections_);
      tile.corrections = corrections_;
    }
  }

  void score(int64_t query, int64_t j, int64_t next, int64_t end, int64_t count) {
    const int64_t padded = round_up(count, m_.token_step);
    std::fill(ids_ + count, ids_ + padded, ids_[count - 1]);
    Tile tile{};
    tile.steps = c_.steps;
    tile.count = padded;
    tile.valid = count;
    tile.dims = call_.compared_bits;
    tile.ids = call_.winners ? ids_ : nullptr;
    if (call_.residual) {
      decompress(j, padded, tile);
    } else {
      stage(query, j, count, padded, tile);
      // While the first panel computes, what follows this tile comes nearer.
      tile.ahead = next < end ? document_token(query, j, next) : document_token(query, j + 1, 0);
      tile.ahead_step = m_.step_dims * element_;
      if (call_.d_bits) tile.ahead_step = ceil_div(m_.step_dims * call_.d_bits, 8);
    }
    for (int64_t row = 0; row < rows_; row += panel_rows_) {
      tile.panel = panels_ + row * c_.row_bytes;
      tile.vectors = rows_ - row > m_.lanes ? 2 : 1;
      tile.best = best_ + row;
      tile.winner = winner_ + row;
      (row == 0 && tile.source ? widening_ : m_.score_tile)(tile);
      tile.ahead_step = 0;
    }
  }

  void finish(const Segment& segment, int64_t j, bool scored, ScoreSum& sum) const {
    for (int64_t row = segment.first_row; scored && row < segment.first_row + segment.rows; ++row) {
      sum.add(scales(call_) ? best_[row] * query_scale_[row] : best_[row]);
    }
    if (segment.end_token == query_length(segment.query)) {
      static_cast<Real*>(call_.scores)[segment.query * s_.N + j] = static_cast<Real>(sum.total());
      sum = ScoreSum();
    }
    if (!call_.winners) return;
    const int64_t place = winner_place(segment.query, j);
    if (call_.wide || wide_winners(s_.Ld)) {
      write_winners(static_cast<int32_t*>(call_.winners) + place, segment, scored);
    } else {
      write_winners(static_cast<uint16_t*>(call_.winners) + place, segment, scored);
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
  const Parts<Real>& parts_;
  int64_t panel_rows_, element_;
  bool in_place_;
  ScoreTile widening_ = nullptr;  // widens this call's tokens as it goes
  // The row block.
  int64_t rows_ = 0;
  std::vector<Segment> segments_;
  std::vector<ScoreSum> open_sums_;  // by document, while a query goes on in the next block
  char* panels_;
  Real* query_scale_;
  Index* row_token_;
  Real* best_;
  Index* winner_;
  // The tile.
  char* tile_;
  char* packed_row_;
  Real* token_scale_;
  int64_t* offsets_;         // of the tokens from the document's first
  int64_t* packed_offsets_;  // of the tokens in tile_
  int32_t* ids_;
  int32_t* corrections_;  // of the sums of the tokens' products
  // Residual-compressed documents.
  Real* decompressed_;  // [kRowsAtOnce, row_room()]
  Real* rounded_;       // [row_room()]
  // Packed codes.
  void (*unpack_codes_)(const uint8_t*, int, int64_t, int8_t*);
  uint8_t* packed_codes_;  // [packed_bytes()]: a token whose bytes lie apart
  int8_t* codes_;          // [d]
};

// Merges the maxima over a document's parts, first tokens first: a later one must be greater, and the first
// NaN stays.
template <class Real>
void merge_parts(const ForwardCall& call, const Cut& c, const Parts<Real>& parts) {
  const Sizes& s = call.sizes;
  for (int64_t pair = 0; pair < s.Nq * s.N; ++pair) {
    ScoreSum sum;
    for (int64_t token = 0; token < s.Lq; ++token) {
      Real best = 0;
      int32_t winner = kSentinel;
      for (int64_t part = 0; part < c.token_parts; ++part) {
        const int64_t n = (pair * c.token_parts + part) * s.Lq + token;
        if (parts.winner[n] == kSentinel) continue;
        const Real x = parts.best[n];
        if (winner == kSentinel || replaces_maximum(x, best)) {
          best = x;
          winner = parts.winner[n];
        }
      }
      if (winner != kSentinel) sum.add(scales(call) ? best * parts.scale[pair * s.Lq + token] : best);
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
  const Parts<Real> parts(c, call.sizes);
  for_each_item(c.items(), threads, [&] { return Worker<Real, Index>(call, k, m, c, parts); });
  if (c.splits_pairs()) merge_parts(call, c, parts);
}

}  // namespace

void forward(const ForwardCall& call) {
  const Sizes& s = call.sizes;
  if (s.Nq == 0 || s.N == 0) return;
  const Kernels& k = kernels();
  const Multiplier& m = choose_multiplier(k, call);
  Sizes mean = s;  // of a sequence
  if (call.packed) {
    mean.Lq = ceil_div(s.Lq, s.Nq);
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
