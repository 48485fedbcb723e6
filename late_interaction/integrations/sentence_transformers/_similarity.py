"""The four functions of ``sentence_transformers.util.similarity`` on the kernels, with its signatures.

What the kernels do not take goes through Sentence Transformers' own code.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from late_interaction.integrations._shared import calls
from late_interaction.integrations.sentence_transformers._chunks import grid, pairs, theirs
from late_interaction.integrations.sentence_transformers._inputs import token_counts
from late_interaction.integrations.sentence_transformers._originals import PACKAGE, disabled

Device = str | torch.device | None
_P = ParamSpec("_P")


def maxsim(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: Device = None,
) -> Tensor:
    """Scores of every query with every document, differentiable.

    Args:
        a: queries: a list of ``[Lq_i, d]`` tensors or arrays, ``[Nq, Lq, d]`` padded, or one ``[Lq, d]``.
        b: documents, in the same forms.
        a_mask: ``[Nq, Lq]``: a bool mask, or numbers that multiply each query token's maximum.
        b_mask: ``[Nd, Ld]``, nonzero = keep.
        chunk_elements: how many elements of packed documents are copied at a time; None: 100 million.
        length_normalize: divide each query's scores by the number of its tokens.
        device: where to score; None: where the documents are.

    Returns:
        ``[Nq, Nd]``, float32 (float64 of float64 queries without a mask), on the documents' device.
        A document without a token that counts scores -1e9.

    Raises:
        TypeError, ValueError: what Sentence Transformers refuses, in its words.

    Example:
        >>> import torch
        >>> from late_interaction.integrations import sentence_transformers as st
        >>> queries = [torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0]])]
        >>> documents = [torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 4.0]])]
        >>> st.maxsim(queries, documents)
        tensor([[4., 5.],
                [6., 2.]])
    """
    scores = None if disabled() else grid(a, b, a_mask, b_mask, chunk_elements, device)
    if scores is None:
        return theirs("maxsim")(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)
    calls.scored(PACKAGE)
    return scores / token_counts(scores, a, a_mask).unsqueeze(1) if length_normalize else scores


def maxsim_pairwise(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: Device = None,
) -> Tensor:
    """Score the pairs ``(a[i], b[i])``, differentiable.

    Args:
        a, b, a_mask, b_mask, length_normalize, device: as in :func:`maxsim`, as many queries as documents.
        chunk_elements: how many elements of packed queries and documents are copied at a time.

    Returns:
        ``[B]``, as :func:`maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction.integrations import sentence_transformers as st
        >>> queries = [torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0]])]
        >>> documents = [torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 4.0]])]
        >>> st.maxsim_pairwise(queries, documents)
        tensor([4., 2.])
    """
    scores = None if disabled() else pairs(a, b, a_mask, b_mask, chunk_elements, device)
    if scores is None:
        return theirs("maxsim_pairwise")(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)
    calls.scored(PACKAGE)
    return scores / token_counts(scores, a, a_mask) if length_normalize else scores


def mean_of(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Make the form of a function whose ``length_normalize`` defaults to True."""
    signature = inspect.signature(function)
    changed = [
        x.replace(default=True) if x.name == "length_normalize" else x for x in signature.parameters.values()
    ]
    default = [*signature.parameters].index("length_normalize")

    @wraps(function)
    def mean(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        if len(args) <= default:
            kwargs.setdefault("length_normalize", True)
        return function(*args, **kwargs)

    mean.__name__ = mean.__qualname__ = f"mean_{function.__name__}"
    mean.__doc__ = f"Divide :func:`{function.__name__}` by each query's number of tokens, in its arguments."
    mean.__signature__ = signature.replace(parameters=changed)  # type: ignore[attr-defined]
    return mean


mean_maxsim = mean_of(maxsim)
mean_maxsim_pairwise = mean_of(maxsim_pairwise)
