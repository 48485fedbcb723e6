"""Threads, streams and forks: one process, many callers."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import late_interaction as li
from late_interaction._scoring.precision import float32_precision


def step(Q, D, backward="lowmem"):
    scores = li.maxsim(Q, D, normalize=True, backward=backward)
    return scores.detach(), *torch.autograd.grad(scores.square().sum(), (Q, D))


def problem(seed, device="cpu"):
    make = torch.Generator().manual_seed(seed)
    Q, D = torch.randn(9, 33, 64, generator=make), torch.randn(11, 70 + seed, 64, generator=make)
    return Q.to(device).requires_grad_(), D.to(device).requires_grad_()


def test_threads_that_multiply_float32_otherwise_leave_pytorch_as_it_was():
    """PyTorch's switch is one for all threads."""
    Q, D = (x.detach() for x in problem(0))
    start = threading.Barrier(4)

    def work(index):
        start.wait()
        for _ in range(8):
            if index % 2:
                li.xtr_scores(Q, D, 50, precision="high")
            else:
                got = li.xtr_scores(Q.half(), D.half(), 50)  # in float32, whatever the switch says
                assert torch.equal(got, expected) and float32_precision("cpu") == "medium"

    torch.set_float32_matmul_precision("medium")
    expected = li.xtr_scores(Q.half(), D.half(), 50)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.gpu
def test_two_threads_on_two_streams():
    problems = [problem(seed, "cuda") for seed in range(2)]
    expected = [step(*p) for p in problems]
    torch.cuda.synchronize()

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [step(*problems[index]) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(2) as pool:
        for got, wanted in zip(pool.map(work, range(2)), expected, strict=True):
            for one in got:
                assert all(map(torch.equal, one, wanted))


@pytest.mark.gpu
def test_threads_whose_kernels_want_more_and_less_shared_memory():
    """Threads launch one kernel: what one allows it must not take from another what that one needs."""
    problems = [problem(seed, "cuda") for seed in (0, 400, 30, 900)]
    for Q, _ in problems:
        assert Q.shape == problems[0][0].shape
    start = threading.Barrier(4)

    def work(index):
        start.wait()
        return [step(*problems[(index + k) % 4]) for k in range(12)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    expected = [step(*p) for p in problems]
    for index, found in enumerate(results):
        for k, got in enumerate(found):
            assert all(map(torch.equal, got, expected[(index + k) % 4]))


@pytest.mark.gpu
def test_work_on_a_side_stream_is_ordered_with_it():
    # The inputs arrive on the stream just before the call; a launch on another stream would read zeros.
    Q, D = problem(3, "cuda")
    expected = step(Q, D)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for backward in ("lowmem", "unified"):
            late_Q, late_D = torch.zeros_like(Q), torch.zeros_like(D)
            torch.cuda._sleep(10_000_000)
            late_Q.copy_(Q.detach())
            late_D.copy_(D.detach())
            got = step(late_Q.requires_grad_(), late_D.requires_grad_(), backward)
            torch.testing.assert_close(got, expected)
    stream.synchronize()


@pytest.mark.gpu
def test_a_thread_that_asked_cuda_for_nothing_before():
    # As autograd's own thread in the first backward of a process.
    Q, D = (torch.randn(64, n, 128, device="cuda", dtype=torch.bfloat16) for n in (32, 300))
    expected = li.maxsim(Q, D)
    li.maxsim(Q, D)  # leaves the allocator a block for the next one
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(li.maxsim, Q, D).result(), expected)


@pytest.mark.gpu
def test_the_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    Q, D = problem(3, "cuda:1")  # while cuda:0 is current
    for got, expected in zip(step(Q, D), step(*problem(3, "cuda:0")), strict=True):
        assert got.device.index == 1
        torch.testing.assert_close(got.cpu(), expected.cpu())
