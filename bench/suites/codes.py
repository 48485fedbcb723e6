"""Documents as codes, and the best of a corpus: 8-bit inputs, residual-compressed documents, top 100."""

import dataclasses
import tempfile
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F

import late_interaction as li
from bench.harness.inputs import FP8, INT8, draw, draw_packed, quantize
from bench.harness.library import LIK, OURS
from bench.harness.measuring import function
from bench.harness.parity import reference_scores
from bench.suites.packed import reference as packed_reference
from late_interaction import codecs
from late_interaction._doctor.checks import relative_error
from late_interaction._doctor.timing import sets_of_bytes, wall_seconds
from late_interaction.lik import fp8
from late_interaction.reference import maxsim_residual_reference, plaid_approx_score_reference

# ---- 8-bit inputs: every library gets the same quantized tensors ----

BF16 = "bf16"
PER_TOKEN, PER_TENSOR, INT8_PER_TOKEN = "fp8 per token", "fp8 per tensor", "int8 per token"
QUANTIZED = (BF16, PER_TOKEN, PER_TENSOR, INT8_PER_TOKEN)


def _restored(x, scale):
    return x.float() * (scale.unsqueeze(-1) if scale.dim() else scale)


def _codec(dtype):
    return codecs.Int8() if dtype == INT8 else codecs.Fp8(dtype)


def _own_codes(dtype):
    codec = _codec(dtype)
    return lambda Q, q, D, d: li.maxsim(li.Codes(codec, Q, q), li.Codes(codec, D, d))


def _fp8(package):
    f = function(f"{package}.fp8", "maxsim_inference_fp8")
    return lambda Q, q, D, d: f(Q, D, scale_Q=q, scale_D=d)


def measure_quantized(b):
    """fp8 with a scale per token or per tensor and int8 with one per token, beside our bf16 call."""
    sets = b.sets(torch.bfloat16)
    exact = reference_scores(b.shape, *sets[0].tokens)[0]
    timed = [b.forward(OURS, BF16, lambda: li.maxsim, [x.tokens for x in sets], exact, dtype=torch.bfloat16)]
    for variant, dtype in ((PER_TOKEN, FP8), (PER_TENSOR, FP8), (INT8_PER_TOKEN, INT8)):
        per_token = variant != PER_TENSOR
        inputs = [(*quantize(x.Q, dtype, per_token), *quantize(x.D, dtype, per_token)) for x in sets]
        Q, q, D, d = inputs[0]
        wanted = reference_scores(b.shape, _restored(Q, q), _restored(D, d))[0]
        lost = relative_error(wanted, exact)
        calls = {OURS: partial(_own_codes, dtype) if per_token else partial(_fp8, "late_interaction.lik")}
        if b.has(LIK) and variant == PER_TOKEN:  # with a scale per tensor it waits for the device
            calls[LIK] = partial(_fp8, "late_interaction_kernels")
        for impl, make in calls.items():
            timed.append(b.forward(impl, variant, make, inputs, wanted, dtype=dtype, quantization_err=lost))
    return b.measure(timed)


# ---- a corpus of documents of different lengths, and one of as many tokens in documents of one length ----

RAGGED_KINDS = {BF16: None, PER_TOKEN: FP8, INT8_PER_TOKEN: INT8}
RAGGED = tuple(f"{kind}, {lengths}" for lengths in ("ragged", "equal") for kind in RAGGED_KINDS)


