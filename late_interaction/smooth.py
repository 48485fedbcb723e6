"""Score with a smooth maximum, by :mod:`late_interaction.ops.smooth`.

:func:`smooth_maxsim` takes every query with every document, :func:`smooth_maxsim_pairs` pairs.
"""

from typing import Any

from torch import Tensor

from late_interaction import ops
from late_interaction._checks.dense import as_given, check_maxsim, check_maxsim_pairs
from late_interaction._checks.options import check_flag, check_tau
from late_interaction._checks.tensors import check_no_forward_ad
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.precision import multiplying
from late_interaction._scoring.sequences import score
from late_interaction.tokens import TokensLike

__all__ = ["smooth_maxsim", "smooth_maxsim_pairs"]


def smooth_maxsim(
    Q: TokensLike,
    D: TokensLike,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    tau: float = 0.1,
    normalize: bool = False,
) -> Tensor:
    """Score with a smooth maximum, differentiable in ``Q`` and ``D``.

    This is ::

        score = sum_s tau * logsumexp_t(<Q[s], D[t]> / tau)

    over the query tokens ``s`` and document tokens ``t`` that the masks keep. It is what the losses of
    colpali-engine compute with ``use_smooth_max=True``. Every document token gets a gradient, those that are
    most similar the most. The score lies above that of :func:`late_interaction.maxsim`, by at most
    ``tau * log(Ld)`` a query token, and nears it as ``tau`` falls. The similarities of all tokens are never
    stored, and nothing but the inputs is kept for the backward.

    Args:
        Q: queries, ``[Nq, Lq, d]`` or ``[Lq, d]``; bfloat16, float16, float32 or float64. Or
            :class:`~late_interaction.Tokens`, or a list of ``[L, d]`` tensors; packed ones are padded.
        D: documents, of the dtype and device of ``Q``: ``[Nd, Ld, d]``, ``[Ld, d]``, Tokens or a list (every
            query meets every document), or ``[Nq, K, Ld, d]`` (each query meets its own ``K``).
        q_mask: ``[Nq, Lq]``, bool (or integer, nonzero = True), True = keep. A masked query token adds 0.
        d_mask: ``D``'s shape without ``d``, likewise. A masked document token does not count. A document
            without a token that counts scores 0, as in :func:`late_interaction.maxsim`, and gets no gradient
            (a logsumexp over nothing would be -inf).
        tau: the temperature of the maximum, in the unit of similarities; a finite number above 0 (of at least
            1e-30). It is a constant.
        normalize: divide every token by its L2 norm first (eps 1e-12), with the exact gradient.

    Returns:
        float32 scores (float64 for float64 inputs), accumulated in that dtype: ``[Nq, Nd]`` or ``[Nq, K]``;
        a 2-D ``Q`` drops the first dim, a 2-D ``D`` the second. Where a token that counts is NaN or infinite,
        they are what PyTorch's ``logsumexp`` makes of its similarities.

    Raises:
        TypeError: an argument that is no tensor, or of a wrong dtype; a ``tau`` that is no number.
        ValueError: shapes or devices that do not fit; a ``tau`` that is not above 0, infinite or NaN.

    Complexity: ``2 * Nq * Lq * Nd * Ld * d`` operations forward, five times that backward by kernels and
    three times that without. On a GPU kernels take half precision of up to 128 dims, in eights: products are
    exact and summed in float32, the weights of gradients are rounded to the dtype of the tokens, tokens that
    ``normalize`` divided to float16, and results have the same bits on every run. A call takes
    ``4 * Nq * Lq * Nd`` bytes, twice that backward, and float32 sums of the gradients. All else is PyTorch's
    matrix products, which follow ``torch.get_float32_matmul_precision()`` for float32 inputs, and under
    autocast multiply in its dtype or TF32: half precision exactly, on a GPU in TF32. Similarities then go by
    in blocks of at most 32 MiB on a GPU and 1 MiB a thread on a CPU; a block's weights take as much again,
    its documents and their gradients in float32 likewise (or one document's), and a call float32 copies of
    ``Q`` and its gradient. Results have the same bits on every run where PyTorch's matrix products do, as
    with ``torch.use_deterministic_algorithms(True)``.

    Example:
        >>> import torch
        >>> from late_interaction import smooth_maxsim
        >>> Q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> D = torch.tensor([[[2.0, 0.0], [0.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]])
        >>> smooth_maxsim(Q, D, tau=0.1)  # maxsim: 5 and 2
        tensor([[5.0000, 2.1386]])
        >>> smooth_maxsim(Q, D, d_mask=torch.tensor([[True, False], [False, False]]))
        tensor([[2., 0.]])
    """
    return _scores(smooth_maxsim, Q, D, q_mask, d_mask, tau, normalize)


def smooth_maxsim_pairs(
    Q: TokensLike,
    D: TokensLike,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    tau: float = 0.1,
    normalize: bool = False,
) -> Tensor:
    """Scores of the pairs ``(Q[i], D[i])``: the diagonal of :func:`smooth_maxsim`, without the rest.

    Args:
        Q: ``[B, Lq, d]``, or ``B`` sequences as :class:`~late_interaction.Tokens` or a list.
        D: ``[B, Ld, d]``, likewise.
        q_mask: ``[B, Lq]``.
        d_mask: ``[B, Ld]``.
        tau, normalize: as in :func:`smooth_maxsim`.

    Returns:
        ``[B]`` scores, float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: as :func:`smooth_maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction import smooth_maxsim_pairs
        >>> Q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> D = torch.tensor([[[2.0, 5.0]], [[7.0, 3.0]]])
        >>> smooth_maxsim_pairs(Q, D)  # the logsumexp of one number is that number
        tensor([2., 3.])
    """
    return _scores(smooth_maxsim_pairs, Q, D, q_mask, d_mask, tau, normalize)


def _scores(
    function: Any, Q: Any, D: Any, q_mask: Tensor | None, d_mask: Tensor | None, tau: float, normalize: bool
) -> Tensor:
    if not (isinstance(Q, Tensor) and isinstance(D, Tensor)):
        options = {"tau": tau, "normalize": normalize}
        return score(function, Q, D, q_mask, d_mask, options, padded=True)
    paired = function is smooth_maxsim_pairs
    Q3, DN, q_mask, d_mask = (check_maxsim_pairs if paired else check_maxsim)(Q, D, q_mask, d_mask)
    check_flag("normalize", normalize)
    tau = check_tau(tau)
    check_no_forward_ad("smooth_maxsim", Q, D)
    operator: Any = ops.smooth_maxsim
    scores: Tensor = operator(Q3, DN, q_mask, d_mask, tau, normalize, multiplying(Q), paired)
    if not normalize:
        look(function.__name__, Q3, q_mask)
    return scores if paired else as_given(scores, Q, D)
