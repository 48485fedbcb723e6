"""The environment of `make lancedb`: lancedb, pyarrow and qdrant-client beside the packages of .venv."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

THERE = Path(sys.prefix) / "env" / "lancedb"


def here(*packages):
    """Whether all of these can be imported here."""
    return all(find_spec(package) is not None for package in packages)


def run_there(*files):
    """Runs the tests of these files in that environment. Skips where it is not there."""
    if not (THERE / ".installed").exists():
        pytest.skip(f"{THERE} is not there: make lancedb makes it")
    command = [THERE / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout and "failed" not in result.stdout, result.stdout
