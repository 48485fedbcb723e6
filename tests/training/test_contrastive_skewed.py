"""losses.contrastive where one token of each document wins half of the query rows, or all of them, against
autograd of its definition in float64."""

import math

import pytest
import torch

import late_interaction as li
from tests.support.contrastive import assert_close, batch, gradients, reference, small_blocks
from tests.training.test_contrastive_tail import thresholded

T = 0.025  # times the tokens of a query: labels keep a part of the probability that half precision can tell
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The bias of one token: what the largest of all similarities is about, times these.
BIAS = {"half": 0.9, "all": 5.0}
SHARES = {"half": (0.3, 0.8), "all": (1.0, 1.0)}


def hot_batch(n, Lq, Ld, d, kind, dtype, device):
    """Queries, documents, and the kept tokens of documents, whose lengths differ. The last dim is constant in
    queries, and in a document it is the bias of one token, which lies anywhere."""
    Q, D = (x.detach().clone() for x in batch(n, n + 3, Lq, Ld, d, dtype, device, planted=0.5))
    lengths = torch.randint(Ld // 2, Ld + 1, (n + 3,), device=device)
    hot = (torch.rand(n + 3, device=device) * lengths).long()
    Q[..., -1], D[..., -1] = 1.0, 0.0
    D[torch.arange(n + 3, device=device), hot, -1] = BIAS[kind] * (2 * math.log(0.75 * Ld) / d) ** 0.5
    kept = torch.arange(Ld, device=device) < lengths[:, None]
    similarities = torch.einsum("isk,jtk->ijst", Q.double(), D.double())
    winners = similarities.masked_fill(~kept[:, None], -torch.inf).argmax(-1)
    share = (winners == hot[:, None]).double().mean().item()
    least, most = SHARES[kind]
    assert least <= round(share, 9) <= most  # a mean of ones on a GPU is a rounding below 1
    return Q.requires_grad_(), D.requires_grad_(), kept


def both(Q, D, kept, packed, tail, **options):
    """Loss and gradients of Q, D and the temperature: ours, and by definition, exact and as the tail says."""
    temperature = torch.tensor(T * Q.shape[1], dtype=torch.float64, device=Q.device, requires_grad=True)
    q, d = li.Tokens(Q), li.Tokens(D, kept)
    if packed:
        q, d = q.pack(), d.pack()
    loss = li.losses.contrastive(q, d, temperature=temperature, tail=tail, **options)
    ours = gradients(loss, (Q, D, temperature))
    masks = (None, kept, None)
    wanted = gradients(reference(Q, D, temperature, masks=masks), (Q, D, temperature))
    return ours, wanted


@pytest.mark.parametrize("kind", BIAS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_exact(device, dtype, packed, kind):
    Q, D, kept = hot_batch(33, 8, 20, 32, kind, dtype, device)
    with small_blocks(8):
        ours, wanted = both(Q, D, kept, packed, 0.0)
    assert_close(ours, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", BIAS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tail(device, dtype, packed, kind):
    """Gradients of the pairs above the threshold alone; the loss and the temperature's gradient are exact."""
    Q, D, kept = hot_batch(33, 8, 20, 32, kind, dtype, device)
    # The threshold lies where no weight is near: half precision may not decide otherwise than float64.
    tail = 2**-4 if dtype in (torch.float64, torch.float32) else 2**-12
    with small_blocks(8):
        ours, wanted = both(Q, D, kept, packed, tail)
    labels = torch.arange(len(Q), device=device)
    listed = thresholded(Q, D, tail, labels, masks=(None, kept, None), temperature=T * Q.shape[1])
    assert_close(ours, (wanted[0], (*listed, wanted[1][2])), TOLERANCE[dtype])


@pytest.mark.parametrize("tail", [0.0, 2**-12])
@pytest.mark.parametrize("kind", BIAS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_blocks_of_their_own_size(device, packed, kind, tail):
    """On a GPU with as many rows and documents as the kernels of large blocks take."""
    n, Lq, Ld, d = (150, 32, 180, 128) if device == "cuda" else (20, 32, 70, 64)
    Q, D, kept = hot_batch(n, Lq, Ld, d, kind, torch.bfloat16, device)
    ours, wanted = both(Q, D, kept, packed, tail, kept_bytes=0)
    assert_close(ours, wanted, TOLERANCE[torch.bfloat16])
    again, _ = both(Q, D, kept, packed, tail, kept_bytes=0)
    assert all(map(torch.equal, (ours[0], *ours[1]), (again[0], *again[1])))
