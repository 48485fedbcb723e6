"""Every host source compiles against the headers of every PyTorch that it is meant for.

setup.py builds against the PyTorch that is there, so a name that only newer headers have turns users of older
releases away. The headers are fetched once (torch_headers.py).
"""

import ast
import concurrent.futures
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.build.torch_headers import UnreachableError, headers

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ("2.10.0", "2.11.0", "2.12.0", "newest")
BINDINGS = ROOT / "csrc" / "plan" / "bindings.cpp"  # of the planner alone: includes no PyTorch
SOURCES = sorted(path for path in (ROOT / "csrc").rglob("*.cpp") if path != BINDINGS)
WORKERS = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def flags_of_setup():
    """DEFINES and WARNINGS as setup.py sets them, without running it."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return [*ast.literal_eval(values["DEFINES"]), *ast.literal_eval(values["WARNINGS"])]


def cuda_headers():
    """The CUDA toolkit's include folder, or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        homes.append(str(Path(nvcc).resolve().parents[1]))
    found = (Path(home, "include") for home in homes if home)
    return next((path for path in found if (path / "cuda_runtime.h").exists()), None)


def errors(source, include, cuda):
    system = [word for folder in (include, cuda) if folder for word in ("-isystem", str(folder))]
    compiler = os.environ.get("CXX", "c++").split()
    command = [*compiler, "-fsyntax-only", "-std=c++20", "-fvisibility=hidden", *flags_of_setup(), *system]
    run = subprocess.run([*command, str(source)], capture_output=True, text=True)
    return run.stderr if run.returncode else ""


def errors_of_all(sources, include, cuda):
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        return "".join(pool.map(lambda source: errors(source, include, cuda), sources))


@pytest.fixture
def include(release):
    try:
        return headers(release)
    except UnreachableError as error:
        pytest.skip(f"no headers of PyTorch {release}: {error}")


@pytest.mark.parametrize("release", RELEASES)
def test_host_sources_compile(release, include):
    cuda = cuda_headers()
    sources = [path for path in SOURCES if cuda or "cuda" not in path.parts]
    assert len(sources) > 15
    assert errors_of_all(sources, include, cuda) == ""


@pytest.mark.parametrize("release", RELEASES[:1])
def test_a_newer_name_is_found(release, include, tmp_path):
    source = tmp_path / "newer.cpp"
    source.write_text(
        "#include <torch/csrc/stable/library.h>\n"
        "void f() { STABLE_TORCH_ERROR_CODE_CHECK(TORCH_SUCCESS); }  // of 2.13 and newer\n"
    )
    assert "STABLE_TORCH_ERROR_CODE_CHECK" in errors(source, include, None)
