// MaxSim of residual-compressed documents on the tensor cores (mma.sync, sm_80 and newer): tokens are
// decompressed in the registers that multiply them.
//
//   64 bytes of a centroid (L2)    its part of the residual        8 * kColumnBlocks query rows (shared)
//   vec 0 | 1 | 2 | 3              bits of vec 0 | 1 | 2 | 3
//      \    |   |   /                   \    |   |   /
//      lanes 0 1 2 3 of a quad   +   one lookup a byte     ->   A: 16 tokens x 2 steps of 32 bytes   * B
//
// mma wants of a lane two words here and two words there of a row; but a dot product does not care about the
// order of its terms, so the lane's words are the 16 bytes that it loads, and B is read in the same order. No
// token passes through shared memory. What the tensor cores see is scaled afterwards: a token's norm comes
// from the products of the tile with itself, whose diagonal is the squares.
//
// Who owns what
//   block   four warps and one document at a time, or a split of a long one; persistent. The first documents
//           are dealt out, the others taken from a counter, so blocks end together.
//   warp    every fourth tile of 16 tokens of the block's document, and its running maxima.
//   lane    tokens lane / 4 and lane / 4 + 8 of a tile, vector lane % 4 of each 64 bytes; in the products two
//           columns of every block of eight.
//
// Pipeline. What bounds the call is the latency and rate of gathering centroids. A step is two or three
// chunks of 64 bytes. A lane decompresses its share of a step, asks at once for that of the next one (of the
// next tile, or of the next document: loads never wait for a document's end), and then multiplies. The codes,
// without which no centroid can be asked for, are one tile further ahead.
//
// Policies, by instance (launch.cuh chooses; plan/plaid.cpp says when)
//
//   query rows   step   kAny    blocks a multiprocessor   why
//   32           2      false   4                         as many as registers allow without spilling: other
//   32           3      false   3                         blocks hide the latency of gathering centroids
//   64           2      false   2                         more query rows for each token that is decompressed
//   32           2      true    4; fp32: 3                any embedding, alignment, winners
//   before sm_90 every instance has two blocks a multiprocessor. The planner counts on these numbers.
//
// A document's end. The warps leave their maxima in shared memory, and take turns to merge, sum and store
// them while the others go on; one __syncthreads a document, and two sets of maxima, keep them apart.
#pragma once

#include <cuda_runtime.h>

#include "../forward/epilogue.cuh"
#include "../primitives/argmax.cuh"
#include "../primitives/ordered_key.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mma.cuh"
#include "codebook_lookup.cuh"

