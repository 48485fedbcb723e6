"""Scores of each query's own documents, dense or packed, and which of them it has."""

from typing import Any, TypedDict

import torch
from torch import Tensor

from late_interaction._checks.choices import Precision
from late_interaction._checks.messages import shape_of
from late_interaction._checks.options import check_flag
from late_interaction._checks.tensors import check_embeddings, check_mask, check_mask_kind
from late_interaction._contrastive.sequences import as_tensors
from late_interaction._maxsim import maxsim
from late_interaction._scoring.norm_warning import look, unwatched
from late_interaction._scoring.normalized import unit_packed
from late_interaction._scoring.sequences import is_sequences
from late_interaction.score_pairs import score_pairs_packed


class KDInputs(TypedDict, total=False):
    """Name what a batch has beside queries, documents and the teacher's scores."""

    q_mask: Tensor | None
    d_mask: Tensor | None
    candidate_mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_d: Tensor | None


def own_scores(
    name: str, Q: Any, D: Any, inputs: KDInputs, normalize: bool, precision: Precision | None
) -> tuple[Tensor, Tensor | None]:
    """``[B, K]`` scores of each query with its own documents, and which of them are candidates; None: all.

    Documents that are left out have no tokens in what is scored, and so no gradient. name: of the loss.
    """
    if is_sequences(Q) or is_sequences(D):
        masks = inputs.get("q_mask"), None, inputs.get("d_mask")
        offsets = inputs.get("cu_seqlens_q"), None, inputs.get("cu_seqlens_d")
        names = "Q", "hard_negatives", "D"
        (Q, _, D), masks, offsets = as_tensors((Q, None, D), masks, offsets, names)
        inputs = {**inputs, "q_mask": masks[0], "d_mask": masks[2]}
        inputs |= {"cu_seqlens_q": offsets[0], "cu_seqlens_d": offsets[2]}
    for side, x in (("Q", Q), ("D", D)):
        check_embeddings(side, x)
    dense = inputs.get("cu_seqlens_q") is None and inputs.get("cu_seqlens_d") is None
    found = (_dense_scores if dense else _packed_scores)(Q, D, inputs, normalize, precision)
    if not normalize:
        look(name, Q, inputs.get("q_mask"))
    return found


def _dense_scores(
    Q: Tensor, D: Tensor, inputs: KDInputs, normalize: bool, precision: Precision | None
) -> tuple[Tensor, Tensor | None]:
    if Q.dim() != 3 or D.dim() != 4:
        raise ValueError(
            "Q must be [B, Lq, d] and D [B, K, Ld, d] (or both packed, with cu_seqlens), got"
            f" {list(Q.shape)} and {list(D.shape)}"
        )
    candidates = _checked_candidates(inputs, Q.shape[0], D.shape[1], Q.device)
    d_mask = check_mask("d_mask", inputs.get("d_mask"), "D", D)
    if candidates is not None:
        of_tokens = candidates.unsqueeze(-1).expand(D.shape[:-1])
        d_mask = of_tokens if d_mask is None else d_mask & of_tokens
    options: dict[str, Any] = {"normalize": normalize, "precision": precision}
    scores: Tensor = unwatched(maxsim, Q, D, inputs.get("q_mask"), d_mask, **options)
    return scores, None if d_mask is None else d_mask.any(-1)


def _packed_scores(
    Q: Tensor, D: Tensor, inputs: KDInputs, normalize: bool, precision: Precision | None
) -> tuple[Tensor, Tensor]:
    cu_q, cu_d = inputs.get("cu_seqlens_q"), inputs.get("cu_seqlens_d")
    for name, offsets in (("cu_seqlens_q", cu_q), ("cu_seqlens_d", cu_d)):
        if not isinstance(offsets, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor where the other side is packed, got {type(offsets).__name__}"
            )
        if offsets.dim() != 1 or not offsets.numel():
            raise ValueError(f"{name} must be [sequences + 1], got {list(offsets.shape)}")
    assert cu_q is not None and cu_d is not None
    for name, mask in (("q_mask", inputs.get("q_mask")), ("d_mask", inputs.get("d_mask"))):
        if mask is not None:
            raise ValueError(f"{name} must be None with packed tokens: cu_seqlens say which tokens there are")
    check_flag("normalize", normalize)
    queries, documents = max(cu_q.numel() - 1, 0), max(cu_d.numel() - 1, 0)
    each = documents // max(queries, 1)
    if documents != each * queries:
        raise ValueError(
            f"cu_seqlens_d must hold as many documents for each of the {queries} queries, got {documents}"
            " in all"
        )
    candidates = _checked_candidates(inputs, queries, each, Q.device)
    kept = (cu_d[1:] > cu_d[:-1]).view(queries, each)
    pairs = torch.arange(documents, dtype=torch.int32, device=Q.device)
    rows = pairs.div(max(each, 1), rounding_mode="floor")
    if candidates is not None:  # those that are left out become one more document, which is empty
        kept = kept & candidates
        pairs = pairs.masked_fill(~candidates.flatten(), documents)
        if normalize:
            owner = torch.bucketize(torch.arange(len(D), device=D.device), cu_d[1:], right=True)
            D = D.masked_fill((pairs == documents)[owner.clamp_max(documents - 1), None], 0.0)
    if normalize:
        Q, D = unit_packed(Q, cu_q), unit_packed(D, cu_d)
    if candidates is not None:
        cu_d = torch.cat((cu_d, cu_d[-1:]))
    scores: Tensor = unwatched(score_pairs_packed, Q, D, cu_q, cu_d, rows, pairs, precision=precision)
    return scores.view(queries, each), kept


def _checked_candidates(inputs: KDInputs, B: int, K: int, device: torch.device) -> Tensor | None:
    mask = inputs.get("candidate_mask")
    if mask is None:
        return None
    check_mask_kind("candidate_mask", mask, "Q", device)
    if mask.shape != (B, K):
        raise ValueError(f"candidate_mask must be [B, K] = {[B, K]}, got {shape_of(mask)}")
    return mask if mask.dtype == torch.bool else mask != 0
