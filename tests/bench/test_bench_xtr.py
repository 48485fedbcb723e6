"""The suite of XTR scores: exact results, planted selections, the written-out peer, and its rows."""

import importlib
from functools import partial

import pytest
import torch

from bench.harness import inputs, named_shapes, parity
from bench.harness import xtr as exact
from bench.harness.library import OURS, SENTENCE_TRANSFORMERS, training_step
from bench.harness.shape import Shape
from bench.peers.implementations import KEYS
from bench.suites import soft
from bench.suites.soft import grid_scores
from late_interaction.reference import xtr_scores_reference
from tests.bench.shared import CPU, bench, dry_run

TINY = named_shapes.TINY_XTR[0]
SHAPES = [Shape("a", 3, 7, 5, 11, d=16), Shape("b", 1, 1, 2, 13, d=8), Shape("c", 4, 1, 1, 17, d=8), TINY]
KS = [1, 9, 1000]


def drawn(shape):
    torch.manual_seed(0)
    return inputs.draw(shape, CPU, torch.float64)


def step(score, x):
    leaves = x.Q.detach().requires_grad_(), x.D.detach().requires_grad_()
    return training_step(score, leaves, x.grad_scores)()


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_exact_scores_are_by_definition(shape, k, monkeypatch):
    x = drawn(shape)
    wanted = xtr_scores_reference(x.Q, x.D, k)
    torch.testing.assert_close(exact.exact_scores(x.Q, x.D, k), wanted)
    monkeypatch.setattr(exact, "_CHUNK_ELEMENTS", 1)  # a query at a time
    torch.testing.assert_close(exact.exact_scores(x.Q, x.D, k), wanted)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_the_results_of_planted_inputs_are_exact_and_no_rounding_moves_them(shape, k):
    torch.manual_seed(0)
    grad = torch.randn(shape.scores_shape, dtype=torch.float64)
    known, results = exact.plant_selection(shape, k, grad, torch.float64)
    assert known.Q.shape == shape.q_shape and known.D.shape == shape.d_shape
    for got, want in zip(results, step(partial(xtr_scores_reference, k=k), known), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    grid = torch.einsum("isd,jtd->isjt", known.Q, known.D)
    ordered = grid.flatten(2).sort(-1, descending=True).values
    if k < ordered.shape[-1]:
        assert (ordered[..., k - 1] - ordered[..., k]).min() > 0.1
    chosen = grid >= ordered[..., min(k, ordered.shape[-1]) - 1, None, None] - 1e-9
    inside = grid.masked_fill(~chosen, 0.0).topk(2, dim=-1).values
    assert (inside[..., 0] - inside[..., 1])[chosen.any(-1)].min() > 0.1


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_the_grid_gives_the_papers_scores(shape, k):
    x = drawn(shape)
    found = step(partial(grid_scores, k=k), x), step(partial(xtr_scores_reference, k=k), x)
    torch.testing.assert_close(*found, check_dtype=False, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", KS)
def test_the_grid_is_sentence_transformers(k, dtype):
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    try:
        theirs = importlib.import_module("sentence_transformers.multi_vector_encoder.scoring.xtr").xtr_scores
    except ImportError:
        pytest.skip("this release of Sentence Transformers has no XTR scores")
    torch.manual_seed(0)
    x = inputs.draw(TINY, CPU, dtype)

    def score(Q, D):
        out = theirs(Q, D.unsqueeze(1), top_k=k)
        return out

    torch.testing.assert_close(step(partial(grid_scores, k=k), x), step(partial(score), x), rtol=0, atol=0)


# ---- the suite ----


def measured(shape, *keys, device=CPU):
    torch.manual_seed(0)
    return soft.measure_xtr(bench("xtr", shape, *(KEYS[key]() for key in keys), device=device))


def test_a_dry_run_takes_the_suite_through(tmp_path):
    rows = dry_run(tmp_path, "xtr")
    assert [(r["impl"], r["variant"]) for r in rows] == [
        (OURS, soft.MAXSIM),
        *((impl, f"k = {k}") for k in soft.SELECTED for impl in (OURS, SENTENCE_TRANSFORMERS)),
    ]
    for r in rows:
        assert r.get("error") is None and r["wall_us"] > 0 and r["op"] == "fwd+bwd"
        assert r["grad_err"] < parity.GRADIENTS and r["rel_err"] < (1e-5 if r["impl"] == OURS else 5e-2)


def test_wrong_scores_and_wrong_gradients_are_not_timed(monkeypatch):
    def by_length(Q, D, k):
        return grid_scores(Q, D, k) / 2

    def without_gradient(Q, D, k):
        return grid_scores(Q.detach(), D, k) + 0 * Q.float().sum()

    def too_many(Q, D, k):
        return grid_scores(Q, D, k + 1)

    for wrong, said in (
        (by_length, "relative error 0.5"),
        (without_gradient, "a gradient is off by 1,"),
        (too_many, "a gradient is off"),
    ):
        monkeypatch.setattr(soft, "grid_scores", wrong)
        rows = measured(TINY, "ours", "einsum")
        for r in rows:
            if r["impl"] == OURS:
                assert r.get("error") is None and r["wall_us"] > 0
            else:
                assert said in r["error"] and r["wall_us"] is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [TINY, *named_shapes.XTR[:2]], ids=lambda s: s.name)
def test_a_run_on_a_gpu(shape):
    rows = measured(shape, "ours", "einsum", device=torch.device("cuda"))
    assert len(rows) == 5 and [r.get("error") for r in rows] == [None] * 5
    assert len({r["gpu_method"] for r in rows}) == 1
    assert all(r["gpu_us"] > 0 and r["wall_us"] > 0 and r["peak_mib"] > 0 for r in rows)
