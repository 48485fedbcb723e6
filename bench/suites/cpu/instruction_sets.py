"""The CPU suite of instruction sets: a forward with each that this CPU has, and each dtype. All calls of a
shape take turns, so that other load on the machine slows all of them alike: compare figures within one run
only."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch

from bench.harness.inputs import INT8, draw, quantize
from bench.harness.library import OURS
from bench.harness.parity import SCORES, reference_scores, relative_error
from bench.harness.results import Results, Row, new_row
from bench.harness.shape import Shape
from bench.suites.cpu.calls import Call, line, time_interleaved

SUITE = "cpu-isa"

# Best first.
X86 = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2")
NAMES = (*X86, "neon_bf16", "neon_dotprod", "neon", "portable")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, INT8)
# Codes of a few bits, which are no dtypes: bits of both sides, and int8 queries with bits or 4-bit codes.
CODES = ("hamming", "1bit", "4bit")
KINDS = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES) + CODES


def available() -> list[str]:
    found = []
    for name in NAMES:
        try:
            _force(name)
            found.append(name)
        except RuntimeError:  # this CPU or this build has no such table
            continue
    _force("")
    return found


def _force(name: str) -> None:
    importlib.import_module("late_interaction")
    torch.ops.late_interaction.cpu_isa(name)


def _forced(name: str, call: Call) -> Call:
    force = torch.ops.late_interaction.cpu_isa

    def run() -> object:
        force(name)
        return call()

    return run


def _call(shape: Shape, kind: str) -> tuple[Call, torch.Tensor]:
    """The forward, and the scores that it should give."""
    if kind in CODES:
        return _call_of_codes(shape, kind)
    lib = importlib.import_module("late_interaction")
    dtype = getattr(torch, kind)
    if dtype is not INT8:
        x = draw(shape, torch.device("cpu"), dtype)
        return lambda: lib.maxsim(x.Q, x.D), reference_scores(shape, x.Q, x.D)[0]
    x = draw(shape, torch.device("cpu"), torch.float32)
    (Q, scale_Q), (D, scale_D) = (quantize(tokens, INT8, per_token=True) for tokens in (x.Q, x.D))
    maxsim = importlib.import_module("late_interaction").ops.maxsim_quantized
    wanted = reference_scores(shape, Q * scale_Q.unsqueeze(-1), D * scale_D.unsqueeze(-1))[0]
    return lambda: maxsim(Q, D, scale_Q, scale_D, None, None), wanted


def _call_of_codes(shape: Shape, kind: str) -> tuple[Call, torch.Tensor]:
    """The operators, as a first pass calls them; queries are quantized before."""
    ops = torch.ops.late_interaction
    lib = importlib.import_module("late_interaction")
    x = draw(shape, torch.device("cpu"), torch.float32)
    if kind == "hamming":
        q, d = (lib.codecs.Bits(1).encode(tokens).values for tokens in (x.Q, x.D))
        signs = [2.0 * (tokens > 0) - 1 for tokens in (x.Q, x.D)]
        return lambda: ops.maxsim_hamming(q, d, shape.d, None, None), reference_scores(shape, *signs)[0]
    Q, D = lib.codecs.Int8().encode(x.Q), lib.codecs.Bits(1 if kind == "1bit" else 4).encode(x.D)
    wanted = reference_scores(shape, *(codes.codec.decode(codes).values for codes in (Q, D)))[0]
    args = Q.values, D.values, Q.scales, D.scales, None, None, D.codec.nbits
    return lambda: ops.maxsim_asymmetric(*args), wanted


def measure(shape: Shape, rounds: int) -> list[Row]:
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    names = available()
    for kind in KINDS:
        call, wanted = _call(shape, kind)
        for name in names:
            row = new_row(SUITE, shape, "fwd", INT8, OURS, gflops=None, variant=name) | {"dtype": kind}
            key = f"{name} {kind}"
            rows[key], calls[key] = row, _forced(name, call)
            scores = calls[key]()
            assert isinstance(scores, torch.Tensor)
            row["rel_err"] = relative_error(scores, wanted)
            if row["rel_err"] > SCORES:
                row["error"] = f"parity: relative error {row['rel_err']:.2g}"
    try:
        for key, seconds in time_interleaved(calls, rounds).items():
            rows[key]["wall_us"] = 1e6 * seconds
            rows[key]["gflops"] = shape.flops / seconds * 1e-9
    finally:
        _force("")
    return list(rows.values())


def run(results: Results, shapes: Sequence[Shape], rounds: int, log: Callable[[str], None]) -> None:
    for shape in shapes:
        rows = measure(shape, rounds)
        results.add(rows)
        for kind in KINDS:
            mine = [r for r in rows if r["dtype"] == kind]
            log(line([{**r, "impl": r["variant"]} for r in mine]))
