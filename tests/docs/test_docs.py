"""The public surface: names, signatures and docstrings. (pytest --doctest-modules runs the examples.)"""

import importlib
import inspect
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import late_interaction as li

# Names, order and defaults as in late-interaction-kernels 0.4.5, so that code moves over by its import alone.
# "|" ends the positional arguments; what comes after a second "|" is ours.
MASKED = "Q D q_mask=None d_mask=None"
OURS = "precision=None winners=None q_weights=None mean=False"
PATCHED = "queries_embeddings documents_embeddings queries_mask=None documents_mask=None"
SIGNATURES = {
    "autograd.maxsim": f"{MASKED} | normalize=False backward=None | {OURS}",
    "autograd.maxsim_pairs": f"{MASKED} | normalize=False backward=None | {OURS}",
    "autograd.maxsim_with_winners": f"{MASKED} | normalize=False backward=None | precision=None",
    "forward.maxsim_forward": f"{MASKED} | save_argmax=False normalize=False | precision=None",
    "backward.lowmem.maxsim_backward_lowmem": "grad_scores Q D argmax q_mask=None | kd_layout=False |",
    "backward.unified.maxsim_backward_unified": "grad_scores Q D argmax q_mask=None | kd_layout=False |",
    "backward.unified.maxsim_backward_unified_reference": "grad_scores Q D argmax q_mask=None | |",
    "fused_head.maxsim_from_hidden": (
        "Q H_d W b=None d_mask=None normalize=True | | q_mask=None project_Q=False precision=None"
    ),
    "fp8.quantize_fp8_per_tensor": "X dtype=torch.float8_e4m3fn | |",
    "fp8.quantize_fp8_per_token": "X dtype=torch.float8_e4m3fn | |",
    "fp8.dequantize_fp8_per_tensor": "X_fp8 scale | |",
    "fp8.dequantize_fp8_per_token": "X_fp8 scale | |",
    "fp8.maxsim_inference_fp8": "Q D | scale_Q scale_D q_mask=None d_mask=None |",
    "int8.maxsim_inference_int8": "Q D | | scale_Q scale_D q_mask=None d_mask=None",
    "plaid.plaid_approx_score": "query_centroid_scores codes doc_lengths | |",
    "plaid.maxsim_residual": (
        "Q codes residuals doc_lengths centroids bucket_weights nbits | normalize=True |"
    ),
    "plaid.maxsim_residual_varlen": (
        "Q codes_flat residuals_flat cu_seqlens_d centroids bucket_weights nbits"
        " | max_seqlen_d=None normalize=True |"
    ),
    "reference.maxsim_reference": "Q D q_mask=None d_mask=None | normalize=False |",
    "reference.maxsim_reference_varlen": "Q D cu_seqlens_q cu_seqlens_d | | normalize=False",
    "reference.maxsim_reference_scatter": (
        "Q_packed D_packed cu_seqlens_q cu_seqlens_d pair_q_idx pair_d_idx | | normalize=False"
    ),
    "reference.maxsim_padded_reference": "queries documents query_lengths doc_lengths | | normalize=False",
    "reference.maxsim_from_hidden_reference": "Q H_d W b=None d_mask=None | normalize=True |",
    "reference.plaid_approx_score_reference": "query_centroid_scores codes doc_lengths | |",
    "reference.unpack_residuals_reference": "residuals nbits d | |",
    "reference.maxsim_residual_reference": (
        "Q codes residuals doc_lengths centroids bucket_weights nbits | normalize=True |"
    ),
    "padded.maxsim_padded": (
        "queries documents query_lengths doc_lengths | validate=False | q_weights=None mean=False"
    ),
    "padded.pack_padded": "queries documents query_lengths doc_lengths | validate=False |",
    "varlen.maxsim_varlen": (
        "Q_packed D_packed cu_seqlens_q cu_seqlens_d max_seqlen_q=None max_seqlen_d=None"
        " | | precision=None q_weights=None mean=False"
    ),
    "varlen.pack_sequences": "sequences | |",
    "score_pairs.score_pairs_packed": (
        "Q_packed D_packed cu_seqlens_q cu_seqlens_d pair_q_idx pair_d_idx"
        " | max_seqlen_q=None max_seqlen_d=None | precision=None q_weights=None mean=False"
    ),
    "score_pairs.rerank_direct": (
        "Q batch_tensor doc_offsets doc_lengths max_seqlen_d=None | | precision=None"
    ),
    "retrieve.retrieve": (
        "Q D top_k q_mask=None d_mask=None | normalize=True chunk=None largest=True sorted=True"
        " | progress=False precision=None scale_Q=None scale_D=None group=None coarse=None candidates=None"
        " keep_empty=False"
    ),
    "retrieve.MaxSimScorer": "| normalize=True backward='auto' mask_pad_token=None | precision=None",
    "retrieve.MaxSimScorer.forward": "self Q D q_mask=None d_mask=None | |",
    "retrieve.MaxSimScorer.score": "self Q D q_mask=None d_mask=None | |",
    "retrieve.MaxSimScorer.retrieve": (
        "self Q D top_k q_mask=None d_mask=None | chunk=None | progress=False group=None keep_empty=False"
    ),
    "retrieve.MaxSimScorer.forward_with_ids": "self Q D q_ids d_ids | |",
    "pylate_compat.patch_pylate": "| |",
    "pylate_compat.unpatch_pylate": "| |",
    "pylate_compat.patched_colbert_scores": f"{PATCHED} | mask=None |",
    "pylate_compat.patched_colbert_kd_scores": f"{PATCHED} | mask=None |",
    "pylate_compat.patched_colbert_scores_pairwise": f"{PATCHED} | mask=None |",
    "colpali_compat.patch_colpali_engine": "| |",
    "colpali_compat.unpatch_colpali_engine": "| |",
    "colpali_compat.patched_score_multi_vector": "qs ps batch_size=128 device=None | |",
    "st_compat.patch_sentence_transformers": "| |",
    "st_compat.unpatch_sentence_transformers": "| |",
    "xtr.xtr_scores": (
        "Q D k q_mask=None d_mask=None | | rule='paper' q_weights=None precision=None backward=None"
    ),
    "pooling.pool_tokens": (
        "D pool_factor=2 | | method='ward' d_mask=None cu_seqlens=None protected_tokens=1 normalize=False"
        " iterations=10"
    ),
    "smooth.smooth_maxsim": "Q D q_mask=None d_mask=None | | tau=0.1 normalize=False",
    "smooth.smooth_maxsim_pairs": "Q D q_mask=None d_mask=None | | tau=0.1 normalize=False",
    "reference.smooth_maxsim_reference": "Q D q_mask=None d_mask=None | | tau=0.1 normalize=False",
    "reference.xtr_scores_reference": "Q D k q_mask=None d_mask=None | | rule='paper' q_weights=None",
    "topk.maxsim_topk": (
        "Q D k q_mask=None d_mask=None | normalize=False chunk_size=None largest=True sorted=True"
        " | progress=False precision=None scale_Q=None scale_D=None group=None keep_empty=False"
    ),
}


