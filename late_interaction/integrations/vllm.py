"""vLLM on these kernels: its scoring of pairs, and MaxSim of a server's hidden states without a patch.

vLLM scores the finished requests of a step by ``LateInteractionRunner._score``. It sends a step of one query
on a GPU to its copy of flash-maxsim, which packs the documents and makes float16 of them, and other steps to
``compute_maxsim_score_batched``: padded float32 copies, 64 pairs at a time. Both come here. Documents are
views of one tensor of hidden states there; :func:`compute_maxsim_score_batched` finds that tensor and scores
them where they lie, and packs others. :func:`compute_maxsim_score_offsets` takes the tensor and the
documents' offsets in it. ``LLM.score`` takes a pair at a time, in its own process, by
``compute_maxsim_score``, which comes here too. Scores stay vLLM's to rounding: to that of float16, where
flash-maxsim computed them.

Functions keep their identity, so whoever imported them is reached too. Patch in the processes that run the
model, for example by a plugin of vLLM (the entry points ``vllm.general_plugins``).
"""

import functools
import sys
from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, chain
from operator import add, attrgetter, index
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.packed import check_sequences
from late_interaction.integrations._shared import calls
from late_interaction.integrations._shared.compat import TURNED_OFF, disabled, why_left
from late_interaction.integrations._shared.places import Patch, Place, attribute_of, code_of, module_exists
from late_interaction.score_pairs import rerank_direct, score_pairs_packed

__all__ = ["compute_maxsim_score_batched", "compute_maxsim_score_offsets"]

_EXCHANGES = Patch("vllm", "vLLM", "0.20 to 0.33", lambda: _places())
_KIND = attrgetter("dtype", "device", "layout")
_MODULE, _NAME = "vllm.v1.pool.late_interaction", "compute_maxsim_score_batched"
_OFFLINE, _PAIR = "vllm.entrypoints.pooling.scoring.utils", "compute_maxsim_score"
_RUNNER, _SCORE = "vllm.v1.pool.late_interaction_runner", "LateInteractionRunner._score"
patch, unpatch, places = _EXCHANGES.patch, _EXCHANGES.restore, _EXCHANGES.places


def compute_maxsim_score_offsets(
    queries: Sequence[Tensor], hidden: Tensor, doc_offsets: Sequence[int], doc_lengths: Sequence[int]
) -> Tensor:
    """Score (query, document) pairs whose documents lie in one tensor.

    That may be the hidden states of a step.

    Args:
        queries: one ``[Lq_i, d]`` a pair. The same tensor object may be there many times: it is copied once.
        hidden: ``[tokens, d]``, of the queries' dtype and device. It is not copied.
        doc_offsets: the token of ``hidden`` that each pair's document begins with, on the host.
        doc_lengths: each document's number of tokens, likewise.

    Returns:
        ``[pairs]``, float32 (float64 for float64 inputs), without gradients. An empty document scores 0.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value.

    Complexity: one call of :func:`late_interaction.score_pairs.score_pairs_packed` for all pairs, whoever
    their queries are. Only where documents overlap, one of :func:`late_interaction.score_pairs.rerank_direct`
    a query.

    Example:
        >>> import torch
        >>> from late_interaction.integrations.vllm import compute_maxsim_score_offsets
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 3.0], [9.0, 9.0], [2.0, 2.0]])
        >>> query, other = torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 1.0]])
        >>> compute_maxsim_score_offsets([query, other, query], hidden, [3, 0, 0], [1, 2, 2])
        tensor([4., 3., 3.])
    """
    starts, lengths = _checked_spans(queries, hidden, doc_offsets, doc_lengths)
    return _scores(queries, hidden, starts, lengths)


def compute_maxsim_score_batched(
    q_embs: Sequence[Tensor],
    d_embs: Sequence[Tensor],
    max_batch_size: int = 64,
    max_score_matrix_elements: int = 64_000_000,
) -> list[Tensor]:
    """Score the pairs ``(q_embs[i], d_embs[i])``: vLLM's function of this name, without vLLM.

    Args:
        q_embs, d_embs: as many queries as documents, each ``[L_i, d]``, of one dtype and device.
        max_batch_size, max_score_matrix_elements: accepted and not needed: no similarity is stored.

    Returns:
        A tensor without dims for each pair, float32 (float64 for float64 inputs), without gradients.
        Documents that are views of one tensor are not copied.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Example:
        >>> import torch
        >>> from late_interaction.integrations.vllm import compute_maxsim_score_batched
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 3.0], [9.0, 9.0], [2.0, 2.0]])
        >>> query = torch.tensor([[1.0, 1.0]])
        >>> compute_maxsim_score_batched([query, query], [hidden[3:], hidden[:2]])
        [tensor(4.), tensor(3.)]
    """
    for name, x in (("q_embs", q_embs), ("d_embs", d_embs)):
        _check_sized(name, x)
    if len(q_embs) != len(d_embs):
        raise ValueError(f"q_embs and d_embs must be equally long, got {len(q_embs)} and {len(d_embs)}")
    if not len(q_embs):
        return []
    check_sequences("d_embs", d_embs)
    _check_queries(q_embs, d_embs[0])
    return _step_scores(q_embs, d_embs, [x.shape[0] for x in d_embs])


