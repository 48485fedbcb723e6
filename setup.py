"""Builds the two libraries of late_interaction through torch.utils.cpp_extension.

late_interaction/_C.abi3.so     operators and CPU kernels; links libtorch_cpu and libc10
late_interaction/_cuda.abi3.so  CUDA kernels; links no CUDA part of PyTorch

Both use PyTorch's stable ABI and Python's limited API: one build serves every torch >= 2.10 and
Python >= 3.10. The CUDA library is built for the GPUs of this machine; where there is none, only if a
variable asks for it. It needs nvcc, but neither a GPU nor a CUDA build of PyTorch.

Environment:
  LATE_INTERACTION_WITH_CUDA      0: never build _cuda; 1: always, for every GPU where none is here to ask
  LATE_INTERACTION_CUDA_ARCHS     the GPUs of _cuda, such as "9.0a" or "8.0;9.0a"; "all": every one
  LATE_INTERACTION_NAMESPACE      of the operators, torch.ops.<namespace>.*; default: late_interaction.
                                  Libraries of two namespaces load into one process
  LATE_INTERACTION_LOCAL_VERSION  local version of a wheel, such as "cu130" or "cpu"
  LATE_INTERACTION_REPOSITORY     URL of the repository, which the page of a wheel on a package index links to
  CUDA_HOME or CUDA_PATH          the CUDA toolkit; else nvcc on PATH, else /usr/local/cuda
  LATE_INTERACTION_CUDART         the folder of libcudart_static.a, for a machine that the toolkit is not for
  MAX_JOBS                        compilers at a time; default: the CPUs this process may use
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

if sys.platform != "linux":  # before anything is imported that another system lacks
    raise SystemExit(
        f"late_interaction: it builds and runs on Linux alone, and this is {sys.platform}; use a Linux"
        " machine, a container, or WSL 2 on Windows."
    )

import fcntl

import setuptools
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 10)
OLDEST_SETUPTOOLS = 77  # the first that takes the licence of pyproject.toml as an expression (PEP 639)
OLDEST_GPU = (7, 5)
# Machine code for X.0 runs on every X.Y: 8.9 has fp8 beside it. The driver compiles PTX of 9.0 for GPUs that
# are newer than all of these. A toolkit before 12.8 knows none beyond 9.0.
ALL_ARCHS = "7.5;8.0;8.9;9.0a;10.0;12.0;9.0+PTX"
ARCH_SEPARATORS = r"[;,\s]+"

# Objects belong to the PyTorch they were compiled against, so they live with the environment that holds it
# where that is in the checkout (.venv/build), else in build/.
BUILD = (Path(sys.prefix) if Path(sys.prefix).is_relative_to(ROOT) else ROOT) / "build"


def stop(sentence):
    raise SystemExit(f"late_interaction: {sentence}")


if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
    stop(
        f"building needs setuptools >= {OLDEST_SETUPTOOLS}, found {setuptools.__version__}; upgrade it, or"
        " build with pip's build isolation."
    )

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


# The planner, with what each kernel's folder tells it.
PLAN = sources("plan/**/*.cpp", "cuda/forward/**/descriptor*.cpp", "cuda/forward/*_rules.cpp")
PLAN = [name for name in PLAN if not name.endswith("bindings.cpp")]
CPU_SOURCES = ["csrc/ops.cpp", *PLAN, *sources("cpu/**/*.cpp")]
CUDA_SOURCES = sorted({*PLAN, *sources("cuda/**/*.cu", "cuda/**/*.cpp")})

# A library that lists the symbols it misses fails here, not at a user's first import.
LINK_FLAGS = ["-Wl,--no-undefined"]
DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
HOST_FLAGS = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-fvisibility-inlines-hidden", *DEFINES]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# PyTorch's headers as system headers: our warnings are for our code.
TORCH_INCLUDES = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]


def prefix_maps():
    """Flags that cut this machine's folders off the file names that error messages carry."""
    packages = Path(torch.__file__).absolute().parents[1]
    folders = dict.fromkeys([ROOT, packages, packages.resolve()])
    # Of several maps that fit, compilers take the last: the packages may lie in a .venv of the checkout.
    return [f"-ffile-prefix-map={folder}/=" for folder in folders]


HOST_FLAGS += prefix_maps()

# Where operators are registered. Host code alone knows (csrc/common/registration.h): kernels stay the same.
NAMESPACE = os.environ.get("LATE_INTERACTION_NAMESPACE") or "late_interaction"
if not re.fullmatch(r"[A-Za-z]\w*", NAMESPACE, re.ASCII):
    stop(f"LATE_INTERACTION_NAMESPACE must be a name such as late_interaction_v2, got {NAMESPACE!r}.")