def find(path):
    module, *names = path.split(".")
    found = importlib.import_module(f"late_interaction.{module}")
    for name in names:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path):
    parameters = inspect.signature(find(path)).parameters.values()
    positional, theirs, ours = SIGNATURES[path].split("|")

    def bare(kind):
        return [f"{p.name}={p.default!r}" if p.default is not p.empty else p.name for p in kind]

    assert bare(p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == positional.split()
    keyword = bare(p for p in parameters if p.kind is p.KEYWORD_ONLY)
    assert set(keyword) == {*theirs.split(), *ours.split()}


def test_top_level():
    assert set(li.__all__) >= {
        "MaxSimScorer",
        "Muvera",
        "__version__",
        "explain_plan",
        "maxsim",
        "maxsim_pairs",
        "maxsim_padded",
        "maxsim_varlen",
        "maxsim_with_winners",
        "patch_colpali_engine",
        "patch_pylate",
        "patch_sentence_transformers",
        "pool_tokens",
        "reference",
        "retrieve",
        "smooth_maxsim",
        "smooth_maxsim_pairs",
        "unpatch_colpali_engine",
        "unpatch_pylate",
        "unpatch_sentence_transformers",
        "xtr_scores",
    }
    assert callable(li.retrieve) and inspect.ismodule(li.reference)
    from late_interaction.retrieve import retrieve

    assert li.retrieve is retrieve


def modules():
    found = (m.name for m in pkgutil.walk_packages(li.__path__, "late_interaction.") if not m.ispkg)
    return [name for name in found if name.split(".")[-1] not in ("_C", "_cuda")]  # libraries, not modules


@pytest.mark.parametrize("name", modules())
def test_every_public_function_is_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    if any(part.startswith("_") for part in name.split(".")) or ".ops." in name:
        return
    for public in module.__all__:
        documentation = inspect.getdoc(getattr(module, public))
        for section in ("Args:", "Returns:", "Example:", ">>> "):
            if section == "Returns:" and inspect.isclass(getattr(module, public)):
                continue
            assert section in documentation, f"{name}.{public} lacks {section}"


OPERATORS = {
    "dense": "maxsim maxsim_winners maxsim_backward maxsim_backward_recompute",
    "weighted": "maxsim_weighted maxsim_weighted_winners maxsim_weighted_backward",
    "varlen": (
        "maxsim_varlen maxsim_varlen_winners maxsim_varlen_backward"
        " maxsim_varlen_weighted maxsim_varlen_weighted_winners maxsim_varlen_weighted_backward"
    ),
    "pairs": (
        "maxsim_pairs_packed maxsim_pairs_packed_winners maxsim_pairs_packed_backward maxsim_spans"
        " maxsim_pairs_packed_weighted maxsim_pairs_packed_weighted_winners"
        " maxsim_pairs_packed_weighted_backward"
    ),
    "quantized": "maxsim_quantized maxsim_dequantized",
    "packed_codes": "maxsim_hamming maxsim_asymmetric",
    "plaid": "maxsim_residual maxsim_residual_winners maxsim_residual_backward plaid_approx_score",
    "smooth": "smooth_maxsim smooth_maxsim_backward",
    "xtr": "xtr_winners",
    "pooling": "ward_labels kmeans_labels",
    "muvera": "muvera_encode",
    "from_hidden": "maxsim_from_hidden maxsim_from_hidden_winners maxsim_from_hidden_backward",
}


@pytest.mark.parametrize("module", OPERATORS)
def test_the_operators_are_documented(module):
    documented = importlib.import_module(f"late_interaction.ops.{module}").__doc__
    for op in OPERATORS[module].split():
        assert f"``{op}(" in documented and f"``{op}``" in li.ops.__doc__
        arguments = [a.name for a in getattr(torch.ops.late_interaction, op).default._schema.arguments]
        assert all(argument in documented for argument in arguments)


def test_every_operator_has_its_module():
    listed = {op for ops in OPERATORS.values() for op in ops.split()}
    assert {
        name
        for name in li.ops.__all__
        if name.startswith(("maxsim", "smooth", "plaid", "xtr", "ward", "kmeans", "muvera"))
    } == listed


def without(library):
    """Imports the package where one of its libraries was not built."""
    return f"""
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.endswith({library!r}) else found(name, *rest)
import late_interaction, torch
"""


def test_without_the_compiled_library():
    run = subprocess.run([sys.executable, "-c", without("._C")], capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: late_interaction has no compiled library _C: "), run.stderr
    assert "another folder, or build in place with `pip install --no-build-isolation -e .`" in last


def test_a_checkout_that_hides_the_installed_copy_says_so(tmp_path):
    """As after `pip install .`, when Python is started in the checkout."""
    checkout, site = tmp_path / "checkout", tmp_path / "environment" / "site-packages"
    sources = Path(li.__file__).parent
    for folder, left_out in ((checkout, "*.so"), (site, "__pycache__")):
        shutil.copytree(sources, folder / "late_interaction", ignore=shutil.ignore_patterns(left_out))
    environment = os.environ | {"PYTHONPATH": str(site)}

    def imported(folder):
        command = [sys.executable, "-c", "import late_interaction; print(late_interaction.__file__)"]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    last = imported(checkout).stderr.strip().splitlines()[-1]
    hides, hidden = checkout / "late_interaction", site / "late_interaction"
    assert f"_C: the source folder {hides} hides the copy that is installed in {hidden}." in last, last
    assert "Start Python in another folder" in last and "`pip install --no-build-isolation -e .`" in last
    assert imported(tmp_path).stdout.strip() == str(site / "late_interaction" / "__init__.py")


def test_without_the_cuda_library():
    code = (
        without("._cuda") + "print(late_interaction.maxsim(torch.ones(1, 1, 1), torch.ones(1, 2, 1)).item())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1.0\n"


@pytest.mark.gpu
def test_cuda_tensors_without_the_cuda_library():
    code = without("._cuda") + "x = torch.ones(1, 1, 1, device='cuda'); late_interaction.maxsim(x, x)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: late_interaction has no CUDA kernels for these CUDA tensors"), (
        run.stderr
    )
