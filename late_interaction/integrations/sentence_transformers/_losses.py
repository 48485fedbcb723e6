"""Sentence Transformers' losses over all pairs of a batch, without the matrix of scores.

``MultiVectorMultipleNegativesRankingLoss`` and its cached form are the cross entropy of scaled MaxSim scores,
which :func:`late_interaction.losses.contrastive` computes by blocks. They run their own code, whichever
release's, in a namespace where their scores are not computed yet (:class:`Scores`): the cross entropy of such
is that function, and whoever asks for anything else gets the scores.

Small batches and other scoring functions go by the scores; so do, some queries at a time, batches with a
document without a token that counts, which scores -1e9 and not 0.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from late_interaction._checks.options import Reduction
from late_interaction.integrations._shared import calls
from late_interaction.integrations._shared.exchange import Instead, with_namespace
from late_interaction.integrations.sentence_transformers import _colbert
from late_interaction.integrations.sentence_transformers._inputs import takes
from late_interaction.integrations.sentence_transformers._originals import COLBERT, PACKAGE, disabled, module
from late_interaction.losses import contrastive
from late_interaction.tokens import Tokens

# Scores and winners of this many bytes are kept. Beyond it the one read from the device that tells whether a
# document is empty takes no time beside the step.
_KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class Scores:
    """``scale * colbert_scores(Q, D, q_mask, d_mask)`` of ``D [Nd, N, Ld, d]``, computed when asked for."""

    loss: Any
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    scale: float = 1.0

    def __mul__(self, factor: Any) -> "Scores":
        return Scores(self.loss, self.inputs, self.scale * factor)

    def cross_entropy(self, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
        Q, D, q_mask, d_mask = self.inputs
        if not bool(d_mask.any(-1).all()):
            return self._by_rows(labels, reduction)
        calls.scored(PACKAGE)
        q, d = Tokens(Q, q_mask), Tokens(D.flatten(0, 1), d_mask.flatten(0, 1))
        return contrastive(q, d, labels, temperature=1.0 / self.scale, reduction=reduction).float()

    def _by_rows(self, labels: Tensor, reduction: Reduction) -> Tensor:
        """Score some queries at a time, which the backward computes again."""
        Q, D, q_mask, d_mask = self.inputs
        step = max(_KEPT_BYTES // _bytes_of(Q[:1], D), 1)

        def rows(queries: Tensor, documents: Tensor, some: slice) -> Tensor:
            scores = _scored(self.loss, queries, documents, q_mask[some], d_mask)
            return F.cross_entropy(scores * self.scale, labels[some], reduction="none")

        parts = (slice(i, i + step) for i in range(0, len(Q), step))
        losses = torch.cat([checkpoint(rows, Q[part], D, part, use_reentrant=False) for part in parts])
        return losses if reduction == "none" else getattr(losses, reduction)()

    def computed(self) -> Tensor:
        return _scored(self.loss, *self.inputs) * self.scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self.computed(), name)


class _OneBlock:
    """A loss whose scores are one block, and not computed yet where that pays."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    @property
    def score_mini_batch_size(self) -> int:
        return torch.iinfo(torch.int64).max

    def similarity_fct(
        self, Q: Tensor, D: Tensor, queries_mask: Tensor, documents_mask: Tensor
    ) -> Tensor | Scores:
        inputs = (Q, D, queries_mask, documents_mask)
        if takes(Q, D) and _bytes_of(Q, D) > _KEPT_BYTES:
            return Scores(self._loss, inputs)
        return _scored(self._loss, *inputs)


def by_blocks(original: types.FunctionType) -> Callable[..., Tensor]:
    """Take the place of the method of a loss that scores every query with every document."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        score = getattr(self, "similarity_fct", None)
        plain = score is module(COLBERT).colbert_scores or score is _colbert.colbert_scores
        if not plain:
            calls.left(PACKAGE, type(self).__name__, "another similarity_fct")
        if disabled() or not plain:
            loss: Tensor = original(self, *args, **kwargs)
        else:
            instead = {"torch": _TORCH, "F": _FUNCTIONAL}
            loss = with_namespace(original, original.__code__, instead)(_OneBlock(self), *args, **kwargs)
        return loss

    method.__name__, method.__qualname__ = original.__name__, original.__qualname__
    method.__doc__ = original.__doc__
    return method


def namespace_fits(function: Any) -> bool:
    """Tell whether the method finds ``torch`` and ``F`` where :func:`by_blocks` puts its own."""
    if not isinstance(function, types.FunctionType) or function.__closure__ is not None:
        return False
    names = function.__globals__
    return names.get("torch") is torch and names.get("F") is F


def _scored(loss: Any, Q: Tensor, D: Tensor, q_mask: Tensor, d_mask: Tensor) -> Tensor:
    """Score by as many queries at a time as the loss says."""
    step = loss.score_mini_batch_size or len(Q)
    if takes(Q, D):
        step = len(Q)  # no similarity is kept, whose memory that would limit
    rows = [
        loss.similarity_fct(Q[i : i + step], D, queries_mask=q_mask[i : i + step], documents_mask=d_mask)
        for i in range(0, len(Q), step)
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _bytes_of(Q: Tensor, D: Tensor) -> int:
    return Q.shape[0] * D.shape[0] * D.shape[1] * (4 + 2 * Q.shape[1])


# ---- what the methods find as torch and as F ----


def _cross_entropy(scores: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(scores, Scores):
        return F.cross_entropy(scores, labels, *args, **kwargs)
    if args or not kwargs.keys() <= {"reduction"}:
        return F.cross_entropy(scores.computed(), labels, *args, **kwargs)
    return scores.cross_entropy(labels, **kwargs)


def _cat(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if len(tensors) == 1 and isinstance(tensors[0], Scores):
        return tensors[0]
    return torch.cat(tensors, *args, **kwargs)


_TORCH = Instead(torch, cat=_cat)
_FUNCTIONAL = Instead(F, cross_entropy=_cross_entropy)
