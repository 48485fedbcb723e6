"""The forks of a mutation run: which functions get new code, which tests run, and when one is given up."""

import gc
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

MODULE = """
LIMIT = 3

def above(x, least=LIMIT):
    return [y for y in x
            if y > least]

class Box:
    size = 2

    def holds(self, x):
        def fits(y):
            return y < self.size
        return fits(x)
"""


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import forked_tests

    yield forked_tests
    del sys.modules["forked_tests"]


@pytest.fixture
def mutate_python(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import mutate_python

    yield mutate_python
    for name in ("forked_tests", "mutation", "mutate_python"):
        del sys.modules[name]


@pytest.fixture
def loaded(tmp_path):
    file = tmp_path / "module.py"
    names = {}
    exec(compile(MODULE, str(file), "exec"), names)
    return file, names


@pytest.mark.parametrize(
    "change, call, before, after",
    [
        (("y > least", "y >= least"), lambda m: m["above"]([2, 3, 4]), [4], [3, 4]),
        (("y < self", "y <= self"), lambda m: m["Box"]().holds(2), False, True),
    ],
)
def test_a_changed_function_is_replaced_wherever_it_is(forked, loaded, change, call, before, after):
    file, names = loaded
    gc.freeze()  # as tests/conftest.py does once tests are collected
    imported = dict(names)  # as from module import *
    assert call(imported) == before
    for function, code in forked.Functions(file, MODULE).replacements(MODULE.replace(*change)):
        function.__code__ = code
    assert call(imported) == after


@pytest.mark.parametrize("change", [("LIMIT = 3", "LIMIT = 4"), ("size = 2", "size = 3"), ("=LIMIT", "=0")])
def test_what_runs_at_import_is_not_a_change_of_functions(forked, loaded, change):
    assert forked.Functions(loaded[0], MODULE).replacements(MODULE.replace(*change)) is None


def test_lines_that_are_executed_are_seen_in_the_files_asked_for(forked, loaded):
    file, names = loaded
    with forked.Lines([file]) as lines:
        names["above"]([1])
        sorted([2, 1], key=lambda x: x)
    assert lines.by_file() == {str(file): [5, 6]}
    assert sys.gettrace() is None


def test_lines_that_are_compiled_are_seen_too(forked, loaded):
    file, names = loaded
    with forked.Lines([file]) as lines:
        compiled = torch.compile(lambda x: names["Box"]().holds(x), backend="eager", fullgraph=True)
        assert compiled(torch.tensor(1.0))
    assert lines.by_file() == {str(file): [11, 12, 13, 14]}


def test_one_variant_of_every_test_comes_before_the_second_of_any(forked):
    seconds = {"a[1]": 1.0, "a[2]": 2.0, "b[1]": 3.0, "b[2]": 4.0, "c": 9.0}
    order = forked.one_of_each_first(seconds)
    assert order == ["a[1]", "b[1]", "c", "a[2]", "b[2]"]
    assert forked.within(seconds, order, 4.5) == ["a[1]", "b[1]"]
    assert forked.within(seconds, order, 0.1) == ["a[1]"]


def test_variants_that_take_no_time_count_as_one(forked):
    seconds = {"a[1]": 1.0, "a[2]": 2.0, "b[1]": 0.04, "b[2]": 0.05, "b[3]": 0.06, "b[4]": 0.07}
    assert forked.one_of_each_first(seconds) == ["b[1]", "b[2]", "a[1]", "b[3]", "a[2]", "b[4]"]


def test_the_fastest_test_comes_first_but_for_what_failed_before(forked):
    seconds = {"a": 3.0, "b": 1.0, "c": 2.0}
    assert forked.fastest_first(seconds) == ["b", "c", "a"]
    assert forked.fastest_first(seconds, likely=["a"]) == ["a", "b", "c"]


def test_a_fork_ends_with_its_status_or_at_its_limit(forked, tmp_path):
    log = tmp_path / "log"

    def fails():
        os.write(1, b"said")
        raise MemoryError("no more")

    assert forked.fork(lambda: 0, 60, log) == forked.PASSED
    assert forked.fork(fails, 60, log) == forked.BROKEN
    assert "said" in log.read_text() and "no more" in log.read_text()
    began = time.monotonic()
    assert forked.fork(lambda: time.sleep(60), 0.1, log) is forked.TOO_LONG
    assert time.monotonic() - began < 30


def test_a_fork_cannot_take_all_memory(forked, tmp_path):
    def takes():
        forked.limit_memory()
        return len(bytearray(2 * forked.MORE_MEMORY)) == 0

    assert forked.fork(takes, 60, tmp_path / "log") == forked.BROKEN
    assert "MemoryError" in (tmp_path / "log").read_text()


def test_lines_of_a_statement_are_those_of_its_header(mutate_python):
    lines = mutate_python.statement_lines(MODULE)
    assert list(lines[4]) == [4] and list(lines[6]) == [5, 6] and list(lines[9]) == [9]


def test_tests_of_a_line_are_those_that_execute_its_statement(mutate_python, tmp_path):
    (tmp_path / "late_interaction").mkdir()
    file = tmp_path / "late_interaction" / "module.py"
    file.write_text(MODULE)
    paths = [tmp_path / "one", tmp_path / "two"]
    paths[0].write_text(json.dumps({"first": [1.0, {str(file): [5, 6]}], "second": [2.0, {str(file): [12]}]}))
    paths[1].write_text(json.dumps({"third": [3.0, {"other": [5]}]}))
    recorded = mutate_python.Recorded({str(file): [2, 4]}, paths)
    module = mutate_python.Module.__new__(mutate_python.Module)
    module.file, module.lines = file, mutate_python.statement_lines(MODULE)
    for imported in (True, False):
        assert recorded.tests_of(module, 6, imported) == {"first": 1.0}
    assert recorded.tests_of(module, 2, imported=True) == {"first": 1.0, "second": 2.0}
    assert recorded.tests_of(module, 2, imported=False) == {}
    recorded.seconds = {
        "tests/maxsim/test_forward.py::f": 1.0,
        "tests/maxsim/test_forward.py::g[1]": 2.0,
        "t": 3.0,
    }
    assert list(recorded.of_files("forward")) == [
        "tests/maxsim/test_forward.py::f",
        "tests/maxsim/test_forward.py::g[1]",
    ]
