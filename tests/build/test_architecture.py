"""docs/architecture.md: each way is as short as it says, and each of its files is reached from one above."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.build.test_includes import INCLUDE, imports

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LIMITS = {"Dense forward": 24, "Dense forward on a CPU": 15, "Lowmem backward": 18, "Varlen": 20, "PLAID": 16}
ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)
CPU = "csrc/cpu/"
HOPS = 3  # from a file to the next of its way: by headers and instances that declare or hold but one line


def section(way: str) -> tuple[int, list[tuple[str, str]]]:
    """(the number in its heading, its rows) of a way."""
    match = re.search(rf"^## {way}: (\d+) files$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match, f"docs/architecture.md has no heading '## {way}: N files'"
    return int(match[1]), ROW.findall(match[2])


# ---- which file leads to which ----


@functools.cache
def text(path: str) -> str:
    return (ROOT / path).read_text()


@functools.cache
def files() -> tuple[str, ...]:
    found = (path for folder in ("csrc", "late_interaction") for path in (ROOT / folder).rglob("*"))
    suffixes = (".py", ".cpp", ".h", ".cu", ".cuh")
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in found if path.suffix in suffixes))


@functools.cache
def defined(path: str) -> frozenset[str]:
    """Functions that a source defines for others: at the beginning of a line, with a body."""
    heads = re.findall(
        r"^(?!using|namespace|static|#)[A-Za-z][^;{}()=]*?\b(\w+)\(([^;{}]*)\)[^;{}()]*\{", text(path), re.M
    )
    templates = re.findall(r"^template \w+ (?:\w+::)*(\w+)<", text(path), re.M)
    return frozenset({name for name, _ in heads} | set(templates))


@functools.cache
def definitions(on_cpu: bool) -> dict[str, set[str]]:
    """Functions of the sources of csrc/cpu, or of all others: both sides have a `forward`."""
    found: dict[str, set[str]] = {}
    for path in files():
        if path.endswith((".cpp", ".cu")) and path.startswith(CPU) == on_cpu:
            for name in defined(path):
                found.setdefault(name, set()).add(path)
    return found


@functools.cache
def includes(path: str) -> frozenset[str]:
    here = (ROOT / path).parent
    return frozenset(
        (here / name).resolve().relative_to(ROOT).as_posix() for name in INCLUDE.findall(text(path))
    )


@functools.cache
def includes_in_all(path: str) -> frozenset[str]:
    seen: set[str] = set()
    todo = [path]
    while todo:
        new = includes(todo.pop()) - seen
        seen |= new
        todo.extend(new)
    return frozenset(seen)


@functools.cache
def words_before_parentheses(path: str) -> frozenset[str]:
    """What a file calls or declares; of templates, their names."""
    return frozenset(
        re.findall(r"\b(\w+)(?=\(|<)", text(path)) + re.findall(r"^struct (\w+) \{", text(path), re.M)
    )


# Files that call what others register, and the words that register it.
REGISTRIES = {
    "csrc/plan/forward/select.cpp": "\nconst ForwardKernel ",
    "csrc/cuda/forward/launch.h": "LATE_INTERACTION_FORWARD(",
}
OPERATORS = set(re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc" / "ops.cpp").read_text()))


@functools.cache
def leads_to(path: str) -> frozenset[str]:
    """The files that one imports, includes or calls; from csrc/ops.cpp, those that register its operators."""
    if path.endswith(".py"):
        modules = {name.replace(".", "/") for name in imports(ROOT / path)}
        found = {file for name in modules for file in (f"{name}.py", f"{name}/__init__.py")}
        attributes = {
            node.attr for node in ast.walk(ast.parse(text(path))) if isinstance(node, ast.Attribute)
        }
        return frozenset((found & set(files())) | ({"csrc/ops.cpp"} if attributes & OPERATORS else set()))
    if path == "csrc/ops.cpp":
        sources = (file for file in files() if file.endswith(".cpp"))
        return frozenset(
            file for file in sources if OPERATORS & set(re.findall(r'm\.impl\("(\w+)"', text(file)))
        )
    if path in REGISTRIES:
        sources = (file for file in files() if REGISTRIES[path] in text(file))
        return frozenset(includes(path).union(sources))
    declared = frozenset().union(*map(words_before_parentheses, includes_in_all(path)))
    declared |= frozenset(re.findall(r"^struct (\w+) \{", text(path), re.M))
    # The table of csrc/cpu/dispatch.cpp names functions without calling them.
    named = frozenset(re.findall(r"\bfill_\w+", text(path))) if path.startswith(CPU) else frozenset()
    definers = definitions(path.startswith(CPU))
    used = ((words_before_parentheses(path) & declared) | named) & definers.keys()
    return frozenset(includes(path).union(*(definers[name] for name in used)) - {path})


def within_hops(start: str, hops: int = HOPS) -> set[str]:
    reached = edge = {start}
    for _ in range(hops):
        edge = set().union(*(leads_to(path) for path in edge)) - reached
        reached = reached | edge
    return reached


# ---- the page ----


@pytest.mark.parametrize("way", LIMITS)
def test_a_way_is_as_short_as_it_says(way):
    count, rows = section(way)
    paths = [path for path, _ in rows]
    assert len(paths) == len(set(paths)) == count
    assert count <= LIMITS[way]


@pytest.mark.parametrize("way", LIMITS)
def test_its_files_exist_and_a_line_says_what_happens_there(way):
    for path, line in section(way)[1]:
        assert (ROOT / path).is_file(), path
        assert 5 <= len(line) <= 100, line


@pytest.mark.parametrize("way", LIMITS)
def test_each_file_is_reached_from_one_above(way):
    paths = [path for path, _ in section(way)[1]]
    for number, path in enumerate(paths[1:], 1):
        above = paths[:number]
        assert any(path in within_hops(start) for start in above), f"nothing above leads to {path}"


def test_what_is_not_linked_is_found():
    assert "csrc/cuda/forward/run.cpp" in within_hops("csrc/cuda/forward/entry.cpp", 1)
    assert "csrc/cuda/forward/entry.cpp" in within_hops("late_interaction/_maxsim.py")
    assert "csrc/plan/backward.cpp" in within_hops("csrc/cuda/backward/run.cpp", 1)
    assert "csrc/cuda/plaid/kernel.cuh" not in within_hops("csrc/cuda/backward/run.cpp")
    assert "csrc/cuda/backward/run.cpp" not in within_hops("csrc/cuda/plaid/kernel.cuh")


def test_the_map_links_here_and_repeats_no_way():
    readme = (ROOT / "csrc" / "README.md").read_text()
    assert "(../docs/architecture.md)" in readme
    assert len(ROW.findall(readme)) < 40 and "what happens there" not in readme
