"""patch_all(), what turns patches off, what patched() counts, and install_as()."""

import importlib
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
import warnings
from importlib.machinery import PathFinder

import pytest
import torch

import late_interaction as li
from late_interaction import patches
from late_interaction._patches.compat import disabled
from late_interaction._patches.exchange import Exchanges
from tests import side_by_side

PACKAGES = ["pylate", "colpali-engine", "sentence-transformers", "transformers", "mteb", "vllm"]


@pytest.fixture(autouse=True)
def unpatched():
    yield
    li.unpatch_all()
    li.uninstall_as("late_interaction_kernels")


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


def test_every_patch_is_among_all():
    assert list(patches._PATCHES) == PACKAGES
    public = {name for name in li.__all__ if name.startswith("patch_")} - {"patch_all"}
    assert {patch.patch.__name__ for patch in patches._PATCHES.values()} == public
    assert {f"un{name}" for name in public} == {p.unpatch.__name__ for p in patches._PATCHES.values()}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("all_of_them", [True, False])
def test_a_patch_that_is_turned_off_does_nothing_and_says_so(monkeypatch, package, all_of_them):
    """Not even import the library, which may not be there."""
    said = "1" if all_of_them else f"another,{package}"
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", said)
    patch = patches._PATCHES[package]
    with pytest.warns(
        RuntimeWarning,
        match=rf"{patch.patch.__name__}\(\) did nothing: LATE_INTERACTION_DISABLE={said} turns it off",
    ) as caught:
        patch.patch()
    assert not patch.in_place() and caught[0].filename == __file__
    said_by_all = f"skipped, LATE_INTERACTION_DISABLE={said} turns it off"
    assert li.patch_all([package], quiet=True) == {package: said_by_all}


# ---- patch_all ----


def test_what_is_installed_is_patched_and_the_rest_is_said(capsys, caplog):
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    pytest.importorskip("transformers")
    with caplog.at_level(logging.INFO, "late_interaction"):
        done = li.patch_all()
    for package, what in done.items():
        if package in ("sentence-transformers", "transformers"):
            assert what == f"patched {package} {importlib.metadata.version(package)}"
            assert patches._PATCHES[package].in_place()
        elif importlib.util.find_spec(package.replace("-", "_")) is None:
            assert what == "skipped, it is not installed"
    assert caplog.messages == [f"{package}: {what}" for package, what in done.items()]
    with caplog.at_level(logging.INFO, "late_interaction"):
        again = li.patch_all(["transformers"], quiet=True)
    assert again == {"transformers": "skipped, it is patched already"} and len(caplog.messages) == len(done)
    assert capsys.readouterr() == ("", "")
    li.unpatch_all()
    assert not any(patch.in_place() for patch in patches._PATCHES.values())


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package of some release, whose modules hold what is given, where Python looks first."""

    def installed(package, release, modules):
        metadata = tmp_path / f"{package.replace('-', '_')}-{release}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
        for path, code in modules.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(code)
        monkeypatch.syspath_prepend(tmp_path)

    before = set(sys.modules)
    yield installed
    li.unpatch_all()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_release_that_cannot_be_patched_is_said(install):
    install("mteb", "1.39.7", {"mteb/__init__.py": "", "mteb/similarity_functions.py": "max_sim = None"})
    assert li.patch_all(["mteb"], quiet=True) == {
        "mteb": "skipped, patch_mteb() needs mteb 2.23 to 2.26, and found mteb 1.39.7, which has none of what"
        " is patched"
    }


def test_a_package_that_does_not_import_is_said(install):
    install("vllm", "0.9.1", {"vllm/__init__.py": "import no_such_cuda"})
    said = li.patch_all(["vllm"], quiet=True)["vllm"]
    assert said.startswith("skipped, ") and said.endswith("No module named 'no_such_cuda'")


HELPERS = "_compute_on_best_device = _convert_to_tensor = _is_ragged = _select_device = None\n"
PART = f"""
import warnings
warnings.warn("an old thing", DeprecationWarning)
{HELPERS}_token_budget_chunks = None
def max_sim(a, b, batch_size=128): return "its own"
"""


def test_what_is_patched_in_part_is_said_and_other_warnings_stay(install):
    install("mteb", "2.26.24", {"mteb/__init__.py": "", "mteb/similarity_functions.py": PART})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = li.patch_all(["mteb"], quiet=True)["mteb"]
    assert said.startswith("patched in part, patch_mteb() did not find")
    assert "pairwise_max_sim" in said and "mteb's own" in said
    assert [str(w.message) for w in caught] == ["an old thing"]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"packages must be among pylate, .*, vllm, got 'colpali'$"):
        li.patch_all(["pylate", "colpali"])


# ---- what patched() counts ----


@pytest.fixture
def similarity():
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    li.patch_sentence_transformers()
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
    li.unpatch_sentence_transformers()
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
    li.unpatch_sentence_transformers()
    li.patch_sentence_transformers()
    li.patch_sentence_transformers()
    assert li.patched()["sentence-transformers"].served == 0
    similarity.maxsim(torch.rand(2, 3, 8), torch.rand(4, 5, 8))
    li.patch_sentence_transformers()  # changes nothing
    assert li.patched()["sentence-transformers"].served == 1


def test_traced_calls_are_not_counted_and_compile_nothing_anew(similarity):
    """A graph that reads a count would be compiled with each call."""
    chunks = importlib.import_module("late_interaction._st.chunks")
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


# ---- install_as ----

# Every public name of late-interaction-kernels 0.4.5 but those of its MPS kernels, by its modules.
THEIRS = {
    "": "MaxSimScorer retrieve maxsim_padded patch_pylate unpatch_pylate patch_colpali_engine"
    " unpatch_colpali_engine maxsim maxsim_pairs maxsim_varlen reference __version__",
    "autograd": "maxsim maxsim_pairs",
    "backward": "maxsim_backward_unified maxsim_backward_unified_reference maxsim_backward_lowmem",
    "backward.lowmem": "maxsim_backward_lowmem",
    "backward.unified": "maxsim_backward_unified maxsim_backward_unified_reference",
    "colpali_compat": "patch_colpali_engine unpatch_colpali_engine patched_score_multi_vector",
    "forward": "maxsim_forward",
    "fp8": "maxsim_inference_fp8 quantize_fp8_per_tensor quantize_fp8_per_token dequantize_fp8_per_tensor"
    " dequantize_fp8_per_token",
    "fused_head": "maxsim_from_hidden",
    "padded": "PackedBatch pack_padded maxsim_padded",
    "plaid": "plaid_approx_score maxsim_residual maxsim_residual_varlen",
    "pylate_compat": "patch_pylate unpatch_pylate",
    "reference": "maxsim_reference",
    "retrieve": "MaxSimScorer retrieve",
    "score_pairs": "score_pairs_packed",
    "topk": "maxsim_topk",
    "varlen": "maxsim_varlen",
}


@pytest.mark.parametrize("module", THEIRS)
def test_its_names_are_ours(module):
    li.install_as("late_interaction_kernels")
    path = f".{module}" if module else ""
    found = importlib.import_module(f"late_interaction_kernels{path}")
    own = importlib.import_module(f"late_interaction{path}")
    assert found is own and own.__spec__.name == own.__name__ == f"late_interaction{path}"
    for name in THEIRS[module].split():
        assert getattr(found, name) is getattr(own, name)


def test_in_a_fresh_process():
    """Modules that nobody has loaded yet, a name that is a module and a function, and what is not there."""
    code = """
