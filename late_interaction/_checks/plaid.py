"""Checks of residual-compressed documents: maxsim_residual, maxsim_residual_varlen, plaid_approx_score."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.dense import check_queries
from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.tensors import (
    as_dtype,
    check_device,
    check_embeddings,
    check_integers,
    check_lengths,
    check_no_forward_ad,
    check_not_meta,
    check_rising,
    check_rows,
    check_size,
    has_values_on_cpu,
    scores_dtype,
)

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NBITS = (1, 2, 4, 8)
_INT32_MAX = 2**31 - 1  # no centroid has this code, for there are at most so many of them

_Compressed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]


def check_compressed(
    Q: Any,
    codes: tuple[str, Any],
    residuals: tuple[str, Any],
    extents: tuple[str, Any],
    centroids: Any,
    bucket_weights: Any,
    nbits: Any,
) -> _Compressed:
    """Check a call on residual-compressed documents; codes, residuals and extents come with their names.

    codes_flat are of packed documents, with extents as offsets; codes are of padded ones, with lengths. What
    comes back is as the operators take it: Q [Nq, Lq, d], int32 codes, uint8 residuals, float32
    bucket_weights.
    """
    check_rows("Q", Q)
    check_queries(Q)
    check_nbits(nbits)
    packed = codes[0] == "codes_flat"
    dims, form = (1, "tokens") if packed else (2, "Nd, Ld")
    check_integers(*codes, dims, f"[{form}]", "Q", Q.device, INTEGERS)
    check_integers(*residuals, dims + 1, f"[{form}, bytes]", "Q", Q.device, INTEGERS)
    if residuals[1].dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"{residuals[0]} must be uint8, got {residuals[1].dtype}")
    check_integers(*extents, 1, "[Nd + 1]" if packed else "[Nd]", "Q", Q.device, INTEGERS)
    d, wanted = Q.shape[-1], (*codes[1].shape, (Q.shape[-1] * nbits + 7) // 8)
    for size, needed in zip(residuals[1].shape, wanted, strict=True):
        check_size(
            size == needed,
            lambda: (
                f"{residuals[0]} must be {list(wanted)} for d = {d}, nbits = {nbits} and {codes[0]}"
                f" {shape_of(codes[1])}, got {shape_of(residuals[1])}"
            ),
        )
    if packed:
        check_size(
            extents[1].shape[0] > 0, lambda: f"{extents[0]} must be [Nd + 1], got {shape_of(extents[1])}"
        )
        if has_values_on_cpu(extents[1]):
            check_rising(*extents, codes[1].shape[0])
    else:
        _check_doc_lengths(*extents, codes[1])
    _check_codebook(centroids, bucket_weights, Q, nbits)
    check_no_forward_ad("maxsim_residual", Q, centroids, bucket_weights)
    return (
        Q.unsqueeze(0) if Q.dim() == 2 else Q,
        as_codes(codes[1]),
        as_dtype(residuals[1], torch.uint8),
        _as_extents(extents[1]),
        centroids.detach(),
        as_dtype(bucket_weights.detach(), torch.float32),
        nbits,
    )


def _check_codebook(centroids: Any, bucket_weights: Any, Q: Tensor, nbits: int) -> None:
    d = Q.shape[-1]
    check_embeddings("centroids", centroids)
    if centroids.dim() != 2 or centroids.shape[1] != d or not 0 < centroids.shape[0] <= _INT32_MAX:
        raise ValueError(
            f"centroids must be [n, {d}] with n of at least 1 and below 2**31, got {shape_of(centroids)}"
        )
    check_device("centroids", centroids, "Q", Q.device)
    check_embeddings("bucket_weights", bucket_weights)
    if bucket_weights.shape != (2**nbits,):
        raise ValueError(
            f"bucket_weights must be [{2**nbits}] for nbits = {nbits}, got {shape_of(bucket_weights)}"
        )
    check_device("bucket_weights", bucket_weights, "Q", Q.device)


def check_nbits(nbits: Any) -> None:
    if isinstance(nbits, bool) or not isinstance(nbits, int):
        raise TypeError(f"nbits must be an int, got {type(nbits).__name__}")
    if nbits not in NBITS:
        raise ValueError(f"nbits must be 1, 2, 4 or 8, got {abbreviate(nbits)}")


def check_approx_score(scores: Any, codes: Any, doc_lengths: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Check a call of plaid_approx_score, and return its arguments as the operator takes them."""
    check_embeddings("query_centroid_scores", scores)
    if scores.dim() != 2 or not 0 < scores.shape[0] <= _INT32_MAX:
        raise ValueError(
            "query_centroid_scores must be [n_centroids, Lq] with at least 1 and less than 2**31 centroids,"
            f" got {shape_of(scores)}"
        )
    check_no_forward_ad("plaid_approx_score", scores)
    if scores.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "query_centroid_scores must not require a gradient, for approximate scores have none: detach it,"
            " or call under torch.no_grad()"
        )
    of = "query_centroid_scores", scores.device, INTEGERS
    check_integers("codes", codes, 2, "[B, Ld]", *of)
    check_integers("doc_lengths", doc_lengths, 1, "[B]", *of)
    _check_doc_lengths("doc_lengths", doc_lengths, codes)
    return as_dtype(scores, scores_dtype(scores)), as_codes(codes), _as_extents(doc_lengths)


