"""Every path that a page names exists, as a reader would type it from the root or from the page's folder."""

import re

import pytest

from tests.support.programs import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "csrc/README.md"]
PAGES += [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
SUFFIXES = r"py|cpp|h|cu|cuh|md|txt|toml|json|yaml|cmake|png"
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(rf"^[\w.-]+(/[\w.-]+)*(/|\.({SUFFIXES}))$")
# What commands write, and names that stand for any file of theirs.
WRITTEN = {"compile_commands.json", "metadata.json", "doclens.N.json", "building.json"}
WRITTEN |= {".venv/", "dist/", ".venv/build/"}
# Names of a file that each folder of a kind has.
KINDS = {"entry.cpp", "run.cpp", "run.h", "args.h", "launch.h", "launch.cuh", "launcher.h", "kernel.cuh"}
KINDS |= {"instances/"}


def paths(page):
    return {word for word in CODE.findall((ROOT / page).read_text()) if PATH.match(word)} - WRITTEN - KINDS


def exists(page, name):
    folders = (ROOT, (ROOT / page).parent, ROOT / "csrc")
    return any((folder / name).exists() for folder in folders)


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    assert [name for name in sorted(paths(page)) if not exists(page, name)] == []


@pytest.mark.parametrize(("page", "fewest"), [("CONTRIBUTING.md", 25), ("docs/architecture.md", 60)])
def test_pages_name_paths(page, fewest):
    assert len(paths(page)) >= fewest


def test_every_folder_of_csrc_is_on_its_map():
    """The map names the folders in blocks of their own: each exists, and none is forgotten."""
    text = (ROOT / "csrc" / "README.md").read_text()
    folders = {path.name for path in (ROOT / "csrc").rglob("*") if path.is_dir()}
    assert {name for name in folders if not re.search(rf"\b{name}/", text)} == set()
    block = text.split("```")[1]
    for name in re.findall(r"^ *((?:[a-z]\w*/)*\w+\.(?:h|cuh|cpp))\b", block, re.MULTILINE):
        assert [*(ROOT / "csrc").rglob(name)], name


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
