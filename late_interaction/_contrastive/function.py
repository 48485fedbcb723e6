"""The autograd function of the cross entropy: both passes over all shards of documents."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._contrastive import backward, forward
from late_interaction._contrastive.kept import KeptBlocks
from late_interaction._contrastive.problem import Grid, sum_dtype
from late_interaction._contrastive.reduction import Kept, factors, loss_and_counts, temperature_gradient
from late_interaction._contrastive.ring import Ring
from late_interaction._contrastive.shards import (
    Call,
    Gradients,
    add_shards,
    once,
    sums_of_queries,
)
from late_interaction._contrastive.softmax import RunningSoftmax, SoftmaxWeights
from late_interaction._contrastive.tail import PairList
from late_interaction._contrastive.tokens import Tokens
from late_interaction._scoring.precision import without_autocast
from late_interaction._scoring.untransformed import applied


class ContrastiveFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, Q: Tensor, D: Tensor, H: Tensor | None, temperature: Tensor | float, call: Call
    ) -> Tensor:
        with without_autocast(Q.device.type):
            loss, kept = _forward(Q, D, H, temperature, call)
        if call.keeps:
            tensors, ctx.rebuild = _flatten(kept)
            given = isinstance(temperature, Tensor)
            ctx.save_for_backward(Q, D, H, temperature if given else None, *tensors)
            ctx.temperature = None if given else temperature
            ctx.call = call
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        Q, D, H, temperature, *tensors = ctx.saved_tensors
        temperature = ctx.temperature if temperature is None else temperature
        kept, needs = ctx.rebuild(tensors), ctx.needs_input_grad[:4]

        def gradients() -> Gradients:
            with without_autocast(Q.device.type):
                return _backward(grad, (Q, D, H, temperature), ctx.call, kept, needs)

        return *once("losses.contrastive", gradients, (grad, Q, D, H, temperature)), None


apply = applied(ContrastiveFunction)
_HELD_BYTES = 32 << 20  # of logits, until all pairs are scored


# ---- forward ----


def _forward(
    Q: Tensor, D: Tensor, H: Tensor | None, temperature: Tensor | float, call: Call
) -> tuple[Tensor, Kept]:
    p, ring = replace(call.problem, temperature=temperature), call.ring
    q, d = call.q.with_values(Q), call.d.with_values(D)
    sums = (sum_dtype(Q), p.needs_moment, p.smoothing > 0)
    rows = RunningSoftmax.empty(len(q), Q, *sums)
    columns = RunningSoftmax.empty(len(d), Q, *sums) if p.symmetric else None
    if H is not None and call.h is not None and p.each:
        forward.score_own(p, q, call.h.with_values(H), rows.add)
    lists: list[PairList] = []
    held: list[forward.SoftmaxPass] = []
    blocks = None if p.tail else call.kept_blocks(q)
    documents = d
    for step, (_, documents, _) in enumerate(ring.shards(d)):
        grid = Grid.of(p.kernels, q, documents)
        to = forward.SoftmaxPass(rows, columns, None, step == 0)
        if p.tail and call.keeps:
            to.holds = _holds(call, grid, held)
            to.found = PairList(alone=to.holds)
            to.find_starts = partial(forward.label_logits, p, grid, to)
        forward.score_shard(p, grid, to, None if blocks is None else blocks.of_shard(step))
        for earlier in lists:  # behind this shard's scores: the device has them to do while the host waits
            earlier.finish()
        if to.found is not None:
            lists.append(to.found)
        if to.holds:
            held.append(to)
        if columns is not None and ring.world > 1:
            columns = _pass_columns(ring, step, columns)
    for to in held:
        to.list_held(p)
    loss, counts = loss_and_counts(p, call, rows, columns)
    for found in lists:
        if not found.alone:
            found.finish()
    last = documents if call.keeps_last(Q) else None
    return loss, Kept(rows, columns, lists, counts, blocks, last)


def _holds(call: Call, grid: Grid, held: list[forward.SoftmaxPass]) -> bool:
    """Whether the panel of a shard is listed once the sums of all shards are known. Then every pair of the
    list counts, and the host learns how many there are in the backward. Sums of columns that travel are
    known elsewhere."""
    if not grid.one_panel or (call.problem.symmetric and call.ring.world > 1):
        return False
    logits = len(grid.q) * len(grid.d) + sum(to.held[0].numel() for to in held if to.held is not None)
    return logits * sum_dtype(grid.q.values).itemsize <= _HELD_BYTES


def _pass_columns(ring: Ring, step: int, columns: RunningSoftmax) -> RunningSoftmax:
    """Sends the sums of a shard's columns on with its documents, and takes those of the next shard."""
    parts = columns.tensors()
    leaving = torch.stack([x for x in parts if x is not None])
    coming = ring.owner(step + 1)
    arriving = leaving.new_empty(leaving.shape[0], ring.documents[coming])
    (arrived,) = ring.exchange([leaving], [arriving], "sums").wait()
    places = iter(arrived.unbind(0))
    taken = [None if x is None else next(places) for x in parts]
    met = sum(ring.queries[(coming + i) % ring.world] for i in range(step + 1))
    return RunningSoftmax.of(taken, [met] * ring.documents[coming])


