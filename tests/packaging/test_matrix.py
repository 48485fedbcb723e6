"""The program that tries a release's files in many environments (matrix.py) says what it did not try."""

import sys

import pytest

from tests.support.programs import ROOT, printed, python

PACKAGING = ROOT / "tests" / "packaging"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--python", "3.99", "--torch", "2.10"], "0 passed, 0 failed, 1 skipped"),
        (["--env", sys.executable], "0 passed, 1 failed, 0 skipped"),  # there is no such file
    ],
)
def test_it_fails_when_nothing_passed(words, said, tmp_path):
    file = tmp_path / "late_interaction-1-py3-none-any.whl"
    run = python(PACKAGING / "matrix.py", file, *words, timeout=300)
    assert (run.returncode, run.stdout.splitlines()[-1]) == (1, said)


def test_the_smoke_test_passes_here():
    """On the libraries that were just built."""
    said = printed(sys.executable, PACKAGING / "smoke.py", variables={"PYTHONPATH": ROOT})
    assert said.startswith("ok: late_interaction")
