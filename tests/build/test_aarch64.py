"""The CPU kernels of aarch64: cross-compiled, and run on emulated CPUs with and without their instructions.

tests/cpp/test_isa.cpp needs no PyTorch, so that a static program of it runs under qemu-user in a second.
tests/emulated.py runs the tests from Python.
"""

import shutil
import zipfile

import pytest
import torch

import late_interaction as li
from tests.support.programs import ROOT, printed

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
SOURCES = ["aarch64/neon", "aarch64/neon_dotprod", "aarch64/neon_bf16", "portable"]
CHOSEN = {"cortex-a72": "neon", "neoverse-n1": "neon_dotprod", "max": "neon_bf16"}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if not shutil.which(COMPILER):
        pytest.skip(f"no {COMPILER} is here: apt-get install g++-aarch64-linux-gnu")
    built = tmp_path_factory.mktemp("aarch64") / "test_isa"
    sources = ["tests/cpp/test_isa.cpp", "csrc/cpu/dispatch.cpp"]
    sources += [f"csrc/cpu/isa/{name}.cpp" for name in SOURCES]
    flags = ["-O0", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-static"]
    printed(COMPILER, *flags, *sources, "-o", built, cwd=ROOT)
    return built


@pytest.mark.parametrize("cpu", CHOSEN)
def test_kernels_run_on_an_emulated_cpu(program, cpu):
    if not shutil.which(EMULATOR):
        pytest.skip(f"no {EMULATOR} is here: apt-get install qemu-user")
    said = printed(EMULATOR, "-cpu", cpu, program, CHOSEN[cpu])
    assert f"chosen: {CHOSEN[cpu]}\n" in said and f"{CHOSEN[cpu]}: checked" in said


SCORES = """
import sys, torch, late_interaction as li
Q, D = torch.load(sys.argv[1])
torch.save((li.maxsim(Q, D), li.maxsim(Q.bfloat16(), D.bfloat16())), sys.argv[2])
"""


def test_the_wheel_scores_as_here(tmp_path):
    """The wheel for aarch64, in an emulated interpreter with PyTorch's own wheel."""
    python = ROOT / ".venv/env/aarch64/root/usr/bin/python"
    wheels = sorted(ROOT.glob("dist/late_interaction-*+cpu-*_aarch64.whl"))
    if not python.exists() or not wheels:
        pytest.skip("no wheel for aarch64 is here: make aarch64-wheel")
    zipfile.ZipFile(wheels[-1]).extractall(tmp_path / "installed")
    given, told = tmp_path / "given.pt", tmp_path / "told.pt"
    torch.manual_seed(0)
    Q, D = torch.randn(3, 7, 40), torch.randn(5, 11, 40)
    torch.save((Q, D), given)
    variables = {"PYTHONPATH": tmp_path / "installed"}
    printed(python, "-c", SCORES, given, told, cwd=tmp_path, variables=variables)
    wanted = li.maxsim(Q, D), li.maxsim(Q.bfloat16(), D.bfloat16())
    for theirs, ours in zip(torch.load(told), wanted, strict=True):
        torch.testing.assert_close(theirs, ours)
