"""What keeps setup.py from building is said in one sentence, not in a traceback."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Enough of a torch for setup.py to look at: quick to import, of any version.
TORCH = """
import types
__version__ = "{version}"
version = types.SimpleNamespace(cuda={cuda!r})
"""
CPP_EXTENSION = """
import types
class BuildExtension:
    pass
def include_paths():
    return []
def CppExtension(name, sources, **options):
    return types.SimpleNamespace(name=name)
"""


def build(tmp_path, version="2.10.0", cuda=None, **environment):
    package = tmp_path / "site" / "torch"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").write_text(TORCH.format(version=version, cuda=cuda))
    (package / "utils" / "__init__.py").write_text("")
    (package / "utils" / "cpp_extension.py").write_text(CPP_EXTENSION)
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")} | environment,
        capture_output=True,
        text=True,
    )


def sentence(run):
    lines = run.stderr.strip().splitlines()
    assert run.returncode and len(lines) == 1 and lines[0].startswith("late_interaction: "), run.stderr
    return lines[0]


def fake_toolkit(folder, release):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return str(folder)


def test_too_old_torch(tmp_path):
    assert "torch >= 2.10, found 2.9.1" in sentence(build(tmp_path, version="2.9.1"))


def test_wrong_nvcc(tmp_path):
    if not list((ROOT / "csrc" / "cuda").rglob("*.cu")):
        pytest.skip("no CUDA sources")
    home = fake_toolkit(tmp_path / "cuda", "12.8")
    said = sentence(build(tmp_path, cuda="13.0", CUDA_HOME=home))
    assert "nvcc 12.8" in said and "built for CUDA 13.0" in said and "LATE_INTERACTION_WITH_CUDA=0" in said


def test_cuda_home_without_nvcc(tmp_path):
    assert "nvcc is not there" in sentence(build(tmp_path, CUDA_HOME=str(tmp_path / "nothing")))


def test_cuda_demanded_but_no_nvcc(tmp_path):
    if os.access("/usr/local/cuda/bin/nvcc", os.X_OK):
        pytest.skip("nvcc is in its default place")
    environment = {"LATE_INTERACTION_WITH_CUDA": "1", "PATH": "/nowhere", "CUDA_HOME": "", "CUDA_PATH": ""}
    assert "no nvcc was found" in sentence(build(tmp_path, **environment))


@pytest.mark.parametrize(
    ("name", "value"), [("LATE_INTERACTION_WITH_CUDA", "yes"), ("LATE_INTERACTION_CUDA_ARCHS", "sm_90")]
)
def test_bad_variable(tmp_path, name, value):
    home = fake_toolkit(tmp_path / "cuda", "13.0")
    said = sentence(build(tmp_path, **{"CUDA_HOME": home, name: value}))
    assert name in said and repr(value) in said


def test_missing_compiler():
    """Against the torch that is installed: this one is found out when the build starts."""
    run = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext"],
        cwd=ROOT,
        env=os.environ | {"CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
    )
    assert run.returncode and run.stderr.strip().splitlines()[-1].startswith(
        "late_interaction: no C++ compiler"
    )
