// mma.sync (sm_80+; before_sm80.cuh has what stands in for it before): matrix products of a warp, and
// ldmatrix, which loads their operands.
//
// Every policy below multiplies a 16-row block by an 8-column block over 32 BYTES of the embedding (32 codes
// of a byte, 16 half-width or 8 fp32 elements), so one kernel body with one shared-memory layout serves them
// all: ldmatrix hands a thread 4-byte words, whatever is in them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "mma_integers.cuh"

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

// c += a * b in fp32, in the shape and of the types named. A has four words of a lane, B two.
#define LATE_INTERACTION_MMA_SYNC(SHAPE_AND_TYPES, c, a, b) \
  asm("mma.sync.aligned." SHAPE_AND_TYPES                   \
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "     \
      "{%0, %1, %2, %3};\n"                                 \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// Accumulator of a 16x8 block: thread (lane) holds rows lane/4 and lane/4 + 8, columns 2*(lane%4) + {0, 1}.
using Accumulator = float[4];

// A policy turns the raw words of ldmatrix into operands A (16 rows) and B (8 columns), once each, and
// multiplies them as often as they are reused.
template <class E>
struct RawOperands {
  using Element = E;
  using Sum = float;
  static constexpr Sum kZero = 0.0f;
  static constexpr int kTerms = 1;       // elements of an operand for each element of an embedding
  static constexpr float kScale = 1.0f;  // a sum times this is the inner product
  // Steps that the tensor cores sum by themselves, before an addition that rounds; 0: all.
  static constexpr int kPromotedSteps = 0;
  static constexpr int kUnroll = 4;  // steps of 32 bytes whose fragments may be in flight together
  struct A {
    uint32_t r[4];
    // Takes a word of ldmatrix.
    __device__ __forceinline__ void set(int i, uint32_t word) { r[i] = word; }
    // After the four words of all lanes.
    __device__ __forceinline__ void complete() {}
  };
  struct B {
    uint32_t r[2];
  };
  static __device__ __forceinline__ float value(Sum sum) { return sum; }
  static __device__ __forceinline__ A operand_a(const uint32_t (&w)[4]) { return {{w[0], w[1], w[2], w[3]}}; }
  static __device__ __forceinline__ B operand_b(uint32_t w0, uint32_t w1) { return {{w0, w1}}; }
};

struct MmaBf16 : RawOperands<__nv_bfloat16> {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  // fp16 numbers, and the exponents of the powers of two that the lane's two rows, or columns, are times.
  struct A {
    uint32_t r[4], exponent[2];
    __device__ __forceinline__ void set(int i, uint32_t word) { r[i] = word; }
    __device__ __forceinline__ void complete() {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < 2) exponent[i] = quad_exponent(r[i], r[i + 2]);
        r[i] = bf16_as_fp16(r[i], exponent[i % 2]);
      }
    }
  };
  struct B {
    uint32_t r[2], exponent[2];
  };
  static __device__ __forceinline__ A operand_a(const uint32_t (&w)[4]) {
    A a{{w[0], w[1], w[2], w[3]}, {}};
    a.complete();
    return a;
  }
  static __device__ __forceinline__ B operand_b(uint32_t w0, uint32_t w1) {
    const uint32_t own = quad_exponent(w0, w1);
    B b{{bf16_as_fp16(w0, own), bf16_as_fp16(w1, own)}, {}};
#pragma unroll
    for (int n = 0; n < 2; ++n) b.exponent[n] = __shfl_sync(0xFFFFFFFFu, own, 8 * (threadIdx.x % 4) + 4 * n);
    return b;
  }
  static __device__ __forceinline__ void multiply(Accumulator& c, const A& a, const B& b) {
    constexpr float kMost = 0x1p127f;  // an infinite scale would make NaN of a zero
    Accumulator sum = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_fp16_by_halves(sum, a.r, b.r);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = with_exponent(a.exponent[i / 2]) * with_exponent(b.exponent[i % 2]);
      c[i] = fmaf(sum[i], fminf(scale, kMost), c[i]);
    }
  }
#else
  static __device__ __forceinline__ void multiply(Accumulator& c, const A& a, const B& b) {
    LATE_INTERACTION_MMA_SYNC("m16n8k16.row.col.f32.bf16.bf16.f32", c, a.r, b.r);
  }
#endif
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
    if constexpr (kBeforeSm80) return mma_fp16_by_halves(c, a.r, b.r);
    LATE_INTERACTION_MMA_SYNC("m16n8k16.row.col.f32.f16.f16.f32", c, a.r, b.r);
  }
};

// fp32 elements as two fp16 numbers (forward/operands/fp16_scaled.cu), in three products for each one.
struct Mma3xFp16 : MmaFp16 {
  static constexpr int kTerms = 2, kPromotedSteps = 2;
};

// Codes of -128 to 127. A sum of up to 256 products of them is exact, and at most 2^22: it begins as the
// bits of 1.5 * 2^23 in fp32, of which it then is the last ones.
struct MmaInt8 : RawOperands<int8_t> {
  using Sum = int32_t;
  static constexpr Sum kZero = 0x4B400000;
  static __device__ __forceinline__ float value(Sum sum) {
    return __int_as_float(sum) - __int_as_float(kZero);
  }
  static __device__ __forceinline__ void multiply(Sum (&c)[4], const A& a, const B& b) {
    mma_m16n8k32_s8(c, a.r, b.r[0], b.r[1], c);
  }
};

// GPUs that multiply fp8 by mma.sync. Others compile it to conversions, if at all.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
inline constexpr bool kNativeFp8 = true;
#else
inline constexpr bool kNativeFp8 = false;
#endif

