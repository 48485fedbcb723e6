"""mteb 2.23 to 2.26 on these kernels: all that it computes MaxSim by.

``max_sim`` and ``pairwise_max_sim`` of ``mteb.similarity_functions`` keep their identity and run other code,
so encoders and wrappers that imported them before are reached too. So are the searches of
``OpenAIAPITokenEmbedWrapper``, on the host as there, and ``JinaV4Wrapper.score_multi_vector``. Lists are
packed, not padded, and no similarity is stored. Scores stay mteb's to rounding, and go to the device that it
chooses: a document that it would pad scores at least 0 for each query token, as there. float16 and bfloat16
embeddings multiply as they are, with float32 sums; mteb makes float32 copies of most of them first.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from late_interaction._maxsim import maxsim_pairs
from late_interaction.integrations._shared import calls, zero_padded
from late_interaction.integrations._shared.compat import TURNED_OFF, disabled, has_kernels, why_left
from late_interaction.integrations._shared.places import Patch, Place, attribute_of, code_of

__all__: list[str] = []

_EXCHANGES = Patch("mteb", "mteb", "2.23 to 2.26", lambda: _PLACES)
_MODULE = "mteb.similarity_functions"
_WRAPPERS = "mteb.models.openai_wrappers"
_JINA = "mteb.models.model_implementations.jina_models"
patch, unpatch, places = _EXCHANGES.patch, _EXCHANGES.restore, _EXCHANGES.places


# ---- what is put in place of mteb's functions ----


def _multi_vector(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute ``score_multi_vector`` on the kernels, where they serve the call."""

    @functools.wraps(original)
    def score_multi_vector(self: Any, qs: Any, ps: Any, batch_size: int = 16) -> Tensor:
        place = torch.device(self.model.device)
        scores = zero_padded.scores_by_batches(qs, ps, batch_size, _EXCHANGES.package, place)
        name = f"{type(self).__name__}.score_multi_vector"
        return _or_own(name, scores, lambda: original(self, qs, ps, batch_size)).cpu().float()

    return score_multi_vector


def max_sim(a: Any, b: Any, batch_size: int) -> Tensor:
    scores = TURNED_OFF if disabled(_EXCHANGES.package) else _grid(a, b)
    return _or_own("max_sim", scores, lambda: _own("max_sim")(a, b, batch_size))


def pairwise_max_sim(queries_embeddings: Any, documents_embeddings: Any) -> Tensor:
    queries, documents = queries_embeddings, documents_embeddings
    scores = TURNED_OFF if disabled(_EXCHANGES.package) else _pairs(queries, documents)
    return _or_own("pairwise_max_sim", scores, lambda: _own("pairwise_max_sim")(queries, documents))


def max_sim_scores(query_embedding: Any, doc_embeddings: Any) -> list[float]:
    query, documents = query_embedding, [*doc_embeddings]
    scores = TURNED_OFF if disabled(_EXCHANGES.package) else _of_arrays(query, documents)
    return _or_own("_max_sim_scores", scores, lambda: _own("_max_sim_scores", _WRAPPERS)(query, documents))


_or_own = functools.partial(calls.scores_or_own, _EXCHANGES.package)


def _mteb() -> Any:
    return sys.modules[_MODULE]


def _own(name: str, module: str = _MODULE) -> Callable[..., Any]:
    return _EXCHANGES.own(getattr(sys.modules[module], name))


# ---- what the kernels score, or why they do not ----


_EMPTY = "empty documents"
_UNLIKE = "embeddings of other kinds, dtypes or devices"


def _grid(a: Any, b: Any) -> Tensor | str:
    mteb = _mteb()
    if mteb._is_ragged(a) or mteb._is_ragged(b):
        sides = _alike(_listed(a), _listed(b))
    else:
        sides = _alike(_batch(a), _batch(b))
    if sides is None:
        return _UNLIKE
    device = mteb._select_device(sides[0][0], sides[1][0])
    if not has_kernels(device):
        return f"no kernels for {device.type} tensors"
    padded_to = [] if isinstance(sides[1], Tensor) else _padded_to(*sides)
    if padded_to is None:
        return _EMPTY

    def core(queries: zero_padded.Side, documents: zero_padded.Side, place: torch.device) -> Tensor:
        return zero_padded.scores(queries, documents, padded_to, place)

    scores: Tensor = mteb._compute_on_best_device(core, *sides)
    return scores.to(sides[0][0].device)


