// MaxSim forward on Hopper for few query rows: documents on the M side of wgmma, query rows on its N side.
//
//                        kColumns query rows (up to 128), resident in shared memory
//                      +-----------------------------------------------+
//   128 tokens of a    |  a team's first warpgroup: tokens  0..63      |  -> running max (and winner)
//   document, a stage  |  and its second:           tokens 64..127     |     of each query row,
//                      +-----------------------------------------------+     element by element
//
// One query of 32 tokens wastes no row of the tensor cores this way, and the call is bound by reading D once:
// what counts is the bytes in flight, so the ring takes all the shared memory there is.
//
// Who owns what
//   block      one a multiprocessor, persistent: a contiguous range of (row tile, document).
//   producer   one thread of the last warpgroup, which keeps few registers: TMA loads; Q tiles have
//              two slots, so a new query does not stall the ring.
//   team       two warpgroups that share every stage of their documents. Where registers allow there
//              are two teams, which take documents in turn: one works while the other finishes its
//              document. Each has its own share of the ring, since a barrier's parity tells only
//              neighbouring phases apart.
//   warpgroup  its half of the tokens. A stage is one 128-byte chunk of the embedding; a tile's chunks
//              add up in the accumulators.
//   lane       the running maxima of kColumns / 4 query rows over the tokens it sees. At a document's
//              end lanes with the same rows, then warps, agree; the warps of a team take turns to
//              finish documents.
#pragma once

#include "hopper.cuh"

namespace late_interaction {

template <class Type_, class Element_, int kColumns_>
struct WgmmaDocumentsTile {
  using Type = Type_;
  using Element = Element_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kTokens = 128;
  static constexpr int kTeams = kColumns <= 32 ? 2 : 1;
  static constexpr int kWarps = 8;  // of a team
  static constexpr int kTeamThreads = 32 * kWarps;
  static constexpr int kConsumerThreads = kTeams * kTeamThreads, kThreads = kConsumerThreads + 128;
  // Of a consumer. All warps share what the launch gave the block: 96 registers for 640 threads, or 168 for
  // 384; to ask for more waits until the producer is gone, and it may be waiting for the consumers.
  static constexpr int kRegisters = kTeams == 2 ? 112 : 240;
  static constexpr int kRows = kColumns, kWarpRows = kColumns;  // query rows
  static constexpr int kHeld = kColumns / 4, kOwned = kColumns / 32;
  static constexpr uint32_t kQChunkBytes = kColumns * kChunkRowBytes;
  static constexpr uint32_t kStageBytes = kTokens * kChunkRowBytes;
  static_assert(kQChunkBytes % 1024 == 0, "swizzled rows come in groups of eight");

  static __device__ __forceinline__ int slot(int, int lane, int o) { return 32 * o + lane; }

  struct Exchange {
    float maximum[kTeams][2][kWarps][kColumns];
    int32_t token[kTeams][2][kWarps][kColumns];
  };
};

// Adds the squares of the lane's share of its two tokens: a quarter each, which it splits with its quad.
template <class Element>
__device__ __forceinline__ void add_squares(float (&squares)[2], uint32_t tokens) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      union {
        uint4 words;
        Element element[8];
      } piece;
      const uint32_t from = tokens + row * kChunkRowBytes + (((lane % 4 + 4 * i) ^ (row & 7)) << 4);
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(piece.words.x), "=r"(piece.words.y), "=r"(piece.words.z), "=r"(piece.words.w)
                   : "r"(from));
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float value = widen(piece.element[k]);
        squares[half] = fmaf(value, value, squares[half]);
      }
    }
  }
}

// Folds the lane's two tokens of a tile into the maxima of its query rows.
template <class Tile, bool kWinners>
__device__ __forceinline__ void fold_tokens(const float (&c)[Tile::kColumns / 2],
                                            float (&maximum)[Tile::kHeld], int32_t (&token)[Tile::kHeld],
                                            int32_t first_token, const bool (&valid)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      const float value = c[4 * (h / 2) + 2 * half + h % 2];
      if constexpr (kWinners)
        token[h] = valid[half] && value > maximum[h] ? first_token + 8 * half : token[h];
      if (valid[half]) maximum[h] = max_keeping_nan(maximum[h], value);
    }
  }
}

