"""PyLate 1.3.3 to 1.6 on these kernels: training, distillation, reranking and XTR scores.

Losses and gradients stay PyLate's to rounding, its masks included: a masked token scores 0 there, and takes
part in the maximum. Scores are float32.

Before 1.5.1 PyLate scores by functions that its losses and its reranker hold: those keep their identity and
run other code. From 1.5.1 on PyLate selects a backend for each call: ``auto`` and ``lik`` come here,
``torch`` and ``flash`` stay what they are.
"""

import importlib
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from late_interaction._maxsim import maxsim, maxsim_pairs
from late_interaction.integrations._shared import calls
from late_interaction.integrations._shared.compat import package_at_least, why_left, why_unfit
from late_interaction.integrations._shared.places import Patch, Place, attribute_of, calling
from late_interaction.xtr import xtr_scores

__all__: list[str] = []

_PACKAGE = "pylate"
_EXCHANGES = Patch(_PACKAGE, "PyLate", "1.3.3 to 1.6", lambda: _surface())
patch, places = _EXCHANGES.patch, _EXCHANGES.places
# What PyLate had under a name; empty while nothing is patched.
_ORIGINAL: dict[str, Callable[..., Any]] = {}


def unpatch() -> None:
    _EXCHANGES.restore()
    _ORIGINAL.clear()


# ---- what is put in place of PyLate's functions ----


