// Written by tools/generate_wgmma.py; see wgmma.cuh.
// clang-format off
#define LATE_INTERACTION_WGMMA_32(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n32" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
               "%16, %17, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<32> {
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[16], uint64_t a,
                                               uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_32("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_32("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_32("k8.f32.tf32.tf32", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {
      LATE_INTERACTION_WGMMA_32("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {
      LATE_INTERACTION_WGMMA_32("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaInt8>) {
      LATE_INTERACTION_WGMMA_32("k32.s32.s8.s8", "", "+r");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_32

#define LATE_INTERACTION_WGMMA_64(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n64" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
               "%32, %33, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<64> {
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[32], uint64_t a,
                                               uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_64("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_64("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_64("k8.f32.tf32.tf32", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {
      LATE_INTERACTION_WGMMA_64("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {
      LATE_INTERACTION_WGMMA_64("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaInt8>) {
      LATE_INTERACTION_WGMMA_64("k32.s32.s8.s8", "", "+r");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_64

#define LATE_INTERACTION_WGMMA_80(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n80" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, " \
               "%40, %41, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<80> {
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[40], uint64_t a,
                                               uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_80("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_80("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_80("k8.f32.tf32.tf32", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {
      LATE_INTERACTION_WGMMA_80("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {
      LATE_INTERACTION_WGMMA_80("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaInt8>) {
      LATE_INTERACTION_WGMMA_80("k32.s32.s8.s8", "", "+r");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_80

#define LATE_INTERACTION_WGMMA_96(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n96" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, " \
               "%48, %49, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<96> {
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[48], uint64_t a,
                                               uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_96("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_96("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_96("k8.f32.tf32.tf32", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {
      LATE_INTERACTION_WGMMA_96("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {
      LATE_INTERACTION_WGMMA_96("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaInt8>) {
      LATE_INTERACTION_WGMMA_96("k32.s32.s8.s8", "", "+r");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_96

#define LATE_INTERACTION_WGMMA_104(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %54, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n104" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51}, " \
               "%52, %53, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<104> {
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[52], uint64_t a,
                                               uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_104("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_104("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_104("k8.f32.tf32.tf32", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {
      LATE_INTERACTION_WGMMA_104("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {
      LATE_INTERACTION_WGMMA_104("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_104

#define LATE_INTERACTION_WGMMA_112(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n112" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55}, " \
               "%56, %57, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<112> {
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[56], uint64_t a,
                                               uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_112("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_112("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_112("k8.f32.tf32.tf32", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {
      LATE_INTERACTION_WGMMA_112("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {
      LATE_INTERACTION_WGMMA_112("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaInt8>) {
      LATE_INTERACTION_WGMMA_112("k32.s32.s8.s8", "", "+r");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_112

#define LATE_INTERACTION_WGMMA_128(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n128" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "%64, %65, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<128> {
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[64], uint64_t a,
                                               uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_128("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_128("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_128("k8.f32.tf32.tf32", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {
      LATE_INTERACTION_WGMMA_128("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {
      LATE_INTERACTION_WGMMA_128("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaInt8>) {
      LATE_INTERACTION_WGMMA_128("k32.s32.s8.s8", "", "+r");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_128

#define LATE_INTERACTION_WGMMA_144(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %74, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n144" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71}, " \
               "%72, %73, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]), REGISTER(c[64]), REGISTER(c[65]), REGISTER(c[66]), REGISTER(c[67]), REGISTER(c[68]), REGISTER(c[69]), REGISTER(c[70]), REGISTER(c[71]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<144> {
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[72], uint64_t a,
                                               uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_144("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_144("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_144("k8.f32.tf32.tf32", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {
      LATE_INTERACTION_WGMMA_144("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {
      LATE_INTERACTION_WGMMA_144("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaInt8>) {
      LATE_INTERACTION_WGMMA_144("k32.s32.s8.s8", "", "+r");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_144

#define LATE_INTERACTION_WGMMA_152(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %78, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n152" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75}, " \
               "%76, %77, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]), REGISTER(c[64]), REGISTER(c[65]), REGISTER(c[66]), REGISTER(c[67]), REGISTER(c[68]), REGISTER(c[69]), REGISTER(c[70]), REGISTER(c[71]), REGISTER(c[72]), REGISTER(c[73]), REGISTER(c[74]), REGISTER(c[75]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<152> {
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[76], uint64_t a,
                                               uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_152("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_152("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_152("k8.f32.tf32.tf32", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {
      LATE_INTERACTION_WGMMA_152("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {
      LATE_INTERACTION_WGMMA_152("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_152

#define LATE_INTERACTION_WGMMA_160(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n160" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}, " \
               "%80, %81, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]), REGISTER(c[64]), REGISTER(c[65]), REGISTER(c[66]), REGISTER(c[67]), REGISTER(c[68]), REGISTER(c[69]), REGISTER(c[70]), REGISTER(c[71]), REGISTER(c[72]), REGISTER(c[73]), REGISTER(c[74]), REGISTER(c[75]), REGISTER(c[76]), REGISTER(c[77]), REGISTER(c[78]), REGISTER(c[79]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<160> {
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[80], uint64_t a,
                                               uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_160("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_160("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_160("k8.f32.tf32.tf32", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {
      LATE_INTERACTION_WGMMA_160("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {
      LATE_INTERACTION_WGMMA_160("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaInt8>) {
      LATE_INTERACTION_WGMMA_160("k32.s32.s8.s8", "", "+r");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_160

#define LATE_INTERACTION_WGMMA_256(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n256" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
               "%128, %129, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]), REGISTER(c[64]), REGISTER(c[65]), REGISTER(c[66]), REGISTER(c[67]), REGISTER(c[68]), REGISTER(c[69]), REGISTER(c[70]), REGISTER(c[71]), REGISTER(c[72]), REGISTER(c[73]), REGISTER(c[74]), REGISTER(c[75]), REGISTER(c[76]), REGISTER(c[77]), REGISTER(c[78]), REGISTER(c[79]), REGISTER(c[80]), REGISTER(c[81]), REGISTER(c[82]), REGISTER(c[83]), REGISTER(c[84]), REGISTER(c[85]), REGISTER(c[86]), REGISTER(c[87]), REGISTER(c[88]), REGISTER(c[89]), REGISTER(c[90]), REGISTER(c[91]), REGISTER(c[92]), REGISTER(c[93]), REGISTER(c[94]), REGISTER(c[95]), REGISTER(c[96]), REGISTER(c[97]), REGISTER(c[98]), REGISTER(c[99]), REGISTER(c[100]), REGISTER(c[101]), REGISTER(c[102]), REGISTER(c[103]), REGISTER(c[104]), REGISTER(c[105]), REGISTER(c[106]), REGISTER(c[107]), REGISTER(c[108]), REGISTER(c[109]), REGISTER(c[110]), REGISTER(c[111]), REGISTER(c[112]), REGISTER(c[113]), REGISTER(c[114]), REGISTER(c[115]), REGISTER(c[116]), REGISTER(c[117]), REGISTER(c[118]), REGISTER(c[119]), REGISTER(c[120]), REGISTER(c[121]), REGISTER(c[122]), REGISTER(c[123]), REGISTER(c[124]), REGISTER(c[125]), REGISTER(c[126]), REGISTER(c[127]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct TransposedWgmmaShape<256> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[128], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_256("k16.f32.bf16.bf16", ", 1, 1, 1, 1", "+f");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_256("k16.f32.f16.f16", ", 1, 1, 1, 1", "+f");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_256

#define LATE_INTERACTION_WGMMA_32(TYPES) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n32" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
               "{%16, %17, %18, %19}, %20, p, 1, 1, 1;\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

template <>
struct RegisterWgmmaShape<32> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[16], const uint32_t (&a)[4], uint64_t b,
                                               int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_32("k16.f32.bf16.bf16");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_32("k16.f32.f16.f16");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_32

#define LATE_INTERACTION_WGMMA_64(TYPES) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n64" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
               "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

template <>
struct RegisterWgmmaShape<64> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[32], const uint32_t (&a)[4], uint64_t b,
                                               int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_64("k16.f32.bf16.bf16");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_64("k16.f32.f16.f16");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_64

#define LATE_INTERACTION_WGMMA_128(TYPES) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n128" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

template <>
struct RegisterWgmmaShape<128> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[64], const uint32_t (&a)[4], uint64_t b,
                                               int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_128("k16.f32.bf16.bf16");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_128("k16.f32.f16.f16");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_128

#define LATE_INTERACTION_WGMMA_64(TYPES) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n64" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
               "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

template <>
struct RegisterKMajorWgmmaShape<64> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[32], const uint32_t (&a)[4], uint64_t b,
                                               int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_64("k16.f32.bf16.bf16");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_64("k16.f32.f16.f16");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_64

#define LATE_INTERACTION_WGMMA_128(TYPES) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n128" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

template <>
struct RegisterKMajorWgmmaShape<128> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[64], const uint32_t (&a)[4], uint64_t b,
                                               int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_128("k16.f32.bf16.bf16");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_128("k16.f32.f16.f16");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_128