namespace late_interaction {

// kAny: any embedding, any alignment, any number of query rows up to the tile's, and winners. Without it the
// embedding is whole steps, all rows of the tile are multiplied, and there are no winners.
template <class Mma_, class Lookup_, int kColumns_, int kStep_, bool kAny_>
struct ResidualTile {
  using Mma = Mma_;
  using Lookup = Lookup_;
  using Element = typename Mma::Element;
  static constexpr bool kAny = kAny_, kWinners = kAny_;
  static constexpr int kColumns = kColumns_;  // query rows
  static constexpr int kColumnBlocks = kColumns / 8;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kTokens = 16;               // of a warp's tile
  static constexpr int kStep = kStep_;             // chunks that a lane holds
  static constexpr int kHeld = 2 * kColumnBlocks;  // maxima of a lane, shared with seven others
  static constexpr int kLaneRows = kColumns / 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kBlocksPerSm = 2;
#else
  static constexpr int kBlocksPerSm = kColumns > 32 ? 2 : sizeof(Element) == 4 || kStep > 2 ? 3 : 4;
#endif
};

// A document, or a split of one, against a tile of query rows.
struct PlaidWorkTile {
  static constexpr int32_t kWhole = -1, kElsewhere = -2;  // in place of a slot
  CompressedSpan span;
  int32_t tile = -1;  // past the last work tile
  DocumentSplit split{0, 0, kWhole, 1};
};

// For each tile of query rows first the splits of documents, then the documents. One that was
// split is empty there, and finished elsewhere.
__device__ __forceinline__ PlaidWorkTile work_tile_at(const ResidualArgs& p, int32_t splits, int32_t index) {
  PlaidWorkTile work_tile;
  const int32_t each = splits + static_cast<int32_t>(p.documents.N);
  if (index >= each * p.row_tiles) return work_tile;
  work_tile.tile = index / each;
  const int32_t at = index - work_tile.tile * each;
  if (at < splits) {
    work_tile.split = p.split_docs.splits[at];
  } else {
    work_tile.split.document = at - splits;
  }
  work_tile.span = span_of(p.documents, work_tile.split.document);
  if (at < splits) {
    work_tile.span.first += work_tile.split.begin;
    work_tile.span.count = min(p.split_docs.tokens, work_tile.span.count - work_tile.split.begin);
  } else if (splits > 0 && work_tile.span.count > 2 * p.split_docs.tokens) {
    work_tile.span = {};
    work_tile.split.slot = PlaidWorkTile::kElsewhere;
  }
  return work_tile;
}

// Tiles of a document that the warp goes through: one at least, so that all warps come to its end.
template <class Tile>
__device__ __forceinline__ int32_t count_span_tiles(const CompressedSpan& span) {
  const int32_t mine = span.count - static_cast<int32_t>(threadIdx.x / 32) * Tile::kTokens;
  return max(1, (mine + Tile::kWarps * Tile::kTokens - 1) / (Tile::kWarps * Tile::kTokens));
}

inline constexpr int kResidualChunkBytes = 64;

// A row of Q in shared memory has an odd number of chunks, so that two neighbouring rows lie in other banks.
__device__ __forceinline__ int query_row_bytes(int chunks) { return (chunks | 1) * kResidualChunkBytes; }

// Shared memory before the table and the query rows; plan_residual counts on kResidualExchangeBytes for it.
template <class Tile>
struct ResidualExchange {
  alignas(16) float maximum[2][Tile::kWarps][Tile::kColumns];
  int32_t token[Tile::kWinners ? 2 : 1][Tile::kWarps][Tile::kColumns];
  float scale[Tile::kColumns];  // inverse norms of the query rows; 1 without normalize
  PlaidWorkTile work_tiles[4];  // the one in hand, the next one, and the one after that, by turn
  int32_t ticket;               // which is the one after that
  int32_t splits;               // of all documents
};

// The query rows that share a tile: whole queries where some fit, else a partial of one.
struct QueryRows {
  int32_t query, queries;  // the first, and how many
  int32_t first, count;    // rows of each: which part of the query
  int32_t part;

  __device__ __forceinline__ QueryRows(const ResidualArgs& p, int32_t tile, int columns) {
    const int32_t fitting = columns / p.Lq;
    if (fitting > 0) {
      query = tile * fitting;
      queries = min(fitting, p.Nq - query);
      first = part = 0;
      count = p.Lq;
    } else {
      query = tile / p.partials;
      queries = 1;
      part = tile % p.partials;
      first = part * columns;
      count = min(columns, p.Lq - first);
    }
  }
  __device__ __forceinline__ int32_t rows() const { return queries * count; }
};

// The lane's two tokens of a tile: which they are, and where their partials of the next step to load lie.
template <class Tile>
struct TokenPair {
  using Lookup = typename Tile::Lookup;
  const uint8_t* centroid[2];  // the lane's vector of the step's first chunk
  const uint8_t* residual[2];  // the token's row

  // Past the document's end the lane reads its first token again, and does not count it.
  static __device__ __forceinline__ int32_t token(int32_t tile, int i) {
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return (tile * Tile::kWarps + warp) * Tile::kTokens + lane / 4 + 8 * i;
  }
  static __device__ __forceinline__ uint32_t place(const CompressedSpan& span, int32_t tile, int i) {
    const int32_t t = token(tile, i);
    return t < span.count ? t : 0;
  }

  struct Codes {
    int32_t code[2];  // as they come: nobody waits for them before they are used
  };
  static __device__ __forceinline__ Codes codes(const ResidualArgs& p, const CompressedSpan& span,
                                                int32_t tile) {
    const int32_t* codes = p.documents.codes + span.first;
    return {__ldcs(codes + place(span, tile, 0)), __ldcs(codes + place(span, tile, 1))};
  }

