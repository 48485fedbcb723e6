"""losses.contrastive over a group inside training frameworks: the same gradients as in one process."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import late_interaction as li
from tests.support import framework_worker
from tests.support.framework_worker import PARTS, T, new_encoder, step, tokens
from tests.support.groups import ROOT, free_port, needs_gloo, on_ranks, succeeded, two_gpus

pytestmark = needs_gloo


def one_process(world, variant):
    """Loss and gradients of the whole batch: part i holds part i of every rank, in the order of ranks."""
    encoder = new_encoder(variant)
    of_ranks = [tokens(rank) for rank in range(world)]
    if variant == "accumulated":
        both = [zip(*(parts[i] for parts in of_ranks), strict=True) for i in range(PARTS)]
        parts = [tuple(map(torch.cat, sides)) for sides in both]
    else:
        parts = [part for rank in of_ranks for part in rank]
    options = {"temperature": T, "normalize": True}
    value = step(encoder, parts, variant, lambda Q, D: li.losses.contrastive(Q, D, **options))
    return value, [p.grad for p in encoder.parameters()]


def check(ranks, world):
    succeeded(ranks)
    for variant in framework_worker.VARIANTS:
        loss, grads = one_process(world, variant)
        for result in ranks:
            torch.testing.assert_close(torch.as_tensor(result[variant][0]), loss)
            for got, want in zip(result[variant][1], grads, strict=True):
                torch.testing.assert_close(torch.from_numpy(got), want, msg=lambda m, v=variant: f"{v}: {m}")


ON_GPUS = {"timeout": 120, "backend": "nccl", "device": "cuda"}


@pytest.mark.parametrize("options", [{}, pytest.param(ON_GPUS, marks=[pytest.mark.gpu, two_gpus])], ids=str)
@pytest.mark.parametrize("framework", ["DDP", "FSDP2"])
def test_equals_one_process(framework, options):
    """Plain, with gradients accumulated over two parts, checkpointed, and encoded in parts."""
    check(on_ranks(2, "tests.support.framework_worker.frameworks", framework=framework, **options), 2)


def test_the_example_without_torchrun_says_how_to_start_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    example = [sys.executable, str(ROOT / "examples" / "contrastive_ddp.py")]
    run = subprocess.run(example, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert "contrastive_ddp.py (1 runs one process)" in run.stderr


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("itself", {"gradient_as_bucket_view": True}),
        ("lambda", {}),
        ("lambda", {"find_unused_parameters": True}),
        ("bound method", {}),
        ("partial", {}),
    ],
)
def test_cached_steps_of_ddp_average_gradients_once(way, options):
    """With a temperature and a bias in the module, other numbers of parts on each rank, and a layer that
    the last part does not run, weights stay those of one process."""
    sizes = [3, 1, 2], [4, 2]
    ranks = on_ranks(2, "tests.support.framework_worker.cached_steps", way=way, sizes=sizes, **options)
    model = framework_worker.WithLoss(None)
    parts = [part for rank in range(2) for part in framework_worker.split(rank, sizes[rank])]
    wanted = framework_worker.take_steps(model, lambda: model.whole(parts).backward())
    for result in succeeded(ranks):
        weights, sent = result
        assert sent == 3
        for got, want in zip(weights, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_cached_steps_under_no_sync_send_nothing():
    for result in on_ranks(2, "tests.support.framework_worker.accumulated_cached_steps"):
        assert result == ["step", 1, "step"]


def test_cached_steps_refuse_a_static_graph():
    for result in on_ranks(2, "tests.support.framework_worker.static_graph"):
        assert result.startswith(
            "ValueError: encoder must not run a module in DistributedDataParallel(static"
        )


@pytest.mark.parametrize("kind", framework_worker.LOSSES)
def test_fsdp2_shards_losses(kind):
    """A loss in a sharded model, and one that is sharded for itself: value and gradients of one process."""
    ranks = on_ranks(2, "tests.support.framework_worker.sharded_losses", kind=kind)
    model = framework_worker.Trained(kind)
    parts = [part for rank in range(2) for part in tokens(rank)]
    wanted = model(tuple(map(torch.cat, zip(*parts, strict=True))))
    wanted.backward()
    for result in succeeded(ranks):
        for value, grads in result:
            torch.testing.assert_close(torch.as_tensor(value), wanted.detach())
            for got, p in zip(grads, model.parameters(), strict=True):
                assert p.grad.count_nonzero() and got.shape == p.shape
                torch.testing.assert_close(torch.from_numpy(got), p.grad)


def test_the_example_under_torchrun(monkeypatch):
    """It ends with an error if the group's losses or weights differ from those of one process. It trains."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    example = [str(ROOT / "examples" / "contrastive_ddp.py"), "--steps", "10", "--batch", "8"]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, *example],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "2 processes and one differ by at most" in run.stdout
    first, last = map(float, re.findall(r"step +\d: loss ([\d.]+)", run.stdout))
    assert last < first / 2


def test_the_page_runs_on_two_processes():
    """What DistributedDataParallel and FSDP2 keep alike is alike, though each process has its own data."""
    first, second = succeeded(on_ranks(2, "tests.support.framework_worker.page"))
    for framework in ("DDP", "FSDP2"):
        assert len(first[framework]) == 3
        assert all(map(np.array_equal, first[framework], second[framework]))
        assert all(np.any(x) for x in first[framework])
    assert first["DTensor"] == second["DTensor"] == [(4, 32, 128), (4, 100, 128)]
