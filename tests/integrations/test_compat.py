"""What the patches of other libraries ask before they take a call over."""

import importlib.metadata
import sys
from importlib.machinery import PathFinder

import pytest
import torch

import late_interaction as li
from late_interaction.integrations._shared import compat
from late_interaction.integrations._shared.compat import (
    brief_cause,
    nothing_to_patch,
    package_at_least,
    why_left,
)


@pytest.mark.parametrize(
    ("installed", "minimum", "is_later"),
    [
        ("1.5.1", "1.5.1", True),
        ("1.10.0", "1.5.1", True),  # by number, not by letter
        ("1.5", "1.5.1", False),
        ("1.5.0.post1", "1.5.1", False),
        ("1.5.1rc1", "1.5.1", True),  # what the release will have
        ("2", "1.5.1", True),
        ("unknown", "1.5.1", False),
    ],
)
def test_releases_are_compared_by_number(monkeypatch, installed, minimum, is_later):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    assert package_at_least("some-package", minimum) is is_later


def test_a_package_that_is_not_installed_is_no_release():
    assert not package_at_least("no-such-package-anywhere", "0")


Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
REFUSED = {
    "integers": (Q.int(), D.int()),
    "two dtypes": (Q, D.bfloat16()),
    "two devices": (Q, D.to("meta")),
    "a device without kernels": (Q.to("meta"), D.to("meta")),
    "two widths": (Q, D[..., :5]),
    "nothing": (Q[:0], D),
    "documents of no token": (Q, D[:, :0]),
}


def test_embeddings_are_served(device, monkeypatch):
    q, d = Q.to(device), D.to(device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert why_left(q.to(dtype), d.to(dtype)) is None
    with torch.autocast(device, torch.bfloat16):
        assert why_left(q, d.bfloat16()) is None
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "0")
    assert why_left(q, d) is None
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    assert why_left(q, d)


@pytest.mark.parametrize("what", REFUSED)
def test_the_rest_is_not(what):
    assert why_left(*REFUSED[what])


def test_one_number_is_served():
    assert why_left(torch.ones(1, 1, 1), torch.ones(1, 1, 1)) is None