def measure_ragged(b):
    """Packed documents in bf16 and as codes with a scale per token."""
    timed = []
    for lengths in ("ragged", "equal"):
        longest = dataclasses.replace(b.shape, Ld=b.shape.Ld * 25 // 8)  # Ld is about the mean
        Q, D, _, cu_d = draw_packed(longest, b.settings.device, torch.bfloat16)
        queries = F.normalize(torch.randn(b.shape.Nq, b.shape.Lq, b.shape.d, device=Q.device), dim=-1)
        if lengths == "equal":
            each = len(D) // b.shape.Nd
            D, cu_d = D[: each * b.shape.Nd], torch.arange(b.shape.Nd + 1, device=Q.device).int() * each
        cu_q = torch.arange(b.shape.Nq + 1, device=Q.device).int() * b.shape.Lq
        tokens = li.Tokens.packed(D, cu_d)
        for kind, dtype in RAGGED_KINDS.items():
            q, documents, x, y = queries.to(D.dtype), tokens, queries.to(D.dtype), D
            if dtype is not None:
                q, documents = (_codec(dtype).encode(each) for each in (q, tokens))
                x, y = (_restored(c.values, c.scales) for c in (q, documents))
            wanted = packed_reference(x.flatten(0, 1), y, cu_q, cu_d)
            variant, options = f"{kind}, {lengths}", {"dtype": dtype or D.dtype, "tokens_d": len(D)}
            timed.append(b.forward(OURS, variant, lambda: li.maxsim, [(q, documents)], wanted, **options))
    return b.measure(timed)


# ---- residual-compressed documents: every library gets the same index of random codes ----

PACKED, NORMED, CENTROIDS = "packed", "norms known", "centroids alone"
PLAID = (PACKED, NORMED, CENTROIDS)
N_CENTROIDS = 65536
_LIK_BYTES = 2**31 - 1


@dataclass
class Index:
    Q: torch.Tensor  # [Lq, d]
    codes: torch.Tensor  # int32 [Nd, Ld]
    residuals: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    centroids: torch.Tensor
    weights: torch.Tensor
    nbits: int
    table: torch.Tensor  # fp32 [n, Lq], similarities of the centroids

    @cached_property
    def inverse_norms(self):
        """float16 [tokens], of what they decompress to, in bf16 as the queries."""
        found = []
        for codes, residuals in zip(self.codes.split(1000), self.residuals.split(1000), strict=True):
            shifts = torch.arange(0, 8, self.nbits, device=codes.device, dtype=torch.uint8)
            buckets = (residuals.unsqueeze(-1) >> shifts & 2**self.nbits - 1).flatten(2)
            tokens = self.centroids[codes].float() + self.weights[buckets.int()]
            found.append((1 / tokens.norm(dim=-1)).half().flatten())
        return torch.cat(found)


def draw_index(shape, device, dtype, n=N_CENTROIDS):
    """Documents of equal length: late-interaction-kernels tunes its kernel for the longest. The shape's name
    ends in the bits of a bucket: plaid-2."""
    nbits = int(shape.name.rpartition("-")[2])
    Q, centroids = (
        F.normalize(torch.randn(rows, shape.d, device=device), dim=-1).to(dtype) for rows in (shape.Lq, n)
    )
    codes = torch.randint(n, (shape.Nd, shape.Ld), device=device, dtype=torch.int32)
    row = (shape.d * nbits + 7) // 8
    residuals = torch.randint(256, (shape.Nd, shape.Ld, row), device=device, dtype=torch.uint8)
    lengths = torch.full((shape.Nd,), shape.Ld, device=device)
    offsets = torch.arange(shape.Nd + 1, device=device, dtype=torch.int32) * shape.Ld
    weights = torch.linspace(-0.05, 0.05, 2**nbits, device=device)
    table = centroids.float() @ Q.float().T
    return Index(Q, codes, residuals, lengths, offsets, centroids, weights, nbits, table)


def exact_scores(x, variant):
    """fp64 scores [Nd], of some documents at a time."""
    parts = list(zip(*(t.split(250) for t in (x.codes, x.residuals, x.lengths)), strict=True))
    if variant == CENTROIDS:
        table = x.table.double()
        scores = (plaid_approx_score_reference(table, codes, lengths) for codes, _, lengths in parts)
    else:
        of, Q = (x.centroids, x.weights, x.nbits), x.Q.double()
        scores = (maxsim_residual_reference(Q, *part, *of, normalize=True) for part in parts)
    return torch.cat(list(scores))


def _plaid(module, variant):
    approximate = function(module, "plaid_approx_score")
    if variant == CENTROIDS:
        return lambda x: approximate(x.table, x.codes, x.lengths)
    if variant == NORMED:
        return lambda x: li.ops.maxsim_residual_normed(
            x.Q[None], x.codes.flatten(), x.residuals.flatten(0, 1), x.inverse_norms, x.offsets, x.centroids,
            x.weights,
        ).squeeze(0)  # fmt: skip
    packed = function(module, "maxsim_residual_varlen")
    return lambda x: packed(
        x.Q, x.codes.flatten(), x.residuals.flatten(0, 1), x.offsets, x.centroids, x.weights, x.nbits,
        max_seqlen_d=x.codes.shape[1], normalize=True,  # the longest spares late-interaction-kernels a wait
    )  # fmt: skip


def measure_plaid(b):
    """Decompression and MaxSim in one call, and scores by centroids alone."""
    rows = []
    n = N_CENTROIDS if b.settings.on_gpu else 64
    for variant in PLAID:
        if variant == NORMED and not (b.settings.on_gpu and b.shape.d == 128 and b.shape.name.endswith("-2")):
            continue
        first = draw_index(b.shape, b.settings.device, torch.bfloat16, n)
        size = first.codes.nbytes + (first.table if variant == CENTROIDS else first.residuals).nbytes
        count = sets_of_bytes(size, b.settings.cache_bytes)
        others = (draw_index(b.shape, b.settings.device, torch.bfloat16, n) for _ in range(count - 1))
        sets = [(x,) for x in (first, *others)]
        wanted = exact_scores(first, variant)
        timed, skipped = [], []
        for impl, module in ((OURS, "late_interaction.lik.plaid"), (LIK, "late_interaction_kernels.plaid")):
            if impl != OURS and (variant == NORMED or not b.has(impl)):
                continue
            waits = impl == LIK and variant == PACKED  # its assertion reads from the device
            make, options = partial(_plaid, module, variant), {"capture": not waits, "nbits": first.nbits}
            each = b.forward(impl, variant, make, sets, wanted, dtype=torch.bfloat16, **options)
            if waits and first.residuals.numel() > _LIK_BYTES:
                skipped.append({**each.row, "skipped": "its offsets into residuals have 32 bits"})
            else:
                timed.append(each)
        rows += b.measure(timed) + skipped
    return rows


# ---- the best documents of a corpus ----

K = 100
SCORES, TOP, NORMALIZED = "scores alone", "top 100", "top 100, normalized"
ONE_QUERY = "scores alone, one query"
PINNED, PAGEABLE, MAPPED = "pinned", "pageable", "memory-mapped"
RETRIEVE = (SCORES, TOP, NORMALIZED, ONE_QUERY, PINNED, PAGEABLE, MAPPED)
_DRAWN = 20_000  # documents quantized at a time


def measure_retrieval(b):
    """The name of the shape says where the corpus lies: "host" in it, in the host's memory; "fp8", quantized.
    Every corpus is many times the L2 cache, so one input set is enough."""
    if "fp8" in b.shape.name:
        return _fp8_corpus(b)
    x = draw(b.shape, b.settings.device, b.settings.dtype)
    return (_from_host if "host" in b.shape.name else _on_device)(b, x.Q, x.D)


def _on_device(b, Q, D):
    exact = reference_scores(b.shape, Q, D)[0]
    best = exact.topk(min(K, b.shape.Nd)).values
    timed = [b.forward(OURS, SCORES, lambda: li.maxsim, [(Q, D)], exact)]
    for impl, package in ((OURS, "late_interaction.lik"), (LIK, "late_interaction_kernels")):
        if impl == OURS or b.has(impl):
            for variant, module, name in ((TOP, "topk", "maxsim_topk"), (NORMALIZED, "retrieve", "retrieve")):
                make = partial(function, f"{package}.{module}", name)
                timed.append(b.forward(impl, variant, make, [(Q, D, K)], best))
    return b.measure(timed)


def _fp8_corpus(b):
    device, shape = b.settings.device, b.shape
    Q, scale_Q = fp8.quantize_fp8_per_token(draw(dataclasses.replace(shape, Nd=1), device, torch.bfloat16).Q)
    parts = []
    for start in range(0, shape.Nd, _DRAWN):
        part = dataclasses.replace(shape, Nd=min(_DRAWN, shape.Nd - start))
        codes, scales = fp8.quantize_fp8_per_token(draw(part, device, torch.bfloat16).D)
        restored = (fp8.dequantize_fp8_per_token(*x) for x in ((Q, scale_Q), (codes, scales)))
        parts.append((codes, scales, reference_scores(part, *restored)[0]))
    D, scale_D = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    wanted = torch.cat([part[2] for part in parts], dim=1)
    parts.clear()
    best = min(K, shape.Nd)

    def scores(queries):
        return fp8.maxsim_inference_fp8(Q[:queries], D, scale_Q=scale_Q[:queries], scale_D=scale_D)

    def one(variant, Nq, call, exact):
        of = dataclasses.replace(shape, Nq=Nq)
        return b.forward(OURS, variant, lambda: call, [()], exact, dtype=D.dtype, shape=of)

    return b.measure([
        one(ONE_QUERY, 1, lambda: scores(1), wanted[:1]),
        one(SCORES, shape.Nq, lambda: scores(shape.Nq), wanted),
        one(TOP, shape.Nq, lambda: scores(shape.Nq).topk(best), wanted.topk(best).values),
    ])  # fmt: skip


def _from_host(b, Q, D):
    """Wall time of a corpus in pinned memory, in pageable memory, and in a file mapped into memory."""
    pinned, target = D.cpu().pin_memory(), torch.empty_like(D)
    best = li.search(Q, D, K).indices

    def wall(call):
        """Best of three, in microseconds."""
        return 1e6 * min(wall_seconds(call, Q.device) for _ in range(3))

    bus = wall(lambda: target.copy_(pinned, non_blocking=True))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "corpus.bin")
        D.cpu().view(torch.int16).numpy().tofile(path)
        mapped = torch.from_file(str(path), size=D.numel(), dtype=D.dtype).view(D.shape)
        corpora = (PINNED, pinned), (PAGEABLE, D.cpu()), (MAPPED, mapped)
        for variant, corpus in corpora:
            row = b.row(OURS, "fwd", variant, input_sets=1, bus_gbps=D.nbytes / bus * 1e-3)
            if torch.equal(li.search(Q, corpus, K).indices, best):
                row["wall_us"] = wall(partial(li.search, Q, corpus, K))
                row["over_bus"] = row["wall_us"] / bus
            else:
                row["error"] = "not the documents found on the device"
            rows.append(row)
    return rows
