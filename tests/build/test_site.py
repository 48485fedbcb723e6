"""The web site that `make site` builds: what its pages must name, and how a browser shows it."""

import pydoc
import re
import shutil

import pytest

from tests.docs.test_surface import public
from tests.support.programs import ROOT, printed

DOCS = ROOT / "docs"
SITE = ROOT / ".venv" / "build" / "site"
PYTHON = ROOT / ".venv" / "site" / "bin" / "python"
INTERNAL = {"host_copy", "winners"}  # modules of ops that have no operator to document
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def documented():
    pages = (DOCS / "api").glob("*.md")
    return [name for page in pages for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE)]


def test_every_public_name_is_on_an_api_page():
    names = documented()
    assert len(names) == len(set(names))
    shown = {id(pydoc.locate(name)) for name in names}
    hidden = {name.rpartition(".")[2] for name, x in public("ops", "lik").items() if id(x) not in shown}
    assert hidden <= {"ops", "reference", "__version__"}


def test_every_module_of_operators_is_on_an_api_page():
    listed = {name for name in documented() if name.startswith("late_interaction.ops.")}
    modules = {path.stem for path in (ROOT / "late_interaction" / "ops").glob("[!_]*")} - INTERNAL
    assert listed == {f"late_interaction.ops.{name}" for name in modules}


def test_every_page_is_in_the_menu_once():
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"([\w/]+\.md)$", menu, re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_includes_are_spelt_as_the_builder_reads_them():
    for page in DOCS.rglob("*.md"):
        for line in page.read_text().splitlines():
            if "include:" in line:
                match = re.fullmatch(r"<!-- include: ([\w./-]+)(?:#(.+?))? -->", line)
                assert match and (ROOT / match[1]).is_file(), (page, line)
                assert not match[2] or f"\n## {match[2]}\n" in (ROOT / match[1]).read_text()


def test_a_browser_shows_the_site(tmp_path):
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make site")
    if not any(map(shutil.which, BROWSERS)) or not [
        *PYTHON.parents[1].glob("lib/*/site-packages/playwright")
    ]:
        pytest.skip("no Chromium with playwright: make browse installs them")
    printed(PYTHON, ROOT / "tools" / "site" / "browse.py", SITE, tmp_path, timeout=300)
    pictures = [*tmp_path.glob("*.png")]
    assert len(pictures) >= 20
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in pictures)