  __device__ __forceinline__ void point_at(const ResidualArgs& p, const CompressedSpan& span, int32_t tile,
                                           const Codes& codes) {
    const CompressedDocuments& c = p.documents;
    const auto* centroids = static_cast<const uint8_t*>(c.centroids) + threadIdx.x % 4 * 16;
    const uint8_t* document = c.residuals + span.first * c.residual_row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      centroid[i] = centroids + uint64_t{known_centroid(c, codes.code[i])} * c.centroid_row;
      residual[i] = document + uint64_t{place(span, tile, i)} * c.residual_row;
    }
  }
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int i = 0; i < 2; ++i) centroid[i] += Tile::kStep * kResidualChunkBytes;
  }
};

// A step as it comes from memory: the lane's vector of each chunk, of both tokens.
template <class Tile>
struct StepVecs {
  using Lookup = typename Tile::Lookup;
  uint4 centroid[Tile::kStep][2];
  typename Lookup::Codes residual[Tile::kStep][2];

  static __device__ __forceinline__ bool exists(const ResidualArgs& p, int32_t chunk) {
    return !Tile::kAny || chunk < p.chunks;
  }

  __device__ __forceinline__ void load_whole(const ResidualArgs& p, const TokenPair<Tile>& at,
                                             int32_t first) {
    const int32_t lane = (4 * first + threadIdx.x % 4) * Lookup::kVecBytes;
#pragma unroll
    for (int c = 0; c < Tile::kStep; ++c) {
      if (!exists(p, first + c)) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) residual[c][i] = Lookup::load_whole(at.residual[i] + lane, 4 * c);
    }
  }
  __device__ __forceinline__ void load_any(const ResidualArgs& p, const TokenPair<Tile>& at, int32_t first) {
#pragma unroll
    for (int c = 0; c < Tile::kStep; ++c) {
      if (!exists(p, first + c)) break;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        residual[c][i] = Lookup::load_any(p, at.residual[i], 4 * (first + c) + threadIdx.x % 4);
    }
  }
  __device__ __forceinline__ void load(const ResidualArgs& p, const TokenPair<Tile>& at, int32_t first) {
#pragma unroll
    for (int c = 0; c < Tile::kStep; ++c) {
      if (!exists(p, first + c)) break;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        centroid[c][i] = ptx::ld_global_no_allocate(at.centroid[i] + c * kResidualChunkBytes);
    }
    if constexpr (!Tile::kAny) {
      load_whole(p, at, first);
    } else if constexpr (Lookup::kByBytes) {
      if (p.whole) {
        load_whole(p, at, first);
      } else {
        load_any(p, at, first);
      }
    } else {
      load_any(p, at, first);
    }
  }

  // What mma takes of the chunk: the words of both tokens.
  __device__ __forceinline__ void decompress(const ResidualArgs& p, const Lookup& lookup, int c,
                                             int32_t chunk, uint32_t (&x)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[i][0] = centroid[c][i].x;
      x[i][1] = centroid[c][i].y;
      x[i][2] = centroid[c][i].z;
      x[i][3] = centroid[c][i].w;
      lookup.add(p, x[i], residual[c][i]);
    }
    if (Tile::kAny && 4 * (chunk + 1) * Lookup::kVecDims > p.d) {  // buckets past d mean nothing
      const int32_t left = p.d - (4 * chunk + static_cast<int32_t>(threadIdx.x % 4)) * Lookup::kVecDims;
#pragma unroll
      for (int i = 0; i < 2; ++i) Lookup::cut(x[i], left);
    }
  }
};

// The products of a tile: with the query rows, and with itself.
template <class Tile>
struct TileProducts {
  using Mma = typename Tile::Mma;
  ptx::Accumulator scores[Tile::kColumnBlocks] = {};
  ptx::Accumulator squares[2] = {};  // with tokens 0..7, and 8..15, of itself

