"""Every host source compiles against the headers of every PyTorch that it is meant for.

setup.py builds against the PyTorch that is there, so a name that only newer headers have turns users of older
releases away. The headers are fetched once (torch_headers.py).

The sources that include no PyTorch are left out: the build compiles them. All others compile against the
oldest release, which lacks what is newer; against the newest those few compile that between them name
everything that is used of PyTorch. Nightly all compile against each release, those between the two as well.

A source starts from a precompiled header of all of PyTorch that csrc includes, which takes a third of the
time; nightly each source compiles as it is against the oldest release. A source that compiled is compiled
again when it, something that it includes, or the command has changed: digests lie beside the headers.
"""

import ast
import concurrent.futures
import functools
import hashlib
import os
import re
import shutil
import uuid
from pathlib import Path

import pytest

from tests.build.torch_headers import UnreachableError, headers
from tests.selection import NIGHTLY
from tests.support.programs import ROOT, run

OLDEST = "2.10.0"
RELEASES = (OLDEST, *(("2.11.0", "2.12.0") if NIGHTLY else ()), "newest")
WORKERS = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|(<[^>]+>))', re.MULTILINE)

NAME = re.compile(r"\b(?:torch::[\w:]+|(?:aoti_torch|STABLE_TORCH|STD_TORCH|TORCH)_\w+)")


@functools.cache
def included(path):
    """All files of ours that a source is made of, itself among them, and all <headers> that they include."""
    ours, system, todo = set(), set(), [path]
    while todo:
        ours.add(path := todo.pop())
        for near, far in INCLUDE.findall(path.read_text()):
            system |= {far} - {""}
            if near and (target := (path.parent / near).resolve()) not in ours:
                todo.append(target)
    return frozenset(ours), frozenset(system)


def of_pytorch(path):
    return {name for name in included(path)[1] if name.startswith("<torch/")}


SOURCES = [path for path in sorted((ROOT / "csrc").rglob("*.cpp")) if of_pytorch(path)]


def flags_of_setup():
    """DEFINES and WARNINGS as setup.py sets them, without running it."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return [*ast.literal_eval(values["DEFINES"]), *ast.literal_eval(values["WARNINGS"])]


def cuda_headers():
    """The CUDA toolkit's include folder, or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        homes.append(str(Path(nvcc).resolve().parents[1]))
    found = (Path(home, "include") for home in homes if home)
    return next((path for path in found if (path / "cuda_runtime.h").exists()), None)


def command_for(include, cuda):
    system = [word for folder in (include, cuda) if folder for word in ("-isystem", str(folder))]
    compiler = os.environ.get("CXX", "c++").split()
    return [*compiler, "-std=c++20", "-fvisibility=hidden", *flags_of_setup(), *system]


def errors(source, command):
    done = run(*command, "-fsyntax-only", source)
    return (done.stderr or f"{source} does not compile") if done.returncode else ""


def precompiled(command, folder):
    """command, with all of PyTorch that csrc includes read already if that compiles."""
    names = sorted(set().union(*map(of_pytorch, SOURCES)))
    header = folder / "pytorch.h"
    header.write_text("".join(f"#include {name}\n" for name in names))
    done = run(*command, "-x", "c++-header", header, "-o", f"{header}.gch")
    return command if done.returncode else [*command, "-include", str(header)]


def names_of_pytorch(path):
    """Headers of PyTorch, and its functions and macros, in a source and what it includes of ours."""
    return of_pytorch(path) | {name for ours in included(path)[0] for name in NAME.findall(ours.read_text())}


def few(sources):
    """Sources that between them name everything of PyTorch that all of them name."""
    named = {source: names_of_pytorch(source) for source in sources}
    wanted, chosen = set().union(*named.values()), []
    while wanted:
        chosen.append(max(sources, key=lambda source: len(named[source] & wanted)))
        wanted -= named[chosen[-1]]
    return chosen


class Checked:
    """Digests of what compiled, in a file: one for each source, of all that the compiler read of ours."""

    def __init__(self, file, command):
        self.file = file
        self.command = "\n".join([run(command[0], "--version").stdout, *command])
        self.known = set(file.read_text().split()) if file.exists() else set()

    def digest(self, source):
        read = sorted(included(source)[0])
        parts = [self.command, *(f"{path.name}\n{path.read_text()}" for path in read)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def keep(self, digests):
        """Those of now alone; written in one step, since two processes may."""
        fresh = self.file.with_name(f"{self.file.name}.{uuid.uuid4().hex}")
        fresh.write_text("".join(f"{digest}\n" for digest in sorted(digests)))
        fresh.replace(self.file)


def errors_of_all(sources, command, checked):
    """The compiler's words on those of the sources that are not known to compile."""
    digests = {source: checked.digest(source) for source in sources}
    todo = [source for source in sources if digests[source] not in checked.known]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        said = dict(zip(todo, pool.map(lambda source: errors(source, command), todo), strict=True))
    checked.keep(digest for source, digest in digests.items() if not said.get(source))
    return "".join(said.values())


@pytest.fixture
def include(release):
    try:
        return headers(release)
    except UnreachableError as error:
        pytest.skip(f"no headers of PyTorch {release}: {error}")


@pytest.mark.parametrize("release", RELEASES)
def test_host_sources_compile(release, include, tmp_path):
    cuda = cuda_headers()
    sources = [path for path in SOURCES if cuda or "cuda" not in path.parts]
    assert len(sources) > (15 if cuda else 4)
    if release != OLDEST and not NIGHTLY:
        sources = few(sources)
        assert 1 < len(sources) < 12
    command = command_for(include, cuda)
    checked = Checked(include.parents[1] / "checked", command)
    if any(checked.digest(source) not in checked.known for source in sources) and not (
        NIGHTLY and release == OLDEST
    ):
        command = precompiled(command, tmp_path)
    assert errors_of_all(sources, command, checked) == ""


@pytest.mark.parametrize("release", RELEASES[:1])
@pytest.mark.parametrize("precompile", [False, True])
def test_a_newer_name_is_found(release, include, precompile, tmp_path):
    source = tmp_path / "newer.cpp"
    source.write_text(
        "#include <torch/csrc/stable/library.h>\n"
        "void f() { STABLE_TORCH_ERROR_CODE_CHECK(TORCH_SUCCESS); }  // of 2.13 and newer\n"
    )
    command = command_for(include, None)
    if precompile:
        command = precompiled(command, tmp_path)
        assert "-include" in command
    assert "STABLE_TORCH_ERROR_CODE_CHECK" in errors(source, command)


def test_what_changed_or_failed_is_compiled_again(tmp_path, monkeypatch):
    header, source = tmp_path / "a.h", tmp_path / "a.cpp"
    header.write_text("inline int one() { return 1; }\n")
    source.write_text('#include "a.h"\nint two() { return 2 * one(); }\n')

    def said():
        included.cache_clear()
        command = command_for(tmp_path, None)
        return errors_of_all([source], command, Checked(tmp_path / "checked", command))

    compiled = []
    compile_one = errors
    monkeypatch.setitem(globals(), "errors", lambda *given: compiled.append(given) or compile_one(*given))
    assert said() == "" and len(compiled) == 1
    assert said() == "" and len(compiled) == 1
    header.write_text("inline int three() { return 3; }\n")
    assert "one" in said() and len(compiled) == 2
    assert "one" in said() and len(compiled) == 3
