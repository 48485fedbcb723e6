// Tiles of a document's valid tokens, for a kernel: in place, widened while they multiply, or in a thread's
// buffer, because they need conversion, have strided dims or are compressed.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "../common/arithmetic.h"
#include "cache_blocking.h"
#include "forward.h"
#include "kernels.h"
#include "scratch.h"

namespace late_interaction::cpu {

inline bool keeps(const MaskView& mask, int64_t query, int64_t item, int64_t token) {
  return !mask.data ||
         mask.data[query * mask.query_stride + item * mask.item_stride + token * mask.token_stride];
}

// A number that cannot be a scale (below 0, infinite) becomes NaN. Without branches, so that loops vectorize.
inline float checked_scale(float x) {
  constexpr float kMax = std::numeric_limits<float>::max();
  return (x >= 0) & (x <= kMax) ? x : std::numeric_limits<float>::quiet_NaN();
}

inline const float* scale_at(const ScaleView& scale, int64_t query, int64_t item, int64_t token) {
  return scale.data + query * scale.query_stride + item * scale.item_stride + token * scale.token_stride;
}

inline const char* token_at(const TokenView& x, int64_t bytes, int64_t query, int64_t item, int64_t token) {
  return static_cast<const char*>(x.data) +
         (query * x.query_stride + item * x.item_stride + token * x.token_stride) * bytes;
}

template <class Real>
class TileStage {
 public:
  // Takes its memory from `memory`, which has room for bytes(call, m, c) more.
  TileStage(const ForwardCall& call, const Kernels& k, const Multiplier& m, const Cut& c, Scratch& memory)
      : call_(call),
        s_(call.sizes),
        rows_(row_kernels<Real>(k)),
        m_(m),
        c_(c),
        element_(element_bytes(call.dtype)),
        unpack_codes_(k.unpack_codes) {
    const bool whole = call.D.dim_stride == 1 && s_.d == c.steps * m.step_dims;
    in_place_ = call.dtype == m.native && whole && !call.d_bits;
    if (!call.residual && whole && c.steps % m.lanes == 0) {
      if (m.widening && !call.d_bits) widening_ = m.widening(call.dtype);
      if (m.widening_packed && call.d_bits) widening_ = m.widening_packed(call.d_bits);
    }
    const int64_t tile = c.tile_tokens, padded = tile + m.group_tokens;
    memory.take(Array{tile * c.row_bytes, buffer_}, Array{tile, token_scale_}, Array{padded, offsets_},
                Array{tile, packed_offsets_}, Array{padded, ids_}, Array{tile, corrections_},
                Array{row_room(call), rounded_}, Array{kRowsAtOnce * row_room(call), decompressed_},
                Array{packed_bytes(call), packed_codes_}, Array{s_.d, codes_});
    // One panel needs widened tokens once: two groups of them take turns, and stay in L1.
    const bool one_panel = c.block_rows <= 2 * m.lanes;
    kept_rows_ = widening_ && one_panel ? std::min<int64_t>(2 * m.group_tokens, tile) : tile;
    space_rows(kept_rows_);
    tile_.steps = c.steps;
    tile_.dims = call.compared_bits;
    tile_.ids = call.winners ? ids_ : nullptr;
    tile_.token_scales = call.normalize || call.d_scale.data ? token_scale_ : nullptr;
    // Packing does not write the steps behind the last.
    if (c.steps > ceil_div(s_.d, m.step_dims))
      std::memset(buffer_, 0, static_cast<size_t>(tile * c.row_bytes));
  }

  static size_t bytes(const ForwardCall& call, const Multiplier& m, const Cut& c) {
    const int64_t tile = c.tile_tokens, padded = tile + m.group_tokens;
    return Scratch::size_of<char>(tile * c.row_bytes) + Scratch::size_of<Real>(tile) +
           Scratch::size_of<int64_t>(tile) + Scratch::size_of<int64_t>(padded) +
           Scratch::size_of<int32_t>(tile) + Scratch::size_of<int32_t>(padded) +
           Scratch::size_of<Real>(row_room(call)) + Scratch::size_of<Real>(kRowsAtOnce * row_room(call)) +
           Scratch::size_of<uint8_t>(packed_bytes(call)) + Scratch::size_of<int8_t>(call.sizes.d);
  }

  int64_t document_length(int64_t j) const {
    if (call_.residual) return call_.residual->lengths[j];
    return call_.packed ? call_.packed->d_offsets[j + 1] - call_.packed->d_offsets[j] : s_.Ld;
  }

  // The next valid tokens of document j, which tile() takes; moves `token` past them.
  int64_t gather(int64_t query, int64_t j, int64_t& token, int64_t end) {
    if (!call_.d_mask.data) return gather_range(token, end);
    int64_t count = 0;
    for (; token < end && count < c_.tile_tokens; ++token) {
      ids_[count] = static_cast<int32_t>(token);
      count += keeps(call_.d_mask, query, j, token);
    }
    if (count > 0) place(count);
    return count;
  }

  int32_t first_token() const { return ids_[0]; }  // that gather found