  // queries: the lane's vector of the chunk in the first row that it reads.
  __device__ __forceinline__ void add(const ResidualArgs& p, const uint32_t (&x)[2][4], uint32_t queries,
                                      int row_bytes) {
    const uint32_t w0[4] = {x[0][0], x[1][0], x[0][1], x[1][1]};
    const uint32_t w1[4] = {x[0][2], x[1][2], x[0][3], x[1][3]};
    const auto first = Mma::operand_a(w0), second = Mma::operand_a(w1);
    Mma::multiply(squares[0], first, Mma::operand_b(w0[0], w0[2]));
    Mma::multiply(squares[1], first, Mma::operand_b(w0[1], w0[3]));
    Mma::multiply(squares[0], second, Mma::operand_b(w1[0], w1[2]));
    Mma::multiply(squares[1], second, Mma::operand_b(w1[1], w1[3]));
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      if (Tile::kAny && block >= p.column_blocks) break;
      const uint4 q = ptx::ld_shared_v4_b32(queries + 8 * block * row_bytes);
      Mma::multiply(scores[block], first, Mma::operand_b(q.x, q.y));
      Mma::multiply(scores[block], second, Mma::operand_b(q.z, q.w));
    }
  }

  // 1 / max(norm, 1e-12) of the lane's token i. Square (g, g) is with the g / 2-nd lane of quad g.
  __device__ __forceinline__ float inverse_norm_of(int i) const {
    const int lane = threadIdx.x % 32, g = lane / 4;
    const float mine = g % 2 == 0 ? squares[i][2 * i] : squares[i][2 * i + 1];
    const float square = __shfl_sync(kFullWarp, mine, 4 * g + g / 2);
    return square <= 1e-24f ? 1e12f : rsqrtf(square);
  }
};

// PyTorch's order of maxima, for no row is computed again.
template <bool kWinners>
struct KeepFirst {
  static __device__ __forceinline__ void keep(float& m, int32_t& token, float other, int32_t other_token) {
    if constexpr (kWinners) token = beats(other, other_token, m, token) ? other_token : token;
    m = max_keeping_nan(m, other);
  }
};

// The lane's running maxima of a document: of columns 8 * block + 2 * (lane % 4) + e, over the tokens it
// sees.
template <class Tile>
struct ColumnMaxima {
  static constexpr bool kWinners = Tile::kWinners;
  float value[Tile::kHeld];
  int32_t token[Tile::kHeld];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& v : value) v = -INFINITY;
#pragma unroll
    for (int32_t& t : token) t = kSentinel;
  }
  __device__ __forceinline__ void fold(const ResidualArgs& p, const TileProducts<Tile>& products,
                                       int32_t tile, int32_t count) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t t = TokenPair<Tile>::token(tile, i);
      const float inverse = p.normalize ? products.inverse_norm_of(i) : 1.0f;
#pragma unroll
      for (int block = 0; block < Tile::kColumnBlocks; ++block) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int h = 2 * block + e;
          const float x = products.scores[block][2 * i + e] * inverse;
          KeepFirst<kWinners>::keep(value[h], token[h], t < count ? x : -INFINITY, t < count ? t : kSentinel);
        }
      }
    }
  }

  // Over the eight lanes that hold the same columns; a lane is left with kLaneRows of them.
  __device__ __forceinline__ void merge_lanes() {
    reduce_halving<16, 3, Tile::kHeld, kWinners, KeepFirst<kWinners>>(value, token);
  }
};

