"""A few calls that together run every CUDA kernel and tile, small enough for compute-sanitizer:

    compute-sanitizer --tool memcheck python -m tests.sanitizer_grid
    compute-sanitizer --tool racecheck python -m tests.sanitizer_grid     # and synccheck, initcheck
    python -m tests.sanitizer_grid quantized fp64     # calls with one of these in their names
    python -m tests.sanitizer_grid --capability 80 gradients   # planned as compute capability 8.0

Words after it choose the calls whose names hold one of them. The seconds of each call are printed: racecheck
slows some kernels down far more than others, and no call should take much longer than the rest.

Not a test of results (those are next door): it checks only that they are finite.
"""

import argparse
import functools
import time

import torch

import late_interaction as li
from late_interaction import ops
from tests.support.packed import pack

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def finite(name, *results):
    if not all(bool(x.isfinite().all()) for x in results):
        raise SystemExit(f"{name}: a result is not finite")


# (Nq, Nd, Lq, Ld, d, dtype, precision): what it is there for.
CALLS = {
    "documents on the M side, 32 rows": (1, 5, 32, 150, 128, BF16, "highest"),
    "documents on the M side, 64 rows": (2, 3, 30, 70, 64, FP16, "highest"),
    "documents on the M side, 96 rows": (3, 3, 32, 130, 96, BF16, "highest"),
    "documents on the M side, 128 rows": (1, 3, 128, 129, 256, BF16, "highest"),
    "documents on the M side, several a block": (1, 300, 32, 140, 128, BF16, "highest"),
    "documents on the M side, 64 rows, several a block": (2, 300, 30, 140, 128, BF16, "highest"),
    "documents on the M side, many a block": (1, 2150, 32, 161, 128, BF16, "highest"),
    "documents on the M side, 64 rows, many a block": (2, 2150, 30, 161, 64, FP16, "highest"),
    "documents on the M side, queries with their own": (40, 5, 32, 70, 64, FP16, "highest"),
    "query rows on the M side, two chunks": (9, 3, 33, 300, 128, BF16, "highest"),
    "documents on the M side, split": (1, 2, 32, 3001, 128, BF16, "highest"),
    "query rows on the M side, documents split": (2, 2, 130, 3001, 64, FP16, "highest"),
    "query rows on the M side, one chunk": (5, 4, 60, 100, 64, FP16, "highest"),
    "query rows on the M side, long documents": (3, 2, 130, 530, 128, BF16, "highest"),
    "query rows on the M side, in chunks, Q resident": (9, 3, 33, 300, 200, BF16, "highest"),
    "query rows on the M side, in chunks, Q streams": (9, 3, 33, 170, 520, FP16, "highest"),
    "query rows on the M side, in chunks, two blocks share Q": (9, 18, 33, 100, 768, BF16, "highest"),
    "query rows on the M side, short documents": (30, 70, 33, 20, 128, BF16, "highest"),
    "query rows on the M side, short documents, long queries": (3, 70, 513, 64, 96, FP16, "highest"),
    "short documents": (3, 70, 9, 40, 128, BF16, "highest"),
    "short documents, a block of tokens": (1, 70, 33, 7, 48, FP16, "highest"),
    "short documents, narrow loads": (2, 7, 9, 100, 100, BF16, "highest"),
    "short documents, elements one by one": (2, 7, 9, 20, 99, FP16, "highest"),
    "thin tile, narrow loads": (1, 4, 20, 140, 100, BF16, "highest"),
    "wide tile": (9, 30, 64, 70, 130, BF16, "highest"),
    "wide tile, Q streams": (6, 3, 30, 70, 770, BF16, "highest"),
    "thin tile, elements one by one": (1, 4, 20, 140, 7, FP16, "highest"),
    "tf32": (5, 3, 40, 70, 64, FP32, "high"),
    "tf32, Q streams": (5, 18, 40, 170, 200, FP32, "high"),
    "tf32, one query": (1, 3, 20, 70, 64, FP32, "high"),
    "tf32 by mma": (5, 3, 40, 70, 63, FP32, "high"),
    "3xtf32": (5, 3, 40, 70, 64, FP32, "highest"),
    "3xtf32, long rows": (2, 3, 70, 170, 200, FP32, "highest"),
    "3xtf32, one query": (1, 3, 20, 70, 64, FP32, "highest"),
    "3xtf32 by mma": (5, 3, 40, 70, 63, FP32, "highest"),
    "fp32 as bf16": (70, 3, 30, 40, 128, FP32, "medium"),
    "fp32 as scaled fp16": (70, 3, 30, 40, 64, FP32, "high"),
    "fp64": (2, 3, 9, 40, 24, FP64, "highest"),
    "fp64, long rows": (2, 2, 5, 30, 520, FP64, "highest"),
}

# Short documents, whose backward has kernels of its own: (Nq, Nd, Lq, Ld, d).
SHORT_DOCS = {
    "short documents' gradients, one query": (1, 2100, 32, 60, 64),
    "short documents' gradients, one query of 9 tokens": (1, 6000, 9, 20, 72),
    "short documents' gradients, 8 tokens": (66, 480, 16, 8, 40),
    "short documents' gradients, 13 tokens": (34, 480, 31, 13, 96),
    "short documents' gradients, 24 tokens": (64, 490, 16, 24, 128),
    "short documents' gradients, 30 tokens": (80, 420, 15, 30, 40),
    "short documents' gradients, 40 tokens": (32, 490, 32, 40, 128),
    "short documents' gradients, 41 tokens": (36, 470, 30, 41, 64),
    "short documents' gradients, 64 tokens": (256, 1000, 16, 64, 64),
}


def run_short_docs(name, Nq, Nd, Lq, Ld, d):
    for dtype in (BF16, FP16):
        Q, D = (torch.randn(*size, d, device="cuda").to(dtype) for size in ((Nq, Lq), (Nd, Ld)))
        winners = torch.randint(-1, Ld, (Nq, Nd, Lq), device="cuda").to(torch.int16)
        grad = torch.randn(Nq, Nd, device="cuda")
        # One that is not finite takes other ways. Once is enough: racecheck takes half a minute for each.
        for poison in (0.0, float("nan"))[: 2 if dtype == BF16 else 1]:
            grad[0, 1] += poison
            ops.maxsim_backward(grad, Q, D, winners, False, "lowmem", True, True)


