// The tile kernel on the tile registers of AMX.
//
//   tokens of a group    A: 2 tiles of 16 tokens, rows of D as they lie in memory
//   rows of the panel    B: 2 tiles of 16 query rows, [step][row] as the panel holds them
//   similarities         2 x 2 tiles of 16 tokens x 16 rows, in 4 tile registers for all k-steps; then
//                        they go to a buffer in L1, where a vector holds one token's similarities with
//                        16 rows, and fold.inc.h takes them lane by lane
//
// Another number of rows needs another configuration of the tiles, so all halves of a document have one
// number of tokens, 16 unless the document is shorter, and the last half repeats tokens of the half before: a
// token that comes twice changes neither maximum nor winner, and nothing is read past the document.
// While the tile unit multiplies a group, the vector units fold the one before: two buffers take turns. Each
// part is followed by its share of the folds, so that the next part's tiles are in the reorder buffer in
// time.
//
// Steps come in `parts` of at most 16, all of one length, since another length would need another
// configuration, which zeros the sums.
//
// Tiles: tiles_amx.h, or a test's substitute.
#include "../fold.inc.h"

namespace {

constexpr int kTileRows = 16;
constexpr int kTileSteps = 16;  // of 4 bytes
constexpr int kGroupTokens = 2 * kTileRows;
constexpr int kFoldTokens = 8;  // similarities of so many tokens are folded at a time
constexpr int64_t kBufferStride = 2 * F32::kLanes * 4;
constexpr int64_t kLine = 64;

// tmm0 to tmm3: sums, [2 of tokens][2 of rows]. tmm4, tmm5: tokens. tmm6, tmm7: query rows.
// Where the panel stays in tiles: tmm0, tmm1: sums, [2 of rows]. tmm2, tmm3: tokens, [part]. tmm4 to tmm7:
// query rows, [part][2 of rows].
struct TileShape {
  int64_t tokens = 0;  // of half a group
  int64_t steps = 0;   // of a part
  bool keeps_panel = false;

  bool operator==(const TileShape& other) const {
    return tokens == other.tokens && steps == other.steps && keeps_panel == other.keeps_panel;
  }
};

thread_local TileShape shape_in_use;

void use_shape(const TileShape& shape) {
  if (shape == shape_in_use) return;
  const int tokens = shape.keeps_panel ? 2 : 4, query = shape.keeps_panel ? 4 : 6;  // the first tiles of each
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool holds_tokens = tile >= tokens && tile < query;
    config.rows[tile] = static_cast<uint8_t>(tile < query ? shape.tokens : shape.steps);
    config.row_bytes[tile] = static_cast<uint16_t>(holds_tokens ? 4 * shape.steps : F32::kLanes * 4);
  }
  Tiles::configure(config);
  shape_in_use = shape;
}

void release_tiles() {
  if (shape_in_use == TileShape{}) return;
  Tiles::release();
  shape_in_use = TileShape{};
}

struct TileBf16 {
  template <int Sum, int A, int B>
  static void multiply_add() {
    Tiles::multiply_add_bf16<Sum, A, B>();
  }
  static F32::V value(const char* sums) { return load<F32::V>(sums); }
};

struct TileInt8 {
  template <int Sum, int A, int B>
  static void multiply_add() {
    Tiles::multiply_add_int8<Sum, A, B>();
  }
  static F32::V value(const char* sums) { return from_integers(load<F32::U>(sums)); }
};

// Addresses and indices of a group's tokens, by halves.
struct Group {
  int64_t first[2];
  int64_t halves;

  // From token t on.
  Group(int64_t t, int64_t half, int64_t valid)
      : first{least(t, valid - half), least(t + half, valid - half)}, halves(t + half < valid ? 2 : 1) {}

  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
};

// Folds eight tokens, the first of which is token `first`.
template <class Element, int NV>
inline __attribute__((always_inline)) void fold_eight(const char* sums, const Tile& tile, int64_t first) {
  Column<F32, kFoldTokens> column[NV];
#pragma GCC unroll 8
  for (int n = 0; n < kFoldTokens; ++n) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      column[v].value[n] = Element::value(sums + n * kBufferStride + v * F32::kLanes * 4);
    }
  }
  fold_columns(column, tile, first);
}

// Fetches so many bytes to L2.
inline void fetch(const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at, 0, 2);
}

// Work beside the products of a group, in as many shares as the products have parts.
template <class Element, int NV>
class Meanwhile {
 public:
  // Fetches `bytes` from `ahead` on.
  Meanwhile(const Tile& tile, int64_t parts, const char* ahead, int64_t bytes)
      : tile_(tile), parts_(parts), ahead_(ahead), ahead_share_(round_up(bytes, parts * kLine) / parts) {}

