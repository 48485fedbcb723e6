// How much of an epilogue overlaps wgmma. On one multiprocessor, one warpgroup multiplies tiles of
// 64 x 152 x 128 in bf16 without a pause, and another applies the instructions of a fold to as many
// numbers as a tile has similarities. Prints the clocks of both, alone and overlapped:
//
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icsrc bench/tuning/epilogue_overlap.cu -o eo
//   ./eo
//
// The fold changes its numbers in place, so that the compiler can leave no instruction out.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace ptx = late_interaction::ptx;

constexpr int kColumns = 152, kNumbers = kColumns / 2;  // a lane holds half a row of a tile
constexpr int kSteps = 8;                               // wgmma of 16 dims a tile
constexpr int kMatrixBytes = 64 * 1024;                 // shared memory of each operand

enum Fold : int { maximum, multiply, multiply_maximum, multiply_maximum3, convert_multiply_maximum3, kFolds };
constexpr const char* kNames[] = {"maximum", "multiply", "multiply, maximum", "multiply, maximum of three",
                                  "convert, multiply, maximum of three"};
constexpr double kInstructions[] = {1, 1, 2, 1.5, 2.5};  // for each number

struct Lane {
  float x[kNumbers], factor[kNumbers / 2];
  float best[2];
  int top[2];
};

template <Fold kFold>
__device__ __forceinline__ void fold(Lane& lane) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    float& x = lane.x[i];
    if constexpr (kFold == convert_multiply_maximum3) {
      asm volatile("{\n.reg .s32 n;\nmov.b32 n, %0;\ncvt.rn.f32.s32 %0, n;\n}\n" : "+f"(x));
    }
    if constexpr (kFold != maximum) {
      asm volatile("mul.f32 %0, %0, %1;\n" : "+f"(x) : "f"(lane.factor[i / 4 * 2 + i % 2]));
    }
    if constexpr (kFold == maximum || kFold == multiply_maximum) {
      asm volatile("max.NaN.f32 %0, %0, %1;\n" : "+f"(lane.best[i % 2]) : "f"(x));
    }
    if constexpr (kFold == multiply_maximum3 || kFold == convert_multiply_maximum3) {
      if (i % 2 == 0) continue;
      asm volatile("{\n.reg .s32 m;\nmax.s32 m, %0, %1;\nmax.s32 %0, m, %2;\n}\n"
                   : "+r"(lane.top[i / 2 % 2])
                   : "r"(__float_as_int(lane.x[i - 1])), "r"(__float_as_int(x)));
    }
  }
}

struct Clocks {
  long long products, folds;
};

// One warpgroup multiplies `products` tiles, the other folds `folds` tiles; with 0 it does nothing.
template <Fold kFold>
__global__ void __launch_bounds__(256, 1)
    run(int products, int folds, Clocks* clocks, float* sink, float seed) {
  extern __shared__ __align__(1024) uint8_t shared[];
  for (int i = threadIdx.x; i < 2 * kMatrixBytes / 4; i += 256) {
    reinterpret_cast<uint32_t*>(shared)[i] = 0x3C003C00u + i * 7919u % 0x03000300u;
  }
  ptx::fence_proxy_async();
  __syncthreads();
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const long long start = clock64();
  if (threadIdx.x < 128 && products > 0) {
    float c[kNumbers] = {};
    const uint32_t a = ptx::smem_desc_low(base), b = ptx::smem_desc_low(base + kMatrixBytes);
#pragma unroll 1
    for (int i = 0; i < products; ++i) {
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const uint32_t at = k / 4 * (32 * 1024 / 16) + k % 4 * (32 / 16);
        ptx::WgmmaShape<kColumns>::issue<ptx::WgmmaBf16>(
            c, ptx::smem_desc_k_major(a + at + i % 4 * (8 * 1024 / 16)), ptx::smem_desc_k_major(b + at),
            k > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
    }
    if (threadIdx.x == 0) clocks->products = clock64() - start;
    for (float x : c) sink[threadIdx.x] += x;
  } else if (threadIdx.x >= 128 && folds > 0) {
    Lane lane;
    for (int i = 0; i < kNumbers; ++i) lane.x[i] = seed * (i * 37 % 101 + threadIdx.x);
    for (int i = 0; i < kNumbers / 2; ++i) lane.factor[i] = seed + i;
    for (int i = 0; i < 2; ++i) lane.best[i] = lane.top[i] = -i;
#pragma unroll 1
    for (int i = 0; i < folds; ++i) fold<kFold>(lane);
    if (threadIdx.x == 128) clocks->folds = clock64() - start;
    for (float x : lane.x) sink[threadIdx.x] += x;
    sink[threadIdx.x] += lane.best[0] + lane.best[1] + lane.top[0] + lane.top[1];
  }
}

void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <Fold kFold>
void measure() {
  Clocks* clocks;
  float* sink;
  must(cudaMallocManaged(&clocks, sizeof *clocks));
  must(cudaMalloc(&sink, 256 * sizeof *sink));
  must(cudaMemset(sink, 0, 256 * sizeof *sink));
  must(cudaFuncSetAttribute(run<kFold>, cudaFuncAttributeMaxDynamicSharedMemorySize, 2 * kMatrixBytes));
  const auto took = [&](int products, int folds) {
    run<kFold><<<1, 256, 2 * kMatrixBytes>>>(products, folds, clocks, sink, 1.5f);
    must(cudaDeviceSynchronize());
    return *clocks;
  };
  constexpr int kTiles = 2000, kLonger = 20 * kTiles;  // the other warpgroup outlasts the timed one
  took(kTiles, kTiles);                                // warm
  const double products = took(kTiles, 0).products / kTiles, folds = took(0, kTiles).folds / kTiles;
  const double slowed_folds = took(kLonger, kTiles).folds / kTiles;
  const double slowed_products = took(kTiles, kLonger).products / kTiles;
  std::printf("%-36s %12.1f %9.0f %9.0f %12.0f %12.0f\n", kNames[kFold], kInstructions[kFold], folds,
              slowed_folds, products, slowed_products);
  must(cudaFree(clocks));
  must(cudaFree(sink));
}

template <int... kFold>
void measure_all(std::integer_sequence<int, kFold...>) {
  (measure<Fold{kFold}>(), ...);
}

int main() {
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0));
  std::printf("%s: clocks for %d numbers a lane, and for a tile of products\n", device.name, kNumbers);
  std::printf("%-36s %12s %9s %9s %12s %12s\n", "a fold's instructions", "a number", "alone", "beside",
              "products", "beside it");
  measure_all(std::make_integer_sequence<int, kFolds>{});
}
