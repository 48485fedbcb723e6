"""Comments and docstrings are sentences: none begins with "Of", as a fragment without a subject does."""

import re

import pytest

from tests.support.programs import ROOT

FOLDERS = ("bench", "csrc", "demo", "examples", "late_interaction", "tests", "tools")
SUFFIXES = {".py", ".cpp", ".cu", ".cuh", ".h"}
MARK = r'(?:#|//|""")'
# The first line of a comment: the one above is none, or is empty.
FRAGMENT = re.compile(rf"(?<!\S)({MARK})[ ]*Of [a-z]")


def fragments(text):
    found, before = [], ""
    for line in text.splitlines():
        line = line.strip()
        match = FRAGMENT.search(line)
        continues = match and match.start() == 0 and match[1] != '"""' and before.startswith(match[1])
        if match and not continues:
            found.append(line)
        before = line
    return found


def test_a_fragment_is_seen():
    assert fragments("x = 1\n# Of the row.\ny = 2  # Of all\n") == ["# Of the row.", "y = 2  # Of all"]
    assert fragments('def f():\n    """Of a row."""\n') == ['"""Of a row."""']
    assert fragments("# Both take a row.\n# Of these the first is larger.\n") == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_comment_is_a_fragment(folder):
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    assert paths
    found = {str(path.relative_to(ROOT)): fragments(path.read_text()) for path in paths}
    assert {
        path: lines for path, lines in found.items() if lines and path != "tests/build/test_comments.py"
    } == {}
