"""MaxSim of dense batches by definition, from the similarities of all tokens, and what is built on it."""

import torch
from torch import Tensor

from late_interaction._checks.dense import as_given, check_from_hidden, check_maxsim
from late_interaction._checks.options import check_flag, check_tau
from late_interaction._checks.tensors import scores_dtype
from late_interaction._scoring.precision import without_autocast

__all__ = [
    "maxsim_from_hidden_reference",
    "maxsim_reference",
    "maxsim_with_winners_reference",
    "smooth_maxsim_reference",
]

NEG_INF = float("-inf")  # the similarity of a masked document token


def maxsim_reference(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
) -> Tensor:
    """Compute what :func:`late_interaction.maxsim` does, by definition.

    Args:
        Q: ``[Nq, Lq, d]`` or ``[Lq, d]``. Half precision is widened to float32 first; float64 stays.
        D: ``[Nd, Ld, d]``, ``[Ld, d]`` or ``[Nq, K, Ld, d]``.
        q_mask: ``[Nq, Lq]``, True = keep. A masked query token adds 0.
        d_mask: ``D``'s shape without ``d``, True = keep. A masked document token is -inf before the maximum.
        normalize: divide every token by ``max(norm, 1e-12)`` first.

    Returns:
        Scores of the shapes that :func:`late_interaction.maxsim` returns.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_reference
        >>> Q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> D = torch.tensor([[[2.0, 0.0], [0.0, 3.0]], [[1.0, 1.0], [0.0, 0.0]]])
        >>> maxsim_reference(Q, D)
        tensor([[5., 2.]])
    """
    return maxsim_with_winners_reference(Q, D, q_mask, d_mask, normalize=normalize)[0]


