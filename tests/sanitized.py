"""The CPU tests on a CPU library that was built with sanitizers: ``make asan``.

``python tests/sanitized.py LIBRARY [pytest arguments]`` runs pytest with LIBRARY in the place of
``late_interaction/_C.abi3.so``, which stays as it is. The interpreter and PyTorch are not instrumented, so
the sanitizers' runtimes are preloaded. In the process of pytest this module is a plugin, which makes the
package find LIBRARY. The first fault ends that process, with the sanitizer's report in
``<LIBRARY>.report.<pid>``.
"""

import importlib.machinery
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULT = "ERROR: AddressSanitizer|runtime error:"
VARIABLE = "LATE_INTERACTION_SANITIZED_LIBRARY"  # its presence makes this module a plugin

# libstdc++ too: the address sanitizer looks for the function that throws when it starts, and the interpreter,
# which is C, does not bring it.
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so.6")

OPTIONS = {
    # PyTorch and Python keep memory until the process ends: reports of leaks would be about theirs.
    # A test asks for more memory than there is, and expects an exception.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

# What is not run, and why.
EXCLUDED = {
    "tests/build": "reads the files of the build, and the ordinary library",
    "tests/packaging": "is for installed wheels",
    "tests/docs/test_demo.py": "runs the installed package",
    "tests/bench/test_bench.py": "calls no operator in a way that other tests do not",
    "tests/bench/test_bench_plans.py": "is about figures",
    "tests/bench/test_sweep.py": "is about figures",
    "tests/docs/test_docs.py": "is about documents",
    "tests/bench/test_performance.py": "takes times, which the sanitizers change",
}


class _Finder:
    """Finds ``late_interaction._C`` where the sanitized library lies."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "late_interaction._C":
            return None
        return importlib.machinery.ModuleSpec(name, None, origin=os.environ[VARIABLE])


if VARIABLE in os.environ:
    sys.meta_path.insert(0, _Finder)


def pytest_configure():
    """The run means nothing on another library."""
    import torch

    import late_interaction  # noqa: F401

    loaded = [name for name in torch.ops.loaded_libraries if Path(name).stem.startswith(("_C", "liblate"))]
    if loaded != [os.environ[VARIABLE]]:
        raise RuntimeError(f"the sanitized library is {os.environ[VARIABLE]}, but {loaded} was loaded")


def runtime(name):
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    found = subprocess.run(
        [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    if not Path(found.stdout.strip()).is_absolute():  # a compiler that has none prints the name
        raise SystemExit(f"{compiler[0]} has no {name}: make asan needs gcc and its sanitizers' runtimes")
    return found.stdout.strip()


def reports(library):
    return sorted(Path(library).parent.glob(f"{Path(library).name}.report.*"))


def main(library, *arguments):
    library = str(Path(library).resolve(strict=True))
    environment = os.environ | {name: f"{value}:log_path={library}.report" for name, value in OPTIONS.items()}
    environment |= {"LD_PRELOAD": " ".join(map(runtime, RUNTIMES)), VARIABLE: library}
    for old in reports(library):
        old.unlink()
    left_out = [f"--ignore={path}" for path in EXCLUDED]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.sanitized",
        "-m",
        "not gpu",
        *left_out,
        *arguments,
    ]
    result = subprocess.run(command, cwd=ROOT, env=environment).returncode
    faults = [text for path in reports(library) if re.search(FAULT, text := path.read_text(errors="replace"))]
    print(*faults, f"{len(faults)} processes ended with a report of a sanitizer", sep="\n")
    return result or bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
