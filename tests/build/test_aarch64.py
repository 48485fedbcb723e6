"""The CPU kernels of aarch64: cross-compiled, and run on emulated CPUs with and without their instructions.

tests/cpp/test_isa.cpp needs no PyTorch, so that a static program of it runs under qemu-user in a second.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    subprocess.run([COMPILER, *flags, *sources, "-o", built], cwd=ROOT, check=True)
    return built


@pytest.mark.parametrize("cpu", CHOSEN)
def test_kernels_run_on_an_emulated_cpu(program, cpu):
    if not shutil.which(EMULATOR):
        pytest.skip(f"no {EMULATOR} is here: apt-get install qemu-user")
    command = [EMULATOR, "-cpu", cpu, program, CHOSEN[cpu]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"chosen: {CHOSEN[cpu]}\n" in done.stdout
    assert f"{CHOSEN[cpu]}: checked" in done.stdout
