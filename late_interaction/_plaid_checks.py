"""What the functions of :mod:`late_interaction.plaid` ask of their arguments, as in ``_checks``."""

from typing import Any

import torch
from torch import Tensor

from late_interaction import _checks
from late_interaction._checks import _shape

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NBITS = (1, 2, 4, 8)
_INT32_MAX = 2**31 - 1  # a code of no centroid, for there are at most so many of them


def integers(name: str, x: Any, shape: str, dims: int, of: str, device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in INTEGERS or x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor of integers, got {x.dtype}, {x.layout}")
    if x.dim() != dims:
        raise ValueError(f"{name} must be {shape}, got {_shape(x)}")
    together(name, x, of, device)


def together(name: str, x: Tensor, of: str, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} must be on the device of {of}, {device}, got {x.device}")


def as_codes(x: Tensor) -> Tensor:
    """int32 codes. An int64 one that int32 cannot hold is out of range, and stays so."""
    if x.dtype == torch.int64:
        x = x.clamp(-1, _INT32_MAX)
    return x.to(torch.int32)


def _one_a_document(name: str, x: Tensor, codes: Tensor) -> None:
    documents = codes.shape[0]
    _checks._require_size(
        x.shape[0] == documents, lambda: f"{name} must be [{documents}], one a document, got {_shape(x)}"
    )


def as_extents(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.int32, torch.int64) else x.to(torch.int64)


def lengths(name: str, x: Tensor, room: int) -> None:
    """Lengths of padded documents, checked where that waits for no GPU; kernels cut them to what exists."""
    if _checks._looked_at(x):
        _checks.lengths_within(name, x, 0, room)


def offsets(name: str, x: Tensor, total: int) -> None:
    """Offsets of packed documents, likewise."""
    _checks._require_size(x.shape[0] > 0, lambda: f"{name} must be [Nd + 1], got {_shape(x)}")
    if not _checks._looked_at(x):
        return
    _checks.rising_within(name, x, total)


def compressed(
    Q: Any,
    codes: tuple[str, Any],
    residuals: tuple[str, Any],
    extents: tuple[str, Any],
    centroids: Any,
    bucket_weights: Any,
    nbits: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """Everything a call on residual-compressed documents must satisfy; each with the name it has there.

    Codes of rank 2 are of padded documents, of rank 1 of packed ones. What comes back is as the operators
    take it: Q [Nq, Lq, d], int32 codes, uint8 residuals, float32 bucket_weights.
    """
    _checks.rows("Q", Q)
    if Q.dim() not in (2, 3):
        raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {_shape(Q)}")
    bits(nbits)
    d, device = Q.shape[-1], Q.device
    packed = codes[0] == "codes_flat"
    integers(*codes, "[tokens]" if packed else "[Nd, Ld]", 1 if packed else 2, "Q", device)
    integers(*residuals, "[tokens, bytes]" if packed else "[Nd, Ld, bytes]", 2 if packed else 3, "Q", device)
    if residuals[1].dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"{residuals[0]} must be uint8, got {residuals[1].dtype}")
    integers(*extents, "[Nd + 1]" if packed else "[Nd]", 1, "Q", device)
    wanted = (*codes[1].shape, (d * nbits + 7) // 8)
    for size, needed in zip(residuals[1].shape, wanted, strict=True):
        _checks._require_size(
            size == needed,
            lambda: (
                f"{residuals[0]} must be {list(wanted)} for d = {d}, nbits = {nbits} and {codes[0]}"
                f" {_shape(codes[1])}, got {_shape(residuals[1])}"
            ),
        )
    if packed:
        offsets(*extents, codes[1].shape[0])
    else:
        _one_a_document(*extents, codes[1])
        lengths(*extents, codes[1].shape[1])
    _checks.embeddings("centroids", centroids)
    if centroids.dim() != 2 or centroids.shape[1] != d or not 0 < centroids.shape[0] <= _INT32_MAX:
        raise ValueError(
            f"centroids must be [n, {d}] with n of at least 1 and below 2**31, got {_shape(centroids)}"
        )
    together("centroids", centroids, "Q", device)
    _checks.embeddings("bucket_weights", bucket_weights)
    if bucket_weights.shape != (2**nbits,):
        raise ValueError(
            f"bucket_weights must be [{2**nbits}] for nbits = {nbits}, got {_shape(bucket_weights)}"
        )
    together("bucket_weights", bucket_weights, "Q", device)
    _checks.no_forward_ad("maxsim_residual", Q, centroids, bucket_weights)
    return (
        Q.unsqueeze(0) if Q.dim() == 2 else Q,
        as_codes(codes[1]),
        residuals[1].to(torch.uint8),
        as_extents(extents[1]),
        centroids.detach(),
        bucket_weights.detach().to(torch.float32),
        nbits,
    )


def bits(nbits: Any) -> None:
    if isinstance(nbits, bool) or not isinstance(nbits, int):
        raise TypeError(f"nbits must be an int, got {type(nbits).__name__}")
    if nbits not in NBITS:
        raise ValueError(f"nbits must be 1, 2, 4 or 8, got {_checks.brief(nbits)}")


def approximate(scores: Any, codes: Any, doc_lengths: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Everything a call of plaid_approx_score must satisfy."""
    _checks.embeddings("query_centroid_scores", scores)
    if scores.dim() != 2 or not 0 < scores.shape[0] <= _INT32_MAX:
        raise ValueError(
            "query_centroid_scores must be [n_centroids, Lq] with at least 1 and less than 2**31 centroids,"
            f" got {_shape(scores)}"
        )
    _checks.no_forward_ad("plaid_approx_score", scores)
    if scores.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "query_centroid_scores wants a gradient, and approximate scores have none: detach it, or call"
            " under torch.no_grad()"
        )
    integers("codes", codes, "[B, Ld]", 2, "query_centroid_scores", scores.device)
    integers("doc_lengths", doc_lengths, "[B]", 1, "query_centroid_scores", scores.device)
    _one_a_document("doc_lengths", doc_lengths, codes)
    lengths("doc_lengths", doc_lengths, codes.shape[1])
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.to(dtype), as_codes(codes), as_extents(doc_lengths)
