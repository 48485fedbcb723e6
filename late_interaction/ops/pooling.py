"""The operators that cluster the tokens of each document, for pooling.

``ward_labels(tokens, cu_seqlens, clusters) -> (labels, found)``
    Ward's hierarchical clustering of each document's ``tokens`` ``[tokens, d]`` by ``1 - similarity``, cut
    into at most ``clusters`` ``[documents]``. ``labels`` ``[tokens]`` are a token's cluster, counted from 0
    in its document; ``found`` ``[documents]`` says how many clusters there are: fewer than asked for where
    distances are equal. ``cu_seqlens``, ``clusters`` and both results are int32.
``kmeans_labels(tokens, cu_seqlens, clusters, iterations=10) -> (labels, found)``
    The same by Lloyd's k-means from centers that are spaced evenly over the document.
``ward_cut_(similarities, cu_seqlens, clusters, longest, labels, found)``
    A step of the first: from the documents' similarities ``[n, n]``, one after another. ``longest``: no
    document has more tokens.

Similarities are matrix products of PyTorch in float32 (float64 for float64 tokens), of up to 5 GiB at a time
on a GPU, where distances take up to 6 GiB more. Where the CUDA library is missing, tokens of a GPU are copied
to the CPU, and ``labels`` and ``found`` are copied back.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.tensors import FLOATS
from late_interaction._scoring.precision import float32_products, without_autocast
from late_interaction.ops._arguments import check_form
from late_interaction.ops._library import cuda_missing, library, operators
from late_interaction.ops._registration import fake_nothing, register_helper

_ward_op, _kmeans_op = operators.ward_labels.default, operators.kmeans_labels.default
_cut_op = operators.ward_cut_.default

# The similarities that are held at a time, but for those of one document. Documents of a group are clustered
# in parallel, each by one thread: larger groups even that out, smaller ones stay closer to the caches.
_WARD_BYTES_A_THREAD = 16 << 20
_WARD_BYTES = 5 << 30  # on a GPU
# Products of documents of one length are computed in so many ranges of rows.
_PARTS = 4
_KMEANS_BYTES = {"cuda": 512 << 20}
_KMEANS_BYTES_OF_A_CPU = 16 << 20


# ---- what both share ----


def _check(tokens: Tensor, cu_seqlens: Tensor, clusters: Tensor) -> None:
    problem = None
    if tokens.dim() != 2 or tokens.dtype not in FLOATS:
        problem = f"tokens must be floating point [tokens, d], got {tokens.dtype} of rank {tokens.dim()}"
    elif any(x.dtype != torch.int32 or x.dim() != 1 for x in (cu_seqlens, clusters)):
        problem = "cu_seqlens and clusters must be int32, one-dimensional"
    elif len(cu_seqlens) != len(clusters) + 1:
        problem = f"cu_seqlens must be [{len(clusters) + 1}], got [{len(cu_seqlens)}]"
    elif cu_seqlens.device != tokens.device or clusters.device != tokens.device:
        problem = f"cu_seqlens and clusters must be on the device of tokens, {tokens.device}"
    if problem is not None:
        raise RuntimeError(f"late_interaction: {problem}")


def _begin(
    tokens: Tensor, cu_seqlens: Tensor, clusters: Tensor
) -> tuple[list[int], list[int], list[int], Tensor, Tensor]:
    """Return offsets, lengths and numbers of clusters as the host has them, and labels and found.

    Every token is a cluster, for documents to be written over.
    """
    offsets, counts = cu_seqlens.tolist(), clusters.tolist()
    lengths = [end - start for start, end in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != len(tokens) or min(lengths, default=0) < 0:
        raise RuntimeError(
            f"late_interaction: cu_seqlens must rise from 0 to {len(tokens)}, the number of tokens"
        )
    for length, count in zip(lengths, counts, strict=True):
        if count < min(length, 1):
            raise RuntimeError(f"late_interaction: clusters must be at least 1, got {count}")
    found, starts = (
        torch.tensor(x, dtype=torch.int32, device="cpu").to(tokens.device) for x in (lengths, offsets[:-1])
    )
    first = starts.repeat_interleave(found, output_size=len(tokens))
    labels = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device) - first
    return offsets, lengths, counts, labels, found


def _groups(documents: list[int], cells: list[int], budget: int, padded: bool = False) -> Iterator[list[int]]:
    """Group documents in turn, as many as hold together at most so many cells, but at least one.

    padded: each holds as many as the largest of its group.
    """
    group: list[int] = []
    held = largest = 0
    for document in documents:
        largest = max(largest, cells[document])
        held = largest * (len(group) + 1) if padded else held + cells[document]
        if group and held > budget:
            yield group
            group, held, largest = [], cells[document], cells[document]
        group.append(document)
    if group:
        yield group


# ---- Ward ----


def _ward_labels(tokens: Tensor, cu_seqlens: Tensor, clusters: Tensor) -> tuple[Tensor, Tensor]:
    _check(tokens, cu_seqlens, clusters)
    device = tokens.device
    if not tokens.is_cpu and (device.type != "cuda" or cuda_missing is not None):
        labels, found = _ward_op(tokens.cpu(), cu_seqlens.cpu(), clusters.cpu())
        return labels.to(device), found.to(device)
    offsets, lengths, counts, labels, found = _begin(tokens, cu_seqlens, clusters)
    many = [i for i, length in enumerate(lengths) if counts[i] < length]
    cells = [length * length for length in lengths]
    real = tokens.dtype if tokens.dtype == torch.float64 else torch.float32
    budget = _WARD_BYTES if tokens.is_cuda else _WARD_BYTES_A_THREAD * torch.get_num_threads()
    # In float32 on a GPU; on a CPU as the caller and the packages that pool there multiply.
    products = float32_products("cuda", "highest") if device.type == "cuda" else nullcontext()
    with torch.no_grad(), without_autocast(device.type), products:
        groups = list(_groups(many, cells, budget // real.itemsize))
        held = [sum(cells[i] for i in group) for group in groups]
        buffer = tokens.new_empty(max(held, default=0), dtype=real)
        for group, size in zip(groups, held, strict=True):
            starts, own = [offsets[i] for i in group], [lengths[i] for i in group]
            _similarities(tokens, starts, own, buffer[:size])
            _cut(buffer[:size], group, (starts, own, [counts[i] for i in group]), labels, found)
    if many and tokens.is_cuda and int(found.min()) < 0:  # as the CPU's operator says it
        raise RuntimeError("late_interaction: similarities must not be NaN")
    return labels, found


def _similarities(tokens: Tensor, starts: list[int], lengths: list[int], out: Tensor) -> None:
    """Each document's products, one after another. A GPU multiplies documents of one length as a batch."""
    length, total = lengths[0], sum(lengths)
    if tokens.is_cuda and lengths == [length] * len(lengths) and starts[-1] - starts[0] == total - length:
        rows = tokens[starts[0] : starts[0] + total].to(out.dtype).view(len(lengths), length, -1)
        square, step = out.view(len(lengths), length, length), -(-length // _PARTS)
        for first in range(0, length, step):  # what lies above the diagonal is read
            some = rows[:, first : first + step]
            torch.bmm(some, rows[:, first:].transpose(1, 2), out=square[:, first : first + step, first:])
        return
    first = 0
    for start, n in zip(starts, lengths, strict=True):
        rows = tokens[start : start + n].to(out.dtype)
        torch.mm(rows, rows.t(), out=out[first : first + n * n].view(n, n))
        first += n * n


def _cut(
    similarities: Tensor, group: list[int], sizes: tuple[list[int], ...], labels: Tensor, found: Tensor
) -> None:
    """Write labels and found of a group.

    sizes: where its documents start, their lengths, and numbers of clusters.
    """
    starts, lengths, counts = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in sizes)
    cu_seqlens = torch.zeros(len(group) + 1, dtype=torch.int32, device="cpu")
    torch.cumsum(lengths, 0, dtype=torch.int32, out=cu_seqlens[1:])
    total, longest = int(cu_seqlens[-1]), int(lengths.max())
    device, first = labels.device, int(starts[0])
    offsets, wanted = cu_seqlens.to(device), counts.to(device)
    if group[-1] - group[0] == len(group) - 1:  # neighbours
        own = labels[first : first + total], found[group[0] : group[-1] + 1]
        _cut_op(similarities, offsets, wanted, longest, *own)
        return
    group_labels, group_found = labels.new_empty(total), found.new_empty(len(group))
    _cut_op(similarities, offsets, wanted, longest, group_labels, group_found)
    shift = (starts - cu_seqlens[:-1]).to(device).repeat_interleave(lengths.to(device), output_size=total)
    labels[torch.arange(total, device=device) + shift] = group_labels
    found[torch.tensor(group, device=device)] = group_found


