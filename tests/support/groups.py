"""Process groups for tests: ranks that are started, and the same batch in one process."""

import functools
import multiprocessing.forkserver
import os
import queue
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import late_interaction as li
from tests.support import ring_worker
from tests.support.ring_worker import T, negatives_of, queries_of, shards

ROOT = Path(__file__).resolve().parents[2]

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@functools.cache
def _server_of_processes():
    """Forks processes that have PyTorch imported, and none of the threads of autograd that a fork loses."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.ring_worker"])
    with pytest.MonkeyPatch.context() as patch:  # where the server finds it
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        multiprocessing.forkserver.ensure_running()
    return context


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def on_ranks(world, name, timeout=60, missing=0, backend="gloo", environment=(), **arguments):
    """What each rank's function returned, or the text of what it raised. missing: ranks that end without.
    environment: variables of theirs, as pairs."""
    port = free_port()
    context = _server_of_processes()
    results = context.Queue()
    ranks = [
        context.Process(
            target=ring_worker.start,
            args=(rank, world, port, results, name, timeout, arguments, backend, environment),
            daemon=True,
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = {}
    try:
        for _ in range(world - missing):
            rank, result = results.get(timeout=timeout + 60)
            found[rank] = result
    except queue.Empty:
        pytest.fail(f"ranks {sorted(set(range(world)) - set(found))} did not end")
    finally:
        for process in ranks:
            process.join(20 if not missing else 1)
            if process.is_alive():
                process.kill()
    return [found.get(rank) for rank in range(world)]


def succeeded(ranks):
    """The results of ranks none of which raised anything."""
    for result in ranks:
        assert not isinstance(result, str), result
    return ranks


def sequences(values, like):
    """What belongs to the tokens of each sequence, of what belongs to all values of these Tokens."""
    return list(li.Tokens._made(values, like.mask, like.offsets))


def joined(world, kind="padded", symmetric=False):
    """All ranks' queries and documents as lists, one rank's behind the other's."""
    sides = zip(*shards(world, kind, symmetric=symmetric), strict=True)
    return [[x for tokens in side for x in tokens] for side in sides]


def labels_of_all(world, kind="padded", labels=None, symmetric=False):
    """The labels of all ranks' queries among all documents, from those among each rank's own."""
    found, begin = [], 0
    for rank, (_, d) in enumerate(shards(world, kind, symmetric=symmetric)):
        mine = torch.arange(queries_of(rank, kind)) if labels is None else labels[rank]
        found.append(torch.where(mine < 0, mine, mine + begin))
        begin += len(d)
    return torch.cat(found)


def one_process(
    world, kind="padded", of="contrastive", labels=None, symmetric=False, hard=False, numbers=True, **options
):
    """Loss and gradients of the whole batch in one process: of each query, each document, the hard negatives,
    and the temperature. numbers: it has a gradient."""
    queries, documents = joined(world, kind, symmetric)
    counts = [queries_of(rank, kind) for rank in range(world)]
    leaves = [[x.detach().requires_grad_() for x in side] for side in (queries, documents)]
    H = torch.cat([negatives_of(rank, n) for rank, n in enumerate(counts)]).requires_grad_() if hard else None
    temperature = torch.tensor(T, dtype=torch.float64, requires_grad=numbers)
    options |= {"symmetric": True} if symmetric else {}
    loss = getattr(li.losses, of)(
        *leaves, labels_of_all(world, kind, labels, symmetric), hard_negatives=H, temperature=temperature,
        **options,
    )  # fmt: skip
    total = loss
    if loss.dim():
        total = (loss * torch.cat([torch.linspace(-1, 2, n, dtype=torch.float64) for n in counts])).sum()
    wanted = [*leaves[0], *leaves[1], *([H] if hard else []), *([temperature] if numbers else [])]
    grads = list(torch.autograd.grad(total, wanted))
    grad_T = grads.pop() if numbers else None
    grad_H = grads.pop() if hard else None
    return loss.detach(), grads[: len(queries)], grads[len(queries) :], grad_H, grad_T


def check(ranks, world, kind="padded", scale=1.0, tolerance=1e-9, symmetric=False, **options):
    """Compare what the ranks found, (loss, gradients) each, with one process."""
    loss, *wanted, grad_H, grad_T = one_process(world, kind, symmetric=symmetric, **options)
    ranks = [result[0] for result in succeeded(ranks)]
    close = {"rtol": 0, "atol": tolerance}
    losses = [torch.from_numpy(np.asarray(result[0])) for result in ranks]
    for got in [torch.cat(losses)] if loss.dim() else losses:
        torch.testing.assert_close(got, scale * loss, **close)
    found = [[], []]
    for (_, grads), tokens in zip(ranks, shards(world, kind, symmetric=symmetric), strict=True):
        for side, grad, like in zip(found, grads, tokens, strict=False):
            side += sequences(torch.from_numpy(grad), like)
    for side, want in zip(found, wanted, strict=True):
        for got, grad in zip(side, want, strict=True):
            torch.testing.assert_close(got, scale * grad, **close)
    others = [[torch.from_numpy(np.asarray(x)) for x in grads[2:]] for _, grads in ranks]
    if grad_H is not None:
        torch.testing.assert_close(torch.cat([x[0] for x in others]), scale * grad_H, **close)
    if grad_T is not None:
        torch.testing.assert_close(sum(x[-1] for x in others), scale * grad_T, rtol=1e-9, atol=1e-12)
