// What the two forwards at fp32 accuracy share: a consumer whose sums take registers of their own, so that it
// has one block of 64 query rows, in two sets of registers: a chunk's products, and their rounded sum.
#pragma once

#include "kernel.cuh"

namespace late_interaction {

// After the reduction over a quad its upper two lanes have the row eight below; the odd ones only repeat what
// the even ones have.
template <int kConsumers_>
struct RowsOf64 {
  static constexpr int kConsumers = kConsumers_;  // warpgroups
  static constexpr int kRows = 64 * kConsumers, kWarpRows = 16;
  static constexpr int kHeld = 2, kLaneRows = 1;

  static __device__ __forceinline__ int slot(int warp, int lane, int) {
    return lane % 2 == 0 ? warp * kWarpRows + lane % 4 * 4 + lane / 4 : kRows;
  }
};

// Self::take_k_chunk(sum, chunk, meanwhile) adds the products of a chunk, and calls `meanwhile` under the
// first of them.
template <class Tile, class Self>
struct PromotingConsumer {
  static constexpr int kAccumulators = Tile::kColumns / 2;
  static constexpr int kStartBarrier = 1;  // of warpgroup 1
  const ForwardArgs& p;
  const LongDShared<Tile>& at;
  int me;      // which of the consumers
  bool leads;  // the other one waits for this one's first products
  PipelineState place, token_scale_state;
  RowBest<Tile::kWinners> best[Tile::kHeld];

  __device__ __forceinline__ PromotingConsumer(const ForwardArgs& args, const LongDShared<Tile>& shared,
                                               int warpgroup)
      : p(args), at(shared), me(warpgroup), leads(warpgroup == 0) {}

  // The first products are done: the other consumer may begin.
  __device__ __forceinline__ void let_follow() {
    if (!leads) return;
    leads = false;
    ptx::named_barrier_arrive(kStartBarrier, 256);
  }

  // A document is finished under the wgmma of the next one's first chunk.
  __device__ __forceinline__ void take_tile(uint32_t now, int32_t t) {
    Self& self = static_cast<Self&>(*this);
    float sum[kAccumulators];
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) sum[i] = 0.0f;
    self.take_k_chunk(sum, 0, [&] {
      if (t == 0 && now != at.scheduler.first()) finish(at.scheduler(p, now - at.scheduler.step()));
    });
    for (int k_chunk = 1; k_chunk < p.k_chunks; ++k_chunk) self.take_k_chunk(sum, k_chunk, [] {});
    const float first_token = static_cast<float>(long_d_tile_begin<Tile>(p, t) + 2 * (threadIdx.x % 4));
    uint32_t token_scales;
    const uint32_t kind = take_token_scales<Tile>(at, token_scale_state, p.zeros[0], token_scales);
    fold_tile<Tile>(sum, best, first_token, p.zeros, token_scales, kind);
    return_token_scales<Tile>(at, token_scale_state);
  }

  // The quad's two rows: one to each pair of its lanes.
  __device__ __forceinline__ Maximum reduce() {
    float maximum[Tile::kHeld];
    int32_t token[Tile::kHeld];
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      maximum[h] = best[h].value;
      token[h] = best[h].token();
      best[h].clear();
    }
    exchange_halves<Tile::kWinners>(maximum[0], token[0], maximum[1], token[1], threadIdx.x & 2, 2);
    const float other = __shfl_xor_sync(kFullWarp, maximum[0], 1);
    const int32_t other_token = Tile::kWinners ? __shfl_xor_sync(kFullWarp, token[0], 1) : 0;
    keep_better<Tile::kWinners>(maximum[0], token[0], other, other_token);
    return {maximum[0], token[0]};
  }

  __device__ __forceinline__ void finish(const LongDWorkTile& work_tile) {
    const Maximum mine = reduce();
    if (!work_tile.counts) return;
    const RowTile tile = row_tile(p, work_tile.tile, Tile::kRows);
    LaneRows<Tile> own;
    own.take(p, tile, threadIdx.x / 32);
    finish_document<typename Tile::Element, Tile, Tile::kWinners>(p, tile, own, threadIdx.x / 32, work_tile.j,
                                                                  &mine.value, &mine.token);
  }

  __device__ __forceinline__ void run() {
    if (!leads) ptx::named_barrier_sync(kStartBarrier, 256);
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) best[h].clear();
    uint32_t now = at.scheduler.first();
    for (; now < at.scheduler.end(); now += at.scheduler.step()) {
      if (!p.stream_q) await_rows<Tile>(p, at, now);
      for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) take_tile(now, t);
    }
    finish(at.scheduler(p, now - at.scheduler.step()));
  }
};

}  // namespace late_interaction