// The query rows of a tile, in the order of B, zeros where there are none; and the scale of each row's
// maxima.
template <class Tile>
__device__ __forceinline__ void load_queries(const ResidualArgs& p, const QueryRows& rows,
                                             ResidualExchange<Tile>& exchange, uint8_t* to) {
  using E = typename Tile::Element;
  const int row_elements = query_row_bytes(p.chunks) / static_cast<int>(sizeof(E));
  E* q = reinterpret_cast<E*>(to);
#pragma unroll 1
  for (int i = threadIdx.x; i < 8 * p.column_blocks * row_elements; i += Tile::kThreads) {
    const int column = i / row_elements, k = i % row_elements;
    E x = narrow<E>(0.0f);
    if (column < rows.rows() && k < p.d) {
      const int32_t query = rows.query + column / rows.count, s = rows.first + column % rows.count;
      x = static_cast<const E*>(
          p.Q.data)[query * p.Q.item_stride + s * p.Q.token_stride + k * p.Q.dim_stride];
    }
    q[i] = x;
  }
  __syncthreads();
  for (int column = threadIdx.x / 4; column < 8 * p.column_blocks; column += Tile::kThreads / 4) {
    float squares = 0.0f;
#pragma unroll 1
    for (int k = threadIdx.x % 4; k < p.d; k += 4) {
      const float x = widen(q[column * row_elements + k]);
      squares = fmaf(x, x, squares);
    }
    squares += __shfl_xor_sync(kFullWarp, squares, 1);
    squares += __shfl_xor_sync(kFullWarp, squares, 2);
    if (threadIdx.x % 4 == 0) exchange.scale[column] = p.normalize ? inverse_norm(squares) : 1.0f;
  }
}

// A maximum and its token as an integer that is the larger, the better they are (SplitDocuments).
__device__ __forceinline__ unsigned long long as_integer(float value, int32_t token) {
  const unsigned long long ordered = OrderedKey<float>::of(value);
  return ordered << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ float value_in(unsigned long long integer) {
  return OrderedKey<float>::number(static_cast<uint32_t>(integer >> 32));
}
__device__ __forceinline__ int32_t token_in(unsigned long long integer) {
  return static_cast<int32_t>(~static_cast<uint32_t>(integer));
}

// Leaves the maxima of a split with those of its document, whose are known if it was the last. By one warp.
template <class Tile>
__device__ __forceinline__ bool combine_split(const ResidualArgs& p, const PlaidWorkTile& work_tile,
                                              float (&best)[Tile::kLaneRows],
                                              int32_t (&token)[Tile::kLaneRows]) {
  const int lane = threadIdx.x % 32, columns = 8 * p.column_blocks;
  const int64_t place = int64_t{work_tile.split.slot} * p.row_tiles + work_tile.tile;
  unsigned long long* maxima = p.split_docs.maxima + place * columns;
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    if (32 * o + lane >= columns) continue;
    const int32_t of_document = token[o] == kSentinel ? kSentinel : token[o] + work_tile.split.begin;
    atomicMax(maxima + 32 * o + lane, as_integer(best[o], of_document));
  }
  __threadfence();
  __syncwarp();
  int32_t before = 0;
  if (lane == 0) before = atomicAdd(p.split_docs.arrivals + place, 1);
  if (__shfl_sync(kFullWarp, before, 0) + 1 < work_tile.split.splits) return false;
  __threadfence();
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    if (32 * o + lane >= columns) continue;
    const unsigned long long integer = __ldcg(maxima + 32 * o + lane);
    best[o] = value_in(integer);
    token[o] = token_in(integer);
  }
  return true;
}

// What the warps found, merged; winners and each query's sum to memory. By one warp.
template <class Tile>
__device__ __forceinline__ void finish_residual_document(const ResidualArgs& p,
                                                         const PlaidWorkTile& work_tile,
                                                         const ResidualExchange<Tile>& exchange, int set) {
  if (work_tile.split.slot == PlaidWorkTile::kElsewhere) return;
  const int lane = threadIdx.x % 32;
  float value[Tile::kLaneRows];
  int32_t token[Tile::kLaneRows];
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    const int column = 32 * o + lane;
    value[o] = -INFINITY;
    token[o] = kSentinel;
    if (column >= 8 * p.column_blocks) continue;
#pragma unroll
    for (int warp = 0; warp < Tile::kWarps; ++warp) {
      KeepFirst<Tile::kWinners>::keep(value[o], token[o], exchange.maximum[set][warp][column],
                                      Tile::kWinners ? exchange.token[set][warp][column] : 0);
    }
  }
  if (work_tile.split.slot >= 0 && !combine_split<Tile>(p, work_tile, value, token)) return;

  const QueryRows rows(p, work_tile.tile, 8 * p.column_blocks);
  const int64_t N = p.documents.N, j = work_tile.split.document;
  int32_t query[Tile::kLaneRows];
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    const int column = 32 * o + lane;
    query[o] = column < rows.rows() ? rows.query + column / rows.count : -1;
    if (query[o] >= 0 && Tile::kWinners && p.winners != nullptr) {
      const int32_t s = rows.first + column % rows.count;
      store_winner(p.winners, p.wide_winners, (query[o] * N + j) * p.Lq + s, token[o]);
    }
    value[o] = query[o] >= 0 && work_tile.span.count > 0 ? value[o] * exchange.scale[column] : 0.0f;
  }
  for (int32_t i = rows.query; i < rows.query + rows.queries; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (int o = 0; o < Tile::kLaneRows; ++o) sum += query[o] == i ? value[o] : 0.0f;
    sum = warp_sum(sum);
    if (lane == 0) static_cast<float*>(p.scores)[(int64_t{i} * p.partials + rows.part) * N + j] = sum;
  }
}

