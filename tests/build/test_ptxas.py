"""What ptxas reported when the CUDA library was built: no kernel spills registers or waits for each wgmma."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOGS = (Path(sys.prefix) / "build" / "ptxas.log", ROOT / "build" / "ptxas.log")


def spilling_kernels(log):
    """ "kernel, architecture: what it spills" for every function that ptxas reports spills of."""
    found, where = [], "?"
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            where = f"{match[1]}, {match[2]}"
        match = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if match and match.groups() != ("0", "0"):
            found.append(f"{where}: {match[0]}")
    return found


def test_the_parser_sees_a_spill():
    log = """
ptxas info    : Compiling entry function 'lean' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'fat' for 'sm_90a'
    24 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
"""
    assert spilling_kernels(log) == ["fat, sm_90a: 20 bytes spill stores, 24 bytes spill loads"]


@pytest.fixture
def log():
    library = ROOT / "late_interaction" / "_cuda.abi3.so"
    found = [path for path in LOGS if path.exists()]
    if not library.exists() or not found:
        pytest.skip("no CUDA library was built here (no nvcc)")
    return found[0].read_text()


def test_no_kernel_spills(log):
    assert "Compiling entry function" in log
    assert spilling_kernels(log) == []


def test_no_wgmma_is_serialized(log):
    assert [line for line in log.splitlines() if "wgmma" in line and "serialized" in line] == []
