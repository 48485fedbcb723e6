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
    found = {constant.name: constant for constant in mutate_constants.constants(ROOT)}
    changes = {f"{c.name} {c.number} -> {value}" for c, value in mutate_constants.changes(ROOT, [], None)}
    assert set(mutate_constants.NEUTRAL) <= changes | set(found)
    assert mutate_constants.why_neutral("kMaxSteps", "31", "30")
    assert not mutate_constants.why_neutral("kMaxSteps", "31", "32")
    # kTileData is the second of a line, and kMaxInt8Dims is in brackets.
    assert {"kVectorBytes", "kTileData", "kNarrow", "kMaxInt8Dims", "kNone"} <= set(found)
    for constant in found.values():
        source = constant.path.read_text()
        assert constant.changed(source, constant.number) == source
    assert mutate_constants.variants("64") == ["65", "63", "128"]
    assert mutate_constants.variants("1") == ["2", "0"]
    assert mutate_constants.variants("0") == ["1", "-1"]
    assert mutate_constants.variants("0x1E") == ["31", "29", "60"]
    assert mutate_constants.variants("1e6") == ["1000001.0", "999999.0", "2000000.0"]


def test_a_constant_is_judged_by_the_tests_of_its_file(tools):
    mutation, _, mutate_constants = tools
    paths = [constant.path for constant in mutate_constants.constants(ROOT)]
    for part, tests in mutate_constants.TESTS_OF.items():
        assert any(part in path.as_posix() for path in paths), part
        assert set(tests.split()) <= set(mutate_constants.TESTS.split())
    for part, program in mutate_constants.PROGRAM_OF.items():
        assert (ROOT / "csrc" / "cpu" / part).is_file()
        assert f'cpu/{part}"' in (ROOT / "tests" / "cpp" / f"{program}.cpp").read_text()
    file, _, test = mutate_constants.EMULATED.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text()
    assert {c.path.parent.name for c in mutate_constants.constants(ROOT) if c.is_of_aarch64()} == {"aarch64"}
    bits = ROOT / "csrc" / "cpu" / "isa" / "hamming.inc.h"
    assert mutate_constants.chosen_of(mutate_constants.TESTS_OF, bits, "") == "isa bits"
    seconds = {f"{mutation.file_of_test(name)}::test_f": 1.0 for name in ("bits", "xtr", "muvera")}
    chosen = mutate_constants.chosen_tests(seconds, ["muvera", "bits"], 60, bits)
    assert sorted(chosen) == ["tests/operators/test_bits.py::test_f", "tests/search/test_muvera.py::test_f"]


def test_tests_of_the_instruction_set_of_a_file_come_first(tools):
    mutation, _, mutate_constants = tools
    file = mutation.file_of_test("isa")
    tests = [f"{file}::test_f[{isa}]" for isa in ("portable", "avx2_vnni", "avx2-8", "avx512_bf16", "avx512")]
    seconds = dict.fromkeys(tests, 1.0)
    for name, first in (("avx2.inc.h", 2), ("avx512_bf16.cpp", 3), ("avx512.inc.h", 4)):
        chosen = mutate_constants.chosen_tests(seconds, ["isa"], 60, ROOT / name)
        assert next(iter(chosen)) == tests[first] and set(chosen) == set(tests)


def test_constants_are_wanted_by_name_or_by_file(tools):
    *_, mutate_constants = tools
    found = mutate_constants.changes(ROOT, ["x86/avx2.inc.h", "kNarrow"], None)
    assert {(c.path.name, c.name) for c, _ in found} == {
        ("avx2.inc.h", "kVectorBytes"),
        ("avx2.inc.h", "kGroup"),
        ("hamming.inc.h", "kNarrow"),
    }


def test_modules_whose_tests_would_be_skipped_are_not_mutated(tools, monkeypatch):
    """Without pyarrow every mutant of theirs would survive."""
    _, mutate_python, _ = tools
    assert set(mutate_python.TESTS) >= mutate_python.NEED_PYARROW
    monkeypatch.setattr(mutate_python, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"need pyarrow: make lancedb, then .* corpus/_arrow\.py$"):
        mutate_python.main(["late_interaction/corpus/_arrow.py"])
