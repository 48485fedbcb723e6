"""Compute scores by the smooth maximum and their gradients.

Where no kernel takes the call (``kernels``), by blocks of similarities.

A block is some query tokens with all tokens of some documents. A matrix product computes it, a softmax over
each document's tokens its weights. The greatest similarity and its weight give the log of the sum,
``maximum - log(weight)``. The backward computes each block and its weights again, multiplies them by the
gradients of the scores, and two matrix products add them to the gradients. A block takes a bounded number of
bytes (:data:`_GPU_BLOCK_BYTES`), whatever the batch. All products are of float32 (float64) operands.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._checks.options import OPERATOR_PRECISIONS
from late_interaction._checks.tensors import FLOATS, scores_dtype
from late_interaction._scoring.precision import float32_products, without_autocast
from late_interaction.ops._arguments import check_choice, check_tensor
from late_interaction.ops._blocks import ranges
from late_interaction.ops.smooth import kernels
from late_interaction.ops.smooth.kernels import Documents, Tokens

# What the similarities of a block take; its weights, its documents and their gradients take as much each (or
# one document's). A block fills a GPU; what a thread of a CPU has of it stays in the caches.
_GPU_BLOCK_BYTES = 32 << 20
_CPU_THREAD_BLOCK_BYTES = 1 << 20
_WHOLE_TILES = 128  # rows of a block are a multiple of this where they are more


# ---- a call, and its blocks ----


@dataclass(frozen=True)
class _Problem:
    """A checked call.

    Query tokens, which are rows here, meet the documents of their group. Documents that every query meets are
    one group; else each query has a group of its own.
    """

    Q: Tensor  # [groups, rows, d]
    D: Tensor  # [groups, documents, Ld, d]
    q_mask: Tensor | None  # [groups, rows]
    d_mask: Tensor | None  # [groups, documents, Ld]
    Lq: int
    tau: float
    normalize: bool
    dtype: torch.dtype  # of products and sums
    precision: str  # of float32 products

    @staticmethod
    def of(
        Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, tau: float, normalize: bool,
        precision: str, paired: bool,
    ) -> "_Problem":  # fmt: skip
        _check(Q, D, q_mask, d_mask, tau, precision, paired)
        Lq, products = Q.shape[1], _product_precision(Q, precision)
        if paired:
            D, d_mask = D.unsqueeze(1), None if d_mask is None else d_mask.unsqueeze(1)
        elif D.dim() == 3:
            Q, D = Q.flatten(0, 1).unsqueeze(0), D.unsqueeze(0)
            q_mask = None if q_mask is None else q_mask.reshape(1, -1)
            d_mask = None if d_mask is None else d_mask.unsqueeze(0)
        return _Problem(Q, D, q_mask, d_mask, Lq, tau, normalize, scores_dtype(Q), products)

    @property
    def empty(self) -> bool:
        return 0 in self.Q.shape or 0 in self.D.shape

    def on_kernels(self) -> kernels.Call:
        return kernels.Call(self.Q, self.D, self.q_mask, self.d_mask, self.tau, self.normalize)

    def grouped(self, scores: Tensor) -> Tensor:
        """View contiguous scores, or their gradients, as ``[groups, queries of a group, documents]``."""
        groups, documents = self.D.shape[:2]
        return scores.view(groups, -1, documents)

    def block_sizes(self) -> tuple[int, int, int]:
        """Return how many groups, documents of each and rows of each a block has."""
        (groups, rows, d), (documents, Ld) = self.Q.shape, self.D.shape[1:3]
        block = _CPU_THREAD_BLOCK_BYTES * torch.get_num_threads() if self.Q.is_cpu else _GPU_BLOCK_BYTES
        budget = block // self.dtype.itemsize
        document = Ld * max(rows, d)
        if document * documents <= budget:
            return min(groups, budget // (document * documents)), documents, rows
        if document <= budget:
            return 1, budget // document, rows
        most = max(budget // Ld, 1)
        return 1, 1, min(rows, most - most % _WHOLE_TILES if most > _WHOLE_TILES else most)

    def queries(self, groups: slice) -> Tokens:
        x = self.Q[groups]
        if self.q_mask is not None:  # what a masked token holds reaches no product
            x = x.masked_fill(~self.q_mask[groups].unsqueeze(-1), 0.0)
        return Tokens.of(x, self.normalize, self.dtype)

    def documents(self, groups: slice, chosen: slice) -> Documents:
        mask = None if self.d_mask is None else self.d_mask[groups, chosen]
        return Documents.of(self.D[groups, chosen], mask, self.normalize, self.dtype)

    def counted(self, values: Tensor, groups: slice, documents: Documents) -> Tensor:
        """Values ``[groups, rows, documents]``, 0 where a query token or all of a document is masked."""
        if self.q_mask is not None:
            values = values.masked_fill(~self.q_mask[groups].unsqueeze(-1), 0.0)
        return values if documents.some is None else values.masked_fill(~documents.some, 0.0)


def _check(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, tau: float, precision: str,
    paired: bool,
) -> None:  # fmt: skip
    problem = None
    if Q.dim() != 3 or D.dim() not in ((3,) if paired else (3, 4)):
        problem = f"Q must be [Nq, Lq, d], and D [Nd, Ld, d]{' or [Nq, K, Ld, d]' * (not paired)}"
    elif Q.dtype != D.dtype or Q.device != D.device or Q.shape[-1] != D.shape[-1]:
        problem = "Q and D must share dtype, device and d"
    elif (paired or D.dim() == 4) and len(Q) != len(D):
        problem = "D must hold documents of each query"
    elif not 0 < tau < math.inf:
        problem = f"tau must be above 0 and finite, got {tau}"
    if problem is not None:
        raise RuntimeError(f"late_interaction: {problem}")
    check_tensor("Q", Q, None, FLOATS)
    check_tensor("D", D, None, FLOATS)
    check_tensor("q_mask", q_mask, Q.shape[:-1], (torch.bool,), Q)
    check_tensor("d_mask", d_mask, D.shape[:-1], (torch.bool,), D)
    check_choice("precision", precision, OPERATOR_PRECISIONS)


def _product_precision(Q: Tensor, precision: str) -> str:
    """Say how float32 operands multiply.

    TF32 holds every number of half precision. A CPU has no TF32, and its PyTorch multiplies in bfloat16 for
    "medium".
    """
    if Q.is_cuda:
        return "highest" if Q.dtype == torch.float32 and precision == "highest" else "high"
    return precision if Q.dtype == torch.float32 and precision in ("high", "medium") else "highest"


class _Blocks:
    """Computes blocks, one after another, in the same memory."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.groups, self.documents, self.rows = problem.block_sizes()
        size = self.groups * self.documents * self.rows * problem.D.shape[2]
        self._similarities = problem.Q.new_empty(size, dtype=problem.dtype)
        self._weights = torch.empty_like(self._similarities)

    def compute(self, rows: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
        """Compute similarities / tau of ``[groups, rows, d]``, and their softmax over each document's tokens.

        Both are ``[groups, rows, documents, Ld]``. The next call overwrites them.
        """
        columns, inverse = documents.columns.transpose(1, 2), 1.0 / self.problem.tau
        groups, count, tokens = *rows.shape[:2], columns.shape[2]
        flat = self._similarities[: groups * count * tokens].view(groups, count, tokens)
        bias = documents.bias
        if bias is None:
            _add_product(flat, rows, columns, inverse, 0.0)
        elif groups == 1:
            torch.addmm(bias[0, 0], rows[0], columns[0], alpha=inverse, out=flat[0])
        else:
            torch.baddbmm(bias, rows, columns, alpha=inverse, out=flat)
        similarities = flat.view(groups, count, -1, self.problem.D.shape[2])
        weights = self._weights[: flat.numel()].view(similarities.shape)
        return similarities, torch.softmax(similarities, -1, out=weights)


def _add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    """Out = beta * out + alpha * a @ b. With beta = 0 what out held does not count, NaN included."""
    if len(out) == 1:  # not batched: PyTorch has faster ways
        out[0].addmm_(a[0], b[0], alpha=alpha, beta=beta)
    else:
        out.baddbmm_(a, b, alpha=alpha, beta=beta)


# ---- scores ----


def smooth_maxsim(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, tau: float = 0.1,
    normalize: bool = False, precision: str = "highest", paired: bool = False,
) -> Tensor:  # fmt: skip
    p = _Problem.of(Q, D, q_mask, d_mask, tau, normalize, precision, paired)
    result = Q.new_empty(scores_shape(Q, D, paired), dtype=p.dtype)
    if p.empty:
        return result.zero_()
    if kernels.serve(p.Q):
        p.grouped(result).copy_(p.on_kernels().scores(p.Lq))
        return result
    with torch.no_grad(), without_autocast(Q.device.type), float32_products(Q.device.type, p.precision):
        blocks, scores = _Blocks(p), p.grouped(result)
        for groups in ranges(len(p.Q), blocks.groups):
            rows = p.queries(groups).rows
            for chosen in ranges(p.D.shape[1], blocks.documents):
                documents = p.documents(groups, chosen)
                logs = rows.new_empty(*rows.shape[:2], chosen.stop - chosen.start)
                for part in ranges(rows.shape[1], blocks.rows):
                    logs[:, part] = _log_sums(*blocks.compute(rows[:, part], documents))
                sums = p.counted(logs, groups, documents).unflatten(1, (-1, p.Lq)).sum(2)
                scores[groups, :, chosen] = sums.mul_(tau)
    return result


def scores_shape(Q: Tensor, D: Tensor, paired: bool) -> tuple[int, ...]:
    return (Q.shape[0],) if paired else (Q.shape[0], D.shape[-3])


def _log_sums(similarities: Tensor, weights: Tensor) -> Tensor:
    """Compute the logsumexp over the last dim, from the softmax over it. NaN is as in PyTorch."""
    greatest = similarities.amax(-1)
    return greatest.where(greatest.isinf(), greatest - weights.amax(-1).log_())


# ---- gradients ----


def smooth_maxsim_backward(
    grad_scores: Tensor, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None,
    tau: float = 0.1, normalize: bool = False, precision: str = "highest", need_grad_Q: bool = True,
    need_grad_D: bool = True, paired: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    p = _Problem.of(Q, D, q_mask, d_mask, tau, normalize, precision, paired)
    check_tensor("grad_scores", grad_scores, scores_shape(Q, D, paired), (p.dtype,), Q)
    grad_Q, grad_D = (
        torch.empty(x.shape if needed else (0,), dtype=x.dtype, device=x.device)
        for x, needed in ((Q, need_grad_Q), (D, need_grad_D))
    )
    if p.empty:
        return grad_Q.zero_(), grad_D.zero_()
    into = grad_Q.view(p.Q.shape) if need_grad_Q else None, grad_D.view(p.D.shape) if need_grad_D else None
    if kernels.serve(p.Q):
        p.on_kernels().write_gradients(p.grouped(grad_scores.contiguous()), p.Lq, *into)
        return grad_Q, grad_D
    with torch.no_grad(), without_autocast(Q.device.type), float32_products(Q.device.type, p.precision):
        _write_gradients(p, p.grouped(grad_scores.contiguous()), *into)
    return grad_Q, grad_D


def _write_gradients(p: _Problem, grads: Tensor, grad_Q: Tensor | None, grad_D: Tensor | None) -> None:
    blocks = _Blocks(p)
    for groups in ranges(len(p.Q), blocks.groups):
        own = p.queries(groups)
        sums_Q = None if grad_Q is None else own.rows.new_empty(own.rows.shape)
        for chosen in ranges(p.D.shape[1], blocks.documents):
            documents = p.documents(groups, chosen)
            factors = grads[groups, :, chosen].repeat_interleave(p.Lq, 1)
            factors = p.counted(factors, groups, documents)
            sums_D = None if grad_D is None else own.rows.new_empty(documents.columns.shape)
            for part in ranges(own.rows.shape[1], blocks.rows):
                rows = own.rows[:, part]
                _, weights = blocks.compute(rows, documents)
                weights = weights.mul_(factors[:, part].unsqueeze(-1)).flatten(2)
                if sums_Q is not None:
                    beta = float(chosen.start > 0)
                    _add_product(sums_Q[:, part], weights, documents.columns, 1.0, beta)
                if sums_D is not None:
                    _add_product(sums_D, weights.transpose(1, 2), rows, 1.0, float(part.start > 0))
            if grad_D is not None and sums_D is not None:
                mask = None if p.d_mask is None else p.d_mask[groups, chosen]
                out = grad_D[groups, chosen]
                documents.tokens.write_gradient(out, sums_D.view(out.shape), mask)
        if grad_Q is not None and sums_Q is not None:
            mask = None if p.q_mask is None else p.q_mask[groups]
            own.write_gradient(grad_Q[groups], sums_Q, mask)
