"""Every operator refuses wrong dtypes, and survives any tensor of the right ones.

One argument of a call is changed at a time: its dtype, its sizes, how it lies in memory, what it holds, the
device. What is left is an exception, or tensors of the shapes that the fake kernel says; the same values that
lie otherwise give the same result. Nothing is written outside of what an operator writes.

``python -m tests.limits.test_hostile_operators [cpu|cuda] [words]`` runs the same without pytest, for
compute-sanitizer: operators whose names hold one of the words.
"""

import itertools
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import late_interaction as li
from tests.limits.test_citizens import flat, made, on_devices
from tests.support.operator_calls import CALLS, NOT_HERE, OF_CUDA, Given, operators

OPS = torch.ops.late_interaction
F8, F16, BF16 = torch.float8_e4m3fn, torch.float16, torch.bfloat16
F32, F64 = torch.float32, torch.float64
DTYPES = [
    F8, torch.float8_e5m2, F16, BF16, F32, F64, torch.complex64, torch.bool, torch.int8, torch.uint8,
    torch.int16, torch.uint16, torch.int32, torch.int64,
]  # fmt: skip
INDEX = {torch.int32, torch.int64}
FLOATS = {F16, BF16, F32, F64}
HALVES = {F16, BF16, F32}
# Print each change before it is made: the last one is what ended the process.
TRACED = bool(os.environ.get("LATE_INTERACTION_TRACED"))
# Other dtypes that an argument may have while the others keep theirs (csrc/ops.cpp); True: any.
DTYPES_TOO: dict[str, dict[str, Any]] = {
    "maxsim_residual": {"Q": FLOATS, "extents": INDEX, "centroids": FLOATS},
    "maxsim_residual_winners": {"Q": FLOATS, "extents": INDEX, "centroids": FLOATS},
    "maxsim_residual_backward": {"Q": HALVES, "extents": INDEX, "centroids": FLOATS},
    "maxsim_residual_normed": {"Q": HALVES, "extents": INDEX, "centroids": FLOATS},
    "plaid_approx_score": {"query_centroid_scores": {F64}, "doc_lengths": INDEX},
    "ward_labels": {"tokens": FLOATS},
    "kmeans_labels": {"tokens": FLOATS},
    "ward_cut_": {"similarities": {F64}},
    "muvera_encode": {"tokens": FLOATS},
    "xtr_winners": {"q_weights": {torch.bool, F32}},
    "maxsim_from_hidden": dict.fromkeys("QHWb", HALVES),
    "maxsim_from_hidden_winners": dict.fromkeys("QHWb", HALVES),
    "maxsim_from_hidden_backward": dict.fromkeys("QHWb", HALVES),
    "l2_normalize_rows_": {"x": FLOATS},
    "quantize_rows_": {"rows": FLOATS, "codes": {F8, torch.float8_e5m2, torch.int8}},
    "softmax_rows_": {"weights": HALVES},
    "softmax_weights_": {"weights": HALVES},
    "scale_rows_": {"x": HALVES, "out": HALVES},
    "add_checksum_": {"x": True},
    "can_project_rows": dict.fromkeys(("hidden", "W", "b"), True),
    "can_softmax_product_rows": dict.fromkeys("QD", True),
}
# Arguments whose dtype the result depends on.
OTHER_NUMBERS = {("quantize_rows_", "codes"), ("xtr_winners", "q_weights")}
# Arguments whose sizes may differ from what the others say.
SIZES_TOO = {
    "maxsim_quantized": {"scale_Q", "scale_D"},  # 0-dim: one scale for all tokens
    "maxsim_dequantized": {"scale_Q", "scale_D"},
    "maxsim_asymmetric": {"scale_Q", "scale_D"},
    "maxsim_quantized_packed": {"scale_Q", "scale_D"},
    "maxsim_asymmetric_packed": {"scale_Q", "scale_D"},
    "maxsim_backward_into_": {"grad_Q", "grad_D", "sums", "d_sums"},  # without elements: not needed
    "maxsim_varlen_backward_into_": {"q_sums", "d_sums"},  # as many elements
    "xtr_select_": {"d_mask"},  # likewise
    "xtr_group_maxima_": {"d_mask"},
    "xtr_select_in_groups_": {"d_mask"},
    "project_scores": {"q_mask", "d_mask"},
    "ward_cut_": {"similarities"},  # offsets say how many, which CUDA reads on the device
    "maxsim_residual_normed": {"inverse_norms"},  # as many elements
    "scale_rows_": {"x", "scale", "out"},  # likewise
    "softmax_row_sums": {"inverse_temperature"},  # one number
    "softmax_rows_": {"inverse_temperature"},
    "softmax_sums_": {"inverse_temperature"},
    "softmax_weights_": {"inverse_temperature"},
    "softmax_product_rows_": {"inverse_temperature"},
    "add_checksum_": {"x"},
    "can_project_rows": {"hidden", "W", "b"},
    "can_softmax_product_rows": {"Q", "D"},
}
# What refusals call the arguments, where steps that operators share refuse them.
OTHER_NAMES = {
    "cpu_isa": ("cpu_isa",),
    "muvera_encode": ("Q and D",),
    **{name: ("rows", "hidden") for name in DTYPES_TOO if name.startswith("maxsim_from_hidden")},
}
REFUSALS = (RuntimeError, TypeError, ValueError)
INTS = (-1, 0, 1 << 31, 1 << 62)
STRINGS = ("", "HIGHEST", "x" * 1000, "über")
FLOAT_VALUES = (float("nan"), float("inf"), -1.0, 0.0)
TOLERANCE = {"rtol": 0.05, "atol": 0.05}
MARGIN, UNTOUCHED = 64, 64  # elements on both sides of what an operator writes, and what they hold


