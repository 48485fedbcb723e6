"""same_sass.py BEFORE AFTER: whether two builds hold the same machine code, whatever its kernels are called.

BEFORE and AFTER are each a CUDA library, an object file, a folder of object files, or a listing that
`cuobjdump -sass` wrote (a name that ends in .sass; taking it once saves minutes).

A body is a kernel's instructions as cuobjdump prints them: text, encoding and scheduling, branches to offsets
inside the body, for one architecture. Mangled names are left out, so that a kernel may move to another file
or namespace. The two sides are compared as multisets: each body must occur equally often. Bodies that one
side has more of are printed with their kernels' names, and the exit status is then 1.

    python tools/same_sass.py old/_cuda.abi3.so build/objects/late_interaction._cuda
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ARCHITECTURE = re.compile(r"^arch = (\S+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)")
MANGLED_NAME = re.compile(r"_Z\w+")
END_OF_BODY = re.compile(r"^\s*\.{4,}\s*$")

# (architecture, digest of the instructions) -> names of the kernels that have this body
Bodies = dict[tuple[str, str], list[str]]


def bodies_of_listing(lines: Iterable[str]) -> Bodies:
    """The bodies of what `cuobjdump -sass` prints."""
    bodies: Bodies = defaultdict(list)
    architecture, name, digest = "?", None, hashlib.sha256()

    def finish() -> None:
        if name is not None:
            bodies[architecture, digest.hexdigest()].append(name)

    for line in lines:
        if match := FUNCTION.match(line):
            finish()
            name, digest = match[1], hashlib.sha256()
        elif match := ARCHITECTURE.match(line):
            finish()
            architecture, name = match[1], None
        elif END_OF_BODY.match(line):
            finish()
            name = None
        elif name is not None:
            digest.update(MANGLED_NAME.sub("_Z", " ".join(line.split())).encode())
            digest.update(b"\n")
    finish()
    return bodies


def listing(path: Path, cuobjdump: str) -> Iterator[str]:
    """The lines of a file's listing, as cuobjdump prints them."""
    if path.suffix == ".sass":
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from lines
        return
    command = [cuobjdump, "-sass", str(path)]
    # Its warnings, one a kernel, say nothing of the code.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        yield from run.stdout
    if run.returncode:
        sys.exit(f"same_sass.py: {' '.join(command)} failed with status {run.returncode}")


def bodies_of(path: Path, cuobjdump: str) -> Bodies:
    """The bodies of a library, an object file, a folder of objects or a listing."""
    files = sorted(path.rglob("*.o")) if path.is_dir() else [path]
    if not path.exists() or not files:
        sys.exit(f"same_sass.py: {path} is no library, object file, listing, or folder of object files")
    bodies: Bodies = defaultdict(list)
    for file in files:
        for body, names in bodies_of_listing(listing(file, cuobjdump)).items():
            bodies[body] += names
    return bodies


def differences(before: Bodies, after: Bodies, part: bool = False) -> list[str]:
    """A line for each body that one side has more of; with `part`, that AFTER has more of."""
    lines = []
    for body in sorted(before.keys() | after.keys()):
        old, new = before.get(body, []), after.get(body, [])
        if len(new) > len(old) or (len(new) < len(old) and not part):
            names = ", ".join(sorted({*old, *new}))
            lines.append(f"{len(old)} before, {len(new)} after, {body[0]}: {names}")
    return lines


def count(bodies: Bodies) -> int:
    return sum(map(len, bodies.values()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--cuobjdump", default="cuobjdump", help="its path; else it is found on PATH")
    parser.add_argument(
        "--part",
        action="store_true",
        help="AFTER holds some of the kernels alone: look for those that are new",
    )
    options = parser.parse_args()
    needs_it = {options.before.suffix, options.after.suffix} != {".sass"}
    if needs_it and shutil.which(options.cuobjdump) is None:
        parser.error(f"no {options.cuobjdump} on PATH: install the CUDA toolkit's, or name it by --cuobjdump")
    before = bodies_of(options.before, options.cuobjdump)
    after = bodies_of(options.after, options.cuobjdump)
    found = differences(before, after, options.part)
    if not count(before) or not count(after):
        sys.exit(f"same_sass.py: {count(before)} kernels before, {count(after)} after: nothing to compare")
    print("\n".join([*found, f"{count(before)} kernels before, {count(after)} after"]))
    print("the same machine code" if not found else f"{len(found)} bodies differ in number")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
