"""The gradient of MaxSim of residual-compressed documents on the CPU, from the tokens that won, and scores by
centroids alone. The forward is csrc/cpu/plaid.cpp."""

import torch
from torch import Tensor

from late_interaction._checks.plaid import check_approx_score, check_compressed
from late_interaction.ops.winners import widen

# A block of decompressed tokens or of gathered scores takes at most this many bytes, or is one document.
_BYTES = 16 << 20


class _Documents:
    """Compressed documents as one list of tokens: where each begins, how long it is, and what tokens hold."""

    def __init__(
        self,
        codes: Tensor,
        residuals: Tensor,
        extents: Tensor,
        centroids: Tensor,
        bucket_weights: Tensor,
        nbits: int,
        dtype: torch.dtype,
    ) -> None:
        self.packed = codes.dim() == 1
        self.d = centroids.shape[-1]
        self.dtype = dtype
        room = codes.shape[-1]
        extents = extents.long()
        if self.packed:
            self.first = extents[:-1]
        else:
            self.first = torch.arange(len(codes)) * room
        self.codes = codes.reshape(-1)
        self.width = residuals.shape[-1] * (8 // nbits)  # buckets of a token, with those past d
        self.residuals = residuals.flatten(0, -2)
        self.working = torch.float64 if dtype == torch.float64 else torch.float32
        self.centroids = centroids
        shifts = torch.arange(0, 8, nbits)
        buckets = (torch.arange(256).unsqueeze(1) >> shifts) & (2**nbits - 1)
        self.values = bucket_weights.to(self.working)[buckets]  # of each byte

    def __len__(self) -> int:
        return len(self.first)

    def tokens(self, at: Tensor) -> Tensor:
        """Tokens by their place among all, decompressed: [..., d]."""
        flat = at.flatten()
        codes = self.codes.index_select(0, flat)
        codes = torch.where((codes >= 0) & (codes < len(self.centroids)), codes, 0)
        residuals = self.residuals.index_select(0, flat)
        x = self.values.index_select(0, residuals.flatten().int()).view(len(flat), self.width)[:, : self.d]
        x += self.centroids.index_select(0, codes)
        return x.to(self.dtype).reshape(*at.shape, self.d)


def _documents(
    Q: Tensor, codes: Tensor, residuals: Tensor, extents: Tensor, centroids: Tensor, bucket_weights: Tensor,
    nbits: int,
) -> _Documents:  # fmt: skip
    kind = "_flat" if codes.dim() == 1 else ""
    checked = ("codes" + kind, codes), ("residuals" + kind, residuals), ("extents", extents)
    check_compressed(Q, *checked, centroids, bucket_weights, nbits)
    return _Documents(codes, residuals, extents, centroids, bucket_weights, nbits, Q.dtype)


def maxsim_residual_backward(
    grad_scores: Tensor, Q: Tensor, codes: Tensor, residuals: Tensor, extents: Tensor, centroids: Tensor,
    bucket_weights: Tensor, winners: Tensor, nbits: int, normalize: bool = True,
) -> Tensor:  # fmt: skip
    documents = _documents(Q, codes, residuals, extents, centroids, bucket_weights, nbits)
    best = winners if documents.packed else widen(winners, codes.shape[-1])
    q = Q.to(documents.working)
    grad = torch.zeros_like(q)
    step = max(1, _BYTES // max(1, 4 * Q.numel()))
    for begin in range(0, len(documents), step):
        some = slice(begin, begin + step)
        mine = best[:, some].long()
        at = documents.first[some].view(1, -1, 1) + mine.clamp_min(0)
        at = at.where(mine >= 0, 0)  # any token: its weight is 0
        tokens = documents.tokens(at).to(documents.working)  # [Nq, n, Lq, d]
        if normalize:
            tokens = torch.nn.functional.normalize(tokens, dim=-1, eps=1e-12)
        # torch.where, not a product: an infinite gradient times 0 would be NaN.
        weight = torch.where(mine >= 0, grad_scores[:, some].unsqueeze(-1), 0.0)
        tokens = tokens.masked_fill((mine < 0).unsqueeze(-1), 0.0)
        grad += torch.einsum("ijs,ijsd->isd", weight, tokens)
    if normalize:
        norm = torch.linalg.vector_norm(q, dim=-1, keepdim=True)
        along = (grad * q).sum(-1, keepdim=True) / norm.square()
        # Below eps the normalized token is linear in q. A zero gradient stays zero, even if the token is NaN.
        grad = torch.where(norm > 1e-12, grad - along * q, grad) / norm.clamp_min(1e-12)
    return grad.to(Q.dtype)


def plaid_approx_score(query_centroid_scores: Tensor, codes: Tensor, doc_lengths: Tensor) -> Tensor:
    check_approx_score(query_centroid_scores, codes, doc_lengths)
    table = query_centroid_scores
    codes = torch.where((codes >= 0) & (codes < len(table)), codes, 0)
    B, Ld = codes.shape
    Lq = table.shape[1]
    scores = table.new_zeros(B)
    step = max(1, _BYTES // max(1, 4 * Ld * Lq))
    for begin in range(0, B if Ld else 0, step):
        some = codes[begin : begin + step]
        length = doc_lengths[begin : begin + step].unsqueeze(1)
        gathered = table.index_select(0, some.flatten()).view(*some.shape, Lq)
        gathered.masked_fill_((torch.arange(Ld) >= length).unsqueeze(-1), float("-inf"))
        scores[begin : begin + step] = torch.where(length > 0, gathered.amax(1), 0.0).sum(-1)
    return scores


KERNELS = (maxsim_residual_backward, plaid_approx_score)
