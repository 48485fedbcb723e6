"""Builds the two libraries of late_interaction through torch.utils.cpp_extension.

late_interaction/_C.abi3.so     operators and CPU kernels; links libtorch_cpu and libc10
late_interaction/_cuda.abi3.so  CUDA kernels; built where nvcc is found, links no CUDA part of PyTorch

Both use PyTorch's stable ABI and Python's limited API: one build serves every torch >= 2.10 and
Python >= 3.10, and the CUDA library builds on a machine without a GPU, against a CPU build of PyTorch.

Environment:
  LATE_INTERACTION_WITH_CUDA      0: never build _cuda; 1: fail without it; unset: build it if nvcc is found
  LATE_INTERACTION_CUDA_ARCHS     default "8.0;8.6;8.9;9.0a;9.0+PTX"; "9.0a" makes a quick build for one GPU
  LATE_INTERACTION_LOCAL_VERSION  local version of a wheel, such as "cu130" or "cpu"
  CUDA_HOME or CUDA_PATH          the CUDA toolkit; else nvcc on PATH, else /usr/local/cuda
  MAX_JOBS                        compilers at a time; default: the CPUs this process may use
"""

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 10)
DEFAULT_ARCHS = "8.0;8.6;8.9;9.0a;9.0+PTX"

# Objects belong to the PyTorch they were compiled against, so they live with the environment that holds it
# where that is in the checkout (.venv/build), else in build/.
BUILD = (Path(sys.prefix) if Path(sys.prefix).is_relative_to(ROOT) else ROOT) / "build"


def stop(sentence):
    raise SystemExit(f"late_interaction: {sentence}")


try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    stop("building needs torch >= 2.10 in this environment; install it, or build with pip's build isolation.")

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
    stop(f"building needs torch >= 2.10, found {torch.__version__}.")


def sources(*patterns):
    found = {path.relative_to(ROOT) for pattern in patterns for path in (ROOT / "csrc").glob(pattern)}
    return sorted(str(path) for path in found)


PLAN = [name for name in sources("plan/*.cpp") if not name.endswith("bindings.cpp")]
CPU_SOURCES = ["csrc/ops.cpp", *PLAN, *sources("cpu/**/*.cpp")]
CUDA_SOURCES = sources("cuda/**/*.cu", "cuda/**/*.cpp")

# A library that lists the symbols it misses fails here, not at a user's first import.
LINK_FLAGS = ["-Wl,--no-undefined"]
DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
HOST_FLAGS = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-fvisibility-inlines-hidden", *DEFINES]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# PyTorch's headers as system headers: our warnings are for our code.
TORCH_INCLUDES = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]


class Toolkit:
    """A CUDA toolkit: its root and its version, both asked of nvcc itself (which may be a wrapper script)."""

    def __init__(self, nvcc):
        self.nvcc = nvcc
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        match = re.search(r"release (\d+\.\d+)", version)
        if not match:
            stop(f"{nvcc} --version names no CUDA release.")
        self.version = match.group(1)
        plan = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull], capture_output=True, text=True
        ).stderr
        top = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)
        self.root = Path(top.group(1) if top else Path(nvcc).parent.parent).resolve()

    @property
    def library_dir(self):
        for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            if (self.root / name / "libcudart_static.a").exists():
                return str(self.root / name)
        stop(f"the CUDA toolkit at {self.root} has no libcudart_static.a.")


def find_toolkit():
    """The toolkit to build with, or None where the CPU library alone is built."""
    wanted = os.environ.get("LATE_INTERACTION_WITH_CUDA", "")
    if wanted not in ("", "0", "1"):
        stop(f"LATE_INTERACTION_WITH_CUDA must be 0 or 1, got {wanted!r}.")
    if wanted == "0" or not CUDA_SOURCES:
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.access(nvcc, os.X_OK):
        if home:
            stop(f"CUDA_HOME or CUDA_PATH is {home}, but {nvcc} is not there; correct it or unset it.")
        if wanted == "1":
            stop("LATE_INTERACTION_WITH_CUDA=1, but no nvcc was found; put it on PATH or set CUDA_HOME.")
        return None
    toolkit = Toolkit(nvcc)
    built_for = torch.version.cuda
    if built_for and built_for.split(".")[0] != toolkit.version.split(".")[0]:
        stop(
            f"nvcc {toolkit.version} ({nvcc}) does not fit this PyTorch, built for CUDA {built_for}: set"
            f" CUDA_HOME to a CUDA {built_for.split('.')[0]} toolkit, or LATE_INTERACTION_WITH_CUDA=0 for CPU"
            " alone."
        )
    return toolkit


def arch_flags():
    plain, flags = {}, []
    for arch in re.split(r"[;,\s]+", os.environ.get("LATE_INTERACTION_CUDA_ARCHS") or DEFAULT_ARCHS):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
        if not match:
            stop(f"LATE_INTERACTION_CUDA_ARCHS is like {DEFAULT_ARCHS!r}, got {arch!r} in it.")
        major, minor, feature, ptx = match.groups()
        name = f"{'compute' if ptx else 'sm'}_{major}{minor}{feature}"
        if feature or ptx:
            flags.append(f"-gencode=arch=compute_{major}{minor}{feature},code={name}")
        else:
            plain.setdefault(major, []).append(name)
    # csrc asks nothing that GPUs of one generation answer differently: the slower half of the compiler runs
    # once, for the oldest.
    for names in plain.values():
        names.sort()
        flags.append(f"-gencode=arch={names[0].replace('sm', 'compute')},code=[{','.join(names)}]")
    return flags