import sys
import late_interaction as li
li.install_as("late_interaction_kernels")
li.install_as("late_interaction_kernels")
import late_interaction_kernels
assert "late_interaction.fp8" not in sys.modules
from late_interaction_kernels.fp8 import quantize_fp8_per_token
import late_interaction.fp8
assert late_interaction.fp8.quantize_fp8_per_token is quantize_fp8_per_token
assert late_interaction.fp8.__spec__.name == late_interaction.fp8.__name__ == "late_interaction.fp8"
import late_interaction_kernels.retrieve, late_interaction_kernels.backward.lowmem
assert callable(li.retrieve) and late_interaction_kernels is li
import importlib.util
assert importlib.util.find_spec("late_interaction_kernels") is not None
assert importlib.util.find_spec("late_interaction_kernels.int8") is not None
try:
    import late_interaction_kernels.mps
except ModuleNotFoundError as error:
    assert error.name == "late_interaction_kernels.mps"
else:
    raise AssertionError
import importlib
importlib.reload(late_interaction.fp8)
li.uninstall_as("late_interaction_kernels")
li.uninstall_as("late_interaction_kernels")
assert not [name for name in sys.modules if name.startswith("late_interaction_kernels")]
try:
    import late_interaction_kernels
except ModuleNotFoundError:
    print("gone")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "gone\n", run.stderr


def test_the_real_one_is_not_replaced_once_it_is_imported(install):
    install("late-interaction-kernels", "0.4.5", {"late_interaction_kernels/__init__.py": "real = True"})
    theirs = importlib.import_module("late_interaction_kernels")
    with pytest.raises(ImportError, match=r"came too late: .* is imported already, from .*__init__\.py"):
        li.install_as("late_interaction_kernels")
    assert importlib.import_module("late_interaction_kernels") is theirs
    li.uninstall_as("late_interaction_kernels")  # nothing of ours: the real one stays
    assert sys.modules["late_interaction_kernels"] is theirs


