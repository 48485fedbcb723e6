"""Out of memory, under its own name.

An operator that is built against PyTorch's stable ABI sees a failed allocation as an error code, and its
caller a RuntimeError that names neither memory nor size. So the functions here ask for the memory once more
from Python, where the allocator raises its own exception (``torch.OutOfMemoryError`` on a GPU). They return
where memory was not what was missing.
"""

import torch
from torch import Tensor

from late_interaction._checks.tensors import scores_dtype
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


def _ask_again_with_operands(error: RuntimeError, Q: Tensor, D: Tensor, wanted: _Wanted) -> None:
    if Q.dtype == torch.float32:  # which may multiply as half-precision copies
        wanted += [(tuple(Q.shape), torch.bfloat16), (tuple(D.shape), torch.bfloat16)]
    _ask_again(error, Q.device, wanted)


def forward_failed(error: RuntimeError, Q: Tensor, D: Tensor, winners: bool) -> None:
    """Ask again for what a forward of dense tokens wants: scores, and winners if there is a backward."""
    scores = (Q.shape[0], D.shape[-3])
    wanted: _Wanted = [(scores, scores_dtype(Q))]
    if winners:
        wanted.append(((*scores, Q.shape[1]), winner_dtype(D.shape[-2])))
    _ask_again_with_operands(error, Q, D, wanted)


def varlen_failed(
    error: RuntimeError, Q: Tensor, D: Tensor, cu_q: Tensor, cu_d: Tensor, winners: bool
) -> None:
    """Ask again for what a forward of packed tokens wants: scores, partial sums of queries, and winners."""
    Nq, Nd = len(cu_q) - 1, len(cu_d) - 1
    wanted: _Wanted = [((2 * Nq + Q.shape[0] // 16, Nd), torch.float32)]
    if winners:
        wanted.append(((Nd, Q.shape[0]), winner_dtype(D.shape[0])))
    _ask_again_with_operands(error, Q, D, wanted)


def pairs_failed(error: RuntimeError, Q: Tensor, D: Tensor, pairs: int, longest_query: int) -> None:
    """Ask again for what a forward of listed pairs wants: scores, partial sums and indices, and winners."""
    wanted: _Wanted = [((6 * pairs,), torch.float32), ((pairs, longest_query), winner_dtype(D.shape[0]))]
    _ask_again_with_operands(error, Q, D, wanted)


def codes_failed(error: RuntimeError, Q: Tensor, documents: int) -> None:
    """Ask again for what a forward of codes wants: scores, and winners for a gradient of Q."""
    wanted: _Wanted = [((Q.shape[0], documents), torch.float32)]
    if Q.requires_grad:
        wanted.append(((Q.shape[0], documents, Q.shape[1]), torch.int32))
    _ask_again(error, Q.device, wanted)


def backward_failed(error: RuntimeError, Q: Tensor, D: Tensor, unified: bool) -> None:
    """Ask again for what a backward of dense tokens wants: gradients, which unified adds up in float32."""
    wanted: _Wanted = [(tuple(Q.shape), Q.dtype), (tuple(D.shape), D.dtype)]
    if unified and D.dtype.itemsize < 4:
        wanted.append((tuple(D.shape), torch.float32))
    _ask_again(error, Q.device, wanted)
