"""docs/architecture.md: each way is as short as it says, and each of its files is there."""

import re

import pytest

from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
LIMITS = {"Dense forward": 24, "Dense forward on a CPU": 15, "Lowmem backward": 18, "Varlen": 19, "PLAID": 16}
ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)


def section(way):
    """(the number in its heading, its rows) of a way."""
    match = re.search(rf"^## {way}: (\d+) files$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match, f"docs/architecture.md has no heading '## {way}: N files'"
    return int(match[1]), ROW.findall(match[2])


@pytest.mark.parametrize("way", LIMITS)
def test_a_way_is_as_short_as_it_says_and_its_files_exist(way):
    count, rows = section(way)
    assert len(rows) == len({path for path, _ in rows}) == count <= LIMITS[way]
    for path, line in rows:
        assert (ROOT / path).is_file(), path
        assert 5 <= len(line) <= 100, line


def test_the_map_links_here_and_repeats_no_way():
    readme = (ROOT / "csrc" / "README.md").read_text()
    assert "(../docs/architecture.md)" in readme
    assert len(ROW.findall(readme)) < 40 and "what happens there" not in readme
