"""What make test leaves out make ci runs, and every operator has a test."""

import ast
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

import late_interaction as li
from tests import selection
from tests.support.programs import ROOT, python

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests import selection
selection.LEFT_TO_CI["test_slow.py"] = "is slow"
selection.CalledOperators.missing = lambda self: ["maxsim"]
from tests.conftest import *
"""
PARAMETRIZED = """
import pytest
@pytest.mark.parametrize("a", range(6))
@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("e", range(4))
def test_many(a, b, c, e):
    pass
@pytest.mark.parametrize("a", range(24))
def test_few(a):
    pass
@pytest.mark.parametrize(("a", "b"), [(i, 0) for i in range(60)])
def test_one(a, b):
    pass
"""


@pytest.mark.parametrize(("strength", "most"), [(1, 12), (2, 60), (3, 120), (0, 120)])
def test_every_few_values_meet_in_a_parameter_set(strength, most, tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_x.py").write_text(PARAMETRIZED)
    run = python("-m", "pytest", "--collect-only", "-q", f"--strength={strength}", cwd=tmp_path)
    few = re.findall(r"test_few\[(\d+)\]", run.stdout)
    assert len(few) == 24 or strength == 1
    assert run.stdout.count("test_one[") == 60
    sets = [tuple(x) for x in re.findall(r"test_many\[(\d)-(\d-\d)-(\d)\]", run.stdout)]
    assert 0 < len(sets) <= most and (strength or len(sets) == 120), run.stdout
    sizes = (4, 5, 6)
    for places in itertools.combinations(range(3), strength):
        met = {tuple(x[i] for i in places) for x in sets}
        assert len(met) == math.prod(sizes[i] for i in places)


def test_what_is_left_to_ci_is_there():
    for name in selection.LEFT_TO_CI:
        assert (ROOT / name.partition("::")[0]).exists(), name
    assert selection.is_left_to_ci("tests/bench/test_bench.py::test_a[1]")
    assert not selection.is_left_to_ci("tests/benches/test_bench.py::test_a[1]")


TESTS = """
import pathlib, pytest
def test_passes():
    pass
def test_wants_a_file():
    if not pathlib.Path("made").exists():
        pytest.skip("made is not there: make ci makes it")
def test_fails_until_it_is_mended():
    assert pathlib.Path("made").exists()
"""


def staged(folder, stage):
    """Runs the tests of a folder by one worker. Returns what became of each, and what was printed."""
    run = python("-m", "pytest", "-v", "-n", "1", "--stage", stage, cwd=folder)
    became = re.findall(r"^\[gw0\].* ([A-Z]+) \S+::(\w+) *$", run.stdout, re.MULTILINE)
    return {name: result for result, name in became}, run.stdout


def test_what_make_test_does_not_run_make_ci_runs(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers = gpu\n")
    (tmp_path / "test_quick.py").write_text(TESTS)
    (tmp_path / "test_slow.py").write_text("def test_slow(): pass\n")
    ran, said = staged(tmp_path, "test")
    wanted = {"passes": "PASSED", "wants_a_file": "SKIPPED", "fails_until_it_is_mended": "FAILED"}
    assert ran == {f"test_{name}": became for name, became in wanted.items()}
    assert "1 tests skipped: make ci runs them" in said and "without a call: maxsim" in said
    (tmp_path / "made").touch()
    ran, said = staged(tmp_path, "ci")
    assert ran == dict.fromkeys(["test_wants_a_file", "test_fails_until_it_is_mended", "test_slow"], "PASSED")
    assert "1 tests skipped: they passed in make test" in said


def words(node):
    """Functions, attributes that code takes and strings that it holds: how a test names an operator."""
    kinds = {ast.FunctionDef: "name", ast.Attribute: "attr", ast.Constant: "value"}
    found = {getattr(child, kinds[type(child)]) for child in ast.walk(node) if type(child) in kinds}
    return {name for name in found if isinstance(name, str)}


# Operators that tests call by way of a public function alone, and the test that does.
BY_WAY = {
    "explain_packed_plan": "test_the_plan_says_what_stays_in_l2_of_packed_batches",
    "explain_residual_plan": "test_compressed_documents_are_explained",
    # tests/support/operator_calls.py has calls of these, for tests of every operator.
    "maxsim_pairs_packed_weighted_backward": "test_opcheck",
    "maxsim_pairs_packed_weighted_winners": "test_opcheck",
    "maxsim_varlen_weighted_backward": "test_opcheck",
    "maxsim_varlen_weighted_winners": "test_opcheck",
    "maxsim_winners_no_autograd": "test_opcheck",
}


def test_every_operator_is_named_in_a_test():
    assert li.losses  # defines an operator when it is imported
    declared = set(re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc" / "ops.cpp").read_text()))
    for path in (ROOT / "late_interaction").rglob("*.py"):
        declared |= set(re.findall(r'library\.define\(\s*qualified\("(\w+)"', path.read_text()))
    assert len(declared) > 30 and declared == selection.operators()
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    named = set().union(*(words(ast.parse(path.read_text())) for path in paths))
    assert declared - named - BY_WAY.keys() == set()
    assert declared >= BY_WAY.keys() and named >= set(BY_WAY.values())


def test_a_call_is_recorded_and_what_is_not_called_is_missing(monkeypatch):
    for kind in (selection.OpOverload, selection.OpOverloadPacket):
        monkeypatch.setattr(kind, "__call__", kind.__call__)  # and so what it was comes back
    called = selection.CalledOperators()
    called.watch()
    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    li.maxsim_with_winners(Q, D)
    torch.ops.late_interaction.maxsim(Q, D, None, None, True)
    assert called.names == {"maxsim", "maxsim_no_autograd", "maxsim_winners_no_autograd"}
    assert "maxsim_backward" in called.missing() and "maxsim" not in called.missing()
