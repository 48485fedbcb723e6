"""What :func:`late_interaction.maxsim` warns of, once a process: tokens that are no unit vectors."""

import os
import warnings

import torch
from torch import Tensor

# Norms are looked at once a process, of so many tokens: that waits for the device.
checked = False
_NORMS = 4096


def warn_unnormalized(Q: Tensor, q_mask: Tensor | None) -> None:
    """Looks at the norms of the tokens that count, if no call did before. Q can be read."""
    global checked
    if os.environ.get("LIK_SUPPRESS_NORM_WARN") == "1":
        checked = True
        return
    if Q.is_cuda and _must_not_wait():
        return
    checked = True
    norms = _norms_that_count(Q, q_mask)
    if norms.numel() == 0:
        return
    median = norms.median().item()
    if not 0.9 <= median <= 1.1:
        warnings.warn(
            f"maxsim(normalize=False), but the median norm of Q's tokens is {median:.3f}: ColBERT-style"
            " models score unit vectors. Pass normalize=True, or normalize Q and D first."
            " LIK_SUPPRESS_NORM_WARN=1 silences this, as it does in late-interaction-kernels.",
            UserWarning,
            stacklevel=3,
        )


def _norms_that_count(Q: Tensor, q_mask: Tensor | None) -> Tensor:
    """The norms, on the CPU, of Q's first tokens that are neither masked nor zero. Waits for the device."""
    queries = -(-_NORMS // max(Q.shape[1], 1))  # cut before anything is copied: Q may be large
    norms: Tensor = Q.detach()[:queries, :_NORMS].float().norm(dim=-1)
    if q_mask is not None:
        norms = norms.where(q_mask[:queries, :_NORMS], 0.0)
    norms = norms.cpu()
    return norms[norms > 0]


def _must_not_wait() -> bool:
    return torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() != 0
