"""What the patches of other libraries share: exchanged code, places found or not, blocks of lists."""

import types

import pytest
import torch

from late_interaction.integrations._shared import zero_padded
from late_interaction.integrations._shared.exchange import Exchanges, with_namespace
from late_interaction.integrations._shared.places import Library, attribute_of, code_of, patch_places
from late_interaction.integrations._shared.ragged import Ragged, blocks

UNIT = 1
LIBRARY = Library("a-library", "A library", "1 to 2")


def times(x, factor=2):
    return x * factor * UNIT


def replacement(x, factor=2):
    return -1


@pytest.fixture
def module():
    """A module of another library: a function, one with a closure, a class."""
    found = types.ModuleType("another_library")

    class Model:
        def score(self, x):
            return x

    def closure():
        return Model

    found.times = types.FunctionType(times.__code__, globals(), "times", times.__defaults__)
    found.closure, found.Model, found.number = closure, Model, 3
    return found


def test_other_globals_are_seen_by_the_copy_alone(monkeypatch):
    copy = with_namespace(times, times.__code__, {"UNIT": 10})
    assert (copy(3), copy(3, factor=1), times(3)) == (60, 30, 6)
    assert Exchanges().own(times, {"UNIT": 10})(3) == 60
    same = Exchanges().own(times)
    monkeypatch.setitem(globals(), "UNIT", 5)
    assert same(3) == times(3) == 30  # what its module has, also later


def test_a_function_whose_code_is_exchanged(module):
    exchanges, before = Exchanges(), module.times
    assert not exchanges and code_of(exchanges, replacement)(module, "times") is True and exchanges
    assert module.times is before and before(3) == -1 and exchanges.own(before)(3) == 6
    exchanges.restore()
    assert before(3) == 6 and not exchanges


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x,
        lambda x, factor=2, more=3: x,
        lambda x, a=2: x,
        lambda x, z=2: x,
    ],
)
def test_a_function_of_other_parameters_stays(other, module):
    exchanges = Exchanges()
    assert code_of(exchanges, other)(module, "times") is False and not exchanges
    for name in ("closure", "number", "missing"):
        assert code_of(exchanges, replacement)(module, name) is False and not exchanges


def test_an_attribute_that_is_exchanged(module):
    exchanges, seen = Exchanges(), []
    patch = attribute_of(exchanges, lambda original: lambda self, x: seen.append(original) or -x)
    own = vars(module.Model)["score"]
    assert patch(module, "Model.score") is True and module.Model().score(3) == -3 and seen == [own]
    assert exchanges.had("score") is own
    exchanges.restore()
    assert module.Model().score(3) == 3 and vars(module.Model)["score"] is own


@pytest.mark.parametrize("parameters", [["self"], ["self", "x", "y"], ["self", "a"], ["self", "z"]])
def test_an_attribute_of_other_parameters_stays(parameters, module):
    exchanges = Exchanges()
    assert attribute_of(exchanges, lambda own: None, parameters)(module, "Model.score") is False
    assert attribute_of(exchanges, lambda own: None)(module, "Model.missing") is False
    assert attribute_of(exchanges, lambda own: None)(module, "Missing.score") is False and not exchanges
    assert attribute_of(exchanges, lambda own: own, ["self", "x"])(module, "Model.score") is True


def test_places_that_are_found_and_those_that_are_not(module, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "another_library", module)
    exchanges = Exchanges()
    patch = code_of(exchanges, replacement)
    assert patch_places(LIBRARY, [("another_library", "times", patch)], exchanges) is None
    assert module.times(3) == -1
    places = [("another_library", name, patch) for name in ("times", "number")]
    assert patch_places(LIBRARY, places, exchanges).startswith("did not find another_library.number:")
    exchanges.restore()


@pytest.mark.parametrize(("name", "own"), [("A library", "A library's own"), ("Books", "Books' own")])
def test_what_computes_where_a_place_is_not_found(name, own, module, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "another_library", module)
    exchanges = Exchanges()
    places = [("another_library", part, code_of(exchanges, replacement)) for part in ("times", "missing")]
    said = patch_places(LIBRARY._replace(name=name), places, exchanges)
    assert f"missing: whatever computes there stays {own};" in said
    exchanges.restore()


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([2, 2, 1], [(0, 2), (2, 3)]),
        ([9, 1], [(0, 1), (1, 2)]),
        ([3, 2, 2], [(0, 1), (1, 3)]),
        ([3, 3, 2], [(0, 1), (1, 2), (2, 3)]),
        ([1, 9, 1, 1], [(0, 1), (1, 2), (2, 4)]),
    ],
)
def test_blocks_of_at_most_four(sizes, found):
    assert list(blocks(sizes, 4)) == found


def test_items_end_to_end():
    items = [torch.full((n, 2), float(n)) for n in (3, 0, 2, 1)]
    tokens, offsets = Ragged(items).packed(1, 4, torch.device("cpu"))
    assert tokens[:, 0].tolist() == [2, 2, 1] and offsets.tolist() == [0, 0, 2, 3]
    assert offsets.dtype == torch.int32 and Ragged(items).lengths == [3, 0, 2, 1] and len(Ragged(items)) == 4


@pytest.mark.parametrize("most", [1, 40, 60, 1000])
def test_scores_of_zero_padded_lists_in_any_number_of_blocks(most, monkeypatch):
    """Four documents of 20 numbers: one a block, two, three and one, or all. Two are padded to 6 tokens."""
    monkeypatch.setattr(zero_padded, "ELEMENTS", most)
    queries = [torch.randn(n, 4) for n in (3, 1, 0)]
    documents, padded_to = [-torch.rand(5, 4) for _ in range(4)], [5, 6, 5, 6]
    found = zero_padded.scores(queries, documents, padded_to, torch.device("cpu"))
    for i, q in enumerate(queries):
        for j, (d, length) in enumerate(zip(documents, padded_to, strict=True)):
            padded = torch.nn.functional.pad(d, (0, 0, 0, length - len(d)))
            wanted = (q.double() @ padded.double().t()).amax(1).sum()
            torch.testing.assert_close(found[i, j].double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("L", [1, 2])
def test_queries_of_one_length_with_documents_of_others(L):
    queries, documents = torch.randn(3, L, 4), [torch.randn(n, 4) for n in (2, 5)]
    found = zero_padded.scores(queries, documents, [2, 5], torch.device("cpu"))
    wanted = [[(q.double() @ d.double().t()).amax(1).sum().item() for d in documents] for q in queries]
    torch.testing.assert_close(found.double(), torch.tensor(wanted).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("Nd", [1, 3])
def test_documents_of_one_length(Nd, as_list):
    Q, D = torch.randn(2, 3, 4), torch.randn(Nd, 5, 4)
    found = zero_padded.scores(list(Q) if as_list else Q, D, [5] * Nd, torch.device("cpu"))
    wanted = torch.einsum("qsd,ntd->qnst", Q.double(), D.double()).amax(-1).sum(-1)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
