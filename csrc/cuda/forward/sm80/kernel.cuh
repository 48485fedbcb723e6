// MaxSim forward on the tensor cores of sm_80 and newer (mma.sync), and for fp32 by FFMA without them.
//
//                    a document's tokens, kColumns at a time
//                 +-------------------------------------------+
//   query rows    | S = Q . D^T, 16 x 8 blocks in registers   |  -> running max (and winner)
//   kRows of them |     warps kWarpsM below each other,       |     of every row, in registers
//   (row_tile)    |     kWarpsN side by side                  |     until the document ends
//                 +-------------------------------------------+
//
// Who owns what
//   block   a contiguous range of work tiles (row tile, document); the grid is persistent, and ranges
//           differ by at most one.
//   warp    kWarpRows query rows x kWarpColumns tokens of each tile.
//   lane    in the product: two columns of every 16 x 8 block. The four lanes of a quad hold the same rows,
//           of which each finishes kLaneRows at a document's end, always the same ones.
//
// Pipeline. An embedding is read in k chunks of 128 bytes. A stage of the ring in shared memory holds one k
// chunk of kColumns tokens, and of the query rows if they are too long to stay resident. cp.async fills the
// ring stages-1 steps ahead, with one __syncthreads a step. Rows of 128 bytes are swizzled (16-byte vector ^
// row % 8), so that ldmatrix is free of bank conflicts. Zeros stand past Ld and d; columns past Ld are
// masked.
//
// Documents. Two documents never share a tile, and long ones may be split over blocks
// (ForwardArgs::num_splits). With a Shared tile short documents do share one: each has columns of one warp,
// whole blocks of eight, and that warp folds and finishes it alone.
//
// Sums. A warp sums rows by shuffles in a fixed order; a query with rows in several warps has a partial of
// each, and reduce_partials adds them in order.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "../../primitives/mma_chunks.cuh"
#include "../listed_pairs.cuh"

namespace late_interaction {

template <int kWarpsM_, int kWarpsN_, int kRowBlocks_, int kColumnBlocks_, int kBlocksPerSm_,
          bool kMaySplit_ = false>
struct MmaTile {
  using Args = ForwardArgs;
  static constexpr bool kListed = false, kShared = false;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kRowBlocks = kRowBlocks_;        // 16 rows each, of one warp
  static constexpr int kColumnBlocks = kColumnBlocks_;  // 8 columns each, of one warp
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  // Large tiles have no registers for documents of different lengths.
  static constexpr bool kPacked = kWarpsM == 1, kMaySplit = kMaySplit_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kWarpRows = 16 * kRowBlocks, kWarpColumns = 8 * kColumnBlocks;
  static constexpr int kRows = kWarpsM * kWarpRows, kColumns = kWarpsN * kWarpColumns;
  static constexpr int kHeld = 2 * kRowBlocks;  // rows whose maxima each lane of a quad holds
  static constexpr int kLaneRows = kHeld / 4;   // of them, rows that one lane finishes

