// The rows of a consumer lane of incidence_products.cuh, and operand A of wgmma, made from winners.
#pragma once

#include "incidence_stage.cuh"
#include "incidence_words.cuh"

namespace late_interaction {

// Codes of the winners that a unit holds for a lane's two rows, in pairs: the winners of either row (grad_Q),
// or of the unit's query rows, in the order of operand A (grad_D).
template <class Tile>
using UnitWinners = uint32_t[Tile::kGradQ ? 2 : 4 * Tile::kSteps];

// The two rows of a consumer lane, eight rows apart: tokens, and offsets in a stage of winners and gradients.
template <class Tile>
struct OwnedRows {
  using Words = IncidenceWords<typename Tile::T>;
  // grad_Q: tokens 2c and 2c + 1 of an item. grad_D: each row's token, twice; without a row NaN, which equals
  // nothing.
  uint32_t tokens[Tile::kGradQ ? 1 : 2];
  // Bits 0 to 15: offset of each row's winners from a unit's first run; from bit 16 on: the run's offset in
  // 16 bytes with item 0. Of aligned runs of grad_D, offsets[0] is the offset that the lane reads for the
  // warp.
  uint32_t offsets[2];
  uint32_t grads = 0;  // offsets of the rows' gradients in a unit's, 16 bits each

  __device__ __forceinline__ OwnedRows(const IncidenceArgs& p, int32_t first_row) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
    if constexpr (Tile::kGradQ) {
      tokens[0] = pair_of(0x4000) + 2 * (lane % 4) * 0x00010001 + 0x00010000;
#pragma unroll
      for (int h = 0; h < 2; ++h) own_query_row(p, first_row, row + lane / 4 + 8 * h, h);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) own_document_row(p, first_row, row + lane / 4 + 8 * h, h);
      if (p.run_offset == 0) offsets[0] = doc_of(p, row + lane % 16) * p.run_vecs * 16 + lane / 16 * 16;
    }
#pragma unroll
    for (uint32_t& token : tokens) asm volatile("" : "+r"(token));  // a register, not computed every time
  }

  // Reads the rows' gradients of the u-th unit of a stage.
  __device__ __forceinline__ void read_grads(const IncidenceArgs& p, uint32_t stage_grads, int u,
                                             float (&found)[2]) const {
    const int unit = u * (Tile::kGradQ ? kMostIncidenceQueries : p.block_docs);
    uint32_t two_offsets = grads;
    // With three steps or more, no register is left in which the compiler could keep either half.
    if constexpr (Tile::kSteps > 2) asm volatile("" : "+r"(two_offsets));
    found[0] = __uint_as_float(ptx::ld_shared(stage_grads + 4 * unit + (two_offsets & 0xFFFF)));
    found[1] = __uint_as_float(ptx::ld_shared(stage_grads + 4 * unit + (two_offsets >> 16)));
  }

  // Reads the rows' winners in the u-th unit of a stage, of item `item`. kAligned: runs start at multiples of
  // 16 bytes.
  template <bool kAligned>
  __device__ __forceinline__ void read(const IncidenceArgs& p, uint32_t winners, int u, int32_t item,
                                       UnitWinners<Tile>& codes) const {
    const auto offset = [&](int h) {
      if (kAligned) return offsets[h];
      const auto step = Tile::kGradQ ? 2u * p.Lq : static_cast<uint32_t>(p.query_bytes);
      return BlockQueryRow::offset(offsets[h], static_cast<uint32_t>(item) * step);
    };
    if constexpr (Tile::kGradQ) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        codes[h] = ptx::ld_shared_u16(winners + u * kIncidenceUnitVecs * 16 + offset(h));
      }
    } else if constexpr (kAligned) {
#pragma unroll
      for (int k = 0; k < Tile::kSteps; ++k) {
        uint32_t words[4];
        ptx::ldmatrix_x4(words, winners + u * p.block_docs * p.run_vecs * 16 + offsets[0] + 32 * k);
#pragma unroll
        for (int m = 0; m < 4; ++m) codes[4 * k + m] = words[m];
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t from = winners + u * p.block_docs * p.run_vecs * 16 + offset(h);
#pragma unroll
        for (int k = 0; k < 2 * Tile::kSteps; ++k) {
          codes[2 * k + h] = ptx::ld_shared_u16(from + 16 * k) | ptx::ld_shared_u16(from + 16 * k + 2) << 16;
        }
      }
    }
  }

  // The rows' words of operand A: for each step, of the low and the high row, first tokens 2c and 2c + 1,
  // then 2c + 8 and 2c + 9.
  __device__ __forceinline__ void compare(const UnitWinners<Tile>& codes,
                                          uint32_t (&a)[Tile::kSteps][4]) const {
#pragma unroll
    for (int k = 0; k < 4 * Tile::kSteps; ++k) {
      if constexpr (Tile::kGradQ) {
        a[k / 4][k % 4] = Words::equal(pair_of(token_code(codes[k % 2])), tokens[0] + k / 2 * 0x00080008);
      } else {
        a[k / 4][k % 4] = Words::equal(codes[k] | pair_of(token_code(0)), tokens[k % 2]);
      }
    }
  }

 private:
  __device__ __forceinline__ void own_query_row(const IncidenceArgs& p, int32_t first_row, int row, int h) {
    const BlockQueryRow query_row(p, first_row, row, 1);
    offsets[h] = query_row.offsets;
    grads |= 4 * query_row.query << 16 * h;
  }

  static __device__ __forceinline__ int doc_of(const IncidenceArgs& p, int row) {
    const int doc = row / p.Ld;
    return doc < p.block_docs ? doc : 0;
  }

  __device__ __forceinline__ void own_document_row(const IncidenceArgs& p, int32_t first_row, int row,
                                                   int h) {
    const int doc = doc_of(p, row), t = row - doc * p.Ld;
    tokens[h] = t < p.Ld ? pair_of(token_code(t)) : 0xFFFFFFFF;
    offsets[h] = doc * p.run_vecs * 16 + threadIdx.x % 4 * 4 +
                 ((low_bits(first_winner(p, 0, first_row / p.Ld + doc, 0)) & 15) << 16);
    grads |= 4 * doc << 16 * h;
  }
};

}  // namespace late_interaction
