// MaxSim forward by mma.sync (sm_80 and newer) of packed documents of codes, for up to 32 query rows: a
// stream of memory.
//
//     documents of warp w  ==cp.async==>  ring of warp w, 32 tokens a stage  -->  32 query rows, in registers
//
// Such a call takes as long as the reads of its documents, if nobody waits for anybody. So a warp has a run
// of documents and a ring of its own, and its tiles are 32 tokens that lie behind each other, of whichever
// documents (pipeline/token_stream.cuh): ragged documents take as long as equal ones.
//
// Who owns what
//   warp   a run of documents with an equal share of the tokens
//   lane   tokens lane / 4 and lane / 4 + 8 of 16, and query rows 2q and 2q + 1 of every 8, q = lane % 4,
//          as in sm80_d, whose operands and epilogue these are
#pragma once

#include "../../pipeline/token_stream.cuh"
#include "../sm80_d/kernel.cuh"

namespace late_interaction {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kIsSm90 = true;
#else
inline constexpr bool kIsSm90 = false;
#endif

template <class Mma_>
struct CodeStreamTile {
  using Mma = Mma_;
  using Element = typename Mma::Element;
  static constexpr bool kPacked = true;
  static constexpr int kSteps = 4, kStages = kCodeStreamStages;
  static constexpr int kWarps = kSm80DWarps, kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = code_stream_blocks(std::is_same_v<Element, int8_t>, kIsSm90);
  static constexpr int kColumnBlocks = 4, kRows = 8 * kColumnBlocks, kWarpRows = kRows;
  static constexpr int kHeld = 2 * kColumnBlocks, kLaneRows = kHeld / 8;
  static constexpr int kVecs = 2 * kSteps, kVecElements = 16;
  static constexpr int kPitch = mma_pitch(kSteps), kScales = kStreamTokens * kPitch;
  static_assert(kCodeStreamStageBytes == kScales + 4 * kStreamTokens);

  static __device__ __forceinline__ int slot(int, int lane, int o) {
    return slot_after_halving<kLaneRows>(lane, o);
  }
};

// The documents of token_stream.cuh.
struct PackedDocuments {
  const ForwardArgs& p;

  __device__ __forceinline__ int64_t count() const { return p.N; }
  __device__ __forceinline__ int64_t tokens() const { return p.Ld; }
  __device__ __forceinline__ int64_t begin(int64_t j) const { return j < p.N ? p.spans[j].first : p.Ld; }
  __device__ __forceinline__ TokenRange range(int64_t j) const {
    const Span span = p.spans[j];
    return {span.first, span.length};
  }
};
using PackedRun = WarpDocuments<PackedDocuments>;

// Producer: copies tiles, and the scales of their tokens. Of tokens past the last one nothing is copied; no
// document has them.
template <class Tile>
struct CodeStreamProducer {
  static constexpr int kAtOnce = 32 / Tile::kVecs;  // tokens of an instruction
  const ForwardArgs& p;
  const uint8_t* codes;   // the lane's vector of the first token that it copies, from the warp's base on
  const uint8_t* scales;  // of the lane's token
  uint32_t codes_to, scale_to;  // in a stage
  int32_t last_token;           // that may be read

  __device__ __forceinline__ CodeStreamProducer(const ForwardArgs& args, const PackedRun& mine) : p(args) {
    const uint32_t lane = threadIdx.x % 32;
    codes = kept(static_cast<const uint8_t*>(p.D.data) + (mine.base + lane / Tile::kVecs) * p.D.token_stride +
                 lane % Tile::kVecs * 16);
    scales = kept(
        reinterpret_cast<const uint8_t*>(p.d_scales.data + (mine.base + lane) * p.d_scales.token_stride));
    codes_to = lane / Tile::kVecs * Tile::kPitch + lane % Tile::kVecs * 16;
    scale_to = Tile::kScales + 4 * lane;
    last_token = mine.last_token;
  }

