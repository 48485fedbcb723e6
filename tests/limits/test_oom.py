"""Out of memory: the exception passes through, and the next call works."""

import contextlib
import os
import resource
from pathlib import Path

import pytest
import torch

import late_interaction as li
from late_interaction import _maxsim, codecs, ops, score_pairs
from late_interaction.lik import plaid
from late_interaction.ops import _oom, dense
from late_interaction.score_pairs import score_pairs_packed


@pytest.fixture
def little_memory():
    """A GPU on which this process may use only a little more than it does."""
    torch.cuda.empty_cache()
    total, reserved = torch.cuda.mem_get_info()[1], torch.cuda.memory_reserved()
    # Tensors of other tests may keep large blocks, of which the rest is free.
    torch.cuda.set_per_process_memory_fraction(reserved / total)
    filled = []
    for size in (1 << 30, 1 << 26, 1 << 22):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                filled.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    torch.cuda.set_per_process_memory_fraction((reserved + (600 << 20)) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    filled.clear()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
def test_out_of_memory(little_memory, backward):
    Q = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    D = torch.randn(4, 100, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = torch.autograd.grad(li.maxsim(Q, D, backward="lowmem").sum(), (Q, D))

    # The forward cannot keep its winners: 30000 x 30000 x 4 of them take 7 GB.
    many = Q[:1, :4].expand(30000, -1, -1)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        li.maxsim(many, D[:1, :1].expand(30000, -1, -1), backward=backward)
    # The forward succeeds and the backward cannot have grad_D: a token seen by 2,000,000 documents, 1 GB.
    scores = li.maxsim(Q[:1], D[:1, :2].expand(2_000_000, -1, -1), backward=backward)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        scores.sum().backward()
    del scores

    got = torch.autograd.grad(li.maxsim(Q, D, backward="lowmem").sum(), (Q, D))
    assert all(map(torch.equal, got, expected))


@pytest.mark.gpu
def test_out_of_memory_while_retrieving(little_memory):
    Q, D = torch.randn(4, 32, 128, device="cuda"), torch.randn(100, 60, 128)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        li.search(Q, D[:1].expand(100_000, -1, -1), 5, chunk_bytes=100_000 * D[0].nbytes, normalize=True)
    scores, documents = li.search(Q, D, 5, normalize=True)
    expected = li.maxsim(Q, D.cuda(), normalize=True).topk(5)
    torch.testing.assert_close(scores, expected.values)
    assert torch.equal(documents, expected.indices)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_out_of_memory_on_the_cpu(needs_grad):
    # 2^30 x 2^30 scores are more than any machine has. The allocator's own words come through.
    Q, D = torch.randn(1, 1, 1, requires_grad=needs_grad).expand(1 << 30, 1, 1), torch.randn(1, 1, 1)
    with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate"):
        li.maxsim(Q, D.expand(1 << 30, 1, 1))
    assert li.maxsim(Q[:2], D.expand(2, 1, 1)).shape == (2, 2)


def test_other_errors_pass_through():
    Q, D = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    _oom.forward_failed(RuntimeError("something else"), Q, D, True)
    _oom.backward_failed(RuntimeError("API call failed, but not for want of memory"), Q, D, True)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_out_of_memory_of_packed_sequences_on_the_cpu(needs_grad):
    Q, empty = torch.randn(2, 4, requires_grad=needs_grad), torch.zeros((1 << 24) + 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate"):
        li.lik.maxsim_varlen(Q, Q, empty, empty)  # 2^24 x 2^24 scores


@pytest.fixture
def little_memory_on_the_cpu():
    """This process may use only 1 GiB more than it does."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs Linux, to limit the memory it may use"
)
def test_out_of_memory_of_listed_pairs_on_the_cpu(little_memory_on_the_cpu):
    Q, pairs = torch.zeros(1 << 16, 1, requires_grad=True), torch.zeros(1 << 14, dtype=torch.int32)
    cu = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate 2147483648 bytes"):
        score_pairs_packed(Q, Q[:1], cu, cu, pairs, pairs, max_seqlen_q=1 << 16)  # its winners


# ---- what a failed call asks for again ----


Q3, D3 = torch.ones(2, 3, 8), torch.ones(4, 5, 8)
CU = torch.tensor([0, 2, 3]), torch.tensor([0, 4, 9, 20])
PAIRS = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 2, 2])
INDEX = torch.tensor([5, 4]), torch.randn(7, 8), torch.ones(4), 2
CODES = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, 2, dtype=torch.uint8)


def learned(x):
    return x.clone().requires_grad_()


def back(**options):
    """A row of a backward, which sums grad_D in float32 only where it adds up in one pass."""
    plain, summed = not options, not {"backward", "winners"} & options.keys()
    return (
        lambda: li.maxsim(learned(Q3), learned(D3), **options).sum().backward(),
        (dense, "_call_gradients" if plain else "call_in_backward"),
        "backward_failed",
        [(2, 3, 8), (4, 5, 8), summed],
    )


@pytest.mark.parametrize(
    ("call", "fails", "told", "expected"),
    [
        back(), back(normalize=True), back(backward="lowmem"), back(winners="recompute"),
        (
            lambda: li.maxsim(Q3, codecs.Int8().encode(D3)),
            (ops, "maxsim_quantized"), "codes_failed", [(2, 3, 8), 4],
        ),
        (
            lambda: li.maxsim(Q3, codecs.Bits(4).encode([*D3, D3[0]])),
            (ops, "maxsim_asymmetric_packed"), "codes_failed", [(2, 3, 8), 5],
        ),
        (
            lambda: li.maxsim(Q3, D3, winners="recompute"),
            (_maxsim, "call_below_autograd"), "forward_failed", [(2, 3, 8), (4, 5, 8), False],
        ),
        (
            lambda: li.maxsim_pairs(Q3, D3[:2], winners="recompute"),
            (_maxsim, "call_below_autograd"), "forward_failed", [(2, 3, 8), (2, 1, 5, 8), False],
        ),
        (
            lambda: li.losses.contrastive(learned(Q3), D3, temperature=1.0),
            (torch.ops.late_interaction.maxsim_winners, "default"),
            "forward_failed", [(2, 3, 8), (4, 5, 8), True],
        ),
        (
            lambda: score_pairs_packed(learned(Q3[0]), D3.flatten(0, 1), *CU, *PAIRS),
            (score_pairs, "call_packed"), "pairs_failed", [(3, 8), (20, 8), 4, 2],
        ),
        (
            lambda: plaid.maxsim_residual(Q3, *CODES, *INDEX),
            (ops, "maxsim_residual"), "codes_failed", [(2, 3, 8), 2],
        ),
        (
            lambda: plaid.maxsim_residual_varlen(
                Q3, CODES[0].flatten(), CODES[1].flatten(0, 1), torch.tensor([0, 4, 6, 10]), *INDEX[1:]
            ),
            (ops, "maxsim_residual"), "codes_failed", [(2, 3, 8), 3],
        ),
    ],
)  # fmt: skip
def test_a_call_that_fails_says_what_it_had(monkeypatch, call, fails, told, expected):
    def fail(*args, **kwargs):
        raise RuntimeError("[enforce fail] not enough memory")

    found = []
    monkeypatch.setattr(_oom, told, lambda error, *args: found.extend(args))
    monkeypatch.setattr(*fails, fail)
    with pytest.raises(RuntimeError, match="not enough memory"):
        call()
    assert [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in found] == expected


F32, I16 = torch.float32, torch.int16
GRADIENTS = [((2, 3, 8), torch.bfloat16), ((4, 5, 8), torch.bfloat16)]
WANTED = {
    "forward": (_oom.forward_failed, lambda Q, D: (Q, D, False), [((2, 4), F32)]),
    "forward, winners": (_oom.forward_failed, lambda Q, D: (Q, D, True), [((2, 4), F32), ((2, 4, 3), I16)]),
    "varlen": (_oom.varlen_failed, lambda Q, D: (Q[0], D[0], *CU, True), [((2 * 2, 3), F32), ((3, 3), I16)]),
    "pairs": (_oom.pairs_failed, lambda Q, D: (Q[0], D[0], 5, 30), [((30,), F32), ((5, 30), I16)]),
    "residual": (_oom.codes_failed, lambda Q, D: (Q, 7), [((2, 7), F32)]),
    "residual, winners": (
        _oom.codes_failed, lambda Q, D: (learned(Q), 7), [((2, 7), F32), ((2, 7, 3), torch.int32)]
    ),
    "backward": (_oom.backward_failed, lambda Q, D: (Q, D, False), GRADIENTS),
    "backward, summed": (_oom.backward_failed, lambda Q, D: (Q, D, True), [*GRADIENTS, ((4, 5, 8), F32)]),
}  # fmt: skip


@pytest.mark.parametrize("what", WANTED)
def test_memory_that_was_wanted_is_asked_for_again(monkeypatch, what):
    failed, arguments, wanted = WANTED[what]
    given, asked = arguments(Q3.bfloat16(), D3.bfloat16()), []
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: asked.append((size, dtype)))
    failed(RuntimeError("API call failed"), *given)
    assert asked == wanted