// Reduces over the eight lanes that hold the same query rows, a butterfly that halves the rows at each step:
// a lane is left with kHeld / 8 rows, in front.
template <class Tile, bool kWinners>
__device__ __forceinline__ void reduce_lanes(float (&maximum)[Tile::kHeld], int32_t (&token)[Tile::kHeld]) {
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int half = Tile::kHeld >> (step + 1), partner = 16 >> step;
    const bool upper = threadIdx.x & partner;
#pragma unroll
    for (int h = 0; h < Tile::kHeld / 2; ++h) {
      if (h >= half) break;
      exchange_halves<kWinners>(maximum[h], token[h], maximum[h + half], token[h + half], upper, partner);
    }
  }
}

template <class Tile, bool kWinners>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_wgmma_documents(const __grid_constant__ ForwardArgs p,
                                   const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t ring = ptx::smem_address(shared);
  const uint32_t q_base = ring + p.stages * Tile::kStageBytes;
  const uint32_t q_bytes = p.chunks * Tile::kQChunkBytes;
  auto& exchange =
      *reinterpret_cast<typename Tile::Exchange*>(shared + p.stages * Tile::kStageBytes + 2 * q_bytes);
  const uint32_t barriers = ptx::smem_address(&exchange) + sizeof(exchange);
  const auto full = [&](int stage) { return barriers + 16 * stage; };
  const auto empty = [&](int stage) { return barriers + 16 * stage + 8; };
  const auto q_full = [&](int slot) { return full(p.stages + slot); };
  const auto q_empty = [&](int slot) { return empty(p.stages + slot); };

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < p.stages + 2; ++stage) {
      ptx::init_barrier(full(stage), 1);
      ptx::init_barrier(empty(stage), stage < p.stages ? Tile::kWarps : Tile::kTeams * Tile::kWarps);
    }
    ptx::publish_barriers();
  }
  __syncthreads();

  UnitRange range = UnitRange::mine(p);
  const int team_stages = p.stages / Tile::kTeams;
  RingPlace q_place;
  int32_t count = 0;  // documents gone by: whose turn it is

  if (threadIdx.x >= Tile::kConsumerThreads) {  // producer
    ptx::give_registers<24>();
    if (threadIdx.x != Tile::kConsumerThreads) return;
    RingPlace place, next_place;  // of the team whose turn it is, and of the other one
    while (range.unit < range.end) {
      const RowTileUnits part = RowTileUnits::take(p, range, Tile::kRows);
      ptx::wait(q_empty(q_place.stage), q_place.parity ^ 1);
      ptx::arrive_expecting(q_full(q_place.stage), q_bytes);
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        ptx::copy_box(q_base + q_place.stage * q_bytes + chunk * Tile::kQChunkBytes, &maps.Q,
                      q_full(q_place.stage), chunk * kChunkDims, first_query_token(p, part.tile),
                      part.tile.query, 0);
      }
      q_place.advance(2);
      for (int32_t j = part.first_j; j < part.end_j; ++j) {
        const int first_stage = count++ % Tile::kTeams * team_stages;
        for (int32_t t = 0; t < p.Ld; t += Tile::kTokens) {
          for (int chunk = 0; chunk < p.chunks; ++chunk) {
            const int stage = first_stage + place.stage;
            ptx::wait(empty(stage), place.parity ^ 1);
            ptx::arrive_expecting(full(stage), Tile::kStageBytes);
            ptx::copy_box(ring + stage * Tile::kStageBytes, &maps.D, full(stage), chunk * kChunkDims, t, j,
                          part.tile.query);
            place.advance(team_stages);
          }
        }
        if constexpr (Tile::kTeams > 1) {
          const RingPlace done = place;
          place = next_place;
          next_place = done;
        }
      }
    }
    return;
  }

  // consumers
  ptx::take_registers<Tile::kRegisters>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % Tile::kWarps,
            team = threadIdx.x / Tile::kTeamThreads;
  const int first_stage = team * team_stages;
  RingPlace place;
  int buffer = 0;
  while (range.unit < range.end) {
    const RowTileUnits part = RowTileUnits::take(p, range, Tile::kRows);
    OwnedRows<Tile> own;
    own.take(p, part.tile, 0);
    ptx::wait(q_full(q_place.stage), q_place.parity);
    const uint32_t q_tile = q_base + q_place.stage * q_bytes;
    for (int32_t j = part.first_j; j < part.end_j; ++j) {
      if (count++ % Tile::kTeams != team) continue;
      const uint8_t* mask = document_mask(p, part.tile.query, j);
      float maximum[Tile::kHeld];
      int32_t token[Tile::kHeld];
#pragma unroll
      for (int h = 0; h < Tile::kHeld; ++h) {
        maximum[h] = -INFINITY;
        token[h] = kSentinel;
      }
      for (int32_t t = 0; t < p.Ld; t += Tile::kTokens) {
        const int32_t first_token = t + 16 * warp + lane / 4;
        bool valid[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t at = first_token + 8 * half;
          valid[half] = at < p.Ld && (mask == nullptr || mask[at * p.d_mask.token_stride] != 0);
        }
        float c[Tile::kColumns / 2], squares[2] = {0.0f, 0.0f};
        for (int chunk = 0; chunk < p.chunks; ++chunk) {
          const int stage = first_stage + place.stage;
          ptx::wait(full(stage), place.parity);
          const uint32_t tokens = ring + stage * Tile::kStageBytes + warp / 4 * 64 * kChunkRowBytes;
          const uint32_t q = q_tile + chunk * Tile::kQChunkBytes;
          ptx::fence_products();
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            ptx::WgmmaShape<Tile::kColumns>::template issue<typename Tile::Type>(
                c, ptx::matrix_of_rows(ptx::matrix_at(tokens + 32 * k)),
                ptx::matrix_of_rows(ptx::matrix_at(q + 32 * k)), chunk > 0 || k > 0);
          }
          ptx::commit_products();
          if (p.normalize) add_squares<typename Tile::Element>(squares, tokens);
          ptx::wait_products<0>();
          __syncwarp();
          if (lane == 0) ptx::arrive(empty(stage));
          place.advance(team_stages);
        }
        if (p.normalize) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            squares[half] += __shfl_xor_sync(kFullWarp, squares[half], 1);
            squares[half] += __shfl_xor_sync(kFullWarp, squares[half], 2);
            squares[half] = inverse_norm(squares[half]);
          }
#pragma unroll
          for (int r = 0; r < Tile::kColumns / 2; ++r) c[r] *= squares[r / 2 % 2];
        }
        fold_tokens<Tile, kWinners>(c, maximum, token, first_token, valid);
      }

      reduce_lanes<Tile, kWinners>(maximum, token);
      // Two buffers: a warp that still reads one document's maxima has not joined the barrier of the next.
      const int first_held = (lane / 16) * (Tile::kHeld / 2) + (lane / 8 % 2) * (Tile::kHeld / 4) +
                             (lane / 4 % 2) * (Tile::kHeld / 8);
