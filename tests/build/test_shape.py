"""The shape of csrc: how long its functions and their parameter lists are.

A function has at most 80 lines. It has at most 7 parameters, unless it implements an operator, which has the
parameters of its schema, or a comment right above it says why it has more. Lists of registrations
(LATE_INTERACTION_LIBRARY, PYBIND11_MODULE) are no functions.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = [path for path in sorted(CSRC.rglob("*")) if path.suffix in (".h", ".cuh", ".cu", ".cpp")]
MOST_LINES, MOST_PARAMETERS = 80, 7

NOT_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'",
    re.DOTALL | re.MULTILINE,
)
# What may stand between the parameters of a function and its body.
BEHIND_PARAMETERS = re.compile(r"(\s|const|noexcept|override|mutable|->[\w:<>,&*\s]+)*")
NO_FUNCTION = re.compile(
    r"\s*(namespace|struct|class|enum|union|extern|if|for|while|switch|do|else|try|catch)\b"
    r"|\s*(LATE_INTERACTION_\w+|PYBIND11_MODULE)\("
)
OPERATOR = re.compile(r'm\.def\(\s*"(\w+)')


class Function(NamedTuple):
    name: str
    line: int
    lines: int
    parameters: int
    comment: str  # right above it


def blank(source):
    """The source with blanks for comments, strings and preprocessor lines; every line where it was."""
    return NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), source)


def close_of(code, opening):
    """Where the parenthesis that opens there is closed, or None."""
    depth = 0
    for at in range(opening, len(code)):
        depth += {"(": 1, ")": -1}.get(code[at], 0)
        if depth == 0:
            return at
    return None


def count_parameters(parameters):
    depth = 0
    commas = 0
    for char in parameters:
        depth += {"(": 1, "<": 1, "[": 1, "{": 1, ")": -1, ">": -1, "]": -1, "}": -1}.get(char, 0)
        commas += char == "," and depth == 0
    return commas + 1 if parameters.strip() else 0


def parse_head(head):
    """The name and the number of parameters of what stands before a brace, if that is a function's."""
    if NO_FUNCTION.match(re.sub(r"template\s*<[^{]*?>\s*(?=\w+\s)", "", head, count=1)):
        return None
    for found in re.finditer(r"(\w+|operator\W+?)\s*\(", head):
        if found.group(1) in ("__launch_bounds__", "alignas", "requires", "decltype", "__attribute__"):
            continue
        end = close_of(head, found.end() - 1)
        if end is None:
            return None
        rest = head[end + 1 :]
        if BEHIND_PARAMETERS.fullmatch(rest) or re.match(r"\s*:(?!:)", rest):  # or initializers
            return found.group(1), count_parameters(head[found.end() : end])
    return None


def functions(source):
    code, raw = blank(source), source.split("\n")
    found, open_braces = [], []
    for brace in re.finditer(r"[{}]", code):
        if brace.group() == "{":
            before = max(code.rfind(end, 0, brace.start()) for end in ";{}")
            head = code[before + 1 : brace.start()]
            parsed = parse_head(head) if "(" in head and head.count("(") == head.count(")") else None
            first = code.count("\n", 0, before + 1 + len(head) - len(head.lstrip()))
            open_braces.append((parsed, first))
        elif open_braces:
            parsed, first = open_braces.pop()
            if parsed is not None:
                above = first
                while above > 0 and raw[above - 1].lstrip().startswith("//"):
                    above -= 1
                last = code.count("\n", 0, brace.start())
                comment = "\n".join(raw[above:first])
                found.append(Function(parsed[0], first + 1, last - first + 1, parsed[1], comment))
    return found


def faults(source, operators):
    bad = []
    for it in functions(source):
        if it.lines > MOST_LINES:
            bad.append(f"line {it.line}: {it.name} has {it.lines} lines")
        if it.parameters > MOST_PARAMETERS and it.name not in operators and not it.comment:
            bad.append(
                f"line {it.line}: {it.name} has {it.parameters} parameters and no comment that says why"
            )
    return bad


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(CSRC).as_posix())
def test_functions_are_short(path):
    operators = set(OPERATOR.findall((CSRC / "ops.cpp").read_text()))
    assert not faults(path.read_text(), operators)


@pytest.mark.parametrize(
    ("head", "name", "parameters"),
    [
        ("int f(int a, std::pair<int, int> b) {\n", "f", 2),
        ("template <class T>\n__global__ void __launch_bounds__(32, 2) kernel(const T t) {\n", "kernel", 1),
        ("S::S(int a, int b) : a_(a), b_(b) {\n", "S", 2),
        ("auto C::at(int i) const -> int {\n", "at", 1),
    ],
)
def test_finds_long_functions(head, name, parameters):
    """The shapes of functions that csrc has, and none that is none."""
    (found,) = functions(head + "  if (x) {\n    y();\n  }\n" + "\n" * 78 + "}\n")
    assert (found.name, found.parameters, found.lines > MOST_LINES) == (name, parameters, True)
    assert not functions("struct alignas(16) S {\n" + "\n" * 100 + "};\nPYBIND11_MODULE(name, m) {\n}\n")
    many = "void f(" + ", ".join(f"int x{i}" for i in range(8)) + ") {\n}\n"
    assert len(faults(many, set())) == 1
    assert not faults(many, {"f"})
    assert not faults("// Why.\n" + many, set())
