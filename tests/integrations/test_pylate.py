"""PyLate, release by release, before and after patch("pylate")."""

import importlib.metadata

import numpy as np
import pytest
import torch

import late_interaction as li
from tests.build.test_readme import examples
from tests.support import side_by_side
from tests.support.side_by_side import Encoder, called, texts

RELEASES = side_by_side.releases("pylate")
NATIVE = RELEASES[RELEASES.index("1.5.1") :]  # those that select a backend


def unchanged(measure, rtol=1e-12, atol=1e-12):
    return side_by_side.assert_unchanged("pylate", measure, rtol=rtol, atol=atol)


def test_leaves_are_reached(pylate):
    if importlib.metadata.version("pylate") != RELEASES[-1]:
        pytest.skip("the table says what is in the newest release")
    side_by_side.assert_leaves_are_reached("pylate")


def test_calls_are_counted(pylate, monkeypatch):
    li.patch("pylate")
    Q, D = torch.rand(2, 3, 8), torch.rand(4, 5, 8)
    pylate.scores.colbert_scores(Q, D)
    pylate.scores.colbert_scores(Q.double(), D.double())
    assert (li.patched()["pylate"].served, li.patched()["pylate"].left) == (2, {})
    pylate.scores.colbert_scores(Q.half().int(), D.half().int())
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "pylate")
    pylate.scores.colbert_scores(Q, D)
    pylate.scores.colbert_scores(Q, D)
    found = li.patched()["pylate"]
    integers, off = found.left.items()
    assert found.served == 2
    assert "torch.int32 embeddings" in integers[0] and integers[1] == 1
    assert "LATE_INTERACTION_DISABLE turns the patch off" in off[0] and off[1] == 2


LOSSES = {
    "Contrastive": [{}, {"size_average": False, "temperature": 0.02}],
    "CachedContrastive": [{"mini_batch_size": 3}, {"mini_batch_size": 16, "temperature": 0.5}],
    "Distillation": [{}, {"normalize_scores": False, "size_average": False}],
}


@pytest.mark.parametrize("do_query_expansion", [False, True])
@pytest.mark.parametrize(("name", "options"), [(n, o) for n, all_ in LOSSES.items() for o in all_])
def test_losses(pylate, device, name, options, do_query_expansion):
    shapes, labels = [(5, 6), (5, 9), (5, 9)], None
    if name == "Distillation":
        shapes, labels = [(4, 6), (12, 9)], torch.randn(4, 3, device=device).double()
    batch, encoder = texts(device, *shapes, shortest=0), Encoder(device, do_query_expansion)

    def measured():
        return side_by_side.loss_and_gradient(getattr(pylate.losses, name)(encoder, **options), batch, labels)

    assert unchanged(measured)[1].any()


MASKS = {
    "none": lambda shape: None,
    "bool": lambda shape: torch.rand(shape) < 0.5,
    "int": lambda shape: (torch.rand(shape) < 0.5).long(),
    "weights": lambda shape: torch.randn(shape) * (torch.rand(shape) < 0.5),
    "dead": lambda shape: torch.zeros(shape),
    "full": lambda shape: torch.ones(shape),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ["colbert_scores", "colbert_kd_scores"])
def test_masks(pylate, device, name, kind):
    """A masked token is 0 to PyLate, and wins where all else is negative: so it often is with few tokens."""
    Q = torch.randn(4, 5, 2, dtype=torch.float64, device=device, requires_grad=True)
    shape = (4, 6, 3) if name == "colbert_kd_scores" else (6, 3)
    D = torch.randn(*shape, 2, dtype=torch.float64, device=device, requires_grad=True)
    masks = [m if m is None else m.to(device) for m in (MASKS[kind]((4, 5)), MASKS[kind](shape))]
    weight = torch.randn(4, 6, dtype=torch.float64, device=device)

    def measured():
        scores = getattr(pylate.scores, name)(Q, D, *masks)
        return scores.detach(), *torch.autograd.grad(scores, (Q, D), weight.to(scores.dtype))

    unchanged(measured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(pylate, device, dtype):
    unit = torch.nn.functional.normalize
    Q, D = (unit(torch.randn(*shape, 64, device=device), dim=-1).to(dtype) for shape in ((3, 8), (4, 30)))
    mask = torch.rand(4, 30, device=device) < 0.6
    wanted = pylate.scores.colbert_scores(Q.double(), D.double(), documents_mask=mask)
    li.patch("pylate")
    with side_by_side.no_einsum():
        scores = pylate.scores.colbert_scores(Q, D, documents_mask=mask)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), wanted, rtol=1e-5, atol=1e-5)


def test_pairs(pylate, device):
    Q, D = (torch.randn(4, n, 8, dtype=torch.float64, device=device) for n in (5, 7))
    unchanged(lambda: pylate.scores.colbert_scores_pairwise(Q, D))


def test_lists_and_arrays(pylate):
    rng = np.random.default_rng(0)
    Q = [rng.standard_normal((5, 8)).astype(np.float32) for _ in range(3)]
    D = [rng.standard_normal((n, 8)).astype(np.float32) for n in (4, 7, 1)]  # of unequal lengths
    same = [rng.standard_normal((6, 8)).astype(np.float32) for _ in range(3)]

    def measured():
        yield pylate.scores.colbert_scores(Q, same)
        yield pylate.scores.colbert_scores(np.stack(Q), np.stack(same))
        yield pylate.scores.colbert_scores_pairwise(Q, D)

    wanted = list(measured())
    li.patch("pylate")
    torch.testing.assert_close(list(measured()), wanted)


