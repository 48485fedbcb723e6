"""Scores of queries and documents that come as Tokens or lists, in whatever layouts meet.

Padded ones go to the function of tensors that was called, with their masks. Where one side is packed, the
other is packed for the operators on packed tokens, without the tokens that a mask leaves out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from late_interaction import ops
from late_interaction._checks.dense import check_weights
from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import Backward, Precision, check_backward, check_flag, check_winners
from late_interaction._checks.tensors import (
    as_dtype,
    check_embeddings,
    check_has_d,
    check_mask,
    check_no_forward_ad,
    check_same_kind,
    check_size,
    has_values,
    has_values_on_cpu,
)
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.normalized import packed_counts, unit_packed
from late_interaction._scoring.precision import call_packed
from late_interaction.ops import _oom
from late_interaction.ops.winners import widen
from late_interaction.tokens import Tokens


def is_sequences(x: Any) -> bool:
    """Tell Tokens, and lists of tensors, from everything else."""
    return isinstance(x, Tokens) or (isinstance(x, (list, tuple)) and len(x) > 0 and isinstance(x[0], Tensor))


def as_tokens(name: str, x: Any, **beside: Any) -> Any:
    """Return Tokens or a list as Tokens, which have no masks or offsets beside them; a tensor as it is."""
    if not is_sequences(x):
        check_embeddings(name, x)
        return x
    for argument, value in beside.items():
        if value is not None:
            raise ValueError(
                f"{argument} must be None where {name} is Tokens or a list, which say which tokens there are,"
                f" got {abbreviate(value)}"
            )
    return x if isinstance(x, Tokens) else Tokens._from_list(name, x)


def score(
    function: Callable[..., Any], Q: Any, D: Any, q_mask: Any, d_mask: Any, options: dict[str, Any],
    padded: bool = False,
) -> Any:  # fmt: skip
    """Call a public function of tensors for sides of which at least one is Tokens or a list.

    padded: it has no operators on packed tokens, so that these are padded.
    """
    q, d = as_tokens("Q", Q, q_mask=q_mask), as_tokens("D", D, d_mask=d_mask)
    if padded:
        if isinstance(q, Tokens) and q.offsets is not None and options.get("q_weights") is not None:
            weights = check_weights(options["q_weights"], "Q", q.values).unsqueeze(1)  # type: ignore[union-attr]
            of_tokens = Tokens._made(weights, None, q.offsets, q._room).to_padded()
            options = options | {"q_weights": of_tokens.values.squeeze(2)}
        q, d = (x.to_padded() if isinstance(x, Tokens) else x for x in (q, d))
    if not any(isinstance(x, Tokens) and x.is_packed for x in (q, d)):
        (q, q_mask), (d, d_mask) = _opened(q, q_mask), _opened(d, d_mask)
        return function(q, d, q_mask=q_mask, d_mask=d_mask, **options)
    name = function.__name__
    call = _Call.of(name, q, d, q_mask, d_mask)
    result = call.winners(**options) if name == "maxsim_with_winners" else call.scores(**options)
    if not options["normalize"]:
        look(name, call.q.values)
    return result


def _opened(x: Any, mask: Any) -> tuple[Any, Any]:
    return (x.values, x.mask) if isinstance(x, Tokens) else (x, mask)


def own_pairs(documents: int, each: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Give the query of each document, of which every query has so many of its own, and its number."""
    pairs = torch.arange(documents, dtype=torch.int32, device=device)
    return pairs if each == 1 else pairs.div(max(each, 1), rounding_mode="floor"), pairs


def all_as_tokens(name: str, x: Any, dims: tuple[int, ...] = (2, 3)) -> Tokens:
    """Return Tokens, a list, or a tensor of so many dims as Tokens."""
    tokens = as_tokens(name, x)
    if isinstance(tokens, Tensor):
        check_has_d(name, tokens)
        return of_tensor(name, tokens, None, dims)
    return tokens


def of_tensor(name: str, x: Any, mask: Any, dims: tuple[int, ...]) -> Tokens:
    """Return a checked tensor of so many dims as padded Tokens."""
    if x.dim() not in dims:
        wanted = {2: "[L, d]", 3: "[N, L, d]", 4: "[Nq, K, Ld, d]"}
        raise ValueError(f"{name} must be {' or '.join(wanted[n] for n in dims)}, got {shape_of(x)}")
    x = x.unsqueeze(0) if x.dim() == 2 else x
    mask = check_mask(f"{name.lower()}_mask", mask, name, x)
    return Tokens._made(x.flatten(0, -3), None if mask is None else mask.flatten(0, -2))


