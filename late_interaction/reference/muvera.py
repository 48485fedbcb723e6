"""MUVERA's encodings by definition: token by token, in float64."""

import torch
from torch import Tensor

from late_interaction.muvera import Muvera

__all__ = ["muvera_reference"]


def muvera_reference(muvera: Muvera, tokens: Tensor, *, document: bool) -> Tensor:
    """Compute what :class:`late_interaction.Muvera` does of one query, or of one document, by definition.

    They are those of ``encode_queries`` and ``encode_documents``.

    Args:
        muvera: its parameters and matrices.
        tokens: ``[L, d]``.
        document: else a query.

    Returns:
        float64, ``[dim]``.

    Example:
        >>> import torch
        >>> from late_interaction import Muvera
        >>> from late_interaction.reference import muvera_reference
        >>> muvera_reference(Muvera(2, k_sim=0, repetitions=1), torch.eye(2), document=True)
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    state = muvera.state_dict()
    x, k_sim = tokens.to(torch.float64), muvera.k_sim
    encoding = []
    for r in range(muvera.repetitions):
        planes = state["hyperplanes"][:, r * k_sim : (r + 1) * k_sim].double()
        numbers = [_number((token @ planes > 0).tolist()) for token in x]
        for partition in range(2**k_sim):
            block = _partition(x, numbers, partition, document, muvera.fill_empty)
            if muvera.d_proj is not None:
                block = block @ state["projection"][r, :, : muvera.d_proj].double()
            encoding.append(block if document else block / muvera.repetitions)
    whole = torch.cat(encoding)
    if muvera.d_final is None:
        return whole
    sketch = whole.new_zeros(muvera.d_final)
    for value, bucket, sign in zip(whole, state["buckets"].tolist(), state["signs"].tolist(), strict=True):
        sketch[bucket] += sign * value
    return sketch


def _number(bits: list[bool]) -> int:
    return sum(int(bit) << place for place, bit in enumerate(bits))


def _partition(x: Tensor, numbers: list[int], partition: int, document: bool, fill_empty: bool) -> Tensor:
    own = [token for token, number in zip(x, numbers, strict=True) if number == partition]
    if own:
        total = torch.stack(own).sum(0)
        return total / len(own) if document else total
    if not (document and fill_empty and len(x)):
        return x.new_zeros(x.shape[-1])
    distances = [(number ^ partition).bit_count() for number in numbers]
    return x[distances.index(min(distances))]
