"""The ways in for retrieval and training code: :class:`MaxSimScorer` and :func:`retrieve`."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.choices import Backward, Precision
from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import (
    check_backward,
    check_flag,
    check_integer,
    check_positive,
    check_precision,
)
from late_interaction._checks.tensors import MASK_DTYPES
from late_interaction._maxsim import maxsim
from late_interaction._progress import Progress
from late_interaction._scoring.norm_warning import look, unwatched
from late_interaction.coarse import Codes, Kind, check_coarse, search
from late_interaction.muvera import Encodings, Muvera
from late_interaction.topk import maxsim_topk

__all__ = ["MaxSimScorer", "retrieve"]


class MaxSimScorer(torch.nn.Module):
    """:func:`late_interaction.maxsim` as a module without parameters, to hold a model's choices.

    Args:
        normalize: L2-normalize every token inside the kernel.
        backward: ``"auto"``, ``"lowmem"`` or ``"unified"``, as in :func:`late_interaction.maxsim`.
        mask_pad_token: the id of the padding token (a tokenizer's ``pad_token_id``), for
            :meth:`forward_with_ids`.
        precision: as in :func:`late_interaction.maxsim`.

    Raises:
        ValueError: an unknown ``backward`` or ``precision``.
        TypeError: a ``normalize`` or ``mask_pad_token`` of the wrong type.

    Example:
        >>> import torch
        >>> from late_interaction import MaxSimScorer
        >>> scorer = MaxSimScorer(normalize=True)
        >>> Q = torch.tensor([[[3.0, 0.0]]], requires_grad=True)
        >>> D = torch.tensor([[[0.0, 7.0], [2.0, 0.0]]])
        >>> scorer(Q, D).requires_grad
        True
        >>> scorer.score(Q, D)
        tensor([[1.]])
    """

    def __init__(
        self,
        *,
        normalize: bool = False,
        backward: Backward | None = "auto",
        mask_pad_token: int | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__()
        check_flag("normalize", normalize)
        check_backward(backward)
        check_precision(precision)
        if mask_pad_token is not None:
            check_integer("mask_pad_token", mask_pad_token, "the id of the padding token, an int, or None")
            if not -(1 << 63) <= mask_pad_token < 1 << 63:
                raise ValueError(f"mask_pad_token must fit int64, got {abbreviate(mask_pad_token)}")
        self.normalize = normalize
        self.backward: Backward = backward or "auto"
        self.mask_pad_token = mask_pad_token
        self.precision = precision

    def extra_repr(self) -> str:
        return (
            f"normalize={self.normalize}, backward={self.backward!r}, mask_pad_token={self.mask_pad_token!r},"
            f" precision={self.precision!r}"
        )

    def forward(
        self, Q: Tensor, D: Tensor, q_mask: Tensor | None = None, d_mask: Tensor | None = None
    ) -> Tensor:
        """Scores, differentiable. Shapes as in :func:`late_interaction.maxsim`."""
        return maxsim(
            Q,
            D,
            q_mask,
            d_mask,
            normalize=self.normalize,
            backward=self.backward,
            precision=self.precision,
        )

    def score(
        self, Q: Tensor, D: Tensor, q_mask: Tensor | None = None, d_mask: Tensor | None = None
    ) -> Tensor:
        """Scores without gradients, whatever the inputs require."""
        with torch.no_grad():
            return self.forward(Q, D, q_mask, d_mask)

    def retrieve(
        self,
        Q: Tensor,
        D: Tensor,
        k: int,
        q_mask: Tensor | None = None,
        d_mask: Tensor | None = None,
        *,
        chunk_bytes: int | None = None,
        progress: Progress = False,
        group: Any = None,
        keep_empty: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """:func:`retrieve` with this module's ``normalize`` and ``precision``."""
        return retrieve(
            Q,
            D,
            k,
            q_mask,
            d_mask,
            normalize=self.normalize,
            chunk_bytes=chunk_bytes,
            progress=progress,
            precision=self.precision,
            group=group,
            keep_empty=keep_empty,
        )

    def forward_with_ids(self, Q: Tensor, D: Tensor, q_ids: Tensor, d_ids: Tensor) -> Tensor:
        """:meth:`forward` with masks from token ids: a token is kept where its id is not ``mask_pad_token``.

        Args:
            Q, D: as in :meth:`forward`.
            q_ids, d_ids: integer ids, shaped as their tokens without ``d``.

        Raises:
            ValueError: the scorer has no ``mask_pad_token``.
        """
        if self.mask_pad_token is None:
            raise ValueError("forward_with_ids needs MaxSimScorer(mask_pad_token=...), got None")
        for name, ids in (("q_ids", q_ids), ("d_ids", d_ids)):
            if not isinstance(ids, Tensor) or ids.dtype not in MASK_DTYPES[1:]:
                raise TypeError(
                    f"{name} must be an integer tensor, got {getattr(ids, 'dtype', type(ids).__name__)}"
                )
        return self.forward(Q, D, q_ids != self.mask_pad_token, d_ids != self.mask_pad_token)


def retrieve(
    Q: Tensor,
    D: Tensor,
    k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    chunk_bytes: int | None = None,
    largest: bool = True,
    sorted: bool = True,
    progress: Progress = False,
    precision: Precision | None = None,
    scale_Q: Tensor | None = None,
    scale_D: Tensor | None = None,
    group: Any = None,
    coarse: Kind | Codes | Muvera | Encodings | None = None,
    candidates: int | None = None,
    keep_empty: bool = False,
) -> tuple[Tensor, Tensor]:
    """The ``k`` best documents of each query.

    :func:`late_interaction.topk.maxsim_topk` with a first pass if wanted; see there for what memory it takes,
    how ties fall, and how a corpus on the CPU reaches the GPU.

    Args:
        Q: ``[Nq, Lq, d]`` or ``[Lq, d]``.
        D: ``[Nd, Ld, d]`` or ``[Ld, d]``, on the device of ``Q``, or on the CPU while ``Q`` is on a GPU.
        k: how many; at most ``Nd`` come back.
        q_mask: ``[Nq, Lq]``, True = keep.
        d_mask: ``[Nd, Ld]``, on the device of ``D``, True = keep.
        normalize: L2-normalize every token first.
        largest, sorted, progress, chunk_bytes, precision, scale_Q, scale_D, group: as in
            :func:`late_interaction.topk.maxsim_topk`. With a ``group`` every process passes a shard of the
            documents and has the best of all.
        coarse, candidates: a first pass over 1-bit or 4-bit codes, ``"hamming"``, ``"1bit"``, ``"4bit"`` or
            the codes of ``D``, or over single vectors, a :class:`late_interaction.Muvera` or its encodings of
            ``D``; the ``candidates`` best documents of each query are scored exactly
            (:func:`late_interaction.coarse.search`). Documents that the first pass ranks lower are missed.
        keep_empty: rank documents without a kept token too, by their score of 0.

    Returns:
        ``(scores, indices)``, each ``[Nq, min(k, Nd)]`` (one dim less for a 2-D ``Q``), best first. A
        document takes no rank by a query with which its score is NaN: where fewer documents take a rank, the
        last entries are -inf (inf for ``largest=False``) and -1.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`late_interaction.topk.maxsim_topk`.

    Example:
        >>> import torch
        >>> from late_interaction import retrieve
        >>> Q = torch.tensor([[[1.0, 0.0]]])
        >>> D = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]], [[0.6, 0.8]]])
        >>> scores, documents = retrieve(Q, D, k=2)
        >>> documents
        tensor([[1, 2]])
    """
    if group is None:  # with a group, the others must learn what this process refuses
        check_positive("k", k)
        if chunk_bytes is not None:
            check_positive("chunk_bytes", chunk_bytes)
    options: dict[str, Any] = {
        "normalize": normalize, "largest": largest, "progress": progress, "precision": precision,
        "keep_empty": keep_empty,
    }  # fmt: skip
    if coarse is not None or candidates is not None:
        check_flag("sorted", sorted)
        if group is not None:
            raise ValueError("coarse and candidates must be None where a group is given")
        found: tuple[Tensor, Tensor] = unwatched(
            search,
            Q,
            D,
            k,
            q_mask,
            d_mask,
            coarse=check_coarse(coarse, candidates, scale_Q, scale_D),
            candidates=candidates,
            chunk_bytes=chunk_bytes,
            **options,
        )
    else:
        found = unwatched(
            maxsim_topk,
            Q,
            D,
            k,
            q_mask,
            d_mask,
            chunk_bytes=chunk_bytes,
            sorted=sorted,
            scale_Q=scale_Q,
            scale_D=scale_D,
            group=group,
            **options,
        )
    if scale_Q is None and not normalize:
        look("retrieve", Q, q_mask)
    return found
