"""No shipped kernel spills registers: read from what ptxas reported when the CUDA library was built."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOGS = (Path(sys.prefix) / "build" / "ptxas.log", ROOT / "build" / "ptxas.log")


def spilling_kernels(log: str) -> list[str]:
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


def test_no_kernel_spills():
    library = ROOT / "late_interaction" / "_cuda.abi3.so"
    log = next((log for log in LOGS if log.exists()), None)
    if not library.exists() or log is None:
        pytest.skip("no CUDA library was built here (no nvcc)")
    text = log.read_text()
    assert "Compiling entry function" in text
    assert spilling_kernels(text) == []
