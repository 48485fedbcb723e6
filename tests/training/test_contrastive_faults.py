"""losses.contrastive when something goes wrong: a rank that does not answer, or no memory."""

import gc
import weakref
from contextlib import suppress

import pytest
import torch

import late_interaction as li
from late_interaction._contrastive import backward, blocks, kernels
from tests.support.contrastive import batch, small_blocks
from tests.support.groups import check, needs_gloo, on_ranks, two_gpus

T = 0.1


# ---- ranks ----


@needs_gloo
@pytest.mark.parametrize("when", ["sizes", "documents", "gradients", "gathered gradients"])
def test_a_rank_that_does_not_answer(when):
    """It lives and sends nothing: the others raise one clear error at the group's timeout."""
    timeout = 5
    for result in on_ranks(3, "tests.support.framework_worker.stalls", timeout=timeout, missing=1, when=when)[
        :2
    ]:
        message, seconds = result
        assert message.startswith("RuntimeError: losses.contrastive: the exchange of"), result
        assert "with the other ranks of the group failed on rank" in message
        assert seconds < timeout + 20  # on a machine that is busy; without a timeout it would be minutes


@needs_gloo
def test_a_rank_without_memory():
    """It raises its own error and ends; the others learn that a rank has ended."""
    ranks = on_ranks(2, "tests.support.framework_worker.runs_out_of_memory", timeout=10)
    assert ranks[1].startswith("OutOfMemoryError: no memory")
    assert ranks[0].startswith("RuntimeError: losses.contrastive: the exchange of"), ranks[0]


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize(("options", "wanted"), [
    *(({"kind": kind}, {}) for kind in ("padded", "ragged", "packed")),
    # What ranks tell each other does not touch the GPU.
    ({"kind": "packed", "backend": "cpu:gloo,cuda:nccl"}, {}),
    # One exchange by NCCL instead of a ring, as small batches take it.
    *(({"kind": kind, "gathers": True}, {}) for kind in ("padded", "packed")),
    ({"scale_by_world": True}, {"scale": 2.0}), ({"tail": 1e-9}, {"tolerance": 1e-7}),
])  # fmt: skip
def test_two_gpus_equal_one_process(options, wanted):
    given = {"timeout": 120, "backend": "nccl", "function": "gradients"} | options
    ranks = on_ranks(2, "tests.support.framework_worker.on_gpu", **given)
    check(ranks, 2, options.get("kind", "padded"), **wanted)


@pytest.mark.gpu
@two_gpus
def test_two_gpus_that_disagree():
    options = {"timeout": 120, "backend": "nccl"}
    for result in on_ranks(2, "tests.support.framework_worker.on_gpu", function="other_dims", **options):
        assert result.startswith("ValueError: losses.contrastive: every rank of the group must have"), result
    ranks = on_ranks(2, "tests.support.framework_worker.on_gpu", function="one_refuses", **options)
    assert ranks[1].startswith("TypeError: Q and D must share a dtype")
    assert ranks[0].startswith("RuntimeError: losses.contrastive: rank 1 of the group refused its arguments")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_gpu_s_rank_that_ends(when):
    options = {"timeout": 20, "missing": 1, "backend": "nccl"}
    options["environment"] = [("TORCH_NCCL_BLOCKING_WAIT", "1")]
    result = on_ranks(2, "tests.support.framework_worker.blocking", when=when, **options)[0]
    assert result.startswith("RuntimeError: losses.contrastive: the exchange of"), result


# ---- memory ----


class FailingOps:
    """The library's operators; call number `at` of one of them finds no memory."""

    def __init__(self, name, at):
        self.name, self.left = name, at
        self.ops = torch.ops.late_interaction

    def __getattr__(self, name):
        if name != self.name:
            return getattr(self.ops, name)
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes")
        return getattr(self.ops, name)


@pytest.mark.parametrize(("module", "name", "at", "tail", "listed"), [
    (kernels, "maxsim", 5, 0.0, None),
    (kernels, "maxsim_winners", 5, 0.0, None),
    (kernels, "maxsim_backward_into_", 5, 0.0, None),
    (backward, "maxsim_pairs_packed_winners", 1, 2**-6, None),
    (kernels, "maxsim_pairs_packed_backward", 1, 2**-6, None),
    (backward, "maxsim_pairs_packed_winners", 2, 2**-6, 1),
    (kernels, "maxsim_pairs_packed_backward", 2, 2**-6, 1),
])  # fmt: skip
def test_no_memory_halfway(module, name, at, tail, listed, monkeypatch):
    """The error comes through, nothing of the call stays, and the next call has the same bits as ever.
    listed: bytes of winners of one call on listed pairs."""
    Q, D = batch(20, 24, planted=3.0)
    if listed is not None:
        monkeypatch.setattr(blocks, "_WINNER_BYTES", listed)

    def step(q, d):
        with small_blocks(4):
            loss = li.losses.contrastive(q, d, temperature=T, tail=tail)
            return (loss, *torch.autograd.grad(loss, (q, d)))

    wanted = step(Q, D)
    copies = [x.detach().clone().requires_grad_() for x in (Q, D)]
    with monkeypatch.context() as patch:
        failing = FailingOps(name, at)
        patch.setattr(module, "_ops", failing)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            step(*copies)
        assert failing.left == 0
    held = [weakref.ref(x) for x in copies]
    del copies
    gc.collect()
    assert [x() for x in held] == [None, None]
    assert all(map(torch.equal, step(Q, D), wanted))


@pytest.mark.gpu
@pytest.mark.parametrize(("tail", "kept_bytes"), [(0.0, None), (0.0, 0), (2**-10, None)])
def test_no_memory_on_a_gpu(tail, kept_bytes):
    Q = torch.randn(2048, 32, 128, device="cuda", dtype=torch.bfloat16)
    D = torch.randn(2048, 180, 128, device="cuda", dtype=torch.bfloat16)
    D[:, :32] += Q
    Q.requires_grad_()
    D.requires_grad_()

    def loss():
        return li.losses.contrastive(Q, D, temperature=1.0, normalize=True, tail=tail, kept_bytes=kept_bytes)

    held = []

    def limit(more):
        held.clear()
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        for size in ((1 << 20) + 1, 1 << 16):  # what PyTorch has reserved and not given out, in both pools
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
            with suppress(torch.cuda.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + more) / total))

    wanted = loss()
    wanted_grads = torch.autograd.grad(wanted, (Q, D))
    try:
        limit(0)  # no block of scores fits
        with pytest.raises(torch.cuda.OutOfMemoryError):
            loss()
        torch.cuda.set_per_process_memory_fraction(1.0)
        value = loss()
        limit(48 << 20)  # the gradient of the documents takes 90 MiB
        with pytest.raises(torch.cuda.OutOfMemoryError):
            value.backward()
        assert Q.grad is None and D.grad is None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    value = loss()
    assert torch.equal(value, wanted)
    assert all(map(torch.equal, torch.autograd.grad(value, (Q, D)), wanted_grads))
