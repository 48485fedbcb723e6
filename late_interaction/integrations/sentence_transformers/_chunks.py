"""What the kernels score of a call to Sentence Transformers' functions, and what is left to its own code.

:func:`grid` and :func:`pairs` take whole calls; they return None for what the kernels do not take. Its own
code cuts such a call into padded chunks, and :func:`score_chunk` and :func:`score_pairs` take those.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from late_interaction._maxsim import maxsim, maxsim_pairs
from late_interaction.integrations._shared import calls
from late_interaction.integrations._shared.zero_padded import Ragged, blocks
from late_interaction.integrations.sentence_transformers._inputs import (
    Padded,
    budget,
    each,
    fill_empty,
    home_of,
    kept,
    learns,
    mask_fits,
    score_dtype,
    side_of,
    split_weights,
    takes,
    unfit,
)
from late_interaction.integrations.sentence_transformers._originals import PACKAGE, SIMILARITY, own
from late_interaction.tokens import Tokens

Device = str | torch.device | None


# ---- the leaves: one padded chunk, in the place of Sentence Transformers' einsum ----


def score_chunk(a: Tensor, b: Tensor, a_mask: Tensor | None, b_mask: Tensor | None) -> Tensor:
    """Replace ``_maxsim_score_documents``: ``[Nq, Nd]``."""
    return _chunk("_maxsim_score_documents", a, b, a_mask, b_mask)


def score_pairs(a: Tensor, b: Tensor, a_mask: Tensor | None, b_mask: Tensor | None) -> Tensor:
    """Replace ``_maxsim_score_pairs``: ``[B]``."""
    return _chunk("_maxsim_score_pairs", a, b, a_mask, b_mask)


def _chunk(name: str, a: Tensor, b: Tensor, a_mask: Tensor | None, b_mask: Tensor | None) -> Tensor:
    a_mask, b_mask = each(a_mask, a), each(b_mask, b)
    reason = unfit(a, b)
    if reason is None and not (a.dim() == b.dim() == 3 and mask_fits(a_mask, a) and mask_fits(b_mask, b)):
        reason = "embeddings or masks of another form"
    if reason is not None:
        calls.left(PACKAGE, name, reason)
        return own(SIMILARITY, name)(a, b, a_mask, b_mask)
    calls.scored(PACKAGE)
    score = maxsim if name == "_maxsim_score_documents" else maxsim_pairs
    d_mask = None if b_mask is None else b_mask.bool()
    q_mask, q_weights = split_weights(a_mask)
    # The maxima are float32, and the mask multiplies them.
    dtype = torch.float32 if a_mask is None else torch.promote_types(torch.float32, a_mask.dtype)
    scores = score(a, b, q_mask, d_mask, q_weights=q_weights).to(dtype)
    return scores if d_mask is None else fill_empty(scores, ~d_mask.any(dim=-1))


# ---- what the kernels score ----


def theirs(name: str) -> Callable[..., Tensor]:
    """Sentence Transformers' function, whose chunks are scored here."""
    ours = {"_maxsim_score_documents": score_chunk, "_maxsim_score_pairs": score_pairs}
    return own(SIMILARITY, name, ours)


def grid(
    a: Any, b: Any, a_mask: Any, b_mask: Any, chunk_elements: int | None, device: Device
) -> Tensor | None:
    queries, documents = side_of(a, a_mask, "a_mask"), side_of(b, b_mask, "b_mask")
    if queries is None or documents is None or _is_weighted(queries):
        return None
    home = home_of(b, a)
    place = _place(device, home)
    if isinstance(documents, Ragged):
        return _packed_grid(queries, documents, place, home, budget(chunk_elements))
    return _padded_grid(queries, documents, place, home, budget(chunk_elements))