# ---- what is kept ----


def _flatten(kept: Kept) -> tuple[list[Tensor], Any]:
    """All tensors, for autograd to keep, and the function that takes them back."""
    tensors: list[Tensor] = [kept.counts]

    def put(x: Tensor | None) -> int:
        if x is None:
            return -1
        tensors.append(x)
        return len(tensors) - 1

    def put_sums(s: RunningSoftmax | None) -> list[int]:
        return [] if s is None else [put(x) for x in s.tensors()]

    rows, columns = put_sums(kept.rows), put_sums(kept.columns)
    lists = [_flatten_list(found, kept.rows.weight, put) for found in kept.lists]
    keys = None if kept.blocks is None else kept.blocks.keys()
    last, bounds = kept.last, () if kept.last is None else kept.last.bounds
    of_last = [-1] * 3 if last is None else [put(last.values), put(last.mask), put(last.offsets)]
    first_of_blocks = len(tensors)
    if kept.blocks is not None:
        tensors.extend(kept.blocks.tensors())

    def rebuild(saved: list[Tensor]) -> Kept:
        def take(place: int) -> Tensor | None:
            return None if place < 0 else saved[place]

        def sums(places: list[int]) -> Any:
            return RunningSoftmax.of([take(place) for place in places], []) if places else None

        found = [of_list(saved) for of_list in lists]
        blocks = None if keys is None else KeptBlocks.from_saved(keys, saved[first_of_blocks:])
        values, mask, offsets = map(take, of_last)
        tokens = None if values is None else Tokens(values, mask, offsets, bounds)
        return Kept(sums(rows), sums(columns), found, saved[0], blocks, tokens)

    return tensors, rebuild


def _flatten_list(
    found: PairList, like: Tensor, put: Callable[[Tensor | None], int]
) -> Callable[[list[Tensor]], PairList]:
    """Puts the tensors of a list, and returns what takes them back."""
    dense, alone = found.dense, found.alone
    if found.last is not None:
        i, j = (put(x) for x in found.last.tensors())
        again = found.last.with_tensors()
        return lambda saved: PairList(dense=set(dense), alone=alone, last=again(saved[i], saved[j]))
    i, j, k = (put(x) for x in found.tensors(like))
    return lambda saved: PairList(
        rows=[saved[i]], columns=[saved[j]], logits=[saved[k]], dense=dense, alone=alone
    )


# ---- backward ----


def _backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | float],
    call: Call,
    kept: Kept,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:
    """The gradients of the inputs: Q, D, hard negatives and temperature."""
    Q, D, H, temperature = inputs
    p = replace(call.problem, temperature=temperature)
    q, d = call.q.with_values(Q), call.d.with_values(D)
    amounts = factors(grad, p, call, kept)
    labelled = p.labels.index is not None
    rows = _weights(kept.rows, amounts[0] / temperature, labelled)
    columns = None if kept.columns is None else _weights(kept.columns, amounts[1] / temperature, labelled)
    q_sums = sums_of_queries(call, q, D, needs[0], needs[1])
    grad_h = None
    if H is not None and call.h is not None and p.each and (needs[0] or needs[2]):
        of_own = backward.Weights(p, rows, None, False)
        h = call.h.with_values(H)
        grad_h = backward.add_own_gradients(of_own, q, h, q_sums.whole, needs[2])
    elif H is not None and needs[2]:
        grad_h = torch.zeros_like(H)

    def of_shard(step: int, travelled: Tensor | None) -> tuple[backward.Weights, backward.Given]:
        of_columns = None
        if travelled is not None:
            maximum, scale, factor = travelled.unbind(0)
            of_columns = SoftmaxWeights(maximum, scale, factor, some_ignored=True)
        weights = backward.Weights(p, rows, of_columns, step == 0)
        if not kept.lists:
            return weights, None if kept.blocks is None else kept.blocks.of_shard(step)
        found = kept.lists[step]
        found.finish()
        return weights, backward.Found(found.tensors(rows.maximum), found.dense, found.alone)

    extra = None if columns is None else torch.stack((columns.maximum, columns.scale, columns.factor))
    grad_D = add_shards(call, p, q_sums, d, needs[1], of_shard, extra, kept.last)
    grad_T = temperature_gradient(p, temperature, kept, amounts) if needs[3] else None
    return q_sums.finished() if needs[0] else None, grad_D, grad_h, grad_T


def _weights(sums: RunningSoftmax, factor: Tensor, some_ignored: bool) -> SoftmaxWeights:
    return SoftmaxWeights(sums.maximum, factor / sums.weight, factor, some_ignored)
