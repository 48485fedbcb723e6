// The tile registers of AMX: 8 of up to 16 rows of 64 bytes. The numbers of registers are template arguments,
// since an instruction holds them.
#pragma once

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdint>

namespace {

// What ldtilecfg reads (palette 1).
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

struct Tiles {
  static constexpr bool kEmulated = false;

  static bool available() {
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           __builtin_cpu_supports("amx-int8");
  }

  // Asks Linux to keep the tiles of this process's threads.
  static bool permitted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
  }

  // Sets the sizes of all tiles, and zeros them.
  static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
  static void release() { asm volatile("tilerelease" ::: "memory"); }

  template <int T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T) : "memory");
  }
  // Rows lie `stride` bytes apart.
  template <int T>
  static void load(const char* rows, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static void store(char* rows, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(T) : "memory");
  }
  // Sum += A B: rows of A hold pairs of bf16 or four int8, row k of B those of step k for each column.
  template <int Sum, int A, int B>
  static void multiply_add_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B) : "memory");
  }
  template <int Sum, int A, int B>
  static void multiply_add_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B) : "memory");
  }
};

}  // namespace
