"""A few calls that together run every CUDA kernel and tile, small enough for compute-sanitizer:

    compute-sanitizer --tool memcheck python -m tests.sanitizer_grid
    compute-sanitizer --tool racecheck python -m tests.sanitizer_grid     # and synccheck, initcheck

Not a test of results (those are next door): it checks only that they are finite.
"""

import torch

from late_interaction import ops

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# (Nq, Nd, Lq, Ld, d, dtype, precision): what it is there for.
CALLS = {
    "documents on the M side, 32 rows": (1, 5, 32, 150, 128, BF16, "highest"),
    "documents on the M side, 64 rows": (2, 3, 30, 70, 64, FP16, "highest"),
    "documents on the M side, 96 rows": (3, 3, 32, 130, 96, BF16, "highest"),
    "documents on the M side, 128 rows": (1, 3, 128, 129, 256, BF16, "highest"),
    "documents on the M side, several a block": (1, 300, 32, 140, 128, BF16, "highest"),
    "documents on the M side, queries with their own": (40, 5, 32, 70, 64, FP16, "highest"),
    "query rows on the M side, two chunks": (9, 3, 33, 300, 128, BF16, "highest"),
    "query rows on the M side, one chunk": (5, 4, 60, 100, 64, FP16, "highest"),
    "query rows on the M side, long documents": (3, 2, 130, 530, 128, BF16, "highest"),
    "query rows on the M side, in chunks, Q resident": (9, 3, 33, 300, 200, BF16, "highest"),
    "query rows on the M side, in chunks, Q streams": (9, 3, 33, 170, 520, FP16, "highest"),
    "query rows on the M side, in chunks, two blocks share Q": (9, 18, 33, 100, 768, BF16, "highest"),
    "wide tile": (9, 30, 64, 70, 130, BF16, "highest"),
    "mid tile, Q streams": (6, 3, 30, 70, 770, BF16, "highest"),
    "thin tile, elements one by one": (1, 4, 20, 140, 7, FP16, "highest"),
    "tf32": (5, 3, 40, 70, 64, FP32, "high"),
    "tf32, Q streams": (5, 18, 40, 170, 200, FP32, "high"),
    "tf32, one query": (1, 3, 20, 70, 64, FP32, "high"),
    "tf32 by mma": (5, 3, 40, 70, 63, FP32, "high"),
    "3xtf32": (5, 3, 40, 70, 64, FP32, "highest"),
    "3xtf32, long rows": (2, 3, 70, 170, 200, FP32, "highest"),
    "3xtf32, one query": (1, 3, 20, 70, 64, FP32, "highest"),
    "3xtf32 by mma": (5, 3, 40, 70, 63, FP32, "highest"),
    "fp32 as bf16": (3, 3, 20, 40, 128, FP32, "medium"),
    "fp64": (2, 3, 9, 40, 24, FP64, "highest"),
    "fp64, long rows": (2, 2, 5, 30, 520, FP64, "highest"),
}

# (Nq, Lq, Nd, Ld, d, nbits, dtype, precision) of residual-compressed documents.
COMPRESSED = {
    "compressed, 2 bits": (1, 32, 9, 70, 128, 2, BF16, "highest"),
    "compressed, 1 bit, 96 dims": (1, 20, 3, 70, 96, 1, FP16, "highest"),
    "compressed, 4 bits, 64 dims, 64 rows": (3, 33, 5, 70, 64, 4, BF16, "highest"),
    "compressed, 8 bits, 64 rows": (3, 20, 5, 140, 128, 8, FP16, "highest"),
    "compressed, many documents": (1, 32, 900, 20, 128, 4, FP16, "highest"),
    "compressed, long embeddings": (1, 32, 3, 40, 640, 2, BF16, "highest"),
    "compressed, odd embeddings": (2, 9, 3, 40, 37, 2, BF16, "highest"),
    "compressed, odd embeddings, 8 bits": (2, 9, 3, 40, 21, 8, FP16, "highest"),
    "compressed, parts of a query": (2, 70, 3, 40, 128, 4, BF16, "highest"),
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
        if not all(bool(result.isfinite().all()) for result in results):
            raise SystemExit(f"{name}: a result is not finite")


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
        if not all(bool(result.isfinite().all()) for result in results):
            raise SystemExit(f"{name}: a result is not finite")
    for columns in (Lq, 4 * Lq):
        ops.plaid_approx_score(torch.randn(30, columns, **on), codes, lengths)


if __name__ == "__main__":
    for call, arguments in CALLS.items():
        run(call, *arguments)
    for call, arguments in COMPRESSED.items():
        run_compressed(call, *arguments)
    # Hot tokens: more winners than a block orders at a time fall on one token.
    Q = torch.randn(400, 40, 64, device="cuda", dtype=BF16)
    D = torch.randn(2, 70, 64, device="cuda", dtype=BF16)
    winners = torch.full((400, 2, 40), 3, device="cuda", dtype=torch.int16)
    grad = torch.ones(400, 2, device="cuda")
    ops.maxsim_backward(grad, Q, D, winners, False, "lowmem", True, True)
    torch.cuda.synchronize()
    print(f"{len(CALLS) + len(COMPRESSED) + 1} calls ran")
