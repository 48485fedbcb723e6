"""make quick leaves out parameter sets, not behaviours: each function and each operator stays in it."""

import ast
import re
from pathlib import Path

import pytest
import torch

import late_interaction as li
from tests import selection

ROOT = Path(__file__).resolve().parents[2]


def test_a_function_keeps_its_first_and_its_last_case():
    cases = [f"tests/test_x.py::test_a[{i}]" for i in range(7)]
    assert selection.quick([*cases, "tests/test_x.py::test_b"]) == {
        cases[0],
        cases[6],
        "tests/test_x.py::test_b",
    }
    assert (
        selection.quick(["tests/bench/test_bench.py::test_a", "tests/packaging/test_sdist.py::test_b"])
        == set()
    )
    assert selection.quick(["tests/test_benches.py::test_a"]) == {"tests/test_benches.py::test_a"}


def test_what_is_slow_is_there():
    for name in selection.SLOW:
        assert (ROOT / name.partition("::")[0]).exists(), name


def words(node: ast.AST) -> set[str]:
    """Attributes that code takes and strings that it holds: how a test names an operator."""
    return {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)} | {
        child.value
        for child in ast.walk(node)
        if isinstance(child, ast.Constant) and isinstance(child.value, str)
    }


def named_by_quick_tests() -> set[str]:
    """What the files of the quick tests name, slow test functions aside."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        if selection.is_slow(name) or path == Path(__file__):
            continue
        for part in ast.parse(path.read_text()).body:
            function = part.name if isinstance(part, ast.FunctionDef) else ""
            if not selection.is_slow(f"{name}::{function}"):
                found |= words(part) | {function}
    return found


# Operators that tests call by way of a public function alone, and the test that does.
BY_WAY = {
    "explain_packed_plan": "test_every_packed_plan_can_be_read",
    "explain_residual_plan": "test_compressed_documents_are_explained",
}


def test_every_operator_is_named_in_a_quick_test():
    declared = set(re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc" / "ops.cpp").read_text()))
    assert len(declared) > 30 and declared == selection.operators()
    named = named_by_quick_tests()
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


@pytest.mark.parametrize(("night", "wanted"), [(False, 25), (True, 500)])
def test_a_nightly_run_draws_more_examples(night, wanted, monkeypatch):
    monkeypatch.setattr(selection, "NIGHTLY", night)
    assert selection.examples(25) == wanted