# One query and documents that the planner streams where L2 does not hold them: (plan, Nd, Lq, Ld, d).
STREAMS = {
    "stream, 8 tokens a tile": ("stream 8", 3000, 32, 5, 64),
    "stream, 16 tokens a tile": ("stream 16", 2000, 9, 16, 128),
    "stream, 24 tokens a tile": ("stream 24", 1700, 16, 40, 96),
    "stream, 32 tokens a tile": ("stream 32", 1300, 32, 61, 128),
    "stream, more warps than documents": ("stream 24", 7, 20, 17, 72),
}


def run_streams(name, plan, N, Lq, Ld, d):
    ops.forced_plan(plan)
    for dtype in (BF16, FP16):
        Q = torch.randn(1, Lq, d, device="cuda").to(dtype)
        spaced = torch.randn(N, Ld + 1, d + 8, device="cuda").to(dtype)
        mask = torch.rand(N, Ld, device="cuda") < 0.7
        for D in (spaced[:, :Ld, :d], spaced[:, :Ld, :d].contiguous()):
            results = (*li.maxsim_with_winners(Q, D), li.maxsim(Q, D, None, mask))
            finite(name, *results)
    ops.forced_plan("")


# Planned as 8.0: (Nq, Nd, Lq, Ld, d, the plan).
OLDER = {
    "registers, many rows": (31, 66, 33, 150, 128, "registers 512"),
    "registers, many rows of 64 dims": (40, 40, 31, 150, 64, "registers 512"),
    "registers, many rows of 256 dims": (20, 40, 33, 70, 200, "registers 256"),
    "registers, few rows": (3, 9, 40, 150, 120, "registers 128"),
    "registers, few rows, split": (3, 2, 40, 300, 120, "registers 128 cut 3"),
    "registers, a warp a document": (1, 500, 32, 40, 128, "registers 32 x1"),
    "registers, a block a document": (1, 5, 20, 150, 64, "registers 32 x4"),
    "registers, a block a document, split": (1, 3, 20, 700, 128, "registers 32 x4 cut 3"),
    "registers, 64 rows, a warp a document": (2, 70, 33, 150, 128, "registers 64 x1"),
    "registers, 64 rows, a block a document": (2, 9, 33, 150, 64, "registers 64 x4"),
    "registers, long tokens": (1, 9, 30, 90, 256, "registers 32 x4"),
    "chunks, split": (3, 2, 20, 800, 520, "thin cut 3"),
    "chunks, few rows, shared tiles": (2, 60, 20, 11, 520, "thin shared"),
    "chunks, many rows, shared tiles": (9, 50, 33, 5, 264, "wide shared"),
}


OLDER_CODES = {
    "registers, codes, many rows": (20, 40, 33, 150, 128),
    "registers, codes, long rows": (5, 9, 33, 70, 256),
    "registers, codes, a document a block": (2, 9, 15, 90, 96),
}


def run_as_older(name, function, *arguments, sm=80):
    ops.cuda_capability(sm)
    try:
        function(name, *arguments)
    finally:
        ops.cuda_capability(0)


def run_three_products(name, Nq, Nd, Lq, Ld, d):
    Q, D = (torch.randn(*size, d, device="cuda") for size in ((Nq, Lq), (Nd, Ld)))
    mask = torch.rand(Nd, Ld, device="cuda") < 0.7
    if "maxsim_forward_sm80_3xfp16," not in li.explain_plan(Q, D):
        raise SystemExit(f"{name}: another kernel")
    results = [*li.maxsim_with_winners(Q, D, None, mask), li.maxsim(Q, D), li.maxsim(Q, D, normalize=True)]
    finite(name, *results)


def run_older(name, Nq, Nd, Lq, Ld, d, plan):
    Q, D = (torch.randn(*size, d, device="cuda", dtype=BF16) for size in ((Nq, Lq), (Nd, Ld)))
    mask = torch.rand(Nd, Ld, device="cuda") < 0.7
    ops.cuda_capability(80)
    ops.forced_plan(plan)
    try:
        results = [
            *li.maxsim_with_winners(Q, D, None, mask),
            li.maxsim(Q, D),
            li.maxsim(Q, D, normalize=True),
        ]
        own = D.expand(2, *D.shape)[:, :9].contiguous()
        results.append(li.maxsim(Q[:1].repeat(2, 1, 1), own))
        ops.forced_plan("")
        lengths = torch.randint(Ld + 1, (Nd,), device="cuda").cumsum(0)
        offsets = torch.nn.functional.pad(lengths, (1, 0)).int()
        rows = torch.arange(Nq + 1, device="cuda").int() * Lq
        results.append(li.lik.maxsim_varlen(Q.flatten(0, 1), D.flatten(0, 1), rows, offsets))
    finally:
        ops.forced_plan("")
        ops.cuda_capability(0)
    finite(name, *results)


# grad_D of documents that many queries share, with query rows from shared memory, of as many as the planner
# gives to it on 132 multiprocessors: (Nq, Nd, Lq, Ld, d).
TILED_GRAD_D = {
    "grad_D by query rows": (513, 187, 32, 100, 64),
    "grad_D by query rows, long queries": (127, 188, 130, 180, 128),
    "grad_D by query rows, long documents": (2050, 94, 32, 200, 64),
}


def run_tiled_grad_d(name, Nq, Nd, Lq, Ld, d):
    for dtype in (BF16, FP16):
        Q, D = (torch.randn(*size, d, device="cuda").to(dtype) for size in ((Nq, Lq), (Nd, Ld)))
        winners = torch.randint(-1, Ld, (Nq, Nd, Lq), device="cuda").to(torch.int16)
        grad = torch.randn(Nq, Nd, device="cuda")
        _, grad_D = ops.maxsim_backward(grad, Q, D, winners, False, "lowmem", False, True)
        finite(name, grad_D)


# grad_Q of winners' rows from shared memory, as the planner gives to it on 132 multiprocessors: the same.
GATHERED_GRAD_Q = {
    "grad_Q, gathered": (513, 67, 32, 100, 64),
    "grad_Q, gathered, long queries": (127, 33, 136, 180, 120),
    "grad_Q, gathered, odd queries": (600, 35, 21, 66, 96),
}