# ---- the documents' places ----


def _check_sized(name: str, x: Any) -> None:
    if (
        isinstance(x, (str, bytes))
        or not isinstance(x, Collection)
        or (isinstance(x, Tensor) and not x.dim())
    ):
        raise TypeError(f"{name} must be a sequence, got {abbreviate(x)}")


def _integers(name: str, values: Sequence[int]) -> list[int]:
    try:
        return [index(x) for x in values]
    except TypeError:
        raise TypeError(f"{name} must hold ints, got {abbreviate(values)}") from None


def _step_scores(queries: Sequence[Tensor], documents: Sequence[Tensor], lengths: list[int]) -> list[Tensor]:
    hidden, starts = _in_one_tensor(documents, lengths)
    return [*_scores(queries, hidden, starts, lengths).unbind()]


def _check_queries(queries: Sequence[Tensor], hidden: Tensor) -> None:
    kind = (hidden.dtype, hidden.device, hidden.shape[1])
    for query in {id(x): x for x in queries}.values():
        if not isinstance(query, Tensor):
            raise TypeError(f"queries must be tensors, got {abbreviate(query)}")
        if query.dim() != 2 or (query.dtype, query.device, query.shape[1]) != kind:
            raise ValueError(
                f"queries must be [Lq, {kind[2]}], {kind[0]} and on {kind[1]}, as hidden is, got"
                f" {abbreviate(query)} on {query.device}"
            )