  // The tile of the `count` tokens that gather found in document j. The next ones are prefetched from `next`
  // on.
  Tile& tile(int64_t query, int64_t j, int64_t next, int64_t end, int64_t count) {
    const int64_t padded = round_up(count, m_.token_step);
    tile_.count = padded;
    tile_.valid = count;
    if (call_.residual) {
      decompress(j, padded);
    } else {
      stage(query, j, count, padded);
      // While the first panel computes, the next tile is prefetched.
      tile_.ahead = next < end ? document_token(query, j, next) : document_token(query, j + 1, 0);
      tile_.ahead_step = call_.d_bits ? ceil_div(m_.step_dims * call_.d_bits, 8) : m_.step_dims * element_;
    }
    return tile_;
  }

  // The kernel that widens a tile and scores the first panel.
  ScoreTile widening() const { return widening_; }

 private:
  // Rows of residual-compressed documents that are decompressed at a time: they stay in L1.
  static constexpr int64_t kRowsAtOnce = 16;

  // Elements of a decompressed row.
  static int64_t row_room(const ForwardCall& call) { return call.residual ? round_up(call.sizes.d, 16) : 0; }

  // Bytes of a token of packed codes.
  static int64_t packed_bytes(const ForwardCall& call) { return ceil_div(call.sizes.d * call.d_bits, 8); }

  const char* document_token(int64_t query, int64_t j, int64_t token) const {
    return token_at(call_.D, element_, query, j, document_index(j, token));
  }
  // A document token's index in the document, or among all packed documents' tokens.
  int64_t document_index(int64_t j, int64_t token) const {
    return call_.packed ? call_.packed->d_offsets[j] + token : token;
  }

  // Takes the next tokens without a mask. Of two tiles that begin at one token the second keeps the ids of
  // the first, and writes as many whatever its count is: documents of every length have the same branches.
  int64_t gather_range(int64_t& token, int64_t end) {
    int64_t count = end - token;
    if (count > c_.tile_tokens) {
      const int64_t tiles = ceil_div(count, c_.tile_tokens);
      count = std::min(round_up(ceil_div(count, tiles), m_.group_tokens), count);
    }
    if (token != range_first_) {
      range_first_ = token;
      count_up(0, c_.tile_tokens);
    } else {
      count_up(range_count_, m_.group_tokens);  // where padding was
    }
    for (int64_t n = 0; n < m_.group_tokens; ++n) {
      ids_[count + n] = ids_[count - 1];
      offsets_[count + n] = offsets_[count - 1];
    }
    range_count_ = count;
    token += count;
    return count;
  }

  // Lets ids_ [n, n + count) be those of the range, and says where they lie.
  void count_up(int64_t n, int64_t count) {
    const int64_t token_bytes = call_.D.token_stride * element_;
    for (const int64_t end = n + count; n < end; ++n) {
      ids_[n] = static_cast<int32_t>(range_first_ + n);
      offsets_[n] = (range_first_ + n) * token_bytes;
    }
  }

  // Pads ids_ [0, count) to whole steps, and sets the tokens' offsets, for whole groups.
  void place(int64_t count) {
    const int64_t token_bytes = call_.D.token_stride * element_;
    const int64_t padded = round_up(count, m_.token_step);
    std::fill(ids_ + count, ids_ + padded, ids_[count - 1]);
    if (call_.residual) return;
    for (int64_t n = 0; n < padded; ++n) offsets_[n] = ids_[n] * token_bytes;
    std::fill(offsets_ + padded, offsets_ + round_up(count, m_.group_tokens), offsets_[count - 1]);
  }

  void read_scales(int64_t query, int64_t j, int64_t count, int64_t padded) {
    const ScaleView& scale = call_.d_scale;
    if (call_.d_mask.data || scale.token_stride != 1) {
      for (int64_t n = 0; n < padded; ++n)
        token_scale_[n] = checked_scale(*scale_at(scale, query, j, document_index(j, ids_[n])));
      return;
    }
    const float* x = scale_at(scale, query, j, document_index(j, ids_[0]));
    for (int64_t n = 0; n < count; ++n) token_scale_[n] = checked_scale(x[n]);
    std::fill(token_scale_ + count, token_scale_ + padded, token_scale_[count - 1]);
  }

  // Decompresses tokens ids_ [0, padded) of document j to the tile buffer, rounded to the dtype of Q, and
  // computes their norms.
  void decompress(int64_t j, int64_t padded) {
    const ResidualTokens& residual = *call_.residual;
    constexpr Dtype kReal = sizeof(Real) == 8 ? Dtype::fp64 : Dtype::fp32;
    const int64_t room = row_room(call_);
    // What packs for a bf16 multiplier rounds to bf16.
    const bool rounds = call_.dtype != kReal && call_.dtype != m_.native;
    for (int64_t n = 0; n < padded; ++n) offsets_[n] = residual.starts[j] + ids_[n];
    for (int64_t first = 0; first < padded; first += kRowsAtOnce) {
      const int64_t count = std::min(padded - first, kRowsAtOnce);
      rows_.decompress(residual, offsets_ + first, count, s_.d, decompressed_, room);
      for (int64_t n = 0; n < count; ++n) {
        const Real* row = decompressed_ + n * room;
        char* packed = buffer_ + (first + n) * c_.row_bytes;
        if (rounds) rows_.write(row, s_.d, call_.dtype, rounded_);
        m_.pack_row(rounds ? rounded_ : row, rounds ? call_.dtype : kReal, 1, s_.d, packed);
      }
    }
    tile_.tokens = buffer_;
    tile_.offsets = packed_offsets_;
    tile_.ahead = buffer_;
    if (call_.normalize) {
      rows_.inverse_norms(buffer_, packed_offsets_, padded, m_.native, 1, s_.d, token_scale_);
      clear_overflowing_rows(padded);
    }
  }