def run_gathered_grad_q(name, Nq, Nd, Lq, Ld, d):
    Q, D = (torch.randn(*size, d, device="cuda").to(BF16) for size in ((Nq, Lq), (Nd, Ld)))
    winners = torch.randint(-1, Ld, (Nq, Nd, Lq), device="cuda").to(torch.int16)
    for bad in (None, float("inf")):  # what is not finite is added up again, one by one
        grad = torch.randn(Nq, Nd, device="cuda")
        if bad is not None:
            grad[1, 2] = bad
        grad_Q, _ = ops.maxsim_backward(grad, Q, D, winners, False, "lowmem", True, False)
        if bool(grad_Q.isfinite().all()) != (bad is None):
            raise SystemExit(f"{name}: not the gradients that are finite")


# (lengths of queries, lengths of documents, d, dtype, precision).
PACKED = {
    "packed, documents on the M side": ([32, 0, 9], [150, 0, 1, 64, 70] * 40, 128, BF16, "highest"),
    "packed, query rows on the M side": ([33, 0, 257, 31], [150, 0, 1, 300, 80], 128, BF16, "highest"),
    "packed, dealt out": ([32] * 80, [40, 300, 0, 90] * 80, 128, BF16, "highest"),
    "packed, short documents": ([33, 0, 257, 31], [20, 0, 1, 30, 24, 70] * 9, 128, BF16, "highest"),
    "packed, by mma": ([33, 0, 257, 31], [150, 0, 1, 300, 80], 200, FP16, "highest"),
    "packed, tf32": ([33, 5], [150, 0, 1], 64, FP32, "high"),
    "packed, fp64": ([33, 5], [150, 0, 1], 20, FP64, "highest"),
}


def run_packed(name, lengths_q, lengths_d, d, dtype, precision):
    (Q, cu_q), (D, cu_d) = (pack(x, d, dtype, "cuda") for x in (lengths_q, lengths_d))
    scores, winners = ops.maxsim_varlen_winners(Q, D, cu_q, cu_d, precision)
    grads = ops.maxsim_varlen_backward(torch.ones_like(scores), Q, D, cu_q, cu_d, winners)
    sums = [torch.zeros(x.shape, device="cuda", dtype=scores.dtype) for x in (Q, D)]
    into = torch.ops.late_interaction.maxsim_varlen_backward_into_
    into(torch.ones_like(scores), Q, D, cu_q, cu_d, winners, *sums)
    results = (scores, ops.maxsim_varlen(Q, D, cu_q, cu_d, precision), *grads, *sums)
    finite(name, *results)


# Pairs: (lengths of queries, lengths of documents, pairs, d, dtype, precision); and documents anywhere.
PAIR_LISTS = {
    "pairs, documents on the M side": ([32, 0, 9], [150, 0, 1, 64, 70] * 40, 150, 128, BF16, "highest"),
    "pairs, a few, longer queries": ([33, 0, 257, 31], [150, 0, 1, 300, 80] * 9, 20, 64, FP16, "highest"),
    "pairs, picked from all": ([33, 0, 25, 31], [150, 0, 1, 300, 80], 40, 128, BF16, "highest"),
    "pairs, by mma": ([33, 0, 57, 31], [150, 0, 1, 300, 80] * 9, 20, 129, FP16, "highest"),
    "pairs, tf32": ([33, 5], [150, 0, 1] * 9, 20, 64, FP32, "high"),
    "pairs, 3xtf32": ([33, 5], [150, 0, 1] * 9, 20, 64, FP32, "highest"),
    "pairs, fp64": ([33, 5], [150, 0, 1], 9, 20, FP64, "highest"),
}