  static __device__ __forceinline__ int slot(int warp_m, int lane, int o) {
    return slot_after_quad<kWarpRows, kLaneRows>(warp_m, lane, o);
  }
};

// A tile that short documents share.
template <class Tile>
struct Shared : Tile {
  static constexpr bool kShared = true, kMaySplit = false, kPacked = false;
};

// The tiles of plan.h, as warps on M, warps on N, 16-row blocks and 8-column blocks of a warp, and blocks a
// multiprocessor, which bound a thread's registers.
//
// Wide     64 rows a warp, so that what ldmatrix reads serves many products.
// Thin     few query rows: warps share a document's tokens instead; registers allow three blocks.
// fp32     fewer columns: operands that are split in two take more registers, and FFMA is so slow that
//          columns behind a document's end cost more than larger tiles save.
template <class Mma>
inline constexpr bool kFullAccuracy = std::is_same_v<Mma, ptx::Mma3xTf32> || std::is_same_v<Mma, ptx::Ffma>;
template <class Mma>
struct Tiles {
  using Wide = MmaTile<4, 2, 4, kFullAccuracy<Mma> ? 4 : 6, 1>;
  using Thin = MmaTile<1, 4, 2, 4, 3, !kFullAccuracy<Mma>>;
};

// Shared memory before the ring: inverse norms of a tile's tokens, addresses of the tile's rows of Q, and the
// maxima that warps side by side exchange at a document's end. One buffer of each is enough, since at least
// one step's __syncthreads lies between readers and the next writers.
template <class Tile>
struct Exchange {
  const void* row[Tile::kRows];
  float inverse_norm[Tile::kColumns];
  float maximum[Tile::kWarpsN][Tile::kRows];
  int32_t token[Tile::kWarpsN][Tile::kRows];
};

// Folds a tile's similarities into the running maxima. Winners cost three instructions an element (compare,
// max, select of an immediate), maxima alone one. kSome: bits of `valid` say which columns of the lane count.
template <class Tile, bool kWinners, bool kSome>
__device__ __forceinline__ void fold_columns(
    const ptx::Accumulator (&acc)[Tile::kRowBlocks][Tile::kColumnBlocks], float (&maximum)[Tile::kHeld],
    int32_t (&token)[Tile::kHeld], int32_t first_token, uint64_t valid) {
#pragma unroll
  for (int h = 0; h < Tile::kHeld; ++h) {
    int32_t found = -1;  // column within the tile: an immediate in the select
#pragma unroll
    for (int n = 0; n < Tile::kColumnBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float value = acc[h / 2][n][(h % 2) * 2 + e];
        if constexpr (kSome) value = (valid >> (n * 8 + e)) & 1 ? value : -INFINITY;
        if constexpr (kWinners) found = value > maximum[h] ? n * 8 + e : found;
        maximum[h] = max_keeping_nan(maximum[h], value);
      }
    }
    if constexpr (kWinners) token[h] = found >= 0 ? first_token + found : token[h];
  }
}

// A bit for each column of a warp.
template <class Tile>
inline constexpr uint64_t kAllColumns = ~uint64_t{0} >> (64 - 8 * Tile::kColumnBlocks);

// The columns of a warp before the end of a document, which has `left` tokens from the first column on.
template <class Tile>
__device__ __forceinline__ uint64_t existing_columns(int32_t left) {
  uint64_t columns = kAllColumns<Tile>;
  if (left < 8 * Tile::kColumnBlocks) columns = (uint64_t{1} << left) - 1;
  return columns;
}

// Folds the columns of a warp, of which `valid` count, from token first_token on.
template <class Tile, bool kWinners>
__device__ __forceinline__ void fold_tile(
    const ptx::Accumulator (&acc)[Tile::kRowBlocks][Tile::kColumnBlocks], float (&maximum)[Tile::kHeld],
    int32_t (&token)[Tile::kHeld], int32_t first_token, uint64_t valid) {
  const int first_column = 2 * (threadIdx.x % 4);  // of the lane
  if (valid == kAllColumns<Tile>) {
    fold_columns<Tile, kWinners, false>(acc, maximum, token, first_token + first_column, valid);
  } else {
    fold_columns<Tile, kWinners, true>(acc, maximum, token, first_token + first_column,
                                       valid >> first_column);
  }
}

// A row tile, and the documents [first_j, end_j) that a block scores it against.
struct Work {
  RowTile tile;
  int32_t first_j, end_j;
  int32_t begun;  // listed pairs: rows of the query in the tiles before
};

// Takes the next row tile from work tiles [work_tile, end).
template <class Tile>
__device__ __forceinline__ Work take_work(const ForwardArgs& p, int64_t& work_tile, int64_t end, int32_t&) {
  const int64_t tile_docs = Tile::kShared ? p.tile_docs : 1, of_row_tile = (p.N + tile_docs - 1) / tile_docs;
  const int32_t first = static_cast<int32_t>(work_tile % of_row_tile);
  const int32_t last = static_cast<int32_t>(min(of_row_tile, first + (end - work_tile)));
  const RowTile tile = row_tile(p, work_tile / of_row_tile, Tile::kRows);
  work_tile += last - first;
  return {tile, static_cast<int32_t>(first * tile_docs), static_cast<int32_t>(min(p.N, last * tile_docs)), 0};
}

// Takes the next tile of a listed pair's rows, of which `begun` are done.
template <class Tile>
__device__ __forceinline__ Work take_work(const PairArgs& p, int64_t& work_tile, int64_t, int32_t& begun) {
  const int32_t j = static_cast<int32_t>(work_tile);
  const Span rows = p.rows[j];
  const Work visited{pair_tile<Tile>(rows, begun), j, j + 1, begun};
  begun += Tile::kRows;
  if (begun >= rows.length) {
    begun = 0;
    ++work_tile;
  }
  return visited;
}

