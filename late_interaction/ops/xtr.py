"""The operators of XTR scores, which only the largest similarities of a batch make.

``xtr_winners(Q, D, q_weights, d_mask, k, rule="paper", precision="highest", backward="auto")
-> (scores, denominators, winners)``
    ``Q`` is ``[Nq, Lq, d]``, ``D`` ``[Nd, Ld, d]``. Of each query token's similarities with all tokens of
    ``D`` the ``k`` largest count. ``q_weights`` ``[Nq, Lq]`` is a bool mask, or numbers of the scores' dtype
    that multiply the maxima. ``scores``, and ``denominators`` by which the sums were divided, are
    ``[Nq, Nd]``; ``winners`` are those of ``maxsim_winners``, with -1 where nothing counts. Differentiable in
    ``scores``; keeps ``Q``, ``D``, ``q_weights``, ``denominators`` and ``winners`` for the backward.
``xtr_select_(similarities, d_mask, Ld, k, zero_unless_all, maxima, winners)``
    A step of it, on the similarities ``[rows, Nd * Ld]`` of some query tokens: writes each document's largest
    selected similarity and its token into ``maxima`` and ``winners``, ``[rows, Nd]``.
``xtr_group_maxima_(Q, D, d_mask, group_maxima)``
    For half precision, on CUDA alone. Of the similarities of ``Q`` ``[rows, d]`` with ``D`` ``[Nd * Ld, d]``,
    in groups of two, writes the larger of each that ``d_mask`` keeps, rounded to the dtype of ``Q``, into
    ``group_maxima`` ``[rows, groups]``.
``xtr_select_in_groups_(group_maxima, Q, D, d_mask, Ld, k, zero_unless_all, maxima, winners)``
    What ``xtr_select_`` writes, from these: the similarities of groups that may hold a selected one are
    computed again, in float32.

One matrix product computes a panel: the similarities of some query tokens with all document tokens, or the
maxima of their groups. A query token's threshold and the maxima that it decides about come from the same
numbers. Panels take a bounded number of bytes, whatever the batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.options import BACKWARDS, OPERATOR_PRECISIONS, RULES
from late_interaction._checks.tensors import FLOATS, scores_dtype
from late_interaction._scoring.precision import float32_products, product_dtype, without_autocast
from late_interaction.ops._arguments import check_choice, check_form, check_tensor
from late_interaction.ops._blocks import ranges
from late_interaction.ops._functions import keeping_winners
from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import (
    autocast_pair,
    call_in_backward,
    differentiable,
    fake_nothing,
    register_forward,
    register_helper,
)
from late_interaction.ops.winners import winner_dtype

_winners_op, _select_op = operators.xtr_winners.default, operators.xtr_select_.default
_group_maxima_op, _select_in_groups_op = (
    operators.xtr_group_maxima_.default,
    operators.xtr_select_in_groups_.default,
)
_backward_op, _weighted_backward_op = (
    operators.maxsim_backward.default,
    operators.maxsim_weighted_backward.default,
)

# What a panel takes at most, but for one of a single row. On a GPU the product and the selection need
# hundreds of rows to fill it; on a CPU smaller panels stay closer to the caches.
_PANEL_BYTES = {"cuda": 256 << 20}
_PANEL_BYTES_OF_A_CPU = 16 << 20
# Groups serve where few of their maxima are in question: up to so many selected cells, for whose candidates a
# block of a GPU has room, and up to one for so many tokens.
_MOST_IN_GROUPS, _TOKENS_OF_A_SELECTED_CELL = 1024, 16
_GROUPS_OF_A_TILE, _TILE_TOKENS = 32, 64  # csrc/common/xtr.h
_WHOLE_TILES = 256  # rows of a panel are a multiple of this where they are more


# ---- similarities, a panel at a time ----


@dataclass
class _Panels:
    """The similarities of rows of Q ``[rows, d]`` with all of D ``[tokens, d]``, some rows at a time.

    Products of half precision are summed in float32. Where few are selected, a GPU writes the maxima of
    groups of two alone, rounded: a quarter of the bytes. Rounding keeps their order, and similarities that
    could be selected are computed again, unrounded.
    """

    Q: Tensor
    D: Tensor
    groups: int = 0  # of a row; 0: the panel holds similarities

    def _similarities(self, rows: Tensor) -> Tensor:
        columns = self.D.t()
        if self.Q.dtype in (torch.float32, torch.float64):
            return torch.mm(rows, columns)
        return torch.mm(rows, columns, out_dtype=torch.float32)

    def select(self, start: int, end: int, d_mask: Tensor | None, options: Any, out: Any) -> None:
        """Write maxima and winners of these rows. options: Ld, k, zero_unless_all."""
        rows = self.Q[start:end]
        if self.groups:
            panel = rows.new_empty(len(rows), self.groups)
            _group_maxima_op(rows, self.D, d_mask, panel)
            _select_in_groups_op(panel, rows, self.D, d_mask, *options, *out)
        else:
            _select_op(self._similarities(rows), d_mask, *options, *out)

    @property
    def row_bytes(self) -> int:
        if self.groups:
            return self.groups * self.Q.element_size()
        return len(self.D) * (8 if self.Q.dtype == torch.float64 else 4)


def _panels(Q: Tensor, D: Tensor, k: int, precision: str) -> tuple[_Panels, str]:
    """Panels of these tokens, and the precision of float32 products that they need."""
    Q, D = Q.flatten(0, 1), D.flatten(0, 1)
    dtype = product_dtype(precision, Q.dtype)
    Q, D = Q.to(dtype), D.to(dtype)
    if Q.dtype in (torch.float32, torch.float64):
        return _Panels(Q, D), precision
    if not Q.is_cuda:  # products of half precision are exact in float32
        return _Panels(Q.float(), D.float()), "highest"
    few = k <= min(_MOST_IN_GROUPS, len(D) // _TOKENS_OF_A_SELECTED_CELL)
    groups = -(-len(D) // _TILE_TOKENS) * _GROUPS_OF_A_TILE if few and Q.shape[1] % 8 == 0 else 0
    return _Panels(_dense(Q, 16), _dense(D, 16), groups), "highest"


def _dense(x: Tensor, alignment: int) -> Tensor:
    """Copy x, contiguous, from such an address on."""
    x = x.contiguous()
    return x if x.data_ptr() % alignment == 0 else x.clone()


def _rows_of_a_panel(budget: int, row_bytes: int, count: int) -> int:
    """Rows of each panel: all panels are equally large, but for the last of ``count`` rows."""
    most = max(budget // row_bytes, 1)
    if most <= _WHOLE_TILES:
        return most
    panels = -(-count // (most - most % _WHOLE_TILES))
    return -(-count // (panels * _WHOLE_TILES)) * _WHOLE_TILES


def _xtr_winners(
    Q: Tensor,
    D: Tensor,
    q_weights: Tensor | None,
    d_mask: Tensor | None,
    k: int,
    rule: str = "paper",
    precision: str = "highest",
    backward: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    _check(Q, D, q_weights, d_mask, k, rule)
    check_choice("precision", precision, OPERATOR_PRECISIONS)
    check_choice("backward", backward, BACKWARDS)
    (Nq, Lq), (Nd, Ld) = Q.shape[:2], D.shape[:2]
    scores, denominators, winners = _fake(Q, D)
    if winners.numel() == 0 or Ld == 0:
        return scores.zero_(), denominators.fill_(_least_denominator(rule)), winners.fill_(-1)
    options = (Ld, min(k, Nd * Ld), rule == "pylate")
    budget = _PANEL_BYTES.get(Q.device.type, _PANEL_BYTES_OF_A_CPU)
    # So many queries' maxima and winners are held before they are reduced to scores. With what the reduction
    # makes of them they take up to 32 bytes each.
    queries = max(budget // (32 * Lq * Nd), 1)
    with torch.no_grad(), without_autocast(Q.device.type):
        panels, needed = _panels(Q, D, options[1], precision)
        mask = None if d_mask is None else d_mask.contiguous()
        partly = None
        if mask is not None and rule == "pylate" and options[1] < Nd * Ld:
            partly = ~mask.all(1)
        rows = _rows_of_a_panel(budget, panels.row_bytes, min(Nq, queries) * Lq)
        with float32_products(Q.device.type, needed):
            for own in ranges(Nq, queries):
                first = own.start * Lq
                maxima = scores.new_empty(own.stop * Lq - first, Nd)
                found = torch.empty_like(maxima, dtype=torch.int32)
                for part in ranges(len(maxima), rows):
                    out = maxima[part], found[part]
                    panels.select(first + part.start, first + part.stop, mask, options, out)
                weights = None if q_weights is None else q_weights[own]
                maxima, found = maxima.view(-1, Lq, Nd), found.view(-1, Lq, Nd)
                if partly is not None:
                    _drop_negative(maxima, found, partly)
                sums, counted = _reduce(maxima, found, weights, rule)
                denominators[own].copy_(counted)
                torch.div(sums, counted, out=scores[own])
                winners[own].copy_(found.transpose(1, 2))
    return scores, denominators, winners


def _check(Q: Tensor, D: Tensor, q_weights: Tensor | None, d_mask: Tensor | None, k: int, rule: str) -> None:
    _check_ranks(Q, D)
    problem = None
    if Q.dtype != D.dtype or Q.device != D.device or Q.shape[2] != D.shape[2]:
        problem = "Q and D must share dtype, device and d"
    elif k < 1:
        problem = f"k must be at least 1, got {k}"
    if problem is not None:
        raise RuntimeError(f"late_interaction: {problem}")
    check_choice("rule", rule, RULES)
    check_tensor("Q", Q, None, FLOATS)
    check_tensor("D", D, None, FLOATS)
    check_tensor("d_mask", d_mask, D.shape[:2], (torch.bool,), D)
    check_tensor("q_weights", q_weights, Q.shape[:2], (torch.bool, scores_dtype(Q)), Q)


# ---- from maxima to scores ----


def _least_denominator(rule: str) -> float:
    return 1.0 if rule == "paper" else 1e-3


def _drop_negative(maxima: Tensor, found: Tensor, partly: Tensor) -> None:
    """Set maxima that are not positive to 0, and their winners to -1, of documents with a masked token.

    In place. Such a token counts as selected only where all tokens of the batch are: of equally low ones the
    selection takes the first, which would tell equally masked documents apart by their place.
    """
    dropped = partly & (maxima <= 0)
    maxima.masked_fill_(dropped, 0.0)
    found.masked_fill_(dropped, -1)


def _reduce(maxima: Tensor, found: Tensor, weights: Tensor | None, rule: str) -> tuple[Tensor, Tensor]:
    """Sum ``[Nq, Nd]`` of maxima ``[Nq, Lq, Nd]`` that count, and return what they are divided by.

    A masked query token loses its winners, in place.
    """
    counts: Tensor | None = None
    if weights is not None:
        each = weights.unsqueeze(-1)
        if weights.dtype == torch.bool:
            maxima = maxima.masked_fill_(~each, 0.0)
            found.masked_fill_(~each, -1)
        else:
            maxima = maxima * each
            counts = (found >= 0) & (each != 0)
    if rule == "pylate":
        counts = maxima > 0
    elif counts is None:
        counts = found >= 0
    return maxima.sum(1), counts.sum(1, dtype=maxima.dtype).clamp_min_(_least_denominator(rule))


# ---- shapes ----


def _check_ranks(Q: Tensor, D: Tensor) -> None:
    check_form("Q", Q, "[Nq, Lq, d]")
    check_form("D", D, "[Nd, Ld, d]")


def _fake(Q: Tensor, D: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_ranks(Q, D)
    (Nq, Lq), (Nd, Ld) = Q.shape[:2], D.shape[:2]
    scores = Q.new_empty((Nq, Nd), dtype=scores_dtype(Q))
    return scores, torch.empty_like(scores), Q.new_empty((Nq, Nd, Lq), dtype=winner_dtype(Ld))


# ---- gradients ----


def _gradients(
    ctx: Any, grad_scores: Tensor, Q: Tensor, D: Tensor, q_weights: Tensor | None, denominators: Tensor,
    winners: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Differentiate in the maxima that count: the selection and the denominators are constants."""
    need_Q, need_D, need_weights = needs = ctx.needs_input_grad[:3]
    strategy = ctx.options[-1]
    if strategy == "auto" and torch.are_deterministic_algorithms_enabled():
        strategy = "lowmem"
    options = (False, strategy, need_Q or need_weights, need_D)
    grad = grad_scores / denominators
    if q_weights is None or q_weights.dtype == torch.bool:
        grads = call_in_backward(_backward_op, grad, Q, D, winners, *options)
    else:
        args = (grad, Q, D, q_weights, winners, *options, False, need_weights)
        grads = call_in_backward(_weighted_backward_op, *args)
    found = [x if need else None for x, need in zip(grads, needs, strict=False)]
    return *found, *[None] * (8 - len(found))


_kernel = differentiable(_winners_op, keeping_winners(_winners_op, 3, 4, _gradients))
register_forward(_winners_op, _fake, _kernel, autocast_pair)
for _op in (_select_op, _group_maxima_op, _select_in_groups_op):
    register_helper(_op, fake_nothing)
library.impl(_winners_op, _xtr_winners, "CompositeExplicitAutograd")
