// Where a residual-compressed document lies, and the values of a token.
#pragma once

#include "../primitives/element.cuh"
#include "args.h"

namespace late_interaction {

// Where a document lies. Offsets and lengths that make no sense are cut to what exists; an empty document
// lies at token 0, which may always be read.
struct CompressedSpan {
  int64_t first = 0;  // token
  int32_t count = 0;
};

__device__ __forceinline__ CompressedSpan span_of(const CompressedDocuments& c, int64_t j) {
  const int64_t begin = c.packed ? min(max(c.extents[j], int64_t{0}), c.capacity) : j * c.capacity;
  const int64_t wanted = c.packed ? max(c.extents[j + 1], begin) - begin : c.extents[j];
  const int64_t count = min(wanted, c.packed ? c.capacity - begin : c.capacity);
  if (count <= 0) return {};
  return {begin, static_cast<int32_t>(min(count, int64_t{1} << 30))};
}

__device__ __forceinline__ uint32_t known_centroid(const CompressedDocuments& c, int32_t code) {
  return static_cast<uint32_t>(code) < c.centroid_count ? code : 0;
}

// One token, dim by dim: for the kernels that are not about speed. Rounded to T as the fast one rounds it.
template <class T>
struct CompressedToken {
  const T* centroid;
  const uint8_t* residual;
  const float* weights;
  int nbits;

  __device__ __forceinline__ CompressedToken(const CompressedDocuments& c, int64_t token, uint32_t code)
      : centroid(reinterpret_cast<const T*>(static_cast<const uint8_t*>(c.centroids) +
                                            uint64_t{code} * c.centroid_row)),
        residual(c.residuals + token * c.residual_row),
        weights(c.weights),
        nbits(c.nbits) {}

  __device__ __forceinline__ Sum<T> operator[](int k) const {
    const int64_t bit = int64_t{k} * nbits;
    const int bucket = residual[bit / 8] >> (bit % 8) & ((1 << nbits) - 1);
    return widen(narrow<T>(widen(centroid[k]) + widen(narrow<T>(static_cast<Sum<T>>(weights[bucket])))));
  }
};

}  // namespace late_interaction
