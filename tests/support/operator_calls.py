"""Small calls of every operator, with the shapes and dtypes that their schemas ask for (csrc/ops.cpp).

A call is the list of an operator's arguments, tensors as :class:`Given`: ``Given("Nq Lq d", ...)`` has the
sizes that :data:`SIZES` gives to these names, and a number stands for itself. Sizes of one name in a call
must agree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from late_interaction import losses  # noqa: F401  # registers an operator

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
I8, U8, I16, I32, I64 = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64

SIZES = {
    "Nq": 2, "Lq": 3, "Nd": 5, "Ld": 7, "K": 4, "d": 16, "d13": 13, "model": 24,
    # packed: queries, documents, their tokens; pairs, and the longest query of them
    "Bq": 3, "Bd": 4, "Tq": 6, "Td": 11, "P": 8, "S": 3,
    "C": 9, "R": 5, "found": 4, "splits": 3, "processes": 3, "n": 12, "size": 12,
}  # fmt: skip


@dataclass(frozen=True)
class Given:
    dims: str
    dtype: torch.dtype = F32
    # What an integer tensor holds, in turn; a range: numbers of it by chance. None: small numbers by chance.
    values: "Sequence[int] | None" = None
    places: bool = False  # values say where something is: others of this dtype are no faults of the dtype
    written: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size_of(name) for name in self.dims.split())

    def make(self, sizes: tuple[int, ...], device: str, generator: torch.Generator) -> torch.Tensor:
        """Numbers that every dtype of floating point holds. A size behind that of the values repeats the
        last."""
        count = torch.Size(sizes).numel()
        if self.values is None or isinstance(self.values, range):
            drawn = self.values or range(2) if self.dtype == torch.bool else self.values or range(-6, 7)
            x = torch.randint(drawn.start, drawn.stop, (count,), generator=generator)
        else:
            last = len(self.values) - 1
            x = torch.tensor([self.values[min(i, last)] for i in range(count)], dtype=I64)
        x = x / 4 if self.dtype.is_floating_point and self.values is None else x
        return x.to(self.dtype).reshape(sizes).to(device)


def size_of(name: str) -> int:
    base, _, more = name.partition("+")
    return (int(base) if base.isdecimal() else SIZES[base]) + int(more or 0)


def mask(dims: str) -> Given:
    return Given(dims, torch.bool)


def places(dims: str, values: Sequence[int], dtype: torch.dtype = I32) -> Given:
    return Given(dims, dtype, values, places=True)


def out(dims: str, dtype: torch.dtype = F32) -> Given:
    return Given(dims, dtype, written=True)


Q, D, OWN, PAIRED = Given("Nq Lq d"), Given("Nd Ld d"), Given("Nq K Ld d"), Given("Nq Ld d")
MASKS, OWN_MASKS = (mask("Nq Lq"), mask("Nd Ld")), (mask("Nq Lq"), mask("Nq K Ld"))
WEIGHTS, GRAD, WINNERS = Given("Nq Lq"), Given("Nq Nd"), places("Nq Nd Lq", range(-1, 7), I16)
OPTIONS = False, "highest", "auto", False
DENSE = [
    (Q, D, *MASKS, *OPTIONS),
    (Q, OWN, *OWN_MASKS, *OPTIONS),
    (Q, PAIRED, None, None, *OPTIONS[:3], True),
]
WEIGHTED = [(*x[:2], WEIGHTS, *x[2:]) for x in DENSE]
BACKWARD = [
    (GRAD, Q, D, WINNERS, False, "auto", True, True, False),
    (
        *(Given("Nq Nd", F64), Given("Nq Lq d", F64), Given("Nd Ld d", F64)),
        *(WINNERS, True, "lowmem", True, True, False),
    ),
    (Given("Nq K"), Q, OWN, places("Nq K Lq", range(-1, 7), I16), True, "unified", True, True, False),
    (Given("Nq"), Q, PAIRED, places("Nq Lq", range(-1, 7), I16), False, "lowmem", True, True, True),
]  # fmt: skip
CU_Q, CU_D = places("Bq+1", (0, 2, 2, 5)), places("Bd+1", (0, 4, 4, 5, 11))
FLAT_Q, FLAT_D, FLAT_WEIGHTS = Given("Tq d"), Given("Td d"), Given("Tq")
PACKED, PACKED_BACK = (CU_Q, CU_D), (CU_Q, CU_D, places("Bd Tq", range(-1, 7), I16))
LISTED = (*PACKED, places("P", range(3)), places("P", range(4)))
LISTED_BACK = (*LISTED, places("P S", range(-1, 7), I16), True, True)
SCALES = Given("Nq Lq", F32, range(4)), Given("Nd Ld", F32, range(4))
FLAT_SCALES = SCALES[0], Given("Td", F32, range(4))
CODES, BITS = Given("Nq Lq d", I8), Given("Nq Lq 2", U8, range(256))
RESIDUAL = (
    places("Nd Ld", range(9)), Given("Nd Ld 4", U8, range(256)), places("Nd", (7, 0, 3)), Given("C d"),
    Given("4"),
)  # fmt: skip
FLAT_RESIDUAL = places("Td", range(9)), Given("Td 4", U8, range(256)), CU_D, *RESIDUAL[3:]
NORMED = (
    Given("Nq Lq 128"),
    (places("Td", range(9)), Given("Td 32", U8, range(256))),
    (Given("C 128"), Given("4")),
)
HIDDEN = Q, Given("Nd Ld model"), Given("d model"), Given("d")
CLUSTERED = Given("Td d"), CU_D, places("Bd", (2, 1, 1, 3))
INVERSE, FACTOR, LABELS = Given("", F32, (3,)), Given("R"), places("R", (0, 8, -100, 3, 2), I64)
SCORES, SCORE_WEIGHTS = Given("R C"), out("R C", BF16)
INDICES, FOUND = places("R C", range(99), I64), (Given("R found"), places("R found", range(99), I64))
CELLS, SELECTED = Given("R 35"), (out("R Nd"), out("R Nd", I32))
GROUPS = Given("R d", BF16), Given("35 d", BF16), mask("Nd Ld")
MUVERA = (6, 2, 5, 9, True, True, 0.5)

CALLS: dict[str, list[tuple]] = {
    "maxsim": DENSE,
    "maxsim_no_autograd": DENSE,
    "maxsim_winners": DENSE,
    "maxsim_winners_no_autograd": DENSE,
    "maxsim_backward": BACKWARD,
    "maxsim_backward_no_autograd": BACKWARD,
    "maxsim_backward_recompute": [(GRAD, *DENSE[0][:-1], True, True, False)],
    "maxsim_weighted": WEIGHTED,
    "maxsim_weighted_winners": WEIGHTED,
    "maxsim_weighted_backward": [(*BACKWARD[0][:3], WEIGHTS, *BACKWARD[0][3:], True)],
    "maxsim_varlen": [(FLAT_Q, FLAT_D, *PACKED, "highest")],
    "maxsim_varlen_winners": [(FLAT_Q, FLAT_D, *PACKED, "highest")],
    "maxsim_varlen_backward": [(Given("Bq Bd"), FLAT_Q, FLAT_D, *PACKED_BACK, True, True)],
    "maxsim_varlen_backward_into_": [
        (Given("Bq Bd"), FLAT_Q, FLAT_D, *PACKED_BACK, out("Tq d"), out("Td d"))
    ],
    "maxsim_varlen_weighted": [(FLAT_Q, FLAT_D, FLAT_WEIGHTS, *PACKED, "highest")],
    "maxsim_varlen_weighted_winners": [(FLAT_Q, FLAT_D, FLAT_WEIGHTS, *PACKED, "highest")],
    "maxsim_varlen_weighted_backward": [
        (Given("Bq Bd"), FLAT_Q, FLAT_D, FLAT_WEIGHTS, *PACKED_BACK, True, True)
    ],
    "maxsim_pairs_packed": [(FLAT_Q, FLAT_D, *LISTED, None, "highest"), (FLAT_Q, FLAT_D, *LISTED, 3, "high")],
    "maxsim_pairs_packed_winners": [(FLAT_Q, FLAT_D, *LISTED, 3, "highest")],
    "maxsim_pairs_packed_backward": [(Given("P"), FLAT_Q, FLAT_D, *LISTED_BACK)],
    "maxsim_pairs_packed_weighted": [(FLAT_Q, FLAT_D, FLAT_WEIGHTS, *LISTED, 3, "highest")],
    "maxsim_pairs_packed_weighted_winners": [(FLAT_Q, FLAT_D, FLAT_WEIGHTS, *LISTED, 3, "highest")],
    "maxsim_pairs_packed_weighted_backward": [(Given("P"), FLAT_Q, FLAT_D, FLAT_WEIGHTS, *LISTED_BACK)],
    "maxsim_spans": [(FLAT_Q, FLAT_D, places("P", (3, 0, 11, 2)), places("P", (8, 0, 0, 5)), "highest")],
    "maxsim_quantized": [
        (CODES, Given("Nd Ld d", I8), *SCALES, *MASKS),
        (
            Given("Nq Lq d", torch.float8_e4m3fn),
            Given("Nq K Ld d", torch.float8_e4m3fn),
            Given("", F32, (2,)),
            Given("Nq K Ld", F32, range(4)),
            None,
            None,
        ),
    ],
    "maxsim_dequantized": [(CODES, Given("Nd Ld d", I8), *SCALES, *MASKS)],
    "quantize_rows_": [(Given("R C d"), out("R C d", I8), out("R C"))],
    "maxsim_hamming": [(BITS, Given("Nd Ld 2", U8, range(256)), 13, *MASKS)],
    "maxsim_asymmetric": [
        (CODES, Given("Nd Ld 8", U8, range(256)), *SCALES, *MASKS, 4),
        (CODES, Given("Nq K Ld 2", U8, range(256)), *[Given("", F32, (1,))] * 2, *OWN_MASKS, 1),
    ],
    "maxsim_quantized_packed": [
        (CODES, Given("Td d", I8), *FLAT_SCALES, mask("Nq Lq"), CU_D),
        (
            *(Given("Nq Lq d", torch.float8_e4m3fn), Given("Td d", torch.float8_e4m3fn)),
            *(Given("", F32, (2,)), FLAT_SCALES[1], None, CU_D),
        ),
    ],
    "maxsim_hamming_packed": [(BITS, Given("Td 2", U8, range(256)), 13, mask("Nq Lq"), CU_D)],
    "maxsim_asymmetric_packed": [
        (CODES, Given("Td 8", U8, range(256)), *FLAT_SCALES, mask("Nq Lq"), CU_D, 4),
        (CODES, Given("Td 2", U8, range(256)), *[Given("", F32, (1,))] * 2, None, CU_D, 1),
    ],
    "maxsim_residual": [(Q, *x, 2, True, "highest") for x in (RESIDUAL, FLAT_RESIDUAL)],
    "maxsim_residual_winners": [(Q, *x, 2, True, "highest") for x in (RESIDUAL, FLAT_RESIDUAL)],
    "maxsim_residual_normed": [
        (NORMED[0], *NORMED[1], norms, CU_D, *NORMED[2]) for norms in (Given("Td", torch.float16), None)
    ],
    "maxsim_residual_backward": [
        (GRAD, Q, *RESIDUAL, WINNERS, 2, True),
        (Given("Nq Bd"), Q, *FLAT_RESIDUAL, places("Nq Bd Lq", range(-1, 7)), 2, True),
    ],
    "plaid_approx_score": [(Given("C Lq"), places("Nd Ld", range(9)), places("Nd", (7, 0, 3)))],
    "smooth_maxsim": [
        (Q, D, *MASKS, 0.25, False, "highest", False),
        (Q, OWN, *OWN_MASKS, 0.25, True, "high", False),
    ],
    "smooth_maxsim_backward": [(GRAD, Q, D, *MASKS, 0.25, True, "highest", True, True, False)],
    "smooth_logs": [(Given("Nq Lq d", BF16), Given("Nq K Ld d", BF16), mask("Nq K Ld"), 0.25)],
    "smooth_gradient": [
        (
            *(Given("Nq Lq d", BF16), Given("Nq K Ld d", BF16), None, Given("Nq K Lq"), Given("Nq K Lq")),
            *(0.25, of_documents),
        )
        for of_documents in (False, True)
    ],
    "xtr_winners": [
        (Q, D, mask("Nq Lq"), mask("Nd Ld"), 6, "paper", "highest", "auto"),
        (Q, D, WEIGHTS, None, 6, "pylate", "high", "lowmem"),
    ],
    "xtr_select_": [(CELLS, mask("Nd Ld"), 7, 6, False, *SELECTED), (CELLS, None, 7, 6, True, *SELECTED)],
    "xtr_group_maxima_": [(*GROUPS, out("R 32", BF16))],
    "xtr_select_in_groups_": [(Given("R 32", BF16), *GROUPS, 7, 6, True, *SELECTED)],
    "ward_labels": [CLUSTERED],
    "kmeans_labels": [(*CLUSTERED, 5)],
    # The squares of the documents' lengths: 16 + 0 + 1 + 36.
    "ward_cut_": [(Given("53"), *CLUSTERED[1:], 6, out("Td", I32), out("Bd", I32))],
    "muvera_encode": [
        (Q, mask("Nq Lq"), None, Given("d 16"), Given("2 d 16"), None, None, *MUVERA),
        (
            *(FLAT_D, None, CU_D, Given("d 16"), Given("2 d 16")),
            *(places("640", range(9)), Given("640", F32, (1, -1)), *MUVERA),
        ),
    ],
    "maxsim_from_hidden": [(*HIDDEN, *MASKS, True, "highest")],
    "maxsim_from_hidden_winners": [(*HIDDEN, *MASKS, True, "highest")],
    "maxsim_from_hidden_backward": [(GRAD, *HIDDEN, WINNERS, True, "highest", True, True, True, True)],
    "can_project_rows": [(Given("R model", BF16), Given("d model", BF16), Given("d", BF16))],
    "project_rows_": [
        (
            *(out("R d", BF16), Given("R model", BF16), Given("d model", BF16), Given("d", BF16)),
            *(Given("R", torch.bool, (1,)), True),
        )
    ],
    "project_scores": [
        (
            *(Given("Nq Lq d", BF16), Given("35 model", BF16), Given("d model", BF16), Given("d", BF16)),
            *(*MASKS, 7, True),
        )
    ],
    "l2_normalize_rows_": [(out("R d"),)],
    "argmax_mask": [(WINNERS, 7)],
    "maxsim_backward_into_": [
        (GRAD, Q, D, Given("35"), WINNERS, out("Nq Lq d"), out("Nd Ld d"), None, True, True, None),
        (GRAD, Q, D, None, WINNERS, out("Nq Lq d"), out("0"), out("Nq Lq d"), False, True, out("Nd Ld d")),
    ],
    "wgrad_splitk_": [
        (out("splits d model"), Given("R d", BF16), Given("R model", BF16), Given("R", torch.bool), True)
    ],
    "softmax_row_sums": [(SCORES, INVERSE)],
    "softmax_rows_": [(SCORES, INVERSE, LABELS, 0, FACTOR, 0.1, SCORE_WEIGHTS)],
    "softmax_sums_": [(SCORES, INVERSE, out("4 C"))],
    "softmax_weights_": [
        (SCORES, INVERSE, Given("3 R"), Given("3 C"), LABELS, 0, 0.1, SCORE_WEIGHTS),
        (SCORES, INVERSE, Given("3 R"), None, None, 2, 0.0, out("R C")),
    ],
    "scale_rows_": [(Given("R C"), Given("R"), out("R C", BF16))],
    "can_softmax_product_rows": [(Given("256 d", BF16), Given("C d", BF16))],
    "softmax_product_rows_": [
        (
            *(Given("R 64", BF16), Given("256 64", BF16), INVERSE, LABELS, 0, FACTOR),
            *(out("R 256", BF16), out("R 64", BF16)),
        )
    ],
    "select_best": [(SCORES, None, 7, None, None, 4, True), (SCORES, INDICES, 0, *FOUND, 20, False)],
    "pack_found": [(*FOUND, 6, 35, [9, 1], True)],
    "add_checksum_": [(out("n", I64), 3, Given("R C", F32), 31)],
    "merge_found": [(places("processes size", (5 << 32, 3 << 32, 9), I64), 2, 5, 2, 7, True)],
    "explain_plan": [
        (False, 2, 5, 3, 7, 16, "bf16", "highest", True, False, step, "auto", 90, 132, False)
        for step in ("forward", "backward", "alternatives")
    ],
    "explain_packed_plan": [
        (2, 5, 3, 7, 16, "fp32", "high", step, 90, 132, True) for step in ("forward", "backward")
    ],
    "explain_residual_plan": [(2, 5, 3, 7, 16, "fp16", "highest", 2, True, 90, 132)],
    "cpu_isa": [("",)],
    "cuda_capability": [(80,)],
    "forced_plan": [(None,)],
}

# Operators without a kernel on the CPU.
OF_CUDA = {
    "quantize_rows_", "xtr_group_maxima_", "xtr_select_in_groups_", "project_scores", "send_bytes_",
    "maxsim_residual_normed",
    "smooth_logs", "smooth_gradient", "cuda_capability", "forced_plan",
}  # fmt: skip
# For GPUs that wgmma is for.
NATIVE = {"project_rows_", "project_scores", "softmax_product_rows_"}
# What is called elsewhere: events are handles, which nothing can check (csrc/cuda/host_copy), and a traced
# loss is a call of a public function.
NOT_HERE = {"send_bytes_", "batch_loss"}


def operators() -> Iterator[str]:
    """The names of all operators."""
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space == "late_interaction":
            yield name