if NAMESPACE != "late_interaction":
    HOST_FLAGS.append(f"-DLATE_INTERACTION_NAMESPACE={NAMESPACE}")
# A folder for each namespace, so that builds of two do not compile each other's objects again.
OBJECTS = "objects" if NAMESPACE == "late_interaction" else f"objects-{NAMESPACE}"


# A cross build: nvcc looks for headers of the other machine, which are the same.
CUDART = os.environ.get("LATE_INTERACTION_CUDART", "")


class Toolkit:
    """A CUDA toolkit: its root and its version, both asked of nvcc itself (which may be a wrapper script)."""

    def __init__(self, nvcc):
        self.nvcc = nvcc
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        match = re.search(r"release (\d+\.\d+)", version)
        if not match:
            stop(f"{nvcc} --version names no CUDA release.")
        self.version = match.group(1)
        self.release = tuple(map(int, self.version.split(".")))
        plan = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull], capture_output=True, text=True
        ).stderr
        top = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)
        self.root = Path(top.group(1) if top else Path(nvcc).parent.parent).resolve()

    def known_archs(self):
        """The compute capabilities that this nvcc compiles for: "80", "90", ..."""
        told = subprocess.run(
            [self.nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True
        ).stdout
        return set(re.findall(r"^compute_(\d+)$", told, re.MULTILINE))

    @property
    def library_dir(self):
        if CUDART:
            return CUDART
        for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            if (self.root / name / "libcudart_static.a").exists():
                return str(self.root / name)
        stop(f"the CUDA toolkit at {self.root} has no libcudart_static.a.")


def find_toolkit(required):
    """The toolkit to build with, or None where there is none and none is required."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.access(nvcc, os.X_OK):
        if home:
            stop(f"CUDA_HOME or CUDA_PATH is {home}, but {nvcc} is not there; correct it or unset it.")
        if required:
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


def gpu_capabilities():
    """The compute capabilities of this machine's GPUs, without those too old for the kernels."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        found = [(int(x), int(y)) for x, y in re.findall(r"^(\d+)\.(\d+)\s*$", told, re.MULTILINE)]
    if not found and torch.cuda.is_available():
        found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return sorted({capability for capability in found if capability >= OLDEST_GPU})


def arch_for(capability, known):
    """The architecture for a GPU: code for X.0 runs on every X.Y, and that of 8.9 alone has its fp8."""
    major = capability[0]
    if capability in ((7, 5), (8, 9)):
        return f"{major}.{capability[1]}"
    return "9.0a" if major == 9 else f"{major}.0" if f"{major}0" in known else "9.0+PTX"


def all_archs(known):
    """Those of ALL_ARCHS that nvcc knows."""
    return ";".join(arch for arch in ALL_ARCHS.split(";") if re.sub(r"\D", "", arch) in known)


class Choice(NamedTuple):
    """What is built; without a toolkit, the CPU library alone."""

    sentence: str
    toolkit: Toolkit | None = None
    archs: str = ""


def choose():
    wanted = os.environ.get("LATE_INTERACTION_WITH_CUDA", "")
    asked = os.environ.get("LATE_INTERACTION_CUDA_ARCHS", "")
    if wanted not in ("", "0", "1"):
        stop(f"LATE_INTERACTION_WITH_CUDA must be 0 or 1, got {wanted!r}.")
    if wanted == "0":
        return Choice("building the CPU library alone, as LATE_INTERACTION_WITH_CUDA=0 asks.")
    capabilities = [] if asked else gpu_capabilities()
    if not (wanted or asked or capabilities):
        return Choice(
            "building the CPU library alone, as no GPU of compute capability 7.5 or newer is here;"
            " LATE_INTERACTION_CUDA_ARCHS=9.0a builds the CUDA library for one generation of GPUs,"
            " LATE_INTERACTION_WITH_CUDA=1 for all."
        )
    toolkit = find_toolkit(required=wanted == "1")
    if toolkit is None:
        return Choice(
            "building the CPU library alone, as no nvcc was found; for the CUDA library put it on PATH or set"
            " CUDA_HOME (LATE_INTERACTION_WITH_CUDA=1 stops where there is none)."
        )
    known = toolkit.known_archs()
    if capabilities:
        asked = ";".join(dict.fromkeys(arch_for(capability, known) for capability in capabilities))
        why = "the GPUs of this machine; LATE_INTERACTION_CUDA_ARCHS=all builds for every GPU"
    elif asked:
        why = "as LATE_INTERACTION_CUDA_ARCHS asks"
    else:
        asked = "all"
        why = "as no GPU is here to ask; LATE_INTERACTION_CUDA_ARCHS=9.0a builds for one generation"
    archs = all_archs(known) if asked == "all" else asked
    return Choice(f"building the CPU library, and the CUDA library for {archs}, {why}.", toolkit, archs)


def arch_flags(archs):
    flags = []
    for arch in re.split(ARCH_SEPARATORS, archs):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
        if not match:
            stop(f"LATE_INTERACTION_CUDA_ARCHS is 'all' or like {ALL_ARCHS!r}, got {arch!r} in it.")
        major, minor, feature, ptx = match.groups()
        number = f"{major}{minor}{feature}"
        flags.append(f"-gencode=arch=compute_{number},code={'compute' if ptx else 'sm'}_{number}")
    return flags


def build_cost_flags(toolkit):
    """What changes nvcc's time and the library's size, and no kernel's speed; CMakeLists.txt has the same."""
    flags = ["--threads=2"]
    if toolkit.release >= (12, 8):
        flags.append("--compress-mode=size")
    return flags


def cpu_extension():
    ext = cpp_extension.CppExtension(
        "late_interaction._C",
        CPU_SOURCES,
        py_limited_api=True,
        extra_compile_args={"cxx": [*HOST_FLAGS, *WARNINGS, *TORCH_INCLUDES]},
        extra_link_args=[*LINK_FLAGS],
    )
    ext.libraries = ["torch_cpu", "c10", "dl"]
    return ext


def with_instances_merged(sources, codes):
    """The sources, where those of a folder of instances are included by one that lies in BUILD.

    Each source's code for an architecture is compressed by itself, and that of one kernel for bf16 and for
    fp16 is much alike: together it is a third smaller. Headers are read once, too.
    """
    sys.path.append(str(ROOT / "tools"))
    from code_for import needed

    groups = {}
    for source in sources:
        path = Path(source)
        alone = path.suffix != ".cu" or path.parent.name != "instances"
        groups.setdefault(source if alone else (path.parent, *needed(source, codes)), []).append(source)
    return [merged(group) if len(group) > 1 else group[0] for group in groups.values()]


def merged(group):
    """A source that includes some, each of whose constants gets a name of its own."""
    lines = []
    for number, source in enumerate(group):
        names = re.findall(r"^const \S+ (k\w+)\(", (ROOT / source).read_text(), re.MULTILINE)
        lines += [f"#define {name} {name}Of{number}" for name in names]
        lines += [f'#include "{ROOT / source}"', *(f"#undef {name}" for name in names)]
    path, text = BUILD / "merged" / group[0], "\n".join(lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:  # else ninja would compile it again
        path.write_text(text)
    return os.path.relpath(path, ROOT)


def cuda_extension(toolkit, archs):
    # CppExtension, not CUDAExtension: that one would link libtorch_cuda and the shared cudart.
    nvcc_flags = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xptxas=-v", *DEFINES]
    codes = [flag.rpartition("=")[2] for flag in arch_flags(archs)]
    # Of launch bounds that ask for more threads than the 1,536 of other GPUs, ptxas warns, and drops them.
    errors = "all-warnings" if {*codes} <= {"sm_80", "sm_90a"} else "cross-execution-space-call,reorder"
    nvcc_flags += ["-Xcompiler=-g0,-fvisibility=hidden,-fvisibility-inlines-hidden", f"--Werror={errors}"]
    nvcc_flags += [f"-Xcompiler={','.join([*WARNINGS, *prefix_maps()])}", *TORCH_INCLUDES]
    nvcc_flags += [*arch_flags(archs), *build_cost_flags(toolkit)]
    if CUDART:
        nvcc_flags += ["-isystem", str(toolkit.root / "include")]
    host_flags = [*HOST_FLAGS, *WARNINGS, *TORCH_INCLUDES, "-isystem", str(toolkit.root / "include")]
    host_flags.append(f"-DLATE_INTERACTION_CUDA_ARCHS={'_'.join(re.split(ARCH_SEPARATORS, archs))}")
    if any("sm_90a" in flag for flag in nvcc_flags):  # else its kernels are empty, and must not be chosen
        host_flags.append("-DLATE_INTERACTION_SM90A")
    # For a wheel. A build for the GPUs of a machine rather compiles many sources at a time.
    cuda_sources = with_instances_merged(CUDA_SOURCES, codes) if len(codes) > 2 else CUDA_SOURCES
    ext = cpp_extension.CppExtension(
        "late_interaction._cuda",
        cuda_sources,
        py_limited_api=True,
        extra_compile_args={"cxx": host_flags, "nvcc": nvcc_flags},
        extra_link_args=[*LINK_FLAGS],
    )
    ext.library_dirs.append(toolkit.library_dir)
    ext.libraries = ["torch_cpu", "c10", "cudart_static", "dl", "rt", "pthread"]
    return ext


# ninja and setuptools print each command: thousands of characters.
COMPILED = re.compile(r"(\[\d+/\d+, [\d.]+ s\]) .* -c (.+?) -o ")
LINKED = re.compile(r"\s*\S+ .* -shared .* -o (\S+)")
NINJA_STATUS = "[%f/%t, %e s] "


@contextlib.contextmanager
def line_per_file():
    """Shorten ninja's line of each file to the time and the file's name, and that of a link likewise.

    Of a file that did not compile ninja prints command and errors once more: they stay as they are.
    """
    os.environ["NINJA_STATUS"] = NINJA_STATUS
    reader, writer = os.pipe()
    stdout = os.dup(1)

    def shorten():
        with open(reader, errors="replace") as lines, open(stdout, "w", buffering=1, errors="replace") as out:
            for line in lines:
                if match := COMPILED.match(line):
                    line = f"{match[1]} {match[2].removeprefix(f'{ROOT}/')}\n"
                elif match := LINKED.match(line):
                    line = f"linking {match[1]}\n"
                out.write(line)

    sys.stdout.flush()
    os.dup2(writer, 1)
    os.close(writer)
    thread = threading.Thread(target=shorten, daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        thread.join(timeout=10)  # a compiler's server may have kept the pipe


class BuildPython(build_py):
    def run(self):
        # A wheel packs all of build_lib, so nothing of an earlier build, such as its _cuda, may stay there.
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildLibraries(cpp_extension.BuildExtension):
    choice: Choice

    def run(self):
        print(f"late_interaction: {self.choice.sentence}", flush=True)
        compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
        if not shutil.which(compiler):
            stop(f"no C++ compiler: {compiler!r} is not on PATH; install g++ 11 or clang 14, or set CXX.")
        # ninja from PyPI lies beside the interpreter, which need not be on PATH.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if not cpp_extension.is_ninja_available():
            stop("building needs ninja: pip install ninja.")
        os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        if self.choice.toolkit:
            self.use_toolkit(self.choice.toolkit)
        elif self.inplace:  # an earlier build's would be loaded beside the new CPU library
            (ROOT / "late_interaction" / "_cuda.abi3.so").unlink(missing_ok=True)
        # In every kind of build, of which setuptools gives some a temporary folder.
        self.build_temp = str(BUILD / OBJECTS)
        base = Path(self.build_temp)
        base.mkdir(parents=True, exist_ok=True)
        with open(base / ".lock", "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            with line_per_file():
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
                write_ptxas_log(Path(self.build_temp), ext.sources, BUILD / "ptxas.log")
        finally:
            self.build_temp = base


def write_ptxas_log(objects, sources, log):
    """All of ptxas's resource reports (registers, spills) in one file, for tests/build/test_ptxas.py."""
    reports = [objects / Path(source).with_suffix(".o.ptxas") for source in sources]
    log.write_text("".join(report.read_text() for report in reports if report.exists()))


def long_description():
    """README.md for a package index, which has no files beside it: with links to them in the repository.

    Without LATE_INTERACTION_REPOSITORY such links become their text, and images go.
    """
    repository = os.environ.get("LATE_INTERACTION_REPOSITORY", "").rstrip("/")
    release = (ROOT / "VERSION").read_text().strip()

    def absolute(match):
        image, text, target = match.groups()
        if repository:
            return f"{image}[{text}]({repository}/{'raw' if image else 'blob'}/v{release}/{target})"
        return "" if image else text

    # Every second piece is a block of code.
    pieces = re.split(r"(^```.*?^```$)", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    link = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
    return "".join(piece if i % 2 else link.sub(absolute, piece) for i, piece in enumerate(pieces))


def project_urls():
    """Where the repository is, and what is read there; a build that is not told names no place."""
    repository = os.environ.get("LATE_INTERACTION_REPOSITORY", "").rstrip("/")
    release = (ROOT / "VERSION").read_text().strip()
    tree = f"{repository}/blob/v{release}"
    urls = {
        "Repository": repository,
        "Documentation": f"{tree}/docs/index.md",
        "Changelog": f"{tree}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    return urls if repository else {}


choice = BuildLibraries.choice = choose()

BUILD.mkdir(parents=True, exist_ok=True)
version = (ROOT / "VERSION").read_text().strip()
if local := os.environ.get("LATE_INTERACTION_LOCAL_VERSION"):
    version += f"+{local}"

setuptools.setup(
    version=version,
    long_description=long_description(),
    project_urls=project_urls(),
    long_description_content_type="text/markdown",
    ext_modules=[
        cpu_extension(),
        *([cuda_extension(choice.toolkit, choice.archs)] if choice.toolkit else []),
    ],
    cmdclass={"build_py": BuildPython, "build_ext": BuildLibraries},
    options={
        "bdist_wheel": {"py_limited_api": "cp310"},
        "build": {"build_base": str(BUILD)},
        "egg_info": {"egg_base": str(BUILD)},
    },
)
