"""late_interaction.lik, late-interaction-kernels 0.4.5 by its own names, and install_as()."""

import importlib
import importlib.util
import inspect
import subprocess
import sys
from importlib.machinery import PathFinder

import pytest
import torch

import late_interaction as li
from tests.support import side_by_side


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    li.uninstall_as("late_interaction_kernels")


# Its functions but those of its MPS kernels: their positional arguments, and after "|" the keyword-only ones.
MASKED = "Q D q_mask=None d_mask=None"
PACKED = "Q_packed D_packed cu_seqlens_q cu_seqlens_d"
PADDED = "queries documents query_lengths doc_lengths"
PATCHED = "queries_embeddings documents_embeddings queries_mask=None documents_mask=None"
SIGNATURES = {
    "autograd.maxsim": f"{MASKED} | normalize=False backward=None",
    "autograd.maxsim_pairs": f"{MASKED} | normalize=False backward=None",
    "forward.maxsim_forward": f"{MASKED} | save_argmax=False normalize=False",
    "backward.lowmem.maxsim_backward_lowmem": "grad_scores Q D argmax q_mask=None | kd_layout=False",
    "backward.unified.maxsim_backward_unified": "grad_scores Q D argmax q_mask=None | kd_layout=False",
    "backward.unified.maxsim_backward_unified_reference": "grad_scores Q D argmax q_mask=None",
    "fused_head.maxsim_from_hidden": "Q H_d W b=None d_mask=None normalize=True",
    "fp8.quantize_fp8_per_tensor": "X dtype=torch.float8_e4m3fn",
    "fp8.quantize_fp8_per_token": "X dtype=torch.float8_e4m3fn",
    "fp8.dequantize_fp8_per_tensor": "X_fp8 scale",
    "fp8.dequantize_fp8_per_token": "X_fp8 scale",
    "fp8.maxsim_inference_fp8": "Q D | scale_Q scale_D q_mask=None d_mask=None",
    "plaid.plaid_approx_score": "query_centroid_scores codes doc_lengths",
    "plaid.maxsim_residual": (
        "Q codes residuals doc_lengths centroids bucket_weights nbits | normalize=True"
    ),
    "plaid.maxsim_residual_varlen": (
        "Q codes_flat residuals_flat cu_seqlens_d centroids bucket_weights nbits"
        " | max_seqlen_d=None normalize=True"
    ),
    "reference.maxsim_reference": f"{MASKED} | normalize=False",
    "reference.maxsim_reference_varlen": "Q D cu_seqlens_q cu_seqlens_d",
    "reference.maxsim_reference_scatter": f"{PACKED} pair_q_idx pair_d_idx",
    "reference.maxsim_padded_reference": f"{PADDED}",
    "reference.maxsim_from_hidden_reference": "Q H_d W b=None d_mask=None | normalize=True",
    "reference.plaid_approx_score_reference": "query_centroid_scores codes doc_lengths",
    "reference.unpack_residuals_reference": "residuals nbits d",
    "reference.maxsim_residual_reference": (
        "Q codes residuals doc_lengths centroids bucket_weights nbits | normalize=True"
    ),
    "padded.maxsim_padded": f"{PADDED} | validate=False",
    "padded.pack_padded": f"{PADDED} | validate=False",
    "varlen.maxsim_varlen": f"{PACKED} max_seqlen_q=None max_seqlen_d=None",
    "score_pairs.score_pairs_packed": f"{PACKED} pair_q_idx pair_d_idx | max_seqlen_q=None max_seqlen_d=None",
    "retrieve.retrieve": (
        "Q D top_k q_mask=None d_mask=None | normalize=True chunk=None largest=True sorted=True"
    ),
    "retrieve.MaxSimScorer": "| normalize=True backward='auto' mask_pad_token=None",
    "retrieve.MaxSimScorer.forward": f"self {MASKED}",
    "retrieve.MaxSimScorer.score": f"self {MASKED}",
    "retrieve.MaxSimScorer.retrieve": "self Q D top_k q_mask=None d_mask=None | chunk=None",
    "retrieve.MaxSimScorer.forward_with_ids": "self Q D q_ids d_ids",
    "pylate_compat.patch_pylate": "|",
    "pylate_compat.unpatch_pylate": "|",
    "pylate_compat.patched_colbert_scores": f"{PATCHED} | mask=None",
    "pylate_compat.patched_colbert_kd_scores": f"{PATCHED} | mask=None",
    "pylate_compat.patched_colbert_scores_pairwise": f"{PATCHED} | mask=None",
    "colpali_compat.patch_colpali_engine": "|",
    "colpali_compat.unpatch_colpali_engine": "|",
    "colpali_compat.patched_score_multi_vector": "qs ps batch_size=128 device=None",
    "topk.maxsim_topk": (
        "Q D k q_mask=None d_mask=None | normalize=False chunk_size=None largest=True sorted=True"
    ),
}
# Further paths to them.
PATHS = {
    "": "MaxSimScorer retrieve maxsim_padded patch_pylate unpatch_pylate patch_colpali_engine"
    " unpatch_colpali_engine maxsim maxsim_pairs maxsim_varlen reference __version__",
    "backward": "maxsim_backward_unified maxsim_backward_unified_reference maxsim_backward_lowmem",
    "padded": "PackedBatch",
    "plaid": "plaid_approx_score_reference maxsim_residual_reference",
    "reference": "NEG_INF",
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures_are_its_own(path):
    module, _, names = path.rpartition(".") if "MaxSimScorer." not in path else path.partition(".")
    found = importlib.import_module(f"late_interaction.lik.{module}")
    for name in names.split("."):
        found = getattr(found, name)
    parameters = inspect.signature(found).parameters.values()
    positional, _, keywords = SIGNATURES[path].partition("|")

    def bare(kind):
        found = [p for p in parameters if p.kind is kind]
        return [f"{p.name}={p.default!r}" if p.default is not p.empty else p.name for p in found]

    assert bare(inspect.Parameter.POSITIONAL_OR_KEYWORD) == positional.split()
    assert set(bare(inspect.Parameter.KEYWORD_ONLY)) == set(keywords.split())


@pytest.mark.parametrize("module", PATHS)
def test_names_have_its_paths(module):
    found = importlib.import_module(f"late_interaction.lik.{module}".rstrip("."))
    assert set(PATHS[module].split()) <= set(found.__all__)


def test_its_defaults_normalize_where_ours_do_not():
    Q, D = 3 * torch.randn(2, 4, 8), 2 * torch.randn(5, 6, 8)
    unit_Q, unit_D = torch.nn.functional.normalize(Q, dim=-1), torch.nn.functional.normalize(D, dim=-1)
    expected = li.maxsim(unit_Q, unit_D).topk(3)
    for found in (li.lik.retrieve(Q, D, top_k=3), li.lik.MaxSimScorer().retrieve(Q, D, top_k=3)):
        torch.testing.assert_close(found[0], expected.values)
        torch.testing.assert_close(found[1], expected.indices)
    torch.testing.assert_close(li.lik.MaxSimScorer()(Q, D), li.maxsim(unit_Q, unit_D))
    head = importlib.import_module("late_interaction.lik.fused_head")
    torch.testing.assert_close(head.maxsim_from_hidden(unit_Q, D, torch.eye(8)), li.maxsim(unit_Q, unit_D))


def test_a_scorer_holds_its_options():
    Q, D = torch.randn(5, 6, 16), torch.randn(37, 11, 16)
    q_mask, d_mask = torch.rand(5, 6) < 0.8, torch.rand(37, 11) < 0.8
    scorer = li.lik.MaxSimScorer(normalize=False, backward="lowmem", mask_pad_token=7)
    assert "normalize=False" in repr(scorer) and "'lowmem'" in repr(scorer) and "7" in repr(scorer)
    assert not list(scorer.parameters()) and scorer.state_dict() == {}
    expected = li.maxsim(Q, D, q_mask, d_mask)
    assert torch.equal(scorer(Q, D, q_mask, d_mask), expected)
    assert torch.equal(scorer.score(Q, D, q_mask, d_mask), expected)
    Q.requires_grad_()
    assert scorer(Q, D).requires_grad and not scorer.score(Q, D).requires_grad
    q_ids, d_ids = (torch.where(m, 1, 7) for m in (q_mask, d_mask))
    assert torch.equal(scorer.forward_with_ids(Q, D, q_ids, d_ids), expected)
    scores, indices = scorer.retrieve(Q, D, 4, q_mask, d_mask, chunk=9)
    torch.testing.assert_close(scores, expected.topk(4).values)
    assert torch.equal(indices, expected.topk(4).indices)


def test_the_ids_of_padding_are_int64():
    Q = torch.ones(1, 2, 4)
    ids = torch.tensor([[3, -(1 << 63)]]), torch.tensor([[(1 << 63) - 1, 1]])
    for token in (-(1 << 63), (1 << 63) - 1):
        scores = li.lik.MaxSimScorer(mask_pad_token=token, normalize=True).forward_with_ids(Q, Q, *ids)
        assert float(scores) == pytest.approx(1.0 if token < 0 else 2.0)
    for token in (-(1 << 63) - 1, 1 << 63):
        with pytest.raises(ValueError, match="mask_pad_token must"):
            li.lik.MaxSimScorer(mask_pad_token=token, normalize=True)


def test_errors_name_its_arguments():
    Q, D = torch.randn(2, 4, 8), torch.randn(5, 6, 8)
    topk = importlib.import_module("late_interaction.lik.topk")
    for call, name in (
        (lambda: li.lik.retrieve(Q, D, top_k=0), "top_k"),
        (lambda: li.lik.MaxSimScorer().retrieve(Q, D, 2, chunk=0), "chunk"),
        (lambda: topk.maxsim_topk(Q, D, 2, chunk_size=0), "chunk_size"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0"):
            call()
    with pytest.raises(TypeError, match=r"D must be a torch\.Tensor"):
        li.lik.retrieve(Q, [[1.0]], 2, chunk=1)


# ---- install_as ----


def test_in_a_fresh_process():
    """Modules that nobody has loaded yet, a name that is a module and a function, and what is not there."""
    code = """
import sys
import late_interaction as li
li.install_as("late_interaction_kernels")
li.install_as("late_interaction_kernels")
import late_interaction_kernels
assert "late_interaction.lik.fp8" not in sys.modules
from late_interaction_kernels.fp8 import quantize_fp8_per_token
import late_interaction.lik.fp8 as fp8
assert fp8.quantize_fp8_per_token is quantize_fp8_per_token
assert fp8.__spec__.name == fp8.__name__ == "late_interaction.lik.fp8"
import late_interaction_kernels.retrieve, late_interaction_kernels.backward.lowmem
assert callable(li.lik.retrieve) and late_interaction_kernels is li.lik
import importlib.util
assert importlib.util.find_spec("late_interaction_kernels") is not None
assert importlib.util.find_spec("late_interaction_kernels.topk") is not None
assert importlib.util.find_spec("late_interaction_kernels.int8") is None
try:
    import late_interaction_kernels.mps
except ModuleNotFoundError as error:
    assert error.name == "late_interaction_kernels.mps"
else:
    raise AssertionError
import importlib
importlib.reload(fp8)
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


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A package of its name where Python looks first."""
    (tmp_path / "late_interaction_kernels").mkdir()
    for name in ("__init__", "varlen"):
        (tmp_path / "late_interaction_kernels" / f"{name}.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("late_interaction_kernels")]:
        del sys.modules[name]


@pytest.mark.usefixtures("real")
def test_the_real_one_is_not_replaced_once_it_is_imported():
    theirs = importlib.import_module("late_interaction_kernels")
    with pytest.raises(ImportError, match=r"came too late: .* is imported already, from .*__init__\.py"):
        li.install_as("late_interaction_kernels")
    assert importlib.import_module("late_interaction_kernels") is theirs
    li.uninstall_as("late_interaction_kernels")  # nothing of ours: the real one stays
    assert sys.modules["late_interaction_kernels"] is theirs


@pytest.mark.usefixtures("real")
def test_the_real_one_is_found_again_afterwards():
    li.install_as("late_interaction_kernels")
    assert importlib.import_module("late_interaction_kernels") is li.lik
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
        assert sys.modules["b_maxsim"] is li.lik and "b_maxsim.varlen" in sys.modules
        sys.modules.pop("b_maxsim.fp8", None)
        assert importlib.import_module("b_maxsim.fp8") is importlib.import_module("late_interaction.lik.fp8")
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
    with side_by_side.release("pylate", "pylate", "1.6.0", bare=["pylate", "pylate.scores"]):
        backend = importlib.import_module("pylate.scores._lik_backend")
        li.install_as("late_interaction_kernels")
        monkeypatch.setattr(backend, "_lik_device", lambda *tensors: "cuda")  # on a CPU too

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
    bare = ["colpali_engine", "colpali_engine.utils"]
    with side_by_side.release("colpali-engine", "colpali_engine", "0.3.18", bare=bare):
        backend = importlib.import_module("colpali_engine.utils._lik_backend")
        li.install_as("late_interaction_kernels")
        monkeypatch.setattr(backend, "_lik_device", lambda *tensors: "cuda")

        Q, D = torch.randn(3, 5, 8), torch.randn(4, 7, 8)
        torch.testing.assert_close(backend.maxsim_inbatch_lik(Q, D), li.maxsim(Q, D))
        D = torch.randn(3, 2, 7, 8)
        torch.testing.assert_close(backend.maxsim_kd_lik(Q, D), li.maxsim(Q, D))
