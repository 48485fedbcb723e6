// What the kernels of packed codes are launched with.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

// Documents have equally many tokens that all count, or masks, or lengths of their own.
enum class CodeDocuments { whole, masked, ragged };

// Queries and documents of bits, or documents of 4-bit codes and queries of int8.
struct PackedCodesCall {
  Sizes sizes;     // d counts codes; ragged: Ld, the tokens of all documents
  TokenView Q, D;  // one byte an element; tokens of D begin at whole 16 bytes
  MaskView q_mask, d_mask;
  const int32_t* d_offsets = nullptr;   // [N + 1], ragged documents
  ScaleView q_scale, d_scale;           // no data: 1
  const float* shared_scale = nullptr;  // of all documents' tokens, in the place of d_scale
  float* scores = nullptr;              // [Nq, N]
};

inline constexpr int kPackedRows = 32;  // query rows in a row tile

inline CodeDocuments kind_of_documents(const PackedCodesCall& call) {
  if (call.d_offsets != nullptr) return CodeDocuments::ragged;
  return call.d_mask.data != nullptr ? CodeDocuments::masked : CodeDocuments::whole;
}

// f.template operator()<kind>().
template <class F>
void with_documents(const PackedCodesCall& call, const F& f) {
  switch (kind_of_documents(call)) {
    case CodeDocuments::whole:
      return f.template operator()<CodeDocuments::whole>();
    case CodeDocuments::masked:
      return f.template operator()<CodeDocuments::masked>();
    case CodeDocuments::ragged:
      return f.template operator()<CodeDocuments::ragged>();
  }
}

// A row tile as the operand of the products. Bytes of the workspace, for each of Nq * row_tiles:
//   fragments   steps * 4 * 32 uint2: what each lane holds of 8 rows, for 32 dims
//   start       32 int32: what a row's sums begin with
//   scale       32 float: of a row's maximum; 0 for a row that does not count
//   kept        a bit for each row that counts
// and, where queries have several row tiles, the scores of each tile.
struct PackedCodesLaunch {
  int64_t row_tiles = 0;  // of a query
  int64_t steps = 0;      // of 32 dims
  int64_t blocks = 0;     // that share the documents of a row tile
  int64_t workspace_bytes = 0;
  int64_t fragments = 0, starts = 0, scales = 0, kept = 0, partials = 0;  // where they begin in the workspace
};

PackedCodesLaunch plan_packed_codes(const PackedCodesCall& call, int multiprocessors);

// Bits with bits: hamming.cuh.
struct HammingLaunch {
  int64_t row_tiles = 0;      // of a query
  int64_t tiles = 0;          // row tiles that share their documents, a set
  int64_t tiles_of_warp = 0;  // that it multiplies each document with
  int64_t groups = 0;         // of so many, in a set
  int64_t sets = 0;
  int64_t blocks = 0;           // that share the documents of a group
  int64_t workspace_bytes = 0;  // where queries have several row tiles, the scores of each
};

inline constexpr int64_t kMostHammingDims = 2048;  // of which a row tile takes 16 KiB of shared memory

HammingLaunch plan_hamming(const PackedCodesCall& call, int multiprocessors);

cudaError_t launch_hamming(const PackedCodesCall& call, const HammingLaunch& launch, void* workspace,
                           cudaStream_t stream);

// Bits [rows, bytes] as int8 codes [rows, width], +1 and -1; behind d zeros.
struct UnpackArgs {
  const uint8_t* bits;
  int64_t rows, bytes, d, width;
  int8_t* codes;
};
cudaError_t launch_unpack_bits(const UnpackArgs& args, cudaStream_t stream);

// Adds the partial sums [Nq * row_tiles, N] of a query's row tiles, in their order, to scores[Nq, N].
void add_row_tiles(const float* partials, int64_t N, int64_t pairs, int64_t row_tiles, float* scores,
                   cudaStream_t stream);

cudaError_t launch_packed_codes(const PackedCodesCall& call, const PackedCodesLaunch& launch, void* workspace,
                                cudaStream_t stream);

}  // namespace late_interaction
