"""A first pass over codes of a few bits or MUVERA's encodings, and the exact scores of the best documents.

``retrieve(..., coarse=...)`` calls :func:`search`. A corpus that is searched more than once is encoded once::

    codes = encode(D, "1bit")  # 20 bytes a token of 128 dims
    scores, documents = retrieve(Q, D, k=10, coarse=codes)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_rows

from late_interaction import bits
from late_interaction._checks.choices import Precision
from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag, check_positive, check_precision, is_one_of
from late_interaction._checks.packed_codes import check_packed
from late_interaction._checks.quantized import check_scale
from late_interaction._checks.search import check_corpus
from late_interaction._checks.tensors import check_embeddings
from late_interaction._progress import Progress, reporter
from late_interaction._scoring.norm_warning import look, unwatched
from late_interaction._search.rescore import exact_scores, fitting
from late_interaction._search.selection import MOST_SCORES, empty_documents, select, select_next
from late_interaction._search.stream import chunks, to_device
from late_interaction.muvera import Encodings, Muvera
from late_interaction.muvera._first_pass import MuveraPass, check_encodings

__all__ = ["Codes", "encode", "search"]

# What each kind keeps of a dim, in bits.
Kind = Literal["hamming", "1bit", "4bit"]
KINDS: dict[Kind, int] = {"hamming": 1, "1bit": 1, "4bit": 4}

# Documents that are scored or encoded at a time have at most so many bytes of codes or embeddings.
_BYTES = 256 << 20
# A CPU encodes so many bytes of float32 at a time, which stay in its caches from step to step.
_CACHED_BYTES = 4 << 20


@dataclass(frozen=True)
class Codes:
    """A corpus in a few bits a dim. :func:`encode` makes it; its attributes, saved, make it again.

    Args:
        kind: ``"hamming"``, ``"1bit"`` or ``"4bit"``.
        tokens: uint8, ``[Nd, Ld, bytes]``, as :func:`late_interaction.bits.to_bits` or
            :func:`late_interaction.bits.to_int4` packs them.
        scale: float32, ``[Nd, Ld]``; None for ``"hamming"``.
        d: dims of a token.

    Raises:
        TypeError, ValueError: an attribute of a wrong type or shape, or an unknown ``kind``.

    Example:
        >>> import torch
        >>> from late_interaction.coarse import Codes, encode
        >>> codes = encode(torch.randn(20, 30, 128), "hamming")
        >>> Codes("hamming", codes.tokens.clone(), None, 128).tokens.shape
        torch.Size([20, 30, 16])
    """

    kind: Kind
    tokens: Tensor
    scale: Tensor | None
    d: int

    def __post_init__(self) -> None:
        _check_kind("kind", self.kind)
        check_positive("d", self.d)
        check_packed("tokens", self.tokens, self.d, KINDS[self.kind])
        if self.tokens.dim() != 3:
            raise ValueError(f"tokens must be [Nd, Ld, bytes], got {shape_of(self.tokens)}")
        if self.kind == "hamming":
            if self.scale is not None:
                raise ValueError("scale must be None for kind='hamming', whose scores have none")
        elif self.scale is None:
            raise TypeError(f"scale must be a torch.Tensor for kind={self.kind!r}, got None")
        else:
            check_scale("scale", self.scale, "tokens", self.tokens)

    def to(self, device: torch.device | str) -> "Codes":
        """The same codes on another device."""
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, tokens=self.tokens.to(device), scale=scale)


def encode(D: Tensor, kind: Kind, *, normalize: bool = False) -> Codes:
    """The codes of a corpus, made a part at a time.

    Args:
        D: ``[Nd, Ld, d]`` or ``[Ld, d]`` embeddings; bfloat16, float16, float32 or float64.
        kind: ``"hamming"`` (signs without a scale: queries become signs too), ``"1bit"`` (signs with a scale
            for each token: queries become int8) or ``"4bit"`` (4 bits a dim, likewise).
        normalize: L2-normalize every token first, as the search will.

    Returns:
        Codes on the device of ``D``. Outside autograd.

    Raises:
        TypeError: ``D`` is no floating-point tensor, or ``normalize`` no bool.
        ValueError: an unknown ``kind``, or a ``D`` of another rank.

    Example:
        >>> import torch
        >>> from late_interaction.coarse import encode
        >>> codes = encode(torch.randn(20, 30, 128), "1bit")
        >>> codes.tokens.shape, codes.scale.shape
        (torch.Size([20, 30, 16]), torch.Size([20, 30]))
    """
    check_embeddings("D", D)
    _check_kind("kind", kind)
    check_flag("normalize", normalize)
    if D.dim() not in (2, 3) or D.shape[-1] == 0:
        raise ValueError(f"D must be [Nd, Ld, d] or [Ld, d] with d of at least 1, got {shape_of(D)}")
    D = D.unsqueeze(0) if D.dim() == 2 else D
    if not normalize:
        look("coarse.encode", D, called="D")
    Nd, Ld, d = D.shape
    tokens = torch.empty(Nd, Ld, -(-d * KINDS[kind] // 8), dtype=torch.uint8, device=D.device)
    scale = None if kind == "hamming" else torch.empty(Nd, Ld, dtype=torch.float32, device=D.device)
    size = fitting(4 * Ld * d, _CACHED_BYTES if D.is_cpu else _BYTES)
    for start in range(0, Nd, size):
        at = slice(start, start + size)
        tokens[at], scales = _codes_of(D[at], kind, normalize)
        if scale is not None and scales is not None:
            scale[at] = scales
    return Codes(kind, tokens, scale, d)


def search(
    Q: Tensor,
    D: Tensor,
    k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    coarse: Kind | Codes | Muvera | Encodings,
    candidates: int | None = None,
    normalize: bool = False,
    chunk_bytes: int | None = None,
    largest: bool = True,
    progress: Progress = False,
    precision: Precision | None = None,
    keep_empty: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`late_interaction.retrieve` with a first pass: the ``candidates`` best documents of each query by
    their codes or encodings, ranked by their scores in :func:`late_interaction.maxsim`.

    Args:
        coarse: the :class:`Codes` of ``D``, or its :class:`late_interaction.muvera.Encodings`, on the device
            of ``D``; or a kind of :func:`encode`, or a :class:`late_interaction.Muvera`, whose codes are made
            on the way and forgotten, which can take longer than an exact search.
        candidates: how many documents of each query are scored exactly; at least ``k``. None:
            ``max(10 * k, 100)``.
        Q, D, k, q_mask, d_mask, normalize, chunk_bytes, largest, progress, precision, keep_empty: as in
            :func:`late_interaction.retrieve`.

    Returns:
        ``(scores, indices)`` as :func:`late_interaction.retrieve` returns them; among equal scores the lowest
        index comes first. -1 also stands where a query has fewer candidates with a score.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.retrieve`; for a ``coarse`` of an unknown kind or of
            another corpus, and for ``candidates`` below ``k``.

    Example:
        >>> import torch
        >>> from late_interaction.coarse import encode, search
        >>> D = torch.randn(500, 20, 64)
        >>> scores, documents = search(D[:3], D, k=2, coarse=encode(D, "4bit"), candidates=20)
        >>> documents[:, 0]
        tensor([0, 1, 2])
    """
    check_positive("k", k)
    check_flag("normalize", normalize)
    check_flag("largest", largest)
    check_flag("keep_empty", keep_empty)
    check_precision(precision)
    if chunk_bytes is not None:
        check_positive("chunk_bytes", chunk_bytes)
    check_embeddings("Q", Q)
    check_embeddings("D", D)
    one_query = Q.dim() == 2
    Q, D, q_mask, d_mask, _, _ = check_corpus(Q, D, q_mask, d_mask)
    _check_corpus_of(coarse, D)
    candidates = _check_candidates(candidates, k)
    with torch.no_grad():
        makes = MuveraPass if isinstance(coarse, (Muvera, Encodings)) else _FirstPass
        scored = makes(Q, q_mask, coarse, normalize).scored(D, d_mask, chunk_bytes)  # type: ignore[arg-type]
        empty = None if keep_empty else empty_documents(D, d_mask)
        found = _best(scored, Q, D, candidates, largest, progress, empty)
        options: dict[str, Any] = {"normalize": normalize, "precision": precision}
        # Scores of any document stand where a query has fewer candidates, and are not looked at.
        scores = exact_scores(Q, D, found.clamp_min(0), q_mask, d_mask, options)
        best = select(scores, found, k, largest)
    if not normalize:
        look("coarse.search", Q, q_mask)
    return (best[0].squeeze(0), best[1].squeeze(0)) if one_query else best


