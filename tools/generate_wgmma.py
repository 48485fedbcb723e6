"""Writes csrc/cuda/ptx/wgmma_shapes.inc.h: the text of wgmma for each accumulator width the kernels use.

The instruction names every accumulator register in its text, so the text has to be written out once a width.

    python tools/generate_wgmma.py
"""

from pathlib import Path

WIDTHS = (32, 64, 80, 96, 104, 112, 128, 144, 152, 160)
TRANSPOSED_WIDTHS = (256,)
REGISTER_WIDTHS = (32, 64, 128)
TARGET = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "ptx" / "wgmma_shapes.inc.h"

HEADER = """\
// Written by tools/generate_wgmma.py; see wgmma.cuh.
// clang-format off
"""

DESCRIPTOR_A, REGISTER_A = ['"l"(a)'], [f'"r"(a[{i}])' for i in range(4)]


def instruction(n: int, name: str, a: list[str]) -> str:
    """The macro of one width, whose operand A takes the asm operands `a`."""
    regs, b = n // 2, n // 2 + len(a)
    words = ", ".join(f"%{i}" for i in range(regs, b))
    return (
        f"#define LATE_INTERACTION_{name}_{n}(TYPES, SIGNS, REGISTER) \\\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n" \\\n'
        f'               "wgmma.mma_async.sync.aligned.m64n{n}" TYPES " " \\\n'
        f'               "{{{", ".join(f"%{i}" for i in range(regs))}}}, " \\\n'
        f'               "{words if len(a) == 1 else f"{{{words}}}"}, %{b}, p" SIGNS ";\\n}}\\n" \\\n'
        f"               : {', '.join(f'REGISTER(c[{i}])' for i in range(regs))} \\\n"
        f'               : {", ".join(a)}, "l"(b), "r"(accumulate))\n'
    )


def shape(n: int, name: str) -> str:
    return f"LATE_INTERACTION_{name}({n});\n"


if __name__ == "__main__":
    lines = [HEADER]
    for n in WIDTHS:
        lines += [instruction(n, "WGMMA", DESCRIPTOR_A), shape(n, "WGMMA_SHAPE")]
    for n in TRANSPOSED_WIDTHS:
        lines += [instruction(n, "WGMMA", DESCRIPTOR_A), shape(n, "TRANSPOSED_WGMMA_SHAPE")]
    for n in REGISTER_WIDTHS:
        lines += [instruction(n, "REGISTER_WGMMA", REGISTER_A), shape(n, "REGISTER_WGMMA_SHAPES")]
    TARGET.write_text("".join(lines))
