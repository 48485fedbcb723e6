"""Batches for tests of the contrastive loss, its definition in float64, and blocks forced small."""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import late_interaction as li
from late_interaction._contrastive import (
    backward,
    blocks,
    call,
    forward,
    pair_list,
    panels,
    single,
    single_shards,
)
from late_interaction.reference import maxsim_reference
from tests.support.calls import peak, waiting_for_nothing


@contextlib.contextmanager
def small_blocks(side=3, panel=8, kept=0, listed=1 << 20, available=0):
    """Blocks of about ``side`` queries and documents, panels of ``panel * side`` logits, batches of up to
    ``kept`` bytes as a whole, lists of any length, ``available`` bytes of memory for blocks that are kept."""
    shares = (1, 1, 1)
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (blocks, "_CPU_SHARES", shares),
            (blocks, "_CUDA_SHARES", shares),
            (blocks, "_LEAST", side),
            (blocks, "_MATRIX_BLOCK", {"cuda": (side, side), "cpu": (side, side)}),
            (blocks, "_PANEL", panel * side),
            (call, "KEPT_BYTES", {"cuda": kept, "cpu": kept}),
            (blocks, "available_bytes", lambda: available),
            (forward, "_OWN_BYTES", 1),
            (backward, "_LISTED_SUM_BYTES", 2000),
            (pair_list, "_DENSE_SHARE", 1.0),
            (pair_list, "LIST_BYTES", listed * 12),
            (panels, "_SCORES", {"cuda": (1, side), "cpu": (1, side)}),
            (panels, "_WEIGHTS", {"cuda": (1, 2 * side), "cpu": (1, 2 * side)}),
            (single_shards, "_SIDE", {"cuda": side, "cpu": side}),
            (single_shards, "_SCORES", {"cuda": 1, "cpu": 1}),
            (single, "KEPT_BYTES", {"cuda": kept, "cpu": kept}),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def batch(Nq, Nd, Lq=5, Ld=7, d=8, dtype=torch.float64, device="cpu", planted=1.0):
    """Queries and documents, of which document ``i`` resembles query ``i``, as leaves."""
    Q, D = torch.randn(Nq, Lq, d), torch.randn(Nd, Ld, d)
    n = min(Nq, Nd)
    if Lq:
        D[:n] += planted * Q[:n, torch.arange(Ld) % Lq]
    return tuple((x / d**0.5).to(device, dtype).requires_grad_() for x in (Q, D))


def own(H, mask=None):
    """Hard negatives ``[Nq, K, L, d]`` as the losses take them with a mask."""
    return None if H is None else li.Tokens(H.flatten(0, 1), None if mask is None else mask.flatten(0, 1))


def logits(Q, D, T, H=None, masks=(None, None, None), normalize=False):
    q_mask, d_mask, h_mask = masks
    S = maxsim_reference(Q.double(), D.double(), q_mask, d_mask, normalize=normalize)
    if H is not None:
        own = maxsim_reference(Q.double(), H.double(), q_mask, h_mask, normalize=normalize) / T
        if h_mask is not None:  # without tokens it is no candidate
            own = own.masked_fill(~h_mask.any(-1), -torch.inf)
        return torch.cat((S / T, own), 1)
    return S / T


def reference(
    Q, D, T, labels=None, H=None, masks=(None, None, None), normalize=False, symmetric=False,
    smoothing=0.0, reduction="mean",
):  # fmt: skip
    """The loss by definition, in float64 and with all scores at once."""
    S = logits(Q, D, T, H, masks, normalize)
    own = labels if labels is not None else torch.arange(len(Q), device=Q.device)
    if smoothing and S.isneginf().any():  # which is shared among the candidates
        log, kept = S.log_softmax(1), ~S.isneginf()
        even = -log.masked_fill(~kept, 0.0).sum(1) / kept.sum(1)
        loss = (1 - smoothing) * F.nll_loss(log, own, reduction="none") + smoothing * even
        loss = {"mean": loss.mean(), "none": loss, "sum": loss.sum()}[reduction]
    else:
        loss = F.cross_entropy(S, own, label_smoothing=smoothing, reduction=reduction)
    if not symmetric:
        return loss
    back = torch.full((len(D),), -100, device=Q.device)
    kept = own >= 0
    back[own[kept]] = torch.arange(len(Q), device=Q.device)[kept]
    columns = F.cross_entropy(S[:, : len(D)].t(), back, label_smoothing=smoothing, reduction=reduction)
    if reduction == "none":
        columns = torch.where(kept, columns[own.clamp_min(0)], 0.0)
    return (loss + columns) / 2


def gradients(loss, leaves):
    """(loss, gradients) with other weights for each query where there is a loss for each."""
    if loss.dim():
        loss = (loss * torch.linspace(-1, 2, len(loss), dtype=loss.dtype, device=loss.device)).sum()
    return loss.detach(), torch.autograd.grad(loss, leaves)


def assert_close(ours, wanted, tolerance=1e-9):
    """A loss and gradients against those in float64, relative to the largest entry of each."""
    for got, want in zip((ours[0], *ours[1]), (wanted[0], *wanted[1]), strict=True):
        scale = want.abs().max().clamp_min(1e-6).item() if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=tolerance * scale)


def assert_same(ours, others):
    """The same bits: of a loss and gradients."""
    assert torch.equal(ours[0], others[0]) and all(map(torch.equal, ours[1], others[1]))


class Made(TorchDispatchMode):
    """The tensors that operators make meanwhile: how many elements, and bytes of storage."""

    def __init__(self):
        super().__init__()
        self.elements, self.bytes = [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements.append(x.numel())
                self.bytes.append(x.untyped_storage().nbytes())
        return out


def waits_for_nothing(step):
    """A second step of a GPU, for which the host does not wait."""
    step()
    with waiting_for_nothing():
        step()


def gpu_bytes_beside(step):
    """The peak of a GPU's memory in a step beside the gradients that it returns."""
    return peak(step) - sum(g.nbytes for g in step())