def test_rerank(pylate, device):
    queries = [torch.randn(5, 8, device=device), torch.randn(9, 8, device=device)]
    documents = [[torch.randn(n, 8, device=device) for n in lengths] for lengths in ((3, 1, 7), (4, 9))]
    ids, orders = [["a", "b", "c"], ["d", "e"]], []

    def measured():
        ranked = pylate.rank.rerank(ids, queries, documents)
        orders.append([[row["id"] for row in own] for own in ranked])
        return [[float(row["score"]) for row in own] for own in ranked]

    unchanged(measured, rtol=1e-4, atol=0)
    assert orders[0] == orders[1]


def test_the_groups_of_documents_are_one_call(pylate):
    if not hasattr(pylate.scores, "ColBERTScores"):
        pytest.skip("this PyLate scores group by group itself")
    Q, D = torch.randn(3, 5, 8), torch.randn(3, 4, 7, 8)
    mask = torch.rand(3, 4, 7) < 0.5
    score = pylate.scores.ColBERTScores()
    unchanged(lambda: score(Q, D, documents_mask=mask), rtol=1.3e-6, atol=1e-5)
    assert called(score, Q, D, documents_mask=mask) == {"maxsim": 1}


def test_disabled(pylate):
    loss, batch = pylate.losses.Contrastive(Encoder()), texts("cpu", (5, 6), (5, 9))
    side_by_side.assert_left_alone("pylate", lambda: side_by_side.loss_and_gradient(loss, batch), said="1")


def test_what_no_kernel_takes_stays_with_pylate(pylate):
    Q, D = torch.randint(5, (2, 3, 4)), torch.randint(5, (4, 6, 4))
    side_by_side.assert_left_alone("pylate", lambda: pylate.scores.colbert_scores(Q, D))
    with pytest.raises(RuntimeError):  # as PyLate's own einsum does
        pylate.scores.colbert_scores(torch.randn(2, 3, 4), torch.randn(2, 3, 5))
    with pytest.raises((RuntimeError, ValueError)):
        pylate.scores.colbert_kd_scores(torch.randn(2, 3, 4), torch.randn(3, 2, 3, 4))


def test_unpatch_restores_everything(pylate):
    side_by_side.assert_restored("pylate")


@pytest.mark.parametrize("name", LOSSES)
def test_losses_follow_the_patch_whenever_they_were_built(pylate, name):
    batch = texts("cpu", (3, 6), (3, 9))
    labels = torch.randn(3, 1).double() if name == "Distillation" else None
    losses = [getattr(pylate.losses, name)(Encoder())]
    li.patch("pylate")
    losses.append(getattr(pylate.losses, name)(Encoder()))
    for patched in (True, False):
        for loss in losses:
            assert bool(called(loss, batch, labels)) == patched
        li.unpatch("pylate")


def test_scores_that_went_elsewhere_are_named(pylate, monkeypatch):
    place = (
        "colbert.colbert_kd_scores" if hasattr(pylate.scores, "ColBERTScores") else "scores.colbert_kd_scores"
    )
    if pylate.__version__ in NATIVE:
        place = "_lik_backend.colbert_kd_scores_lik"
    monkeypatch.delattr(f"pylate.scores.{place}")
    with pytest.warns(RuntimeWarning, match="colbert_kd_scores.*refactored"):
        li.patch("pylate")


def test_the_example_of_the_readme(pylate):
    (example,) = [block for block in examples() if "import pylate" in block]
    names = {"torch": torch, "li": li}
    assert called(exec, example, names) == {"maxsim": 1}
    assert names["scores"].shape == (2, 5) and not li.patched()


# ---- the backends of 1.5.1 and later ----


@pytest.fixture
def native(pylate):
    if pylate.__version__ not in NATIVE:
        pytest.skip("this PyLate selects no backend")
    return pylate


@pytest.mark.parametrize("backend", ["auto", "lik", None])
def test_selected(native, device, backend):
    Q, D = torch.randn(3, 5, 8, device=device), torch.randn(3, 7, 8, device=device)
    li.patch("pylate")
    with side_by_side.Calls() as calls:
        native.scores.colbert_scores(Q, D, backend=backend)
        native.scores.colbert_kd_scores(Q, D.unsqueeze(1), backend=backend)
        native.scores.colbert_scores_pairwise(Q, D, backend=backend)
        native.scores.ColBERTScores()(Q, D.unsqueeze(1), backend=backend)
    assert calls.of == {"maxsim": 4}


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_torch_stays_torch(native, monkeypatch, by):
    Q, D = torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    li.patch("pylate")
    if by == "environment":
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    backend = "torch" if by == "argument" else None
    assert not called(native.scores.colbert_scores, Q, D, backend=backend)
    assert not called(native.scores.ColBERTScores(), Q, D.unsqueeze(1), backend=backend)


def test_other_backends_say_what_they_said(native, monkeypatch):
    Q, D = torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    li.patch("pylate")
    with pytest.raises(RuntimeError, match="flash"):
        native.scores.colbert_scores(Q, D, backend="flash")
    with pytest.raises(ValueError, match="backend"):
        native.scores.colbert_scores(Q, D, backend="other")
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    with pytest.raises(RuntimeError, match="lik"):
        native.scores.colbert_scores(Q, D, backend="lik")


def test_flash_is_not_asked_for_what_comes_here(native, monkeypatch):
    asked = []
    monkeypatch.setattr("pylate.scores.colbert._try_flash", lambda *args: asked.append(args))
    li.patch("pylate")
    native.scores.colbert_scores(torch.randn(3, 5, 8), torch.randn(3, 7, 8))
    assert not asked
    native.scores.colbert_scores(torch.ones(3, 5, 8).int(), torch.ones(3, 7, 8).int())
    assert len(asked) == 1
    li.unpatch("pylate")