def _checked_spans(
    queries: Sequence[Tensor], hidden: Tensor, doc_offsets: Sequence[int], doc_lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the offset and the length of each pair's document."""
    if not isinstance(hidden, Tensor) or hidden.dim() != 2:
        raise TypeError(f"hidden must be a tensor [tokens, d], got {abbreviate(hidden)}")
    for name, x in (("queries", queries), ("doc_offsets", doc_offsets), ("doc_lengths", doc_lengths)):
        _check_sized(name, x)
    if not len(queries) == len(doc_offsets) == len(doc_lengths):
        raise ValueError(
            "queries, doc_offsets and doc_lengths must be equally long, got"
            f" {len(queries)}, {len(doc_offsets)} and {len(doc_lengths)}"
        )
    _check_queries(queries, hidden)
    starts, lengths = _integers("doc_offsets", doc_offsets), _integers("doc_lengths", doc_lengths)
    for start, length in zip(starts, lengths, strict=True):
        if start < 0 or length < 0 or start + length > len(hidden):
            raise ValueError(
                f"a document must lie within the {len(hidden)} tokens of hidden, got offset {start} and"
                f" length {length}"
            )
    return starts, lengths


def _in_one_tensor(documents: Sequence[Tensor], lengths: list[int]) -> tuple[Tensor, list[int]]:
    """Return a tensor ``[tokens, d]`` with all documents, and where in it each begins.

    They are copied together unless they are views of one.
    """
    first = documents[0]
    d, size = first.shape[1], first.element_size()
    places = [*map(Tensor.data_ptr, documents)]
    base, memory = min(places), first.untyped_storage()
    starts, rests = map(list, zip(*[divmod(x - base, d * size or 1) for x in places], strict=True))
    count = max(map(add, starts, lengths))
    # Whatever lies in the memory of the first one is a view of it.
    inside = memory.data_ptr() <= base and base + count * d * size <= memory.data_ptr() + memory.nbytes()
    if inside and not any(rests) and count <= 2 * sum(lengths) and all(map(Tensor.is_contiguous, documents)):
        offset = (base - memory.data_ptr()) // size
        return first.detach().as_strided((count, d), (d, 1), offset), starts
    return torch.cat([*documents]), [*accumulate(lengths[:-1], initial=0)]


def _segments(starts: list[int], lengths: list[int]) -> tuple[list[int], Sequence[int]] | None:
    """Cut the tokens into documents and what lies between: offsets, and each document's number.

    None: documents overlap, or most tokens are none of theirs, and might be scored with the rest.
    """
    ends = [*map(add, starts, lengths)]
    if starts[0] == 0 and starts[1:] == ends[:-1]:
        return [0, *ends], range(len(ends))
    bounds, numbers, spans = [0], dict[tuple[int, int], int](), [*zip(starts, lengths, strict=True)]
    for start, length in sorted(set(spans)):
        if start < bounds[-1]:
            return None
        if start > bounds[-1]:
            bounds.append(start)
        numbers[start, length] = len(bounds) - 1
        bounds.append(start + length)
    if bounds[-1] > 2 * sum(length for _, length in numbers):
        return None
    return bounds, [numbers[span] for span in spans]


def _scores(queries: Sequence[Tensor], hidden: Tensor, starts: list[int], lengths: list[int]) -> Tensor:
    if not starts:
        return torch.zeros(0, dtype=torch.float32, device=hidden.device)
    distinct = {id(x): x for x in queries}
    numbers = [0] * len(starts)
    if len(distinct) > 1:
        places = {key: i for i, key in enumerate(distinct)}
        numbers = [places[id(x)] for x in queries]
    own = [*distinct.values()]
    with torch.no_grad():
        segments = _segments(starts, lengths)
        if segments is None:
            return _query_by_query(own, numbers, hidden, [*zip(starts, lengths, strict=True)])
        parts = [[*accumulate((x.shape[0] for x in own), initial=0)], segments[0], numbers, segments[1]]
        # All that the host knows goes to the device in one copy.
        told = torch.frombuffer(array("i", chain(*parts)), dtype=torch.int32).to(hidden.device)
        cu_q, cu_d, pair_q, pair_d = told.split([*map(len, parts)])
        Q = own[0] if len(own) == 1 else torch.cat(own)
        return score_pairs_packed(Q, hidden, cu_q, cu_d, pair_q, pair_d)


def _query_by_query(
    distinct: list[Tensor], numbers: list[int], hidden: Tensor, spans: list[tuple[int, int]]
) -> Tensor:
    pairs: list[list[int]] = [[] for _ in distinct]
    for pair, number in enumerate(numbers):
        pairs[number].append(pair)
    order = torch.tensor([pair for own in pairs for pair in own], device=hidden.device)
    scores = []
    for query, own in zip(distinct, pairs, strict=True):
        told = torch.tensor([spans[pair] for pair in own], dtype=torch.int32, device="cpu").to(hidden.device)
        scores.append(rerank_direct(query, hidden, told[:, 0].contiguous(), told[:, 1].contiguous()))
    packed = torch.cat(scores)
    return torch.empty_like(packed).index_copy_(0, order, packed)


# ---- what is put in place of vLLM's functions ----


def _step(original: Any) -> Callable[..., list[Tensor]]:
    """Make a ``_score`` that asks flash-maxsim for nothing that the kernels serve."""

    @functools.wraps(original)
    def _score(self: Any, queries: list[Tensor], docs: list[Tensor]) -> list[Tensor]:
        own = _EXCHANGES.own(original, {_NAME: _own(_MODULE, _NAME)})
        scores = _scores_or_reason(queries, docs)
        return _or_own(_SCORE, scores, lambda: own(self, queries, docs))

    return _score


def _places() -> list[Place]:
    places: list[Place] = [
        (_MODULE, _NAME, code_of(_EXCHANGES, score_batch)),
        (_OFFLINE, _PAIR, code_of(_EXCHANGES, score_pair)),
    ]
    if module_exists("vllm.v1.pool.flash_maxsim"):  # before it, runners called the first of these alone
        parameters = ["self", "queries", "docs"]
        places.append((_RUNNER, _SCORE, attribute_of(_EXCHANGES, _step, parameters)))
    return places


def score_batch(
    q_embs: Any, d_embs: Any, max_batch_size: Any, max_score_matrix_elements: Any
) -> list[Tensor]:
    scores: list[Tensor] | str = "limits that are not above 0"
    if max_batch_size > 0 and max_score_matrix_elements > 0:
        scores = _scores_or_reason(q_embs, d_embs)
    limits = (max_batch_size, max_score_matrix_elements)
    return _or_own(_NAME, scores, lambda: _own(_MODULE, _NAME)(q_embs, d_embs, *limits))


def score_pair(q_emb: Any, d_emb: Any) -> Tensor:
    scores = _scores_or_reason([q_emb], [d_emb])
    return _or_own(_PAIR, scores, lambda: [_own(_OFFLINE, _PAIR)(q_emb, d_emb)])[0]


_or_own = functools.partial(calls.scores_or_own, _EXCHANGES.package)


def _own(module: str, name: str) -> Callable[..., Any]:
    return _EXCHANGES.own(getattr(sys.modules[module], name))


def _scores_or_reason(queries: Any, documents: Any) -> list[Tensor] | str:
    """Score pairs, or say why the kernels do not take them. Of thousands little is asked of each."""
    if disabled(_EXCHANGES.package):
        return TURNED_OFF
    if not len(queries) or len(queries) != len(documents):
        return "no pairs"
    both = [*documents, *{id(x): x for x in queries}.values()]
    try:
        lengths, dims = map(list, zip(*[x.shape for x in both], strict=True))
        kinds = {*map(_KIND, both)}
    except (AttributeError, ValueError):  # lists, or tensors of other dims
        return "embeddings of another form"
    Q = queries[0]
    if len(kinds) != 1 or len({*dims}) != 1 or 0 in lengths or 0 in dims or Q.dtype == torch.float64:
        return "embeddings of other kinds, of float64, or empty"
    if torch.is_grad_enabled() and any(x.requires_grad for x in both):
        return "gradients"
    return why_left(Q, Q, _EXCHANGES.package) or _step_scores(queries, documents, lengths[: len(documents)])
