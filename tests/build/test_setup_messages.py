"""What setup.py builds, and what keeps it from building, is said in one sentence, not in a traceback."""

import os
import re
import shutil
import sys

import pytest

from tests.build.fakes import fake_toolkit, script
from tests.support.programs import ROOT, python

# Enough of a torch for setup.py to look at: quick to import, of any version, with any GPUs.
TORCH = """
import types
__version__ = "{version}"
version = types.SimpleNamespace(cuda={cuda!r})
cuda = types.SimpleNamespace(
    is_available=lambda: {gpus!r} != [],
    device_count=lambda: len({gpus!r}),
    get_device_capability=lambda i: {gpus!r}[i],
)
"""
# Compiles nothing, and prints what nvcc would have been told. Runs ninja, as cpp_extension does, in the
# folder that the variable NINJA_FOLDER names.
CPP_EXTENSION = """
import os
import subprocess
import types
from setuptools import Extension
from setuptools.command.build_ext import build_ext
class BuildExtension(build_ext):
    def run(self):
        for ext in self.extensions:
            print(ext.name, *ext.flags.get("nvcc", []))
        if folder := os.environ.get("NINJA_FOLDER"):
            subprocess.run(["ninja", "-v"], stdout=1, stderr=subprocess.STDOUT, cwd=folder, check=True)
            print("g++ -O3 -shared objects/a.o objects/b.o -Lflags -o build/_C.abi3.so -ldl")
def is_ninja_available():
    return True
def include_paths():
    return []
def CppExtension(name, sources, extra_compile_args, **options):
    made = Extension(name, sources)
    made.flags = extra_compile_args
    return made
"""


