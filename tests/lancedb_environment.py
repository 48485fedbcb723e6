"""The environments of `make lancedb` (lancedb, pyarrow, qdrant-client and faiss-cpu beside the packages of
.venv) and of `make ray` (ray and pyarrow)."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ENVIRONMENTS = Path(sys.prefix) / "env"


def here(*packages):
    """Whether all of these can be imported here."""
    return all(find_spec(package) is not None for package in packages)


def run_there(*tests, environment="lancedb"):
    """Runs these files, or tests of them, in an environment. Skips where it is not there."""
    there = ENVIRONMENTS / environment
    if not (there / ".installed").exists():
        pytest.skip(f"{there} is not there: make {environment} makes it")
    command = [there / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout and "failed" not in result.stdout, result.stdout