#pragma unroll
      for (int h = 0; h < Tile::kHeld / 8; ++h) {
        const int held = first_held + h, column = 8 * (held / 2) + 2 * (lane % 4) + held % 2;
        exchange.maximum[team][buffer][warp][column] = maximum[h];
        if constexpr (kWinners) exchange.token[team][buffer][warp][column] = token[h];
      }
      ptx::sync_some(1 + team, Tile::kTeamThreads);
      if (j / Tile::kTeams % Tile::kWarps == warp) {
        float best[Tile::kOwned];
        int32_t best_token[Tile::kOwned];
#pragma unroll
        for (int o = 0; o < Tile::kOwned; ++o) {
          best[o] = -INFINITY;
          best_token[o] = kSentinel;
#pragma unroll
          for (int w = 0; w < Tile::kWarps; ++w) {
            keep_better<kWinners>(best[o], best_token[o],
                                  exchange.maximum[team][buffer][w][Tile::slot(0, lane, o)],
                                  kWinners ? exchange.token[team][buffer][w][Tile::slot(0, lane, o)] : 0);
          }
        }
        finish_document<typename Tile::Element, Tile, kWinners>(p, part.tile, own, 0, j, best, best_token);
      }
      buffer ^= 1;
    }
    __syncwarp();
    if (lane == 0) ptx::arrive(q_empty(q_place.stage));
    q_place.advance(2);
  }
#endif
}

}  // namespace late_interaction