def run_pairs(name, lengths_q, lengths_d, pairs, d, dtype, precision):
    (Q, cu_q), (D, cu_d) = (pack(x, d, dtype, "cuda") for x in (lengths_q, lengths_d))
    pair_q = torch.randint(len(lengths_q), (pairs,), device="cuda").int()
    pair_d = torch.randint(len(lengths_d), (pairs,), device="cuda").int()
    inputs = (Q, D, cu_q, cu_d, pair_q, pair_d)
    scores, winners = ops.maxsim_pairs_packed_winners(*inputs, max(lengths_q), precision)
    results = [scores, *ops.maxsim_pairs_packed_backward(torch.ones_like(scores), *inputs, winners)]
    results.append(ops.maxsim_pairs_packed(*inputs, None, precision))
    results.append(ops.maxsim_spans(Q[:40], D, cu_d[:-1].contiguous(), cu_d.diff(), precision))
    finite(name, *results)
    pair_q[0], pair_d[1] = -1, 1 << 30  # of none
    ops.maxsim_pairs_packed_winners(*inputs, max(lengths_q) // 2, precision)


def run_copied(name, d, normalize):
    # Work enough that a kernel before copies what the mask keeps.
    Q = torch.randn(80, 32, d, device="cuda").to(BF16)
    D = torch.randn(110, 300, d, device="cuda").to(BF16)
    d_mask = torch.rand(110, 300, device="cuda") > 0.3
    d_mask[0], d_mask[1, 9:], d_mask[2] = False, False, True
    scores, _ = ops.maxsim_winners(Q, D, None, d_mask, normalize)
    finite(name, ops.maxsim(Q, D, None, d_mask, normalize) - scores)


def run_unit_copies(name, d, dtype, odd):
    # Rows enough that normalized ones are copied; odd: rows that are not read 16 bytes at a time.
    Q, D = (
        torch.randn(*shape, d + odd, device="cuda").to(dtype)[..., odd:] for shape in ((70, 33), (30, 90))
    )
    scores, _ = ops.maxsim_winners(Q, D, None, None, True, "high")
    finite(name, ops.maxsim(Q, D, None, None, True, "high") - scores)


# float32 as two fp16 numbers, with work enough for that: (Nq, Nd, Lq, Ld, d).
HALVES = {
    "halves, Q resident": (70, 30, 33, 130, 128),
    "halves, odd rows": (70, 50, 33, 90, 99),
    "halves, two blocks share Q": (40, 19, 33, 170, 300),
}


def run_halves(name, Nq, Nd, Lq, Ld, d):
    Q, D = torch.randn(Nq, Lq, d, device="cuda"), torch.randn(Nd, Ld, d, device="cuda")
    d_mask = torch.rand(Nd, Ld, device="cuda") > 0.3
    for mask, normalize in ((None, False), (d_mask, True)):
        scores, _ = ops.maxsim_winners(Q, D, None, mask, normalize, "highest")
        finite(name, ops.maxsim(Q, D, None, mask, normalize, "highest") - scores)


# (Nq, Lq, Nd, Ld, d, nbits, dtype, precision) of residual-compressed documents.
COMPRESSED_CALLS = {
    "compressed, 2 bits": (1, 32, 9, 70, 128, 2, BF16, "highest"),
    "compressed, 1 bit, 96 dims": (1, 20, 3, 70, 96, 1, FP16, "highest"),
    "compressed, 4 bits, 64 dims, 64 rows": (3, 33, 5, 70, 64, 4, BF16, "highest"),
    "compressed, 8 bits, 64 rows": (3, 20, 5, 140, 128, 8, FP16, "highest"),
    "compressed, many documents": (1, 32, 900, 20, 128, 4, FP16, "highest"),
    "compressed, long embeddings": (1, 32, 3, 40, 640, 2, BF16, "highest"),
    "compressed, odd embeddings": (2, 9, 3, 40, 37, 2, BF16, "highest"),
    "compressed, odd embeddings, 8 bits": (2, 9, 3, 40, 21, 8, FP16, "highest"),
    "compressed, parts of a query": (2, 70, 3, 40, 128, 4, BF16, "highest"),
    "compressed, long documents": (1, 32, 3, 2000, 128, 2, BF16, "highest"),
    "compressed, long documents, two tiles": (2, 33, 1, 1500, 64, 4, FP16, "highest"),
    "compressed, tf32": (2, 9, 3, 40, 48, 4, FP32, "high"),
    "compressed, 3xtf32": (2, 9, 3, 40, 33, 1, FP32, "highest"),
    "compressed, fp64": (2, 9, 3, 20, 33, 2, FP64, "highest"),
    "compressed, too long for a tile": (1, 9, 2, 20, 20000, 2, FP16, "highest"),
}


def run(name, Nq, Nd, Lq, Ld, d, dtype, precision):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size):
        return torch.randn(*size, device="cuda", dtype=FP32, generator=generator).to(dtype)

    for shape_d, masked, normalize in (
        ((Nd, Ld, d), False, False),
        ((Nd, Ld, d), True, True),
        ((Nq, Nd, Ld, d), True, False),
    ):
        Q, D = random(Nq, Lq, d), random(*shape_d)
        q_mask = d_mask = None
        if masked:
            q_mask = torch.rand(Nq, Lq, device="cuda", generator=generator) > 0.3
            d_mask = torch.rand(shape_d[:-1], device="cuda", generator=generator) > 0.3
            d_mask.view(-1, Ld)[0] = False
        results = [ops.maxsim(Q, D, q_mask, d_mask, normalize, precision, "auto")]
        scores, winners = ops.maxsim_winners(Q, D, q_mask, d_mask, normalize, precision, "auto")
        for backward in ("lowmem", "unified"):
            results += ops.maxsim_backward(
                torch.ones_like(scores), Q, D, winners, normalize, backward, True, True
            )
        finite(name, *results)


