"""Checks of maxsim_padded and pack_padded: padded tokens with lengths."""

import torch
from torch import Tensor

from late_interaction._checks.messages import describe_bad_lengths, shape_of
from late_interaction._checks.options import check_flag
from late_interaction._checks.tensors import (
    check_embeddings,
    check_integers,
    check_lengths,
    check_same_kind,
    has_values,
    has_values_on_cpu,
)


def check_padded(
    queries: Tensor, documents: Tensor, query_lengths: Tensor, doc_lengths: Tensor, validate: bool
) -> tuple[Tensor, Tensor]:
    """Queries, and candidates of each. Masks of the tokens that count come back."""
    check_flag("validate", validate)
    check_embeddings("queries", queries)
    check_embeddings("documents", documents)
    if queries.dim() != 3 or documents.dim() != 4 or queries.shape[0] != documents.shape[0]:
        raise ValueError(
            "queries and documents must be [B, Lq, d] and [B, C, Ld, d],"
            f" got {shape_of(queries)} and {shape_of(documents)}"
        )
    check_same_kind(queries, documents, "queries", "documents")
    return (
        _mask_of_lengths("query_lengths", query_lengths, "queries", queries, validate),
        _mask_of_lengths("doc_lengths", doc_lengths, "documents", documents, validate),
    )


def _mask_of_lengths(name: str, lengths: Tensor, tokens_name: str, tokens: Tensor, validate: bool) -> Tensor:
    dims = tokens.dim() - 2
    check_integers(name, lengths, dims, "[B, C]" if dims == 2 else "[B]", tokens_name, tokens.device)
    if lengths.shape != tokens.shape[:-2]:
        raise ValueError(f"{name} must be {list(tokens.shape[:-2])}, got {shape_of(lengths)}")
    longest = tokens.shape[-2]
    readable = (
        has_values(lengths) or torch.compiler.is_compiling() if validate else has_values_on_cpu(lengths)
    )
    if readable:
        check_lengths(name, lengths, int(validate), longest)
    return torch.arange(longest, device=tokens.device) < lengths.unsqueeze(-1)


class LengthError(ValueError, RuntimeError):
    """Lengths that are found to be wrong only once they have been waited for."""


def read_longest(name: str, lengths: Tensor, longest: int) -> int:
    """The longest of lengths, which lie within [0, longest]. Waits for the device."""
    if lengths.is_meta:
        raise ValueError(
            f"{name} must hold values, for they decide how many tokens are packed: got a meta tensor"
        )
    if lengths.numel() == 0:
        return 0
    if not has_values(lengths):  # the traced graph asserts it
        shortest, most = lengths.amin().item(), lengths.amax().item()
        torch._check(shortest >= 0)
        torch._check(most >= 0)
        torch._check(most <= longest)
        return most  # type: ignore[return-value]
    least, most = torch.stack(lengths.aminmax()).tolist()
    if least < 0 or most > longest:
        bad = (lengths < 0) | (lengths > longest)
        raise LengthError(describe_bad_lengths(name, lengths, bad, 0, longest))
    return int(most)
