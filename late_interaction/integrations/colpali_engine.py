"""colpali-engine 0.3.10 to 0.3.18 on these kernels: ``score_multi_vector`` and all loss heads.

The explicit negatives of a head are one call on ``[B, n_neg, Ld, d]``, its positives one of
:func:`late_interaction.maxsim_pairs`; no similarity is stored. Heads with ``use_smooth_max=True`` call
:func:`late_interaction.smooth_maxsim` and :func:`late_interaction.smooth_maxsim_pairs` with their ``tau``.
Losses and gradients stay colpali-engine's to rounding, except that the first of equal similarities takes the
gradient that ``amax`` shares among them (as padding has, which is zero). Scores are float32.

The loss heads and ``score_multi_vector`` run their own code, whichever version's, in a namespace where
``torch.einsum`` gives similarities that are not computed yet. Asked for their maximum's sum, they are MaxSim;
asked for the smooth maximum's, :func:`late_interaction.smooth_maxsim`; asked for anything else, they are
einsum's. So every option of a head is the head's own.

From 0.3.17 on ``COLPALI_SCORES_BACKEND`` selects a backend for each call: ``auto`` and ``lik`` come here.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.options import is_tau
from late_interaction._maxsim import maxsim, maxsim_pairs
from late_interaction.integrations._shared import calls
from late_interaction.integrations._shared.compat import package_at_least, why_unfit
from late_interaction.integrations._shared.exchange import Instead, with_namespace
from late_interaction.integrations._shared.places import Patch, Place, attribute_of
from late_interaction.smooth import smooth_maxsim, smooth_maxsim_pairs

__all__: list[str] = []

_LOSSES = "colpali_engine.loss.late_interaction_losses"
_PROCESSOR = "colpali_engine.utils.processing_utils"
_BACKEND = "colpali_engine.utils._lik_backend"

_SCORE_MULTI_VECTOR = (_PROCESSOR, "BaseVisualRetrieverProcessor.score_multi_vector")

_EXCHANGES = Patch("colpali-engine", "colpali-engine", "0.3.10 to 0.3.18", lambda: _surface())
patch, unpatch, places = _EXCHANGES.patch, _EXCHANGES.restore, _EXCHANGES.places


# ---- what is put in place of colpali-engine's functions ----


def patched_score_multi_vector(
    qs: Any, ps: Any, batch_size: int = 128, device: str | torch.device | None = None
) -> Tensor:
    return _with_maxsim(_EXCHANGES.had("score_multi_vector").__func__)(qs, ps, batch_size, device)


def _with_maxsim(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function's code, where ``torch.einsum`` is :func:`_einsum`."""
    assert isinstance(function, FunctionType)
    return with_namespace(function, function.__code__, {"torch": _TORCH})


