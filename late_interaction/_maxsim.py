"""MaxSim with gradients: :func:`maxsim`, :func:`maxsim_pairs` and :func:`maxsim_with_winners`.

A call takes the fast path unless something intercepts it: then, and if the operator refuses the inputs, all
arguments are checked first.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from late_interaction import ops
from late_interaction._checks.dense import as_given, check_maxsim, check_maxsim_pairs, check_weights
from late_interaction._checks.options import (
    Backward,
    Precision,
    Winners,
    check_backward,
    check_flag,
    check_winners,
)
from late_interaction._checks.tensors import check_no_forward_ad
from late_interaction._scoring.codes import score_codes
from late_interaction._scoring.fast_path import fast_path, intercepted
from late_interaction._scoring.norm_warning import look, looked
from late_interaction._scoring.normalized import per_token
from late_interaction._scoring.precision import asked
from late_interaction._scoring.sequences import score
from late_interaction._scoring.traced import traced_scores
from late_interaction.codes import Codes
from late_interaction.ops import _oom
from late_interaction.ops.dense import PLAIN, call_below_autograd
from late_interaction.ops.winners import widen
from late_interaction.tokens import TokensLike


def _scored(
    function: Any, Q: Any, D: Any, q_mask: Tensor | None, d_mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Score a call of maxsim or maxsim_pairs that does not take the fast path."""
    if not (isinstance(Q, Tensor) and isinstance(D, Tensor)):
        if isinstance(D, Codes):
            return score_codes(function.__name__, Q, D, q_mask, d_mask, options)
        return score(function, Q, D, q_mask, d_mask, options)
    paired, mean, weights = function is maxsim_pairs, options.pop("mean"), options.pop("q_weights")
    Q3, DN, q_mask, d_mask = (check_maxsim_pairs if paired else check_maxsim)(Q, D, q_mask, d_mask)
    check_winners(options["winners"])
    check_flag("mean", mean)
    weights = check_weights(weights, "Q", Q3)
    scores, _ = _run(Q3, DN, q_mask, d_mask, **options, paired=paired, weights=weights)
    if mean:
        scores = per_token(scores, Q3, q_mask, weights)
    return scores if paired else as_given(scores, Q, D)


