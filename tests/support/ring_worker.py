"""What the processes of tests/training/test_contrastive_group.py run, one a rank, on gloo or NCCL."""

import contextlib
import datetime
import faulthandler
import importlib
import os
import traceback
from unittest import mock

import torch
import torch.distributed as dist

import late_interaction as li
from late_interaction._contrastive import backward, call, cross_entropy, forward, kernels, whole
from tests.support import contrastive
from tests.support.contrastive import own, small_blocks

T = 0.3
QUERIES, DOCUMENTS = (5, 8, 3, 6), (9, 8, 4, 7)  # of each rank
LABELS = [torch.tensor(x) for x in ([8, 0, -100, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7], [3, -100, 0])]  # of three


def start(rank, world, port, results, name, timeout, arguments, backend="gloo", environment=()):
    """Runs a function, one of those below or "module.function", as a rank of a group; what it returns, or
    raises, goes to results."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= dict(environment)
    faulthandler.dump_traceback_later(timeout + 30)  # what a rank that does not end waits for
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout)
        )
        module, _, function = name.rpartition(".")
        run = getattr(importlib.import_module(module or __name__), function)
        results.put((rank, run(rank, world, **arguments)))
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    results.close()
    results.join_thread()
    os._exit(0)  # without waiting for the group, which may have lost a rank


def queries_of(rank, kind):
    return 0 if kind in ("no queries", "ones, no queries") and rank == 1 else QUERIES[rank]


def shards(world, kind, d=8, symmetric=False):
    """The same batch on every rank: a list of (queries, documents) as Tokens for each."""
    torch.manual_seed(5)
    halves = {"half": torch.bfloat16, "ones bf16": torch.bfloat16, "ones fp16": torch.float16}
    dtype = halves.get(kind, torch.float32 if kind == "ones fp32" else torch.float64)
    found = []
    for rank in range(world):
        Nq = queries_of(rank, kind)
        Nd = Nq if symmetric else DOCUMENTS[rank]
        Lq, Ld = 4, 6 + (rank if kind in ("ragged", "mixed") else 0)
        if kind == "single":  # both sides have one token each, on the first rank alone
            Lq, Ld = 1, 1 + rank
        if kind.startswith("ones"):
            Lq, Ld = 1, 1
        Q, D = torch.randn(Nq, Lq, d).to(dtype), torch.randn(Nd, Ld, d).to(dtype)
        D[: min(Nq, Nd), :Lq] += Q[: min(Nq, Nd), :Ld]
        queries, documents = li.Tokens(Q), li.Tokens(D)
        if (kind == "masked" and rank != 1) or (kind == "mixed" and rank == 1):
            documents = li.Tokens(D, torch.rand(Nd, Ld) < 0.7)
        if kind == "packed":
            lengths = torch.randint(0, Ld + 1, (Nd,))
            documents = li.Tokens.from_list([x[:n] for x, n in zip(D, lengths, strict=True)])
            queries = queries.pack()
        found.append((queries, documents))
    return found


def loss_of(Q, D, T=T, **options):
    temperature = torch.tensor(T, dtype=torch.float64, requires_grad=True)
    leaves = [x.values.requires_grad_() for x in (Q, D)]
    loss = li.losses.contrastive(Q, D, temperature=temperature, **options)
    return loss, [*leaves, temperature]


def arrays(loss, grads):
    """As NumPy's: tensors would go by shared memory, which ends with this process."""
    return loss.detach().double().cpu().numpy(), [g.double().cpu().numpy() for g in grads]


def gradients(
    rank,
    world,
    kind="padded",
    runs=1,
    labels=None,
    own_group=False,
    gathers=False,
    most_bytes=None,
    sizes=None,
    last_bytes=None,
    held_bytes=None,
    watch=False,
    excluded=None,
    **options,
):
    """Loss and gradients of this rank, in each of several runs. gathers: documents, instead of passing them
    round a ring. most_bytes: what they may take for that. sizes: arguments of small_blocks. last_bytes: of
    two ranks, how large the other's documents may be to stay for the backward. held_bytes: what panels take
    that are listed by the sums of all shards. watch: returns what watched() sees of forward and backward
    instead. excluded: what each rank leaves out."""
    group = dist.new_group(list(range(world))) if own_group else dist.group.WORLD
    found = []
    for _ in range(runs):
        symmetric = options.get("symmetric", False)
        Q, D = shards(world, kind, symmetric=symmetric)[rank]
        mine = None if labels is None else labels[rank]
        options |= {} if excluded is None else {"exclude": excluded[rank]}
        counting = mock.patch.object(whole, "gathered", wraps=whole.gathered)
        given = {"kept": 1 << 30 if gathers else 0} | (sizes or {})
        with contextlib.ExitStack() as stack:
            stack.enter_context(small_blocks(**given))
            gathered = stack.enter_context(counting)
            if most_bytes is not None or not gathers:
                stack.enter_context(mock.patch.object(whole, "_MOST_BYTES", most_bytes or 0))
            if last_bytes is not None:
                stack.enter_context(mock.patch.object(call, "_LAST_BYTES", last_bytes))
            if held_bytes is not None:
                stack.enter_context(mock.patch.object(cross_entropy, "_HELD_BYTES", held_bytes))
            seen = [watched() if watch else contextlib.nullcontext() for _ in range(2)]
            with seen[0] as in_forward:
                loss, leaves = loss_of(Q, D, group=group, labels=mine, **options)
            assert gathered.called == gathers
            with seen[1] as in_backward:
                found.append(arrays(loss, contrastive.gradients(loss, leaves)[1]))
    if watch:
        return sorted(in_forward), sorted(in_backward)
    return found


