// Written by tools/generate_wgmma.py; see wgmma.cuh.
// clang-format off
#define LATE_INTERACTION_WGMMA_32(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n32" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
               "%16, %17, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_WGMMA_SHAPE(32);
#define LATE_INTERACTION_WGMMA_64(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n64" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
               "%32, %33, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_WGMMA_SHAPE(64);
#define LATE_INTERACTION_WGMMA_80(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n80" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, " \
               "%40, %41, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_WGMMA_SHAPE(80);
#define LATE_INTERACTION_WGMMA_96(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n96" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, " \
               "%48, %49, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_WGMMA_SHAPE(96);
#define LATE_INTERACTION_WGMMA_104(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %54, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n104" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51}, " \
               "%52, %53, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_WGMMA_SHAPE(104);
#define LATE_INTERACTION_WGMMA_112(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n112" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55}, " \
               "%56, %57, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_WGMMA_SHAPE(112);
#define LATE_INTERACTION_WGMMA_128(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n128" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "%64, %65, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_WGMMA_SHAPE(128);
#define LATE_INTERACTION_WGMMA_144(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %74, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n144" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71}, " \
               "%72, %73, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]), REGISTER(c[64]), REGISTER(c[65]), REGISTER(c[66]), REGISTER(c[67]), REGISTER(c[68]), REGISTER(c[69]), REGISTER(c[70]), REGISTER(c[71]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_WGMMA_SHAPE(144);
#define LATE_INTERACTION_WGMMA_152(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %78, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n152" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75}, " \
               "%76, %77, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]), REGISTER(c[64]), REGISTER(c[65]), REGISTER(c[66]), REGISTER(c[67]), REGISTER(c[68]), REGISTER(c[69]), REGISTER(c[70]), REGISTER(c[71]), REGISTER(c[72]), REGISTER(c[73]), REGISTER(c[74]), REGISTER(c[75]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_WGMMA_SHAPE(152);
#define LATE_INTERACTION_WGMMA_160(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n160" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}, " \
               "%80, %81, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]), REGISTER(c[64]), REGISTER(c[65]), REGISTER(c[66]), REGISTER(c[67]), REGISTER(c[68]), REGISTER(c[69]), REGISTER(c[70]), REGISTER(c[71]), REGISTER(c[72]), REGISTER(c[73]), REGISTER(c[74]), REGISTER(c[75]), REGISTER(c[76]), REGISTER(c[77]), REGISTER(c[78]), REGISTER(c[79]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_WGMMA_SHAPE(160);
#define LATE_INTERACTION_WGMMA_256(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n256" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
               "%128, %129, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]), REGISTER(c[64]), REGISTER(c[65]), REGISTER(c[66]), REGISTER(c[67]), REGISTER(c[68]), REGISTER(c[69]), REGISTER(c[70]), REGISTER(c[71]), REGISTER(c[72]), REGISTER(c[73]), REGISTER(c[74]), REGISTER(c[75]), REGISTER(c[76]), REGISTER(c[77]), REGISTER(c[78]), REGISTER(c[79]), REGISTER(c[80]), REGISTER(c[81]), REGISTER(c[82]), REGISTER(c[83]), REGISTER(c[84]), REGISTER(c[85]), REGISTER(c[86]), REGISTER(c[87]), REGISTER(c[88]), REGISTER(c[89]), REGISTER(c[90]), REGISTER(c[91]), REGISTER(c[92]), REGISTER(c[93]), REGISTER(c[94]), REGISTER(c[95]), REGISTER(c[96]), REGISTER(c[97]), REGISTER(c[98]), REGISTER(c[99]), REGISTER(c[100]), REGISTER(c[101]), REGISTER(c[102]), REGISTER(c[103]), REGISTER(c[104]), REGISTER(c[105]), REGISTER(c[106]), REGISTER(c[107]), REGISTER(c[108]), REGISTER(c[109]), REGISTER(c[110]), REGISTER(c[111]), REGISTER(c[112]), REGISTER(c[113]), REGISTER(c[114]), REGISTER(c[115]), REGISTER(c[116]), REGISTER(c[117]), REGISTER(c[118]), REGISTER(c[119]), REGISTER(c[120]), REGISTER(c[121]), REGISTER(c[122]), REGISTER(c[123]), REGISTER(c[124]), REGISTER(c[125]), REGISTER(c[126]), REGISTER(c[127]) \
               : "l"(a), "l"(b), "r"(accumulate))
LATE_INTERACTION_TRANSPOSED_WGMMA_SHAPE(256);
#define LATE_INTERACTION_REGISTER_WGMMA_32(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n32" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
               "{%16, %17, %18, %19}, %20, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
LATE_INTERACTION_REGISTER_WGMMA_SHAPES(32);
#define LATE_INTERACTION_REGISTER_WGMMA_64(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n64" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
               "{%32, %33, %34, %35}, %36, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
LATE_INTERACTION_REGISTER_WGMMA_SHAPES(64);
#define LATE_INTERACTION_REGISTER_WGMMA_128(TYPES, SIGNS, REGISTER) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n128" TYPES " " \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "{%64, %65, %66, %67}, %68, p" SIGNS ";\n}\n" \
               : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3]), REGISTER(c[4]), REGISTER(c[5]), REGISTER(c[6]), REGISTER(c[7]), REGISTER(c[8]), REGISTER(c[9]), REGISTER(c[10]), REGISTER(c[11]), REGISTER(c[12]), REGISTER(c[13]), REGISTER(c[14]), REGISTER(c[15]), REGISTER(c[16]), REGISTER(c[17]), REGISTER(c[18]), REGISTER(c[19]), REGISTER(c[20]), REGISTER(c[21]), REGISTER(c[22]), REGISTER(c[23]), REGISTER(c[24]), REGISTER(c[25]), REGISTER(c[26]), REGISTER(c[27]), REGISTER(c[28]), REGISTER(c[29]), REGISTER(c[30]), REGISTER(c[31]), REGISTER(c[32]), REGISTER(c[33]), REGISTER(c[34]), REGISTER(c[35]), REGISTER(c[36]), REGISTER(c[37]), REGISTER(c[38]), REGISTER(c[39]), REGISTER(c[40]), REGISTER(c[41]), REGISTER(c[42]), REGISTER(c[43]), REGISTER(c[44]), REGISTER(c[45]), REGISTER(c[46]), REGISTER(c[47]), REGISTER(c[48]), REGISTER(c[49]), REGISTER(c[50]), REGISTER(c[51]), REGISTER(c[52]), REGISTER(c[53]), REGISTER(c[54]), REGISTER(c[55]), REGISTER(c[56]), REGISTER(c[57]), REGISTER(c[58]), REGISTER(c[59]), REGISTER(c[60]), REGISTER(c[61]), REGISTER(c[62]), REGISTER(c[63]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
LATE_INTERACTION_REGISTER_WGMMA_SHAPES(128);