class Change(NamedTuple):
    what: str
    value: Any
    # "refuse": no result is right. "same": that of the call as it was, or a refusal. "any": what the fake
    # kernel says, or a refusal. "equal": that of the same values, contiguous, or a refusal.
    wanted: str
    by_pytorch: bool = False  # what refuses it, in its own words


class Arguments:
    """The tensors of a call. What is written lies between margins."""

    def __init__(self, name: str, call: tuple, device: str) -> None:
        self.name, self.device = name, device
        self.names = [argument.name for argument in getattr(OPS, name).default._schema.arguments]
        self.call = call
        self.values = made(call, device, torch.Generator().manual_seed(3))

    def fresh(self, at: int = -1, value: Any = None) -> list[Any]:
        """Arguments that own their memory, with another value of the one there."""
        return [
            value if i == at else x.clone() if isinstance(x, Tensor) else x for i, x in enumerate(self.values)
        ]


def within(x: Tensor) -> tuple[Tensor, Tensor]:
    """x between margins, and all of that memory."""
    memory = torch.full((x.numel() + 2 * MARGIN,), UNTOUCHED, device=x.device).to(x.dtype)
    inner = memory[MARGIN : MARGIN + x.numel()].view(x.shape)
    inner.copy_(x)
    return inner, memory


# ---- changes ----


def changes(arguments: Arguments) -> Iterator[tuple[int, Change]]:
    for i, (given, value) in enumerate(zip(arguments.call, arguments.values, strict=True)):
        if isinstance(given, Given):
            for change in itertools.chain(
                dtypes(arguments, i), sizes(arguments, i), layouts(given, value), contents(given, value)
            ):
                yield i, change
        elif isinstance(value, bool):
            yield i, Change("the other bool", not value, "any")
        elif isinstance(value, int):
            # Memory of that size could be asked for.
            of_memory = arguments.names[i] == "size"
            yield from ((i, Change(f"{n}", n, "any")) for n in INTS if not (of_memory and n == 1 << 31))
        elif isinstance(value, float):
            yield from ((i, Change(f"{x}", x, "any")) for x in FLOAT_VALUES)
        elif isinstance(value, str):
            yield from ((i, Change(f"{x[:9]!r}", x, "refuse")) for x in STRINGS if x != value)
        elif isinstance(value, list):
            yield from ((i, Change(f"{x}"[:20], x, "any")) for x in ([], [1 << 62, -1], [1] * 99))


