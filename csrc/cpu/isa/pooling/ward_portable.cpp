// Ward's rows on any CPU, a double at a time. Compilers may fuse multiply-adds where every CPU of the target
// has them (aarch64), unless they are told not to.
#include <cmath>

#include "ward_rows.h"

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace {

struct Scalar {
  static constexpr int kLanes = 1;
  static double set1(double x) { return x; }
  static double load(const double* p) { return *p; }
  static void store(double* p, double x) { *p = x; }
  static double add(double a, double b) { return a + b; }
  static double sub(double a, double b) { return a - b; }
  static double mul(double a, double b) { return a * b; }
  static double div(double a, double b) { return a / b; }
  static double min(double a, double b) { return a < b ? a : b; }  // b, if one of them is NaN
  static bool any_equal(double a, double b) { return a == b; }
  static double sqrt(double x) { return std::sqrt(x); }
};

}  // namespace

#include "ward.inc.h"

namespace late_interaction::cpu {

const WardRows& ward_rows_portable() {
  static constexpr WardRows rows{row_minimum<Scalar>, find_value<Scalar>, join_rows<Scalar>};
  return rows;
}

}  // namespace late_interaction::cpu
