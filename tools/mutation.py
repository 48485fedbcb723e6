"""What the two mutation runs share: a copy of the checkout to change, and the list of argued survivors."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv" / "mutants"
ARGUED = ROOT / "tools" / "equivalent_mutants.txt"


def fresh_copy(name):
    """The checkout as it is, with its compiled CPU library, where nothing but a mutant is ever changed."""
    tree = FOLDER / name
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    wanted = {path for path in listed.split("\0") if path and (ROOT / path).is_file()}
    wanted |= {str(path.relative_to(ROOT)) for path in ROOT.glob("late_interaction/_C.*.so")}
    for found in [path for path in tree.rglob("*") if path.is_file()]:
        relative = str(found.relative_to(tree))
        if relative not in wanted and not relative.startswith("build/"):
            found.unlink()
    for path in wanted:
        source, target = ROOT / path, tree / path
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return tree


def file_of_test(name):
    """Where tests/<folder>/test_<name>.py is, from the root; a name that no file has, in tests itself."""
    found = sorted((ROOT / "tests").rglob(f"test_{name}.py"))
    return found[0].relative_to(ROOT).as_posix() if found else f"tests/test_{name}.py"


def digest(*files):
    """A short name for what files hold."""
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:12]


def arguments():
    """(file, from, to, why) of each line of ARGUED, ``file | from | to | why``. Both texts of a changed line
    may have the separator, equally often."""
    for line in ARGUED.read_text().splitlines():
        if line and line[0] != "#":
            file, *texts, why = line.split(" | ")
            half = len(texts) // 2
            yield file, " | ".join(texts[:half]), " | ".join(texts[half:]), why


def argued(file):
    """Why a file's survivors stay, by their changed line before and after."""
    return {(before, after): why for where, before, after, why in arguments() if where == file}


def environment():
    """One thread, no bytecode of mutants that a later one of the same size and second could be taken for."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "LATE_INTERACTION_WITH_CUDA": "0"}