def _of_backend(document_rank: int, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def maxsim_lik(query: Tensor, doc: Tensor) -> Tensor:
        reason = _unfit(maxsim, query, doc, document_rank)
        if reason is None:
            calls.scored(_EXCHANGES.package)
            return maxsim(query, doc)
        calls.left(_EXCHANGES.package, "its backend", reason)
        return original(query, doc)

    return maxsim_lik


def _unfit(score: Callable[..., Tensor], Q: Tensor, D: Tensor, document_rank: int) -> str | None:
    own_documents = document_rank == 4 or score is maxsim_pairs
    return why_unfit(Q, D, _EXCHANGES.package, document_rank, own_documents)


# ---- similarities that are not computed yet ----

# Every equation of the heads has the query's tokens before the document's, last, in what it gives.
_SCORED = {
    "bnd,csd->bcns": (maxsim, 3),  # every query with every document
    "bnd,bsd->bns": (maxsim_pairs, 3),  # each with its own
    "bnd,bld->bnl": (maxsim_pairs, 3),
    "bnd,blsd->blns": (maxsim, 4),  # each with several of its own
    "bnd,bsld->bsnl": (maxsim, 4),
}


def _einsum(equation: str, *operands: Tensor) -> Any:
    if equation in _SCORED:
        score, document_rank = _SCORED[equation]
        Q, D = operands
        reason = _unfit(score, Q, D, document_rank) if _selected() else "another backend is selected"
        if reason is None:
            return _Similarities(equation, Q, D)
        calls.left(_EXCHANGES.package, "a loss or score_multi_vector", reason)
    return torch.einsum(equation, *operands)


def _selected() -> bool:
    """Tell whether colpali-engine's backend, where it has that choice, is this one."""
    dispatch = sys.modules.get("colpali_engine.utils.maxsim")
    return dispatch is None or dispatch._resolve_backend() != "torch"


_SMOOTH = {maxsim: smooth_maxsim, maxsim_pairs: smooth_maxsim_pairs}


class _Deferred:
    """A tensor that is not computed yet. What its class does not know of computes it."""

    def computed(self) -> Tensor:
        raise NotImplementedError

    def __truediv__(self, other: float | Tensor) -> Any:
        return self.computed() / other

    def __mul__(self, other: float | Tensor) -> Any:
        return self.computed() * other

    def __rmul__(self, other: float | Tensor) -> Any:
        return self * other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.computed(), name)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of PyTorch come here. The one that is known is a method, too."""
        first, *others = args or (None,)
        if function is torch.logsumexp and isinstance(first, _Scaled):
            return first.logsumexp(*others, **(kwargs or {}))
        plain = {key: _computed(value) for key, value in (kwargs or {}).items()}
        return function(*map(_computed, args), **plain)


def _computed(value: Any) -> Any:
    return value.computed() if isinstance(value, _Deferred) else value


class _Similarities(_Deferred):
    """``einsum(equation, Q, D)``, whose sums of maxima are scores of this package."""

    def __init__(self, equation: str, Q: Tensor, D: Tensor) -> None:
        self.operands = (equation, Q, D)
        self.tensor: Tensor | None = None

    def computed(self) -> Tensor:
        if self.tensor is None:
            reason = "an option that needs more of similarities than the sum of maxima"
            calls.left(_EXCHANGES.package, "a loss or score_multi_vector", reason)
            self.tensor = torch.einsum(*self.operands)
        return self.tensor

    def amax(self, dim: int) -> "_Maxima":
        return _Maxima(self, lambda: self.computed().amax(dim), dim)

    def max(self, dim: int) -> tuple["_Maxima", None]:  # nobody reads the indices
        return _Maxima(self, lambda: self.computed().max(dim).values, dim), None

    def __truediv__(self, other: float | Tensor) -> Any:
        return _Scaled(self, float(other)) if is_tau(other) else self.computed() / other


class _Scaled(_Deferred):
    """Similarities / tau."""

    def __init__(self, similarities: _Similarities, tau: float) -> None:
        self.similarities, self.tau = similarities, tau

    def computed(self) -> Tensor:
        return self.similarities.computed() / self.tau

    def logsumexp(self, dim: int, keepdim: bool = False) -> Any:
        return torch.logsumexp(self.computed(), dim, keepdim) if keepdim else _LogSums(self, dim)


class _LogSums(_Deferred):
    """The logsumexp of similarities / tau along one dim: tau times it is a smooth maximum."""

    def __init__(self, scaled: _Scaled, dim: int) -> None:
        self.scaled, self.dim = scaled, dim

    def computed(self) -> Tensor:
        return torch.logsumexp(self.scaled.computed(), self.dim)

    def __mul__(self, other: float | Tensor) -> Any:
        tau = self.scaled.tau
        if not is_tau(other) or other != tau:
            return self.computed() * other
        return _Maxima(self.scaled.similarities, lambda: self.computed() * tau, self.dim, tau)


class _Maxima(_Deferred):
    """The maximum of similarities along one dim; with a tau the smooth one."""

    def __init__(
        self, similarities: _Similarities, compute: Callable[[], Tensor], dim: int, tau: float | None = None
    ) -> None:
        self.similarities, self.compute, self.dim, self.tau = similarities, compute, dim, tau

    def computed(self) -> Tensor:
        return self.compute()

    def sum(self, dim: int) -> Tensor:
        equation, Q, D = self.similarities.operands
        dims = len(equation.split("->")[1])
        if (self.dim, dim) != (dims - 1, dims - 2):
            return self.computed().sum(dim)
        score, _ = _SCORED[equation]
        calls.scored(_EXCHANGES.package)
        return score(Q, D) if self.tau is None else _SMOOTH[score](Q, D, tau=self.tau)


_TORCH = Instead(torch, einsum=_einsum)


# ---- where they are put ----


def _surface() -> list[Place]:
    heads = ["ColbertLoss", "ColbertPairwiseCELoss", "ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss"]
    if package_at_least("colpali-engine", "0.3.13"):
        heads.append("ColbertSigmoidLoss")
    places: list[Place] = [
        (*_SCORE_MULTI_VECTOR, _made_by(lambda _: staticmethod(patched_score_multi_vector)))
    ]
    places += [(_LOSSES, f"{head}.forward", _made_by(_with_maxsim)) for head in heads]
    if package_at_least("colpali-engine", "0.3.17"):
        # The smooth maximum of all heads; the maximum goes to the backend.
        places.append((_LOSSES, "ColbertModule._inbatch_scores", _made_by(_with_maxsim)))
        places.append((_BACKEND, "maxsim_inbatch_lik", _made_by(partial(_of_backend, 3))))
        places.append((_BACKEND, "maxsim_kd_lik", _made_by(partial(_of_backend, 4))))
    return places


_made_by = partial(attribute_of, _EXCHANGES)
