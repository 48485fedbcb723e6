"""patch(), what turns patches off, and what patched() counts."""

import importlib
import importlib.metadata
import importlib.util
import logging
import re
import subprocess
import sys
import warnings

import pytest
import torch

import late_interaction as li
from late_interaction.integrations._shared.compat import disabled
from late_interaction.integrations._shared.exchange import Exchanges

PACKAGES = ["pylate", "colpali-engine", "sentence-transformers", "transformers", "mteb", "vllm"]


@pytest.fixture(autouse=True)
def unpatched():
    yield
    li.unpatch()


# ---- what turns a patch off ----


@pytest.mark.parametrize(
    ("said", "package", "is_off"),
    [
        (None, "pylate", False),
        ("", "pylate", False),
        ("0", "pylate", False),
        ("1", "pylate", True),
        ("pylate", "pylate", True),
        ("pylate", "mteb", False),
        ("PyLate, mteb", "mteb", True),
        ("colpali_engine", "colpali-engine", True),
        ("late", "pylate", False),
        ("true", "pylate", False),
    ],
)
def test_disabled(monkeypatch, said, package, is_off):
    monkeypatch.delenv("LATE_INTERACTION_DISABLE", raising=False)
    if said is not None:
        monkeypatch.setenv("LATE_INTERACTION_DISABLE", said)
    assert disabled(package) is is_off


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("all_of_them", [True, False])
def test_a_patch_that_is_turned_off_does_nothing_and_says_so(monkeypatch, package, all_of_them):
    """Not even import the library, which may not be there."""
    said = "1" if all_of_them else f"another,{package}"
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", said)
    reason = f"LATE_INTERACTION_DISABLE={said} turns it off"
    with pytest.warns(RuntimeWarning, match=re.escape(f'patch("{package}") did nothing: {reason}')) as caught:
        assert li.patch(package, quiet=True) == {package: f"skipped, {reason}"}
    assert package not in li.patched() and [w.filename for w in caught] == [__file__]


def test_what_is_turned_off_is_no_warning_where_it_is_not_named(monkeypatch):
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = li.patch()
    assert done == dict.fromkeys(PACKAGES, "skipped, LATE_INTERACTION_DISABLE=1 turns it off")


# ---- patch() ----


def test_what_is_installed_is_patched_and_the_rest_is_said(capsys, caplog):
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    pytest.importorskip("transformers")
    with caplog.at_level(logging.INFO, "late_interaction"):
        done = li.patch()
    assert [*done] == PACKAGES
    for package, what in done.items():
        if package in ("sentence-transformers", "transformers"):
            assert what == f"patched {package} {importlib.metadata.version(package)}"
            assert package in li.patched()
        elif importlib.util.find_spec(package.replace("-", "_")) is None:
            assert what == "skipped, it is not installed"
    assert caplog.messages == [f"{package}: {what}" for package, what in done.items()]
    with caplog.at_level(logging.INFO, "late_interaction"):
        again = li.patch("transformers", quiet=True)
    assert again == {"transformers": "skipped, it is patched already"} and len(caplog.messages) == len(done)
    assert capsys.readouterr() == ("", "")
    li.unpatch("transformers")
    assert "transformers" not in li.patched() and "sentence-transformers" in li.patched()
    li.unpatch()
    assert li.patched() == {}


MODELS = "mteb/models/model_implementations"
MTEB = [
    "mteb/__init__.py",
    "mteb/similarity_functions.py",
    "mteb/models/__init__.py",
    "mteb/models/openai_wrappers.py",
    f"{MODELS}/__init__.py",
    f"{MODELS}/jina_models.py",
]
WRAPPERS = {
    "mteb/models/openai_wrappers.py": "def _max_sim_scores(query_embedding, doc_embeddings): return 0\n",
    f"{MODELS}/jina_models.py": """
class JinaV4Wrapper:
    def score_multi_vector(self, qs, ps, batch_size=16): return "its own"
""",
}


def mteb_of(code):
    return dict.fromkeys(MTEB, "") | WRAPPERS | {"mteb/similarity_functions.py": code}


def test_a_release_that_cannot_be_patched_is_said(install):
    install("mteb", "1.39.7", dict.fromkeys(MTEB, "max_sim = None"))
    needed = 'patch("mteb") needs mteb 2.23 to 2.26, and found mteb 1.39.7, which has none of what is patched'
    assert li.patch(quiet=True)["mteb"] == f"skipped, {needed}"
    with pytest.raises(ImportError, match=f"^{re.escape(needed)}$"):
        li.patch("mteb")


def test_a_package_that_does_not_import_is_said(install):
    install("vllm", "0.9.1", {"vllm/__init__.py": "import no_such_cuda"})
    said = li.patch(quiet=True)["vllm"]
    assert said.startswith("skipped, ") and said.endswith("No module named 'no_such_cuda'")


HELPERS = "_compute_on_best_device = _convert_to_tensor = _is_ragged = _select_device = None\n"
PART = f"""
import warnings
warnings.warn("an old thing", DeprecationWarning)
{HELPERS}_token_budget_chunks = None
def max_sim(a, b, batch_size=128): return "its own"
"""
WHOLE = f"{PART}def pairwise_max_sim(queries_embeddings, documents_embeddings): return 'its own'\n"


def test_what_is_patched_in_part_is_said_and_other_warnings_stay(install):
    install("mteb", "2.26.24", mteb_of(PART))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = li.patch("mteb", quiet=True)["mteb"]
    assert said.startswith("patched in part, did not find mteb.similarity_functions.pairwise_max_sim:")
    assert said.endswith("stays mteb's own; it may have been refactored; 2.23 to 2.26 are known")
    missed = said.removeprefix("patched in part, ")
    assert [str(w.message) for w in caught] == ["an old thing", f'patch("mteb") {missed}']
    assert caught[1].filename == __file__ and "mteb" in li.patched()


