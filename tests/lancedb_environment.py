"""The environments of `make lancedb` (lancedb, pyarrow, qdrant-client and faiss-cpu beside the packages of
.venv), of `make ray` (ray and pyarrow) and of `make fast-plaid`."""

import importlib.metadata
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ENVIRONMENTS = Path(sys.prefix) / "env"


def here(*packages):
    """Whether all of these can be imported here."""
    return all(find_spec(package) is not None for package in packages)


# pyarrow with its compute functions, or None.
pa = pytest.importorskip("pyarrow.compute") and sys.modules["pyarrow"] if here("pyarrow") else None
needs_pyarrow = pytest.mark.skipif(pa is None, reason="pyarrow is not installed: make lancedb runs these")


def fast_plaid_missing() -> str | None:
    """Why fast-plaid, whose compiled part belongs to one version of PyTorch, cannot run here, or None."""
    try:
        wants = importlib.metadata.requires("fast-plaid") or []
    except importlib.metadata.PackageNotFoundError:
        return "fast-plaid is not installed"
    for requirement in wants:
        found = re.fullmatch(r"torch==([\d.]+)", requirement)
        if found and not torch.__version__.startswith(found.group(1)):
            return f"this fast-plaid is built for torch {found.group(1)}, not {torch.__version__}"
    return None


def run_there(*tests, environment="lancedb"):
    """Runs these files, or tests of them, in an environment. Skips where it is not there."""
    there = ENVIRONMENTS / environment
    if not (there / ".installed").exists():
        pytest.skip(f"{there} is not there: make {environment} makes it")
    command = [there / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout and "failed" not in result.stdout, result.stdout
