"""Scores of each query's own documents, padded or packed, and which of them it has."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.losses import check_candidates
from late_interaction._checks.messages import shape_of
from late_interaction._checks.options import Precision, check_flag
from late_interaction._checks.tensors import check_has_d
from late_interaction._contrastive.sequences import zeroed
from late_interaction._maxsim import maxsim
from late_interaction._scoring.norm_warning import look, unwatched
from late_interaction._scoring.normalized import unit_packed
from late_interaction._scoring.sequences import as_tokens, own_pairs
from late_interaction.score_pairs import score_pairs_packed
from late_interaction.tokens import Tokens


def own_scores(
    name: str, Q: Any, D: Any, candidate_mask: Tensor | None, normalize: bool, precision: Precision | None
) -> tuple[Tensor, Tensor | None]:
    """Score each query with its own documents, ``[B, K]``, and tell which are candidates; None: all.

    Documents that are left out are scored without tokens, so they get no gradient. name: of the loss.
    """
    q, d = _as_tokens(Q, D)
    each = len(d) // max(len(q), 1)
    if len(d) != each * len(q):
        raise ValueError(
            f"D must hold as many documents for each of the {len(q)} queries, got {len(d)} in all"
        )
    shape = len(q), D.shape[1] if isinstance(D, Tensor) else each
    candidates = check_candidates(candidate_mask, shape, q.device)
    options: dict[str, Any] = {"normalize": normalize, "precision": precision}
    found: tuple[Tensor, Tensor | None]
    if q.is_packed or d.is_packed:
        found = _packed_scores(q.pack(), d.pack(), candidates, shape, **options)
    else:
        found = _padded_scores(q, d, candidates, shape, **options)
    if not normalize:
        look(name, q.values, q.mask)
    return found


def _as_tokens(Q: Any, D: Any) -> tuple[Tokens, Tokens]:
    q, d = as_tokens("Q", Q), as_tokens("D", D)
    tensors = [x for x in (q, d) if isinstance(x, Tensor)]
    if any(x.dim() != (3 if x is q else 4) for x in tensors):
        got = " and ".join(shape_of(x) if isinstance(x, Tensor) else "Tokens" for x in (q, d))
        raise ValueError(f"Q must be [B, Lq, d] and D [B, K, Ld, d], or Tokens or lists, got {got}")
    for name, x in (("Q", q), ("D", d)):
        if isinstance(x, Tensor):
            check_has_d(name, x)
    if isinstance(d, Tensor) and d.shape[0] != (q.shape[0] if isinstance(q, Tensor) else len(q)):
        raise ValueError(f"D must be [B, K, Ld, d] with the B of Q, got {shape_of(d)}")
    return (
        Tokens._made(q) if isinstance(q, Tensor) else q,
        Tokens._made(d.flatten(0, 1)) if isinstance(d, Tensor) else d,
    )


def _padded_scores(
    q: Tokens, d: Tokens, candidates: Tensor | None, shape: tuple[int, int], **options: Any
) -> tuple[Tensor, Tensor | None]:
    D = d.values.unflatten(0, shape)
    mask = None if d.mask is None else d.mask.unflatten(0, shape)
    if candidates is not None:
        of_tokens = candidates.unsqueeze(-1).expand(D.shape[:-1])
        mask = of_tokens if mask is None else mask & of_tokens
    scores: Tensor = unwatched(maxsim, q.values, D, q.mask, mask, **options)
    return scores, None if mask is None else mask.any(-1)


def _packed_scores(
    q: Tokens, d: Tokens, candidates: Tensor | None, shape: tuple[int, int], normalize: bool,
    precision: Precision | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_flag("normalize", normalize)
    Q, D, cu_q, cu_d, documents = q.values, d.values, q.offsets, d.offsets, len(d)
    assert cu_q is not None and cu_d is not None
    kept = (cu_d[1:] > cu_d[:-1]).view(shape)
    rows, pairs = own_pairs(documents, shape[1], Q.device)
    if candidates is not None:  # those that are left out become one more document, which is empty
        kept = kept & candidates
        pairs = pairs.masked_fill(~candidates.flatten(), documents)
        if normalize:
            D = zeroed(d, ~candidates.flatten()).values
    if normalize:
        Q, D = unit_packed(Q, cu_q), unit_packed(D, cu_d)
    if candidates is not None:
        cu_d = torch.cat((cu_d, cu_d[-1:]))
    scores: Tensor = unwatched(
        score_pairs_packed, Q, D, cu_q, cu_d, rows, pairs, max_seqlen_q=q.max_length, precision=precision
    )
    return scores.view(shape), kept
