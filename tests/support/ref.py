"""The judge: MaxSim and its gradients by brute force in float64, and how close is close.

Written apart from late_interaction.reference on purpose, document by document, from the definition.
"""

import itertools

import torch

EPS = 1e-12

# Relative error of scores against float64 on the same inputs. Half-precision products are exact in float32,
# so only the float32 sums err there.
SCORE_TOLERANCE = {
    "bfloat16": 5e-6,
    "float16": 5e-6,
    "float32 highest": 3e-6,
    "float32 high": 1e-3,
    "float32 medium": 8e-3,
    "float32 fp16": 1e-3,
    "float64": 1e-13,
}
# Where a GPU normalizes tokens for many query rows, it rounds them to fp16, 11 significant bits. The first
# bound is for scores, sums over 30 tokens or so; the second is how far two similarities can be apart.
UNIT_SCORE_TOLERANCE, UNIT_WINNER_TOLERANCE = 5e-5, 2**-10
# Gradients against float64 with the same winners: the input's dtype rounds them once.
GRAD_TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6, torch.float64: 1e-13}


def tolerance(dtype, precision="highest"):
    name = str(dtype).removeprefix("torch.")
    return SCORE_TOLERANCE[f"{name} {precision}" if dtype == torch.float32 else name]


def per_query(D, Nq):
    """D as [Nq, N, Ld, d], whoever meets whom."""
    return D if D.dim() == 4 else D.unsqueeze(0).expand(Nq, *D.shape)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True).clamp_min(EPS)


LAID = ["transposed", "sliced", "offset", "expanded"]


