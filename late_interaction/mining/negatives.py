"""Hard negatives of embeddings, which are chosen among found documents: :func:`hard_negatives`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import (
    check_flag,
    check_integer,
    check_one_of,
    check_positive,
    check_seed,
    is_integer,
)
from late_interaction._checks.tensors import INDICES, MASK_DTYPES, check_has_d, check_integers, check_not_meta
from late_interaction._progress import Progress
from late_interaction._scoring.norm_warning import look, unwatched
from late_interaction._scoring.normalized import unit
from late_interaction._scoring.sequences import as_tokens, of_tensor
from late_interaction._search.result import SearchResult, ids_at
from late_interaction.corpus import Corpus
from late_interaction.ops.topk import MOST_DOCUMENTS
from late_interaction.score_pairs import score_pairs_packed
from late_interaction.tokens import Tokens, TokensLike

Strategy = Literal["top", "random"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
# Candidates for each negative where scores or margins may refuse some.
_SPARE = 10
_MOST = 1 << 62  # of a score


@dataclass(frozen=True)
class Choice:
    """The options of :func:`late_interaction.hard_negatives` that say what may be a negative."""

    num_negatives: int = 3
    range_min: int = 0
    range_max: int | None = None
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    sampling_strategy: Strategy = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive("num_negatives", self.num_negatives)
        if self.num_negatives > MOST_DOCUMENTS:
            raise ValueError(f"num_negatives must be at most 2**32, got {abbreviate(self.num_negatives)}")
        check_integer("range_min", self.range_min)
        if self.range_min < 0:
            raise ValueError(f"range_min must be at least 0, got {self.range_min}")
        if self.range_max is not None:
            check_positive("range_max", self.range_max)
        check_one_of("sampling_strategy", self.sampling_strategy, STRATEGIES)
        if self.most - self.range_min < self.num_negatives:
            raise ValueError(
                f"range_max must leave room for {self.num_negatives} negatives from rank {self.range_min} on,"
                f" got {self.range_max}"
            )
        for name in ("max_score", "min_score", "absolute_margin", "relative_margin"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise TypeError(f"{name} must be a number or None, got {abbreviate(value)}")
            if isinstance(value, int) and abs(value) > _MOST:
                raise ValueError(f"{name} must lie in [-2**62, 2**62], got {abbreviate(value)}")
        check_seed(self.seed)

    @property
    def most(self) -> int:
        """Return the rank among a query's negatives from which on none is taken."""
        if self.range_max is not None:
            return self.range_max
        filters = self.max_score, self.absolute_margin, self.relative_margin
        spare = 1 if all(x is None for x in filters) and self.sampling_strategy == "top" else _SPARE
        return self.range_min + spare * self.num_negatives

    def columns(self, scores: Tensor, is_positive: Tensor, positive: Tensor) -> Tensor:
        """Choose the columns of ``scores [Nq, n]`` that become negatives: ``[Nq, num_negatives]``.

        They are best first, in the order of their ranks; ``n`` where there are no more. positive: ``[Nq]``,
        each query's lowest score of a positive, NaN where it has none.
        """
        rank = (~is_positive).cumsum(1) - 1
        fit = ~is_positive & (rank < min(self.most, scores.shape[1])) & ~scores.isnan()
        if self.max_score is not None:
            fit &= scores <= self.max_score
        if self.min_score is not None:
            fit &= scores >= self.min_score
        limit = positive.unsqueeze(1)
        if self.absolute_margin is not None:
            fit &= (scores <= limit - self.absolute_margin) | limit.isnan()
        if self.relative_margin is not None:
            fit &= (scores <= limit - self.relative_margin * limit.abs()) | limit.isnan()
        return self._chosen(fit & (fit.cumsum(1) > min(self.range_min, scores.shape[1])))

    def _chosen(self, fit: Tensor) -> Tensor:
        n = fit.shape[1]
        places = torch.arange(n, device=fit.device).expand(fit.shape)
        key = places.double()
        if self.sampling_strategy == "random":  # drawn on the CPU, so that all devices choose the same
            generator = torch.Generator(device="cpu").manual_seed(int(self.seed))
            key = torch.rand(fit.shape, generator=generator, dtype=torch.float64, device="cpu").to(fit.device)
        key = key.masked_fill(~fit, torch.inf)
        chosen = key.argsort(dim=1, stable=True)[:, : self.num_negatives]
        found = torch.where(fit.gather(1, chosen), chosen, n).sort(dim=1).values
        return torch.nn.functional.pad(found, (0, self.num_negatives - found.shape[1]), value=n)


__all__ = ["HardNegatives", "hard_negatives"]

# Queries whose candidates are chosen, or whose positives are scored, at a time.
_QUERIES = 1024


