"""Sentence Transformers' scoring functions and the patched ones give the same of whatever hypothesis makes
up: scores, dtypes, gradients, and what they refuse.

The numbers are whole and small, so that every dtype and every order of sums gives the same bits. Gradients
are compared on real ones, whose maxima do not tie.
"""

import importlib
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import late_interaction as li
from late_interaction.integrations import sentence_transformers as ours
from late_interaction.integrations.sentence_transformers._originals import SIMILARITY
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
def similarity(sentence_transformers):
    yield importlib.import_module(SIMILARITY)
    li.unpatch("sentence-transformers")


@dataclass
class Side:
    """How one side of a call is built."""

    form: str
    mask: str | None
    lengths: list[int]
    padded: bool  # rows of zeros behind each length, in a tensor
    keep: float  # share of the tokens that a mask keeps


@st.composite
def sides(draw, count):
    lengths = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    keep = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return Side(
        draw(st.sampled_from(FORMS)), draw(st.sampled_from(MASKS)), lengths, draw(st.booleans()), keep
    )


def embeddings(side, d, dtype, real, generator):
    def tokens(*shape):
        if real:
            return torch.randn(*shape, generator=generator, dtype=dtype)
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    lengths = side.lengths
    if side.form in ("list", "arrays"):
        items = [tokens(n, d) for n in lengths]
        return items if side.form == "list" else [x.float().numpy() for x in items]
    if side.form == "one":
        return tokens(lengths[0] if lengths else 3, d)
    x = tokens(len(lengths), max(lengths, default=0), d)
    for i, n in enumerate(lengths):
        x[i, n if side.padded else x.shape[1] :] = 0
    return x if side.form == "tensor" else x.float().numpy()


def mask_of(side, x, generator):
    if side.mask is None:
        return None
    if isinstance(x, list):
        rows, width = len(x), max((len(y) for y in x), default=0)
    else:
        rows, width = (1, x.shape[0]) if x.ndim == 2 else x.shape[:2]
    kept = torch.rand(rows, width, generator=generator) < side.keep
    made = {
        "bool": kept,
        "long": kept.long(),
        "counts": torch.randint(0, 3, (rows, width), generator=generator),
        "float": torch.randint(-2, 3, (rows, width), generator=generator).float(),
        "shared": kept[:1],
        "list": [*kept.float()],
        "array": kept.numpy(),
    }
    return made[side.mask]


@st.composite
def calls(draw, real=False):
    """A function's name and what it is called with. real: float64 that is not whole."""
    pairwise, count, d = draw(st.booleans()), draw(st.integers(0, 4)), draw(st.integers(1, 8))
    dtype = torch.float64 if real else draw(st.sampled_from(NUMBERS))
    other = dtype if real or draw(st.integers(0, 9)) else draw(st.sampled_from(NUMBERS))
    a, b = draw(sides(count)), draw(sides(count if pairwise else draw(st.integers(0, 4))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    Q, D = embeddings(a, d, dtype, real, generator), embeddings(b, d, other, real, generator)
    options = {"a_mask": mask_of(a, Q, generator), "b_mask": mask_of(b, D, generator)}
    # It cuts a mask that all share where pairs go in chunks, and raises an error of shapes.
    cut = not pairwise or "shared" not in (a.mask, b.mask)
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
    li.unpatch("sentence-transformers")
    yield getattr(similarity, name)
    yield getattr(ours, name)
    li.patch("sentence-transformers")
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
    """The gradients of all embeddings that are tensors."""
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


@pytest.mark.parametrize("name", ["xtr_scores", "xtr_kd_scores", "xtr_scores_pairwise"])
def test_a_query_token_selects_256_tokens_of_the_batch(name, similarity):
    """Where the caller says nothing: of 300 documents of one token as many score more than nothing."""
    Q, D = torch.ones(1, 1, 8), torch.rand(1, 300, 1, 8) + 0.1
    if name == "xtr_scores_pairwise":
        Q, D = Q.expand(300, 1, 8), D[0]
    assert int((getattr(ours, name)(Q, D) > 0).sum()) == 256
