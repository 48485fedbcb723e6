"""Checks of the tensors of a residual codec."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.tensors import check_embeddings, check_not_meta


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