// The document and the token of a column, where documents share a tile: whole ones, those of a warp.
template <class Tile>
struct SharedColumn {
  int32_t document, token;

  __device__ __forceinline__ SharedColumn(const ForwardArgs& p, int column) {
    const int of_warp = column % Tile::kWarpColumns, docs = p.tile_docs / Tile::kWarpsN;
    const int at = of_warp / p.doc_columns;
    document = column / Tile::kWarpColumns * docs + at;
    token = at < docs ? of_warp - at * p.doc_columns : p.Ld;
  }
};

// Copies k chunks of a row tile and of documents [j, end_j) to shared memory, in the order of (document,
// token tile, k chunk). A document without tokens has a tile of zeros.
template <class E, class Tile>
struct Loader {
  const typename Tile::Args& p;
  const RowTile& tile;
  const void* const* rows;  // addresses of the tile's rows
  int q_width, d_width;
  uint32_t ring, stage_bytes;
  int32_t j, end_j, k_chunk = 0;  // next document, end of documents, next k chunk
  int32_t left = 0;               // remaining tokens of document j
  const E* from = nullptr;        // the first of them

  static __device__ __forceinline__ DocRange range(const ForwardArgs& p, int32_t query, int32_t j) {
    if constexpr (Tile::kPacked) return range_of<Tile::kMaySplit>(p, query, j);
    return {0, p.Ld, j, 0};
  }

  __device__ __forceinline__ void load_rows(uint32_t dst, int chunk) const {
    const auto row = [&](int at) { return static_cast<const E*>(rows[at]); };
    if (q_width == 16) {
      return load_k_chunk_in_vectors<E, Tile::kRows, Tile::kThreads>(dst, chunk, p.d,
                                                                     [&](int at, uint32_t& bytes) {
                                                                       if (at >= tile.count) bytes = 0;
                                                                       return row(at);
                                                                     });
    }
    load_k_chunk<E, Tile::kRows, Tile::kThreads>(dst, p.Q, q_width, chunk, p.d, tile.count, [&](int at) {
      return row(at) - static_cast<const E*>(p.Q.data);
    });
  }

  __device__ __forceinline__ void load_tokens(uint32_t dst) const {
    if constexpr (Tile::kShared) {
      return load_k_chunk_in_vectors<E, Tile::kColumns, Tile::kThreads>(
          dst, k_chunk, p.d, [&](int at, uint32_t& bytes) {
            const SharedColumn<Tile> column(p, at);
            const bool exists = column.token < p.Ld && j + column.document < end_j;
            if (!exists) bytes = 0;
            return from + (exists ? column.document * p.D.item_stride + column.token * p.D.token_stride : 0);
          });
    }
    if (d_width == 16) {
      return load_k_chunk_in_vectors<E, Tile::kColumns, Tile::kThreads>(
          dst, k_chunk, p.d, [&](int at, uint32_t& bytes) {
            if (at >= left) bytes = 0;
            return from + (at < left ? at * p.D.token_stride : 0);
          });
    }
    const int64_t offset = from - static_cast<const E*>(p.D.data);
    load_k_chunk<E, Tile::kColumns, Tile::kThreads>(dst, p.D, d_width, k_chunk, p.d, left,
                                                    [&](int at) { return offset + at * p.D.token_stride; });
  }

  // Finds the first tokens of document j.
  __device__ __forceinline__ void enter() {
    if (j >= end_j) return;
    const DocRange tokens = range(p, tile.query, j);
    left = tokens.length;
    from = static_cast<const E*>(p.D.data) +
           (Tile::kPacked ? range_offset(p, tile.query, tokens) : dense_offset(p, tile.query, j));
  }

  __device__ __forceinline__ void load_stage(int stage) {
    if (j < end_j) {
      const uint32_t dst = ring + stage * stage_bytes;
      load_tokens(dst);
      if (p.stream_q) load_rows(dst + Tile::kColumns * kChunkBytes, k_chunk);
      if (++k_chunk == p.k_chunks) {
        k_chunk = 0;
        from += Tile::kColumns * p.D.token_stride;
        if ((left -= Tile::kColumns) <= 0) {
          j += Tile::kShared ? p.tile_docs : 1;
          enter();
        }
      }
    }
    ptx::cp_async_commit();
  }
};