def _run(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool,
    backward: Backward | None,
    precision: Precision | None,
    winners: str | None = None,
    paired: bool = False,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Score checked, batched inputs, and find winners if the caller or a backward needs them.

    Args:
        winners: "return" if the caller does.
        paired: D is ``[B, Ld, d]``, and scores are ``[B]``.
        weights: those of the query tokens.
    """
    if normalize is not False:
        check_flag("normalize", normalize)
    strategy = "auto" if backward is None else check_backward(backward)
    precision, context = asked(Q, D, precision)
    check_no_forward_ad("maxsim", Q, D, weights)
    learned = any(x is not None and x.requires_grad for x in (Q, D, weights))
    differentiable = learned and torch.is_grad_enabled()
    found = winners == "return" or (differentiable and winners != "recompute")
    op: Any = ops.maxsim_winners if found else ops.maxsim
    options = (normalize, precision, strategy, paired)
    try:
        with context:
            if weights is not None:
                op = ops.maxsim_weighted_winners if found else ops.maxsim_weighted
                result = op(Q, D, weights, q_mask, d_mask, *options)
            elif differentiable or is_compiling() or intercepted(Q, D):
                result = op(Q, D, q_mask, d_mask, *options)
            else:
                result = call_below_autograd(PLAIN[found], Q, D, q_mask, d_mask, normalize, precision, paired)
    except RuntimeError as error:
        _oom.forward_failed(error, Q, D.unsqueeze(1) if paired else D, found)
        raise
    return result if found else (result, None)


def maxsim(
    Q: TokensLike | Codes,
    D: TokensLike | Codes,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    backward: Backward | None = None,
    precision: Precision | None = None,
    winners: Winners | None = None,
    q_weights: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """Score queries with documents, differentiable in ``Q``, ``D`` and ``q_weights``.

    ``score = sum_s q_weights[s] * max_t <Q[s], D[t]>`` over the query tokens ``s`` and document tokens ``t``
    that the masks keep, as in ColBERT (https://arxiv.org/abs/2004.12832), where all weights are 1. The
    similarities are never stored.

    Args:
        Q: queries, ``[Nq, Lq, d]`` or ``[Lq, d]``; bfloat16, float16, float32 or float64. Or
            :class:`~late_interaction.Tokens`, or a list of ``[L, d]`` tensors.
        D: documents, of the dtype and device of ``Q``: ``[Nd, Ld, d]``, ``[Ld, d]``, Tokens or a list (every
            query meets every document), or ``[Nq, K, Ld, d]`` (each query meets its own ``K``, as for
            distillation). Where one side is packed, a padded one is packed too: without a copy, unless it has
            a mask. Or :class:`~late_interaction.Codes`, whose codec (:mod:`late_interaction.codecs`) says how
            ``Q``, which may be codes too, meets them and what ``normalize`` and ``precision`` may be;
            ``backward``, ``winners`` and ``q_weights`` are None then.
        q_mask: ``[Nq, Lq]``, bool (or integer, nonzero = True), True = keep. A masked query token adds 0. Not
            with Tokens or a list.
        d_mask: ``[Nd, Ld]`` or ``[Nq, K, Ld]``, likewise. A masked document token is never a maximum. A
            query token that meets no valid document token adds 0 and sends no gradient.
        normalize: divide every token by its L2 norm first (eps 1e-12), with the exact gradient. On a GPU of
            compute capability 9.0, where 2048 query tokens or more meet a document (1024 where copies of
            ``Q`` and ``D`` take up to 24 MiB) and there is no ``d_mask``, bfloat16 and float16 document
            tokens are rounded to 11 significant bits once normalized (eight times finer than bfloat16).
        backward: ``"lowmem"`` (deterministic, gradients written once), ``"unified"`` (one pass, float32
            atomics), or ``"auto"`` / None: the faster for the shape, and lowmem under
            ``torch.use_deterministic_algorithms(True)``. Packed tokens have one, which is deterministic.
        precision: how float32 inputs multiply: ``"highest"`` (float32), ``"high"`` (the 11 significant bits
            of TF32), ``"medium"`` (bfloat16; on a GPU TF32 where reading the inputs takes longer than
            multiplying them). None follows PyTorch: the autocast dtype under autocast (or TF32, likewise),
            else ``torch.get_float32_matmul_precision()``. Other dtypes multiply as they are, but for what
            ``normalize`` says.
        winners: what the backward needs beside the inputs. ``"save"`` / None keeps the winning token of each
            (query token, document), two bytes each, from the forward to the backward; ``"recompute"`` keeps
            nothing and finds them again, which costs the forward's time once more; ``"auto"`` is
            ``"lowmem"`` then, and on a GPU all beside the gradients takes at most 16 MiB (from 256 MiB of
            winners on: 128 MiB, and a float32 copy of the gradient of ``Q``). With ``q_weights`` it finds all
            winners at once.
        q_weights: ``[Nq, Lq]`` (of packed queries ``[tokens]``), floating point: what the maximum of each
            query token counts, 1 where None. Of any sign, rounded to the dtype of the scores; one that is not
            finite makes its query's scores NaN. The weight of a masked token has no effect.
        mean: divide each score by the number of its query's tokens that count, which ``q_mask`` keeps and
            whose weight is not 0 (by 1 if there is none).

    Returns:
        float32 scores (float64 for float64 inputs), accumulated in that dtype: ``[Nq, Nd]`` or ``[Nq, K]``;
        a 2-D ``Q`` drops the first dim, a 2-D ``D`` the second.

    Raises:
        TypeError: an argument that is no tensor, or of a wrong dtype.
        ValueError: shapes, devices or options that do not fit.

    Warns:
        UserWarning: the first eager call without ``normalize`` in a process, if the first tokens of its
            ``Q``, masked ones and zeros (padding) aside, are no unit vectors: the models that are scored this
            way give such. Other functions look at their own first call. A look waits for the device, so none
            is taken in a CUDA graph. ``LIK_SUPPRESS_NORM_WARN=1`` in the environment turns it off.

    Example:
        >>> import torch
        >>> from late_interaction import maxsim
        >>> Q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> D = torch.tensor([[[2.0, 0.0], [0.0, 3.0]], [[1.0, 1.0], [0.0, 0.0]]])
        >>> maxsim(Q, D)
        tensor([[5., 2.]])
        >>> maxsim(Q, D, d_mask=torch.tensor([[True, False], [False, False]]))
        tensor([[2., 0.]])
    """
    compiling = is_compiling()
    scores = None
    if mean is False and winners is None:
        path: Any = traced_scores if compiling else fast_path
        scores = path(Q, D, q_mask, d_mask, normalize, backward, precision, False, q_weights)
    if scores is None:
        options: dict[str, Any] = {
            "normalize": normalize, "backward": backward, "precision": precision, "winners": winners,
            "q_weights": q_weights, "mean": mean,
        }  # fmt: skip
        scores = _scored(maxsim, Q, D, q_mask, d_mask, options)
    # Asked in this order: a graph that reads what eager calls change compiles twice.
    # Tokens looked themselves.
    if not (compiling or normalize or "maxsim" in looked) and isinstance(Q, Tensor):
        look("maxsim", Q, q_mask)
    return scores


def maxsim_pairs(
    Q: TokensLike | Codes,
    D: TokensLike | Codes,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    backward: Backward | None = None,
    precision: Precision | None = None,
    winners: Winners | None = None,
    q_weights: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """Score the pairs ``(Q[i], D[i])``: the diagonal of :func:`maxsim`, without the rest.

    Args:
        Q: ``[B, Lq, d]``, or ``B`` sequences as :class:`~late_interaction.Tokens` or a list.
        D: ``[B, Ld, d]``, likewise, or :class:`~late_interaction.Codes`, but for those of
            :class:`~late_interaction.codecs.Residual`.
        q_mask: ``[B, Lq]``.
        d_mask: ``[B, Ld]``.
        normalize, backward, precision, winners, q_weights, mean: as in :func:`maxsim`.

    Returns:
        ``[B]`` scores, float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: as :func:`maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction import maxsim_pairs
        >>> Q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> D = torch.tensor([[[2.0, 5.0]], [[7.0, 3.0]]])
        >>> maxsim_pairs(Q, D)
        tensor([2., 3.])
    """
    compiling = is_compiling()
    scores = None
    if mean is False and winners is None:
        path: Any = traced_scores if compiling else fast_path
        scores = path(Q, D, q_mask, d_mask, normalize, backward, precision, True, q_weights)
    if scores is None:
        options: dict[str, Any] = {
            "normalize": normalize, "backward": backward, "precision": precision, "winners": winners,
            "q_weights": q_weights, "mean": mean,
        }  # fmt: skip
        scores = _scored(maxsim_pairs, Q, D, q_mask, d_mask, options)
    if not (compiling or normalize or "maxsim_pairs" in looked) and isinstance(Q, Tensor):
        look("maxsim_pairs", Q, q_mask)
    return scores


def maxsim_with_winners(
    Q: TokensLike,
    D: TokensLike,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    backward: Backward | None = None,
    precision: Precision | None = None,
) -> tuple[Tensor, Tensor]:
    """Score as :func:`maxsim`, and find which document token each query token matched.

    Args:
        Q, D, q_mask, d_mask, normalize, backward, precision: as in :func:`maxsim`.

    Returns:
        ``(scores, winners)``. ``scores`` as from :func:`maxsim`, differentiable. ``winners`` is int32,
        ``[Nq, Nd, Lq]`` or ``[Nq, K, Lq]`` (a 2-D ``Q`` drops the first dim, a 2-D ``D`` the second): the
        index of the maximum, the lowest one of equals, and -1 where the query token is masked or met no
        valid token. With Tokens or lists of which one is packed: of padded queries the same, counted from the
        beginning of each document as it came; of packed queries ``[Nd, tokens of Q]``.

    Raises:
        TypeError, ValueError: as :func:`maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction import maxsim_with_winners
        >>> Q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> D = torch.tensor([[0.0, 3.0], [2.0, 0.0], [1.0, 1.0]])
        >>> maxsim_with_winners(Q, D)
        (tensor(5.), tensor([1, 0], dtype=torch.int32))
    """
    if not (isinstance(Q, Tensor) and isinstance(D, Tensor)):
        options = {"normalize": normalize, "backward": backward, "precision": precision}
        return score(maxsim_with_winners, Q, D, q_mask, d_mask, options)
    Q3, DN, q_mask, d_mask = check_maxsim(Q, D, q_mask, d_mask)
    scores, winners = _run(Q3, DN, q_mask, d_mask, normalize, backward, precision, "return")
    assert winners is not None
    if not normalize:
        look("maxsim_with_winners", Q, q_mask)
    return as_given(scores, Q, D), as_given(widen(winners, D.shape[-2]), Q, D)
