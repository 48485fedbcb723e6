"""tools/code_for.py: what a CUDA source is not compiled for, no plan takes there."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import code_for  # noqa: E402

ALL = ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_100", "sm_120", "compute_90"]
SOURCES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cu")]


@pytest.mark.parametrize(
    ("source", "codes"),
    [
        ("csrc/cuda/forward/sm90_q/instances/bf16.cu", ["sm_90a"]),
        ("csrc/cuda/pairs/instances/sm90_d_fp16.cu", ["sm_90a"]),
        ("csrc/cuda/smooth/sm90/instances/fp16.cu", ["sm_90a"]),
        ("csrc/cuda/forward/sm80_q/instances/e4m3.cu", [code for code in ALL if code != "sm_90a"]),
        ("csrc/cuda/smooth/sm80/instances/bf16.cu", ["sm_75", "sm_80", *ALL[4:]]),
        ("csrc/cuda/forward/sm80_q/instances/bf16_16.cu", [code for code in ALL if code != "sm_89"]),
        ("csrc/cuda/forward/sm80_d/instances/fp16_16.cu", [code for code in ALL if code != "sm_89"]),
        ("csrc/cuda/forward/sm80/instances/fp32.cu", [code for code in ALL if code != "sm_89"]),
        ("csrc/cuda/backward/gathered_grad_q/instances/bf16.cu", ["sm_80", *ALL[3:]]),
    ],
)
def test_the_code_of_a_source(source, codes):
    assert (ROOT / source).is_file()
    assert code_for.needed(source, ALL) == codes


@pytest.mark.parametrize("alone", ALL)
def test_a_build_for_one_gpu_compiles_every_source_for_it(alone):
    assert all(code_for.needed(source, [alone]) == [alone] for source in SOURCES)


def test_kernels_of_wgmma_alone_are_those_without_others():
    """Each source that is left out has wgmma, or lies with kernels that have it."""
    for source in SOURCES:
        if code_for.needed(source, ALL) == ["sm_90a"]:
            text = (ROOT / source).read_text()
            assert re.search(r"sm90|[Ww]gmma|product", text + source) and "sm80" not in text


def test_the_command_of_a_source():
    flags = [f"-gencode=arch=compute_{code.split('_')[1]},code={code}" for code in ALL]
    source = "/checkout/csrc/cuda/forward/sm90_d/instances/int8.cu"
    command = ["nvcc", "-MD", "-c", source, "-o", "int8.o", *flags, "-O3"]
    kept = code_for.without_unneeded(command)
    assert kept == [*command[:6], "-gencode=arch=compute_90a,code=sm_90a", "-O3"]


def test_instances_are_merged_for_a_wheel(tmp_path):
    """Every source is compiled once, by itself or with others that are compiled for the same GPUs."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    wanted = ("with_instances_merged", "merged")
    code = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    setup = {"ROOT": ROOT, "BUILD": tmp_path, "Path": Path, "re": re, "os": os, "sys": sys}
    exec(compile(ast.Module(code, []), "setup.py", "exec"), setup)
    found = []
    for name in setup["with_instances_merged"](SOURCES, ALL):
        path = Path(os.path.abspath(ROOT / name))
        included = (
            re.findall(r'^#include "(.+)"$', path.read_text(), re.M) if tmp_path in path.parents else []
        )
        group = [Path(source).relative_to(ROOT).as_posix() for source in included] or [name]
        found += group
        codes = code_for.needed(str(path), ALL)
        assert all(code_for.needed(source, ALL) == codes for source in group), name
        defined = re.findall(r"^#define \w+ (\w+)$", path.read_text(), re.M) if included else []
        assert len(defined) == len(set(defined))
    assert sorted(found) == sorted(SOURCES)
    assert sum(name not in SOURCES for name in setup["with_instances_merged"](SOURCES, ALL)) > 10