// Scheduler: the first two work tiles of the block, and the ticket of its third. By two threads.
template <class Tile>
__device__ __forceinline__ void start_work(const ResidualArgs& p, ResidualExchange<Tile>& exchange) {
  const int32_t stride = gridDim.x;
  if (threadIdx.x < 2) {
    int32_t splits = p.split_docs.tokens > 0 ? *p.split_docs.counts : 0;
    if (splits > p.split_docs.most) splits = 0;
    exchange.work_tiles[threadIdx.x] = work_tile_at(p, splits, blockIdx.x + threadIdx.x * stride);
    if (threadIdx.x == 0) {
      exchange.ticket = blockIdx.x + 2 * stride;
      exchange.splits = splits;
    }
  }
}

// Scheduler: the document after the next, whose ticket came while the last one was in hand. By a thread of
// the warp that has the fewest tiles.
template <class Tile>
__device__ __forceinline__ void take_work_tile(const ResidualArgs& p, ResidualExchange<Tile>& exchange,
                                               int turn) {
  if (threadIdx.x == Tile::kThreads - 32) {
    exchange.work_tiles[(turn + 2) % 4] = work_tile_at(p, exchange.splits, exchange.ticket);
    exchange.ticket = 3 * static_cast<int32_t>(gridDim.x) + atomicAdd(p.tickets, 1);
  }
}

// Producer: the codes that are asked for while a tile is multiplied, those of the tile after the next one.
template <class Tile>
__device__ __forceinline__ typename TokenPair<Tile>::Codes codes_ahead(const ResidualArgs& p,
                                                                       const CompressedSpan& document,
                                                                       const CompressedSpan& next,
                                                                       int32_t tile, int32_t tiles) {
  using Pair = TokenPair<Tile>;
  typename Pair::Codes codes{};
  if (tile + 2 < tiles) {
    codes = Pair::codes(p, document, tile + 2);
  } else if (tile + 1 != tiles) {
    codes = Pair::codes(p, next, 0);
  } else if (count_span_tiles<Tile>(next) > 1) {
    codes = Pair::codes(p, next, 1);
  }
  return codes;
}

// Where a lane reads the query rows, and how far apart they lie.
struct LaneQueries {
  uint32_t address;
  int row_bytes;
};

// Consumer: the products of a tile, whose first step is in `vecs`. point_at_next: moves `pair` to the next
// tile.
template <class Tile, class F>
__device__ __forceinline__ void multiply_residual_tile(const ResidualArgs& p,
                                                       const typename Tile::Lookup& lookup,
                                                       const LaneQueries& queries, TokenPair<Tile>& pair,
                                                       StepVecs<Tile>& vecs, TileProducts<Tile>& products,
                                                       const F& point_at_next) {
#pragma unroll 1
  for (int32_t first = 0; first < p.chunks; first += Tile::kStep) {
    uint32_t x[Tile::kStep][2][4];
#pragma unroll
    for (int c = 0; c < Tile::kStep; ++c) {
      if (!StepVecs<Tile>::exists(p, first + c)) break;
      vecs.decompress(p, lookup, c, first + c, x[c]);
    }
    const bool more = first + Tile::kStep < p.chunks;
    if (more) {
      pair.advance();
    } else {
      point_at_next();
    }
    vecs.load(p, pair, more ? first + Tile::kStep : 0);
    __syncwarp();  // a fence for the compiler, which would move the loads down to their use
#pragma unroll
    for (int c = 0; c < Tile::kStep; ++c) {
      if (!StepVecs<Tile>::exists(p, first + c)) break;
      products.add(p, x[c], queries.address + (first + c) * kResidualChunkBytes, queries.row_bytes);
      __syncwarp();  // and would mix the chunks, which takes more registers
    }
  }
}

