// The two loops of Ward's clustering over a row of distances, for the instruction set in use.
#pragma once

#include <cstdint>

namespace late_interaction::cpu {

struct WardRows {
  // The least of row[i] + dead[i]; dead is 0 for a cluster that exists, else infinity.
  double (*minimum)(const double* row, const double* dead, int64_t n);
  // The first i for which that is the least.
  int64_t (*find)(const double* row, const double* dead, double least, int64_t n);
  // Row y = the distances of the union of clusters x and y, of x and y tokens, d_xy apart; the others have
  // sizes[i] tokens. What it writes for clusters that are dead, and for x and y, has no meaning.
  void (*join)(const double* row_x, double* row_y, const double* sizes, int64_t n, double x, double y,
               double d_xy);
};

const WardRows& ward_rows_portable();
const WardRows& ward_rows_avx2();

}  // namespace late_interaction::cpu
