"""Out of memory, under its own name.

An operator that is built against PyTorch's stable ABI learns of a failed allocation as an error code, and the
caller of a RuntimeError that names neither memory nor size. So the memory is asked for once more from Python,
where the allocator's own exception (``torch.OutOfMemoryError`` on a GPU) comes through.
"""

import torch
from torch import Tensor

from late_interaction.ops.winners import winner_dtype

_Wanted = list[tuple[tuple[int, ...], torch.dtype]]  # sizes and dtypes


def _ask_again(error: RuntimeError, device: torch.device, wanted: _Wanted) -> None:
    if "API call failed" not in str(error):
        return
    held = []
    try:
        for size, dtype in wanted:
            held.append(torch.empty(size, dtype=dtype, device=device))
    except RuntimeError as reason:
        raise reason from None


def forward_failed(error: RuntimeError, Q: Tensor, D: Tensor, winners: bool) -> None:
    """Raises the allocator's exception if memory for the results is what was missing."""
    scores = (Q.shape[0], D.shape[-3])
    wanted: _Wanted = [(scores, torch.float64 if Q.dtype == torch.float64 else torch.float32)]
    if winners:
        wanted.append(((*scores, Q.shape[1]), winner_dtype(D.shape[-2])))
    if Q.dtype == torch.float32:  # which may multiply as half-precision copies
        wanted += [(tuple(Q.shape), torch.bfloat16), (tuple(D.shape), torch.bfloat16)]
    _ask_again(error, Q.device, wanted)


def varlen_failed(
    error: RuntimeError, Q: Tensor, D: Tensor, cu_q: Tensor, cu_d: Tensor, winners: bool
) -> None:
    """The same for packed tokens."""
    Nq, Nd = len(cu_q) - 1, len(cu_d) - 1
    # Scores, and the parts of queries that several warps share.
    wanted: _Wanted = [((2 * Nq + Q.shape[0] // 16, Nd), torch.float32)]
    if winners:
        wanted.append(((Nd, Q.shape[0]), winner_dtype(D.shape[0])))
    if Q.dtype == torch.float32:
        wanted += [(tuple(Q.shape), torch.bfloat16), (tuple(D.shape), torch.bfloat16)]
    _ask_again(error, Q.device, wanted)


def pairs_failed(error: RuntimeError, Q: Tensor, D: Tensor, pairs: int, longest_query: int) -> None:
    """The same for listed pairs, with winners."""
    wanted: _Wanted = [((6 * pairs,), torch.float32), ((pairs, longest_query), winner_dtype(D.shape[0]))]
    if Q.dtype == torch.float32:
        wanted += [(tuple(Q.shape), torch.bfloat16), (tuple(D.shape), torch.bfloat16)]
    _ask_again(error, Q.device, wanted)


def residual_failed(error: RuntimeError, Q: Tensor, documents: int) -> None:
    """As forward_failed, for residual-compressed documents."""
    wanted: _Wanted = [((Q.shape[0], documents), torch.float32)]
    if Q.requires_grad:
        wanted.append(((Q.shape[0], documents, Q.shape[1]), torch.int32))
    _ask_again(error, Q.device, wanted)


def backward_failed(error: RuntimeError, Q: Tensor, D: Tensor, unified: bool) -> None:
    """Raises the allocator's exception if memory for the gradients is what was missing."""
    wanted: _Wanted = [(tuple(Q.shape), Q.dtype), (tuple(D.shape), D.dtype)]
    if unified and D.dtype.itemsize < 4:  # which adds in float32
        wanted.append((tuple(D.shape), torch.float32))
    _ask_again(error, Q.device, wanted)