@pytest.mark.parametrize(("missing", "capability", "has"), [
    (None, (7, 0), False), (None, (7, 5), True), (None, (8, 9), True), (None, (9, 0), True),
    ("no library", (9, 0), False),
])  # fmt: skip
def test_devices_with_kernels(missing, capability, has, monkeypatch):
    """GPUs of compute capability 7.5 or higher where the CUDA library is, the CPU anywhere, and no other."""
    monkeypatch.setattr(compat.ops, "cuda_missing", missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for device, wanted in (("cuda", has), ("cpu", True), ("meta", False), ("xpu", False)):
        assert compat.has_kernels.__wrapped__(torch.device(device)) == wanted


def test_a_release_that_is_not_known_is_said():
    said = str(nothing_to_patch("no-such-package", "1 to 2", ModuleNotFoundError("No module 'x'", name="x")))
    found = "no-such-package of an unknown release, which does not import: ModuleNotFoundError: No module 'x'"
    assert said == f'patch("no-such-package") needs no-such-package 1 to 2, and found {found}'
    assert str(nothing_to_patch("no-such-package", "1 to 2", None)).endswith("and found none")


def test_a_cause_is_told_in_one_line_of_300_characters():
    assert brief_cause(ValueError("a\n\nb")) == "ValueError: a b"
    whole = f"ValueError: {'a' * 288}"
    assert len(whole) == 300 and brief_cause(ValueError("a" * 288)) == whole
    assert brief_cause(ValueError("a" * 289)) == "ValueError: ..."


@pytest.mark.gpu
def test_a_gpu_without_kernels_is_not_served(monkeypatch):
    compat.has_kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    try:
        assert why_left(Q.cuda(), D.cuda())
    finally:
        compat.has_kernels.cache_clear()


# ---- what a patch says where there is nothing to patch ----

NEEDED = {
    "colpali-engine": "colpali-engine 0.3.10 to 0.3.18",
    "pylate": "pylate 1.3.3 to 1.6",
    "sentence-transformers": "sentence-transformers 6.0 to 6.2",
}
FAILURES = {
    "a missing package": ("import no_such_pillow", "ModuleNotFoundError: No module named 'no_such_pillow'"),
    "another exception": ("raise OSError('libcuda\\n  is gone')", "OSError: libcuda is gone"),
    "a long one": ("raise RuntimeError('x ' * 10000)", "RuntimeError: x x "),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("package", NEEDED)
def test_a_package_that_does_not_import_is_named_with_the_cause(install, package, failure):
    code, cause = FAILURES[failure]
    install(package, "1.4.0", {f"{package.replace('-', '_')}/__init__.py": code})
    with pytest.raises(ImportError) as caught:
        li.patch(package)
    said = str(caught.value)
    assert said.startswith(
        f'patch("{package}") needs {NEEDED[package]}, and found {package} 1.4.0, which does not import:'
        f" {cause}"
    )
    assert len(said) < 500 and "\n" not in said and caught.value.__cause__ is not None


@pytest.mark.parametrize("package", NEEDED)
def test_a_package_that_is_not_there(monkeypatch, package):
    name = package.replace("-", "_")
    for loaded in [module for module in sys.modules if module.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    with pytest.raises(ImportError) as caught:
        li.patch(package)
    assert str(caught.value) == f'patch("{package}") needs {NEEDED[package]}, and found none'


LOSSES = "class ColbertLoss:\n    def forward(self): return 'their own'\n"


def test_what_does_not_import_is_named_beside_what_does(install):
    """The losses are patched; processing, which needs what is missing, is not."""
    packages = dict.fromkeys([f"colpali_engine/{name}__init__.py" for name in ("", "loss/", "utils/")], "")
    losses = {"colpali_engine/loss/late_interaction_losses.py": LOSSES}
    broken = {"colpali_engine/utils/processing_utils.py": "import no_such_pillow"}
    install("colpali-engine", "0.3.12", packages | losses | broken)
    why = r"processing_utils does not import \(ModuleNotFoundError: No module named 'no_such_pillow'\)"
    with pytest.warns(RuntimeWarning, match=f"did not find .*score_multi_vector.*{why}"):
        li.patch("colpali-engine")
    loss = importlib.import_module("colpali_engine.loss.late_interaction_losses").ColbertLoss
    assert loss.forward.__globals__["torch"] is not torch
    # Unpatching asks for no module again: whatever became of them, the classes get back what they had.
    for name in list(sys.modules):
        if name.startswith("colpali_engine"):
            del sys.modules[name]
    li.unpatch("colpali-engine")
    assert "torch" not in loss.forward.__globals__ and not li.patched()


def test_a_release_without_multi_vector_encoder_is_named(install):
    """As Sentence Transformers 5 is."""
    files = dict.fromkeys([f"sentence_transformers/{name}__init__.py" for name in ("", "util/")], "")
    files["sentence_transformers/util/similarity.py"] = "def cos_sim(a, b): pass\n"
    install("sentence-transformers", "5.3.0", files)
    with pytest.raises(
        ImportError, match=r"sentence-transformers 5\.3\.0, which does not import: .*encoder'"
    ):
        li.patch("sentence-transformers")


def test_functions_of_sentence_transformers_are_patched_where_its_losses_do_not_import(install):
    inner = ("", "util/", "multi_vector_encoder/", "multi_vector_encoder/scoring/")
    code = dict.fromkeys([*(f"{name}__init__" for name in inner), f"{inner[3]}colbert"], "")
    code[f"{inner[2]}losses/__init__"] = "import no_such_tqdm"
    code["util/similarity"] = "def _maxsim_score_pairs(a, b, a_mask, b_mask): return 'its own'\n"
    files = {f"sentence_transformers/{name}.py": source for name, source in code.items()}
    install("sentence-transformers", "6.1.0", files)
    why = r"losses does not import \(ModuleNotFoundError: No module named 'no_such_tqdm'\)"
    with pytest.warns(RuntimeWarning, match=f"did not find .*NegativesRankingLoss.*{why}"):
        li.patch("sentence-transformers")
    function = importlib.import_module("sentence_transformers.util.similarity")._maxsim_score_pairs
    assert any(name.endswith("_chunks") for name in function.__code__.co_names)
    li.unpatch("sentence-transformers")
    assert function(0, 0, None, None) == "its own"
