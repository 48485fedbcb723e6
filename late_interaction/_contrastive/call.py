"""One call of a loss: its checked arguments, and what follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.options import MultiPositive
from late_interaction._checks.tensors import scores_dtype
from late_interaction._contrastive.blocks import KeptBlocks
from late_interaction._contrastive.kernels import Kernels
from late_interaction._contrastive.labels import Candidates, Labels
from late_interaction._contrastive.mixup import Mixup
from late_interaction._contrastive.ring import Ring
from late_interaction._contrastive.sequences import Block, longest, with_values
from late_interaction.tokens import Tokens

# Bytes that scores and winners of a whole batch may take to be kept from the forward to the backward.
KEPT_BYTES = {"cuda": 512 << 20, "cpu": 512 << 20}
# On a GPU where the backward takes listed pairs: above it, that is faster than a backward of all pairs.
KEPT_BYTES_WITH_LIST = 64 << 20
_LAST_BYTES = 128 << 20  # of the other of two processes' documents, to be kept for the backward


@dataclass(frozen=True)
class Call:
    """The arguments of a loss, checked and agreed on. Autograd keeps it :meth:`bare`, without values."""

    name: str  # of the public function, for messages
    kernels: Kernels
    q: Tokens
    d: Tokens
    h: Tokens | None
    each: int  # hard negatives of a query
    labels: Labels  # of the queries, among the documents of this process
    temperature: Tensor | float
    reduction: str
    ring: Ring
    candidates: Candidates
    keeps: bool  # a backward may follow
    learns: bool  # the temperature or the bias has a gradient
    symmetric: bool = False
    multi_positive: MultiPositive = "mean"
    smoothing: float = 0.0
    tail: float = 0.0
    kept_bytes: int | None = None  # None: the device's default
    bias: Tensor | float = 0.0  # of the sigmoid loss
    k: tuple[int, ...] = (1,)  # of the surrogate of recall
    rank_temperature: float = 1.0
    mixup: Mixup | None = None
    scale: float = 1.0  # of the loss: the number of processes, or 1
    whole: bool = False  # all scores and winners are kept

    def no_logits(self) -> Tensor:
        """Return a NaN for the logit of each label, ``[queries, P]``."""
        Q, shape = self.q.values, (len(self.q), self.labels.most)
        return torch.full(shape, torch.nan, dtype=scores_dtype(Q), device=Q.device)

    def kept(self, logits: Tensor, step: int, rows: Block, columns: Block) -> Tensor:
        """Set the logits of documents that are no candidates to minus infinity, in place."""
        first = sum(self.ring.documents[: self.ring.owner(step)])
        return self.candidates.of_documents(logits, rows, columns, first, self.labels if step == 0 else None)

    @property
    def together(self) -> int:
        """Return how many consecutive queries, or documents, must share a block."""
        return 1 if self.mixup is None else self.mixup.queries.size

    @property
    def classes(self) -> int:
        """Count the documents of all shards and the hard negatives of a query."""
        return sum(self.ring.documents) + self.each

    @property
    def plain(self) -> bool:
        """Tell whether PyTorch's cross entropy computes the loss.

        It takes one label of a row or column, and spreads smoothing over all classes.
        """
        one = self.labels.most == 1 and self.column_labels_are_plain
        return one and self.candidates.are_all and (self.candidates.own is None or not self.smoothing)

    @property
    def column_labels_are_plain(self) -> bool:
        """Tell whether each document is the label of the query of its number, if the loss is symmetric."""
        return not self.symmetric or (self.labels.index is None and len(self.q) == len(self.d))

    @property
    def own_documents(self) -> int:
        return self.ring.documents[self.ring.rank]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Return what may have gradients: values of queries, documents, hard negatives; temperature; bias.

        None stands for what is not there, and for a temperature or bias that is no tensor.
        """
        numbers = (x if isinstance(x, Tensor) else None for x in (self.temperature, self.bias))
        return self.q.values, self.d.values, None if self.h is None else self.h.values, *numbers

    def bare(self) -> "Call":
        numbers = (0.0 if isinstance(x, Tensor) else None for x in (self.temperature, self.bias))
        return self.of((None, None, None, *numbers))

    def of(self, tensors: Sequence[Any]) -> "Call":
        """Return the call with other :attr:`tensors`; its own temperature and bias in the place of None."""
        Q, D, H, temperature, bias = tensors
        h = None if self.h is None else with_values(self.h, H)
        q, d = with_values(self.q, Q), with_values(self.d, D)
        temperature = self.temperature if temperature is None else temperature
        bias = self.bias if bias is None else bias
        return replace(self, q=q, d=d, h=h, temperature=temperature, bias=bias)

    # ---- what stays for the backward ----

    def kept_blocks(self) -> KeptBlocks | None:
        """Return where the forward keeps blocks, or None if it keeps none."""
        if not self.keeps:
            return None
        device = self.q.device.type
        if self.ring.world == 1:
            return KeptBlocks.of(self.kernels, self.kept_bytes, device)
        # In a group all blocks stay or none, as in a batch that is kept as a whole.
        budget = default_budget(device, False)
        fit = len(self.q) * sum(self.ring.documents) * pair_bytes(self.q, longest(self.q)) <= budget
        return KeptBlocks.of(self.kernels, budget, device) if fit else None

    def keeps_last(self) -> bool:
        """Tell whether the last step's documents are kept for the backward, which then begins with them.

        The answer is the same on every process.
        """
        if not self.keeps or self.ring.world != 2 or self.symmetric:
            return False
        return self.ring.largest_shard * self.q.values.itemsize <= _LAST_BYTES


