// The table of kernels that one instruction set offers, and how to pick one. Everything that touches
// tokens goes through this table; the drivers (forward.cpp, backward.cpp) hold no arithmetic.
//
// Each .cpp of isa/ fills a table by including microkernel.inc.h and rows.inc.h under its own compiler
// target. Only this header and problem.h are shared, and neither defines a function with code in it:
// code compiled for AVX-512 must never be what the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "../common/arithmetic.h"
#include "../common/problem.h"
#include "residual.h"

namespace late_interaction::cpu {

// One panel of query rows against one tile of document tokens: see isa/microkernel.inc.h. The arrays over
// tokens are padded to a multiple of Multiplier::token_step by repeating the last token.
struct Tile {
  const void* panel;              // packed query rows [steps][2 * lanes]
  int vectors;                    // 1 or 2: vectors of the panel that hold rows
  int64_t steps;                  // k-steps of one dot product
  int64_t count;                  // tokens, padding included
  int64_t valid;                  // tokens before the padding
  const void* tokens;             // token n: `steps` packed steps at tokens + offsets[n] bytes
  const int64_t* offsets;         // [count]
  const int32_t* corrections;     // [count] added to the sum of a token's products, or null: 0
  const void* token_scales;       // [count] float or double, or null: multiplies the similarities
  const int32_t* ids;             // [count] token indices, or null: no winners
  void* best;                     // [vectors * lanes] float or double: running maximum
  void* winner;                   // [vectors * lanes] int32 (float) or int64 (double), or null with ids
  const char* source;             // the tokens before they are widened, or null: they are packed already
  const int64_t* source_offsets;  // token n lies at source + source_offsets[n] bytes; whole groups of them
  char* widened;                  // where they go: as `tokens`
  const char* ahead;              // what comes after this tile, fetched meanwhile: `ahead_step` bytes a token
  int64_t ahead_step;             // and k-step
  int64_t dims;                   // of a token, for Kernels::hamming
};

using ScoreTile = void (*)(const Tile&);

// One way to multiply: the layout of a packed step, and the kernel that consumes it.
struct Multiplier {
  int lanes;         // query rows in a vector
  int token_step;    // Tile::count is a multiple of this
  int group_tokens;  // multiplied at a time; tiles hold whole groups where they can
  int step_dims;     // dims in one k-step: 1, 2 (pairs of bf16 or int16) or 4 (int8)
  int step_bytes;
  Dtype native;  // rows of this dtype, dims contiguous, are packed already (if step_dims divides d)
  // One token, dims `stride` elements apart, to packed steps; the last step is padded with zeros.
  void (*pack_row)(const void* x, Dtype dtype, int64_t stride, int64_t d, void* out);
  ScoreTile score_tile;
  // The same of a query token, and Tile::corrections of tokens at `tokens + offsets[n]` bytes: for a
  // multiplier whose two operands differ. Null: queries are packed as tokens are, and sums need none.
  void (*pack_query)(const void* x, Dtype dtype, int64_t stride, int64_t d, void* out) = nullptr;
  void (*correct)(const void* tokens, const int64_t* offsets, int64_t count, int64_t steps,
                  int32_t* out) = nullptr;
  // The score_tile that widens tokens of a dtype while it multiplies, or null. Their dims are contiguous, and
  // fill whole vectors of packed steps.
  ScoreTile (*widening)(Dtype) = nullptr;
  // The same for packed codes of so many bits each, and what `correct` gives for d of them.
  ScoreTile (*widening_packed)(int bits) = nullptr;
  void (*correct_packed)(const void* tokens, const int64_t* offsets, int64_t count, int bits, int64_t d,
                         int32_t* out) = nullptr;
  // A tile's tokens must lie one stride apart, and its steps must be parts of one length, of at most so many
  // steps each (0: any number), filled up with zeros.
  bool even_tokens = false;
  int part_steps = 0;
  // Called by every thread when it is done, or null.
  void (*release)() = nullptr;
};

// Row arithmetic in Real = float (bf16, fp16 and fp32 inputs) or double (fp64 inputs).
template <class Real>
struct RowKernels {
  // out[n] = 1 / max(||x_n||, eps) for the rows at x + offsets[n] bytes: 0 if the norm of a finite row
  // overflows, NaN if an element is not finite.
  void (*inverse_norms)(const void* x, const int64_t* offsets, int64_t count, Dtype dtype, int64_t stride,
                        int64_t d, Real* out);
  // sum += scales[0] * x_0 + scales[1] * x_1 + ..., in this order, for the rows at x + offsets[n] bytes.
  void (*add_rows)(Real* sum, const Real* scales, const int64_t* offsets, int64_t count, const void* x,
                   Dtype dtype, int64_t stride, int64_t d);
  // The d values at out + n * stride become token tokens[n] of x.
  void (*decompress)(const ResidualTokens& x, const int64_t* tokens, int64_t count, int64_t d, Real* out,
                     int64_t stride);
  // out = grad, rounded to dtype.
  void (*write)(const Real* grad, int64_t d, Dtype dtype, void* out);
  // Turns grad, the gradient of normalize(x), into the gradient of x.
  void (*through_normalize)(Real* grad, Real inverse_norm, const void* x, Dtype dtype, int64_t stride,
                            int64_t d);
};

// The loops of MUVERA's encodings over rows of floats. Columns of a matrix are a multiple of kMuveraColumns,
// and a row of bits is columns / 8 bytes. A number is the sum of its products in the order of the dims,
// whatever rows and columns are beside it.
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

// The loops of Ward's clustering over a row of distances.
struct WardRows {
  // The least of row[i] + dead[i]; dead is 0 for a cluster that exists, else infinity.
  double (*minimum)(const double* row, const double* dead, int64_t n);
  // The first i for which that is the least.
  int64_t (*find)(const double* row, const double* dead, double least, int64_t n);
  // Row y = the distances of the union of clusters x and y, of x and y tokens, d_xy apart; the others have
  // sizes[i] tokens. It writes garbage for dead clusters, and for x and y.
  void (*join)(const double* row_x, double* row_y, const double* sizes, int64_t n, double x, double y,
               double d_xy);
};

struct Kernels {
  const char* name;
  Multiplier f32;
  Multiplier f64;
  Multiplier bf16;
  Multiplier int8;
  Multiplier hamming;  // of packed bits, 32 a step; similarities are dims - 2 * (bits that differ)
  bool has_bf16;       // bf16 is filled: this instruction set multiplies bf16 pairs
  bool has_int8;       // int8 is filled: this instruction set multiplies integers
  RowKernels<float> rows32;
  RowKernels<double> rows64;
  MuveraRows muvera;
  WardRows ward;
  // A token of d packed codes of 1 or 4 bits each, as int8.
  void (*unpack_codes)(const uint8_t* codes, int bits, int64_t d, int8_t* out);
};

// Sums of so many products of int8 codes fit in 32 bits.
inline constexpr int64_t kMaxInt8Dims = (int64_t{1} << 17) - 1;

void fill_portable(Kernels& k);
void fill_avx2(Kernels& k);
void fill_avx2_vnni(Kernels& k);
void fill_avx512(Kernels& k);
void fill_avx512_vnni(Kernels& k);
void fill_avx512_bf16(Kernels& k);
void fill_avx512_popcnt(Kernels& k);  // `hamming`, where the CPU has VPOPCNTDQ
void fill_amx(Kernels& k);
void fill_neon(Kernels& k);
void fill_neon_dotprod(Kernels& k);
void fill_neon_bf16(Kernels& k);
bool has_amx();
bool permit_amx();  // asks Linux to let this process use it
bool prefers_amx();

// The table in use: the best that this CPU runs, unless LATE_INTERACTION_CPU_ISA names another, or one was
// forced. Throws when the CPU or the build has no table of the variable's name.
const Kernels& kernels();

// Forces a table by name ("" = the best one) and returns the name now in use. Throws when the CPU or
// the build has no such table.
std::string force_isa(const std::string& name);

template <class Real>
const RowKernels<Real>& row_kernels(const Kernels& k);

}  // namespace late_interaction::cpu