// The squared norms of a tile's tokens: kSharers neighbouring threads share a token.
template <class E, class Tile>
struct TokenSquares {
  static constexpr int kSharers = std::bit_floor(static_cast<unsigned>(Tile::kThreads / Tile::kColumns));
  float sum = 0.0f;

  __device__ __forceinline__ void add(uint32_t d_chunk) {
    const int row = threadIdx.x / kSharers, first_vec = threadIdx.x % kSharers;
    if (row >= Tile::kColumns) return;
#pragma unroll
    for (int vec = first_vec; vec < kVecsPerChunk; vec += kSharers) {
      union {
        uint4 words;
        E element[16 / sizeof(E)];
      } data;
      data.words = ptx::ld_shared_v4_b32(vec_address(d_chunk, row, vec));
#pragma unroll
      for (int k = 0; k < static_cast<int>(16 / sizeof(E)); ++k) {
        const float value = widen(data.element[k]);
        sum = fmaf(value, value, sum);
      }
    }
  }

  // Multiplies the similarities of a warp by the inverse norms of their tokens.
  __device__ __forceinline__ void normalize(ptx::Accumulator (&acc)[Tile::kRowBlocks][Tile::kColumnBlocks],
                                            float (&inverse_norms)[Tile::kColumns], int warp_n) {
#pragma unroll
    for (int partner = 1; partner < kSharers; partner *= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, partner);
    }
    if (threadIdx.x < kSharers * Tile::kColumns) inverse_norms[threadIdx.x / kSharers] = inverse_norm(sum);
    __syncthreads();
    const float* scales = inverse_norms + warp_n * Tile::kWarpColumns + 2 * (threadIdx.x % 32 % 4);
#pragma unroll
    for (int n = 0; n < Tile::kColumnBlocks; ++n) {
      const float2 scale = *reinterpret_cast<const float2*>(scales + n * 8);
#pragma unroll
      for (int i = 0; i < Tile::kRowBlocks; ++i) {
        acc[i][n][0] *= scale.x;
        acc[i][n][1] *= scale.y;
        acc[i][n][2] *= scale.x;
        acc[i][n][3] *= scale.y;
      }
    }
  }
};

// The mask of a warp's columns: loaded before the products, which hide the loads' latency.
template <class Tile>
struct ColumnMask {
  static constexpr int kWords = (Tile::kWarpColumns + 31) / 32;
  uint32_t kept[kWords];

  __device__ __forceinline__ void load(const ForwardArgs& p, const uint8_t* mask, int32_t first_token,
                                       int32_t length) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int32_t at = first_token + w * 32 + threadIdx.x % 32;
      kept[w] = at < length ? mask[at * p.d_mask.token_stride] : 0;
    }
  }
  // Loads the mask of documents that share a tile, from document j on.
  __device__ __forceinline__ void load_shared(const ForwardArgs& p, int32_t query, int32_t j, int32_t end_j,
                                              int warp_n) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int of_warp = w * 32 + threadIdx.x % 32;
      const SharedColumn<Tile> column(p, warp_n * Tile::kWarpColumns + of_warp);
      const bool exists = of_warp < Tile::kWarpColumns && column.token < p.Ld && j + column.document < end_j;
      kept[w] =
          exists ? document_mask(p, query, j + column.document)[column.token * p.d_mask.token_stride] : 0;
    }
  }
  __device__ __forceinline__ uint64_t bits() const {
    uint64_t bits = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      bits |= static_cast<uint64_t>(__ballot_sync(kFullWarp, kept[w] != 0)) << (32 * w);
    }
    return bits;
  }
};

// Warps side by side, which saw other tokens of the same rows, exchange maxima; some warps merge them.
template <class Tile, bool kWinners>
__device__ __forceinline__ void exchange_maxima(Exchange<Tile>& exchange, float (&maximum)[Tile::kHeld],
                                                int32_t (&token)[Tile::kHeld], int warp_m, int warp_n,
                                                bool merges) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    const int slot = Tile::slot(warp_m, lane, o);
    exchange.maximum[warp_n][slot] = maximum[o];
    if constexpr (kWinners) exchange.token[warp_n][slot] = token[o];
  }
  __syncthreads();
  if (!merges) return;