@contextlib.contextmanager
def watched():
    """The names of the operators that are called meanwhile, and of Tensor.nonzero, for which a host waits."""
    names, nonzero = set(), torch.Tensor.nonzero

    class Operators:
        def __getattr__(self, name):
            names.add(name)
            return getattr(torch.ops.late_interaction, name)

    def recorded(tensor):
        names.add("nonzero")
        return nonzero(tensor)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "nonzero", recorded))
        for module in (kernels, backward, forward):
            stack.enter_context(mock.patch.object(module, "_ops", Operators()))
        yield names


def losses(rank, world, of, kind="padded", runs=1, labels=None, **options):
    """Loss and gradients of a loss of li.losses on this rank. hard: with hard negatives."""
    found = []
    for _ in range(runs):
        Q, D = shards(world, kind)[rank]
        leaves, H = [x.values.requires_grad_() for x in (Q, D)], None
        if options.get("hard"):
            H = negatives_of(rank, len(Q)).requires_grad_()
            leaves.append(H)
        given = {key: x for key, x in options.items() if key != "hard"}
        mine = None if labels is None else labels[rank]
        with small_blocks():
            loss = getattr(li.losses, of)(
                Q, D, mine, hard_negatives=H, temperature=T, group=dist.group.WORLD, **given
            )
            found.append(arrays(loss, contrastive.gradients(loss, leaves)[1]))
    return found


def negatives_of(rank, queries):
    """Hard negatives of a rank's queries, two each."""
    seeded = torch.Generator().manual_seed(rank)
    return torch.randn(queries, 2, 3, 8, dtype=torch.float64, generator=seeded)


def no_queries(rank, world, packed):
    """A rank that has documents alone, and hard negatives of no query."""
    Q, D = (x.values for x in shards(world, "padded")[rank])
    Q = Q[:0] if rank == 0 else Q
    leaves = [x.detach().clone().requires_grad_() for x in (Q, D, negatives_of(rank, len(Q)))]
    q, d, h = leaves[0], leaves[1], own(leaves[2])
    if packed:
        q, d, h = li.Tokens(q).pack(), li.Tokens(d).pack(), h.pack()
    loss = li.losses.contrastive(
        q, d, torch.arange(len(Q)), hard_negatives=h, temperature=T, group=dist.group.WORLD
    )
    loss.backward()
    return loss.item(), [x.grad.numpy() for x in leaves]


def no_tokens(rank, world, loss):
    """Queries and documents have one token each, but those queries of the second rank, which have none."""
    Q, D = (x.values.detach() for x in shards(world, "padded")[rank])
    Q, D = Q[:, : 1 - rank].requires_grad_(), D[:, :1].requires_grad_()
    found = getattr(li.losses, loss)(Q, D, temperature=T, group=dist.group.WORLD)
    found.backward()
    return found.item(), [x.grad.numpy() for x in (Q, D)]


def one_without_gradient(rank, world):
    Q, D = (x.values for x in shards(world, "padded")[rank])
    if rank == 0:
        D.requires_grad_()
    with mock.patch.object(whole, "gathered", wraps=whole.gathered) as gathered:
        li.losses.contrastive(Q.requires_grad_(), D, temperature=T, group=dist.group.WORLD).backward()
        assert not gathered.called
    assert (D.grad is not None) == (rank == 0)


def one_refuses(rank, world):
    Q, D = shards(world, "padded")[rank]
    return loss_of(Q, D if rank != 1 else D.to(torch.float32), group=dist.group.WORLD)[0].item()


def other_dims(rank, world):
    """The last rank's embeddings have one dim fewer."""
    Q, D = (li.Tokens(x.values[..., : 8 - (rank == world - 1)]) for x in shards(world, "padded")[rank])
    return loss_of(Q, D, group=dist.group.WORLD)[0].item()


def one_ends(rank, world, when):
    """A rank ends before its forward, or between forward and backward, of its second step: the first one
    connects the ranks and loads the kernels, for which NCCL and CUDA would wait without a limit."""
    Q, D = shards(world, "padded")[rank]
    with small_blocks():
        loss, leaves = loss_of(Q, D, group=dist.group.WORLD)
        torch.autograd.grad(loss, leaves)
        if rank == world - 1 and when == "forward":
            os._exit(1)
        loss, leaves = loss_of(Q, D, group=dist.group.WORLD)
        if rank == world - 1:
            dist.barrier()
            os._exit(1)
        dist.barrier()
        torch.autograd.grad(loss, leaves)


def accumulated(rank, world):
    """Two losses, then both backwards in turn: the ring serves each."""
    Q, D = shards(world, "padded")[rank]
    with small_blocks():
        first, leaves = loss_of(Q, D, group=dist.group.WORLD)
        second = li.losses.contrastive(Q, D, temperature=T, group=dist.group.WORLD)
        (first + second).backward()
    return [(first.detach().numpy(), [x.grad.numpy() for x in leaves[:2]])]


def data_parallel(rank, world):
    """The gradients that DistributedDataParallel leaves in an encoder."""
    torch.manual_seed(1)
    encoder = torch.nn.Linear(8, 8, bias=False).double()
    model = torch.nn.parallel.DistributedDataParallel(encoder)
    Q, D = (x.values for x in shards(world, "padded")[rank])
    tokens = model(torch.cat((Q.flatten(0, 1), D.flatten(0, 1))))
    split = Q.shape[0] * Q.shape[1]
    q, d = tokens[:split].view(Q.shape), tokens[split:].view(D.shape)
    with small_blocks():
        loss = li.losses.contrastive(q, d, temperature=T, group=dist.group.WORLD, scale_by_world=True)
        loss.backward()
    return [(loss.detach().numpy(), [encoder.weight.grad.numpy()])]
