"""Which document token each query token matched, and what it added to the score: :func:`explain`.

The winners come from :func:`late_interaction.maxsim_with_winners`; the similarities of the winning tokens
alone are computed again. The grid of all similarities is never made.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor

from late_interaction._checks.dense import check_maxsim, check_maxsim_pairs, check_queries
from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import Precision, check_flag, check_positive
from late_interaction._checks.packed import check_indices_below, check_offsets
from late_interaction._checks.tensors import (
    check_embeddings,
    check_integers,
    check_mask,
    check_not_meta,
    check_same_dtype_and_d,
    scores_dtype,
)
from late_interaction._maxsim import maxsim_with_winners
from late_interaction._scoring.norm_warning import look, unwatched
from late_interaction.codes import Codes

__all__ = ["Alignment", "explain"]


@dataclass(frozen=True, eq=False)
class Alignment:
    """Say how one query matched one document. The tensors are on the CPU, without gradients.

    Args:
        matches: ``[Lq]``, int64: the document token with the largest similarity to each query token, the
            first of equals; -1 where the query token is masked or met no valid token.
        contributions: ``[Lq]``, float32 (float64 for float64 inputs): that similarity, and 0 for -1.
        shares: ``[Ld]``: the contributions that each document token received, summed. They sum to the score.

    Example:
        >>> import torch
        >>> from late_interaction import explain
        >>> alignment = explain(torch.eye(2), torch.tensor([[0.0, 3.0], [2.0, 0.0]]))
        >>> alignment.matches, alignment.contributions
        (tensor([1, 0]), tensor([2., 3.]))
    """

    matches: Tensor
    contributions: Tensor
    shares: Tensor

    @property
    def score(self) -> float:
        """Sum the contributions: the score of :func:`late_interaction.maxsim`, to rounding."""
        return float(self.contributions.sum())

    def top(self, n: int = 5) -> list[tuple[int, int, float]]:
        """Return the ``n`` matches that contributed most, the largest first.

        Each is ``(query token, document token, contribution)``. There are fewer where fewer query tokens
        matched.
        """
        check_positive("n", n)
        matched = (self.matches >= 0).nonzero().flatten()
        order = self.contributions[matched].sort(descending=True, stable=True).indices[:n]
        best = matched[order]
        columns = best.tolist(), self.matches[best].tolist(), self.contributions[best].tolist()
        return list(zip(*columns, strict=True))

    def text(
        self, query_tokens: Sequence[str] | None = None, document_tokens: Sequence[str] | None = None
    ) -> str:
        """Write a table in plain text, a line for each query token. Tokens not given are numbered."""
        rows = [("query token", "document token", "contribution"), *self._rows(query_tokens, document_tokens)]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"{q:<{widths[0]}}  {d:<{widths[1]}}  {value:>12}" for q, d, value in rows]
        return "\n".join([*lines, f"score {self.score:.4f}"])

    def html(
        self, query_tokens: Sequence[str] | None = None, document_tokens: Sequence[str] | None = None
    ) -> str:
        """Write the same table as HTML, shaded by contribution. Every token is escaped."""
        largest = max((x for x in self.contributions.tolist() if x > 0), default=0.0)
        body = []
        values = self.contributions.tolist()
        for (q, d, value), x in zip(self._rows(query_tokens, document_tokens), values, strict=True):
            shade = 0.6 * x / largest if 0 < x <= largest < float("inf") else 0.0
            body.append(
                f"<tr><td>{html.escape(q)}</td><td>{html.escape(d)}</td>"
                f'<td style="text-align:right;background:rgba(255,165,0,{shade:.2f})">{value}</td></tr>'
            )
        return (
            "<table><thead><tr><th>query token</th><th>document token</th><th>contribution</th></tr></thead>"
            f"<tbody>{''.join(body)}</tbody>"
            f'<tfoot><tr><th colspan="2">score</th><td>{self.score:.4f}</td></tr></tfoot></table>'
        )

    def _repr_html_(self) -> str:
        return self.html()

    def _rows(
        self, query_tokens: Sequence[str] | None, document_tokens: Sequence[str] | None
    ) -> Iterator[tuple[str, str, str]]:
        queries = labels_of("query_tokens", query_tokens, len(self.matches))
        documents = labels_of("document_tokens", document_tokens, len(self.shares))
        pairs = zip(self.matches.tolist(), self.contributions.tolist(), strict=True)
        return (
            (q, documents[match] if match >= 0 else "-", f"{value:.4f}")
            for q, (match, value) in zip(queries, pairs, strict=True)
        )


@overload
def explain(
    Q: Tensor, D: Tensor, q_mask: Tensor | None = ..., d_mask: Tensor | None = ..., *,
    paired: Literal[True], normalize: bool = ..., precision: Precision | None = ...,
) -> Alignment | list[Alignment]: ...  # fmt: skip
@overload
def explain(
    Q: Tensor, D: Tensor, q_mask: Tensor | None = ..., d_mask: None = ..., *, cu_seqlens_d: Tensor,
    documents: Tensor | None = ..., paired: Literal[False] = ..., normalize: bool = ...,
    precision: Precision | None = ...,
) -> list[Alignment] | list[list[Alignment]]: ...  # fmt: skip
@overload
def explain(
    Q: Tensor, D: Tensor | Codes, q_mask: Tensor | None = ..., d_mask: Tensor | None = ..., *,
    documents: Tensor, paired: Literal[False] = ..., normalize: bool = ..., precision: Precision | None = ...,
) -> list[Alignment] | list[list[Alignment]]: ...  # fmt: skip
@overload
def explain(
    Q: Tensor, D: Tensor | Codes, q_mask: Tensor | None = ..., d_mask: Tensor | None = ..., *,
    cu_seqlens_d: None = ..., documents: None = ..., paired: bool = ..., normalize: bool = ...,
    precision: Precision | None = ...,
) -> Alignment | list[Alignment] | list[list[Alignment]]: ...  # fmt: skip
def explain(
    Q: Tensor,
    D: Tensor | Codes,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    cu_seqlens_d: Tensor | None = None,
    documents: Tensor | None = None,
    paired: bool = False,
    normalize: bool = False,
    precision: Precision | None = None,
) -> Alignment | list[Alignment] | list[list[Alignment]]:
    """Explain a score: which document token each query token matched, and how much that added.

    Args:
        Q, D, q_mask, d_mask: as in :func:`late_interaction.maxsim`. Where ``D`` is
            :class:`~late_interaction.Codes`, the documents asked for are decoded one at a time, without the
            tokens that their mask leaves out, and meet what the queries become; there are no masks, no
            ``paired`` and no ``cu_seqlens_d`` then.
        cu_seqlens_d: ``[Nd + 1]``: ``D`` is ``[tokens, d]``, packed as those of
            :meth:`late_interaction.Tokens.packed`. Without ``d_mask``.
        documents: ``[Nq, k]`` (``[k]`` for a 2-D ``Q``), int32 or int64: the documents of each query that
            are to be explained, as :func:`late_interaction.search` returns them. ``D`` is ``[Nd, Ld, d]``
            or packed, and may be on another device than ``Q``: those documents alone are copied.
        paired: ``Q[i]`` meets ``D[i]`` alone, as in :func:`late_interaction.maxsim_pairs`.
        normalize: as in :func:`late_interaction.maxsim`.
        precision: as in :func:`late_interaction.maxsim`, for the search of the winners. Their contributions
            are always multiplied in float32 (float64 for float64 inputs).

    Returns:
        An :class:`Alignment` for a 2-D ``Q`` with a 2-D ``D``; else lists of them as scores would have dims:
        ``[Nq][Nd]``, ``[Nq][K]``, ``[Nq]`` with ``paired``, ``[Nd]`` for a 2-D ``Q``.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`; options that exclude each other.

    Complexity: one :func:`late_interaction.maxsim_with_winners` a query (for each document, if packed), and
    ``Lq * d`` multiplications a document. Waits for the device.

    Example:
        >>> import torch
        >>> from late_interaction import explain
        >>> Q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> D = torch.tensor([[0.0, 3.0], [2.0, 0.0], [1.0, 1.0]])
        >>> alignment = explain(Q, D)
        >>> alignment.matches, alignment.shares, alignment.score
        (tensor([1, 0]), tensor([3., 2., 0.]), 5.0)
        >>> alignment.top(1)
        [(1, 0, 3.0)]
        >>> print(alignment.text(["red", "car"], ["cars", "crimson", "are"]))
        query token  document token  contribution
        red          crimson               2.0000
        car          cars                  3.0000
        score 5.0000
    """
    check_flag("paired", paired)
    check_flag("normalize", normalize)
    if paired and (cu_seqlens_d is not None or documents is not None):
        raise ValueError("paired=True takes neither cu_seqlens_d nor documents: each query has its document")
    if isinstance(D, Codes):
        for name, value in (("q_mask", q_mask), ("d_mask", d_mask), ("cu_seqlens_d", cu_seqlens_d)):
            if value is not None:
                raise ValueError(f"{name} must be None where D is Codes, got {abbreviate(value)}")
        if paired:
            raise ValueError("paired must be False where D is Codes, got True")
        from late_interaction.alignment._codes import explain_codes  # which explains dense documents

        return explain_codes(Q, D, documents, normalize, precision)
    one_query, one_document = isinstance(Q, Tensor) and Q.dim() == 2, isinstance(D, Tensor) and D.dim() == 2
    offsets, bounds = None, None
    if cu_seqlens_d is not None:
        if d_mask is not None:
            raise ValueError("d_mask must be None with cu_seqlens_d: packed documents have no padding")
        offsets, one_document = _check_packed(Q, D, cu_seqlens_d), False
        bounds = list(pairwise(offsets))
    if documents is not None:
        Q, q_mask, d_mask = _check_found(Q, D, q_mask, d_mask, bounds)
        chosen, one_document = check_documents(documents, Q, bounds, D, one_query), False
    elif paired:
        Q, D, q_mask, d_mask = check_maxsim_pairs(Q, D, q_mask, d_mask)
    else:
        Q, DN, q_mask, d_mask = check_maxsim(Q, D, q_mask, d_mask)
        D = D if bounds is not None else DN
    result: list[list[Alignment]] = []
    for i in range(Q.shape[0]):
        query = Q[i].detach(), None if q_mask is None else q_mask[i], normalize, precision
        picks = chosen[i] if documents is not None else None
        if bounds is not None:
            spans = bounds if picks is None else [bounds[j] for j in picks.tolist()]
            found = [explain_one(*query, D[a:b][None], None)[0] for a, b in spans]
        else:
            own: Any = slice(i, i + 1) if paired else i if D.dim() == 4 else slice(None)
            own = own if picks is None else picks
            found = explain_one(*query, D[own], None if d_mask is None else d_mask[own])
        result.append(found)
    if not normalize:
        look("explain", Q, q_mask)
    if paired or one_document:
        flat = [found[0] for found in result]
        return flat[0] if one_query else flat
    return result[0] if one_query else result


def explain_one(
    q: Tensor,
    q_mask: Tensor | None,
    normalize: bool,
    precision: Precision | None,
    D: Tensor,
    d_mask: Tensor | None,
) -> list[Alignment]:
    """Explain one query ``[Lq, d]`` with documents ``[n, Ld, d]``, moved to its device."""
    check_not_meta("Q", q)
    check_not_meta("D", D)
    D = D.detach().to(q.device)
    d_mask = None if d_mask is None else d_mask.to(q.device)
    wide = scores_dtype(q)
    n, Ld, d = D.shape
    matches = q.new_full((n, q.shape[0]), -1, dtype=torch.int64)
    contributions = q.new_zeros(matches.shape, dtype=wide)
    if n and Ld:
        with torch.no_grad():
            options: dict[str, Any] = {"normalize": normalize, "precision": precision}
            _, winners = unwatched(maxsim_with_winners, q, D, q_mask, d_mask, **options)
        matches = winners.long()
        index = matches.clamp(min=0)[..., None].expand(-1, -1, d)
        query, best = q.to(wide), D.gather(1, index).to(wide)
        if normalize:
            query = torch.nn.functional.normalize(query, dim=-1)
            best = torch.nn.functional.normalize(best, dim=-1)
        contributions = (best * query).sum(-1).masked_fill(matches < 0, 0.0)
    matches, contributions = matches.cpu(), contributions.cpu()  # summed there, in order
    shares = contributions.new_zeros((n, Ld))
    if Ld:
        shares.scatter_add_(1, matches.clamp(min=0), contributions)
    return [Alignment(*parts) for parts in zip(matches, contributions, shares, strict=True)]


def _check_packed(Q: Tensor, D: Tensor, cu_seqlens_d: Tensor) -> list[int]:
    check_embeddings("Q", Q)
    check_embeddings("D", D)
    if D.dim() != 2:
        raise ValueError(f"D must be [tokens, d] with cu_seqlens_d, got {shape_of(D)}")
    offsets: list[int] = check_offsets("cu_seqlens_d", cu_seqlens_d, "D", D).tolist()
    total, rising = D.shape[0], all(a <= b for a, b in pairwise(offsets))
    if offsets[0] < 0 or offsets[-1] > total or not rising:  # a GPU's offsets are read here first
        raise ValueError(f"cu_seqlens_d must not decrease and lie within [0, {total}], got {offsets[:8]}")
    return offsets


def _check_found(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, bounds: list[tuple[int, int]] | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Check the tokens beside ``documents``: Q and D may be on different devices."""
    check_queries(Q)
    check_embeddings("D", D)
    if bounds is None and D.dim() != 3:
        raise ValueError(f"D must be [Nd, Ld, d] with documents, got {shape_of(D)}")
    check_same_dtype_and_d(Q, D)
    Q = Q if Q.dim() == 3 else Q[None]
    return Q, check_mask("q_mask", q_mask, "Q", Q), check_mask("d_mask", d_mask, "D", D)


def check_documents(
    documents: Any, Q: Tensor, bounds: list[tuple[int, int]] | None, D: Tensor, one_query: bool
) -> Tensor:
    """Return the documents asked for as ``[Nq, k]``, on the device of D."""
    device = documents.device if isinstance(documents, Tensor) else D.device
    shape = "[k], the documents of the 2-D Q" if one_query else "[Nq, k]"
    check_integers("documents", documents, 1 if one_query else 2, shape, "D", device)
    chosen: Tensor = documents[None] if one_query else documents
    if chosen.shape[0] != Q.shape[0]:
        raise ValueError(f"documents must be [{Q.shape[0]}, k], a row for each query, got {shape_of(chosen)}")
    check_not_meta("documents", chosen)
    check_indices_below("documents", chosen, D.shape[0] if bounds is None else len(bounds))
    return chosen.to(D.device).long()


def labels_of(name: str, tokens: Any, length: int) -> list[str]:
    """Return the names of ``length`` tokens: those given, or numbers."""
    if tokens is None:
        return [str(i) for i in range(length)]
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise TypeError(f"{name} must be a sequence of str or None, got {type(tokens).__name__}")
    if len(tokens) != length:
        raise ValueError(f"{name} must have {length} entries, one a token, got {len(tokens)}")
    if bad := [token for token in tokens if not isinstance(token, str)]:
        raise TypeError(f"{name} must hold str, got {type(bad[0]).__name__}")
    return list(tokens)