#pragma unroll
  for (int n = 0; n < Tile::kWarpsN; ++n) {
#pragma unroll
    for (int o = 0; o < Tile::kLaneRows; ++o) {
      const int slot = Tile::slot(warp_m, lane, o);
      keep_better<kWinners>(maximum[o], token[o], exchange.maximum[n][slot],
                            kWinners ? exchange.token[n][slot] : 0);
    }
  }
}

// A block's row tile against the documents that it meets.
template <class Mma, class Tile, bool kWinners>
struct Sm80Block {
  using E = typename Mma::Element;
  const typename Tile::Args& p;
  Exchange<Tile>& exchange;
  uint32_t q_base;
  Loader<E, Tile> loader;
  int warp_m, warp_n;
  int stage = 0, free_stage = 0;

  // Fills the ring but for one stage.
  __device__ __forceinline__ void begin() {
    __syncthreads();  // nobody reads the row tile before
    for (int row = threadIdx.x; row < Tile::kRows; row += Tile::kThreads) {
      const bool exists = row < loader.tile.count;
      exchange.row[row] =
          static_cast<const E*>(p.Q.data) + (exists ? row_offset(p, loader.tile.first + row) : 0);
    }
    __syncthreads();
    loader.enter();
    if (!p.stream_q) {
      for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk)
        loader.load_rows(q_base + k_chunk * Tile::kRows * kChunkBytes, k_chunk);
    }
    for (int i = 0; i < p.stages - 1; ++i) loader.load_stage(i);
    free_stage = p.stages - 1;
  }

  using Similarities = ptx::Accumulator[Tile::kRowBlocks][Tile::kColumnBlocks];

  // Multiplies the next token tile of the ring; any: the warp has rows and columns of it.
  __device__ __forceinline__ void multiply_tile(Similarities& acc, bool any) {
    TokenSquares<E, Tile> squares;
    for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk) {
      wait_stage(p.stages);
      __syncthreads();  // all threads' copies to this stage have landed, and nobody reads the stage before
      loader.load_stage(free_stage);
      const uint32_t d_chunk = loader.ring + stage * loader.stage_bytes;
      const uint32_t q_chunk =
          p.stream_q ? d_chunk + Tile::kColumns * kChunkBytes : q_base + k_chunk * Tile::kRows * kChunkBytes;
      if (any) multiply_k_chunk<Mma, Tile>(acc, q_chunk, d_chunk, warp_m, warp_n);
      if (p.normalize) squares.add(d_chunk);
      free_stage = stage;
      if (++stage == p.stages) stage = 0;
    }
    if (p.normalize) squares.normalize(acc, exchange.inverse_norm, warp_n);
  }

  // Multiplies the next token tile of the ring, and folds it.
  __device__ __forceinline__ void take_tile(const uint8_t* mask, int32_t length, int32_t t,
                                            float (&maximum)[Tile::kHeld], int32_t (&token)[Tile::kHeld]) {
    const int32_t first_token = t + warp_n * Tile::kWarpColumns;
    uint64_t valid = existing_columns<Tile>(max(length - first_token, 0));
    ColumnMask<Tile> column_mask;
    if (mask != nullptr) column_mask.load(p, mask, first_token, length);
    Similarities acc = {};
    multiply_tile(acc, valid != 0 && warp_m * Tile::kWarpRows < loader.tile.count);
    if (mask != nullptr) valid &= column_mask.bits();
    fold_tile<Tile, kWinners>(acc, maximum, token, first_token, valid);
  }

  // Scores the documents of a shared tile, from j on.
  __device__ __forceinline__ void take_documents(const Work& work, const LaneRows<Tile>& lane_rows,
                                                 int32_t j) {
    const int docs = p.tile_docs / Tile::kWarpsN;
    const bool masked = p.d_mask.data != nullptr;
    ColumnMask<Tile> column_mask;
    if (masked) column_mask.load_shared(p, work.tile.query, j, work.end_j, warp_n);
    j += warp_n * docs;
    const bool any = j < work.end_j && warp_m * Tile::kWarpRows < loader.tile.count;
    Similarities acc = {};
    multiply_tile(acc, any);
    const uint64_t kept = masked ? column_mask.bits() : kAllColumns<Tile>;
    if (!any) return;
#pragma unroll 1
    for (int32_t first = 0; first < docs * p.doc_columns && j < work.end_j; first += p.doc_columns, ++j) {
      float maximum[Tile::kHeld];
      int32_t token[Tile::kHeld];
      clear_maxima(maximum, token);
      fold_tile<Tile, kWinners>(acc, maximum, token, -first, kept & existing_columns<Tile>(p.Ld) << first);
      reduce_quad<Tile::kHeld, kWinners>(maximum, token);
      finish_document<E, Tile, kWinners>(p, work.tile, lane_rows, warp_m, j, maximum, token);
    }
  }

  __device__ __forceinline__ void take_document(const Work& work, const LaneRows<Tile>& lane_rows,
                                                int32_t j) {
    const DocRange range = Loader<E, Tile>::range(p, work.tile.query, j);
    const uint8_t* mask = range_mask(p, work.tile.query, range);
    const int32_t length = range.length;
    float maximum[Tile::kHeld];
    int32_t token[Tile::kHeld];
    clear_maxima(maximum, token);
    for (int32_t t = 0; t < max(length, 1); t += Tile::kColumns) take_tile(mask, length, t, maximum, token);

    reduce_quad<Tile::kHeld, kWinners>(maximum, token);
    const bool finishes = j % Tile::kWarpsN == warp_n;  // warps take turns
    if constexpr (Tile::kWarpsN > 1) {
      exchange_maxima<Tile, kWinners>(exchange, maximum, token, warp_m, warp_n, finishes);
    }
    if (!finishes) return;
    if constexpr (Tile::kListed) {
      finish_pair<E, Tile, kWinners>(p, work.tile, work.begun, j, maximum, token);
    } else {
      finish_document<E, Tile, kWinners>(p, work.tile, lane_rows, warp_m, j, maximum, token);
    }
  }
};