def dtypes(arguments: Arguments, i: int) -> Iterator[Change]:
    value, too = arguments.values[i], DTYPES_TOO.get(arguments.name, {}).get(arguments.names[i], ())
    for dtype in DTYPES:
        if dtype != value.dtype:
            if too is True:
                wanted = "any"
            else:
                other = (arguments.name, arguments.names[i]) in OTHER_NUMBERS
                wanted = "refuse" if dtype not in too else "any" if other else "same"
            yield Change(f"{dtype}", value.to(dtype), wanted)


def is_free(call: tuple, given: Given, dim: int) -> bool:
    """Whether no other size of the call depends on this one."""
    names = Counter(name.partition("+")[0] for x in call if isinstance(x, Given) for name in x.dims.split())
    name = given.dims.split()[dim].partition("+")[0]
    return not name.isdecimal() and names[name] == 1


def sizes(arguments: Arguments, i: int) -> Iterator[Change]:
    given: Given = arguments.call[i]
    anything = arguments.names[i] in SIZES_TOO.get(arguments.name, ())
    own, generator = given.sizes, torch.Generator().manual_seed(5)

    def changed(to: tuple[int, ...], free: bool) -> Change:
        x = given.make(to, arguments.device, generator)
        return Change(f"{list(to)}", x, "any" if free or anything else "refuse")

    for dim, size in enumerate(own):
        free = is_free(arguments.call, given, dim)
        for other in {max(size - 1, 0), size + 1, 0} - {size}:
            yield changed((*own[:dim], other, *own[dim + 1 :]), free)
    others = {own[1:], (1, *own), (*own, 1), (torch.Size(own).numel(),), ()} - {own}
    # Documents of each query without their first dim are documents of all queries.
    yield from (changed(x, given.dims.startswith("Nq K") and x == own[1:]) for x in others)
    if own and given.dtype != F8:
        yield Change("sparse", arguments.values[i].to_sparse(), "refuse", by_pytorch=True)


def layouts(given: Given, x: Tensor) -> Iterator[Change]:
    if x.numel() < 2:
        return
    if x.dim() > 1:
        yield Change("transposed", x.transpose(-1, -2).contiguous().transpose(-1, -2), "same")
        yield Change("first dims transposed", x.transpose(0, 1).contiguous().transpose(0, 1), "same")
    yield Change("every other element", x.repeat_interleave(2, -1)[..., ::2], "same")
    yield Change("rows apart", torch.cat((x, x[..., :1]), -1)[..., :-1], "same")
    one_off = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    yield Change("one element off", one_off.copy_(x), "same")
    for dim in {0, x.dim() - 1}:
        one = x.narrow(dim, 0, 1).clone().expand(x.shape)
        yield Change(f"expanded along {dim}", one, "refuse" if given.written else "equal", by_pytorch=True)
    # PyTorch resolves it before the operator sees it; what is written it copies back, where 2.11 may abort.
    if x.dtype.is_floating_point and x.element_size() > 1 and not given.written:
        yield Change("negated when read", torch._neg_view(-x), "same")