  // Lets the buffer's first `rows` rows be used in turn.
  void space_rows(int64_t rows) {
    if (rows == spaced_rows_) return;
    spaced_rows_ = rows;
    for (int64_t n = 0; n < c_.tile_tokens; ++n) packed_offsets_[n] = n % rows * c_.row_bytes;
  }

  // Products with a row whose norm overflows may overflow, and it counts as zeros.
  void clear_overflowing_rows(int64_t padded) {
    for (int64_t n = 0; n < padded; ++n) {
      if (token_scale_[n] == 0)
        std::memset(buffer_ + packed_offsets_[n], 0, static_cast<size_t>(c_.row_bytes));
    }
  }

  void pack_row(const char* token, char* out) {
    if (!call_.d_bits) return m_.pack_row(token, call_.dtype, call_.D.dim_stride, s_.d, out);
    const auto* codes = reinterpret_cast<const uint8_t*>(token);
    if (call_.D.dim_stride != 1) {
      for (int64_t k = 0; k < packed_bytes(call_); ++k) packed_codes_[k] = codes[k * call_.D.dim_stride];
      codes = packed_codes_;
    }
    unpack_codes_(codes, call_.d_bits, s_.d, codes_);
    m_.pack_row(codes_, call_.dtype, 1, s_.d, out);
  }

  // Points the tile at tokens ids_ [0, padded) of document j, or packs them into its buffer.
  void stage(int64_t query, int64_t j, int64_t count, int64_t padded) {
    const char* document = document_token(query, j, 0);
    bool overflow = false;
    if (call_.normalize) {
      rows_.inverse_norms(document, offsets_, padded, call_.dtype, call_.D.dim_stride, s_.d, token_scale_);
      for (int64_t n = 0; n < padded; ++n) overflow |= token_scale_[n] == 0;
    } else if (call_.d_scale.data) {
      read_scales(query, j, count, padded);
    }
    tile_.source = nullptr;
    if (in_place_ && !overflow && (!m_.even_tokens || ids_[count - 1] - ids_[0] == count - 1)) {
      tile_.tokens = document;
      tile_.offsets = offsets_;
    } else if (widening_ && !overflow) {
      space_rows(kept_rows_);
      tile_.source = document;
      tile_.source_offsets = offsets_;
      tile_.widened = buffer_;
      tile_.tokens = buffer_;
      tile_.offsets = packed_offsets_;
    } else {
      space_rows(c_.tile_tokens);
      for (int64_t n = 0; n < padded; ++n) pack_row(document + offsets_[n], buffer_ + n * c_.row_bytes);
      tile_.tokens = buffer_;
      tile_.offsets = packed_offsets_;
      if (overflow) clear_overflowing_rows(padded);
    }
    if (m_.correct && tile_.source) {
      m_.correct_packed(document, offsets_, padded, call_.d_bits, s_.d, corrections_);
      tile_.corrections = corrections_;
    } else if (m_.correct) {
      m_.correct(tile_.tokens, tile_.offsets, padded, c_.steps, corrections_);
      tile_.corrections = corrections_;
    }
  }

  const ForwardCall& call_;
  const Sizes& s_;
  const RowKernels<Real>& rows_;
  const Multiplier& m_;
  const Cut& c_;
  int64_t element_;
  bool in_place_;
  ScoreTile widening_ = nullptr;  // widens this call's tokens as it goes
  Tile tile_{};
  int64_t range_first_ = -1, range_count_ = 0;  // of the tokens in ids_, where no mask chose them
  char* buffer_;
  Real* token_scale_;
  int64_t* offsets_;                     // of the tokens from the document's first
  int64_t* packed_offsets_;              // of the tokens in the buffer
  int64_t kept_rows_, spaced_rows_ = 0;  // of the buffer: used in turn while tokens are widened, and now
  int32_t* ids_;
  int32_t* corrections_;  // of the sums of the tokens' products
  // Residual-compressed documents.
  Real* decompressed_;  // [kRowsAtOnce, row_room]
  Real* rounded_;       // [row_room]
  // Packed codes.
  void (*unpack_codes_)(const uint8_t*, int, int64_t, int8_t*);
  uint8_t* packed_codes_;  // [packed_bytes]: a token whose bytes lie apart
  int8_t* codes_;          // [d]
};

}  // namespace late_interaction::cpu
