// The tile registers of AMX in plain C++, in place of csrc/cpu/isa/x86/tiles_amx.h, for machines without
// them: what the instructions do, and an end of the process where they would fault.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct TileConfig {
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

struct TileRegister {
  int rows = 0, row_bytes = 0;
  char data[16][64];
};

struct Tiles {
  using Register = TileRegister;
  static inline thread_local TileRegister tmm[8];

  static void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "emulated tiles: %s\n", what);
    std::abort();
  }

  static constexpr bool kEmulated = true;  // taken only by name: it is slow

  static bool available() { return true; }
  static bool permitted() { return true; }

  static void configure(const TileConfig& config) {
    for (int t = 0; t < 8; ++t) {
      require(config.rows[t] <= 16 && config.row_bytes[t] <= 64, "a tile has at most 16 rows of 64 bytes");
      require((config.rows[t] == 0) == (config.row_bytes[t] == 0),
              "rows without bytes, or bytes without rows");
      tmm[t].rows = config.rows[t];
      tmm[t].row_bytes = config.row_bytes[t];
      std::memset(tmm[t].data, 0, sizeof(tmm[t].data));
    }
  }
  static void release() { configure({}); }

  template <int T>
  static Register& at() {
    require(tmm[T].rows > 0, "a register that is not configured");
    return tmm[T];
  }

  template <int T>
  static void zero() {
    std::memset(at<T>().data, 0, sizeof(tmm[T].data));
  }
  template <int T>
  static void load(const char* rows, int64_t stride) {
    Register& tile = at<T>();
    std::memset(tile.data, 0, sizeof(tile.data));
    for (int row = 0; row < tile.rows; ++row)
      std::memcpy(tile.data[row], rows + row * stride, tile.row_bytes);
  }
  template <int T>
  static void store(char* rows, int64_t stride) {
    const Register& tile = at<T>();
    for (int row = 0; row < tile.rows; ++row)
      std::memcpy(rows + row * stride, tile.data[row], tile.row_bytes);
  }

  // Sum += A B, where product(sum, a, b) adds the products of 4 bytes of a row of A and a column of B.
  template <int Sum, int A, int B, class Value, class Product>
  static void multiply_add(Product product) {
    Register& sum = at<Sum>();
    const Register &a = at<A>(), &b = at<B>();
    require(sum.rows == a.rows && a.row_bytes == 4 * b.rows && sum.row_bytes == b.row_bytes, "sizes differ");
    for (int row = 0; row < sum.rows; ++row) {
      for (int step = 0; step < b.rows; ++step) {
        for (int column = 0; column < sum.row_bytes / 4; ++column) {
          Value value;
          std::memcpy(&value, sum.data[row] + 4 * column, 4);
          value = product(value, a.data[row] + 4 * step, b.data[step] + 4 * column);
          std::memcpy(sum.data[row] + 4 * column, &value, 4);
        }
      }
    }
  }

  static float bf16(const char* x) {
    uint16_t bits;
    std::memcpy(&bits, x, 2);
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
  }

  template <int Sum, int A, int B>
  static void multiply_add_bf16() {
    multiply_add<Sum, A, B, float>([](float sum, const char* a, const char* b) {
      sum = std::fma(bf16(a), bf16(b), sum);
      return std::fma(bf16(a + 2), bf16(b + 2), sum);
    });
  }
  template <int Sum, int A, int B>
  static void multiply_add_int8() {
    multiply_add<Sum, A, B, uint32_t>([](uint32_t sum, const char* a, const char* b) {
      for (int k = 0; k < 4; ++k) {
        sum += static_cast<uint32_t>(int32_t{static_cast<int8_t>(a[k])} * static_cast<int8_t>(b[k]));
      }
      return sum;
    });
  }
};

}  // namespace