def maxsim_with_winners_reference(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute what :func:`late_interaction.maxsim_with_winners` does, by definition.

    Args:
        Q, D, q_mask, d_mask, normalize: as in :func:`maxsim_reference`.

    Returns:
        ``(scores, winners)``, winners int32 with -1 for a query token that is masked or met no valid token.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_with_winners_reference
        >>> Q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> D = torch.tensor([[0.0, 3.0], [2.0, 0.0], [1.0, 1.0]])
        >>> maxsim_with_winners_reference(Q, D)
        (tensor(5.), tensor([1, 0], dtype=torch.int32))
    """
    Q3, DN, q_mask, d_mask = check_maxsim(Q, D, q_mask, d_mask)
    with without_autocast(Q.device.type):
        scores, winners = score_batches(Q3, DN, q_mask, d_mask, normalize)
    return as_given(scores, Q, D), as_given(winners, Q, D)


def score_batches(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Scores ``[Nq, N]`` and winners ``[Nq, N, Lq]`` of checked batches."""
    return sum_of_maxima(similarities(Q, D, q_mask, d_mask, normalize), q_mask, d_mask)


def similarities(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, normalize: bool = False
) -> Tensor:
    """Similarities ``[Nq, N, Lq, Ld]`` of checked batches, 0 where a token is masked."""
    dtype = scores_dtype(Q)
    Q, D = Q.to(dtype), D.to(dtype)
    # Whatever a masked token holds, NaN included, must reach neither a score nor a gradient.
    if q_mask is not None:
        Q = Q.masked_fill(~q_mask.unsqueeze(-1), 0.0)
    if d_mask is not None:
        D = D.masked_fill(~d_mask.unsqueeze(-1), 0.0)
    if normalize:
        Q = torch.nn.functional.normalize(Q, dim=-1, eps=1e-12)
        D = torch.nn.functional.normalize(D, dim=-1, eps=1e-12)
    return torch.einsum("isd,ijtd->ijst" if D.dim() == 4 else "isd,jtd->ijst", Q, D)


def sum_of_maxima(similarity: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores ``[Nq, N]`` and winners ``[Nq, N, Lq]`` of similarities ``[Nq, N, Lq, Ld]``."""
    counts = torch.full(similarity.shape[:-1], similarity.shape[-1] > 0, device=similarity.device)
    if q_mask is not None:
        counts = counts & q_mask.unsqueeze(1)
    if d_mask is not None:
        counts = counts & d_mask.any(-1).unsqueeze(-1)
        similarity = similarity.masked_fill(~d_mask.unsqueeze(-2), NEG_INF)
    if similarity.shape[-1] == 0:  # max needs something to look at: one token that does not count
        similarity = torch.nn.functional.pad(similarity, (0, 1))
    best, index = similarity.max(dim=-1)  # the first of equals, and the first NaN
    if d_mask is not None and d_mask.shape[-1]:  # a masked token equals valid ones of -inf
        index = torch.where(best == NEG_INF, d_mask.int().argmax(-1).unsqueeze(-1), index)
    scores = torch.where(counts, best, 0.0).sum(-1)
    winners = torch.where(counts, index, -1).to(torch.int32)
    return scores, winners


def maxsim_from_hidden_reference(
    Q: Tensor,
    H_d: Tensor,
    W: Tensor,
    b: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
) -> Tensor:
    """Compute ``maxsim(Q, H_d @ W.T + b, d_mask=d_mask)``, by definition.

    Args:
        Q: ``[Nq, Lq, d]`` or ``[Lq, d]``, projected (and normalized) already.
        H_d: the documents' hidden states, ``[Nd, Ld, d_model]``.
        W: ``[d, d_model]``, as ``torch.nn.Linear.weight``.
        b: ``[d]``.
        d_mask: ``[Nd, Ld]``, True = keep.
        normalize: divide every projected token by ``max(norm, 1e-12)``.

    Returns:
        ``[Nq, Nd]`` (``[Nd]`` for a 2-D ``Q``), float32 (float64 where ``Q`` is float64).

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`; shapes that do not fit.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_from_hidden_reference
        >>> Q, H_d = torch.tensor([[1.0, 0.0]]), torch.tensor([[[3.0, 4.0, 7.0]]])
        >>> maxsim_from_hidden_reference(Q, H_d, torch.eye(2, 3), normalize=True)
        tensor([0.6000])
    """
    check_flag("normalize", normalize)
    _, _, d_mask = check_from_hidden(Q, H_d, W, b, None, d_mask, False)
    dtype = scores_dtype(Q)
    if d_mask is not None:  # a masked state reaches nothing, W's gradient included, whatever it holds
        H_d = H_d.masked_fill(~d_mask.unsqueeze(-1), 0.0)
    with without_autocast(Q.device.type):
        D = torch.nn.functional.linear(H_d.to(dtype), W.to(dtype), None if b is None else b.to(dtype))
        if normalize:
            D = torch.nn.functional.normalize(D, dim=-1, eps=1e-12)
    return maxsim_reference(Q.to(dtype), D, d_mask=d_mask)


def smooth_maxsim_reference(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    tau: float = 0.1,
    normalize: bool = False,
) -> Tensor:
    """Compute what :func:`late_interaction.smooth_maxsim` does, by definition.

    Args:
        Q, D, q_mask, d_mask, tau, normalize: as in :func:`late_interaction.smooth_maxsim`. Half precision is
            widened to float32 first; float64 stays.

    Returns:
        Scores of the shapes that :func:`late_interaction.smooth_maxsim` returns.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.smooth_maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction.reference import smooth_maxsim_reference
        >>> Q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> D = torch.tensor([[[2.0, 0.0], [0.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]])
        >>> smooth_maxsim_reference(Q, D, tau=0.1)
        tensor([[5.0000, 2.1386]])
    """
    Q3, DN, q_mask, d_mask = check_maxsim(Q, D, q_mask, d_mask)
    check_flag("normalize", normalize)
    tau = check_tau(tau)
    with without_autocast(Q.device.type):
        similarity = similarities(Q3, DN, q_mask, d_mask, normalize)
        scores = _sum_of_smooth_maxima(similarity, q_mask, d_mask, tau)
    return as_given(scores, Q, D)


def _sum_of_smooth_maxima(
    similarity: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, tau: float
) -> Tensor:
    if similarity.shape[-1] == 0:
        return similarity.sum((2, 3))
    if d_mask is not None:
        some = d_mask.any(-1, keepdim=True)
        # A document without a token that counts keeps them all, so that no gradient is NaN, and adds 0.
        similarity = similarity.masked_fill(~(d_mask | ~some).unsqueeze(-2), -torch.inf)
    each = tau * torch.logsumexp(similarity / tau, -1)
    if d_mask is not None:
        each = each.masked_fill(~some, 0.0)
    if q_mask is not None:
        each = each.masked_fill(~q_mask.unsqueeze(1), 0.0)
    return each.sum(-1)
