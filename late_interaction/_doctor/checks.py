"""The operators on small inputs, beside their definition in float64 (:mod:`late_interaction.reference`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, pad

from late_interaction import (
    Codes,
    Muvera,
    codecs,
    losses,
    maxsim,
    maxsim_pairs,
    maxsim_with_winners,
    ops,
    reference,
    search,
    smooth_maxsim,
    xtr_scores,
)
from late_interaction._doctor.ceilings import float32_products
from late_interaction._doctor.text import error_text
from late_interaction._doctor.timing import release
from late_interaction.fused_head import maxsim_from_hidden
from late_interaction.score_pairs import rerank_direct, score_pairs_packed

Results = tuple[Tensor, ...]
Check = Callable[[], tuple[Results, Results]]  # what is found, and the same in float64
HALF, WIDE, CODES = "bfloat16", "float32", "codes"
# Limits of the relative error: bfloat16 rounds results, and float32 multiplies at full accuracy.
LIMITS = {HALF: 1e-2, WIDE: 1e-4, CODES: 1e-2}


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Return ||out - ref|| / ||ref||; infinite if it is NaN or the element counts differ."""
    if out.numel() != ref.numel():
        return float("inf")
    error = (out.detach().double().reshape(ref.shape) - ref).norm() / ref.norm()
    value = float(error)
    return value if value == value else float("inf")


class Inputs:
    """Queries, documents and what goes with them: the same numbers on every machine."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)
        self.Q, self.D = self.unit(4, 33, 128), self.unit(12, 70, 128)
        self.masks = q_mask, d_mask = self.mask(4, 33), self.mask(12, 70)
        self.weights = self.normal(4, 33).float().abs()  # of a query token: as if it were longer
        self.offsets = [pad(mask.sum(1).cumsum(0), (1, 0)).int() for mask in self.masks]
        self.packed = self.Q[q_mask], self.D[d_mask]
        chosen = torch.arange(20, device=device, dtype=torch.int32)
        self.pairs = chosen % 4, chosen * 5 % 12

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def unit(self, *shape: int) -> Tensor:
        """Draw tokens of length 1, but for rounding."""
        return normalize(torch.randn(shape, generator=self.generator), dim=-1).to(self.device, self.dtype)

    def mask(self, *shape: int) -> Tensor:
        """Draw which tokens count: the first of each sequence, and most of the others."""
        kept = torch.rand(shape, generator=self.generator) < 0.8
        kept[:, 0] = True
        return kept.to(self.device)

    def lists(self, Q: Tensor, D: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Cut packed tokens into sequences."""
        q, d = (x.split(cu.diff().tolist()) for x, cu in zip((Q, D), self.offsets, strict=True))
        return list(q), list(d)


def _step(f: Callable[..., Tensor], exact: Callable[..., Tensor], *leaves: Tensor) -> Check:
    """Check scores without a gradient, and scores with the gradients of all leaves."""

    def of(function: Callable[..., Tensor], dtype: torch.dtype | None) -> Results:
        given = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
        scores = function(*given)
        weights = torch.linspace(-1, 2, scores.numel() + 1, dtype=scores.dtype, device=scores.device)[1:]
        return scores.detach(), *torch.autograd.grad((scores.flatten() * weights).sum(), given)

    def check() -> tuple[Results, Results]:
        wanted = of(exact, torch.float64)
        return (f(*leaves), *of(f, None)), (wanted[0], *wanted)

    return check


def _values(f: Callable[[], Any], exact: Callable[[], Any]) -> Check:
    return lambda: (tuple(f()), tuple(x.double() for x in exact()))


