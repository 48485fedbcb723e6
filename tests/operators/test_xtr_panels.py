"""How the similarities of XTR are computed in panels, seen on a CPU; what a GPU would decide, too."""

import pytest
import torch

import late_interaction as li
from late_interaction.ops import xtr as driver
from tests.maxsim.test_call_edges import DropsGradient

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class OnGpu(torch.Tensor):
    """A tensor in the CPU's memory that says it is on a GPU."""

    is_cuda = property(lambda self: True)


def embeddings(Nq, Nd, Lq, Ld, d, dtype=F32):
    return torch.randn(Nq, Lq, d).to(dtype), torch.randn(Nd, Ld, d).to(dtype)


def at(offset, *shape):
    """Half precision that lies so many elements behind whole 64 bytes."""
    count = torch.Size(shape).numel()
    flat = torch.zeros(count + 64, dtype=BF16)
    start = -flat.data_ptr() % 64 // 2 + offset
    return flat[start : start + count].view(shape)


@pytest.mark.parametrize(
    ("tokens", "d", "k", "groups"),
    [
        (100, 16, 6, 64),  # one for 16 tokens; two tiles of 64 tokens, 32 groups each
        (100, 16, 7, 0),
        (64, 8, 4, 32),
        (65, 8, 4, 64),
        (100, 12, 6, 0),  # no whole 16 bytes
        (100, 9, 6, 0),
        (100, 7, 6, 0),
        (100, 1, 7, 0),
        (15, 8, 1, 0),
        (1 << 15, 8, 1024, 1 << 14),
        (1 << 15, 8, 1025, 0),
        (1 << 14, 8, 1024, 1 << 13),
        ((1 << 14) - 1, 8, 1024, 0),
    ],
)
def test_a_gpu_selects_few_in_groups(tokens, d, k, groups):
    Q, D = embeddings(3, 1, 3, tokens, d, BF16)
    for dtype, precision in ((BF16, "highest"), (F16, "high"), (F32, "medium"), (F32, "fp16")):
        q, documents = (x.to(dtype).as_subclass(OnGpu) for x in (Q, D))
        panels, needed = driver._panels(q, documents, k, precision)
        assert (panels.groups, needed) == (groups, "highest")
        assert panels.Q.dtype == panels.D.dtype == {"medium": BF16, "fp16": F16}.get(precision, dtype)
        assert panels.row_bytes == (2 * groups or 4 * tokens)


@pytest.mark.parametrize("offset", [0, 8, 16, 4, 1])
def test_a_gpu_reads_tokens_from_whole_16_bytes_on(offset):
    Q, D = at(offset, 2, 3, 8).as_subclass(OnGpu), at(offset, 4, 5, 8).as_subclass(OnGpu)
    panels, _ = driver._panels(Q, D, 1, "highest")
    for mine, given in ((panels.Q, Q), (panels.D, D)):
        assert mine.data_ptr() % 16 == 0 and torch.equal(mine, given.flatten(0, 1))
        assert (mine.data_ptr() == given.data_ptr()) == (offset % 8 == 0)


@pytest.mark.parametrize(
    ("dtype", "precision", "multiplied", "needed", "row"),
    [
        (F32, "highest", F32, "highest", 4),
        (F32, "high", F32, "high", 4),
        (F32, "medium", F32, "highest", 4),
        (BF16, "high", F32, "highest", 4),
        (F64, "highest", F64, "highest", 8),
        (F64, "fp16", F64, "fp16", 8),
    ],
)
def test_similarities_of_a_cpu(dtype, precision, multiplied, needed, row):
    Q, D = embeddings(2, 4, 3, 25, 8, dtype)
    panels, found = driver._panels(Q, D, 1, precision)
    assert (panels.groups, found, panels.row_bytes) == (0, needed, 100 * row)
    assert panels.Q.dtype == panels.D.dtype == multiplied
    assert panels.Q.shape == (6, 8) and panels.D.shape == (100, 8)


