"""Writes csrc/cuda/ptx/wgmma_shapes.inc.h: one wgmma wrapper for each accumulator width the kernels use.

The instruction names every accumulator register in its text, so the text has to be written out once a width.

    python tools/generate_wgmma.py
"""

from pathlib import Path

WIDTHS = (32, 64, 80, 96, 104, 128, 152, 176)
TRANSPOSED_WIDTHS = (256,)
TARGET = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "ptx" / "wgmma_shapes.inc.h"

HEADER = """\
// Written by tools/generate_wgmma.py; see wgmma.cuh.
// clang-format off
"""

# The last two digits of two-byte types say whether either matrix is transposed; the ones before are signs.
WRAPPER = """
template <>
struct WgmmaShape<{n}> {{
  template <class Type>
  static __device__ __forceinline__ void issue(float (&c)[{regs}], uint64_t a, uint64_t b, int accumulate) {{
    if constexpr (std::is_same_v<Type, WgmmaBf16>) {{
      LATE_INTERACTION_WGMMA_{n}("k16.f32.bf16.bf16", ", 1, 1, 0, 0");
    }} else if constexpr (std::is_same_v<Type, WgmmaFp16>) {{
      LATE_INTERACTION_WGMMA_{n}("k16.f32.f16.f16", ", 1, 1, 0, 0");
    }} else if constexpr (std::is_same_v<Type, WgmmaTf32>) {{
      LATE_INTERACTION_WGMMA_{n}("k8.f32.tf32.tf32", ", 1, 1");
    }}
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
      LATE_INTERACTION_WGMMA_{n}("k16.f32.bf16.bf16", ", 1, 1, 1, 1");
    }} else if constexpr (std::is_same_v<Type, WgmmaFp16>) {{
      LATE_INTERACTION_WGMMA_{n}("k16.f32.f16.f16", ", 1, 1, 1, 1");
    }}
  }}
}};
#undef LATE_INTERACTION_WGMMA_{n}
"""


def wrapper(n: int, template: str = WRAPPER) -> str:
    regs = n // 2
    registers = ", ".join(f"%{i}" for i in range(regs))
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(regs))
    macro = (
        f"#define LATE_INTERACTION_WGMMA_{n}(TYPES, SIGNS) \\\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{regs + 2}, 0;\\n" \\\n'
        f'               "wgmma.mma_async.sync.aligned.m64n{n}" TYPES " " \\\n'
        f'               "{{{registers}}}, " \\\n'
        f'               "%{regs}, %{regs + 1}, p" SIGNS ";\\n}}\\n" \\\n'
        f"               : {outputs} \\\n"
        f'               : "l"(a), "l"(b), "r"(accumulate))\n'
    )
    return macro + template.format(n=n, regs=regs)


if __name__ == "__main__":
    transposed = [wrapper(n, TRANSPOSED_WRAPPER) for n in TRANSPOSED_WIDTHS]
    TARGET.write_text(HEADER + "\n".join([*map(wrapper, WIDTHS), *transposed]))