def _scores(x: Inputs) -> dict[str, Check]:
    exact, (q_mask, d_mask) = reference.maxsim_reference, x.masks
    varlen, listed = reference.maxsim_reference_varlen, reference.maxsim_reference_scatter
    places, weights = (*x.offsets, *x.pairs), x.weights[q_mask]

    def dense(**options: Any) -> Check:
        unit = options.get("normalize", False)
        return _step(
            lambda Q, D: maxsim(Q, D, q_mask, d_mask, **options),
            lambda Q, D: exact(Q, D, q_mask, d_mask, normalize=unit), x.Q, x.D,
        )  # fmt: skip

    return {
        "maxsim, gradients by lowmem": dense(backward="lowmem"),
        "maxsim, gradients by unified": dense(backward="unified"),
        "maxsim, winners recomputed": dense(winners="recompute"),
        "maxsim, normalized": dense(normalize=True),
        "maxsim, weights of query tokens": _step(
            lambda Q, D, w: maxsim(Q, D, None, d_mask, q_weights=w),
            lambda Q, D, w: exact(Q * w[..., None], D, None, d_mask), x.Q, x.D, x.weights,
        ),
        "maxsim, winners": _values(
            lambda: maxsim_with_winners(x.Q, x.D, q_mask, d_mask),
            lambda: reference.maxsim_with_winners_reference(x.Q.double(), x.D.double(), q_mask, d_mask),
        ),
        "maxsim, documents of each query's own": _step(maxsim, exact, x.Q, x.D.unflatten(0, (4, 3))),
        "maxsim_pairs": _step(maxsim_pairs, lambda Q, D: exact(Q, D[:, None])[:, 0], x.Q, x.D[:4]),
        "packed tokens": _step(
            lambda Q, D: maxsim(*x.lists(Q, D)), lambda Q, D: varlen(Q, D, *x.offsets), *x.packed
        ),
        "packed tokens, weights": _step(
            lambda Q, D, w: maxsim(*x.lists(Q, D), q_weights=w),
            lambda Q, D, w: varlen(Q * w[:, None], D, *x.offsets), *x.packed, weights,
        ),
        "listed pairs": _step(
            lambda Q, D: score_pairs_packed(Q, D, *places), lambda Q, D: listed(Q, D, *places), *x.packed
        ),
        "listed pairs, weights": _step(
            lambda Q, D, w: score_pairs_packed(Q, D, *places, q_weights=w),
            lambda Q, D, w: listed(Q * w[:, None], D, *places), *x.packed, weights,
        ),
        "ranges of packed tokens": _values(
            lambda: [rerank_direct(x.Q[0], x.packed[1], x.offsets[1][:-1], x.offsets[1].diff())],
            lambda: exact(x.Q[:1].double(), x.D.double(), None, d_mask),
        ),
    }  # fmt: skip


def _of_each(Q: Any, D: Codes) -> Tensor:
    """Score codes by what they stand for, a document at a time."""
    tokens = D.codec.decode(D)
    rows = tokens.values.split(tokens.lengths.tolist()) if tokens.is_packed else tokens.values
    queries = (Q.codec.decode(Q).values if isinstance(Q, Codes) else Q).double()
    return torch.cat([reference.maxsim_reference(queries, row.double()[None]) for row in rows], 1)


def _codes(x: Inputs) -> dict[str, Check]:
    int8, fp8, signs = codecs.Int8(), codecs.Fp8(), codecs.Bits(1, scales=False)
    kinds: dict[str, tuple[Any, Any]] = {
        "int8 codes": (int8, int8), "fp8 codes": (fp8, fp8), "4-bit codes": (int8, codecs.Bits(4)),
        "1-bit codes": (int8, codecs.Bits(1)), "signs of both": (signs, signs),
    }  # fmt: skip
    residual = codecs.Residual.train(x.packed[1], 16, iterations=2)
    found: dict[str, Check] = {}
    for form, documents in (("", x.D), (", packed", x.lists(*x.packed)[1])):
        for name, (mine, theirs) in kinds.items():
            Q, D = mine.encode(x.Q), theirs.encode(documents)
            found[name + form] = _values(partial(_one, maxsim, Q, D), partial(_one, _of_each, Q, D))
        D = residual.encode(documents)
        found["2-bit residuals" + form] = _step(
            partial(_flipped, maxsim, D), partial(_flipped, _of_each, D), x.Q
        )
    codes = residual.encode(x.D).centroids
    assert codes is not None
    centroids = residual.centroids.double()[codes.long()]
    found["centroids alone (PLAID)"] = _values(
        lambda: [residual.centroid_scores(x.Q, residual.encode(x.D))],
        lambda: [reference.maxsim_reference(x.Q.double(), centroids)],
    )
    return found


def _one(f: Callable[..., Tensor], *args: Any) -> list[Tensor]:
    return [f(*args)]


def _flipped(f: Callable[..., Tensor], D: Codes, Q: Tensor) -> Tensor:
    return f(Q, D)


def _normed(x: Inputs) -> dict[str, Check]:
    """Check what searches a corpus of 2-bit residuals that a GPU holds, and decompresses no token."""
    codec = codecs.Residual.train(x.packed[1].float(), 16, iterations=2, dtype=x.dtype)
    D = codec.encode([d.float() for d in x.lists(*x.packed)[1]])
    parts = D.centroids, D.values, None, x.offsets[1], codec.centroids, codec.bucket_weights
    return {
        "2-bit residuals, not decompressed": _values(
            lambda: [ops.maxsim_residual_normed(x.Q, *parts)], lambda: [_of_each(x.Q, D)]
        )
    }


