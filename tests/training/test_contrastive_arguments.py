"""What the losses make of their arguments before blocks are scored, and which they refuse."""

from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction._contrastive import arguments, check
from late_interaction._contrastive.tokens import Tokens
from tests.support.contrastive import batch, small_blocks

T = 0.3


def recorded(monkeypatch, where, name, seen):
    ours = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args, **given: seen.append(args) or ours(*args, **given))


@pytest.mark.parametrize(("name", "options", "packs"), [
    ("contrastive", {}, False), ("sigmoid", {}, False), ("recall", {}, False),
    ("contrastive", {"tail": 0.1}, True), ("pairwise", {}, True),
])  # fmt: skip
def test_tokens_with_masks_are_packed_for_lists_alone(name, options, packs, monkeypatch):
    Q, D = batch(4, 5)
    seen = []
    recorded(monkeypatch, arguments.check, "packed", seen)
    for mask in (None, torch.rand(5, 7) < 0.6):
        with small_blocks():
            getattr(li.losses, name)(Q, li.Tokens(D, mask), temperature=T, **options)
    assert len(seen) == packs


@pytest.mark.parametrize("Q", [torch.ones(2, 8, device="meta"), None], ids=["meta", "no-tensor"])
def test_a_refusal_is_told_from_the_device_of_the_queries(Q, monkeypatch):
    told = []
    monkeypatch.setattr(arguments, "join", lambda *args: told.append(args))
    with pytest.raises((TypeError, ValueError), match=r"^Q must be"):
        li.losses.contrastive(Q, torch.ones(2, 3, 8), temperature=T, group="group")
    device = torch.device("cpu" if Q is None else "meta")
    assert told == [("losses.contrastive", "group", None, {}, device)]


# ---- what is refused ----


def refusals():
    Q, D = torch.randn(4, 3, 8), torch.randn(4, 5, 8)
    for name, tokens in (("Q", (Q[None], D)), ("D", (Q, D[None]))):
        yield ValueError, rf"{name} must be \[B, L, d\], Tokens or a list, got \[1, 4, [35], 8\]", tokens, {}
    for shape in ((4, 2, 3, 8, 1), (5, 2, 3, 8), (3, 2, 3, 8)):
        message = r"hard_negatives must be \[B, K, Ld, d\]"
        yield ValueError, message, (Q, D), {"hard_negatives": torch.randn(shape)}
    message = "hard_negatives and Q must share the embedding dim"
    yield ValueError, message, (Q, D), {"hard_negatives": torch.randn(4, 2, 3, 9)}
    message = "hard_negatives must be torch.float32 as Q, got torch.bfloat16"
    yield TypeError, message, (Q, D), {"hard_negatives": torch.randn(4, 2, 3, 8).bfloat16()}
    yield (
        ValueError,
        "temperature must be .* one floating-point number",
        (Q, D),
        {"temperature": torch.ones(0)},
    )
    for value in (torch.tensor(0.0), torch.tensor(-0.5), torch.tensor([-2.0]), 10**400):
        yield ValueError, "temperature must be above 0, got", (Q, D), {"temperature": value}
    labels = torch.arange(4)
    for given in (torch.arange(5) % 4, labels[:, None], labels[:3]):
        yield ValueError, r"labels must be \[4\], a document for each query", (Q, D), {"labels": given}
    for label in (-1, -99, -101, 4):
        message = rf"labels must lie in \[0, 4\), or be -100 .*, got .*{label}"
        yield ValueError, message, (Q, D), {"labels": labels.index_fill(0, labels[1], label)}
    labels = labels.index_fill(0, labels[3], -100)
    message = "symmetric needs as many documents as queries, got [35] documents and 4 queries"
    for documents in (D[:3], torch.cat((D, D[:1]))):
        yield ValueError, message, (Q, documents), {"symmetric": True, "labels": labels}


@pytest.mark.parametrize(("kind", "message", "tokens", "options"), list(refusals()))
def test_refusals(kind, message, tokens, options):
    with pytest.raises(kind, match=message):
        li.losses.contrastive(*tokens, **{"temperature": T, **options})


def test_float64_does_not_mix_under_autocast():
    Q, D = batch(4, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            H = torch.randn(4, 2, 3, 8).to(dtype)
            assert li.losses.contrastive(Q, D, temperature=T, hard_negatives=H).isfinite()
        with pytest.raises(TypeError, match=r"hard_negatives must be torch.float32 as Q, got torch.float64"):
            li.losses.contrastive(Q, D, temperature=T, hard_negatives=torch.randn(4, 2, 3, 8).double())


def test_offsets_of_a_gpu_are_looked_at_on_the_host():
    for offsets in ((0, 4, 2), (0, 2, 7), (0, 2, 5), (-1, 2, 6), (1, 2, 6)):
        with pytest.raises(ValueError, match=r"Q\.offsets must"):
            check._check_ends("Q", torch.tensor(offsets, dtype=torch.int32), 6)


# ---- what is taken ----


@pytest.mark.parametrize("packed", [False, True])
def test_no_queries_with_no_hard_negatives(packed):
    Q, H, D = torch.randn(0, 3, 8), torch.randn(0, 2, 3, 8), torch.randn(4, 5, 8)
    Q = li.Tokens(Q).pack() if packed else Q
    loss = li.losses.contrastive(Q, D, temperature=T, hard_negatives=H, reduction="sum")
    assert loss.item() == 0


def test_as_many_hard_negatives_as_documents():
    loss = li.losses.contrastive(
        torch.randn(2, 3, 8), torch.randn(2, 5, 8), temperature=T, hard_negatives=torch.randn(2, 2, 5, 8)
    )
    assert loss.isfinite()


def test_precision_of_each_dtype():
    torch.set_float32_matmul_precision("high")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert check._precision(None, torch.ones(2, dtype=dtype)) == "highest"
    one = torch.ones(2)
    assert check._precision(None, one) == "high" and check._precision("highest", one) == "highest"
    for dtype, wanted in ((torch.bfloat16, "medium"), (torch.float16, "fp16")):
        with torch.autocast("cpu", dtype=dtype):
            assert check._precision(None, one) == wanted and check._precision("highest", one) == "highest"
            assert check._precision(None, one.bfloat16()) == "highest"


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_which_tokens_are_normalized_beforehand(lengths, alone, listed, normalize):
    """Single ones of one process, and those of lists; the operators normalize the others."""
    q, d = (Tokens(torch.full((2, length, 4), 3.0)) for length in lengths)
    options = SimpleNamespace(normalize=normalize, labels=None)
    sides, left = check.prepared(check.Sides(q, d, None, 0), options, alone, listed)
    here = normalize and (listed or (alone and lengths == (1, 1)))
    assert left == (normalize and not here)
    assert all(x.values.eq(0.5 if here else 3.0).all() for x in (sides.q, sides.d))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_zeros_stay_zeros(dtype):
    x = check._normalized(Tokens(torch.tensor([[[0.0, 0.0], [3.0, 4.0]]], dtype=dtype))).values
    assert x.dtype is dtype
    torch.testing.assert_close(x, torch.tensor([[[0.0, 0.0], [0.6, 0.8]]], dtype=dtype))
