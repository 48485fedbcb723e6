"""The operators ``torch.ops.late_interaction.*``: public, and what every function of this package calls.

``Q`` is ``[Nq, Lq, d]``. ``D`` is ``[Nd, Ld, d]`` (in-batch: every query meets every document) or
``[Nq, K, Ld, d]`` (each query meets its own ``K``); ``N`` below is ``Nd`` or ``K``. Masks are bool, True =
keep, shaped as their tokens without ``d``. ``paired``: query ``i`` meets document ``i`` alone, ``D`` is
``[Nq, Ld, d]``, and scores and winners have no dim ``N``.

``maxsim(Q, D, q_mask, d_mask, normalize=False, precision="highest", backward="auto", paired=False)
-> scores``
    ``scores`` is ``[Nq, N]``, float32 (float64 for float64 inputs). Differentiable; the backward finds the
    winners again, so nothing but the inputs is kept for it.
``maxsim_winners(...the same...) -> (scores, winners)``
    ``winners`` is ``[Nq, N, Lq]``: the document token that each query token matched. int16 while
    ``Ld <= 65534``, holding the unsigned 16-bit index, with -1 for "none"; int32 above. Differentiable in
    ``scores``; keeps ``Q``, ``D`` and ``winners`` for the backward.
``maxsim_backward(grad_scores, Q, D, winners, normalize=False, backward="auto", need_grad_Q=True,
need_grad_D=True, paired=False) -> (grad_Q, grad_D)``
    A gradient that is not needed comes back with zero elements. Not differentiable again.
``maxsim_backward_recompute(grad_scores, Q, D, q_mask, d_mask, normalize=False, precision="highest",
backward="auto", need_grad_Q=True, need_grad_D=True, paired=False) -> (grad_Q, grad_D)``
    The same without winners, which it finds again as a forward with these options does; on a GPU in parts
    that take at most 16 MiB (one document's, if those take more). ``"auto"`` is ``"lowmem"`` here.

``maxsim_quantized(Q, D, scale_Q, scale_D, q_mask, d_mask) -> scores``
    ``Q`` and ``D`` hold codes, both float8_e4m3fn, float8_e5m2 or int8; scales are float32, 0-dim (one for
    all tokens) or shaped as masks (one a token), finite and not negative: another one makes the scores that
    it reaches NaN. Not differentiable.
``maxsim_dequantized(...the same...) -> scores``
    The same by way of float32 copies: what the former does where a GPU has no kernel for the call.

``maxsim_varlen``, ``maxsim_varlen_winners`` and ``maxsim_varlen_backward`` are those of packed tokens, see
:mod:`late_interaction.ops.varlen`; ``maxsim_pairs_packed``, ``maxsim_pairs_packed_winners``,
``maxsim_pairs_packed_backward`` and ``maxsim_spans`` those of listed pairs of them, see
:mod:`late_interaction.ops.pairs`.

``maxsim_residual(Q, codes, residuals, extents, centroids, bucket_weights, nbits, normalize=True,
precision="highest") -> scores``
    ``Q`` against documents stored as centroids and residuals (:mod:`late_interaction.plaid`). ``codes``
    (int32) and ``residuals`` (uint8) are ``[Nd, Ld]`` and ``[Nd, Ld, bytes]`` with ``extents`` ``[Nd]``, the
    documents' lengths, or ``[tokens]`` and ``[tokens, bytes]`` with ``extents`` ``[Nd + 1]``, their offsets.
    ``bucket_weights`` is float32, ``[2**nbits]``. Differentiable in ``Q``.
``maxsim_residual_winners(...the same...) -> (scores, winners)``
    ``winners`` as those of ``maxsim_winners``, int32 where documents have offsets. Differentiable in
    ``scores``, with respect to ``Q``.
``maxsim_residual_backward(grad_scores, Q, codes, residuals, extents, centroids, bucket_weights, winners,
nbits, normalize=True) -> grad_Q``
    Not differentiable again.
``plaid_approx_score(query_centroid_scores, codes, doc_lengths) -> scores``
    float32 or float64 ``[n_centroids, Lq]`` gathered by int32 codes ``[B, Ld]``. Not differentiable.
``maxsim_from_hidden(Q, H, W, b, q_mask, d_mask, normalize=True, precision="highest") -> scores``
    ``D`` is the rows of ``H [Nd, Ld, d_model]`` times ``W.T [d_model, d]`` plus ``b [d]``, ``normalize`` for
    it alone; a chunk of documents at a time. Differentiable in ``Q``, ``H``, ``W`` and ``b``, which share a
    dtype or mix float32 with one half precision, which then is what multiplies.
``maxsim_from_hidden_winners(...the same...) -> (scores, winners)``
    Differentiable in ``scores``.
``maxsim_from_hidden_backward(grad_scores, Q, H, W, b, winners, normalize=True, precision="highest",
need_grad_Q=True, need_grad_H=True, need_grad_W=True, need_grad_b=True) -> (grad_Q, grad_H, grad_W, grad_b)``
    Deterministic. A gradient that is not needed comes back with zero elements. Not differentiable again.

``precision`` is how float32 inputs multiply: ``"highest"``, ``"high"`` (TF32's significant bits),
``"medium"`` (bfloat16) or ``"fp16"``; the last two in TF32 where that is faster. Under autocast, float32
inputs keep their dtype and multiply in the autocast dtype, likewise.

``torch.func.grad``, ``vjp`` and ``jacrev`` take every differentiable operator. Forward-mode derivatives
(``jvp``, ``jacfwd``, dual tensors) and ``vmap`` of a forward are a RuntimeError that says so.

>>> import torch, late_interaction
>>> Q, D = torch.eye(2).unsqueeze(0), torch.eye(2).flip(0).unsqueeze(0)
>>> scores, winners = torch.ops.late_interaction.maxsim_winners(Q, D, None, None)
>>> scores, winners
(tensor([[2.]]), tensor([[[1, 0]]], dtype=torch.int16))
"""

