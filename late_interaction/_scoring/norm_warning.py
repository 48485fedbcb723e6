"""What public functions warn of, each once a process: tokens that are no unit vectors."""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from late_interaction._torch import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
)

# The functions that have looked at norms, of so many tokens: that waits for the device.
looked: set[str] = set()
_NORMS = 4096
# A warning points at the first frame that lies elsewhere.
_SKIPPED = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


class _State(threading.local):
    muted = False


_STATE = _State()


def look(
    name: str,
    Q: Tensor | Sequence[Tensor],
    q_mask: Tensor | None = None,
    *,
    option: bool = True,
    called: str = "Q",
    project: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Look at the norms of the tokens that count, once a function.

    Nothing is done if the function of this name did before, or if norms cannot be read now.

    Args:
        name: of the public function that was called without ``normalize``.
        Q: checked queries (or documents), ``[Nq, Lq, d]``, ``[Lq, d]`` or packed, or a list of ``[L, d]``.
        q_mask: ``Q``'s shape without ``d``.
        option: whether the function can normalize.
        called: the name of ``Q`` among the function's arguments.
        project: what makes the tokens that are scored of those in ``Q``.
    """
    if is_compiling() or name in looked or _STATE.muted:
        return
    if os.environ.get("LIK_SUPPRESS_NORM_WARN") == "1":
        looked.add(name)
        return
    if not _can_be_read(Q if isinstance(Q, Tensor) else Q[0]):
        return
    norms = _norms_that_count(Q, q_mask, project)
    if norms.numel() == 0:  # a call that only warms up hides nothing
        return
    looked.add(name)
    median = norms.median().item()
    if not 0.9 <= median <= 1.1:
        warnings.warn(
            f"{name}{'(normalize=False)' if option else ' does not normalize'}, but the median norm of"
            f" {called}'s tokens is {median:.3f}: ColBERT-style models score unit vectors."
            f" {'Pass normalize=True, or normalize' if option else 'Normalize'} Q and D first."
            " LIK_SUPPRESS_NORM_WARN=1 silences this, as it does in late-interaction-kernels.",
            UserWarning,
            stacklevel=_frames_to_caller(),
        )


def unwatched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a public function for another one, which looks itself."""
    if is_compiling():
        return function(*args, **kwargs)
    before, _STATE.muted = _STATE.muted, True
    try:
        return function(*args, **kwargs)
    finally:
        _STATE.muted = before


def _norms_that_count(
    Q: Tensor | Sequence[Tensor], q_mask: Tensor | None, project: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Read the norms of Q's first tokens that are neither masked nor zero. Waits for the device."""
    if not isinstance(Q, Tensor):
        few = -(-_NORMS // max(max(map(len, Q)), 1))
        Q = torch.cat([x[:_NORMS] for x in Q[:few]])
    if Q.dim() == 2:
        Q = Q.unsqueeze(0)
    queries = -(-_NORMS // max(Q.shape[1], 1))  # cut before anything is copied: Q may be large
    tokens = Q.detach()[:queries, :_NORMS]
    if project is not None:
        with torch.no_grad():
            tokens = project(tokens)
    norms: Tensor = tokens.float().norm(dim=-1)
    if q_mask is not None:
        norms = norms.where(q_mask.view(Q.shape[:2])[:queries, :_NORMS] != 0, 0.0)
    norms = norms.cpu()
    return norms[norms > 0]


def _can_be_read(Q: Tensor) -> bool:
    """Return whether Q is a plain tensor that can be read: outside tracing, transforms and CUDA graphs."""
    if type(Q) not in (Tensor, torch.nn.Parameter) or Q.is_meta:
        return False
    if _are_functorch_transforms_active() or _len_torch_dispatch_stack() or _get_tracing_state() is not None:
        return False
    return not (Q.is_cuda and _must_not_wait())


def _must_not_wait() -> bool:
    return torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() != 0


def _frames_to_caller() -> int:
    """Find the stacklevel of a warning in :func:`look` that names the code that called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        level, frame = level + 1, frame.f_back
    return level
