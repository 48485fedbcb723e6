"""The program that tries a release's files in many environments (matrix.py) says what it did not try."""

import subprocess
import sys
from pathlib import Path

MATRIX = Path(__file__).resolve().parent / "matrix.py"


def matrix(*arguments):
    return subprocess.run(
        [sys.executable, MATRIX, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


def test_it_fails_when_everything_was_skipped(tmp_path):
    run = matrix(tmp_path / "late_interaction-1.whl", "--python", "3.99", "--torch", "2.10")
    assert run.returncode == 1
    assert run.stdout.splitlines()[-1] == "0 passed, 0 failed, 1 skipped"


def test_it_fails_when_a_file_does_not_install(tmp_path):
    run = matrix(tmp_path / "late_interaction-1-py3-none-any.whl", "--env", sys.executable)
    assert run.returncode == 1
    assert run.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