def cpu_extension():
    ext = cpp_extension.CppExtension(
        "late_interaction._C",
        CPU_SOURCES,
        py_limited_api=True,
        extra_compile_args={"cxx": [*HOST_FLAGS, *WARNINGS, *TORCH_INCLUDES]},
        extra_link_args=[*LINK_FLAGS],
    )
    ext.libraries = ["torch_cpu", "c10"]
    return ext


def cuda_extension(toolkit):
    # CppExtension, not CUDAExtension: that one would link libtorch_cuda and the shared cudart.
    nvcc_flags = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "--threads=2", "-Xptxas=-v", *DEFINES]
    nvcc_flags += ["-Xcompiler=-g0,-fvisibility=hidden,-fvisibility-inlines-hidden", "--Werror=all-warnings"]
    nvcc_flags += [f"-Xcompiler={','.join(WARNINGS)}", *arch_flags(), *TORCH_INCLUDES]
    host_flags = [*HOST_FLAGS, *WARNINGS, *TORCH_INCLUDES, "-isystem", str(toolkit.root / "include")]
    if any("sm_90a" in flag for flag in nvcc_flags):  # else its kernels are empty, and must not be chosen
        host_flags.append("-DLATE_INTERACTION_SM90A")
    ext = cpp_extension.CppExtension(
        "late_interaction._cuda",
        [*CUDA_SOURCES, *PLAN],
        py_limited_api=True,
        extra_compile_args={"cxx": host_flags, "nvcc": nvcc_flags},
        extra_link_args=[*LINK_FLAGS],
    )
    ext.library_dirs.append(toolkit.library_dir)
    ext.libraries = ["torch_cpu", "c10", "cudart_static", "dl", "rt", "pthread"]
    return ext


class BuildPython(build_py):
    def run(self):
        # A wheel packs all of build_lib, so nothing of an earlier build, such as its _cuda, may stay there.
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildLibraries(cpp_extension.BuildExtension):
    toolkit = None

    def run(self):
        compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
        if not shutil.which(compiler):
            stop(f"no C++ compiler: {compiler!r} is not on PATH; install g++ 11 or clang 14, or set CXX.")
        # ninja from PyPI lies beside the interpreter, which need not be on PATH.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if not cpp_extension.is_ninja_available():
            stop("building needs ninja: pip install ninja.")
        os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        if self.toolkit:
            self.use_toolkit(self.toolkit)
        # In every kind of build, of which setuptools gives some a temporary folder.
        self.build_temp = str(BUILD / "objects")
        base = Path(self.build_temp)
        base.mkdir(parents=True, exist_ok=True)
        with open(base / ".lock", "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()

    def use_toolkit(self, toolkit):
        cpp_extension.CUDA_HOME = str(toolkit.root)
        # Under a CPU build of PyTorch cpp_extension would leave out nvcc's dependency files.
        torch.version.cuda = torch.version.cuda or toolkit.version
        nvcc = os.environ.get("PYTORCH_NVCC") or shlex.quote(str(toolkit.root / "bin" / "nvcc"))
        # The interpreter's real path: the same command from pip and from make, so that neither builds again.
        report = [os.path.realpath(sys.executable), str(ROOT / "tools" / "nvcc_report.py")]
        os.environ["PYTORCH_NVCC"] = f"{shlex.join(report)} {nvcc}"

    def build_extension(self, ext):
        # A folder each: both libraries compile csrc/plan, with flags of their own.
        base, self.build_temp = self.build_temp, str(Path(self.build_temp) / ext.name)
        os.makedirs(self.build_temp, exist_ok=True)
        try:
            super().build_extension(ext)
            if ext.name.endswith("_cuda"):
                write_ptxas_log(Path(self.build_temp), BUILD / "ptxas.log")
        finally:
            self.build_temp = base


def write_ptxas_log(objects, log):
    """All of ptxas's resource reports (registers, spills) in one file, for tests/build/test_ptxas.py."""
    reports = [objects / Path(source).with_suffix(".o.ptxas") for source in CUDA_SOURCES]
    log.write_text("".join(report.read_text() for report in reports if report.exists()))


BuildLibraries.toolkit = find_toolkit()

BUILD.mkdir(parents=True, exist_ok=True)
version = (ROOT / "VERSION").read_text().strip()
if local := os.environ.get("LATE_INTERACTION_LOCAL_VERSION"):
    version += f"+{local}"

setup(
    version=version,
    ext_modules=[
        cpu_extension(),
        *([cuda_extension(BuildLibraries.toolkit)] if BuildLibraries.toolkit else []),
    ],
    cmdclass={"build_py": BuildPython, "build_ext": BuildLibraries},
    options={
        "bdist_wheel": {"py_limited_api": "cp310"},
        "build": {"build_base": str(BUILD)},
        "egg_info": {"egg_base": str(BUILD)},
    },
)