  // And folds the whole group `before`, whose sums are stored.
  void fold(const Group& before, const char* sums) {
    before_ = &before;
    sums_ = sums;
  }

  void share() {
    fetch(ahead_, ahead_share_);
    ahead_ += ahead_share_;
    if (sums_ == nullptr) return;
    for (due_ += kEights; due_ >= parts_; due_ -= parts_, ++eight_) {
      const int64_t first = before_->first[eight_ / 2] + eight_ % 2 * kFoldTokens;
      fold_eight<Element, NV>(sums_ + eight_ * kFoldTokens * kBufferStride, tile_, first);
    }
  }

 private:
  static constexpr int64_t kEights = kGroupTokens / kFoldTokens;

  static int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

  const Tile& tile_;
  int64_t parts_;
  const char* ahead_;
  int64_t ahead_share_;
  const Group* before_ = nullptr;
  const char* sums_ = nullptr;
  int64_t due_ = 0, eight_ = 0;
};

// The products of a part whose first tokens are in tmm4. First: which rows come first; they take turns, so
// that a part begins with tiles that the last products of the one before have left.
template <class Element, int NH, int NV, int First>
void multiply_part(const char* panel, const char* others, int64_t token_stride) {
  constexpr int A = NV == 2 ? First : 0, B = NV == 2 ? 1 - First : 0;
  Tiles::load<6 + A>(panel + A * F32::kLanes * 4, kBufferStride);
  Element::template multiply_add<A, 4, 6 + A>();
  if constexpr (NV == 2) {
    Tiles::load<6 + B>(panel + B * F32::kLanes * 4, kBufferStride);
    Element::template multiply_add<B, 4, 6 + B>();
  }
  if constexpr (NH == 2) {
    Tiles::load<5>(others, token_stride);
    Element::template multiply_add<2 + B, 5, 6 + B>();
    if constexpr (NV == 2) Element::template multiply_add<2 + A, 5, 6 + A>();
  }
}

// Sums of NH halves of a group's tokens with NV vectors of rows.
template <class Element, int NH, int NV>
void multiply_group(const Tile& tile, const Group& group, int64_t token_stride, int64_t parts, int64_t steps,
                    Meanwhile<Element, NV> meanwhile) {
  const char* tokens = static_cast<const char*>(tile.tokens) + tile.offsets[group.first[0]];
  const char* others = static_cast<const char*>(tile.tokens) + tile.offsets[group.first[1]];
  const char* panel = static_cast<const char*>(tile.panel);
  Tiles::zero<0>();
  if constexpr (NV == 2) Tiles::zero<1>();
  if constexpr (NH == 2) Tiles::zero<2>();
  if constexpr (NH == 2 && NV == 2) Tiles::zero<3>();
  for (int64_t part = 0; part < parts; ++part) {
    Tiles::load<4>(tokens, token_stride);
    if (part % 2 == 0) {
      multiply_part<Element, NH, NV, 0>(panel, others, token_stride);
    } else {
      multiply_part<Element, NH, NV, 1>(panel, others, token_stride);
    }
    panel += steps * kBufferStride;
    tokens += steps * 4;
    others += steps * 4;
    meanwhile.share();
  }
}

template <int NH, int NV>
void store_sums(char* buffer) {
  Tiles::store<0>(buffer, kBufferStride);
  if constexpr (NV == 2) Tiles::store<1>(buffer + F32::kLanes * 4, kBufferStride);
  if constexpr (NH == 2) {
    Tiles::store<2>(buffer + kTileRows * kBufferStride, kBufferStride);
    if constexpr (NV == 2) {
      Tiles::store<3>(buffer + kTileRows * kBufferStride + F32::kLanes * 4, kBufferStride);
    }
  }
}

// Folds half a group, the `count` tokens from `first` on. The last token repeats to fill up eight.
template <class Element, int NV>
void fold_half(char* buffer, const Tile& tile, int64_t first, int64_t count) {
  const char* last = buffer + (count - 1) * kBufferStride;
  for (int64_t t = count; t % kFoldTokens; ++t) {
    __builtin_memcpy(buffer + t * kBufferStride, last, NV * F32::kLanes * 4);
  }
  for (int64_t t = 0; t < count; t += kFoldTokens) {
    fold_eight<Element, NV>(buffer + t * kBufferStride, tile, first + t);
  }
}

template <class Element, int NV>
void fold_group(char* buffer, const Tile& tile, const Group& group, int64_t half) {
  for (int64_t n = 0; n < group.halves; ++n) {
    fold_half<Element, NV>(buffer + n * kTileRows * kBufferStride, tile, group.first[n], half);
  }
}

