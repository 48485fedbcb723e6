"""The CPU tests for aarch64 under emulation: ``make aarch64-tests``.

``python tests/emulated.py PYTHON WHEEL [pytest arguments]`` copies the checkout, with the CPU library of
WHEEL, and runs pytest there by PYTHON, an interpreter under qemu-user (tools/aarch64_python.py) that has
PyTorch's own wheel for aarch64. Emulation takes ten to twenty times as long as a CPU: without arguments, a
part of the tests runs, on two cases each, and all tests of the instruction sets.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / ".venv" / "build" / "emulated"
LIBRARY = "late_interaction/_C.abi3.so"
RUNS = [
    ["tests", "--stage", "test", "--strength", "1", "--ignore=tests/maxsim/test_isa.py"],
    ["tests/maxsim/test_isa.py"],
]

# What is not run, and why.
EXCLUDED = {
    "tests/build": "reads the files of the build",
    "tests/packaging": "is for installed wheels",
    "tests/bench/test_performance.py": "takes times",
    "tests/docs/test_demo.py": "runs the installed package",
    "tests/docs/test_docs.py": "is about documents",
    "tests/docs/test_example_programs.py": "trains",
    "tests/docs/test_examples.py": "trains",
    "tests/training/test_contrastive_faults.py": "waits for timeouts",
    "tests/training/test_contrastive_frameworks.py": "starts processes, slower than their timeouts allow",
    "tests/training/test_contrastive_group.py": "starts processes, slower than their timeouts allow",
    "tests/maxsim/test_compiled.py::test_inductor_adds_one_call_each_way": "needs a C++ compiler there",
}


def copy(wheel):
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.splitlines()):
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)
    zipfile.ZipFile(wheel).extract(LIBRARY, COPY)


def main(python, wheel, *arguments):
    copy(wheel)
    left_out = [f"--{'deselect' if '::' in name else 'ignore'}={name}" for name in EXCLUDED]
    command = [Path(python).resolve(), "-m", "pytest", "-m", "not gpu", "-p", "no:cacheprovider", *left_out]
    runs = [arguments] if arguments else [[*run, "-n", "2"] for run in RUNS]
    return max(subprocess.run([*command, *run], cwd=COPY).returncode for run in runs)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
