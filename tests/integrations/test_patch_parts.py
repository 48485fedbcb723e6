"""What the patches of other libraries share: exchanged code, and places found or not."""

import types

import pytest

from late_interaction.integrations._shared.exchange import Exchanges, with_namespace
from late_interaction.integrations._shared.places import Library, attribute_of, code_of, patch_places

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
