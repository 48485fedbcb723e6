"""The microbenchmark of an epilogue that overlaps wgmma is run by hand on a GPU; here it is compiled."""

import shutil

import pytest

from tests.support.programs import ROOT, printed


def test_it_compiles(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    source = ROOT / "bench" / "tuning" / "epilogue_overlap.cu"
    asked = [line.strip("/ \n") for line in source.read_text().splitlines() if "nvcc" in line]
    command = asked[0].split()
    command[0], command[-1] = nvcc, str(tmp_path / "epilogue_overlap")
    printed(*command, "--Werror=all-warnings", cwd=ROOT)
