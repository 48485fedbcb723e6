"""The mutation runs: what they change and what they pass over. (The runs take a night: make mutants.)"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import mutate_constants
    import mutate_python
    import mutation

    yield mutation, mutate_python, mutate_constants
    for name in ("mutation", "mutate_python", "mutate_constants"):
        del sys.modules[name]


def test_every_module_and_every_test_that_is_listed_is_there(tools):
    mutation, mutate_python, mutate_constants = tools
    for module, tests in mutate_python.TESTS.items():
        assert (ROOT / "late_interaction" / module).is_file(), module
        assert all((ROOT / mutation.file_of_test(name)).is_file() for name in tests.split()), tests
    assert all((ROOT / mutation.file_of_test(name)).is_file() for name in mutate_constants.TESTS.split())


def test_an_argument_for_a_survivor_is_about_a_line_that_is_there(tools):
    mutation, *_ = tools
    found = list(mutation.arguments())
    assert found
    for file, before, after, why in found:
        assert before in [text.strip() for text in (ROOT / file).read_text().splitlines()], (file, before)
        assert before != after and why


SOURCE = """
_Wanted = tuple[int, 3]

@dataclass(frozen=True)
class Pair:
    pass

def f(x: int | None) -> int | None:
    if x > 4:
        raise ValueError(f"at most {2 + 2}")
    warnings.warn(f"{x + 1}")
    return x + 5
"""


def test_annotations_and_messages_are_passed_over(tools):
    _, mutate_python, _ = tools
    skipped = mutate_python.passed_over(SOURCE)

    def is_skipped(text):
        (place,) = (m.start() for m in re.finditer(re.escape(text), SOURCE))
        line, column = SOURCE[:place].count("\n") + 1, place - SOURCE.rfind("\n", 0, place) - 1
        return any(first <= (line, column) < last for first, last in skipped)

    assert all(map(is_skipped, ["int, 3", "True", "int | None)", "2 + 2", "x + 1"]))
    assert not any(map(is_skipped, ["x > 4", "x + 5"]))


def test_what_does_not_compile_is_no_mutant(tools):
    _, mutate_python, _ = tools
    assert mutate_python.compiles("def f(a, *, b): return a * b")
    assert not mutate_python.compiles("def f(a, +, b): return a * b")


def test_changed_constants_are_of_the_cpu_kernels(tools):
    *_, mutate_constants = tools
    found = {match[1]: match[2] for _, match in mutate_constants.constants(ROOT)}
    assert set(mutate_constants.NEUTRAL) <= set(found) and "kLanes" in found and "kStepBytes" in found
    assert mutate_constants.variants("64") == ["65", "63", "128"]
    assert mutate_constants.variants("1") == ["2", "0"]


def test_modules_whose_tests_would_be_skipped_are_not_mutated(tools, monkeypatch):
    """Without pyarrow every mutant of theirs would survive."""
    _, mutate_python, _ = tools
    assert set(mutate_python.TESTS) >= mutate_python.NEED_PYARROW
    monkeypatch.setattr(mutate_python, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"need pyarrow: make lancedb, then .* corpus/_arrow\.py$"):
        mutate_python.main(["late_interaction/corpus/_arrow.py"])
