// MUVERA's rows on any CPU: compilers make vectors of four floats of these loops.
#include "rows.h"

namespace {

struct Portable {
  static constexpr int kLanes = 8;
  struct Vector {
    float lanes[kLanes];
  };
  template <class Function>
  static Vector each(const Function& function) {
    Vector result;
    for (int i = 0; i < kLanes; ++i) result.lanes[i] = function(i);
    return result;
  }
  static Vector zero() { return set1(0.0f); }
  static Vector set1(float x) {
    return each([&](int) { return x; });
  }
  static Vector load(const float* p) {
    return each([&](int i) { return p[i]; });
  }
  static void store(float* p, const Vector& x) {
    for (int i = 0; i < kLanes; ++i) p[i] = x.lanes[i];
  }
  static Vector add(const Vector& a, const Vector& b) {
    return each([&](int i) { return a.lanes[i] + b.lanes[i]; });
  }
  static Vector multiply(const Vector& a, const Vector& b) {
    return each([&](int i) { return a.lanes[i] * b.lanes[i]; });
  }
  static Vector multiply_add(const Vector& a, const Vector& b, const Vector& c) {
    return each([&](int i) { return c.lanes[i] + a.lanes[i] * b.lanes[i]; });
  }
  static void store_signs(uint8_t* p, const Vector& x) {
    int signs = 0;
    for (int i = 0; i < kLanes; ++i) signs |= (x.lanes[i] > 0) << i;
    *p = static_cast<uint8_t>(signs);
  }
};

}  // namespace

#include "rows.inc.h"

namespace late_interaction::cpu {

const MuveraRows& muvera_rows_portable() {
  static constexpr MuveraRows rows = muvera_rows_of<Portable>();
  return rows;
}

}  // namespace late_interaction::cpu