@dataclass(frozen=True, eq=False)
class HardNegatives(SearchResult):
    """Hold what :func:`hard_negatives` found: a search's result, and the scores of positives.

    Args:
        scores: ``[Nq, num_negatives]``, float32: exact scores, falling.
        indices: ``[Nq, num_negatives]``, int64: the documents. Where there were no more, the score is -inf,
            the index -1, the id None.
        ids: as in :class:`late_interaction.SearchResult`.
        positive_scores: the scores of each query's positives, in their order: a float32 tensor for each.

    Example:
        >>> import torch
        >>> from late_interaction import hard_negatives
        >>> D = torch.eye(4).unsqueeze(1)
        >>> hard_negatives(D[:1] + 0.1 * D[2], D, [[0]], num_negatives=1).indices
        tensor([[2]])
    """

    positive_scores: list[Tensor] = field(default_factory=list)


def hard_negatives(
    Q: TokensLike,
    D: TokensLike | Corpus,
    positives: Sequence[Sequence[int]],
    *,
    num_negatives: int = 3,
    range_min: int = 0,
    range_max: int | None = None,
    max_score: float | None = None,
    min_score: float | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    sampling_strategy: Strategy = "top",
    seed: int = 0,
    include_positives: bool = False,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    normalize: bool = False,
    progress: Progress = False,
    keep_empty: bool = False,
) -> HardNegatives:
    """Find the documents that score highest for each query and are no positives of it.

    By exact MaxSim over the whole corpus, in bounded memory. The options have the names that they have in
    Sentence Transformers' ``mine_hard_negatives``.

    Args:
        Q: ``[Nq, Lq, d]``, :class:`late_interaction.Tokens`, or a list of ``[L, d]`` tensors; rounded to the
            dtype of ``D``.
        D: documents: ``[Nd, Ld, d]``, Tokens, a list of ``[L, d]`` tensors, or a
            :class:`late_interaction.Corpus`. On the device of ``Q``, or on the CPU. float64 ones are scored
            as float32.
        positives: for each query the indices of its positive documents; may be empty.
        num_negatives: how many for each query.
        range_min: skip so many of the best that scores and margins leave.
        range_max: no document from this rank on among those that are no positives of the query. None:
            ``range_min + num_negatives``, or ``range_min + 10 * num_negatives`` where a ``max_score`` or a
            margin may refuse some, or they are drawn at random.
        max_score, min_score: no negative with a higher or a lower score.
        absolute_margin: a negative scores at least so much less than the lowest-scored positive of its query.
        relative_margin: likewise, as a share of the absolute value of that positive's score.
        sampling_strategy: ``"top"``, the highest scores of what remains, or ``"random"``.
        seed: of the random choice, which is the same on every device.
        include_positives: whether positives may be among what is found.
        q_mask, d_mask: ``[Nq, Lq]`` and ``[Nd, Ld]``, True = keep. Only for tensors.
        normalize: L2-normalize every token first.
        progress: of the search, as in :func:`late_interaction.search`.
        keep_empty: rank documents without a kept token too, by their score of 0.

    Returns:
        A :class:`HardNegatives`, on the device of ``Q``. A document whose score with a query is NaN takes no
        rank by it and counts for no margin, nor does an empty one that is not kept.

    Raises:
        TypeError, ValueError: arguments of a wrong kind, dtype, shape or value.

    Complexity: one exact search for the ``range_max`` best and as many more as a query has positives, and the
        scores of the positives.

    Example:
        >>> import torch
        >>> from late_interaction import hard_negatives
        >>> D = [torch.randn(length, 16) for length in (5, 9, 3, 12, 7)]
        >>> Q = [D[0][:2], D[3][4:]]
        >>> found = hard_negatives(Q, D, [[0], [3]], num_negatives=2, absolute_margin=0.1)
        >>> found.indices.shape, 0 in found.indices[0]
        (torch.Size([2, 2]), False)
    """
    choice = Choice(
        num_negatives, range_min, range_max, max_score, min_score, absolute_margin, relative_margin,
        sampling_strategy, seed,
    )  # fmt: skip
    check_flag("normalize", normalize)
    check_flag("include_positives", include_positives)
    queries = [] if isinstance(Q, (list, tuple)) and not Q else list(_tokens("Q", Q, q_mask))
    corpus = _corpus(D, d_mask)
    rows = _positives(positives, len(queries), len(corpus))
    if not queries:
        none = torch.empty(0, num_negatives, dtype=torch.float32, device="cpu")
        return HardNegatives(none, none.long())
    most = max(map(len, rows))
    if not normalize:
        look("hard_negatives", queries)
    with torch.no_grad():
        options: dict[str, Any] = {"normalize": normalize, "progress": progress, "keep_empty": keep_empty}
        scores, indices = unwatched(corpus.search, queries, choice.most + most, **options)
        own = _positive_scores(queries, corpus, rows, normalize)
        device = scores.device
        lowest = torch.tensor(_lowest(own, corpus, rows, keep_empty), dtype=torch.float32, device=device)
        filled = [row + [-1] * (most - len(row)) for row in rows]
        padded = torch.tensor(filled, dtype=torch.int64, device=device).view(len(rows), most)
        blocks = zip(indices.split(_QUERIES), padded.split(_QUERIES), strict=True)
        is_positive = torch.cat([(i.unsqueeze(-1) == p.unsqueeze(1)).any(-1) for i, p in blocks])
        if include_positives:
            is_positive.zero_()
        columns = choice.columns(scores.masked_fill(indices < 0, torch.nan), is_positive, lowest)
        # A column behind all others stands where there are no more.
        scores, indices = pad(scores, (0, 1), value=-torch.inf), pad(indices, (0, 1), value=-1)
        scores, indices = scores.gather(1, columns), indices.gather(1, columns)
        ids = None if corpus.ids is None else ids_at(corpus.ids, indices.tolist())
        return HardNegatives(scores, indices, ids, own)