def contents(given: Given, x: Tensor) -> Iterator[Change]:
    if x.dtype in (BF16, F16, F32, F64):
        for number in (float("nan"), float("inf"), -float("inf"), 3e4 if x.dtype == F16 else 3e38, -0.0):
            one, every = x.clone(), torch.full_like(x, number)
            one.view(-1)[-1:] = number
            yield Change(f"one {number}", one, "any")
            yield Change(f"all {number}", every, "any")
    if not given.places:
        return
    limits = torch.iinfo(x.dtype)
    for number in (-1, -2, 1, 99, limits.min, limits.max, limits.max - 1, limits.max // 2 + 1):
        for at in (0, -1, slice(None)):
            other = x.clone()
            other.view(-1)[at] = number
            yield Change(f"{number} at {at}", other, "any")
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        other = torch.randint(limits.min, limits.max, x.shape, generator=generator).to(x)
        yield Change("any numbers", other, "any")
    yield Change("reversed", x.flip(0), "any")


# ---- what comes of them ----


def bits(x: Tensor) -> Tensor:
    return x.to_dense().resolve_neg().contiguous().flatten().view(torch.uint8)


def same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return found == wanted
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        return False
    return torch.allclose(found.to(F64), wanted.to(F64), equal_nan=True, **TOLERANCE)


class Sweep:
    """The faults of an operator: what it did that it should not."""

    def __init__(self, name: str, call: tuple, device: str) -> None:
        self.op, self.arguments = getattr(OPS, name), Arguments(name, call, device)
        self.faults: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.plain = self.run(self.arguments.fresh())

    def run(self, args: list[Any]) -> list[Any]:
        """Results, then what was written. Says so where anything else was."""
        memories, before = {}, {}
        for i, (given, x) in enumerate(zip(self.arguments.call, args, strict=True)):
            if not isinstance(x, Tensor):
                continue
            if not given.written:
                before[i] = x.clone()
            elif x.layout == torch.strided and x.is_contiguous() and not x.is_neg():
                args[i], memories[i] = within(x)
        results = self.op(*args)
        if self.arguments.device == "cuda":
            torch.cuda.synchronize()
        written = [args[i] for i, x in enumerate(self.arguments.call) if isinstance(x, Given) and x.written]
        for i, memory in memories.items():
            margins = torch.cat((memory[:MARGIN].to(F32), memory[-MARGIN:].to(F32)))
            if not bool((margins == UNTOUCHED).all()):
                self.faults.append(f"wrote outside of {self.arguments.names[i]}")
        for i, x in before.items():
            if not torch.equal(bits(x), bits(args[i])):
                self.faults.append(f"wrote to {self.arguments.names[i]}")
        return [x for x in flat(results) if x is not None] + written

    def attempt(self, args: list[Any]) -> list[Any] | None:
        """None: it was refused, in the words that are kept."""
        try:
            return self.run(args)
        except REFUSALS as error:
            if "CUDA error" in str(error) or isinstance(error, torch.AcceleratorError):
                raise
            self.words = str(error)
            return None

    def names_an_argument(self) -> bool:
        """Whether the words of the last refusal do."""
        names = [*self.arguments.names, *OTHER_NAMES.get(self.arguments.name, ())]
        return any(re.search(rf"\b{name}\b", self.words) for name in names)

    def described(self, args: list[Any]) -> list[Any] | None:
        """The results that the fake kernel says."""
        try:
            return flat(self.op(*(x.to("meta") if isinstance(x, Tensor) else x for x in args)))
        except REFUSALS:
            return None

    def check(self, i: int, change: Change) -> None:
        where = f"{self.arguments.names[i]}, {change.what}"
        if TRACED:
            print(f"{self.op}: {where}", flush=True)
        value = change.value
        try:
            found = self.attempt(self.arguments.fresh(i, value))
        except Exception as error:
            self.faults.append(f"{where}: {type(error).__name__}: {error}"[:300])
            return
        self.outcomes["refused" if found is None else "served"] += 1
        if found is None:
            must_name = self.arguments.device == "cpu" and change.wanted == "refuse" and not change.by_pytorch
            if must_name and not self.names_an_argument():
                self.faults.append(f"{where}: refused without a name: {self.words[:200]}")
            return
        if found and found[0] is False:  # of an operator that says whether it can
            return
        if change.wanted == "refuse":
            self.faults.append(f"{where}: not refused")
        elif change.wanted == "same" and not all(map(same, found, self.plain)):
            self.faults.append(f"{where}: another result")
        elif change.wanted == "equal":
            plain = self.attempt(self.arguments.fresh(i, value.contiguous()))
            if plain is None or not all(map(same, found, plain)):
                self.faults.append(f"{where}: another result than contiguous")
        elif change.wanted == "any" and any(isinstance(x, Tensor) for x in found):
            self.check_shapes(where, self.arguments.fresh(i, value), found)

    def check_shapes(self, where: str, args: list[Any], found: list[Any]) -> None:
        described = self.described(args)
        if described is None:
            self.faults.append(f"{where}: served, though the fake kernel refuses it")
            return
        for x, y in zip(found, described, strict=False):
            if isinstance(y, Tensor) and (x.shape != y.shape or x.dtype != y.dtype):
                self.faults.append(f"{where}: {x.dtype} {list(x.shape)}, not {y.dtype} {list(y.shape)}")

    def check_together(self) -> None:
        """Floating-point tensors that are all of another dtype."""
        values = self.arguments.values
        places = [i for i, x in enumerate(values) if isinstance(x, Tensor) and x.dtype in FLOATS]
        for dtype in set(DTYPES) - FLOATS if len(places) > 1 else ():
            args = [x.to(dtype) if i in places else x for i, x in enumerate(self.arguments.fresh())]
            found = self.attempt(args)
            self.outcomes["refused" if found is None else "served"] += 1
            if found and found[0] is not False:
                self.faults.append(f"all of {dtype}: not refused")

    def sweep(self) -> None:
        for i, change in changes(self.arguments):
            self.check(i, change)
        self.check_together()
        tensors = sum(isinstance(x, Tensor) for x in self.arguments.values)
        for i, (x, argument) in enumerate(
            zip(self.arguments.values, self.op.default._schema.arguments, strict=True)
        ):
            if isinstance(x, Tensor) and str(argument.type).startswith("Optional"):
                self.check(i, Change("None", None, "any"))
            if tensors > 1 and isinstance(x, Tensor) and self.arguments.device == "cuda":
                self.check(i, Change("on the CPU", x.cpu(), "refuse"))
        found = self.attempt(self.arguments.fresh())
        if found is None or not all(map(same, found, self.plain)):
            self.faults.append("the call as it was gives another result in the end")


@pytest.fixture(autouse=True)
def plans():
    """What these operators set for the whole process."""
    yield
    reset()


def reset() -> None:
    OPS.cpu_isa("")
    if torch.cuda.is_available():
        OPS.cuda_capability(0)
        OPS.forced_plan("")


def faults(name: str, device: str) -> tuple[list[str], Counter[str]]:
    found, outcomes = [], Counter()
    for number, call in enumerate(CALLS[name]):
        sweep = Sweep(name, call, device)
        sweep.sweep()
        found += [f"call {number}: {fault}" for fault in sweep.faults]
        outcomes += sweep.outcomes
        reset()
    return found, outcomes


def test_every_operator_has_a_call():
    assert {*CALLS, *NOT_HERE} == set(operators())


@on_devices(CALLS, OF_CUDA)
def test_one_argument_is_changed(name, device):
    found, outcomes = faults(name, device)
    assert not found, "\n".join(found)
    assert outcomes or name == "forced_plan"  # of any name: calls say whether they can have it


def main(*words: str) -> None:
    device, *words = words or ("cuda",)
    total: Counter[str] = Counter()
    for name in CALLS:
        if (device == "cpu" and name in OF_CUDA) or not any(word in name for word in words or [""]):
            continue
        began = time.perf_counter()
        found, outcomes = faults(name, device)
        total += outcomes
        total["faults"] += len(found)
        said = f"{time.perf_counter() - began:6.1f} s  {name}: {dict(outcomes)}"
        print(said, *found, sep="\n    ", flush=True)
    print(f"late_interaction {li.__version__}: {dict(total)}")
    raise SystemExit(total["faults"] > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