template <class Mma, class Tile, bool kWinners>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    maxsim_forward_sm80(const __grid_constant__ typename Tile::Args p) {
  constexpr int kLeastStages = 3 * Tile::kColumns * kChunkBytes;
  if constexpr (ptx::is_too_large(sizeof(Exchange<Tile>) + Tile::kRows * kChunkBytes + kLeastStages))
    return __trap();
  if constexpr (ptx::kBeforeSm80 && std::is_same_v<Mma, ptx::Mma3xTf32>) return __trap();  // FFMA is faster
  using E = typename Mma::Element;
  extern __shared__ __align__(128) uint8_t shared[];
  static_assert(sizeof(Exchange<Tile>) % 128 == 0, "chunks are swizzled by address");
  const uint32_t q_base = ptx::smem_address(shared) + sizeof(Exchange<Tile>);
  const uint32_t ring = q_base + (p.stream_q ? 0 : p.k_chunks * Tile::kRows * kChunkBytes);
  const uint32_t stage_bytes = (Tile::kColumns + (p.stream_q ? Tile::kRows : 0)) * kChunkBytes;
  // Warps of the same rows, or of the same columns, are on different quarters of a multiprocessor: if some
  // have no work, every quarter still has some.
  const int warp = threadIdx.x / 32, warp_n = warp / Tile::kWarpsM;
  const int warp_m = (warp + (Tile::kWarpsM > 1 ? 2 * warp_n : 0)) % Tile::kWarpsM;
  const int q_width = copy_width<E>(p.Q, p.q_aligned, p.d), d_width = copy_width<E>(p.D, p.d_aligned, p.d);

  int64_t work_tile = p.work_tiles * blockIdx.x / gridDim.x;
  const int64_t end_work_tile = p.work_tiles * (blockIdx.x + 1) / gridDim.x;
  int32_t begun = 0;
  while (work_tile < end_work_tile) {
    const Work work = take_work<Tile>(p, work_tile, end_work_tile, begun);
    LaneRows<Tile> lane_rows;
    if constexpr (!Tile::kListed) lane_rows.take(p, work.tile, warp_m);
    auto& exchange = *reinterpret_cast<Exchange<Tile>*>(shared);
    Sm80Block<Mma, Tile, kWinners> block{
        p,      exchange,
        q_base, {p, work.tile, exchange.row, q_width, d_width, ring, stage_bytes, work.first_j, work.end_j},
        warp_m, warp_n};
    block.begin();
    if constexpr (Tile::kShared) {
      for (int32_t j = work.first_j; j < work.end_j; j += p.tile_docs)
        block.take_documents(work, lane_rows, j);
    } else {
      for (int32_t j = work.first_j; j < work.end_j; ++j) block.take_document(work, lane_rows, j);
    }
  }
}

}  // namespace late_interaction
