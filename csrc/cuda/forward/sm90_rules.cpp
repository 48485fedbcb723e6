// The choice among the kernels of Hopper, and where short documents go straight to registers: thresholds that
// were measured on an H200 and an H100.
#include <algorithm>
#include <iterator>

#include "../../plan/forward/kernel.h"
#include "../../plan/forward/tiles.h"
#include "../../plan/measured/h200.h"
#include "sm90_plans.h"

namespace late_interaction {

extern const ForwardKernel sm90_d;

namespace {

// Work tiles of a call as forward/sm80/kernel_short_docs.cuh deals it, a warp each.
int64_t short_docs_work_tiles(const Sizes& s) {
  constexpr int64_t kRows = 32;
  return ceil_div(rows_per_document(s), kRows) * (s.layout == Layout::in_batch ? 1 : s.Nq) * s.N;
}

// About one for each warp that is resident, or more.
bool fills_the_device(int64_t short_docs_work_tiles, const Device& device) {
  return short_docs_work_tiles > 6 * device.sm_count;
}

// True if every block of such a call has one work tile, whose tokens the warps share.
bool shares_work_tiles(const Sizes& s, int columns, const Device& device) {
  const int k_chunks = 2 * s.d <= 128 ? 1 : 2;
  return short_docs_work_tiles(s) <= short_docs_blocks(columns, k_chunks) * device.sm_count;
}

// Documents so short that a ring and barriers take longer than their products. sm90_d needs 0.4 to
// 0.6 us of a multiprocessor for any document of up to 64 tokens, sm90_q 1.2 us for any of up to 80
// against 256 rows, and more with a mask; directly, 32 rows take 0.06 to 0.1 us for every 8 tokens, and a
// call of few work tiles, whose tokens the warps of a block share, is over 0.5 to 2 us earlier. But a query
// of more than 32 rows is then summed by a second kernel.
bool worth_direct(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  constexpr double kLittle = 5e8, kSome = 5e9;  // operations
  const int64_t rows = rows_per_document(s), work_tiles = short_docs_work_tiles(s);
  const bool many = fills_the_device(work_tiles, device);
  if (!is_held(s, traits)) return rows <= 32 && s.Ld <= 16 && many && traits.tma_compatible;
  if (!traits.tma_compatible) {
    return s.Ld <= 128 && (rows <= 32 || s.Ld <= 40 || operations(s) <= kLittle);
  }
  const bool few = shares_work_tiles(s, 32, device), narrow = 2 * s.d <= 128;
  if (rows <= 32) {
    // A warp has one work tile, and loads its query rows, for which a ring would wait as well.
    const bool one_each = s.layout == Layout::per_query &&
                          work_tiles <= 4 * short_docs_blocks(32, narrow ? 1 : 2) * device.sm_count;
    return s.Ld <= (few ? narrow ? 512 : 192 : one_each ? 128 : many ? 80 : traits.masked ? 64 : 32);
  }
  const bool alone = 2 * work_tiles <= 3 * device.sm_count;  // on their multiprocessors, most of the blocks
  if (few && rows > 128 && s.Ld <= (narrow ? 512 : alone ? 384 : 128)) return true;
  if (few && s.Ld <= 64 && s.Lq <= 32) return true;
  // With masked documents of over 32 tokens most warps would idle, unless blocks share the tokens.
  if (rows <= 128) return traits.masked ? s.Ld <= (few || many ? 64 : 32) : s.Ld <= 32 && many;
  return s.Ld <= 16 || (s.Ld <= (traits.masked ? 48 : 32) && operations(s) <= kSome) ||
         (s.Ld <= 64 && operations(s) <= kLittle);
}

// Documents that L2 does not hold are a stream of memory, and sm90_stream keeps more of it under way; from
// L2, sm80_short_docs begins sooner.
bool worth_stream(const Sizes& s, const Device& device) {
  constexpr int64_t kLongest = 80;
  return s.Ld <= kLongest && 2 * s.N * s.Ld * s.d >= device.l2_bytes;
}

// Embeddings that registers do not hold: how many 256-byte pieces the busiest warp takes one after the other.
// A piece takes 1.2 us, the latency of loads, however many warps there are, if L2 holds the rows under way.
int64_t pieces_in_turn(const Sizes& s, const ForwardPlan& direct) {
  const int members = direct.members;
  const int64_t workers = direct.grid * 4 / members, pieces = ceil_div(direct.k_chunks, 2);
  const int64_t tiles = ceil_div(ceil_div(s.Ld, direct.tokens), members);
  return ceil_div(direct.work_tiles, workers) * tiles * pieces;
}

// The time of `plan`, less the time of a short_docs call beside its pieces; in the time of a piece.
double in_pieces(const Sizes& s, const ForwardPlan& plan) {
  const double pieces = static_cast<double>(ceil_div(plan.k_chunks, 2));
  const int64_t workers = plan.grid / plan.cluster;
  const double waves = static_cast<double>(ceil_div(plan.work_tiles, workers));
  if (plan.kernel == &sm90_d) return 2.8 + waves * pieces * (plan.rows <= 64 ? 1.0 / 3 : 0.6);
  const double tiles = static_cast<double>(ceil_div(s.Ld, plan.tokens));
  return 3.4 + waves * tiles * (1.1 + 0.7 * pieces);
}

bool is_sooner_in_pieces(const Sizes& s, const ForwardPlan& direct, const ForwardPlan& plan) {
  constexpr int64_t kLongest = 64, kRowsInL2 = int64_t{40} << 20;
  constexpr double kSecondKernel = 1.3;  // pieces, of the kernel that sums partials
  const int64_t under_way = direct.rows * direct.grid * 4 / direct.members;
  return s.Ld <= kLongest && std::min(under_way, s.Nq * s.Lq) * direct.k_chunks * 128 <= kRowsInL2 &&
         static_cast<double>(pieces_in_turn(s, direct)) + (direct.partials > 1 ? kSecondKernel : 0.0) <=
             in_pieces(s, plan);
}

// If warps have more than one work tile each, the number of resident warps counts: tiles of 8 tokens allow a
// block more a multiprocessor than tiles of 32. Rows that are no whole 16 bytes take more registers in tiles
// of 32. If a block has one work tile its warps share the tokens.
int short_docs_tokens(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  const bool many = fills_the_device(short_docs_work_tiles(s), device);
  const bool shared = s.Ld <= 32 && shares_work_tiles(s, 8, device);
  const bool fits_eights = s.Ld <= (traits.tma_compatible ? 20 : 48) || (s.Ld > 32 && s.Ld <= 40);
  return s.Ld <= 8 || shared || (many && fits_eights) ? 8 : 32;
}

// Up to 128 rows fit sm90_d. But if a multiprocessor has one document, and a short one, sm90_q takes 0.5 us
// less for over 64 rows, though half its tile is empty; unless a kernel has to find norms for it.
bool worth_rows(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  constexpr int64_t kShort = 512;
  if (rows_per_document(s) > 128) return true;
  return rows_per_document(s) > 64 && s.Ld <= kShort && s.documents() <= device.sm_count && !traits.packed &&
         !traits.scaled && !is_quantized(traits.dtype);
}

// True if a kernel should first copy the kept tokens of masked documents. The copy reads and writes a token's
// bytes, and is a kernel more; without a mask products take about a quarter less, which at four rows a byte
// is as long, and no time goes to masked tokens.
bool worth_copying(const Sizes& s, Compute compute, const ForwardTraits& traits) {
  constexpr int64_t kFewestRows = 512, kWidestTile = 160, kMostBytes = int64_t{1} << 30;
  constexpr double kEnough = 8e7;
  const int64_t slot = std::max(s.Ld, kWidestTile), token = s.d * element_bytes(compute);
  return traits.masked && !traits.packed && s.Ld >= 80 &&
         rows_per_document(s) >= std::max(kFewestRows, 4 * token) && similarities(s) >= kEnough &&
         s.documents() * slot * token <= kMostBytes;
}

// With an odd number of documents one of two blocks idles at the end of each row tile.
bool worth_pairing(const Sizes& s) { return s.N % 2 == 0 || s.N > 8; }

// Microseconds that a tile takes a block, while few others read, and while all do.
struct TileTime {
  double alone, together;
};

// A tile of sm90_d has a barrier, a request to TMA and an exchange beside its products, which are too small
// to keep the tensor cores busy. In sm90_q the products of the tile before overlap all this.
TileTime tile_time(const Sizes& s, const ForwardPlan& plan) {
  constexpr double kDocumentTile = 0.1, kRowTile = 0.07;      // microseconds beside the products
  constexpr double kDocumentFactor = 1.4, kRowFactor = 0.85;  // of the products' time at h200::kProducts
  const double tokens = plan.tokens, bytes = element_bytes(plan.compute);
  const double products =
      2.0 * plan.rows * tokens * (plan.k_chunks * 64) / h200::kProducts;  // two bytes an element
  if (plan.kernel != &sm90_d) {
    const double busy = kRowFactor * products + kRowTile;
    return {busy, busy};
  }
  const double busy = kDocumentFactor * products + kDocumentTile, read = tokens * s.d * bytes;
  return {std::max(busy, read / h200::kReadAlone), std::max(products, read / h200::kReadTogether)};
}

// The best number of splits of each document of a plan of sm90_q or sm90_d; 1: whole documents.
//
// A call takes as long as its busiest block, but no less than all tiles take all blocks. Considered are the
// numbers of splits that forward_alternatives() lists, since they are timed, and those that fill the device
// with one, two, ... work tiles a block, which must be sooner by more than this model errs. If several row
// tiles read the same tokens, from L2 if they begin together, more splits must be clearly sooner than fewer.
int worthwhile_splits(const Sizes& s, const ForwardPlan& whole, const Device& device) {
  constexpr int64_t kMostWorkTiles = 8;  // of a block; with more, few multiprocessors idle at the end
  constexpr int64_t kMostWaves = 16;     // work tiles of a block, once documents are split
  constexpr int64_t kFewestTiles = 2;    // of a split
  constexpr int64_t kLong = 32;          // tiles of a split
  // Microseconds: of a call; of a work tile's first copies and last fold, which nothing overlaps; of the
  // kernels before and behind; of each wave of the blocks that combine, two a multiprocessor.
  constexpr double kLaunch = 2.7, kEnd = 2.0, kCombine = 2.6, kCombineWave = 0.2;
  constexpr double kGain = 0.90, kError = 0.85, kEqual = 0.95, kAsSoon = 1.02;
  const int64_t blocks = device.sm_count, work_tiles = whole.row_tiles * s.N;
  const int64_t tiles = ceil_div(s.Ld, whole.tokens);
  const int64_t most = tiles / kFewestTiles;
  if (most < 2 || work_tiles > kMostWorkTiles * blocks) return 1;
  const TileTime tile = tile_time(s, whole);
  const double together = 1.0 * work_tiles * tiles / blocks * tile.together;
  const int64_t combined = s.Nq * s.N * ceil_div(s.Lq, whole.partial_rows);
  const double combine = kCombine + kCombineWave * ceil_div(combined, 2 * blocks);
  const auto time = [&](int64_t num_splits) {
    const int64_t units = work_tiles * num_splits, waves = ceil_div(units, blocks);
    // Tiles that every block takes, while all read, and further tiles of the busiest block.
    const double shared = static_cast<double>(units / blocks * tiles) / num_splits;
    const double left = ceil_div(waves * tiles, num_splits) - shared;
    const double taken = shared * std::max(tile.alone, tile.together) + left * tile.alone;
    return kLaunch + kEnd * waves + std::max(together, taken) + (num_splits > 1 ? combine : 0.0);
  };
  int64_t best = 1;
  double least = kGain * time(1);
  if (kLaunch + kEnd + together + combine >= least) return 1;
  const auto consider = [&](int64_t num_splits, double factor) {
    if (num_splits <= best || num_splits > most) return;
    const double taken = time(num_splits);
    if (taken >= (best == 1 ? 1.0 : factor) * least) return;
    best = num_splits;
    least = taken;
  };
  const double equal = s.layout == Layout::in_batch && whole.row_tiles > 1 ? kEqual : 1.0;
  const int* listed = kSplitCounts;
  for (int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const int64_t filling = std::min(waves * blocks / work_tiles, most);
    for (; listed != std::end(kSplitCounts) && *listed <= filling; ++listed) consider(*listed, equal);
    // Numbers that are not timed must be clearly sooner, unless the timed ones leave multiprocessors idle
    // over long documents: the model may overrate the bandwidth of few multiprocessors.
    const bool idle = 10 * best * work_tiles < 7 * blocks && tiles >= kLong * filling;
    consider(filling, idle ? kAsSoon : kError);
  }
  return static_cast<int>(best);
}

// True if most multiprocessors would idle while a few take long documents whole, which sm90_q_longd never
// splits: one query and document of 120 and 2,590 tokens of 768 dims took 151 us, and 37 by sm80's splits.
bool idles(const Sizes& s, const ForwardTraits& traits, const ForwardPlan& plan, const Device& device) {
  constexpr int64_t kFewestTiles = 4, kMostRows = 128;
  const bool half = traits.dtype == Dtype::bf16 || traits.dtype == Dtype::fp16;
  return half && !traits.scaled && !traits.packed && rows_per_document(s) <= kMostRows &&
         4 * plan.work_tiles * plan.cluster <= device.sm_count && s.Ld >= kFewestTiles * plan.tokens;
}

// The wgmma kernel for a call, if there is one.
std::optional<ForwardPlan> plan_wgmma(const Sizes& s, const ForwardTraits& traits, const Device& device) {
  const auto num_splits_of = [&](const std::optional<ForwardPlan>& whole) {
    return whole && !traits.packed ? worthwhile_splits(s, *whole, device) : 1;
  };
  if (worth_rows(s, traits, device)) {
    const auto whole = plan_sm90_q(s, traits, device, false);
    const int num_splits = num_splits_of(whole);
    if (num_splits > 1) return plan_sm90_q(s, traits, device, false, 0, num_splits);
    const bool compacted = worth_copying(s, compute_for(traits.dtype, traits.precision), traits);
    if (const auto rows = compacted ? plan_sm90_q(s, traits, device, true) : whole) return rows;
  }
  if (const auto whole = plan_sm90_d(s, traits, device)) {
    const int num_splits = num_splits_of(whole);
    return num_splits > 1 ? plan_sm90_d(s, traits, device, 0, num_splits) : whole;
  }
  const auto split = plan_sm90_q_longd(s, traits, device, worth_pairing(s));
  if (!split || idles(s, traits, *split, device)) return std::nullopt;
  // With a quarter of a tile's rows, the waste outweighs the speed of wgmma.
  return rows_per_document(s) > split->rows / 4 ? split : std::nullopt;
}

// Several documents to a tile, in microseconds, with winners or without: the start of a call, and for each
// tile of the busiest block products at 85% of the tensor cores' rate, or the end of documents, which takes
// much longer with masks. The others: sm80_short_docs takes 0.06 us of a multiprocessor for 32 rows and 8
// tokens, and a third of the time to read Q is not hidden, since no ring reads ahead; sm90_q, for any
// document of up to 80 tokens, and sm90_d take longer unless a tile of several documents would be mostly
// empty, or a multiprocessor has few documents.
bool worth_short(const Sizes& s, const ForwardTraits& traits, const ForwardPlan& plan, const Device& device) {
  constexpr double kBegin = 4.1, kRate = 0.85, kDocumentEnd = 0.13, kMaskedEnd = 0.5, kSecondKernel = 1.4;
  constexpr double kDirectBegin = 4.2, kDirect = 0.06, kDirectSecondKernel = 1.0;
  constexpr double kReadQ = 1e7;  // bytes of Q a microsecond that nothing hides
  constexpr double kDocumentsBegin = 3.5, kDocument = 0.85, kClear = 0.85;
  constexpr int64_t kAlone = 96;  // columns that an unshared tile costs sm90_q
  constexpr int64_t kFewRows = 64, kFewRowsOfAQuery = 96, kMostPacked = 48;
  const int64_t rows = rows_per_document(s), docs = plan.docs;
  if (traits.packed) return rows > 128 && s.Ld <= kMostPacked;
  if (rows <= (s.layout == Layout::in_batch ? kFewRows : kFewRowsOfAQuery)) return false;
  if (ceil_div(s.N, docs) * plan.tokens > s.N * kAlone) return false;
  const double products =
      2.0 * plan.rows * plan.tokens * 16 * short_steps(s.d, traits.masked) / (kRate * h200::kProducts);
  const double tile = std::max(products, (traits.masked ? kMaskedEnd : kDocumentEnd) * docs);
  const double taken = kBegin + static_cast<double>(ceil_div(plan.work_tiles, plan.grid)) * tile +
                       (plan.partials > 1 ? kSecondKernel : 0.0);
  if (worth_direct(s, traits, device)) {
    const int64_t eights = ceil_div(short_docs_work_tiles(s), device.sm_count) * ceil_div(s.Ld, 8);
    const double read_q = 2.0 * s.Nq * s.Lq * s.d / kReadQ;
    return taken < kDirectBegin + kDirect * static_cast<double>(eights) + read_q +
                       (s.Lq > 32 ? kDirectSecondKernel : 0.0);
  }
  if (rows > 128) return true;
  return taken < kClear * (kDocumentsBegin + kDocument * static_cast<double>(ceil_div(s.N, device.sm_count)));
}

// True if every warp of the GPU has some documents.
bool gives_warps_runs(const Sizes& s, const Device& device) {
  constexpr int64_t kWarps = 12, kDocuments = 4;
  return s.N >= kDocuments * kWarps * device.sm_count;
}

std::optional<ForwardPlan> choose_by_rules(const Sizes& s, const ForwardTraits& traits,
                                           const Device& device) {
  if (traits.dtype == Dtype::fp64) return std::nullopt;
  if (traits.two_terms) return plan_sm90_q_longd(s, traits, device, worth_pairing(s));
  const auto shorts = plan_sm90_q_short(s, traits, device);
  if (shorts && worth_short(s, traits, *shorts, device)) return *shorts;
  if (worth_stream(s, device)) {
    if (const auto stream = plan_sm90_stream(s, traits, device)) return *stream;
  }
  if (device.wgmma && gives_warps_runs(s, device)) {
    if (const auto codes = plan_sm80_stream(s, traits, device)) return *codes;
  }
  // The model of mma.sync's kernels knows neither these times of Hopper's nor rows of no whole 16 bytes.
  if ((device.wgmma || !traits.tma_compatible) && worth_direct(s, traits, device)) {
    const int tokens = short_docs_tokens(s, traits, device);
    if (const auto direct = plan_sm80_short_docs(s, traits, device, tokens)) return *direct;
  }
  if (const auto wgmma = plan_wgmma(s, traits, device)) {
    const auto direct = is_held(s, traits) ? std::nullopt : plan_sm80_short_docs(s, traits, device, 8);
    return direct && is_sooner_in_pieces(s, *direct, *wgmma) ? *direct : *wgmma;
  }
  return std::nullopt;
}

const RegisteredRules kRegistered{choose_by_rules};

}  // namespace

}  // namespace late_interaction