// Epilogue: what the warp found, for the warp that finishes the document.
template <class Tile>
__device__ __forceinline__ void store_warp_maxima(ColumnMaxima<Tile>& maxima,
                                                  ResidualExchange<Tile>& exchange, int set) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  maxima.merge_lanes();
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    const int column = slot_after_halving<Tile::kLaneRows>(lane, o);
    exchange.maximum[set][warp][column] = maxima.value[o];
    if constexpr (Tile::kWinners) exchange.token[set][warp][column] = maxima.token[o];
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    maxsim_residual_tile(const __grid_constant__ ResidualArgs p) {
  using Pair = TokenPair<Tile>;
  extern __shared__ __align__(16) uint8_t shared[];
  auto& exchange = *reinterpret_cast<ResidualExchange<Tile>*>(shared);
  const uint32_t table = ptx::smem_address(shared) + sizeof(exchange);
  uint8_t* const query_rows = shared + sizeof(exchange) + Tile::Lookup::kTableBytes;
  const int row_bytes = query_row_bytes(p.chunks);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const LaneQueries queries{ptx::smem_address(query_rows) + lane / 4 * row_bytes + lane % 4 * 16, row_bytes};

  start_work(p, exchange);
  __syncthreads();
  const auto span = [&](int turn) -> const CompressedSpan& { return exchange.work_tiles[turn % 4].span; };
  int32_t tiles = count_span_tiles<Tile>(span(0));
  Pair pair;
  pair.point_at(p, span(0), 0, Pair::codes(p, span(0), 0));
  StepVecs<Tile> vecs;
  vecs.load(p, pair, 0);
  typename Pair::Codes codes = tiles > 1 ? Pair::codes(p, span(0), 1) : Pair::codes(p, span(1), 0);

  Tile::Lookup::fill(p, table);
  const typename Tile::Lookup lookup(table, p);
  __syncthreads();
  int32_t query_tile = -1;

#pragma unroll 1
  for (int turn = 0; exchange.work_tiles[turn].tile >= 0; turn = (turn + 1) % Tile::kWarps) {
    const int set = turn % 2;  // of maxima
    if (exchange.work_tiles[turn].tile != query_tile) {
      query_tile = exchange.work_tiles[turn].tile;
      __syncthreads();  // nobody reads the rows before any more
      load_queries<Tile>(p, QueryRows(p, query_tile, 8 * p.column_blocks), exchange, query_rows);
      __syncthreads();
    }
    take_work_tile(p, exchange, turn);

    const CompressedSpan &document = span(turn), &next = span(turn + 1);
    ColumnMaxima<Tile> maxima;
    maxima.clear();
#pragma unroll 1
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const bool last = tile + 1 == tiles;
      const auto later_codes = codes_ahead<Tile>(p, document, next, tile, tiles);
      TileProducts<Tile> products;
      multiply_residual_tile(p, lookup, queries, pair, vecs, products, [&] {
        if (last) {
          pair.point_at(p, next, 0, codes);
        } else {
          pair.point_at(p, document, tile + 1, codes);
        }
      });
      maxima.fold(p, products, tile, document.count);
      codes = later_codes;
    }

    store_warp_maxima(maxima, exchange, set);
    __syncthreads();
    if (warp == turn) finish_residual_document<Tile>(p, exchange.work_tiles[turn], exchange, set);
    tiles = count_span_tiles<Tile>(next);
    if (tiles == 1) codes = Pair::codes(p, span(turn + 2), 0);  // which was not known before
  }
}

}  // namespace late_interaction
