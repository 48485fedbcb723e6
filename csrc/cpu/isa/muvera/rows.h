// The loops of MUVERA's encodings over rows of floats, for the instruction set in use.
#pragma once

#include <cstdint>

namespace late_interaction::cpu {

// Columns of a matrix are a multiple of kMuveraColumns, and a row of bits is columns / 8 bytes. A number is
// the sum of its products in the order of the dims, whatever rows and columns are beside it.
struct MuveraRows {
  // Bit c of row i of `bits` says whether <x[i], column c of matrix [d, columns]> > 0. x is [rows, d].
  void (*signs)(const float* x, int64_t rows, const float* matrix, int64_t columns, int64_t d, uint8_t* bits);
  // out [rows, columns] = x matrix.
  void (*project)(const float* x, int64_t rows, const float* matrix, int64_t columns, int64_t d, float* out);
  // sum += x, of n numbers.
  void (*add)(float* sum, const float* x, int64_t n);
  // x *= factor, of n numbers.
  void (*scale)(float* x, float factor, int64_t n);
};

const MuveraRows& muvera_rows_portable();
const MuveraRows& muvera_rows_avx2();
const MuveraRows& muvera_rows_avx512();

}  // namespace late_interaction::cpu
