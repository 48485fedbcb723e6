"""Packages of other libraries, made up for a test."""

import importlib
import sys

import pytest

import late_interaction as li
from late_interaction.integrations.sentence_transformers._originals import COLBERT, SIMILARITY, XTR
from tests.support import side_by_side


class SentenceTransformers:
    """The modules of a release."""

    def __init__(self, version):
        self.version = version
        name = "sentence_transformers.multi_vector_encoder"
        self.similarity, self.colbert, self.xtr = map(importlib.import_module, (SIMILARITY, COLBERT, XTR))
        self.losses = importlib.import_module(f"{name}.losses")
        self.evaluation = importlib.import_module(f"{name}.evaluation")
        self.root = importlib.import_module("sentence_transformers")

    def function(self, name):
        return getattr(self.similarity if hasattr(self.similarity, name) else self.colbert, name)


@pytest.fixture(scope="module")
def sentence_transformers():
    """The installed release, which nothing has patched."""
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    assert not li.patched()


@pytest.fixture(scope="module", params=[*side_by_side.releases("sentence-transformers"), None])
def st_release(request):
    with side_by_side.sentence_transformers(request.param):
        yield SentenceTransformers(request.param)


@pytest.fixture
def st(st_release):
    assert not li.patched()
    yield st_release
    li.unpatch("sentence-transformers")


@pytest.fixture(scope="module", params=side_by_side.releases("pylate"))
def pylate_release(request):
    with side_by_side.pylate(request.param) as module:
        yield module


@pytest.fixture
def pylate(pylate_release):
    assert not li.patched()
    yield pylate_release
    li.unpatch("pylate")


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