def _in_place_of(name: str, document_rank: int, score: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyLate's function of this name, through ``score`` where the kernels serve the call."""

    def patched(
        queries_embeddings: Any,
        documents_embeddings: Any,
        queries_mask: Any = None,
        documents_mask: Any = None,
        *,
        mask: Any = None,  # documents_mask by its name before PyLate 1.1
    ) -> Tensor:
        masks = {"queries_mask": queries_mask, "documents_mask": documents_mask if mask is None else mask}
        if name in _ORIGINAL:
            tokens = _tensors(queries_embeddings, documents_embeddings)
            own_documents = document_rank == 4 or score is maxsim_pairs
            reason = why_unfit(*tokens, _PACKAGE, document_rank, own_documents) if tokens else _RAGGED
            if tokens and reason is None:
                calls.scored(_PACKAGE)
                return _masked(score, *tokens, **masks)
            calls.left(_PACKAGE, name, reason or _RAGGED)
        if score is maxsim_pairs:  # PyLate's own has no masks
            masks = {key: value for key, value in masks.items() if value is not None}
        if name.endswith("_lik"):
            _require_lik()
        original = _ORIGINAL.get(name) or getattr(importlib.import_module(_scores_module()), name)
        return original(queries_embeddings, documents_embeddings, **masks)

    patched.__name__ = patched.__qualname__ = f"patched_{name}"
    return patched


_RAGGED = "embeddings of unequal lengths"


patched_colbert_scores = _in_place_of("colbert_scores", 3, maxsim)
patched_colbert_kd_scores = _in_place_of("colbert_kd_scores", 4, maxsim)
patched_colbert_scores_pairwise = _in_place_of("colbert_scores_pairwise", 3, maxsim_pairs)
_colbert_scores_lik = _in_place_of("colbert_scores_lik", 3, maxsim)
_colbert_kd_scores_lik = _in_place_of("colbert_kd_scores_lik", 4, maxsim)
_colbert_scores_pairwise_lik = _in_place_of("colbert_scores_pairwise_lik", 3, maxsim_pairs)


def _grouped(
    self: Any,
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    **backend: str | None,
) -> Tensor:
    """Replace ``ColBERTScores.__call__``: documents ``[D, N, Ld, d]`` are one batch, not N slices."""
    if _selected(**backend) and (tokens := _tensors(queries_embeddings, documents_embeddings)) is not None:
        Q, D = tokens
        if Q.dim() == 3 and D.dim() == 4 and why_left(Q, D, _PACKAGE) is None:
            if documents_mask is not None:
                documents_mask = _tensor(documents_mask).flatten(0, 1)
            calls.scored(_PACKAGE)
            return _masked(maxsim, Q, D.flatten(0, 1), queries_mask, documents_mask)
    original: Callable[..., Tensor] = _ORIGINAL["ColBERTScores.__call__"]
    return original(self, queries_embeddings, documents_embeddings, queries_mask, documents_mask, **backend)


def _xtr_score(
    self: Any, queries_embeddings: Any, documents_embeddings: Any, queries_mask: Any, documents_mask: Any
) -> Tensor:
    """Replace ``XTRScores._score``, of tensors: without the grid of all similarities."""
    Q, D, q_mask, d_mask = queries_embeddings, documents_embeddings, queries_mask, documents_mask
    path = "XTRScores._score"
    reason = why_left(Q, D, _PACKAGE) if _selected() else _OTHER_BACKEND
    if reason is None and (Q.dim() != 3 or D.dim() != 4):
        reason = f"queries of {Q.dim()} dims and documents of {D.dim()}"
    if path in _ORIGINAL and reason is None:
        reason = "masks or a k that do not fit"
        D = D.flatten(0, 1)
        if isinstance(d_mask, Tensor) and d_mask.numel() == D.shape[:2].numel():
            d_mask = d_mask.reshape(D.shape[:2]).bool()
        fits = all(
            m is None or (isinstance(m, Tensor) and m.shape == x.shape[:2] and m.device == x.device)
            for m, x in ((q_mask, Q), (d_mask, D))
        )
        if fits and isinstance(self.k, int) and 0 < self.k <= D.shape[:2].numel():
            calls.scored(_PACKAGE)
            if q_mask is None or q_mask.dtype == torch.bool:
                return xtr_scores(Q, D, self.k, q_mask, d_mask, rule="pylate").float()
            weights = q_mask if q_mask.is_floating_point() else q_mask.float()
            return xtr_scores(Q, D, self.k, None, d_mask, rule="pylate", q_weights=weights).float()
    if path in _ORIGINAL and reason is not None:
        calls.left(_PACKAGE, path, reason)
    # An instance compiled under the patch holds this function past its end.
    original = _ORIGINAL.get(path) or importlib.import_module("pylate.scores.xtr").XTRScores._score
    return original(self, queries_embeddings, documents_embeddings, queries_mask, documents_mask)


def _selected(backend: str | None = None) -> bool:
    """Tell whether PyLate's backend, where it has that choice, is this one."""
    resolve = getattr(sys.modules["pylate.scores.colbert"], "_resolve_backend", None)
    return resolve is None or resolve(backend) in ("auto", "lik")


_OTHER_BACKEND = "another backend is selected"


def _try_lik(backend: str, *tensors: Any) -> bool:
    reason = _why_left(tensors) if backend in ("auto", "lik") else _OTHER_BACKEND
    if reason is None or _ORIGINAL["_try_lik"](backend, *tensors):
        return True
    calls.left(_PACKAGE, "scores", reason)
    return False


def _require_lik() -> None:
    """Raise what PyLate's ``auto`` answers by its own scoring, where there is no LIK to hand on to."""
    backend = importlib.import_module("pylate.scores._lik_backend")
    if not backend.is_available():
        raise backend.LIKUnsupported("shapes that late_interaction does not score, and no LIK is installed")


def _try_flash(backend: str, *tensors: Any) -> bool:
    if backend == "auto" and _why_left(tensors) is None:
        return False
    return bool(_ORIGINAL["_try_flash"](backend, *tensors))


def _why_left(tensors: tuple[Any, ...]) -> str | None:
    if not all(isinstance(x, Tensor) for x in tensors):
        return "embeddings that are no tensors"
    Q, D = tensors
    return why_left(Q, D, _PACKAGE)


# ---- PyLate's way with masks and lists ----


def _masked(
    score: Callable[..., Tensor], Q: Tensor, D: Tensor, queries_mask: Any, documents_mask: Any
) -> Tensor:
    Q, q_mask = _multiplied(Q, queries_mask)
    D, d_mask = _multiplied(D, documents_mask)
    return score(Q, D, q_mask, d_mask)


def _multiplied(tokens: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
    """Tokens whose similarities are as if multiplied by the mask, which is PyLate's way, and what to visit.

    Masked tokens are all 0 now. One of a sequence is visited: it wins if all others are negative.
    """
    if mask is None:
        return tokens, None
    mask = torch.broadcast_to(_tensor(mask), tokens.shape[:-1])
    live = mask != 0
    visited = live.scatter(-1, live.to(torch.uint8).argmin(-1, keepdim=True), True)
    return tokens * mask.to(tokens.dtype).unsqueeze(-1), visited


def _tensor(x: Any) -> Tensor:
    convert: Callable[[Any], Tensor] = importlib.import_module("pylate.utils.tensor").convert_to_tensor
    return convert(x)


def _tensors(Q: Any, D: Any) -> tuple[Tensor, Tensor] | None:
    """Make tensors of queries and documents; return None where lengths differ."""
    try:
        return _tensor(Q), _tensor(D)
    except (RuntimeError, ValueError):  # unequal lengths, which PyLate's own function takes one by one
        return None


# ---- where they are put ----


def _scores_module() -> str:
    return f"pylate.scores.{'colbert' if package_at_least(_PACKAGE, '1.5') else 'scores'}"


def _surface() -> list[Place]:
    here, backend = _scores_module(), "pylate.scores._lik_backend"
    of_groups = [
        (here, "ColBERTScores.__call__", _attribute_of(_grouped)),
        ("pylate.scores.xtr", "XTRScores._score", _attribute_of(_xtr_score)),
    ]
    if package_at_least(_PACKAGE, "1.5.1"):
        return [
            *of_groups,
            (here, "_try_flash", _attribute_of(_try_flash)),
            (here, "_try_lik", _attribute_of(_try_lik)),
            (backend, "colbert_scores_lik", _attribute_of(_colbert_scores_lik)),
            (backend, "colbert_kd_scores_lik", _attribute_of(_colbert_kd_scores_lik)),
            (backend, "colbert_scores_pairwise_lik", _attribute_of(_colbert_scores_pairwise_lik)),
        ]
    functions = [
        (here, "colbert_scores", _code_of(patched_colbert_scores)),
        (here, "colbert_kd_scores", _code_of(patched_colbert_kd_scores)),
        (here, "colbert_scores_pairwise", _code_of(patched_colbert_scores_pairwise)),
    ]
    return functions + of_groups if package_at_least(_PACKAGE, "1.5") else functions


def _code_of(replacement: Callable[..., Any]) -> Callable[[Any, str], bool]:
    """Have a function that PyLate's modules and losses hold call the replacement."""

    def patch(module: Any, name: str) -> bool:
        function = getattr(module, name, None)
        if not isinstance(function, FunctionType) or function.__closure__ is not None:
            return False
        _ORIGINAL[name] = _EXCHANGES.own(function)
        _EXCHANGES.code(function, calling(replacement, function).__code__)
        return True

    return patch


def _attribute_of(replacement: Callable[..., Any]) -> Callable[[Any, str], bool]:
    def patch(module: Any, path: str) -> bool:
        def keep(original: Callable[..., Any]) -> Callable[..., Any]:
            _ORIGINAL[path] = original
            return replacement

        return attribute_of(_EXCHANGES, keep)(module, path)

    return patch