def _lowest(scores: list[Tensor], corpus: Corpus, rows: list[list[int]], keep_empty: bool) -> list[float]:
    """Find the lowest score of each query's positives that count; NaN where it has none."""
    every, found = iter(torch.cat(scores).tolist()), []
    for row in rows:
        own = ((next(every), i) for i in row)
        counted = [x for x, i in own if not math.isnan(x) and (keep_empty or corpus._length(i))]
        found.append(min(counted, default=math.nan))
    return found


def _tokens(name: str, x: Any, mask: Tensor | None) -> Tokens:
    tokens = as_tokens(name, x, **{f"{name.lower()}_mask": mask})
    if isinstance(tokens, Tensor):
        tokens = of_tensor(name, tokens, mask, (3,))
    check_not_meta(name, tokens.values)
    return tokens


def _corpus(D: Any, d_mask: Tensor | None) -> Corpus:
    if isinstance(D, Corpus):
        if d_mask is not None:
            raise ValueError(f"d_mask must be None for a Corpus, got {abbreviate(d_mask)}")
        return D
    if isinstance(D, (list, tuple)) and not D:
        return Corpus([], {"d": 0, "dtype": torch.float32, "normalized": False})
    tokens = _tokens("D", D, d_mask).pack()
    check_has_d("D", tokens.values)
    values = tokens.values.float() if tokens.dtype is torch.float64 else tokens.values
    return Corpus.from_packed(values.contiguous(), tokens.offsets)  # type: ignore[arg-type]


def _positives(positives: Any, queries: int, documents: int) -> list[list[int]]:
    if isinstance(positives, Tensor):
        device, shape = positives.device, "[Nq, positives of each]"
        check_integers("positives", positives, 2, shape, "Q", device, MASK_DTYPES[1:])
        check_not_meta("positives", positives)
        positives = positives.tolist()
    if not isinstance(positives, Sequence) or not all(isinstance(row, Sequence) for row in positives):
        raise TypeError(f"positives must be a list of documents for each query, got {abbreviate(positives)}")
    if len(positives) != queries:
        raise ValueError(f"positives must have a list for each of {queries} queries, got {len(positives)}")
    rows = []
    for i, row in enumerate(positives):
        for x in row:
            if not is_integer(x) and not (isinstance(x, Tensor) and x.dtype in INDICES and x.dim() == 0):
                raise TypeError(f"positives[{i}] must hold integers, got {abbreviate(x)}")
            if not 0 <= int(x) < documents:
                raise ValueError(f"positives[{i}] must lie in [0, {documents}), got {int(x)}")
        rows.append([int(x) for x in row])
    return rows


def _positive_scores(
    queries: list[Tensor], corpus: Corpus, rows: list[list[int]], normalize: bool
) -> list[Tensor]:
    found: list[Tensor] = []
    device = queries[0].device
    for start in range(0, len(queries), _QUERIES):
        some = rows[start : start + _QUERIES]
        known = {document: place for place, document in enumerate(dict.fromkeys(x for r in some for x in r))}
        if not known:
            found += [torch.empty(0, dtype=torch.float32, device=device) for _ in some]
            continue
        texts = queries[start : start + len(some)], [corpus[x].to(device) for x in known]
        Q, D = (Tokens.from_list([unit(x.float()) if normalize else x.float() for x in y]) for y in texts)
        pairs = [(i, known[x]) for i, row in enumerate(some) for x in row]
        at_q, at_d = (torch.tensor(x, dtype=torch.int32, device=device) for x in zip(*pairs, strict=True))
        scores = unwatched(score_pairs_packed, Q.values, D.values, Q.offsets, D.offsets, at_q, at_d)
        found += scores.split([len(row) for row in some])
    return found