def build(tmp_path, *words, version="2.10.0", cuda=None, gpus=(), root=ROOT, **environment):
    """Runs setup.py with that torch, and without what the environment of the tests says of CUDA."""
    package = tmp_path / "site" / "torch"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").write_text(TORCH.format(version=version, cuda=cuda, gpus=list(gpus)))
    (package / "utils" / "__init__.py").write_text("")
    (package / "utils" / "cpp_extension.py").write_text(CPP_EXTENSION)
    ours = ("LATE_INTERACTION_", "CUDA_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    script(tmp_path / "bin" / "nvidia-smi", "exit 9")  # no driver, whatever this machine has
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    inherited |= {"PYTHONPATH": str(tmp_path / "site"), "PATH": path, **environment}
    command = ("setup.py", "--quiet", "build_ext", "--build-temp", tmp_path / "objects", *words)
    return python(*command, cwd=root, env=inherited)


def error(run):
    lines = run.stderr.strip().splitlines()
    assert run.returncode and len(lines) == 1 and lines[0].startswith("late_interaction: "), run.stderr
    return lines[0]


def choice(run):
    """The sentence that says what is built, and the architectures that nvcc is asked for."""
    assert run.returncode == 0, run.stderr
    (sentence,) = (line for line in run.stdout.splitlines() if line.startswith("late_interaction: "))
    built = [line.split()[0] for line in run.stdout.splitlines() if line.startswith("late_interaction._")]
    archs = re.findall(r"-gencode=arch=compute_\w+,code=(\w+)", run.stdout)
    assert built == (["late_interaction._C", "late_interaction._cuda"] if archs else ["late_interaction._C"])
    return sentence, archs


def test_too_old_torch(tmp_path):
    assert "torch >= 2.10, found 2.9.1" in error(build(tmp_path, version="2.9.1"))


def test_too_old_setuptools(tmp_path):
    package = tmp_path / "site" / "setuptools"
    (package / "command").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "69.5.1"\n')
    (package / "command" / "__init__.py").write_text("")
    (package / "command" / "build_py.py").write_text("class build_py: pass\n")
    assert "setuptools >= 77, found 69.5.1" in error(build(tmp_path))


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_other_systems(tmp_path, platform):
    """Python runs sitecustomize first: it takes away what those systems lack."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import os, sys\nsys.platform = {platform!r}\n"
        "sys.modules['fcntl'] = None\ndel os.sched_getaffinity\n"
    )
    said = error(build(tmp_path))
    assert "Linux alone" in said and platform in said


def test_cuda_demanded_but_no_nvcc(tmp_path):
    if os.access("/usr/local/cuda/bin/nvcc", os.X_OK):
        pytest.skip("nvcc is in its default place")
    environment = {"LATE_INTERACTION_WITH_CUDA": "1", "PATH": "/nowhere", "CXX": sys.executable}
    assert "no nvcc was found" in error(build(tmp_path, **environment))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cuda": "13.0"}, ("nvcc 12.8", "built for CUDA 13.0", "LATE_INTERACTION_WITH_CUDA=0")),
        ({"CUDA_HOME": "/nowhere"}, ("nvcc is not there",)),
        ({"LATE_INTERACTION_WITH_CUDA": "yes"}, ("LATE_INTERACTION_WITH_CUDA", "'yes'")),
        ({"LATE_INTERACTION_CUDA_ARCHS": "sm_90"}, ("LATE_INTERACTION_CUDA_ARCHS", "'sm_90'")),
    ],
    ids=str,
)
def test_another_nvcc_none_and_bad_variables(tmp_path, options, told):
    home = fake_toolkit(tmp_path / "cuda", "12.8")
    said = error(build(tmp_path, **{"gpus": [(9, 0)], "CUDA_HOME": home, **options}))
    assert all(words in said for words in told), said


ALL = ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_100", "sm_120", "compute_90"]


@pytest.mark.parametrize(
    ("gpus", "variables", "archs", "said"),
    [
        ([], {}, [], "LATE_INTERACTION_CUDA_ARCHS=9.0a"),
        ([(7, 0)], {}, [], "no GPU of compute capability 7.5 or newer"),
        ([(7, 5)], {}, ["sm_75"], "for 7.5,"),
        ([(9, 0)], {"WITH_CUDA": "0"}, [], "LATE_INTERACTION_WITH_CUDA=0"),
        ([(9, 0)], {}, ["sm_90a"], "LATE_INTERACTION_CUDA_ARCHS=all"),
        ([(8, 9), (7, 0), (8, 6)], {}, ["sm_80", "sm_89"], "for 8.0;8.9,"),
        ([(9, 0), (8, 6), (9, 0)], {}, ["sm_80", "sm_90a"], "for 8.0;9.0a,"),
        ([(10, 3)], {}, ["sm_100"], "for 10.0,"),
        ([(13, 0)], {}, ["compute_90"], "for 9.0+PTX,"),
        ([], {"WITH_CUDA": "1"}, ALL, "no GPU is here to ask"),
        ([(8, 0)], {"CUDA_ARCHS": "all"}, ALL, "as LATE_INTERACTION_CUDA_ARCHS asks"),
        ([], {"CUDA_ARCHS": "9.0a"}, ["sm_90a"], "as LATE_INTERACTION_CUDA_ARCHS asks"),
        ([(9, 0)], {"CUDA_ARCHS": "8.6, 12.0"}, ["sm_86", "sm_120"], "as LATE_INTERACTION_CUDA_ARCHS asks"),
    ],
)
def test_what_is_built(tmp_path, gpus, variables, archs, said):
    home = fake_toolkit(tmp_path / "cuda", "13.0")
    environment = {f"LATE_INTERACTION_{name}": value for name, value in variables.items()}
    sentence, asked = choice(build(tmp_path, gpus=gpus, CUDA_HOME=home, **environment))
    assert asked == archs
    assert said in sentence


def test_nvidia_smi_is_asked_where_torch_sees_no_gpu(tmp_path):
    script(tmp_path / "bin" / "nvidia-smi", "printf '8.9\\n9.0\\n'")
    home = fake_toolkit(tmp_path / "cuda", "13.0")
    assert choice(build(tmp_path, CUDA_HOME=home))[1] == ["sm_89", "sm_90a"]


def test_a_toolkit_that_knows_no_blackwell_builds_for_every_gpu_before(tmp_path):
    home = fake_toolkit(tmp_path / "cuda", "12.6", archs=(75, 80, 86, 87, 89, 90))
    built = choice(build(tmp_path, LATE_INTERACTION_WITH_CUDA="1", CUDA_HOME=home))[1]
    assert built == [arch for arch in ALL if arch not in ("sm_100", "sm_120")]


@pytest.mark.parametrize(("release", "compressed"), [("12.6", False), ("12.8", True), ("13.0", True)])
def test_machine_code_is_compressed_where_nvcc_can(tmp_path, release, compressed):
    home = fake_toolkit(tmp_path / "cuda", release)
    run = build(tmp_path, LATE_INTERACTION_WITH_CUDA="1", CUDA_HOME=home)
    assert ("--compress-mode=size" in run.stdout.split()) == compressed


def test_a_build_in_place_leaves_no_cuda_library_of_an_earlier_one(tmp_path):
    root = tmp_path / "checkout"
    (root / "late_interaction").mkdir(parents=True)
    for name in ("setup.py", "VERSION", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    libraries = [root / "late_interaction" / name for name in ("_C.abi3.so", "_cuda.abi3.so")]
    for path in libraries:
        path.touch()
    choice(build(tmp_path / "apart", root=root))
    assert [path.exists() for path in libraries] == [True, True]
    choice(build(tmp_path, "--inplace", root=root))
    assert [path.exists() for path in libraries] == [True, False]


def test_missing_compiler(tmp_path):
    said = build(tmp_path, CXX="no-such-compiler").stderr.strip().splitlines()[-1]
    assert said.startswith("late_interaction: no C++ compiler")


COMPILER = """
case "$*" in *broken.cpp*) echo "broken.cpp:1: error: expected a declaration"; exit 1;; esac
"""


@pytest.mark.parametrize("broken", [False, True])
def test_a_build_prints_a_line_for_a_file_and_the_command_of_one_that_fails(tmp_path, broken):
    script(tmp_path / "bin" / "compiler", COMPILER)
    names = [ROOT / "csrc" / "ops.cpp", tmp_path / "a file.cpp"]
    names += [tmp_path / "broken.cpp"] if broken else []
    rule = "rule compile\n  command = compiler -I flags -c -c $in -o $out -Wall\n"
    for name in names[1:]:
        name.touch()
    paths = [str(name).replace(" ", "$ ") for name in names]
    edges = [f"build {number}.o: compile {path}\n" for number, path in enumerate(paths)]
    (tmp_path / "build.ninja").write_text(rule + "".join(edges))
    run = build(tmp_path, NINJA_FOLDER=str(tmp_path))
    lines = run.stdout.splitlines()
    assert sum(line.endswith(" s] csrc/ops.cpp") for line in lines) == 1
    assert sum("a file.cpp" in line and len(line) < len(str(tmp_path)) + 40 for line in lines) == 1
    assert (run.returncode != 0) == broken and ("linking build/_C.abi3.so" in lines) != broken
    command = f"compiler -I flags -c -c {tmp_path}/broken.cpp -o 2.o -Wall"
    assert lines.count(command) == lines.count("broken.cpp:1: error: expected a declaration") == broken
    assert sum("flags" in line for line in lines) == broken
