"""make_hub.py [--libraries FOLDER] [--out FOLDER] [--kernel-version N]: Hugging Face's kernel hub layout.

For a machine without a GPU, and, where the CUDA library was built, for one with a GPU, a folder each:

    build/torch-stable-abi210-cpu-x86_64-linux/      __init__.py, the modules, _C.abi3.so, metadata.json
    build/torch-stable-abi210-cu130-x86_64-linux/    the same, and _cuda.abi3.so

The package `kernels` (0.17) loads the folder that fits the machine, from the hub or from a local path
(kernels.get_local_kernel), under the id in metadata.json: a module may have any name, so imports become
relative. Uploading is a step of its own: the contents of --out go to build/ of a repository of type kernel.

Two such builds are loaded into one process if their operators have namespaces of their own:
LATE_INTERACTION_NAMESPACE=late_interaction_v2 make hub.
"""

import argparse
import ast
import json
import mmap
import os
import platform
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "late_interaction"
CPU_LIBRARY, CUDA_LIBRARY = "_C.abi3.so", "_cuda.abi3.so"
NOTICES = ("LICENSE", "third_party/NOTICE")
OLDEST_KERNELS = "0.17.0"  # the release whose parser and loader the tests use


def embedded(library: Path) -> dict[str, str]:
    """What csrc/common/registration.h has embedded in a library: its namespace, and in CUDA's the version and
    the architectures."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = re.findall(rb"late_interaction_(namespace|cuda_version|cuda_archs)=([ -~]*)\0", content)
    return {name.decode(): value.decode() for name, value in found}


def oldest_torch() -> str:
    """210 for torch >= 2.10: the version of the stable ABI that the libraries ask for."""
    found = re.search(r'"torch>=(\d+)\.(\d+)"\]\n', (ROOT / "pyproject.toml").read_text())
    assert found, "pyproject.toml names no torch"
    return found[1] + found[2]


def backend_of(told: dict[str, str]) -> tuple[str, dict[str, object]]:
    """The backend in a folder's name, and in its metadata, of what a library says of itself."""
    if "cuda_version" not in told:
        return "cpu", {"type": "cpu"}
    version = int(told["cuda_version"])  # 13020 for 13.2
    archs = [arch for arch in told["cuda_archs"].split("_") if arch]
    name = f"cu{version // 1000}{version % 1000 // 10}"
    return name, {"type": "cuda", "archs": archs} if archs else {"type": "cuda"}


def with_own_imports(code: str, depth: int, identifier: str) -> str:
    """A module's code that imports the rest of the package whatever that is called.

    Args:
        depth: how many folders below the package it lies.
        identifier: what `kernels` calls the package. Code that runs in another library's namespace (a patch)
            cannot import by a relative name, so the imports within functions use this one.
    """
    tree = ast.parse(code)
    outer = {id(node) for node in tree.body}
    lines = code.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == PACKAGE for alias in node.names), "import by from"
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == PACKAGE:
            assert node.module and not node.level, "the package imports by full names"
            rest = node.module.removeprefix(PACKAGE)
            target = "." * (depth + 1) + rest.removeprefix(".") if id(node) in outer else identifier + rest
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"from {node.module} ", f"from {target} ", 1)
    return "\n".join(lines)


def make_variant(libraries: list[Path], out: Path, kernel_version: int) -> Path:
    """One folder, for the machines that these libraries are for. The last of them names the backend."""
    told = [embedded(library) for library in libraries]
    namespaces = {one.get("namespace") for one in told}
    if len(namespaces) != 1 or None in namespaces:
        named = ", ".join(sorted(map(str, namespaces)))
        sys.exit(f"the libraries are of {named}: build them again, all at once")
    backend, described = backend_of(told[-1])
    release = (ROOT / "VERSION").read_text().strip()
    (namespace,) = namespaces
    identifier = re.sub(r"\W", "_", f"_{namespace}_{backend}_{release}", flags=re.ASCII)
    folder = out / f"torch-stable-abi{oldest_torch()}-{backend}-{platform.machine()}-linux"
    shutil.rmtree(folder, ignore_errors=True)
    for source in sorted((ROOT / PACKAGE).rglob("*.py")):
        path = source.relative_to(ROOT / PACKAGE)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(with_own_imports(source.read_text(), len(path.parts) - 1, identifier))
    (folder / "_version.py").write_text(f'"""The release of this build."""\n\n__version__ = "{release}"\n')
    for file in (*libraries, *(ROOT / notice for notice in NOTICES)):
        shutil.copy(file, folder)
    metadata = {
        "id": identifier,
        "name": "late-interaction",
        "version": kernel_version,
        "kernels-minver": OLDEST_KERNELS,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": described,
    }
    if repository := os.environ.get("LATE_INTERACTION_REPOSITORY"):
        metadata["upstream"] = repository
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder


def make_hub(libraries: Path, out: Path, kernel_version: int) -> list[Path]:
    """A folder for the CPU library, and one for both where there are two."""
    cpu, cuda = libraries / CPU_LIBRARY, libraries / CUDA_LIBRARY
    if not cpu.exists():
        sys.exit(f"no {cpu}: build it first (make build, or make hub)")
    made = [make_variant([cpu], out, kernel_version)]
    if cuda.exists():
        made.append(make_variant([cpu, cuda], out, kernel_version))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", type=Path, default=ROOT / PACKAGE, help="the folder that holds them")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="where the folders go")
    parser.add_argument("--kernel-version", type=int, default=1, help="of the hub: the N of its branch vN")
    args = parser.parse_args()
    for folder in make_hub(args.libraries, args.out, args.kernel_version):
        print(folder)


if __name__ == "__main__":
    main()
