"""Writes csrc/cuda/ptx/wgmma_shapes.inc.h: one wgmma wrapper for each accumulator width the kernels use.

The instruction names every accumulator register in its text, so the text has to be written out once a width.

    python tools/generate_wgmma.py
"""

from pathlib import Path

WIDTHS = (32, 64, 80, 96, 104, 112, 128, 144, 152, 160)
TRANSPOSED_WIDTHS = (256,)
REGISTER_WIDTHS = (32, 64, 128)
REGISTER_K_MAJOR_WIDTHS = (64, 128)
TARGET = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "ptx" / "wgmma_shapes.inc.h"

HEADER = """\
// Written by tools/generate_wgmma.py; see wgmma.cuh.
// clang-format off
"""

# With two-byte types the last two digits say whether either matrix is transposed; the ones before are signs.
FLOATS = """
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {{
      LATE_INTERACTION_WGMMA_{n}("k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");
    }} else if constexpr (std::is_same_v<Type, WgmmaFp16>) {{
      LATE_INTERACTION_WGMMA_{n}("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
    }} else if constexpr (std::is_same_v<Type, WgmmaTf32>) {{
      LATE_INTERACTION_WGMMA_{n}("k8.f32.tf32.tf32", ", 1, 1", "+f");
    }} else if constexpr (std::is_same_v<Type, WgmmaE4m3>) {{
      LATE_INTERACTION_WGMMA_{n}("k32.f32.e4m3.e4m3", ", 1, 1", "+f");
    }} else if constexpr (std::is_same_v<Type, WgmmaE5m2>) {{
      LATE_INTERACTION_WGMMA_{n}("k32.f32.e5m2.e5m2", ", 1, 1", "+f");
    }}"""
# Integers have widths of whole 16.
INTEGERS = """ else if constexpr (std::is_same_v<Type, WgmmaInt8>) {{
      LATE_INTERACTION_WGMMA_{n}("k32.s32.s8.s8", "", "+r");
    }}"""

WRAPPER = """
template <>
struct WgmmaShape<{n}> {{
  template <class Type>
  static __device__ __forceinline__ void issue(typename Type::Accumulator (&c)[{regs}], uint64_t a,
                                               uint64_t b, int accumulate) {{
{types}
  }}
}};
#undef LATE_INTERACTION_WGMMA_{n}
"""


TRANSPOSED_WRAPPER = """
template <>
struct TransposedWgmmaShape<{n}> {{
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[{regs}], uint64_t a, uint64_t b, int accumulate) {{
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {{
      LATE_INTERACTION_WGMMA_{n}("k16.f32.bf16.bf16", ", 1, 1, 1, 1", "+f");
    }} else if constexpr (std::is_same_v<Type, WgmmaFp16>) {{
      LATE_INTERACTION_WGMMA_{n}("k16.f32.f16.f16", ", 1, 1, 1, 1", "+f");
    }}
  }}
}};
#undef LATE_INTERACTION_WGMMA_{n}
"""

# Operand A lies in registers; the last digit says that B is transposed.
REGISTER_WRAPPER = """
template <>
struct {name}<{n}> {{
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[{regs}], const uint32_t (&a)[4], uint64_t b,
                                               int accumulate) {{
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {{
      LATE_INTERACTION_WGMMA_{n}("k16.f32.bf16.bf16");
    }} else if constexpr (std::is_same_v<Type, WgmmaFp16>) {{
      LATE_INTERACTION_WGMMA_{n}("k16.f32.f16.f16");
    }}
  }}
}};
#undef LATE_INTERACTION_WGMMA_{n}
"""


def register_wrapper(n: int, name: str = "RegisterWgmmaShape", transposed: int = 1) -> str:
    regs = n // 2
    registers = ", ".join(f"%{i}" for i in range(regs))
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(regs))
    words = ", ".join(f"%{regs + i}" for i in range(4))
    macro = (
        f"#define LATE_INTERACTION_WGMMA_{n}(TYPES) \\\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{regs + 5}, 0;\\n" \\\n'
        f'               "wgmma.mma_async.sync.aligned.m64n{n}" TYPES " " \\\n'
        f'               "{{{registers}}}, " \\\n'
        f'               "{{{words}}}, %{regs + 4}, p, 1, 1, {transposed};\\n}}\\n" \\\n'
        f"               : {outputs} \\\n"
        f'               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))\n'
    )
    return macro + REGISTER_WRAPPER.format(n=n, regs=regs, name=name)


def wrapper(n: int, template: str = WRAPPER) -> str:
    regs = n // 2
    registers = ", ".join(f"%{i}" for i in range(regs))
    outputs = ", ".join(f"REGISTER(c[{i}])" for i in range(regs))
    macro = (
        f"#define LATE_INTERACTION_WGMMA_{n}(TYPES, SIGNS, REGISTER) \\\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{regs + 2}, 0;\\n" \\\n'
        f'               "wgmma.mma_async.sync.aligned.m64n{n}" TYPES " " \\\n'
        f'               "{{{registers}}}, " \\\n'
        f'               "%{regs}, %{regs + 1}, p" SIGNS ";\\n}}\\n" \\\n'
        f"               : {outputs} \\\n"
        f'               : "l"(a), "l"(b), "r"(accumulate))\n'
    )
    types = FLOATS + (INTEGERS if n % 16 == 0 else "")
    return macro + template.format(n=n, regs=regs, types=types.format(n=n).lstrip("\n"))


if __name__ == "__main__":
    transposed = [wrapper(n, TRANSPOSED_WRAPPER) for n in TRANSPOSED_WIDTHS]
    register_a = map(register_wrapper, REGISTER_WIDTHS)
    k_major = [register_wrapper(n, "RegisterKMajorWgmmaShape", 0) for n in REGISTER_K_MAJOR_WIDTHS]
    TARGET.write_text(HEADER + "\n".join([*map(wrapper, WIDTHS), *transposed, *register_a, *k_major]))
