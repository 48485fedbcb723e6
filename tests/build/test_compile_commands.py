"""make compile_commands: an editor is told of every unit, in commands that its compiler understands."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.build.fakes import fake_toolkit
from tools import compile_commands

ROOT = Path(__file__).resolve().parents[2]
UNITS = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".cu")}


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """{unit: command}, where nvcc is one that cannot compile: nothing is built."""
    folder = tmp_path_factory.mktemp("compile_commands")
    toolkit = Path(fake_toolkit(folder / "cuda", "13.0"))
    (toolkit / "include").mkdir()
    (toolkit / "include" / "cuda_runtime.h").touch()
    environment = {name: value for name, value in os.environ.items() if "CUDA" not in name}
    subprocess.run(
        [sys.executable, "tools/compile_commands.py", "--output", folder / "out.json"],
        cwd=ROOT,
        env=environment | {"CUDA_HOME": str(toolkit)},
        check=True,
        capture_output=True,
    )
    entries = json.loads((folder / "out.json").read_text())
    assert {entry["directory"] for entry in entries} == {str(ROOT)}
    assert len({entry["file"] for entry in entries}) == len(entries)
    return {entry["file"]: shlex.split(entry["command"]) for entry in entries}


def test_every_unit_of_csrc_is_listed(listed):
    assert {unit.split("/")[-1].rsplit(".")[-1] for unit in UNITS} == {"cpp", "cu"}
    assert {unit for unit in listed if unit.startswith("csrc/")} == UNITS
    assert "tests/cpp/test_plan.cpp" in listed


def test_cuda_units_are_commands_of_clang(listed):
    for unit, command in listed.items():
        assert command[-2:] == ["-c", unit]
        assert ("--cuda-gpu-arch=sm_90a" in command) == unit.endswith(".cu")
        assert ("-DLATE_INTERACTION_SM90A" in command) == unit.startswith("csrc/cuda/")
        # Words of nvcc alone, which clangd would refuse.
        assert not any(word.startswith(("--expt", "-Xptxas", "-gencode", "-Werror")) for word in command)


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
@pytest.mark.parametrize("unit", ["csrc/plan/plaid.cpp", "csrc/ops.cpp"])
def test_a_command_compiles_its_unit(unit, listed):
    run = subprocess.run([*listed[unit], "-fsyntax-only"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_without_a_toolkit_the_cuda_units_are_listed_too():
    flags = {"cpu": ["-std=c++20"]}
    unit = next(unit for unit in compile_commands.units() if unit.suffix == ".cu")
    assert "-nocudainc" in compile_commands.command(unit, flags)
    assert {str(unit) for unit in compile_commands.units()} >= UNITS
