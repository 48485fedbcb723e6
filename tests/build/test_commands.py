"""The commands of the Makefile: before a commit, in CI and by hand the same checks run."""

import re
import shutil

import pytest

from tests.support.programs import ROOT, printed

MAKEFILE = (ROOT / "Makefile").read_text()
if not (ROOT / ".pre-commit-config.yaml").exists():
    pytest.skip("not a git checkout: a source distribution has no hooks", allow_module_level=True)
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()


def prerequisites(target):
    """What a rule of the Makefile names after its colon, order-only ones aside."""
    rules = re.findall(rf"^{target}:((?!.*:?=)[^|\n]*)", MAKEFILE, re.MULTILINE)
    assert rules, f"no rule for {target}"
    return [name for rule in rules for name in rule.split()]


def recipes(*targets):
    """The commands that make would run for targets."""
    if not shutil.which("make"):
        pytest.skip("no make")
    said = printed("make", "--no-print-directory", "--dry-run", "--always-make", *targets, cwd=ROOT)
    return [line for line in said.splitlines() if "pip install" not in line and "touch" not in line]


def hooks():
    return re.findall(r"^ +entry: make --no-print-directory (\S+)$", HOOKS, re.MULTILINE)


def test_the_hooks_are_the_parts_of_lint_and_types():
    assert hooks() == [*prerequisites("lint"), "types"]
    assert hooks() == re.findall(r"^ +- id: (\S+)$", HOOKS, re.MULTILINE)
    assert "pass_filenames: true" not in HOOKS and HOOKS.count("pass_filenames: false") == len(hooks())


def test_the_hooks_run_the_commands_of_lint_and_types():
    checks = recipes("lint", "types")
    for tool in ("ruff check", "ruff format --check", "clang-format", "actionlint", "test_includes", "mypy"):
        assert any(tool in line for line in checks), tool
    assert recipes(*hooks()) == checks


def test_ci_runs_them_too():
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make ci </dev/null")
    assert {"lint", "types", "ctest", "site"} <= set(prerequisites("checks"))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert workflow.count("run: .ci/run") == 2


def test_ci_runs_what_make_test_runs_and_then_the_rest():
    test, ci = recipes("test"), recipes("ci")
    assert "pytest" in test[-1] and test[-1].endswith("--stage test")
    assert ci[: len(test)] == test
    assert "pytest" in ci[-1] and ci[-1].endswith("--stage ci")
    assert sum("setup.py" in line for line in test) == 1 and sum("setup.py" in line for line in ci) == 2


def test_every_target_is_in_the_help_at_the_head():
    (phony,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    head = MAKEFILE[: MAKEFILE.index("PYTHON ?=")]
    parts = set(prerequisites("lint"))
    for target in set(phony.replace("\\", "").split()) - parts:
        assert re.search(rf"\b{target}\b", head), target