def _packed_grid(
    queries: Padded | Ragged, documents: Ragged, place: torch.device, home: torch.device, most: int
) -> Tensor | None:
    Q = _packed_queries(queries, place)
    dtype = score_dtype(Q.values, queries.mask if isinstance(queries, Padded) else None)
    lengths, columns = documents.lengths, []
    for start, end in blocks(lengths, most // max(Q.d, 1)):
        D = documents.packed(start, end, place)
        if not takes(Q.values, D.values):
            return None
        columns.append(maxsim(Q, D).to(home, dtype))
    return _filled(columns[0] if len(columns) == 1 else torch.cat(columns, dim=1), lengths)


def _packed_queries(queries: Padded | Ragged, place: torch.device) -> Tokens:
    """Pack queries. The host waits for a GPU to count padded ones."""
    if isinstance(queries, Ragged):
        return queries.packed(0, len(queries.items), place)
    tokens = queries.tokens.to(place)
    live = tokens.any(dim=-1) if queries.mask is None else queries.mask.to(place).bool()
    return Tokens._made(tokens, live).pack()


def _padded_grid(
    queries: Padded | Ragged, documents: Padded, place: torch.device, home: torch.device, most: int
) -> Tensor | None:
    q_mask: Tensor | None
    if isinstance(queries, Ragged):
        Q = pad_sequence(queries.items, batch_first=True).to(place)
        lengths = torch.tensor(queries.lengths, device=place)
        q_mask = torch.arange(Q.shape[1], device=place) < lengths.unsqueeze(1)
    else:
        Q = queries.tokens.to(place)
        q_mask = None if queries.mask is None else queries.mask.to(place)
    dtype = score_dtype(Q, queries.mask if isinstance(queries, Padded) else None)
    N, L, d = documents.tokens.shape
    step = N if place == documents.tokens.device else max(most // max(L * d, 1), 1)
    columns = []
    for start in range(0, N, step):
        D, d_mask = documents.tokens[start : start + step].to(place), documents.mask
        d_mask = d_mask if d_mask is None else d_mask[start : start + step].to(place)
        if not takes(Q, D):
            return None
        columns.append(dense(maxsim, Q, D, q_mask, d_mask).to(home, dtype))
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def pairs(
    a: Any, b: Any, a_mask: Any, b_mask: Any, chunk_elements: int | None, device: Device
) -> Tensor | None:
    queries, documents = side_of(a, a_mask, "a_mask"), side_of(b, b_mask, "b_mask")
    if queries is None or documents is None or len(queries) != len(documents) or _is_weighted(queries):
        return None
    home = home_of(b, a)
    place = _place(device, home)
    if isinstance(queries, Ragged) and isinstance(documents, Ragged):
        return _packed_pairs(queries, documents, place, home, budget(chunk_elements))
    if isinstance(queries, Padded) and isinstance(documents, Padded):
        Q, D = queries.tokens, documents.tokens
        if place == D.device and takes(Q, D):
            scores = dense(maxsim_pairs, Q, D, queries.mask, documents.mask)
            return scores.to(score_dtype(Q, queries.mask))
    return None


def _packed_pairs(
    queries: Ragged, documents: Ragged, place: torch.device, home: torch.device, most: int
) -> Tensor | None:
    q_lengths, d_lengths = queries.lengths, documents.lengths
    sizes = [q + d for q, d in zip(q_lengths, d_lengths, strict=True)]
    parts = []
    for start, end in blocks(sizes, most // max(documents.items[0].shape[1], 1)):
        Q, D = queries.packed(start, end, place), documents.packed(start, end, place)
        if not takes(Q.values, D.values):
            return None
        parts.append(maxsim_pairs(Q, D).to(home, score_dtype(Q.values, None)))
    return _filled(parts[0] if len(parts) == 1 else torch.cat(parts), d_lengths)


def dense(
    score: Callable[..., Tensor], Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None
) -> Tensor:
    """Score padded tokens with a mask, or whose rows of zeros are padding."""
    if q_mask is not None or learns(Q):  # a padded query adds 0 as it is, but is not to get a gradient
        q_mask = kept(Q, q_mask)
    d_mask = kept(D, d_mask)
    scores = score(Q, D, q_mask, d_mask)
    return scores if d_mask is None else fill_empty(scores, ~d_mask.any(dim=-1))


def _filled(scores: Tensor, lengths: list[int]) -> Tensor:
    """Scores of documents of these lengths, along the last dim."""
    if all(lengths):
        return scores
    return fill_empty(scores, torch.tensor(lengths, device=scores.device) == 0)


def _place(device: Device, home: torch.device) -> torch.device:
    """Return where to score, with the index that tensors there name."""
    if device is None:
        return home
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def _is_weighted(queries: Padded | Ragged) -> bool:
    mask = queries.mask if isinstance(queries, Padded) else None
    return mask is not None and mask.dtype != torch.bool