@pytest.mark.parametrize(
    ("most", "count", "rows"),
    [
        (0, 5, 1),  # one row, however large
        (1, 5, 1),
        (7, 5, 7),
        (255, 1000, 255),
        (256, 1000, 256),
        (300, 600, 256),  # whole tiles of 256 rows, never more than fit
        (1029, 4096, 1024),
        (1029, 4097, 1024),
        (1029, 2100, 768),  # three panels of equal size
        (1029, 100, 256),
    ],
)
def test_rows_of_a_panel(most, count, rows):
    row_bytes = 40
    assert driver._rows_of_a_panel(most * row_bytes + row_bytes - 1, row_bytes, count) == rows


@pytest.mark.parametrize(
    ("budget", "maxima", "queries"), [(3200, 10, 10), (3200, 101, 1), (3199, 10, 9), (6400, 1, 200)]
)
def test_queries_whose_maxima_are_held(budget, maxima, queries):
    assert driver._queries_at_a_time(budget, maxima) == queries


@pytest.mark.parametrize("k", [3, 1000])
def test_a_call_is_planned_by_its_sizes(k, monkeypatch):
    asked = {}

    def watch(name):
        real = getattr(driver, name)
        monkeypatch.setattr(driver, name, lambda *args: asked.setdefault(name, (args, real(*args)))[1])

    for name in ("_panels", "_rows_of_a_panel", "_queries_at_a_time"):
        watch(name)
    Q, D = embeddings(5, 7, 3, 11, 4, F64)
    monkeypatch.setattr(driver, "_PANEL_BYTES_OF_A_CPU", 2 * 32 * 21)
    whole = driver._xtr_winners(Q, D, None, None, k, "paper", "high")
    assert asked["_queries_at_a_time"] == ((2 * 32 * 21, 3 * 7), 2)
    assert asked["_panels"][0][2:] == (min(k, 77), "high")
    assert asked["_rows_of_a_panel"][0] == (2 * 32 * 21, 8 * 77, 2 * 3)
    asked.clear()
    monkeypatch.setattr(driver, "_PANEL_BYTES_OF_A_CPU", 16 << 20)
    for mine, theirs in zip(driver._xtr_winners(Q, D, None, None, k, "paper", "high"), whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)
    assert asked["_rows_of_a_panel"][0] == (16 << 20, 8 * 77, 5 * 3)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("given", "deterministic", "wanted"),
    [
        ("auto", False, "auto"),
        ("auto", True, "lowmem"),
        ("unified", True, "unified"),
        ("unified", False, "unified"),
    ],
)
def test_a_deterministic_backward_is_lowmem(given, deterministic, wanted, weighted, monkeypatch):
    strategies = []
    real = driver.call_in_backward
    monkeypatch.setattr(
        driver,
        "call_in_backward",
        lambda op, *args, **name: strategies.append(args[4 + weighted + 1]) or real(op, *args, **name),
    )
    Q, D = (x.requires_grad_() for x in embeddings(2, 3, 4, 5, 8))
    weights = torch.rand(2, 4) if weighted else None
    torch.use_deterministic_algorithms(deterministic)
    try:
        op = torch.ops.late_interaction.xtr_winners
        op(Q, D, weights, None, 6, "paper", "highest", given)[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert strategies == [wanted]


def test_scores_without_a_gradient_give_none():
    Q, D = (x.requires_grad_() for x in embeddings(2, 3, 4, 5, 8))
    scores = torch.ops.late_interaction.xtr_winners(Q, D, None, None, 6)[0]
    assert torch.autograd.grad(DropsGradient.apply(scores).sum(), (Q, D), allow_unused=True) == (None, None)


def test_panels_take_what_the_documentation_says():
    text = " ".join(li.xtr_scores.__doc__.split())
    assert "256 MiB at a time on a GPU and 16 MiB on a CPU" in text
    assert driver._PANEL_BYTES == {"cuda": 256 << 20} and driver._PANEL_BYTES_OF_A_CPU == 16 << 20