def _others(x: Inputs) -> dict[str, Check]:
    q_mask, d_mask = x.masks
    hidden = x.Q, x.normal(12, 70, 96), x.normal(128, 96) / 10, x.normal(128) / 10
    singles, muvera = (x.unit(256, 1, 128), x.unit(256, 1, 128)), Muvera(128, 3, 4, d_proj=16)

    def encoded(tokens: Tensor, document: bool) -> Tensor:
        found = [reference.muvera_reference(muvera, t.double().cpu(), document=document) for t in tokens]
        return torch.stack(found).to(x.device)

    def loss(scores: Tensor) -> Tensor:
        return cross_entropy(scores, torch.arange(len(scores), device=x.device))[None]

    def of_hidden(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda Q, H, W, b: f(Q, H, W, b, d_mask, normalize=True)

    theirs = of_hidden(reference.maxsim_from_hidden_reference)
    exact = reference.maxsim_reference(x.Q.double(), x.D.double(), None, d_mask).topk(10).values

    return {
        "from hidden states": _values(
            lambda: [of_hidden(maxsim_from_hidden)(*hidden)], lambda: [theirs(*(h.double() for h in hidden))]
        )
        if x.dtype == torch.bfloat16  # projected tokens are rounded, and others may win
        else _step(of_hidden(maxsim_from_hidden), theirs, *hidden),
        "smooth_maxsim": _step(
            lambda Q, D: smooth_maxsim(Q, D, q_mask, d_mask, tau=0.1),
            lambda Q, D: reference.smooth_maxsim_reference(Q, D, q_mask, d_mask, tau=0.1), x.Q, x.D,
        ),
        "xtr_scores": _step(
            lambda Q, D: xtr_scores(Q, D, 100, q_mask, d_mask),
            lambda Q, D: reference.xtr_scores_reference(Q, D, 100, q_mask, d_mask), x.Q, x.D,
        ),
        "contrastive loss": _step(
            lambda Q, D: losses.contrastive(Q, D)[None],
            lambda Q, D: loss(reference.maxsim_reference(Q, D)), x.Q, x.D,
        ),
        "contrastive loss, single vectors": _step(
            lambda Q, D: losses.contrastive(Q, D)[None], lambda Q, D: loss(Q[:, 0] @ D[:, 0].T), *singles
        ),
        "search": _values(lambda: [search(x.Q, x.D, 10, d_mask=d_mask).scores], lambda: [exact]),
        "Muvera": _values(
            lambda: [muvera.encode_queries(x.Q.float()), muvera.encode_documents(x.D.float())],
            lambda: [encoded(x.Q, False), encoded(x.D, True)],
        ),
        "pooling by Ward": _pool(x, ops.ward_labels),
        "pooling by k-means": _pool(x, ops.kmeans_labels),
    }  # fmt: skip


def _pool(x: Inputs, label: Any) -> Check:
    """Check that a cluster is the copies of one token: each document has few tokens, many times in turn."""
    tokens = x.unit(12, 7, 128).repeat(1, 10, 1) + 0.01 * x.normal(12, 70, 128)
    offsets = 70 * torch.arange(13, device=x.device, dtype=torch.int32)
    turns = torch.arange(70, device=x.device) % 7

    def alike() -> list[Tensor]:
        found = label(tokens.flatten(0, 1), offsets, torch.full_like(offsets[1:], 7))[0].view(12, 70)
        return [found[:, :, None] == found[:, None]]

    return _values(alike, lambda: [(turns[:, None] == turns).expand(12, 70, 70)])


def run(device: torch.device) -> Iterator[dict[str, Any]]:
    """Run each check in each dtype: its name and dtype, error, limit, and what it raised."""
    parts = [(_scores, HALF), (_scores, WIDE), (_codes, CODES), (_others, HALF), (_others, WIDE)]
    parts += [(_normed, HALF)] if device.type == "cuda" else []
    for make, dtype in parts:
        with float32_products("highest"):
            try:
                checks = make(Inputs(device, torch.bfloat16 if dtype == HALF else torch.float32))
            except Exception as error:  # what encodes documents has failed
                checks = {f"inputs of {make.__name__[1:]}": partial(_raise, error)}
            for name, check in checks.items():
                yield _row(name, dtype, check)
        release(device)


def _raise(error: Exception) -> NoReturn:
    raise error


def _row(name: str, dtype: str, check: Check) -> dict[str, Any]:
    error, raised = None, None
    try:
        found, wanted = check()
        error = max(relative_error(*pair) for pair in zip(found, wanted, strict=True))
    except Exception as problem:  # a wrong operator must not end the others
        raised = error_text(problem)
    row = {"check": name, "dtype": dtype, "error": error, "limit": LIMITS[dtype], "raised": raised}
    return row | {"ok": error is not None and error <= LIMITS[dtype]}
