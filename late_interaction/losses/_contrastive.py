"""Cross entropy over the MaxSim scores of a batch: :func:`late_interaction.losses.contrastive`.

A batch of ``B`` queries and ``B`` documents has ``B * B`` scores, and ``B * B * Lq`` winners. If it is large,
neither is kept: scores pass in blocks whose embeddings stay in the cache, a running softmax takes them up,
and the backward finds the winners of each block again (:mod:`late_interaction._contrastive`).
"""

from typing import Any

from torch import Tensor

from late_interaction._checks.options import MultiPositive, Precision, Reduction
from late_interaction._contrastive import blockwise, single, single_shards, whole
from late_interaction._contrastive.arguments import read
from late_interaction._contrastive.cross_entropy import CrossEntropy
from late_interaction.losses._module import BatchLoss, LabelsLike
from late_interaction.losses._traced import traceable
from late_interaction.tokens import TokensLike


@traceable
def contrastive(
    Q: TokensLike,
    D: TokensLike,
    labels: LabelsLike | None = None,
    *,
    multi_positive: MultiPositive = "mean",
    hard_negatives: TokensLike | None = None,
    candidate_mask: Tensor | None = None,
    exclude: LabelsLike | None = None,
    exclude_above: float | None = None,
    temperature: float | Tensor = 1.0,
    symmetric: bool = False,
    normalize: bool = False,
    precision: Precision | None = None,
    label_smoothing: float = 0.0,
    tail: float = 0.0,
    kept_bytes: int | None = None,
    reduction: Reduction = "mean",
    group: Any = None,
    scale_by_world: bool = False,
) -> Tensor:
    """Compute the cross entropy over MaxSim scores, in memory that does not grow with their number.

    It is ``cross_entropy(maxsim(Q, D) / temperature, labels)`` to rounding.

    Args:
        Q: queries, ``[Nq, Lq, d]``; bfloat16, float16, float32 or float64. Or a list of ``[L, d]`` tensors,
            or :class:`~late_interaction.Tokens`, padded with a mask or packed.
        D: documents, ``[Nd, Ld, d]``, a list or Tokens, of the dtype and device of ``Q``. Where one of ``Q``,
            ``D`` and ``hard_negatives`` is packed or a list, the others are packed, too. The host waits for
            the offsets of packed Tokens on a GPU once, and for masks of those that are packed.
        labels: ``[Nq]``, int64 (or int32): the document that each query belongs to. None: query ``i`` belongs
            to document ``i``. Several documents of a query are a list for each query, ``[Nq, P]`` padded with
            -100, or pairs: two tensors, queries and documents, as ``relevant.nonzero(as_tuple=True)`` returns
            them (for pairs on a GPU the host waits). A query without a document (-100, an empty list) is left
            out with its hard negatives, whatever they hold; documents of a symmetric loss are compared with
            it still. For that, labels on a GPU (on a CPU one of -100) cost a copy of the queries and hard
            negatives. On a CPU another label that is no document is a ValueError; a GPU's labels are not
            waited for, and with such a one the loss is NaN, or stops with an assertion on the device, as
            ``cross_entropy`` does.
        multi_positive: how several documents of a query count. ``"mean"``: the mean of their cross entropies,
            each among all documents (SupCon's outer sum, https://arxiv.org/abs/2004.11362); ``"softmax"``:
            the negative logarithm of the share of the softmax that they have together (MIL-NCE,
            https://arxiv.org/abs/1912.06430).
        hard_negatives: ``[Nq, K, Lh, d]``: ``K`` further documents that only their own query meets. They are
            no queries' labels, and have no part in the other direction of a symmetric loss. As Tokens or a
            list ``Nq * K`` sequences, ``i * K + k`` belonging to query ``i``. One without tokens, of length 0
            or all masked, is padding and no candidate.
        candidate_mask: ``[Nq, K]``, bool (or integer, nonzero = True), True = keep: the hard negatives that
            each query has. The loss is that of the shorter lists, and nothing depends on what others hold.
            Packed tokens are copied for it.
        exclude: pairs that are left out as negatives, of both directions, because they may be positives: bool
            ``[Nq, Nd]``, True = left out, or documents of each query, spelled as ``labels``. A query's own
            documents stay. In a group documents are numbered over all processes in the order of ranks, and
            a mask has a column for each. What is left out is scored still, so its tokens must be finite.
        exclude_above: leave out documents and hard negatives whose score is greater than the score of the
            query's lowest-scored positive minus this margin: GISTEmbed's filter of false negatives
            (https://arxiv.org/abs/2402.16829; Sentence Transformers' ``margin_strategy="absolute"``,
            NV-Retriever's TopK-MarginPos, https://arxiv.org/abs/2407.15831), guided by the scores of this
            loss, before the temperature. A copy of the positive scores as high, and stays at a margin of 0.
            None: nothing. The choice has no gradient, and the scores of labels are computed first.
        temperature: what scores are divided by: a number above 0, or a tensor of one element, which gets a
            gradient if it requires one. 1 suits sums over the tokens of a query. Scores of single vectors are
            cosines, and want less, say 0.05; a sum of 32 cosines divided by 0.05 saturates the softmax: the
            loss of a trained model's batch is 0, and so is its gradient.
        symmetric: the mean of both directions: queries among the documents, and documents among the queries.
            Queries that share a document, such as the captions of an image, are its positives, and count as
            ``multi_positive`` says; a document without a query is a negative alone. With ``"none"`` the loss
            of a query has the mean of its documents'.
        normalize: divide every token by its L2 norm first (eps 1e-12), with the exact gradient. Packed
            tokens, single ones (``Lq == Ld == 1``) and those of a call with ``tail`` are copied for it, and
            rounded to the dtype of the inputs, as by ``torch.nn.functional.normalize``.
        precision: how float32 inputs multiply, as in :func:`late_interaction.maxsim`.
        label_smoothing: in [0, 1), as in ``torch.nn.functional.cross_entropy``, over documents and hard
            negatives.
        tail: in [0, 1). Above 0 the backward leaves out a pair whose softmax weight is under ``tail`` divided
            by the number of documents (hard negatives included), but never a query's own document. Less than
            ``tail`` of each row's (and column's) mass is left out, so the gradient of a query's token is off
            by less than ``tail / temperature`` times its share of the loss times the longest document token.
            The loss and the gradient of the temperature stay exact. 0 is exact. Not with ``label_smoothing``.
            Tokens with masks are copied first, without those that a mask leaves out, unless all winners are
            kept.
        kept_bytes: how many bytes the scores and winners of all pairs, ``2 * Lq + 4`` a pair (packed:
            ``4 * Lq + 4``), may take to be kept for the backward, which is faster than finding the winners
            again; the cross entropy takes about 12 more a pair for a while. Within them ``tail`` leaves
            nothing out. Where all pairs take more, those of the first blocks are kept, up to ``kept_bytes``
            (not with ``tail``); which ones are kept changes no bit of the result. None: 512 MiB for all pairs
            (on a GPU with a ``tail`` 64 MiB), else nothing on a GPU, and on a CPU as many blocks as leave at
            least as much memory available as they take (Linux; elsewhere none). 0 takes the least memory. In
            a group None holds. With one token a side the scores alone, 4 bytes a pair of a number of
            documents rounded up to 64s, and only where ``symmetric`` or ``reduction="none"`` would compute
            them twice.
        reduction: ``"mean"`` over the queries that are not left out, ``"sum"``, or ``"none"``: ``[Nq]``.
        group: a ``torch.distributed`` process group whose documents all are scored with every process's
            queries; None: this process alone. Queries stay; documents go round a ring while others are
            scored, and their gradients home. Where all documents, and the scores and winners of a process,
            take up to 512 MiB each, the documents are gathered at once. Processes may have different numbers
            of queries and documents, of any length. ``labels`` are among the process's own documents. Every
            process must call this, and backward, alike. ``"mean"`` and ``"sum"`` are over all processes'
            queries and the same on each; what backward leaves in ``Q`` and ``D`` is the gradient of that one
            loss, summed over the processes; in ``temperature``, this process's share of it. Options that
            differ between processes raise on every process; a temperature on a GPU is not waited for, and
            makes the loss NaN there.
        scale_by_world: multiply the loss by the number of processes, as PyLate does: for
            DistributedDataParallel, which averages the processes' gradients instead of summing them.

    Returns:
        The loss, float32 (float64 for float64 inputs): 0-dim, or ``[Nq]``. NaN in a score makes its row's
        loss NaN, as in PyTorch. An empty document scores 0, but an empty hard negative is none.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value, by name. In a group
            the other processes get a RuntimeError that names the rank.
        RuntimeError: differentiating the gradients again; a process of the group that ended.

    Complexity: ``2 * Nq * Nd * Lq * Ld * d`` operations forward, the same again and a gather of ``Nq * Nd *
    Lq`` rows for each gradient in the backward. Beside inputs and gradients about 128 MiB on a GPU, and one
    float32 copy of the smaller gradient (of the queries' with hard negatives and in a group, and there of the
    documents' with more than two processes). In a group also the documents of another process, those on their
    way, and a gradient that comes and one that leaves. A block's share of a half-precision gradient, and a
    process's, may be rounded to the inputs' dtype before it is added in float32, and so are the weights of
    pairs where both sides have one token each. Scores and winners that are kept (``kept_bytes``) come on top,
    and their pairs are not computed again. The result has the same bits on every run. With ``tail`` the host
    waits for the device at times; else, of padded tokens, only to look at norms in the process's first call.
    Under ``torch.compile`` a loss without ``group`` is one operator, which finds the gradients of a reduced
    loss with it, outside of CUDA graphs. With ``group``, or where ``labels`` or ``exclude`` are lists, it is
    a graph break.

    With one token a side and nothing masked (CLIP's loss; one label a query, no hard negatives, ``exclude``,
    ``exclude_above``, ``tail`` or ``group``) the forward of a loss that is reduced and not symmetric computes
    the gradients too, so that scores are computed once. Until backward it holds the queries' gradient in
    their dtype and the documents' in float32; beside these it needs 384 MiB on a GPU, or 6 KiB a document
    where that is more. In bf16 on compute capability 9.0 large batches without label smoothing need 256 MiB,
    or 2 KiB a document: their scores stay in registers, and the queries are rounded to bf16 again, times what
    each weighs in the loss.
    In a group these are four products, two of scores, and a block's weights take up to 512 MiB.

    The forward is the online softmax over blocks of Inf-CL (https://arxiv.org/abs/2410.17243); leaving out
    negligible weights is from Cut Cross-Entropy (https://arxiv.org/abs/2411.09009), the split of the gradient
    over processes from DisCo-CLIP (https://arxiv.org/abs/2304.08480).

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> Q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], requires_grad=True)
        >>> D = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.1, 0.1]]])
        >>> loss = losses.contrastive(Q, D)
        >>> loss.backward()
        >>> round(loss.item(), 4), Q.grad.shape
        (0.4076, torch.Size([2, 1, 2]))
        >>> round(losses.contrastive(Q, D, labels=[[0, 1], [1]]).item(), 4)  # two positives of query 0
        0.6326
        >>> round(losses.contrastive(Q, D, exclude=[[1], []]).item(), 4)  # no negative of query 0
        0.237
    """
    call = read("losses.contrastive", locals())
    if call.whole:
        return whole.cross_entropy(call, reduction) if call.plain else whole.loss(call, CrossEntropy)
    if whole.gathers(call):
        return whole.gathered(call)
    if single.takes(call):
        return single.loss(call)
    if single_shards.takes(call):
        return single_shards.loss(call)
    return blockwise.loss(call, CrossEntropy.start)