def _pairs(a: Any, b: Any) -> Tensor | str:
    if not all(isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) == 3 for x in (a, b)):
        return _UNLIKE  # mteb goes through the first dim, and refuses rows
    if len(a) != len(b):
        return "other numbers of queries and documents"
    padded = isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == b.dim() == 3
    sides = _alike(_tensor(a), _tensor(b)) if padded else _alike(_listed(a), _listed(b))
    if sides is None:
        return _UNLIKE
    reason = why_left(sides[0][0], sides[1][0])
    if reason is not None:
        return reason
    queries, documents = sides
    return maxsim_pairs(queries, documents) if all(len(x) for x in documents) else _EMPTY


def _of_arrays(query: Any, documents: list[Any]) -> list[float] | str:
    """Score NumPy arrays where they are, which no GPU reads."""
    import numpy as np

    arrays = [query, *documents]
    if not all(isinstance(x, np.ndarray) and x.ndim == 2 and x.size for x in arrays):
        return "empty embeddings, or some of another form"
    kinds = {(x.dtype, x.shape[1]) for x in arrays}
    viewed = all(x.flags.c_contiguous and x.flags.writeable for x in arrays)
    if not documents or len(kinds) > 1 or not viewed or query.dtype.name not in _DTYPES:
        return _UNLIKE
    Q, *items = [torch.from_numpy(x) for x in arrays]
    return zero_padded.scores([Q], items, [0] * len(items), Q.device)[0].tolist()


_DTYPES = ("float16", "float32", "float64")


# ---- mteb's embeddings, and its padding ----


def _tensor(x: Any) -> Tensor:
    """Convert as mteb does, but that half precision stays."""
    if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16):
        return x
    return _mteb()._convert_to_tensor(x)


def _batch(x: Any) -> Tensor:
    tokens = _tensor(x)
    return tokens.unsqueeze(0) if tokens.dim() == 2 else tokens


def _listed(x: Any) -> list[Tensor]:
    return [_tensor(tokens) for tokens in x] if isinstance(x, (list, tuple)) else [*_batch(x)]


def _alike(a: zero_padded.Side, b: zero_padded.Side) -> tuple[zero_padded.Side, zero_padded.Side] | None:
    """Convert both sides to one dtype, as mteb does where they differ.

    None if the kernels do not take them.
    """
    if len({x.dtype for x in (*_each(a), *_each(b))}) > 1:
        a, b = _converted(a), _converted(b)
    for side in (a, b):
        items = _each(side)
        rank = 3 if isinstance(side, Tensor) else 2
        uniform = len({x.device for x in items}) == 1 and all(x.dim() == rank for x in items)
        if not uniform or not items[0].numel():
            return None
    kinds = {(x.dtype, x.shape[-1], x.layout) for x in (*_each(a), *_each(b))}
    return (a, b) if len(kinds) == 1 and a[0].is_floating_point() else None


def _each(side: zero_padded.Side) -> Sequence[Tensor]:
    return [side] if isinstance(side, Tensor) else side


def _converted(side: zero_padded.Side) -> zero_padded.Side:
    convert: Callable[[Any], Tensor] = _mteb()._convert_to_tensor
    return convert(side) if isinstance(side, Tensor) else [convert(x) for x in side]


def _padded_to(queries: zero_padded.Side, documents: zero_padded.Side) -> list[int] | None:
    """Return how long mteb pads each document: all to the longest, or each to the longest of its group."""
    q_widths, d_widths = [*map(len, queries)], [*map(len, documents)]
    padded = len(q_widths) * max(q_widths) * len(d_widths) * max(d_widths)
    if padded <= _mteb()._MAX_SIM_PADDING_OVERHEAD * sum(q_widths) * sum(d_widths):
        return [max(d_widths)] * len(d_widths)
    padded_to = [0] * len(d_widths)
    for group in _mteb()._token_budget_chunks(d_widths):
        longest = max(d_widths[index] for index in group)
        for index in group:
            padded_to[index] = longest
    return padded_to if all(padded_to) else None


# ---- where they are put ----

# The functions above take these from mteb.
_HELPERS = (
    "_compute_on_best_device",
    "_convert_to_tensor",
    "_is_ragged",
    "_select_device",
    "_token_budget_chunks",
)


def _code_of(function: Callable[..., Any]) -> Callable[[Any, str], bool]:
    exchange = code_of(_EXCHANGES, function)
    return lambda module, name: all(hasattr(module, x) for x in _HELPERS) and exchange(module, name)


_PLACES: list[Place] = [
    (_MODULE, "max_sim", _code_of(max_sim)),
    (_MODULE, "pairwise_max_sim", _code_of(pairwise_max_sim)),
    (_WRAPPERS, "_max_sim_scores", code_of(_EXCHANGES, max_sim_scores)),
    (
        _JINA,
        "JinaV4Wrapper.score_multi_vector",
        attribute_of(_EXCHANGES, _multi_vector, ["self", "qs", "ps", "batch_size"]),
    ),
]
