// Written by tools/generate_wgmma.py; see wgmma.cuh.
// clang-format off
#define LATE_INTERACTION_WGMMA_32(TYPES, SIGNS) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n32" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
               "%16, %17, p" SIGNS ";\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<32> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[16], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_32("k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_32("k16.f32.f16.f16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_32("k8.f32.tf32.tf32", ", 1, 1");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_32

#define LATE_INTERACTION_WGMMA_64(TYPES, SIGNS) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n64" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
               "%32, %33, p" SIGNS ";\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<64> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[32], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_64("k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_64("k16.f32.f16.f16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_64("k8.f32.tf32.tf32", ", 1, 1");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_64

#define LATE_INTERACTION_WGMMA_80(TYPES, SIGNS) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n80" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, " \
               "%40, %41, p" SIGNS ";\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<80> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[40], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_80("k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_80("k16.f32.f16.f16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_80("k8.f32.tf32.tf32", ", 1, 1");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_80

#define LATE_INTERACTION_WGMMA_96(TYPES, SIGNS) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n96" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, " \
               "%48, %49, p" SIGNS ";\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<96> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[48], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_96("k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_96("k16.f32.f16.f16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_96("k8.f32.tf32.tf32", ", 1, 1");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_96

#define LATE_INTERACTION_WGMMA_104(TYPES, SIGNS) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %54, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n104" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51}, " \
               "%52, %53, p" SIGNS ";\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<104> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[52], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_104("k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_104("k16.f32.f16.f16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_104("k8.f32.tf32.tf32", ", 1, 1");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_104

#define LATE_INTERACTION_WGMMA_128(TYPES, SIGNS) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n128" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "%64, %65, p" SIGNS ";\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<128> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_128("k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_128("k16.f32.f16.f16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_128("k8.f32.tf32.tf32", ", 1, 1");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_128

#define LATE_INTERACTION_WGMMA_152(TYPES, SIGNS) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %78, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n152" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75}, " \
               "%76, %77, p" SIGNS ";\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]), "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71]), "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<152> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[76], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_152("k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_152("k16.f32.f16.f16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_152("k8.f32.tf32.tf32", ", 1, 1");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_152

#define LATE_INTERACTION_WGMMA_176(TYPES, SIGNS) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %90, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n176" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87}, " \
               "%88, %89, p" SIGNS ";\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]), "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71]), "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct WgmmaShape<176> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[88], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_176("k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_176("k16.f32.f16.f16", ", 1, 1, 0, 0");
    } else if constexpr (std::is_same_v<Type, WgmmaTf32>) {
      LATE_INTERACTION_WGMMA_176("k8.f32.tf32.tf32", ", 1, 1");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_176

#define LATE_INTERACTION_WGMMA_256(TYPES, SIGNS) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n256" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
               "%128, %129, p" SIGNS ";\n}\n" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]), "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71]), "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]), "+f"(c[89]), "+f"(c[90]), "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95]), "+f"(c[96]), "+f"(c[97]), "+f"(c[98]), "+f"(c[99]), "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103]), "+f"(c[104]), "+f"(c[105]), "+f"(c[106]), "+f"(c[107]), "+f"(c[108]), "+f"(c[109]), "+f"(c[110]), "+f"(c[111]), "+f"(c[112]), "+f"(c[113]), "+f"(c[114]), "+f"(c[115]), "+f"(c[116]), "+f"(c[117]), "+f"(c[118]), "+f"(c[119]), "+f"(c[120]), "+f"(c[121]), "+f"(c[122]), "+f"(c[123]), "+f"(c[124]), "+f"(c[125]), "+f"(c[126]), "+f"(c[127]) \
               : "l"(a), "l"(b), "r"(accumulate))

template <>
struct TransposedWgmmaShape<256> {
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[128], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {
      LATE_INTERACTION_WGMMA_256("k16.f32.bf16.bf16", ", 1, 1, 1, 1");
    } else if constexpr (std::is_same_v<Type, WgmmaFp16>) {
      LATE_INTERACTION_WGMMA_256("k16.f32.f16.f16", ", 1, 1, 1, 1");
    }
  }
};
#undef LATE_INTERACTION_WGMMA_256
