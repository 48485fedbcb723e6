"""Sentence Transformers' scoring functions and the patched ones give the same of whatever hypothesis makes
up: scores, dtypes, gradients, and what they refuse.

The numbers are whole and small, so that every dtype and every order of sums gives the same bits. Gradients are
compared on real ones, whose maxima do not tie.
"""

import importlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import late_interaction as li
from late_interaction import sentence_transformers as ours
from late_interaction._st.originals import SIMILARITY
from tests import selection

law = settings(
    deadline=None,
    max_examples=selection.examples(60),
    derandomize=not selection.NIGHTLY,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FORMS = ["list", "tensor", "one", "arrays", "array"]
NUMBERS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
MASKS = [None, "bool", "long", "counts", "float", "shared", "list", "array"]


@pytest.fixture(scope="module")
def similarity():
    pytest.importorskip("sentence_transformers", reason="make pytest installs it (requirements/demo.txt)")
    yield importlib.import_module(SIMILARITY)
    li.unpatch_sentence_transformers()


@st.composite
def sides(draw, count, d, dtype):
    """One side of a call as a function of a generator: (embeddings, mask)."""
    form, mask = draw(st.sampled_from(FORMS)), draw(st.sampled_from(MASKS))
    lengths = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    padding, keep = draw(st.booleans()), draw(st.sampled_from([0.0, 0.5, 1.0]))
    return form, mask, lengths, padding, keep


def embeddings(side, d, dtype, make):
    form, _, lengths, padding, _ = side

    def tokens(*shape):
        if dtype == torch.float64 and make.real:
            return torch.randn(*shape, generator=make.generator, dtype=dtype)
        return torch.randint(-2, 3, shape, generator=make.generator).to(dtype)

    if form in ("list", "arrays"):
        items = [tokens(n, d) for n in lengths]
        return items if form == "list" else [x.float().numpy() for x in items]
    if form == "one":
        return tokens(lengths[0] if lengths else 3, d)
    x = tokens(len(lengths), max(lengths, default=0), d)
    if padding:
        for i, n in enumerate(lengths):
            x[i, n:] = 0
    return x if form == "tensor" else x.float().numpy()


def mask_of(side, x, make):
    kind, keep = side[1], side[4]
    if kind is None:
        return None
    if isinstance(x, list):
        rows, width = len(x), max((len(y) for y in x), default=0)
    else:
        rows, width = (1, x.shape[0]) if x.ndim == 2 else x.shape[:2]
    kept = torch.rand(rows, width, generator=make.generator) < keep
    made = {
        "bool": kept,
        "long": kept.long(),
        "counts": torch.randint(0, 3, (rows, width), generator=make.generator),
        "float": torch.randint(-2, 3, (rows, width), generator=make.generator).float(),
        "shared": kept[:1],
        "list": [*kept.float()],
        "array": kept.numpy(),
    }
    return made[kind]


class Make:
    def __init__(self, seed, real):
        self.generator = torch.Generator().manual_seed(seed)
        self.real = real


@st.composite
def calls(draw, real=False):
    pairwise = draw(st.booleans())
    count = draw(st.integers(0, 4))
    d = draw(st.integers(1, 8))
    dtype = torch.float64 if real else draw(st.sampled_from(NUMBERS))
    other = dtype if real or draw(st.integers(0, 9)) else draw(st.sampled_from(NUMBERS))
    a = draw(sides(count, d, dtype))
    b = draw(sides(count if pairwise else draw(st.integers(0, 4)), d, dtype))
    make = Make(draw(st.integers(0, 2**31)), real)
    Q, D = embeddings(a, d, dtype, make), embeddings(b, d, other, make)
    options = {"a_mask": mask_of(a, Q, make), "b_mask": mask_of(b, D, make)}
    # Of pairs in chunks it cuts a mask that all share, and raises an error of shapes.
    cut = not pairwise or "shared" not in (a[1], b[1])
    options["chunk_elements"] = draw(st.sampled_from([None, 1, 60, 400])) if cut else None
    name = ("mean_" if draw(st.booleans()) else "") + "maxsim" + ("_pairwise" if pairwise else "")
    return name, Q, D, options


def result(function, *args, **options):
    """What a call gives, or the error that it raises."""
    try:
        return function(*args, **options)
    except Exception as error:
        return error


def ways(similarity, name):
    """Its own function, ours, and its own with the patch."""
    li.unpatch_sentence_transformers()
    yield getattr(similarity, name)
    yield getattr(ours, name)
    li.patch_sentence_transformers()
    yield getattr(similarity, name)


@law
@given(calls())
def test_scores_and_errors(similarity, call):
    name, Q, D, options = call
    wanted, *found = [result(function, Q, D, **options) for function in ways(similarity, name)]
    for one in found:
        if isinstance(wanted, Exception):
            assert type(one) is type(wanted)
            continue
        assert isinstance(one, torch.Tensor), one
        assert one.dtype == wanted.dtype and one.shape == wanted.shape and one.device == wanted.device
        assert torch.equal(one, wanted)


@law
@given(calls(real=True))
def test_gradients(similarity, call):
    name, Q, D, options = call
    found = [result(gradients, function, Q, D, **options) for function in ways(similarity, name)]
    wanted = found[0]
    for one in found[1:]:
        if isinstance(wanted, Exception):
            assert type(one) is type(wanted)
            continue
        assert isinstance(one, list), one
        for mine, theirs in zip(one, wanted, strict=True):
            mine, theirs = (torch.zeros(()) if x is None else x for x in (mine, theirs))
            torch.testing.assert_close(mine + 0 * theirs, theirs + 0 * mine, rtol=1e-5, atol=1e-5)


def gradients(function, Q, D, **options):
    """Of all embeddings that are tensors."""
    sides, leaves = [], []
    for side in (Q, D):
        made = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in _items(side)]
        leaves += [x for x in made if isinstance(x, torch.Tensor)]
        sides.append(made if isinstance(side, list) else made[0])
    scores = function(*sides, **options)
    weight = torch.arange(1.0, scores.numel() + 1, dtype=scores.dtype).view(scores.shape)
    if not scores.requires_grad:
        return []
    return list(torch.autograd.grad(scores, leaves, weight, allow_unused=True))


def _items(side):
    return side if isinstance(side, list) else [side]


def test_arrays_are_of_the_numbers_that_tensors_are_of():
    """What the strategies build is what they say."""
    make = Make(0, False)
    x = embeddings(("array", None, [2, 3], True, 1.0), 4, torch.float32, make)
    assert isinstance(x, np.ndarray) and x.shape == (2, 3, 4) and not x[0, 2].any()