# ---- k-means ----


def cluster_means(tokens: Tensor, rows: Tensor, count: int) -> Tensor:
    """Compute ``[count, d]``: the means of the tokens that have the same row, none of which is empty.

    The tokens of a cluster are summed in their order, so that the result is the same on every run.
    """
    sums, sizes = _sums(tokens, rows, count)
    return sums / sizes


def _sums(tokens: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sum ``[count, d]``, and how many tokens each is of, ``[count, 1]``."""
    sizes = torch.bincount(rows, minlength=count)
    starts = sizes.cumsum(0) - sizes
    sums: Tensor = torch.nn.functional.embedding_bag(rows.argsort(stable=True), tokens, starts, mode="sum")
    return sums, sizes.unsqueeze(-1)


def _kmeans_labels(
    tokens: Tensor, cu_seqlens: Tensor, clusters: Tensor, iterations: int = 10
) -> tuple[Tensor, Tensor]:
    _check(tokens, cu_seqlens, clusters)
    if iterations < 1:
        raise RuntimeError(f"late_interaction: iterations must be at least 1, got {iterations}")
    offsets, lengths, counts, labels, found = _begin(tokens, cu_seqlens, clusters)
    many = [i for i, length in enumerate(lengths) if counts[i] < length]
    cells = [length * count for length, count in zip(lengths, counts, strict=True)]
    real = tokens.dtype if tokens.dtype == torch.float64 else torch.float32
    budget = _KMEANS_BYTES.get(tokens.device.type, _KMEANS_BYTES_OF_A_CPU) // real.itemsize
    with torch.no_grad(), without_autocast(tokens.device.type):
        for group in _groups(sorted(many, key=lambda i: lengths[i]), cells, budget, padded=True):
            documents = [tokens[offsets[i] : offsets[i + 1]].to(real) for i in group]
            own, own_found = _lloyd(documents, [counts[i] for i in group], iterations)
            for at, i in enumerate(group):
                labels[offsets[i] : offsets[i + 1]] = own[at, : lengths[i]]
            found[group] = own_found
    return labels, found


def _lloyd(documents: list[Tensor], counts: list[int], iterations: int) -> tuple[Tensor, Tensor]:
    """Labels ``[documents, longest]`` and how many clusters each document has.

    Padding is a cluster of its own, behind the others.
    """
    x = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    device, most = x.device, max(counts)
    lengths = torch.tensor([len(d) for d in documents], device=device).unsqueeze(1)
    wanted = torch.tensor(counts, device=device).unsqueeze(1)
    places = torch.arange(most, device=device)
    padded = torch.arange(x.shape[1], device=device) >= lengths
    missing = places >= wanted
    first = (places * lengths // wanted).clamp_max(lengths - 1)  # the token that a center starts from
    centers = x.gather(1, first.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    labels = torch.full_like(padded, -1, dtype=torch.int64)
    for _ in range(iterations):
        halves = centers.square().sum(-1).div_(2).masked_fill_(missing, torch.inf)
        scores = torch.baddbmm(halves.unsqueeze(1), x, centers.transpose(1, 2), beta=-1)
        before, labels = labels, scores.argmax(-1).masked_fill_(padded, most)
        if torch.equal(before, labels):
            break
        centers = _moved(x, labels, centers)
    return _without_empty(labels, most)


def _moved(x: Tensor, labels: Tensor, centers: Tensor) -> Tensor:
    """Average the clusters; a cluster without a token keeps its center."""
    batch, most, d = centers.shape
    rows = labels + torch.arange(batch, device=x.device).unsqueeze(1) * (most + 1)
    sums, sizes = _sums(x.flatten(0, 1), rows.flatten(), batch * (most + 1))
    sizes = sizes.view(batch, most + 1, 1)[:, :most]
    means = sums.view(batch, most + 1, d)[:, :most] / sizes
    return torch.where(sizes > 0, means, centers)


def _without_empty(labels: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Give numbers to the clusters that have tokens, in the order of their centers."""
    filled = torch.zeros(len(labels), most + 1, dtype=torch.int32, device=labels.device)
    filled.scatter_(1, labels, 1)
    filled[:, most] = 0
    numbers = filled.cumsum(1, dtype=torch.int32)
    return numbers.gather(1, labels) - 1, numbers[:, -1]


# ---- registration ----


def _fake(tokens: Tensor, clusters: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    check_form("tokens", tokens, "[tokens, d]")
    labels = tokens.new_empty((tokens.shape[0],), dtype=torch.int32)
    return labels, tokens.new_empty((clusters.shape[0],), dtype=torch.int32)


register_helper(_ward_op, _fake)
register_helper(_kmeans_op, _fake)
register_helper(_cut_op, fake_nothing)
library.impl(_ward_op, _ward_labels, "CompositeExplicitAutograd")
library.impl(_kmeans_op, _kmeans_labels, "CompositeExplicitAutograd")
