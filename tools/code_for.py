"""Tells for which of the architectures of a build a CUDA source has kernels that a plan takes.

Others would be compiled to code that nobody launches: kernels of wgmma are empty for all but 9.0a, kernels of
mma.sync of bf16 before 8.0, code for 8.9 differs from that of 8.0 in fp8 alone, and 9.0 multiplies by wgmma
where 8.0 holds rows in registers, but for packed rows of 129 to 256 dims.
"""

import re

# (sources, what they are not compiled for, what must be compiled in its place)
RULES = (
    # wgmma
    (
        r"/sm90\w*/|/sm90_\w+\.cu$|/from_hidden/project(_and_score)?\.cu$|/product_weights\.cu$",
        r"(?!sm_90a$)",
        "sm_90a",
    ),
    # Which 9.0 takes where a forced capability asks for it, and then compiles the PTX.
    (r"/sm80_[dq]/(?!.*_16\.cu$)|/smooth/sm80/", "sm_90a$", "compute_90"),
    # All but instances of fp8: 8.9 runs the code for 8.0.
    (r"^(?!.*/e[45]m\d\.cu$)", "sm_89$", "sm_80"),
    # mma.sync of bf16 in the backward, left empty before 8.0 (plan/backward)
    (r"/gathered_grad_q/|/short_docs/instances/", "sm_75$", "sm_80"),
)


def needed(source: str, codes: list[str]) -> list[str]:
    """Return those of ``codes``, such as "sm_80" and "compute_90", that a source is compiled for."""
    for sources, left_out, instead in RULES:
        if instead in codes and re.search(sources, source):
            codes = [code for code in codes if not re.match(left_out, code)]
    return codes


def without_unneeded(command: list[str]) -> list[str]:
    """Return nvcc's command without the ``-gencode`` options that its source has no use for."""
    source = command[command.index("-o") - 1]
    code = {word: word.rpartition("=")[2] for word in command if word.startswith("-gencode=")}
    kept = needed(source, list(code.values()))
    return [word for word in command if word not in code or code[word] in kept]