// GPUs that widen two codes of fp8 to fp16 in one instruction.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool kWidensFp8 = true;
#else
inline constexpr bool kWidensFp8 = false;
#endif

// Widens the four codes of a word to fp16, exactly but for a power of two: the even and the odd bytes, or
// with one instruction (kWidensFp8) the lower and the upper two.
//
// An e4m3 code shifted to where fp16 has its exponent and mantissa is its number times 2^-8, also where it is
// subnormal. Its NaN, 1.875 of that, would become a number: it alone is infinite times 1.07 * 2^15, and
// becomes NaN times zero.
__device__ __forceinline__ void widen_codes(uint32_t word, uint32_t& even, uint32_t& odd, __nv_fp8_e4m3) {
  if constexpr (kWidensFp8) {
    asm("{\n.reg .b16 lower, upper;\n"
        "mov.b32 {lower, upper}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lower;\n"
        "cvt.rn.f16x2.e4m3x2 %1, upper;\n}\n"
        : "=r"(even), "=r"(odd)
        : "r"(word));
    return;
  }
  constexpr uint32_t kMagnitude = 0x3F803F80, kSign = 0x80008000, kOverflow = 0x78487848;
  even = (word << 7 & kMagnitude) | (word << 8 & kSign);
  odd = (word >> 1 & kMagnitude) | (word & kSign);
  for (uint32_t* x : {&even, &odd}) {
    asm("{\n.reg .b32 large;\n"
        "mul.rn.f16x2 large, %0, %1;\n"
        "fma.rn.f16x2 %0, large, %2, %0;\n}\n"
        : "+r"(*x)
        : "r"(kOverflow), "r"(0));
  }
}

// e5m2 is the upper byte of fp16.
__device__ __forceinline__ void widen_codes(uint32_t word, uint32_t& even, uint32_t& odd, __nv_fp8_e5m2) {
  even = __byte_perm(word, 0, 0x2404);
  odd = word & 0xFF00FF00;
}

__device__ __forceinline__ void mma_m16n8k32(Accumulator& c, const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             __nv_fp8_e4m3) {
  LATE_INTERACTION_MMA_SYNC("m16n8k32.row.col.f32.e4m3.e4m3.f32", c, a, b);
}
__device__ __forceinline__ void mma_m16n8k32(Accumulator& c, const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             __nv_fp8_e5m2) {
  LATE_INTERACTION_MMA_SYNC("m16n8k32.row.col.f32.e5m2.e5m2.f32", c, a, b);
}

// Codes of fp8, as they are or widened to fp16: then they take the operands of twice the elements.
template <class E>
struct MmaFp8 {
  using Element = E;
  using Sum = float;
  static constexpr Sum kZero = 0.0f;
  static constexpr int kTerms = 1;
  static constexpr bool kShifted = !kNativeFp8 && !kWidensFp8 && std::is_same_v<E, __nv_fp8_e4m3>;
  static constexpr float kScale = kShifted ? 65536.0f : 1.0f;  // 2^8 for either operand
  // Tensor cores sum fp8 products with fewer bits than fp16 products.
  static constexpr int kPromotedSteps = kNativeFp8 ? 4 : 0;
  struct A {
    MmaFp16::A even, odd;  // even: all, where they stay as they are
    __device__ __forceinline__ void set(int i, uint32_t word) {
      if constexpr (kNativeFp8) {
        even.r[i] = word;
      } else {
        widen_codes(word, even.r[i], odd.r[i], E{});
      }
    }
    __device__ __forceinline__ void complete() {}
  };
  struct B {
    MmaFp16::B even, odd;
  };
  static __device__ __forceinline__ A operand_a(const uint32_t (&w)[4]) {
    A a;
#pragma unroll
    for (int i = 0; i < 4; ++i) a.set(i, w[i]);
    return a;
  }
  static __device__ __forceinline__ B operand_b(uint32_t w0, uint32_t w1) {
    B b;
    if constexpr (kNativeFp8) {
      b.even = {{w0, w1}};
    } else {
      widen_codes(w0, b.even.r[0], b.odd.r[0], E{});
      widen_codes(w1, b.even.r[1], b.odd.r[1], E{});
    }
    return b;
  }
  static __device__ __forceinline__ float value(Sum sum) { return sum; }
  static __device__ __forceinline__ void multiply(Accumulator& c, const A& a, const B& b) {
    if constexpr (kNativeFp8) {
      mma_m16n8k32(c, a.even.r, b.even.r, E{});
    } else {
      MmaFp16::multiply(c, a.even, b.even);
      MmaFp16::multiply(c, a.odd, b.odd);
    }
  }
};

__device__ __forceinline__ uint32_t cvt_rna_tf32(uint32_t x) {
  if constexpr (kBeforeSm80) return x;  // products in fp32
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(__uint_as_float(x)));
  return r;
}

__device__ __forceinline__ void mma_m16n8k8_tf32(Accumulator& c, const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
  if constexpr (kBeforeSm80) {
    return mma_by_shuffles(c, a, b, [](float sum, uint32_t x, uint32_t y) {
      return fmaf(__uint_as_float(x), __uint_as_float(y), sum);
    });
  }
  LATE_INTERACTION_MMA_SYNC("m16n8k8.row.col.f32.tf32.tf32.f32", c, a, b);
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

// fp32 inputs by multiply-adds of the plain fp32 units (primitives/mma_chunks.cuh), which round each sum
// once.
struct Ffma {
  using Element = float;
};

}  // namespace late_interaction::ptx