template <class Element, int NV>
void score_panel_in_tiles(const Tile& tile) {
  alignas(64) char buffers[2][kGroupTokens * kBufferStride];
  const int64_t parts = (tile.steps + kTileSteps - 1) / kTileSteps, steps = tile.steps / parts;
  const int64_t half = Group::least(tile.valid, kTileRows);
  const int64_t token_stride = tile.valid > 1 ? tile.offsets[1] - tile.offsets[0] : 0;
  use_shape({half, steps});
  Group before(0, half, half);
  for (int64_t t = 0, turn = 0; t < tile.valid; t += 2 * half, turn ^= 1) {
    const Group group(t, half, tile.valid);
    const int64_t ahead_bytes = tile.steps * tile.ahead_step;  // a token
    Meanwhile<Element, NV> meanwhile(tile, parts, tile.ahead + t * ahead_bytes,
                                     Group::least(2 * half, tile.valid - t) * ahead_bytes);
    if (t > 0) meanwhile.fold(before, buffers[turn ^ 1]);
    if (group.halves == 2) {
      multiply_group<Element, 2, NV>(tile, group, token_stride, parts, steps, meanwhile);
      store_sums<2, NV>(buffers[turn]);
    } else {
      multiply_group<Element, 1, NV>(tile, group, token_stride, parts, steps, meanwhile);
      store_sums<1, NV>(buffers[turn]);
    }
    before = group;
  }
  fold_group<Element, NV>(buffers[(tile.valid - 1) / (2 * half) % 2], tile, before, half);
}

// As score_panel_in_tiles, with at most two parts: the panel is loaded once, and the tokens of half a group
// are multiplied at a time, which takes half as many loads.
template <class Element, int NV>
void score_kept_panel(const Tile& tile) {
  alignas(64) char buffers[2][kTileRows * kBufferStride];
  const int64_t parts = (tile.steps + kTileSteps - 1) / kTileSteps, steps = tile.steps / parts;
  const int64_t half = Group::least(tile.valid, kTileRows);
  const int64_t token_stride = tile.valid > 1 ? tile.offsets[1] - tile.offsets[0] : 0;
  const int64_t ahead_bytes = tile.steps * tile.ahead_step;  // a token
  const char* panel = static_cast<const char*>(tile.panel);
  use_shape({half, steps, true});
  Tiles::load<4>(panel, kBufferStride);
  if constexpr (NV == 2) Tiles::load<5>(panel + F32::kLanes * 4, kBufferStride);
  if (parts == 2) Tiles::load<6>(panel + steps * kBufferStride, kBufferStride);
  if (parts == 2 && NV == 2) Tiles::load<7>(panel + steps * kBufferStride + F32::kLanes * 4, kBufferStride);
  int64_t before = 0, turn = 0;
  for (int64_t t = 0; t < tile.valid; t += half, turn ^= 1) {
    const int64_t first = Group::least(t, tile.valid - half);
    const char* tokens = static_cast<const char*>(tile.tokens) + tile.offsets[first];
    Tiles::zero<0>();
    if constexpr (NV == 2) Tiles::zero<1>();
    Tiles::load<2>(tokens, token_stride);
    Element::template multiply_add<0, 2, 4>();
    if constexpr (NV == 2) Element::template multiply_add<1, 2, 5>();
    if (parts == 2) {
      Tiles::load<3>(tokens + steps * 4, token_stride);
      Element::template multiply_add<0, 3, 6>();
      if constexpr (NV == 2) Element::template multiply_add<1, 3, 7>();
    }
    fetch(tile.ahead + t * ahead_bytes, Group::least(half, tile.valid - t) * ahead_bytes);
    if (t > 0) fold_half<Element, NV>(buffers[turn ^ 1], tile, before, half);
    store_sums<1, NV>(buffers[turn]);
    before = first;
  }
  fold_half<Element, NV>(buffers[turn ^ 1], tile, before, half);
}

template <class Element, int NV>
void score_panel(const Tile& tile) {
  if (tile.steps <= 2 * kTileSteps) {
    score_kept_panel<Element, NV>(tile);
  } else {
    score_panel_in_tiles<Element, NV>(tile);
  }
}

template <class Element>
void score_tile_in_tiles(const Tile& tile) {
  with_vectors(tile, [&]<int NV>() { score_panel<Element, NV>(tile); });
}

// `m`, which multiplies the same elements, by tiles.
template <class Element>
void use_tiles(Multiplier& m) {
  m.score_tile = score_tile_in_tiles<Element>;
  m.release = release_tiles;
  m.token_step = kFoldTokens;
  m.group_tokens = kGroupTokens;
  m.part_steps = kTileSteps;
  m.even_tokens = true;
  m.pack_query = nullptr;
  m.correct = nullptr;
  m.widening_packed = nullptr;
  m.correct_packed = nullptr;
}

}  // namespace
