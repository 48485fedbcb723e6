"""Packages of other libraries, made up for a test."""

import sys

import pytest

import late_interaction as li
from late_interaction.integrations.sentence_transformers import _originals as originals


@pytest.fixture(scope="module")
def sentence_transformers():
    """The installed release, which nothing has patched."""
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    assert not originals.exchanged()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package of some release, whose modules hold what is given, where Python looks first."""

    def installed(package, release, modules):
        for name in list(sys.modules):
            if name.split(".")[0] == package.replace("-", "_"):
                monkeypatch.delitem(sys.modules, name)
        metadata = tmp_path / f"{package.replace('-', '_')}-{release}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
        for path, code in modules.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(code)
        monkeypatch.syspath_prepend(tmp_path)

    before = set(sys.modules)
    yield installed
    li.unpatch()
    for name in set(sys.modules) - before:
        del sys.modules[name]
