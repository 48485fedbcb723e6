"""What a call takes beside its inputs."""

import subprocess
import sys
from functools import partial

import pytest
import torch

import late_interaction as li
from bench.harness.named_shapes import TRAINING
from bench.harness.shape import PAIRS
from tests.support.calls import peak


def training_step(Q, D, **options):
    scores = li.maxsim(Q, D, **options)
    return torch.autograd.grad(scores.sum(), (Q, D))


SHAPES = {
    "in-batch": ((256, 32, 128), (256, 300, 128), 256 * 256 * 32),
    "long": ((32, 1030, 128), (32, 1030, 128), 32 * 32 * 1030),
    "KD": ((64, 32, 128), (64, 16, 300, 128), 64 * 16 * 32),
}


def leaves(*shapes, dtype=torch.bfloat16):
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


def checkpointed_step(Q, D, **options):
    scores = torch.utils.checkpoint.checkpoint(
        lambda Q, D: li.maxsim(Q, D, **options), Q, D, use_reentrant=False
    )
    return torch.autograd.grad(scores.sum(), (Q, D))


def assert_gradients_and_winners_only(Q, D, winners, step=training_step, **options):
    step(Q, D, backward="lowmem", **options)
    taken = peak(lambda: step(Q, D, backward="lowmem", **options))
    least = (Q.numel() + D.numel()) * Q.element_size() + 2 * winners
    assert taken <= 1.05 * least, f"{taken / 2**20:.1f} MiB, {taken / least:.3f} x the least possible"


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_lowmem_takes_gradients_and_winners_only(shape, dtype, normalize, masked):
    q_shape, d_shape, winners = SHAPES[shape]
    Q, D = leaves(q_shape, d_shape, dtype=dtype)
    d_mask = torch.rand(d_shape[:-1], device="cuda") < 0.8 if masked else None
    assert_gradients_and_winners_only(Q, D, winners, normalize=normalize, d_mask=d_mask)


def leaves_of(shape, dtype=torch.bfloat16):
    documents = (shape.Nq, 1, *shape.d_shape[1:]) if shape.layout == PAIRS else shape.d_shape
    return leaves(shape.q_shape, documents, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [training_step, checkpointed_step])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", TRAINING, ids=lambda shape: shape.name)
def test_lowmem_on_the_shapes_of_the_benchmark(shape, dtype, step):
    assert_gradients_and_winners_only(*leaves_of(shape, dtype), shape.Nq * shape.Nd * shape.Lq, step)


@pytest.mark.gpu
def test_scores_alone_take_no_similarities():
    Q = torch.randn(64, 512, 128, device="cuda", dtype=torch.bfloat16)
    D = torch.randn(64, 1024, 128, device="cuda", dtype=torch.bfloat16)
    li.maxsim(Q, D)
    assert peak(lambda: li.maxsim(Q, D)) < 4 << 20  # the similarities: 4 GiB in bfloat16


def assert_gradients_and_16_mib(step, Q, D, **options):
    def run():
        return step(Q, D, winners="recompute", backward="lowmem", **options)

    run()
    beside = peak(run) - (Q.numel() + D.numel()) * Q.element_size()
    assert beside <= 16 << 20, f"{beside / 2**20:.1f} MiB beside the gradients"


# Their winners: 64, 64 and 67 MiB. grad_Q is summed over parts of the documents, has no room for that (it is
# found apart), or is summed where it lies.
MANY = [
    partial(leaves, (96, 128, 128), (2800, 80, 128)),
    partial(leaves, (1024, 32, 128), (1024, 80, 128)),
    partial(leaves, (64, 1030, 64), (520, 80, 64), dtype=torch.float32),
    partial(leaves, (128, 1000, 64), (128, 260, 30, 64)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("step", [training_step, checkpointed_step])
@pytest.mark.parametrize("make", [partial(leaves_of, x) for x in TRAINING] + MANY)
def test_recomputing_takes_gradients_and_16_mib(make, step):
    assert_gradients_and_16_mib(step, *make())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("shape", ["in-batch", "KD"])
def test_recomputing_takes_no_more_with_masks_and_norms(shape, precision):
    q_shape, d_shape = (
        ((300, 32, 64), (1100, 300, 64)) if shape == "in-batch" else ((64, 32, 64), (64, 90, 300, 64))
    )
    Q, D = leaves(q_shape, d_shape, dtype=torch.bfloat16 if precision == "highest" else torch.float32)
    d_mask = torch.rand(d_shape[:-1], device="cuda") < 0.8
    assert_gradients_and_16_mib(training_step, Q, D, d_mask=d_mask, normalize=True, precision=precision)


@pytest.mark.gpu
def test_recomputing_keeps_nothing():
    Q = torch.randn(256, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    D = torch.randn(256, 300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    li.maxsim(Q, D, winners="recompute")
    before = torch.cuda.memory_allocated()
    scores = li.maxsim(Q, D, winners="recompute")
    assert torch.cuda.memory_allocated() - before <= scores.numel() * 4 + 4096


@pytest.mark.gpu
def test_retrieval_takes_no_score_for_every_document():
    Q = torch.randn(16, 32, 64, device="cuda", dtype=torch.bfloat16)
    D = torch.randn(4000, 8, 64, device="cuda", dtype=torch.bfloat16).repeat(500, 1, 1)  # 2M documents
    li.search(Q, D[:1000], 10, normalize=True)
    assert peak(lambda: li.search(Q, D, 10, normalize=True)) < 300 << 20


STEP = """
import resource, torch
import late_interaction as li
torch.set_num_threads(2)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def step(Nq, Nd, Lq, Ld):
    Q = torch.randn(Nq, Lq, 128, dtype=torch.bfloat16, requires_grad=True)
    D = torch.randn(Nd, Ld, 128, dtype=torch.bfloat16, requires_grad=True)
    li.maxsim(Q, D, normalize=True).sum().backward()
    return Q, D
step(2, 2, 8, 8)
before = peak()
kept = step(16, 32, 512, 512)
print((peak() - before) >> 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak as Linux counts it")
def test_no_similarities_on_the_cpu():
    # In a process of its own, whose peak nothing else has raised. The similarities would be 512 MiB in
    # float32; inputs, gradients and winners are 13 MiB.
    run = subprocess.run([sys.executable, "-c", STEP], check=True, capture_output=True, text=True)
    taken = int(run.stdout)
    assert taken < 64, f"{taken} MiB"
