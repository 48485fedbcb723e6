// mma.sync (sm_80+): matrix products of a warp, and ldmatrix, which loads their operands.
//
// Every policy below multiplies a 16-row block by an 8-column block over 32 BYTES of the embedding (16
// half-width or 8 fp32 elements), so one kernel body with one shared-memory layout serves them all:
// ldmatrix hands a thread 4-byte words, whatever is in them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace late_interaction::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem));
}

// The same for 16-bit elements; it transposes each 8x8 matrix.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem));
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem));
}

// Accumulator of a 16x8 block: thread (lane) holds rows lane/4 and lane/4 + 8, columns 2*(lane%4) + {0, 1}.
using Accumulator = float[4];

// A policy turns the raw words of ldmatrix into operands A (16 rows) and B (8 columns), once each, and
// multiplies them as often as they are reused.
template <class E>
struct RawOperands {
  using Element = E;
  static constexpr int kUnroll = 4;  // steps of 32 bytes whose fragments may be in flight together
  struct A {
    uint32_t r[4];
  };
  struct B {
    uint32_t r[2];
  };
  static __device__ __forceinline__ A operand_a(const uint32_t (&w)[4]) { return {{w[0], w[1], w[2], w[3]}}; }
  static __device__ __forceinline__ B operand_b(uint32_t w0, uint32_t w1) { return {{w0, w1}}; }
};

struct MmaBf16 : RawOperands<__nv_bfloat16> {
  static __device__ __forceinline__ void multiply(Accumulator& c, const A& a, const B& b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
  }
};

// Eight elements of each row and column.
__device__ __forceinline__ void mma_m16n8k8_bf16(Accumulator& c, uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

struct MmaFp16 : RawOperands<__half> {
  static __device__ __forceinline__ void multiply(Accumulator& c, const A& a, const B& b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
  }
};

__device__ __forceinline__ uint32_t cvt_rna_tf32(uint32_t x) {
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(__uint_as_float(x)));
  return r;
}

__device__ __forceinline__ void mma_m16n8k8_tf32(Accumulator& c, const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// fp32 inputs, 10 mantissa bits a product: precision "high".
struct MmaTf32 : RawOperands<float> {
  static __device__ __forceinline__ A operand_a(const uint32_t (&w)[4]) {
    return {{cvt_rna_tf32(w[0]), cvt_rna_tf32(w[1]), cvt_rna_tf32(w[2]), cvt_rna_tf32(w[3])}};
  }
  static __device__ __forceinline__ B operand_b(uint32_t w0, uint32_t w1) {
    return {{cvt_rna_tf32(w0), cvt_rna_tf32(w1)}};
  }
  static __device__ __forceinline__ void multiply(Accumulator& c, const A& a, const B& b) {
    mma_m16n8k8_tf32(c, a.r, b.r);
  }
};

// fp32 inputs at fp32 accuracy: x = big + small, both TF32, and small*big + big*small + big*big, the
// small terms first. An infinite input turns into NaN here; the kernel recomputes NaN rows in plain fp32.
struct Mma3xTf32 {
  using Element = float;
  static constexpr int kUnroll = 1;
  struct A {
    uint32_t big[4], small[4];
  };
  struct B {
    uint32_t big[2], small[2];
  };
  static __device__ __forceinline__ void split(uint32_t x, uint32_t& big, uint32_t& small) {
    big = cvt_rna_tf32(x);
    small = cvt_rna_tf32(__float_as_uint(__uint_as_float(x) - __uint_as_float(big)));
  }
  static __device__ __forceinline__ A operand_a(const uint32_t (&w)[4]) {
    A a;
#pragma unroll
    for (int i = 0; i < 4; ++i) split(w[i], a.big[i], a.small[i]);
    return a;
  }
  static __device__ __forceinline__ B operand_b(uint32_t w0, uint32_t w1) {
    B b;
    split(w0, b.big[0], b.small[0]);
    split(w1, b.big[1], b.small[1]);
    return b;
  }
  static __device__ __forceinline__ void multiply(Accumulator& c, const A& a, const B& b) {
    // The tensor cores truncate as they accumulate, a bias that would grow with d: they sum these eight
    // elements alone, and the rounding addition is ours.
    Accumulator sum = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_m16n8k8_tf32(sum, a.small, b.big);
    mma_m16n8k8_tf32(sum, a.big, b.small);
    mma_m16n8k8_tf32(sum, a.big, b.big);
#pragma unroll
    for (int e = 0; e < 4; ++e) c[e] += sum[e];
  }
};

}  // namespace late_interaction::ptx