def pair_bytes(x: Tokens, longest_query: int) -> int:
    return 4 + (4 if x.is_packed else 2) * longest_query


def default_budget(device_type: str, listed: bool) -> int:
    """Return the bytes that scores and winners may take if the caller names none."""
    budget = KEPT_BYTES[device_type]
    return min(budget, KEPT_BYTES_WITH_LIST) if listed and device_type == "cuda" else budget


def fits_whole(call: Call, listed: bool) -> bool:
    """Tell whether all scores, and for a backward all winners, stay within ``kept_bytes``.

    Single tokens have no winners, and go by blocks at every size. ``listed``: a batch that does not fit has
    a backward of listed pairs.
    """
    if call.kernels.way == "matrix":
        return False
    budget = default_budget(call.q.device.type, listed) if call.kept_bytes is None else call.kept_bytes
    return len(call.q) * len(call.d) * pair_bytes(call.d, longest(call.q) if call.keeps else 0) <= budget


# ---- from losses of rows to the result ----


def reduced(call: Call, losses: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Reduce the losses of rows, and of columns, over all processes.

    Return them with 0 where there is no label; the sum of their means (or sums), None if they are not to be
    reduced; and how many rows and columns have a label, of all processes if reduced.
    """
    found, counts = [], []
    for loss, left_out in zip(losses, left_out_of(call, losses[0]), strict=True):
        count = torch.full_like(loss[:0].sum(), loss.numel())
        if left_out is not None:
            loss, count = loss.masked_fill(left_out, 0.0), count - left_out.sum()
        found.append(loss)
        counts.append(count)
    if call.reduction == "none":
        return found, None, torch.stack(counts)
    world = call.ring.sums(torch.stack([*(loss.sum() for loss in found), *counts]))
    total, count = world[: len(found)], world[len(found) :]
    return found, (total / count if call.reduction == "mean" else total).sum(), count


def left_out_of(call: Call, rows: Tensor) -> list[Tensor | None]:
    """Mark rows without a label, and columns if the loss is symmetric. ``rows``: a value of each row."""
    columns = [call.labels.left_out_columns(rows, call.own_documents)] if call.symmetric else []
    return [call.labels.left_out, *columns]


def row_factor(each: Tensor, left_out: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient with respect to each row's loss: ``each``, but 0 where there is no label."""
    each = each.expand_as(like)
    return each if left_out is None else each.masked_fill(left_out, 0.0)


def times_number(values: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """Sum ``values * factor`` over rows, for the gradient of a number; a factor of 0 hides any value."""
    return torch.where(factor == 0, 0.0, values * factor).sum().to(like.dtype)


def split(tensors: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    """Split a sequence into consecutive groups of the given sizes."""
    places = iter(tensors)
    return [[next(places) for _ in range(size)] for size in sizes]