def test_the_real_one_is_found_again_afterwards(install):
    files = {f"late_interaction_kernels/{name}.py": "real = True" for name in ("__init__", "varlen")}
    install("late-interaction-kernels", "0.4.5", files)
    li.install_as("late_interaction_kernels")
    assert importlib.import_module("late_interaction_kernels") is li
    li.uninstall_as("late_interaction_kernels")
    for name in ("late_interaction_kernels", "late_interaction_kernels.varlen"):
        assert importlib.import_module(name).real


def test_a_second_name_stays_when_the_first_is_given_up(monkeypatch):
    """The name and its modules, also one that is imported afterwards: in front of whatever finds files."""
    monkeypatch.setattr(sys, "meta_path", [PathFinder, *sys.meta_path, PathFinder])
    li.install_as("a_maxsim")
    li.install_as("b_maxsim")
    try:
        li.uninstall_as("a_maxsim")
        assert not [name for name in sys.modules if name.startswith("a_maxsim")]
        assert sys.modules["b_maxsim"] is li and "b_maxsim.varlen" in sys.modules
        sys.modules.pop("b_maxsim.fp8", None)
        assert importlib.import_module("b_maxsim.fp8") is importlib.import_module("late_interaction.fp8")
    finally:
        li.uninstall_as("b_maxsim")


def test_nothing_is_left_of_a_name_that_is_given_up():
    before = list(sys.meta_path)
    li.install_as("a_maxsim")
    try:
        assert sys.meta_path[1:] == before
        assert importlib.util.find_spec("a_maxsim.no_such_module") is None
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'a_maxsim\.no_such_module'"):
            importlib.import_module("a_maxsim.no_such_module")
    finally:
        li.uninstall_as("a_maxsim")
    assert sys.meta_path == before and "a_maxsim" not in sys.modules


@pytest.mark.parametrize("said", ["1", "late-interaction-kernels", "late_interaction_kernels"])
def test_install_as_can_be_turned_off(monkeypatch, said):
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", said)
    with pytest.warns(RuntimeWarning, match=r"install_as\(\) did nothing"):
        li.install_as("late_interaction_kernels")
    assert "late_interaction_kernels" not in sys.modules


@pytest.mark.parametrize(
    ("name", "error"),
    [("late_interaction", ValueError), ("a.b", ValueError), ("", ValueError), (None, TypeError)],
)
def test_names_that_are_refused(name, error):
    with pytest.raises(error, match="name must be"):
        li.install_as(name)


def test_pylate_scores_by_us_without_a_patch(monkeypatch):
    """PyLate's own backend for late-interaction-kernels imports it by its name."""
    stand_in = side_by_side.anything("fast_plaid")
    with side_by_side.release("pylate", "pylate", "1.6.0", [stand_in]) as folder:
        package = side_by_side.without_its_init("pylate", folder)
        scores = side_by_side.without_its_init("pylate/scores", folder)
        for name, module in (("pylate", package), ("pylate.scores", scores)):
            monkeypatch.setitem(sys.modules, name, module)
        backend = importlib.import_module("pylate.scores._lik_backend")
        li.install_as("late_interaction_kernels")
        monkeypatch.setattr(backend, "_lik_device", lambda *tensors: "cuda")  # on a CPU too
        import torch

        Q, D = torch.randn(3, 5, 8), torch.randn(3, 7, 8)
        mask = torch.rand(3, 7) < 0.7
        with side_by_side.Calls() as called:
            grid = backend.colbert_scores_lik(Q, D, None, mask.float())
            pairs = backend.colbert_scores_pairwise_lik(Q, D)
            candidates = backend.colbert_kd_scores_lik(Q, D.unsqueeze(1))
        torch.testing.assert_close(grid, li.maxsim(Q, D, None, mask))
        torch.testing.assert_close(pairs, li.maxsim_pairs(Q, D))
        torch.testing.assert_close(candidates, li.maxsim(Q, D.unsqueeze(1)))
        assert called.of == {"maxsim": 3}


def test_colpali_engine_scores_by_us_without_a_patch(monkeypatch):
    with side_by_side.release("colpali-engine", "colpali_engine", "0.3.18") as folder:
        for name in ("colpali_engine", "colpali_engine/utils"):
            module = side_by_side.without_its_init(name, folder)
            monkeypatch.setitem(sys.modules, name.replace("/", "."), module)
        backend = importlib.import_module("colpali_engine.utils._lik_backend")
        li.install_as("late_interaction_kernels")
        monkeypatch.setattr(backend, "_lik_device", lambda *tensors: "cuda")
        import torch

        Q, D = torch.randn(3, 5, 8), torch.randn(4, 7, 8)
        torch.testing.assert_close(backend.maxsim_inbatch_lik(Q, D), li.maxsim(Q, D))
        D = torch.randn(3, 2, 7, 8)
        torch.testing.assert_close(backend.maxsim_kd_lik(Q, D), li.maxsim(Q, D))
