// Measures the rates of AMX's tile unit, of tile loads and of reads of memory, without the library and
// without PyTorch:
//
//   g++ -std=c++20 -O3 -mavx512f -mamx-tile -mamx-bf16 -mamx-int8 -pthread bench/tuning/tile_unit.cpp -o tu
//   ./tu
//
// Threads are pinned to the first CPUs of the process and start together; each figure is of the best of many
// short passes, so that other load on the machine counts little. bench/results has outputs.
#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<int> cpus;  // that this process may use

void pin(int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  sched_setaffinity(0, sizeof one, &one);
}

// The least seconds of `count` passes, from their start until the last thread is done.
double least_seconds(int threads, int count, const std::function<void(int)>& body) {
  std::atomic<int> done{0}, go{-1};
  const auto pass = [&](int thread, int p) {
    while (go.load(std::memory_order_acquire) < p) _mm_pause();
    body(thread);
    done.fetch_add(1);
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) {
    others.emplace_back([&, thread] {
      pin(cpus[thread]);
      for (int p = 0; p < count; ++p) pass(thread, p);
    });
  }
  pin(cpus[0]);
  double least = 1e9;
  for (int p = 0; p < count; ++p) {
    for (const double wait = now(); now() - wait < 20e-6;) _mm_pause();
    const double start = now();
    go.store(p, std::memory_order_release);
    pass(0, p);
    while (done.load() < threads * (p + 1)) _mm_pause();
    least = std::min(least, now() - start);
  }
  for (std::thread& each : others) each.join();
  return least;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void use_whole_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64, config.rows[tile] = 16;
  _tile_loadconfig(&config);
}

// The operands of a measured loop: 32 tokens and 32 query rows of 128 dims in bf16, laid out as in the
// library's kernel, and 32 x 32 sums. One part is 32 of the dims: four products.
struct Operands {
  alignas(64) char tokens[32 * 256];
  alignas(64) char panel[64 * 128];
  alignas(64) char sums[32 * 128];
};

enum Step : int { kProducts = 1, kLoads = 2, kZero = 4, kStore = 8 };

template <int kSteps>
void run_group(Operands& x) {
  if constexpr (kSteps & kZero) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
#pragma GCC unroll 4
  for (int part = 0; part < 4; ++part) {
    const char* panel = x.panel + part * 16 * 128;
    if constexpr (kSteps & kLoads) {
      _tile_loadd(6, panel, 128);
      _tile_loadd(4, x.tokens + 64 * part, 256);
      _tile_loadd(7, panel + 64, 128);
      _tile_loadd(5, x.tokens + 16 * 256 + 64 * part, 256);
    }
    if constexpr (kSteps & kProducts) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      _tile_dpbf16ps(2, 5, 6);
    }
  }
  if constexpr (kSteps & kStore) {
    _tile_stored(0, x.sums, 128);
    _tile_stored(1, x.sums + 64, 128);
    _tile_stored(2, x.sums + 16 * 128, 128);
    _tile_stored(3, x.sums + 16 * 128 + 64, 128);
  }
}

constexpr int kGroups = 500, kPasses = 60;

// Nanoseconds of a part on each of the threads, in L1.
template <int kSteps>
void sequence(const char* name, const std::vector<int>& counts) {
  std::printf("%-34s", name);
  for (const int threads : counts) {
    std::vector<Operands> operands(static_cast<size_t>(threads));
    const double seconds = least_seconds(threads, kPasses, [&](int thread) {
      use_whole_tiles();
      for (int group = 0; group < kGroups; ++group) run_group<kSteps>(operands[static_cast<size_t>(thread)]);
      _tile_release();
    });
    std::printf(" %9.2f", seconds / (4 * kGroups) * 1e9);
  }
  std::printf("\n");
}

void products(const char* name, bool int8, const std::vector<int>& counts) {
  constexpr int kRounds = 3000;
  std::printf("%-34s", name);
  for (const int threads : counts) {
    const double seconds = least_seconds(threads, kPasses, [&](int) {
      use_whole_tiles();
      for (int round = 0; round < kRounds; ++round) {
        if (int8) {
          _tile_dpbssd(0, 4, 6);
          _tile_dpbssd(1, 4, 7);
          _tile_dpbssd(2, 5, 6);
          _tile_dpbssd(3, 5, 7);
        } else {
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_release();
    });
    std::printf(" %9.2f", threads * kRounds * 4.0 * (int8 ? 32768 : 16384) / seconds * 1e-12);
  }
  std::printf("\n");
}

int read_all(const char* bytes, size_t size) {
  __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                    _mm512_setzero_si512()};
  for (size_t at = 0; at + 256 <= size; at += 256) {
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      sum[line] = _mm512_or_si512(sum[line], _mm512_loadu_si512(bytes + at + 64 * line));
    }
  }
  return _mm512_reduce_or_epi32(
      _mm512_or_si512(_mm512_or_si512(sum[0], sum[1]), _mm512_or_si512(sum[2], sum[3])));
}

// GB/s of each thread reading its share of so many bytes, once a pass.
void reads(const char* name, size_t size, const std::vector<int>& counts) {
  char* bytes =
      static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  madvise(bytes, size, MADV_HUGEPAGE);
  std::memset(bytes, 1, size);
  std::printf("%-34s", name);
  for (const int threads : counts) {
    const size_t share = size / static_cast<size_t>(threads) / 4096 * 4096;
    std::vector<int> found(static_cast<size_t>(threads) * 16);
    const double seconds = least_seconds(threads, size > (size_t{1} << 28) ? 6 : 30, [&](int thread) {
      found[static_cast<size_t>(thread) * 16] = read_all(bytes + static_cast<size_t>(thread) * share, share);
    });
    std::printf(" %9.1f", static_cast<double>(share) * threads / seconds * 1e-9);
  }
  std::printf("\n");
  munmap(bytes, size);
}

}  // namespace

int main() {
  if (!__builtin_cpu_supports("amx-bf16") || syscall(SYS_arch_prctl, 0x1023, 18) != 0) {
    std::puts("this CPU has no AMX, or Linux does not give it to this process");
    return 1;
  }
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  std::vector<int> counts;
  for (int threads = 1; threads <= std::min<int>(16, static_cast<int>(cpus.size())); threads *= 2) {
    counts.push_back(threads);
  }
  std::printf("%-34s", "threads");
  for (const int threads : counts) std::printf(" %9d", threads);
  std::printf("\n");
  products("bf16 products, TFLOP/s", false, counts);
  products("int8 products, TFLOP/s", true, counts);
  reads("reads of 77 MB, GB/s", size_t{300} * 256 * 1000, counts);
  reads("reads of 614 MB, GB/s", size_t{300} * 256 * 8000, counts);
  std::printf("nanoseconds of a part (4 products) in L1\n");
  sequence<kProducts>("products", counts);
  sequence<kLoads>("4 loads", counts);
  sequence<kProducts | kLoads>("4 loads, products", counts);
  sequence<kProducts | kLoads | kZero>("and zeroed sums each 4 parts", counts);
  sequence<kProducts | kLoads | kZero | kStore>("and sums stored each 4 parts", counts);
}