def _check_doc_lengths(name: str, lengths: Tensor, codes: Tensor) -> None:
    """Require one length a document, within its padded tokens. Kernels on a GPU cut them."""
    documents = codes.shape[0]
    check_size(
        lengths.shape[0] == documents,
        lambda: f"{name} must be [{documents}], one a document, got {shape_of(lengths)}",
    )
    if has_values_on_cpu(lengths):
        check_lengths(name, lengths, 0, codes.shape[1])


def as_codes(x: Tensor) -> Tensor:
    """Return int32 codes. An int64 one that int32 cannot hold is out of range, and stays so."""
    if x.dtype == torch.int64:
        x = x.clamp(-1, _INT32_MAX)
    return as_dtype(x, torch.int32)


def _as_extents(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.int32, torch.int64) else x.to(torch.int64)


def check_codebook(centroids: Tensor, bucket_cutoffs: Tensor, bucket_weights: Tensor) -> None:
    """Require centroids, and the cutoffs and weights of 2**nbits buckets, on one device. Waits for it."""
    _check_centroids(centroids)
    nbits = _nbits_of(bucket_weights)
    _check_buckets("bucket_cutoffs", bucket_cutoffs, 2**nbits - 1, nbits, centroids.device)
    _check_buckets("bucket_weights", bucket_weights, 2**nbits, nbits, centroids.device)
    if bool((bucket_cutoffs[1:] < bucket_cutoffs[:-1]).any()):
        raise ValueError(f"bucket_cutoffs must be non-decreasing, got {abbreviate(bucket_cutoffs.tolist())}")


def _check_centroids(centroids: Tensor) -> None:
    check_embeddings("centroids", centroids)
    if centroids.dtype == torch.float64:
        raise TypeError("centroids must be float32, float16 or bfloat16, got torch.float64")
    if centroids.dim() != 2 or not centroids.numel() or len(centroids) >= 2**31:
        raise ValueError(f"centroids must be [n, d] with at least one row, got {shape_of(centroids)}")
    check_not_meta("centroids", centroids)
    if not bool(centroids.isfinite().all()):
        raise ValueError("centroids must be finite, got NaN or an infinity")


def _check_buckets(name: str, x: Tensor, size: int, nbits: int, device: torch.device) -> None:
    check_embeddings(name, x)
    if x.shape != (size,) or x.device != device:
        raise ValueError(
            f"{name} must be [{size}] for nbits = {nbits}, on the device of centroids, {device}, got"
            f" {shape_of(x)} on {x.device}"
        )
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {abbreviate(x.tolist())}")


def _nbits_of(bucket_weights: Any) -> int:
    check_embeddings("bucket_weights", bucket_weights)
    nbits = len(bucket_weights).bit_length() - 1 if bucket_weights.dim() == 1 else 0
    if nbits not in (1, 2, 4, 8) or len(bucket_weights) != 2**nbits:
        raise ValueError(
            f"bucket_weights must be [2**nbits] with nbits 1, 2, 4 or 8, got {shape_of(bucket_weights)}"
        )
    return nbits
