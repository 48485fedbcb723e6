"""Writes compile_commands.json, from which clangd and other editors learn how each source is compiled.

    make compile_commands

Nothing is built, and nvcc is not needed: without a CUDA toolkit the CUDA units are listed too, but an editor
then finds no CUDA header. The flags are those of setup.py. CUDA units are listed as clang compiles CUDA, for
9.0a, so that the editor sees every kernel: clangd does not know the flags of nvcc.
"""

import argparse
import importlib
import importlib.util
import json
import os
import shlex
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BINDINGS = Path("csrc/plan/bindings.cpp")
# Flags that an editor has no use for: it optimizes nothing, and shows a warning as a warning.
USELESS = ("-O", "-g0", "-Werror", "-ffile-prefix-map=")


def setup_flags() -> dict[str, list[str]]:
    """The host compiler's flags in setup.py: of "cpu", and of "cuda" if there is a CUDA toolkit."""
    importlib.import_module("setuptools")  # brings distutils, which Python itself lacks from 3.12 on
    run_setup = importlib.import_module("distutils.core").run_setup

    os.environ.setdefault("LATE_INTERACTION_CUDA_ARCHS", "9.0a")  # or setup.py wants a GPU
    arguments = sys.argv
    try:
        extensions = run_setup(str(ROOT / "setup.py"), stop_after="init").ext_modules
    finally:
        sys.argv = arguments
    found = [[f for f in ext.extra_compile_args["cxx"] if not f.startswith(USELESS)] for ext in extensions]
    return dict(zip(("cpu", "cuda"), found, strict=False))


def units() -> list[Path]:
    """Every file that a compiler is called with: those of csrc, and the C++ tests."""
    found = (path for folder in ("csrc", "tests/cpp") for path in (ROOT / folder).rglob("*"))
    return sorted(path.relative_to(ROOT) for path in found if path.suffix in (".cpp", ".cu"))


def python_includes() -> list[str]:
    """Where the planner's Python module finds Python and pybind11."""
    folders = [sysconfig.get_paths()["include"]]
    if importlib.util.find_spec("pybind11"):
        folders.append(importlib.import_module("pybind11").get_include())
    return [word for folder in folders for word in ("-isystem", folder)]


def command(unit: Path, flags: dict[str, list[str]]) -> list[str]:
    host = flags.get("cuda" if unit.is_relative_to("csrc/cuda") else "cpu", flags["cpu"])
    if unit.parts[0] == "tests":  # programs that use all of PyTorch
        host = [flag for flag in host if not flag.startswith("-DTORCH_TARGET_VERSION")]
    if unit.suffix == ".cpp":
        return ["c++", *host, *(python_includes() if unit == BINDINGS else []), "-c", str(unit)]
    include = next((Path(flag) for flag in host if (Path(flag) / "cuda_runtime.h").exists()), None)
    toolkit = [f"--cuda-path={include.parent}"] if include else ["-nocudainc", "-nocudalib"]
    cuda = ["-x", "cuda", "--cuda-gpu-arch=sm_90a", *toolkit, "-Wno-unknown-cuda-version"]
    return ["clang++", *cuda, *host, "-c", str(unit)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "compile_commands.json")
    output = parser.parse_args().output
    flags = setup_flags()
    entries = [
        {"directory": str(ROOT), "file": str(unit), "command": shlex.join(command(unit, flags))}
        for unit in units()
    ]
    output.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{output}: {len(entries)} units")


if __name__ == "__main__":
    main()
