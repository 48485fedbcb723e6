"""The program that times folds beside products is compiled here and run by hand on a GPU: it must not rot."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_it_compiles(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    source = ROOT / "bench" / "beside_products.cu"
    asked = [line.strip("/ \n") for line in source.read_text().splitlines() if "nvcc" in line]
    command = asked[0].split()
    command[0], command[-1] = nvcc, str(tmp_path / "beside")
    run = subprocess.run([*command, "--Werror=all-warnings"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