class Contrastive(BatchLoss):
    """:func:`contrastive` as a module, whose temperature may be learned.

    The temperature is kept as its logarithm, so that it stays above 0.

    Args:
        temperature: its initial value, a number above 0, as in :func:`contrastive`. One that saturates the
            softmax has a gradient of 0, and stays.
        learnable: whether ``log_temperature`` is a parameter; else it is a buffer.
        multi_positive, exclude_above, symmetric, normalize, precision, label_smoothing, tail, kept_bytes,
            reduction, group, scale_by_world: as in :func:`contrastive`.

    Raises:
        TypeError, ValueError: a temperature that is no number above 0; the others when the module is called.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> loss_fn = losses.Contrastive(learnable=True, normalize=True)
        >>> Q, D = torch.randn(4, 8, 16, requires_grad=True), torch.randn(4, 20, 16, requires_grad=True)
        >>> loss_fn(Q, D).backward()
        >>> loss_fn.log_temperature.grad.shape
        torch.Size([1])
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        learnable: bool = False,
        multi_positive: MultiPositive = "mean",
        symmetric: bool = False,
        exclude_above: float | None = None,
        normalize: bool = False,
        precision: Precision | None = None,
        label_smoothing: float = 0.0,
        tail: float = 0.0,
        kept_bytes: int | None = None,
        reduction: Reduction = "mean",
        group: Any = None,
        scale_by_world: bool = False,
    ) -> None:
        super().__init__(contrastive, locals())