def laid(form, Q, D):
    """Q and D once with the strides or the offset that `form` names, once contiguous."""
    if form == "expanded":
        Q, D = Q[:1].expand(*Q.shape), D[:1].expand(*D.shape)
        return (Q, D), (Q.contiguous(), D.contiguous())
    lay = {
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": lambda x: torch.nn.functional.pad(x, (3, 2))[..., 3:-2],
        "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    }[form]
    return (lay(Q), lay(D)), (Q, D)


def similarities(Q, D, normalize=False):
    """Yields (j, [Nq, Lq, Ld] similarities of every query with its document j), in float64."""
    Q, D = Q.detach().double(), per_query(D.detach(), Q.shape[0])
    Q = unit(Q) if normalize else Q
    for j in range(D.shape[1]):
        document = D[:, j].double()
        yield j, Q @ (unit(document) if normalize else document).transpose(1, 2)


def maxsim(Q, D, q_mask=None, d_mask=None, normalize=False):
    """(scores [Nq, N] float64, winners [Nq, N, Lq] int64)."""
    best, winners = maxima(Q, D, q_mask, d_mask, normalize)
    return best.sum(-1), winners


def maxima(Q, D, q_mask=None, d_mask=None, normalize=False):
    """Those of each query token [Nq, N, Lq], in float64 and 0 where nothing counts, and winners, -1 there."""
    Nq, Lq, Ld = Q.shape[0], Q.shape[1], D.shape[-2]
    N = D.shape[-3]
    found = torch.zeros(Nq, N, Lq, dtype=torch.float64, device=Q.device)
    winners = torch.full((Nq, N, Lq), -1, device=Q.device)
    if Ld == 0 or Lq == 0 or Nq == 0:
        return found, winners
    keep_q = torch.ones(Nq, Lq, dtype=torch.bool, device=Q.device) if q_mask is None else q_mask
    for j, S in similarities(Q, D, normalize):
        keep_d = torch.ones(Nq, Ld, dtype=torch.bool, device=Q.device)
        if d_mask is not None:
            keep_d = d_mask[:, j] if d_mask.dim() == 3 else d_mask[j].expand(Nq, Ld)
        counts = keep_q & keep_d.any(1, keepdim=True)
        S = S.masked_fill(~keep_d.unsqueeze(1), -torch.inf)
        best = S.amax(-1)
        # The lowest index that reaches the maximum; among NaN, the first.
        hit = torch.where(best.isnan().unsqueeze(-1), S.isnan(), best.unsqueeze(-1) == S) & keep_d.unsqueeze(
            1
        )
        index = hit.int().argmax(-1)
        found[:, j] = torch.where(counts, best, 0.0)
        winners[:, j] = torch.where(counts, index, -1)
    return found, winners


def maxsim_of_packed(Q, D, cu_seqlens_d, q_mask=None, normalize=False):
    """Scores of padded queries with packed documents ``[tokens, d]``."""
    found = [torch.zeros(Q.shape[0], 0, dtype=torch.float64, device=Q.device)]
    for begin, end in itertools.pairwise(cu_seqlens_d.tolist()):
        found.append(maxsim(Q, D[None, begin:end], q_mask, None, normalize)[0])
    return torch.cat(found, 1)


def dequantized(codes, scale):
    """Tokens in float64; scale is 0-dim or one a token."""
    return codes.double() * scale.double().unsqueeze(-1)


def gradients(grad_scores, Q, D, winners, normalize=False):
    """(grad_Q, grad_D) in float64, with the winners as given; grad_scores [Nq, N], or those of each token."""
    Nq = Q.shape[0]
    q, d = Q.detach().double(), per_query(D.detach(), Nq).double()
    q_hat, d_hat = (unit(q), unit(d)) if normalize else (q, d)
    i, j, s = (winners >= 0).nonzero(as_tuple=True)
    t = winners[i, j, s].long()
    grads = grad_scores.double() if grad_scores.dim() == 3 else grad_scores.double().unsqueeze(-1)
    weight = grads.expand(winners.shape)[i, j, s].unsqueeze(-1)
    grad_q = torch.zeros_like(q).index_put_((i, s), weight * d_hat[i, j, t], accumulate=True)
    grad_d = torch.zeros(d.shape, dtype=torch.float64, device=d.device)
    grad_d.index_put_((i, j, t), weight * q_hat[i, s], accumulate=True)
    if normalize:
        grad_q, grad_d = _through_norm(grad_q, q), _through_norm(grad_d, d)
    return grad_q, grad_d if D.dim() == 4 else grad_d.sum(0)


def _through_norm(grad, x):
    hat, norm = unit(x), x.norm(dim=-1, keepdim=True)
    projected = grad - (grad * hat).sum(-1, keepdim=True) * hat
    return torch.where(norm > EPS, projected, grad) / norm.clamp_min(EPS)


def relative_error(out, ref):
    """||out - ref|| / ||ref|| over the finite entries; the others must be the same ones."""
    out, ref = out.detach().double(), ref.double()
    assert out.shape == ref.shape, f"{tuple(out.shape)} != {tuple(ref.shape)}"
    finite = ref.isfinite()
    torch.testing.assert_close(out[~finite], ref[~finite], equal_nan=True, rtol=0, atol=0)
    out, ref = out[finite], ref[finite]
    if ref.numel() == 0 or not ref.any():
        return float(out.abs().max()) if out.numel() else 0.0
    return float((out - ref).norm() / ref.norm())


def assert_close(out, ref, limit, what="scores"):
    error = relative_error(out, ref)
    assert error <= limit, f"{what}: relative error {error:.2e} > {limit:.0e}"


def assert_winners_close(winners, ref, Q, D, limit, normalize=False):
    """Equal but where two similarities are within rounding; sentinels exactly where they belong."""
    assert winners.shape == ref.shape, f"{tuple(winners.shape)} != {tuple(ref.shape)}"
    winners = winners.long()
    assert torch.equal(winners == -1, ref == -1), "sentinels differ"
    if torch.equal(winners, ref):
        return
    assert winners.min() >= -1 and winners.max() < D.shape[-2], "a winner is no token"
    for j, S in similarities(Q, D, normalize):
        mine, best = (S.gather(-1, w[:, j].clamp_min(0).unsqueeze(-1)).squeeze(-1) for w in (winners, ref))
        # A dot product errs by a few roundings of |q| |d|.
        scale = 1.0
        if not normalize:
            longest = per_query(D.detach(), Q.shape[0])[:, j].double().norm(dim=-1).amax(-1, keepdim=True)
            scale = Q.detach().double().norm(dim=-1) * longest
        gap = ((best - mine) / scale)[winners[:, j] != ref[:, j]]
        worst = float(gap.max()) if gap.numel() else 0.0
        assert worst <= limit, f"document {j}: a winner is {worst:.1e} short of the maximum"


def assert_gradients(scores, Q, D, winners, limit, normalize=False, grad_scores=None):
    """Return the gradients of these scores, random ones or as given, which must be close to float64."""
    grad_scores = torch.randn_like(scores) if grad_scores is None else grad_scores
    found = torch.autograd.grad(scores, (Q, D), grad_scores)
    wanted = gradients(grad_scores, Q, D, winners, normalize)
    for got, expected, x, name in zip(found, wanted, (Q, D), ("grad_Q", "grad_D"), strict=True):
        assert got.dtype == x.dtype
        assert_close(got, expected, limit, name)
    return found