def run_compressed(name, Nq, Lq, Nd, Ld, d, nbits, dtype, precision):
    generator = torch.Generator("cuda").manual_seed(0)
    on = {"device": "cuda", "generator": generator}
    Q, centroids = (torch.randn(*size, d, **on).to(dtype) for size in ((Nq, Lq), (30,)))
    weights = torch.randn(2**nbits, **on)
    codes = torch.randint(-2, 33, (Nd, Ld), **on).int()
    residuals = torch.randint(256, (Nd, Ld, (d * nbits + 7) // 8), **on).to(torch.uint8)
    lengths = torch.randint(Ld + 1, (Nd,), **on)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    packed = int(offsets[-1])
    flat = codes.flatten()[:packed].clone(), residuals.flatten(0, 1)[:packed].clone(), offsets
    for documents in ((codes, residuals, lengths), flat):
        args = (Q, *documents, centroids, weights)
        scores, winners = ops.maxsim_residual_winners(*args, nbits, True, precision)
        results = [scores, ops.maxsim_residual(*args, nbits, True, precision)]
        results.append(ops.maxsim_residual_backward(torch.ones_like(scores), *args, winners, nbits))
        finite(name, *results)
    for columns in (Lq, 4 * Lq):
        ops.plaid_approx_score(torch.randn(30, columns, **on), codes, lengths)


# Hidden states: (Nq, Nd, Lq, Ld, d, d_model, dtype, compute capability to plan for).
HIDDEN_CALLS = {
    "hidden states, wgmma": (3, 5, 40, 70, 136, 264, BF16, 0),
    "hidden states, projected": (3, 5, 40, 470, 128, 264, BF16, 0),
    "hidden states, scored": (3, 50, 9, 37, 120, 264, BF16, 0),
    "hidden states, mma": (3, 5, 40, 70, 136, 264, FP16, 80),
    "hidden states, float32": (3, 5, 9, 33, 24, 40, FP32, 0),
}


def run_hidden(name, Nq, Nd, Lq, Ld, d, d_model, dtype, capability):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size):
        return torch.randn(*size, device="cuda", dtype=FP32, generator=generator).to(dtype)

    Q, H, W, b = random(Nq, Lq, d), random(Nd, Ld, d_model), random(d, d_model), random(d)
    ops.cuda_capability(capability)
    try:
        scores, winners = ops.maxsim_from_hidden_winners(Q, H, W, b, None, None)
        gradients = ops.maxsim_from_hidden_backward(torch.ones_like(scores), Q, H, W, b, winners)
        alone = ops.maxsim_from_hidden(Q, H, W, b, None, None)
    finally:
        ops.cuda_capability(0)
    finite(name, scores, alone, *gradients)


# Quantized tokens: (Nq, Nd, Lq, Ld, d).
QUANTIZED_CALLS = {
    "quantized, documents on the M side, 32 rows": (1, 5, 32, 150, 128),
    "quantized, documents on the M side, 128 rows": (1, 3, 128, 129, 320),
    "quantized, query rows on the M side, one chunk": (9, 3, 33, 300, 128),
    "quantized, query rows on the M side, two chunks": (5, 4, 60, 100, 256),
    "quantized, query rows on the M side, in chunks": (9, 3, 33, 90, 400),
    "quantized, float32 copies": (5, 4, 9, 40, 24),
}


def ragged(Ld):
    """Offsets of documents of Ld tokens, of none and of one fewer, with a token of no document in front."""
    return torch.tensor([1, 1 + Ld, 1 + Ld, 2 * Ld], dtype=torch.int32, device="cuda")


def run_quantized(name, Nq, Nd, Lq, Ld, d):
    def scales(*shape):
        return torch.rand(shape, device="cuda")

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        for shape_d in ((Nd, Ld, d), (Nq, Nd, Ld, d)):
            Q = torch.randint(-9, 10, (Nq, Lq, d), device="cuda").to(dtype)
            D = torch.randint(-9, 10, shape_d, device="cuda").to(dtype)
            d_mask = torch.rand(shape_d[:-1], device="cuda") > 0.3
            d_mask.view(-1, Ld)[0] = False
            per_token = scales(*shape_d[:-1])
            for scale_D, kept in ((per_token, None), (scales(), None), (per_token, d_mask)):
                scores = ops.maxsim_quantized(Q, D, scales(Nq, Lq), scale_D, None, kept)
                finite(name, scores)
        D = torch.randint(-9, 10, (2 * Ld + 1, d), device="cuda").to(dtype)
        for scale_D in (scales(2 * Ld + 1), scales()):
            scores = ops.maxsim_quantized_packed(Q, D, scales(Nq, Lq), scale_D, None, ragged(Ld))
            finite(name, scores)


def run_ragged(name, Nq, Lq, lengths, d):
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    scales = torch.rand(Nq, Lq, device="cuda"), torch.rand(sum(lengths), device="cuda")
    for dtype in (torch.float8_e4m3fn, torch.int8):
        Q, D = (torch.randint(-9, 10, (*x.shape, d), device="cuda").to(dtype) for x in scales)
        finite(name, ops.maxsim_quantized_packed(Q, D, *scales, None, cu_seqlens))


def run_hot_tokens(name):
    # More winners than a block orders at a time fall on one token.
    Q = torch.randn(400, 40, 64, device="cuda", dtype=BF16)
    D = torch.randn(2, 70, 64, device="cuda", dtype=BF16)
    winners = torch.full((400, 2, 40), 3, device="cuda", dtype=torch.int16)
    grad = torch.ones(400, 2, device="cuda")
    ops.maxsim_backward(grad, Q, D, winners, False, "lowmem", True, True)


def run_in_parts(name, *shape_d):
    # More winners than are found again at a time.
    Q, D = torch.randn(64, 1030, 8, device="cuda"), torch.randn(*shape_d, 8, device="cuda")
    grad = torch.ones(64, shape_d[-2], device="cuda")
    for dtype, needs in ((BF16, (True, True)), (FP32, (True, True)), (BF16, (True, False))):
        args = Q.to(dtype), D.to(dtype), None, None, True, "highest", "lowmem"
        grads = ops.maxsim_backward_recompute(grad, *args, *needs)
        finite(name, *grads)


# (documents, Ld, k): candidates in shared memory, the row searched, ties that do not fit, all cells.
XTR_CALLS = {
    "XTR, candidates": (64, 70, 256),
    "XTR, one document": (1, 9001, 40),
    "XTR, documents of a token": (300, 1, 7),
    "XTR, the row": (90, 100, 5000),
    "XTR, everything": (3, 50, 150),
}


def run_xtr(name, documents, Ld, k):
    d_mask = torch.rand(documents, Ld, device="cuda") < 0.7
    for dtype in (FP32, torch.float64):
        for panel in (torch.randn, torch.ones):
            similarities = panel(5, documents * Ld, device="cuda", dtype=dtype)
            maxima = torch.empty(5, documents, device="cuda", dtype=dtype)
            winners = torch.empty(5, documents, device="cuda", dtype=torch.int32)
            for mask, zero_unless_all in ((None, False), (d_mask, False), (d_mask, True)):
                select = torch.ops.late_interaction.xtr_select_
                select(similarities, mask, Ld, k, zero_unless_all, maxima, winners)
                if not bool((winners < Ld).all()):
                    raise SystemExit(f"{name}: a winner is no token")


def run_xtr_groups(name, documents, Ld, k, d):
    ops = torch.ops.late_interaction
    d_mask = torch.rand(documents, Ld, device="cuda") < 0.7
    for dtype, factor in ((BF16, 1), (torch.float16, 1), (BF16, 0)):  # many candidates where all are equal
        Q, D = (factor * torch.randn(n, d, device="cuda").to(dtype) for n in (5, documents * Ld))
        group_maxima = Q.new_empty(5, -(-len(D) // 64) * 32)
        maxima = torch.empty(5, documents, device="cuda")
        winners = torch.empty(5, documents, device="cuda", dtype=torch.int32)
        for mask, zero_unless_all in ((None, False), (d_mask, False), (d_mask, True)):
            for capability in (80, 0):  # 0: of this GPU
                ops.cuda_capability(capability)
                ops.xtr_group_maxima_(Q, D, mask, group_maxima)
            ops.xtr_select_in_groups_(group_maxima, Q, D, mask, Ld, k, zero_unless_all, maxima, winners)
            if not bool((winners < Ld).all()):
                raise SystemExit(f"{name}: a winner is no token")


def run_topk(name, rows, columns, before, k):
    """What is chosen, packed and merged."""
    ops = torch.ops.late_interaction
    for scores in (torch.randn(rows, columns, device="cuda"), torch.zeros(rows, columns, device="cuda")):
        found = scores[:, :before].clone(), torch.arange(before, device="cuda").repeat(rows, 1)
        indices = torch.arange(columns, device="cuda").repeat(rows, 1) + before
        for given in (None, indices):
            best = ops.select_best(scores, given, before, *found, k, True)
            if not bool((best[1] < before + columns).all()):
                raise SystemExit(f"{name}: what was chosen is no document")
        width = best[0].shape[1] + 3
        packed = ops.pack_found(*best, width, rows * width + 9, [before + columns, 0], True)
        ops.add_checksum_(packed, len(packed) - 1, scores[:, 1:].contiguous(), 31)
        packed = packed.expand(3, -1).contiguous()
        ops.merge_found(packed, rows, width, 2, min(3 * width, 1024), False)


def run_quantized_rows(name, rows, d):
    for dtype in (BF16, torch.float16, FP32, torch.float64):
        X = torch.randn(rows, d, device="cuda").to(dtype)
        for code in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            codes = torch.empty(rows, d, dtype=code, device="cuda")
            scale = torch.empty(rows, device="cuda")
            torch.ops.late_interaction.quantize_rows_(X, codes, scale)
            if not bool((scale > 0).all()):
                raise SystemExit(f"{name}: a scale is not positive")


def run_centroid_rows(name, Nq, Lq, lengths):
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    tokens, on = sum(lengths), {"device": "cuda"}
    Q, table = torch.randn(Nq, Lq, 128, **on).half(), torch.randn(37, 128, **on).half()
    codes = torch.randint(37, (tokens,), dtype=torch.int32, **on)
    residuals = torch.randint(256, (tokens, 32), dtype=torch.uint8, **on)
    weights = torch.tensor([-0.1, -0.03, 0.03, 0.1], **on)
    for norms in (None, torch.rand(tokens, **on).half()):
        finite(name, ops.maxsim_residual_normed(Q, codes, residuals, norms, cu_seqlens, table, weights))


def run_bits(name, Lq, Ld, d):
    """Both forms of the layout, words and bytes of tokens, integers and scales."""
    ops = torch.ops.late_interaction
    Q = torch.randint(-128, 128, (2, Lq, d), dtype=torch.int8, device="cuda")
    q_mask = torch.rand(2, Lq, device="cuda") < 0.7
    for shape in ((5, Ld), (2, 3, Ld)):
        d_mask, one = torch.rand(shape, device="cuda") < 0.7, torch.ones((), device="cuda")
        for nbits in (1, 4):
            D = torch.randint(256, (*shape, -(-d * nbits // 8)), dtype=torch.uint8, device="cuda")
            for scale in (one, torch.rand(shape, device="cuda")):
                for masks in ((None, None), (q_mask, d_mask)):
                    scores = ops.maxsim_asymmetric(Q, D, one, scale, *masks, nbits)
                    finite(name, scores)
            if nbits == 1:
                for mask in (None, d_mask):
                    ops.maxsim_hamming(D[:, 0] if D.dim() == 4 else D[:2], D, d, None, mask)
    for nbits in (1, 4):
        D = torch.randint(256, (2 * Ld + 1, -(-d * nbits // 8)), dtype=torch.uint8, device="cuda")
        for scale in (one, torch.rand(2 * Ld + 1, device="cuda")):
            finite(name, ops.maxsim_asymmetric_packed(Q, D, one, scale, q_mask, ragged(Ld), nbits))
        if nbits == 1:
            ops.maxsim_hamming_packed(D[: 2 * Ld].view(2, Ld, -1), D, d, None, ragged(Ld))


def run_ward(name, lengths, divisor):
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    clusters = torch.tensor([max(n // divisor, 1) for n in lengths], dtype=torch.int32, device="cuda")
    for dtype in (FP32, torch.float64):
        tokens = torch.randint(-1, 2, (sum(lengths), 16), device="cuda").to(dtype) / 4
        labels, found = torch.ops.late_interaction.ward_labels(tokens, offsets, clusters)
        if not bool((labels >= 0).all() and (found <= clusters).all()):
            raise SystemExit(f"{name}: a token has no cluster")


def run_muvera(name, lengths, d, *sizes):
    """Packed, and padded with a mask: of every dtype, queries and documents."""
    muvera = li.Muvera(d, *sizes)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    d_mask = torch.rand(3, max(lengths), device="cuda") < 0.6
    for dtype in (BF16, torch.float16, FP32, FP64):
        tokens = torch.randn(sum(lengths), d, device="cuda").to(dtype)
        padded = torch.randn(3, max(lengths), d, device="cuda").to(dtype)
        for encode in (muvera.encode_queries, muvera.encode_documents):
            finite(name, encode(li.Tokens.packed(tokens, offsets)), encode(li.Tokens(padded, d_mask)))


def run_one_token(name, Nq, Nd, d):
    """losses.contrastive of one token a side: the operators of its softmax, in one pass and in two."""
    for dtype in (BF16, torch.float16, FP32):
        Q, D = (torch.randn(n, 1, d, device="cuda").to(dtype).requires_grad_() for n in (Nq, Nd))
        temperature = torch.tensor(0.5, device="cuda", requires_grad=True)
        every = torch.arange(Nq, device="cuda") % Nd
        for options in (
            {},
            {"reduction": "none"},
            {"labels": every, "label_smoothing": 0.1},
            {"symmetric": True},
        ):
            if "symmetric" in options and Nq != Nd:
                continue
            loss = li.losses.contrastive(Q, D, temperature=temperature, kept_bytes=0, **options).sum()
            gradients = torch.autograd.grad(loss, (Q, D, temperature))
            finite(name, loss, *gradients)


def run_product_rows(name, rows, columns, d, inverse):
    """Softmax weights from the product itself; a large inverse temperature makes it run twice."""
    ops = torch.ops.late_interaction
    Q, D = (torch.nn.functional.normalize(torch.randn(n, d, device="cuda"), dim=1) for n in (rows, columns))
    Q, D = Q.bfloat16(), D.bfloat16()
    labels = torch.arange(rows, device="cuda").remainder(columns).masked_fill(Q[:, 0] > 0.1, -100)
    factor = (labels >= 0).float()
    weights = torch.empty(rows, -(-columns // 8) * 8, dtype=BF16, device="cuda")[:, :columns]
    scaled, T = torch.empty_like(Q), torch.tensor(inverse, device="cuda")
    sums = ops.softmax_product_rows_(Q, D, T, labels, 0, factor, weights, scaled)
    ops.scale_rows_(Q, sums[5], scaled)
    results = sums[:4, labels >= 0], sums[5], weights, scaled
    finite(name, *results)


def run_smooth(name, Nq, Nd, Lq, Ld, d, dtype):
    """Every query with all documents, and with documents of its own; with a mask and without."""
    Q = torch.randn(Nq, Lq, d, device="cuda").to(dtype).requires_grad_()
    for documents in ((Nd,), (Nq, 2)):
        D = torch.randn(*documents, Ld, d, device="cuda").to(dtype).requires_grad_()
        for d_mask in (None, torch.rand(*documents, Ld, device="cuda") < 0.6):
            scores = li.smooth_maxsim(Q, D, d_mask=d_mask)
            gradients = torch.autograd.grad(scores.sum(), (Q, D))
            finite(name, scores, *gradients)


# Batches with parts, on a GPU with an L2 of 60 MiB or less: (Nq, Nd, Lq, Ld, d).
LARGE = {
    "large batch, tiles of query rows, queries in parts": (1000, 64, 32, 20, 128),
    "large batch, tiles of query rows, long documents": (1000, 64, 32, 340, 120),
    "large batch, documents in parts": (270, 620, 32, 200, 128),
}


def run_large(name, Nq, Nd, Lq, Ld, d):
    Q, D = (torch.randn(*size, d, device="cuda").to(BF16) for size in ((Nq, Lq), (Nd, Ld)))
    calls = torch.ops.late_interaction
    scores, winners = calls.maxsim_winners(Q, D, None, None, False, "highest", "auto", False)
    sums = torch.zeros(Q.shape, device="cuda")
    gradients = torch.empty_like(Q), torch.empty_like(D)
    args = (torch.ones_like(scores), Q, D, None, winners)
    calls.maxsim_backward_into_(*args, *gradients, sums, True, True)
    d_sums = torch.zeros(D.shape, device="cuda")
    calls.maxsim_backward_into_(*args, gradients[0], D.new_empty(0), sums, False, False, d_sums)
    finite(name, scores, *gradients, d_sums)


# Packed ones, planned as for a GPU with 6 MiB of L2: queries, tokens of each, documents, tokens of each, d,
# dtype.
LARGE_PACKED = {
    "large batch, packed, sums of both gradients": (1203, 16, 2000, 10, 128, BF16),
    "large batch, packed, summed in place": (700, 16, 1301, 12, 64, FP32),
    "large batch, packed, winners of 32 bits": (600, 16, 3001, 23, 64, FP32),
}


def run_large_packed(name, queries, Lq, documents, Ld, d, dtype):
    if ops.cuda_capability() < 86:
        print(f"{name}: left out, as this GPU is older than 8.6")
        return

    def pack(count, length):
        offsets = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
        offsets[1:-1] += torch.arange(count - 1, device="cuda", dtype=torch.int32) % 3  # lengths differ
        return torch.randn(count * length + 5, d, device="cuda").to(dtype), offsets

    (Q, cu_q), (D, cu_d) = pack(queries, Lq), pack(documents, Ld)
    ops.cuda_capability(86)
    try:
        plan = li.explain_plan(
            (queries, Lq, d), (documents, Ld, d), dtype=dtype, packed=True, sm=86, sm_count=132
        )
        scores, winners = ops.maxsim_varlen_winners(Q, D, cu_q, cu_d, "highest")
        args = (torch.ones_like(scores), Q, D, cu_q, cu_d, winners, True, True)
        gradients = ops.maxsim_varlen_backward(*args)
    finally:
        ops.cuda_capability(0)
    if "grad_Q by" not in plan or "grad_D by" not in plan:
        raise SystemExit(f"{name}: its gradients have no parts")
    finite(name, scores, *gradients)


def run_weighted(name, Nq, Nd, Lq, Ld, d, dtype):
    Q, D = torch.randn(Nq, Lq, d, device="cuda").to(dtype), torch.randn(Nd, Ld, d, device="cuda").to(dtype)
    weights = torch.randn(Lq, Nq, device="cuda").to(torch.float64 if dtype == FP64 else FP32).t()
    flat, of_flat = (Q.flatten(0, 1), D.flatten(0, 1)), weights.flatten()
    cu_q, cu_d = (torch.arange(n + 1, device="cuda").int() * length for n, length in ((Nq, Lq), (Nd, Ld)))
    pairs = torch.arange(9, device="cuda").int() % Nq, torch.arange(9, device="cuda").int() % Nd
    results = []
    for normalize in (False, True):
        scores, winners = ops.maxsim_weighted_winners(Q, D, weights, None, None, normalize)
        for backward in ("lowmem", "unified"):
            args = (torch.ones_like(scores), Q, D, weights, winners, normalize, backward)
            results += [scores, *ops.maxsim_weighted_backward(*args)]
    scores, winners = ops.maxsim_varlen_weighted_winners(*flat, of_flat, cu_q, cu_d)
    args = (torch.ones_like(scores), *flat, of_flat, cu_q, cu_d)
    results += [scores, *ops.maxsim_varlen_weighted_backward(*args, winners)]
    scores, winners = ops.maxsim_pairs_packed_weighted_winners(*flat, of_flat, cu_q, cu_d, *pairs, Lq)
    args = (torch.ones_like(scores), *flat, of_flat, cu_q, cu_d, *pairs)
    results += [scores, *ops.maxsim_pairs_packed_weighted_backward(*args, winners)]
    finite(name, *results)


if __name__ == "__main__":
    by_ffma = functools.partial(run_as_older, sm=86)  # float32 but for batches of three fp16 products
    everything = [
        *((run, name, arguments) for name, arguments in CALLS.items()),
        *((run_packed, name, arguments) for name, arguments in PACKED.items()),
        *((run_pairs, name, arguments) for name, arguments in PAIR_LISTS.items()),
        (run_copied, "query rows on the M side, copied", (128, False)),
        (run_copied, "query rows on the M side, copied and scaled", (128, True)),
        (run_unit_copies, "copies of unit rows, bf16", (128, BF16, 0)),
        (run_unit_copies, "copies of unit rows, a warp a row", (264, BF16, 1)),
        (run_unit_copies, "copies of unit rows, fp32", (40, FP32, 1)),
        *((run_large, name, arguments) for name, arguments in LARGE.items()),
        *((run_large_packed, name, arguments) for name, arguments in LARGE_PACKED.items()),
        *((run_halves, name, arguments) for name, arguments in HALVES.items()),
        *((run_short_docs, name, arguments) for name, arguments in SHORT_DOCS.items()),
        *((run_streams, name, arguments) for name, arguments in STREAMS.items()),
        *((run_older, name, arguments) for name, arguments in OLDER.items()),
        *((run_as_older, name, (run_quantized, *arguments)) for name, arguments in OLDER_CODES.items()),
        (run_as_older, "registers, three products", (run_three_products, 30, 60, 33, 170, 128)),
        (by_ffma, "FFMA", (run, 5, 3, 40, 70, 64, FP32, "highest")),
        (by_ffma, "FFMA, one query, odd rows", (run, 1, 3, 20, 140, 63, FP32, "highest")),
        (by_ffma, "FFMA, pairs", (run_pairs, *PAIR_LISTS["pairs, 3xtf32"])),
        *((run_tiled_grad_d, name, arguments) for name, arguments in TILED_GRAD_D.items()),
        *((run_gathered_grad_q, name, arguments) for name, arguments in GATHERED_GRAD_Q.items()),
        *((run_hidden, name, arguments) for name, arguments in HIDDEN_CALLS.items()),
        *((run_quantized, name, arguments) for name, arguments in QUANTIZED_CALLS.items()),
        (run_ragged, "quantized, packed documents of many lengths", (80, 32, [40, 300, 0, 90] * 80, 128)),
        (run_ragged, "quantized, packed documents as a stream", (1, 32, [40, 3, 0, 9] * 1600, 128)),
        *((run_compressed, name, arguments) for name, arguments in COMPRESSED_CALLS.items()),
        (run_centroid_rows, "compressed, packed, of known norms", (2, 32, [40, 3, 0, 9] * 1600)),
        *((run_xtr, name, arguments) for name, arguments in XTR_CALLS.items()),
        (run_bits, "bits, words", (32, 70, 128)),
        (run_bits, "bits, some words", (5, 20, 64)),
        (run_bits, "bits, 384 dims", (33, 40, 384)),
        (run_bits, "bits, 160 dims", (5, 20, 160)),
        (run_bits, "bits, bytes", (33, 31, 13)),
        (run_bits, "bits, fragments in global memory", (5, 40, 2000)),
        (run_ward, "Ward, one length", ((70, 70, 70), 2)),
        (run_ward, "Ward, many lengths", ((2, 33, 1, 0, 200, 31), 3)),
        (run_topk, "the best documents", (3, 700, 5, 20)),
        (run_topk, "the best documents, in segments", (2, 20_001, 100, 100)),
        (run_topk, "the best documents, many", (1, 17_000, 1000, 1024)),
        (run_quantized_rows, "quantized rows", (37, 129)),
        (run_xtr_groups, "XTR, groups", (64, 130, 256, 40)),
        (run_xtr_groups, "XTR, groups, long embeddings", (30, 31, 20, 520)),
        (run_xtr_groups, "XTR, groups, the row", (90, 100, 5000, 40)),
        (run_muvera, "MUVERA, projected", ((9, 0, 70, 1), 128, 5, 20, 16)),
        (run_muvera, "MUVERA, few partitions", ((9, 0, 70, 1), 64, 3, 4, 8)),
        (run_muvera, "MUVERA, odd dims", ((9, 0, 33, 1), 131, 4, 3, 5)),
        (run_muvera, "MUVERA, many partitions", ((9, 0, 33, 1), 24, 8, 2)),
        (run_muvera, "MUVERA, a count sketch", ((9, 0, 33, 1), 48, 4, 5, 20, 64)),
        (run_muvera, "MUVERA, a bucket of many dims", ((9, 0, 33, 1), 40, 6, 2, None, 1)),
        (run_muvera, "MUVERA, tokens that shared memory does not hold", ((3000, 0, 700, 1), 128, 5, 2, 16)),
        (run_one_token, "softmax, one token a side", (70, 70, 24)),
        (run_one_token, "softmax, odd columns", (33, 131, 8)),
        (run_one_token, "softmax, rows longer than shared memory", (5, 40003, 8)),
        (run_product_rows, "softmax of a product, rows in registers", (300, 777, 256, 20.0)),
        (run_product_rows, "softmax of a product, in two passes", (130, 1031, 512, 900.0)),
        (run_product_rows, "softmax of a product, long embeddings", (300, 260, 520, 20.0)),
        (run_smooth, "smooth maximum, two chunks", (5, 7, 33, 70, 128, BF16)),
        (run_smooth, "smooth maximum, one chunk", (3, 5, 130, 129, 40, FP16)),
        (run_weighted, "weights, documents on the M side", (2, 5, 32, 150, 128, BF16)),
        (run_weighted, "weights, query rows on the M side", (9, 3, 33, 300, 128, BF16)),
        (run_weighted, "weights, documents split", (1, 2, 32, 3001, 128, BF16)),
        (run_weighted, "weights, 3xtf32", (3, 4, 9, 40, 24, FP32)),
        (run_weighted, "weights, fp64", (2, 3, 9, 40, 24, FP64)),
        (run_hot_tokens, "backward, hot tokens", ()),
        (run_in_parts, "backward in parts", (120, 8)),
        (run_in_parts, "backward in parts of the queries", (64, 120, 8)),
    ]
    parser = argparse.ArgumentParser()
    parser.add_argument("--capability", type=int, default=0)  # 0: of this GPU
    parser.add_argument("words", nargs="*", default=[""])
    options = parser.parse_args()
    wanted = [call for call in everything if any(word in call[1] for word in options.words)]
    for function, name, arguments in wanted:
        ops.cuda_capability(options.capability)  # some calls end with that of this GPU
        began = time.perf_counter()
        function(name, *arguments)
        torch.cuda.synchronize()
        print(f"{time.perf_counter() - began:6.1f} s  {name}", flush=True)
    print(f"{len(wanted)} calls ran")
