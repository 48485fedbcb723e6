"""Fresh random inputs. Zeros would hide outputs that nobody wrote, and run faster than data does."""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

UNIFORM = "uniform"
SKEWED = "skewed"  # the winner's index is Ld * u^4: the hottest token wins Ld^(3/4) times the mean
SKEWED_UP_TO = 1 << 14  # document tokens: fitting the skew of longer ones takes minutes


FP8, INT8 = torch.float8_e4m3fn, torch.int8
_LARGEST = {FP8: 448.0, INT8: 127.0}


@dataclass
class Inputs:
    """One set of tensors for one shape. The backward suite alone has `winners`."""

    Q: torch.Tensor
    D: torch.Tensor
    grad_scores: torch.Tensor
    winners: torch.Tensor | None = None  # int32 [Nq, Nd, Lq]

    @property
    def tokens(self):
        return self.Q, self.D

    @property
    def step(self):
        """Return what a step is given: the tokens, and the gradient of their scores."""
        return self.tokens, self.grad_scores

    def require_grad(self):
        self.Q.requires_grad_(True)
        self.D.requires_grad_(True)


def _unit_tokens(shape, device, dtype):
    """L2-normalized rows, as every late-interaction model emits."""
    return F.normalize(torch.randn(shape, device=device, dtype=torch.float32), dim=-1).to(dtype)


def hot_token_share(Ld):
    """The fraction of winners that token 0 takes when the index is Ld * u^4."""
    return float((1.0 / Ld) ** 0.25)


@cache
def _token_bias(Ld):
    """Added to standard normal similarities, makes low token indices win as Ld * u^4 would.

    The shape of the bias is the log of the wanted probabilities (exact for Gumbel noise); one factor,
    found by bisection, fits the hottest token's share under normal noise.
    """
    edges = (torch.arange(Ld + 1, dtype=torch.float64) / Ld) ** 0.25
    log_share = (edges[1:] - edges[:-1]).log()
    noise = torch.randn(1500, Ld, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = 0.0, 4.0
    for _ in range(16):
        factor = (low + high) / 2
        share = (noise + factor * log_share).argmax(1).eq(0).double().mean().item()
        low, high = (factor, high) if share < hot_token_share(Ld) else (low, factor)
    bias = (low + high) / 2 * log_share
    return (bias - bias.mean()).float()


def _skew(Q, D, Ld):
    """Spends one embedding dimension on the bias: constant in Q, the bias of each token in D."""
    d = Q.shape[-1]
    scale = d**-0.5  # random unit rows have similarities of this standard deviation
    Q, D = Q.clone(), D.clone()
    Q[..., 0] = 1.0
    D[..., 0] = (_token_bias(Ld).to(D.device) * scale).to(D.dtype)
    return Q, D


def draw_winners(shape, winners, device):
    """Random winners, for the backward suite."""
    u = torch.rand(shape.winners_shape, device=device)
    if winners == SKEWED:
        u = u**4
    return (u * shape.Ld).to(torch.int32).clamp_(max=shape.Ld - 1)


def draw(shape, device, dtype, winners=None):
    """Q, D and grad_scores for `shape`. With winners="skewed", a few document tokens win most."""
    Q = _unit_tokens(shape.q_shape, device, dtype)
    D = _unit_tokens(shape.d_shape, device, dtype)
    if winners == SKEWED:
        Q, D = _skew(Q, D, shape.Ld)
    return Inputs(Q, D, torch.randn(shape.scores_shape, device=device, dtype=torch.float32))


def draw_packed(shape, device, dtype, full=False):
    """(Q, D, cu_seqlens_q, cu_seqlens_d). Query lengths are uniform from Lq / 4 to Lq; document lengths go
    from 20 to Ld, short ones more often. With `full`, all sequences have Lq and Ld tokens."""
    generator = torch.Generator().manual_seed(0)

    def pack(lengths):
        offsets = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return _unit_tokens((int(lengths.sum()), shape.d), device, dtype), offsets.to(device)

    even = torch.rand(shape.Nq, generator=generator)
    skewed = torch.rand(shape.Nd, generator=generator) ** 2.5
    q_least, d_least = (shape.Lq, shape.Ld) if full else (max(shape.Lq // 4, 1), min(20, shape.Ld))
    Q, cu_q = pack(q_least + (even * (shape.Lq - q_least + 1)).long())
    D, cu_d = pack(d_least + (skewed * (shape.Ld - d_least + 1)).long())
    return Q, D, cu_q, cu_d


def quantize(x, dtype, per_token):
    """(x / scale in dtype, float32 scale [..., L] or []); scale makes the largest |x| the dtype's largest."""
    x = x.float()
    largest = x.abs().amax(-1) if per_token else x.abs().amax()
    scale = largest.clamp_min(1e-6) / _LARGEST[dtype]
    scaled = x / (scale.unsqueeze(-1) if per_token else scale)
    return (scaled.round() if dtype == INT8 else scaled).to(dtype), scale