import importlib.util

import torch


def _library(name: str) -> str | None:
    """Where the compiled library ``late_interaction/<name>.abi3.so`` lies, if it was built."""
    spec = importlib.util.find_spec(f"late_interaction.{name}")
    return spec.origin if spec else None


def _load_cpu() -> None:
    path = _library("_C")
    if path is None:
        raise ImportError(
            "late_interaction has no compiled library _C: build it with `pip install .`, or in a source tree"
            " with `python setup.py build_ext --inplace`."
        )
    torch.ops.load_library(path)


def _load_cuda() -> str | None:
    """Loads the CUDA kernels where PyTorch is a CUDA build. Returns why they are missing, or None."""
    if not torch.version.cuda:
        return "this PyTorch is not a CUDA build"
    path = _library("_cuda")
    if path is None:
        return (
            "late_interaction was built without them; build it again with nvcc and"
            " LATE_INTERACTION_WITH_CUDA=1, or install a CUDA wheel"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} does not load ({error})"
    return None


_load_cpu()
cuda_missing = _load_cuda()

# Registered in this order because each needs the schemas that _load_cpu brought.
from late_interaction.ops import (  # noqa: E402
    autocast,
    autograd,
    dequantized,
    fake,
    from_hidden,
    pairs,
    recompute,
    residual,
    unsupported,
    varlen,
)

fake.register()
autograd.register()
autocast.register()
varlen.register()
pairs.register()
dequantized.register()
from_hidden.register()
recompute.register()
residual.register()
unsupported.register(cuda_missing)

maxsim = torch.ops.late_interaction.maxsim.default
maxsim_winners = torch.ops.late_interaction.maxsim_winners.default
maxsim_backward = torch.ops.late_interaction.maxsim_backward.default
maxsim_backward_recompute = torch.ops.late_interaction.maxsim_backward_recompute.default
maxsim_varlen = torch.ops.late_interaction.maxsim_varlen.default
maxsim_varlen_winners = torch.ops.late_interaction.maxsim_varlen_winners.default
maxsim_varlen_backward = torch.ops.late_interaction.maxsim_varlen_backward.default
maxsim_pairs_packed = torch.ops.late_interaction.maxsim_pairs_packed.default
maxsim_pairs_packed_winners = torch.ops.late_interaction.maxsim_pairs_packed_winners.default
maxsim_pairs_packed_backward = torch.ops.late_interaction.maxsim_pairs_packed_backward.default
maxsim_spans = torch.ops.late_interaction.maxsim_spans.default
maxsim_quantized = torch.ops.late_interaction.maxsim_quantized.default
maxsim_dequantized = torch.ops.late_interaction.maxsim_dequantized.default
maxsim_residual = torch.ops.late_interaction.maxsim_residual.default
maxsim_residual_winners = torch.ops.late_interaction.maxsim_residual_winners.default
maxsim_residual_backward = torch.ops.late_interaction.maxsim_residual_backward.default
plaid_approx_score = torch.ops.late_interaction.plaid_approx_score.default
maxsim_from_hidden = torch.ops.late_interaction.maxsim_from_hidden.default
maxsim_from_hidden_winners = torch.ops.late_interaction.maxsim_from_hidden_winners.default
maxsim_from_hidden_backward = torch.ops.late_interaction.maxsim_from_hidden_backward.default
cuda_capability = torch.ops.late_interaction.cuda_capability.default
forced_plan = torch.ops.late_interaction.forced_plan.default
explain_plan = torch.ops.late_interaction.explain_plan.default
explain_residual_plan = torch.ops.late_interaction.explain_residual_plan.default
step = autograd.step
beneath = autograd.beneath

__all__ = [
    "beneath",
    "cuda_capability",
    "cuda_missing",
    "explain_plan",
    "explain_residual_plan",
    "forced_plan",
    "maxsim",
    "maxsim_backward",
    "maxsim_backward_recompute",
    "maxsim_dequantized",
    "maxsim_from_hidden",
    "maxsim_from_hidden_backward",
    "maxsim_from_hidden_winners",
    "maxsim_pairs_packed",
    "maxsim_pairs_packed_backward",
    "maxsim_pairs_packed_winners",
    "maxsim_quantized",
    "maxsim_residual",
    "maxsim_residual_backward",
    "maxsim_residual_winners",
    "maxsim_spans",
    "maxsim_varlen",
    "maxsim_varlen_backward",
    "maxsim_varlen_winners",
    "maxsim_winners",
    "plaid_approx_score",
    "step",
]