  // to: the stage.
  __device__ __forceinline__ void copy(int32_t first, uint32_t to) const {
    const int32_t lane = threadIdx.x % 32, token = first + lane / Tile::kVecs;
    const bool whole = first + kStreamTokens - 1 <= last_token;
    const uint8_t* from = codes + first * p.D.token_stride;
#pragma unroll
    for (int i = 0; i < kStreamTokens / kAtOnce; ++i, from += kAtOnce * p.D.token_stride) {
      ptx::cp_async_16_if(whole || token + kAtOnce * i <= last_token,
                          to + codes_to + kAtOnce * i * Tile::kPitch, from, 16);
    }
    if (p.d_scales.data != nullptr && first + lane <= last_token) {
      ptx::cp_async_narrow<4>(to + scale_to, scales + 4 * p.d_scales.token_stride * first, 4);
    }
  }
};

// The running maxima of a document.
template <class Tile>
struct CodeMaxima {
  float best[Tile::kHeld];

  __device__ __forceinline__ CodeMaxima() { clear(); }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& x : best) x = -INFINITY;
  }
  // Similarities of the lane's token 8 i of 16, times the token's scale.
  __device__ __forceinline__ void fold(const ptx::Accumulator (&sums)[Tile::kColumnBlocks], int i) {
#pragma unroll
    for (int n = 0; n < Tile::kColumnBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) best[2 * n + e] = max_keeping_nan(best[2 * n + e], sums[n][2 * i + e]);
    }
  }
  __device__ __forceinline__ void finish(const ForwardArgs& p, const LaneRows<Tile>& rows, int64_t j) {
    int32_t token[Tile::kHeld];
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      best[h] *= Tile::Mma::kScale;
      token[h] = kSentinel;
    }
    reduce_halving<16, 3, Tile::kHeld, false>(best, token);
    const RowTile tile = row_tile(p, 0, Tile::kRows);
    finish_document<typename Tile::Element, Tile, false>(p, tile, rows, 0, static_cast<int32_t>(j), best,
                                                         token);
    clear();
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    maxsim_forward_sm80_stream(const __grid_constant__ ForwardArgs p) {
  if constexpr (ptx::is_too_large(Tile::kWarps * Tile::kStages * kCodeStreamStageBytes)) return __trap();
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const PackedRun mine({p}, Tile::kWarps);
  const RowTile tile = row_tile(p, 0, Tile::kRows);
  LaneRows<Tile> rows;
  rows.take(p, tile, 0);
  QueryColumns<Tile> q;
  q.load(p, tile);

  const uint32_t ring = kept(ptx::smem_address(shared) + warp * Tile::kStages * kCodeStreamStageBytes);
  if (p.d_scales.data == nullptr) {
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::st_shared(ring + i * kCodeStreamStageBytes + Tile::kScales + 4 * lane, __float_as_uint(1.0f));
    }
  }
  TileWalk ahead(mine);
  const CodeStreamProducer<Tile> producer(p, mine);
  const auto produce = [&](uint32_t stage) {
    if (ahead.exists()) producer.copy(ahead.first, stage);
    ptx::cp_async_commit();
    ahead.next(mine);
  };
#pragma unroll 1
  for (int i = 0; i < Tile::kStages; ++i) produce(ring + i * kCodeStreamStageBytes);

  CodeMaxima<Tile> maxima;
  DocumentWalk at;
  at.next(mine);
  int32_t first = TileWalk::first_tile(at);
  const uint32_t row = lane % 16 * Tile::kPitch + lane / 16 * 16;
  const uint32_t scales = Tile::kScales + lane / 4 * 4;
  uint32_t stage = ring;
#pragma unroll 1
  while (at.exists()) {
    ptx::cp_async_wait<Tile::kStages - 1>();
    __syncwarp();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      float scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale[i] = usable_scale(__uint_as_float(ptx::ld_shared(stage + scales + 64 * half + 32 * i)));
      }
      ptx::Accumulator x[Tile::kColumnBlocks];
      multiply_tokens<Tile>(q, stage + row + 16 * half * Tile::kPitch, x);
      scale_tokens(x, scale);
      const int32_t begin = first + 16 * half, token = begin + lane / 4;
      fold_documents(
          mine, at, begin,
          [&](int32_t from, int32_t to) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (token + 8 * i >= from && token + 8 * i < to) maxima.fold(x, i);
            }
          },
          [&] { maxima.finish(p, rows, mine.first + at.index); });
    }
    __syncwarp();
    produce(stage);
    first = TileWalk::next_tile(first, at);
    stage =
        stage == ring + (Tile::kStages - 1) * kCodeStreamStageBytes ? ring : stage + kCodeStreamStageBytes;
  }
}

}  // namespace late_interaction
