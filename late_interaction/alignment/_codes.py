"""Which token of documents that are codes each query token matched, for :func:`late_interaction.explain`.

The documents asked for are decoded one at a time, and explained as dense ones.
"""

from typing import Any

from torch import Tensor

from late_interaction._checks.messages import shape_of
from late_interaction._checks.tensors import check_not_meta, check_rows
from late_interaction._scoring.norm_warning import look
from late_interaction.alignment import Alignment, check_documents, explain_one
from late_interaction.codes import Codes
from late_interaction.tokens import Tokens


def explain_codes(
    Q: Tensor, D: Codes, documents: Tensor | None, normalize: bool, precision: Any
) -> list[Alignment] | list[list[Alignment]]:
    """Alignments ``[Nq][Nd]`` or ``[Nq][k]``; a list of them for a 2-D ``Q``."""
    check_rows("Q", Q)
    check_not_meta("Q", Q)
    if Q.dim() not in (2, 3) or Q.shape[-1] != D.d or D.values.dim() == 4:
        raise ValueError(
            f"Q must be [Nq, Lq, {D.d}] or [Lq, {D.d}] and D of [N, L, w] or packed, got {shape_of(Q)} and"
            f" {shape_of(D.values)}"
        )
    one_query = Q.dim() == 2
    queries = (Q.unsqueeze(0) if one_query else Q).detach()
    met = D.codec._met(Tokens._made(queries), normalize, precision)
    picks: list[Any] = [range(len(D))] * len(queries)
    if documents is not None:
        bounds = [(0, 0)] * len(D)
        picks = check_documents(documents, queries, bounds, D.values, one_query).tolist()
    found: dict[tuple[int, int], Alignment] = {}
    for j in sorted(set().union(*picks)):
        document = D.codec.decode(D[j])[0].to(met.dtype)[None]
        for i, chosen in enumerate(picks):
            if j in chosen:
                (found[i, j],) = explain_one(met[i], None, normalize, precision, document, None)
    if not normalize:
        look("explain", Q)
    result = [[found[i, j] for j in chosen] for i, chosen in enumerate(picks)]
    return result[0] if one_query else result
