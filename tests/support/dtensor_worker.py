"""What the processes of tests/operators/test_dtensor.py run."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import late_interaction as li

R, S = Replicate(), Shard(0)
# Five queries and three documents on two processes: no side is even. Pairs have the sizes of a batch, too.
OWN, SAME = (5, 2, 6, 8), (5, 6, 8)
FUNCTIONS = {
    "maxsim": (li.maxsim, (3, 6, 8)),
    "maxsim, as many": (li.maxsim, SAME),
    "maxsim_pairs": (li.maxsim_pairs, SAME),
    "options": (lambda Q, D: li.maxsim(Q, D, normalize=True, backward="lowmem", mean=True), (3, 6, 8)),
    "recompute": (lambda Q, D: li.maxsim(Q, D, winners="recompute"), (3, 6, 8)),
    "own documents": (li.maxsim, OWN),
    "winners": (lambda Q, D: li.maxsim_with_winners(Q, D)[0], (3, 6, 8)),
    "weighted": (lambda Q, D: li.maxsim(Q, D, q_weights=Q[..., 0].detach()), (3, 6, 8)),
    "masked": (lambda Q, D: li.maxsim(Q, D, Q[..., 0] > 0, D[..., 0] > -1), (3, 6, 8)),
    "smooth_maxsim": (li.smooth_maxsim, (3, 6, 8)),
    "smooth_maxsim_pairs": (li.smooth_maxsim_pairs, SAME),
    "xtr_scores": (lambda Q, D: li.xtr_scores(Q, D, 4), (3, 6, 8)),
}
LETTERS = {"R": R, "0": S, "1": Shard(1), "2": Shard(2), "P": Partial()}
NAMES = {placement: letter for letter, placement in LETTERS.items()}


def given(shape):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((5, 4, 8), shape)]


def numbered(scores):
    return torch.arange(1.0, scores.numel() + 1, dtype=scores.dtype).view(scores.shape)


def differentiated(function, Q, D, weights=numbered):
    """The scores, and the gradients of a sum of them that tells each from the others."""
    Q, D = Q.detach().requires_grad_(), D.detach().requires_grad_()
    scores = function(Q, D)
    return [scores, *torch.autograd.grad((scores * weights(scores)).sum(), (Q, D))]


def on_mesh(rank, world, cases, sizes):
    """For each case, a function's name and the placements of Q and D as letters: those of scores and
    gradients, and the largest differences from one process."""
    mesh, found = init_device_mesh("cpu", sizes), []
    for name, *sharded in cases:
        function, shape = FUNCTIONS[name]
        tokens = given(shape)
        wanted = differentiated(function, *tokens)
        placements = [[LETTERS[c] for c in letters] for letters in sharded]
        tokens = [distribute_tensor(x, mesh, y) for x, y in zip(tokens, placements, strict=True)]
        got = differentiated(function, *tokens, lambda x: distribute_tensor(numbered(x), mesh, x.placements))
        placed = ["".join(NAMES[p] for p in x.placements) for x in got]
        off = [(x.full_tensor() - y).abs().max().item() for x, y in zip(got, wanted, strict=True)]
        found.append((placed, off))
    return found


def gradient_of_a_parameter(rank, world):
    """A projection that all processes have, of queries that are sharded: its gradient as in one process."""
    mesh = init_device_mesh("cpu", (world,))
    Q, D = given((3, 6, 8))
    Q, found = Q[:4], []  # PyTorch multiplies even shards alone by a matrix
    for place in (lambda x, _: x, lambda x, placement: distribute_tensor(x, mesh, [placement])):
        W = place(torch.eye(8, dtype=torch.float64), R).requires_grad_()
        scores = li.maxsim(place(Q, S) @ W, place(D, R) @ W)
        scores.logsumexp(1).sum().backward()
        found.append(W.grad)
    return float((found[0] - found[1].full_tensor()).abs().max())


def losses(rank, world, of):
    """The loss of both sides' shards in a group, of what to_local gives, and the message for a DTensor."""
    mesh = init_device_mesh("cpu", (world,))
    loss = getattr(li.losses, of)
    Q, D = (
        torch.randn(6, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (4, 6)
    )
    wanted = [x.requires_grad_() for x in (Q.clone(), D.clone())]
    loss(*wanted).backward()
    dQ, dD = (distribute_tensor(x, mesh, [S]).requires_grad_() for x in (Q, D))
    value = loss(dQ.to_local(), dD.to_local(), group=mesh.get_group())
    value.backward()
    off = [float((x.grad.full_tensor() - y.grad).abs().max()) for x, y in zip((dQ, dD), wanted, strict=True)]
    messages = []
    for group in (None, dist.group.WORLD):
        for tokens in ((dQ, dD), (li.Tokens(dQ), dD.to_local())):
            try:
                loss(*tokens, group=group)
                messages.append("nothing was raised")
            except (TypeError, RuntimeError) as error:
                messages.append(f"{type(error).__name__}: {error}")
    return off, messages
