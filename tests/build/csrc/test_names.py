"""One name, one thing: what two files define under one name breaks the one-definition rule, which the linker
does not check, or makes one word of two things for readers."""

import functools
import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path

CSRC = Path(__file__).resolve().parents[3] / "csrc"
ANONYMOUS = re.compile(r"^namespace \{\n.*?^\}  // namespace\n", re.MULTILINE | re.DOTALL)
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
# At the beginning of a line, so of a namespace. A specialization has arguments behind its name.
DEFINITIONS = re.compile(
    r"^(?:struct|class|union|enum class)\s+(?:alignas\([^)]*\)\s+)?(\w+)\s*(?:final\s*)?(?::[^:;{<][^;{]*)?\{"
    r"|^(?:inline )?constexpr [^=({;]*?\b(k\w+)\b"
    r"|^using (\w+) =",
    re.MULTILINE,
)
FUNCTIONS = re.compile(
    r"^(?!using|struct|class|enum|namespace|extern|const |#|//|\})[A-Za-z_][^;{}()=\n]*?"
    r"\b(?!alignas|__launch_)(\w+)\((?:[^(){};]|\([^()]*\))*\)(?: const)?(?:\s*->[^{;]*)? \{",
    re.MULTILINE,
)


def definitions(text, pattern=DEFINITIONS):
    """(namespace, name) of what a file defines outside of anonymous namespaces."""
    text = ANONYMOUS.sub("", text)
    spaces = NAMESPACE.findall(text)
    space = spaces[-1] if spaces else ""
    names = (
        found if isinstance(found, str) else next(filter(None, found)) for found in pattern.findall(text)
    )
    return {(space, name) for name in names}


def defined_in(pattern, suffixes):
    found = defaultdict(list)
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in suffixes:
            for name in definitions(path.read_text(), pattern):
                found[name].append(path)
    return found


@functools.cache
def included(path):
    found = {(path.parent / name).resolve() for name in INCLUDE.findall(path.read_text())}
    return frozenset(found.union(*map(included, found)))


def strangers(paths):
    """Pairs of files of which neither includes the other."""
    return [
        tuple(str(path.relative_to(CSRC)) for path in pair)
        for pair in combinations(paths, 2)
        if pair[0] not in included(pair[1]) and pair[1] not in included(pair[0])
    ]


def test_names_are_unique_in_a_namespace():
    found = defined_in(DEFINITIONS, {".h", ".cuh", ".cpp", ".cu"})
    assert len(found) > 500
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_functions_of_one_name_are_overloads():
    """One of the headers that define them includes the other."""
    found = defined_in(FUNCTIONS, {".h", ".cuh"})
    apart = {name: strangers(paths) for name, paths in found.items() if "cpu" not in name[0]}
    assert len(apart) > 300
    assert {name: pairs for name, pairs in apart.items() if pairs} == {}