@dataclass(frozen=True)
class _Packed:
    """Tokens as the operators take them. order: the tokens of the padded ones that they are, None for all."""

    values: Tensor
    offsets: Tensor
    order: Tensor | None
    source: Tokens

    @classmethod
    def of(cls, x: Tokens) -> "_Packed":
        """Wait for no GPU: the tokens that a mask leaves out go to the end there, as those of no sequence."""
        if x.offsets is not None:
            return cls(x.values, as_dtype(x.offsets, torch.int32).contiguous(), None, x)
        values, L = x.values.flatten(0, 1), x.values.shape[1]
        if x.mask is None:
            offsets = torch.arange(x._count + 1, dtype=torch.int32, device=x.device) * L
            return cls(values, offsets, None, x)
        kept = x.mask.flatten()
        order = kept.nonzero().squeeze(1) if has_values_on_cpu(kept) else (~kept).byte().argsort(stable=True)
        offsets = pad(x.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(values.index_select(0, order), offsets, order, x)

    def chosen(self, x: Tensor) -> Tensor:
        """Select what belongs to the packed tokens, one each, of what belongs to those that came."""
        return x if self.order is None else x.index_select(0, self.order)

    def longest(self) -> int:
        """Return the longest length, or all tokens while a graph is traced. May wait for a GPU."""
        known = self.source.max_length
        if known is not None:
            return known
        lengths = self.offsets.diff()
        if not has_values(lengths) or not lengths.shape[0]:
            return self.values.shape[0]
        return max(0, int(lengths.amax()))


@dataclass(frozen=True)
class _Call:
    """Both sides packed. each: how many documents are each query's own, None where it meets all."""

    name: str
    q: _Packed
    d: _Packed
    each: int | None
    dropped: tuple[bool, bool]  # the dims of results that 2-D tensors lack

    @classmethod
    def of(cls, name: str, Q: Any, D: Any, q_mask: Any, d_mask: Any) -> "_Call":
        paired = name == "maxsim_pairs"
        each = 1 if paired else None
        if isinstance(D, Tensor) and D.dim() == 4:
            each = D.shape[1]
        q = Q if isinstance(Q, Tokens) else of_tensor("Q", Q, q_mask, (3,) if paired else (3, 2))
        d = D if isinstance(D, Tokens) else of_tensor("D", D, d_mask, (3,) if paired else (3, 2, 4))
        check_same_kind(q.values, d.values)
        if paired:
            check_size(
                d._count == q._count,
                lambda: f"maxsim_pairs needs as many documents as queries, got {len(d)} and {len(q)}",
            )
        elif each is not None:
            check_size(
                d._count == each * q._count,
                lambda: f"D must hold {each} documents for each of the {len(q)} queries, got {len(d)}",
            )
        dropped = not isinstance(Q, Tokens) and Q.dim() == 2, not isinstance(D, Tokens) and D.dim() == 2
        return cls(name, _Packed.of(q), _Packed.of(d), each, dropped)

    def scores(self, q_weights: Tensor | None, mean: bool, **options: Any) -> Tensor:
        check_flag("mean", mean)
        q_weights = check_weights(q_weights, "Q", self.q.source.values)
        if q_weights is not None:
            q_weights = self.q.chosen(q_weights.flatten())
        result, _ = self._run(q_weights, **options)
        counts = packed_counts(self.q.offsets, q_weights).to(result.dtype) if mean else None
        if self.name == "maxsim_pairs":
            return result if counts is None else result / counts
        if self.each is not None:
            result = result.view(self.q.source._count, self.each)
        return self._as_given(result if counts is None else result / counts.unsqueeze(1))

    def winners(self, **options: Any) -> tuple[Tensor, Tensor]:
        """Return scores, and winners among the tokens of the sides as they came.

        Winners are ``[Nd, tokens of Q]``, of padded queries ``[Nq, Nd, Lq]``.
        """
        if self.each is not None:
            raise ValueError("D must be [Nd, Ld, d], [Ld, d], Tokens or a list where Q is packed, got 4 dims")
        scores, found = self._run(None, winners="return", **options)
        winners = widen(found, self.d.values.shape[0])
        if (mask := self.d.source.mask) is not None and mask.numel():
            places = (~mask).byte().argsort(dim=1, stable=True)  # of the kept tokens of each document
            found_at = places.gather(1, winners.clamp_min(0).long()).to(torch.int32)
            winners = torch.where(winners < 0, winners, found_at)
        padded = self.q.source
        if padded.is_packed:
            return self._as_given(scores), winners.squeeze(0) if self.dropped[1] else winners
        if padded.mask is not None and self.q.order is not None:
            every = winners.new_full((len(winners), padded.mask.numel()), -1)
            winners = every.index_copy(1, self.q.order, winners)
            winners = winners.masked_fill(~padded.mask.flatten(), -1)
        winners = winners.view(len(winners), *padded.values.shape[:2]).transpose(0, 1)
        return self._as_given(scores), self._as_given(winners)

    def _as_given(self, result: Tensor) -> Tensor:
        result = result.squeeze(1) if self.dropped[1] else result
        return result.squeeze(0) if self.dropped[0] else result

    def _run(
        self, q_weights: Tensor | None, normalize: bool, backward: Backward | None,
        precision: Precision | None, winners: str | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Scores, and winners where a backward or the caller ("return") wants them; else scores twice."""
        check_flag("normalize", normalize)
        check_backward(backward)
        if winners != "return":
            check_winners(winners)
        Q, D = ((unit_packed(x.values, x.offsets) if normalize else x.values) for x in (self.q, self.d))
        check_no_forward_ad(self.name, Q, D, q_weights)
        tokens = (Q, D) if q_weights is None else (Q, D, q_weights)
        index: tuple[Any, ...] = (self.q.offsets, self.d.offsets)
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tokens)
        keeps = winners == "return" or (learns and winners != "recompute")
        name = "maxsim_varlen" if self.each is None else "maxsim_pairs_packed"
        if self.each is not None:
            pairs = own_pairs(self.d.source._count, self.each, Q.device)
            index += (*pairs, self.q.longest() if learns else None)
        op = getattr(ops, f"{name}{'_weighted' * (q_weights is not None)}{'_winners' * keeps}")
        try:
            result = call_packed(op, (*tokens, *index), precision, learns)
        except RuntimeError as error:
            if self.each is None:
                _oom.varlen_failed(error, Q, D, self.q.offsets, self.d.offsets, keeps)
            elif keeps:
                _oom.pairs_failed(error, Q, D, len(index[2]), index[4])
            raise
        return result if keeps else (result, result)