class _FirstPass:
    """Queries as the codes of a kind want them, and their scores with chunks of documents."""

    def __init__(self, Q: Tensor, q_mask: Tensor | None, coarse: Kind | Codes, normalize: bool) -> None:
        self.codes = coarse if isinstance(coarse, Codes) else None
        self.kind = coarse if isinstance(coarse, str) else coarse.kind
        self.normalize, self.d = normalize, Q.shape[-1]
        Q = _as_float(Q, normalize)
        self.Q = bits.to_bits(Q)[0] if self.kind == "hamming" else Q
        self.q_mask = q_mask

    def scores(self, tokens: Tensor, scale: Tensor | None, d_mask: Tensor | None) -> Tensor:
        masks: dict[str, Any] = {"q_mask": self.q_mask, "d_mask": d_mask}
        if scale is None:
            return bits.maxsim_hamming(self.Q, tokens, self.d, **masks)
        return bits.maxsim_asymmetric(self.Q, tokens, scale, nbits=KINDS[self.kind], **masks)

    def chunks(
        self, D: Tensor, d_mask: Tensor | None, chunk_bytes: int | None
    ) -> Iterator[tuple[int, Tensor, Tensor | None, Tensor | None]]:
        """Yields the first document's index, codes, scales and masks, on the device of the queries."""
        device, most = self.Q.device, max(MOST_SCORES // max(self.Q.shape[0], 1), 1)
        if self.codes is not None:
            tokens, scale = self.codes.tokens, self.codes.scale
            if tokens.device != device:  # what travels goes in small chunks
                chunk_bytes = chunk_bytes or _BYTES
            size = most
            if chunk_bytes is not None:
                size = min(most, fitting(tokens.shape[1] * tokens.shape[2], chunk_bytes))
            for start, some, (scales, mask) in chunks(tokens, (scale, d_mask), size, device):
                yield start, some, scales, mask
            return
        size = min(most, fitting(4 * D.shape[1] * D.shape[2], chunk_bytes or _BYTES))
        for start, documents, (mask,) in chunks(D, (d_mask,), size, device):
            codes = unwatched(encode, documents, self.kind, normalize=self.normalize)
            yield start, codes.tokens, codes.scale, mask

    def scored(
        self, D: Tensor, d_mask: Tensor | None, chunk_bytes: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the first document's index of each chunk, and scores."""
        for start, tokens, scale, mask in self.chunks(D, d_mask, chunk_bytes):
            yield start, self.scores(tokens, scale, mask)


def _best(
    scored: Iterator[tuple[int, Tensor]], Q: Tensor, D: Tensor, count: int, largest: bool,
    progress: Progress, empty: Tensor | None,
) -> Tensor:  # fmt: skip
    """The indices of the best documents of each query, rising: first -1 for no document. empty: ``[Nd]``, the
    documents to leave out."""
    empty = None if empty is None else to_device(empty, Q.device)
    best = Q.new_empty((Q.shape[0], 0), dtype=torch.float32)
    places = torch.empty(best.shape, dtype=torch.int64, device=best.device)
    with reporter(progress, D.shape[0]) as report:
        for start, found in scored:
            stop = start + found.shape[1]
            left_out = None if empty is None else empty[start:stop]
            best, places = select_next(found, start, (best, places), count, largest, left_out)
            report(stop)
    return places.sort(dim=-1).values


def _codes_of(D: Tensor, kind: Kind, normalize: bool) -> tuple[Tensor, Tensor | None]:
    D = _as_float(D, normalize and kind != "hamming")  # a norm changes no sign
    if kind == "4bit":
        return bits.to_int4(D)
    tokens, scale = bits.to_bits(D)
    return tokens, None if kind == "hamming" else scale


def _as_float(x: Tensor, normalize: bool) -> Tensor:
    return unit_rows(x.to(torch.float32), dim=-1, eps=1e-12) if normalize else x


def _check_kind(name: str, kind: Any) -> None:
    if not is_one_of(kind, KINDS):
        raise ValueError(f"{name} must be one of {tuple(KINDS)}, got {abbreviate(kind)}")


def check_coarse(
    coarse: Kind | Codes | Muvera | Encodings | None,
    candidates: int | None,
    scale_Q: Tensor | None,
    scale_D: Tensor | None,
) -> Kind | Codes | Muvera | Encodings:
    """Checks that the other options of a search go with ``coarse``, and returns it."""
    if coarse is None:
        raise ValueError(f"candidates must be None without coarse, got {abbreviate(candidates)}")
    for name, scale in (("scale_Q", scale_Q), ("scale_D", scale_D)):
        if scale is not None:
            raise ValueError(f"{name} must be None with coarse, which takes embeddings as Q and D")
    return coarse


def _check_corpus_of(coarse: Any, D: Tensor) -> None:
    if isinstance(coarse, (Muvera, Encodings)):
        check_encodings(coarse, D)
        return
    if not isinstance(coarse, Codes):
        if not isinstance(coarse, str):
            raise TypeError(
                f"coarse must be one of {tuple(KINDS)}, Codes of coarse.encode(D), or a Muvera or its"
                f" Encodings, got {type(coarse).__name__}"
            )
        _check_kind("coarse", coarse)
        return
    shape = (*coarse.tokens.shape[:2], coarse.d)
    if shape != D.shape:
        raise ValueError(f"coarse must be the codes of D {shape_of(D)}, got those of {list(shape)}")
    if coarse.tokens.device != D.device:
        raise ValueError(f"coarse must be on the device of D, {D.device}, got {coarse.tokens.device}")


def _check_candidates(candidates: int | None, k: int) -> int:
    if candidates is None:
        return max(10 * k, 100)
    check_positive("candidates", candidates)
    if candidates < k:
        raise ValueError(f"candidates must be at least k, {k}, got {abbreviate(candidates)}")
    return candidates
