"""A type or a constant of csrc has one definition: two of a name in one namespace break the one-definition
rule, which the linker does not check."""

import re
from collections import defaultdict
from pathlib import Path

CSRC = Path(__file__).resolve().parents[3] / "csrc"
ANONYMOUS = re.compile(r"^namespace \{\n.*?^\}  // namespace\n", re.MULTILINE | re.DOTALL)
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)
# At the beginning of a line, so of a namespace. A specialization has arguments behind its name.
DEFINITIONS = re.compile(
    r"^(?:struct|class|union|enum class)\s+(?:alignas\([^)]*\)\s+)?(\w+)\s*(?:final\s*)?(?::[^:;{<][^;{]*)?\{"
    r"|^(?:inline )?constexpr [^=({;]*?\b(k\w+)\b"
    r"|^using (\w+) =",
    re.MULTILINE,
)


def definitions(text: str) -> set[tuple[str, str]]:
    """(namespace, name) of what a file defines outside of anonymous namespaces."""
    text = ANONYMOUS.sub("", text)
    spaces = NAMESPACE.findall(text)
    space = spaces[-1] if spaces else ""
    return {(space, next(filter(None, names))) for names in DEFINITIONS.findall(text)}


def test_definitions_are_seen():
    text = """namespace a {
namespace {
struct Hidden {};
}  // namespace
template <class T>
struct Shown : Base<T> {
struct alignas(8) Aligned {
template <>
struct Shown<int> : Base<int> {};
inline constexpr int kMost = 3;
template <class T>
using Alias = T;
struct Declared;
"""
    assert definitions(text) == {("a", name) for name in ("Shown", "Aligned", "kMost", "Alias")}


def test_names_are_unique_in_a_namespace():
    found = defaultdict(set)
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in {".h", ".cuh", ".cpp", ".cu"}:
            for name in definitions(path.read_text()):
                found[name].add(str(path.relative_to(CSRC)))
    assert len(found) > 500
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