def test_an_import_error_leaves_everything_as_it_was(install):
    """What the call has patched is undone; what was patched before stays."""
    install("mteb", "2.26.24", mteb_of(WHOLE))
    install("vllm", "0.9.1", {"vllm/__init__.py": "import no_such_cuda"})
    with pytest.raises(ImportError, match="no_such_cuda"):
        li.patch("mteb", "vllm")
    assert li.patched() == {}
    li.patch("mteb")
    with pytest.raises(ImportError, match="no_such_cuda"):
        li.patch("mteb", "vllm")
    assert [*li.patched()] == ["mteb"]


def test_unknown_names_are_refused():
    for function in (li.patch, li.unpatch):
        with pytest.raises(ValueError, match=r"names must be among pylate, .*, vllm, got 'colpali', 'all'$"):
            function("pylate", "colpali", "all")
        with pytest.raises(TypeError, match=r"names must be str, got \['pylate'\]$"):
            function(["pylate"])


def test_a_library_is_imported_by_its_own_patch_alone():
    code = """
import sys
import late_interaction as li
li.unpatch(), li.patched()
from late_interaction.integrations import colpali_engine, lancedb, mteb, pylate, transformers, vllm
print(*sorted({name.split(".")[0] for name in sys.modules} & {
    "colpali_engine", "lancedb", "mteb", "pylate", "sentence_transformers", "transformers", "vllm"
}))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("\n", "")


# ---- what patched() counts ----


@pytest.fixture
def similarity():
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    li.patch("sentence-transformers")
    return importlib.import_module("sentence_transformers.util.similarity")


def test_what_is_patched_is_listed(similarity):
    (package,) = li.patched()
    found = li.patched()[package]
    assert (package, found.release) == ("sentence-transformers", importlib.metadata.version(package))
    assert "sentence_transformers.util.similarity.maxsim" in found.places
    losses = [
        place for place in found.places if place.endswith("MultiVectorMultipleNegativesRankingLoss.forward")
    ]
    assert losses and (found.served, found.left) == (0, {})
    li.unpatch("sentence-transformers")
    assert li.patched() == {}


def test_calls_that_are_left_to_the_library_are_counted_and_logged_once(similarity, caplog, monkeypatch):
    Q, D = torch.rand(2, 3, 8), torch.rand(4, 5, 8)
    for _ in range(3):
        similarity.maxsim(Q, D)
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "sentence-transformers")
    for _ in range(2):
        similarity.maxsim(Q, D)
    monkeypatch.delenv("LATE_INTERACTION_DISABLE")
    for _ in range(2):
        with pytest.raises(RuntimeError):  # its own code takes no two dtypes
            similarity.maxsim(Q.double(), D)
    found = li.patched()["sentence-transformers"]
    off, dtypes = found.left
    assert found.served == 3 and [*found.left.values()] == [2, 2]
    assert "LATE_INTERACTION_DISABLE turns the patch off" in off
    assert "torch.float64 queries and torch.float32 documents" in dtypes
    logged = [record for record in caplog.records if record.name == "late_interaction"]
    assert [record.levelname for record in logged] == ["WARNING"] * 2
    assert all("sentence-transformers scores a call of" in record.getMessage() for record in logged)
    found.left.clear()  # a copy
    assert len(li.patched()["sentence-transformers"].left) == 2


def test_a_patch_counts_from_its_beginning(similarity):
    similarity.maxsim(torch.rand(2, 3, 8), torch.rand(4, 5, 8))
    assert li.patched()["sentence-transformers"].served == 1
    li.unpatch("sentence-transformers")
    li.patch("sentence-transformers")
    li.patch("sentence-transformers")
    assert li.patched()["sentence-transformers"].served == 0
    similarity.maxsim(torch.rand(2, 3, 8), torch.rand(4, 5, 8))
    li.patch("sentence-transformers")  # changes nothing
    assert li.patched()["sentence-transformers"].served == 1


def test_traced_calls_are_not_counted_and_compile_nothing_anew(similarity):
    """A graph that reads a count would be compiled with each call."""
    chunks = importlib.import_module("late_interaction.integrations.sentence_transformers._chunks")
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph.forward

    Q, D = torch.rand(2, 3, 8), torch.rand(4, 5, 8)
    compiled = torch.compile(lambda Q, D: chunks.score_chunk(Q, D, None, None), backend=backend)
    for _ in range(3):
        compiled(Q, D)
        chunks.score_chunk(Q, D, None, None)
    assert len(frames) == 1 and li.patched()["sentence-transformers"].served == 3


# ---- how code is exchanged ----


def test_exchanges_are_undone_in_order():
    class Base:
        def inherited(self):
            return "base"

    class Library(Base):
        def method(self):
            return "own"

    def function(x):
        return f"own {x}"

    exchanges = Exchanges()
    assert not exchanges
    own = vars(Library)["method"]
    exchanges.attribute(Library, "method", lambda self: "first")
    exchanges.attribute(Library, "method", lambda self: "second")
    exchanges.attribute(Library, "inherited", lambda self: "new")
    exchanges.code(function, (lambda x: f"new {x}").__code__)
    assert exchanges and (Library().method(), Library().inherited(), function(1)) == (
        "second",
        "new",
        "new 1",
    )
    assert exchanges.own(function)(1) == "own 1" and exchanges.had("method") is own
    exchanges.restore()
    assert not exchanges and (Library().inherited(), function(1)) == ("base", "own 1")
    assert vars(Library)["method"] is own and "inherited" not in vars(Library)
