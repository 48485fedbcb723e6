"""What the processes of tests/training/test_contrastive_frameworks.py and ..._faults.py run."""

import contextlib
import functools
import os
import re
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import late_interaction as li
from late_interaction._contrastive.ring import Ring
from tests.support import ring_worker
from tests.support.contrastive import small_blocks

T, PER_RANK, PARTS = 0.2, 6, 2
SLEEP = 300  # seconds: longer than any timeout
VARIANTS = ("plain", "accumulated", "checkpointed", "cached")


class Encoder(nn.Module):
    """Tokens of queries and documents -> embeddings, in one call, as DistributedDataParallel wants."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 8))
        self.checkpointed = checkpointed

    def forward(self, part):
        if self.checkpointed:
            return tuple(checkpoint(self.layers, x, use_reentrant=False) for x in part)
        return tuple(self.layers(x) for x in part)


def new_encoder(variant, device="cpu"):
    torch.manual_seed(3)
    return Encoder(variant == "checkpointed").double().to(device)


def tokens(rank, device="cpu"):
    """The parts of a rank: queries and documents, of which the first ones resemble each other."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(PARTS):
        Q, D = (torch.randn(PER_RANK // PARTS, L, 7, generator=generator).double() for L in (4, 6))
        D[:, :4] += Q
        found.append((Q.to(device), D.to(device)))
    return found


def step(model, parts, variant, loss):
    """The loss of one step, whose gradients go to the model's parameters."""
    if variant == "cached":
        return li.cached_contrastive_step(model, parts, loss)
    if variant == "accumulated":
        total = 0.0
        for i, part in enumerate(parts):
            with waiting(model, i + 1 < len(parts)):
                value = loss(*model(part)) / len(parts)
                value.backward()
            total += value.detach()
        return total
    value = loss(*model(tuple(torch.cat(x) for x in zip(*parts, strict=True))))
    value.backward()
    return value.detach()


def waiting(model, more):
    """Keeps a framework from sending gradients while more are to come."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(not more)
    elif more and hasattr(model, "no_sync"):
        return model.no_sync()
    return contextlib.nullcontext()


def sharded(encoder, world, device="cpu"):
    mesh = init_device_mesh(device, (world,))
    fully_shard(encoder.layers[0], mesh=mesh)
    return fully_shard(encoder, mesh=mesh)


def frameworks(rank, world, framework, device="cpu"):
    """(loss, gradients of all parameters) of each variant under a framework, which averages gradients."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    found = {}
    for variant in VARIANTS:
        encoder = new_encoder(variant, device)
        model = DistributedDataParallel(encoder) if framework == "DDP" else sharded(encoder, world, device)

        def loss(Q, D):
            return li.losses.contrastive(
                Q, D, temperature=T, normalize=True, group=dist.group.WORLD, scale_by_world=True
            )

        with small_blocks():
            value = step(model, tokens(rank, device), variant, loss)
        grads = [p.grad for p in encoder.parameters()]
        grads = [(g.full_tensor() if framework == "FSDP2" else g).cpu().numpy() for g in grads]
        found[variant] = value.cpu().numpy() / world, grads
    return found


class WithLoss(nn.Module):
    """An encoder that holds its loss, and a layer that only parts of an odd number of queries run."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(3)
        self.encoder, self.sometimes = Encoder(), nn.Linear(8, 8)
        self.loss = li.losses.Sigmoid(
            temperature=T, bias=-1.0, learnable=True, normalize=True, group=group,
            scale_by_world=group is not None,
        )  # fmt: skip
        self.double()

    def forward(self, part):
        Q, D = self.encoder(part)
        return (self.sometimes(Q), D) if len(Q) % 2 else (Q, D)

    def whole(self, parts):
        """The loss of all parts in one forward."""
        outputs = [self(part) for part in parts]
        return self.loss(*(torch.cat(x) for x in zip(*outputs, strict=True)))


def split(rank, sizes):
    Q, D = (torch.cat(x) for x in zip(*tokens(rank), strict=True))
    return list(zip(Q.split(sizes), D.split(sizes), strict=True))


def take_steps(model, step, count=3):
    """The weights after each of some steps."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(count):
        optimizer.zero_grad()
        step()
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy())
    return found


def cached_steps(rank, world, way, sizes, **options):
    """The weights after each of three steps, and how often gradients were averaged."""
    model = WithLoss(dist.group.WORLD)
    ddp = DistributedDataParallel(model, **options)
    sent = []

    def average(_, bucket):
        sent.append(bucket.index())
        work = dist.all_reduce(bucket.buffer() / world, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, average)
    encoder = {
        "itself": ddp,
        "lambda": lambda part: ddp(part),
        "bound method": ddp.forward,
        "partial": functools.partial(DistributedDataParallel.__call__, ddp),
    }[way]
    parts = split(rank, sizes[rank])

    def step():
        li.cached_contrastive_step(encoder, parts, lambda Q, D: model.loss(Q, D))

    return take_steps(model, step), len(sent)


def accumulated_cached_steps(rank, world):
    """How often gradients are averaged in two cached steps of which the first is not to send any."""
    model = WithLoss(dist.group.WORLD)
    ddp, sent = DistributedDataParallel(model), []
    ddp.register_comm_hook(None, lambda _, bucket: sent.append(1) or finished(bucket.buffer()))
    parts = split(rank, [3, 2, 1])
    for wait in (ddp.no_sync(), contextlib.nullcontext()):
        with wait:
            li.cached_contrastive_step(lambda part: ddp(part), parts, model.loss)
        sent.append("step")
    return sent


def finished(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def static_graph(rank, world):
    ddp = DistributedDataParallel(WithLoss(dist.group.WORLD), static_graph=True)
    li.cached_contrastive_step(lambda part: ddp(part), split(rank, [3, 3]), ddp.module.loss)


LOSSES = {
    "contrastive": lambda **options: li.losses.Contrastive(temperature=T, learnable=True, **options),
    "pairwise": lambda **options: li.losses.Pairwise(temperature=T, learnable=True, **options),
    "sigmoid": lambda **options: li.losses.Sigmoid(temperature=T, bias=-1.0, learnable=True, **options),
    "recall": lambda **options: li.losses.Recall(temperature=T, **options),
}


class Trained(nn.Module):
    """A model that returns its loss."""

    def __init__(self, kind, **options):
        super().__init__()
        self.encoder = new_encoder("plain")
        self.loss = LOSSES[kind](normalize=True, **options).double()

    def forward(self, part):
        return self.loss(*self.encoder(part))


def sharded_losses(rank, world, kind):
    """Loss and gradients with the loss in a sharded model: inside it, sharded alone, and in cached steps."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    whole = tuple(torch.cat(x) for x in zip(*tokens(rank), strict=True))
    for way in ("inside", "alone", "cached"):
        model = Trained(kind, group=dist.group.WORLD, scale_by_world=True)
        if way == "inside":
            value = fully_shard(model, mesh=mesh)(whole)
            value.backward()
        else:
            fully_shard(model.loss, mesh=mesh), fully_shard(model.encoder, mesh=mesh)
        if way == "alone":
            value = model(whole)
            value.backward()
        if way == "cached":
            value = li.cached_contrastive_step(model.encoder, tokens(rank), model.loss)
        grads = [p.grad.full_tensor().numpy() for p in model.parameters()]
        found.append((value.detach().numpy() / world, grads))
    return found


# ---- faults ----


def stalls(rank, world, when):
    """The last rank is alive and does not answer: at the sizes, the documents, the gradients that a ring
    passes on, or those that are sent home at once. The others return what they raised, and when."""
    Q, D = ring_worker.shards(world, "padded")[rank]
    seconds = time.perf_counter
    last = rank == world - 1
    with small_blocks(kept=1 << 30 if when == "gathered gradients" else 0):
        if last and when == "sizes":
            time.sleep(SLEEP)
        if last and when == "documents":
            with mock.patch.object(Ring, "exchange", lambda *_: time.sleep(SLEEP)):
                ring_worker.loss_of(Q, D, group=dist.group.WORLD)
        begin = seconds()
        try:
            loss, leaves = ring_worker.loss_of(Q, D, group=dist.group.WORLD)
            dist.barrier()
            if last:
                time.sleep(SLEEP)
            begin = seconds()
            torch.autograd.grad(loss, leaves)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}", seconds() - begin
    return "nothing was raised", 0.0


def runs_out_of_memory(rank, world):
    """One rank has no memory in the backward; what it raises, and what the others do."""
    Q, D = ring_worker.shards(world, "padded")[rank]
    with small_blocks():
        loss, leaves = ring_worker.loss_of(Q, D, group=dist.group.WORLD)
        if rank == 1:
            failing = mock.Mock(side_effect=torch.OutOfMemoryError("no memory"))
            with mock.patch("late_interaction._contrastive.blockwise.add_gradients", failing):
                torch.autograd.grad(loss, leaves)
        torch.autograd.grad(loss, leaves)


def on_gpu(rank, world, function, **arguments):
    """A function of tests/ring_worker.py with this rank's tensors on its own GPU."""
    torch.cuda.set_device(rank)
    on_cpu = ring_worker.shards

    def shards(*given, **options):
        with torch.device("cpu"):
            found = on_cpu(*given, **options)
        return [tuple(x.to("cuda") for x in both) for both in found]

    with mock.patch.object(ring_worker, "shards", shards), torch.device("cuda"):
        return getattr(ring_worker, function)(rank, world, **arguments)


def blocking(rank, world, when):
    """A rank ends; the others wait for NCCL on the host, so that its error is raised there."""
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    return on_gpu(rank, world, "one_ends", when=when)


def page(rank, world):
    """Runs the examples of docs/guide/ddp.md in the group that there is, with data of each rank. The
    gradients that DistributedDataParallel leaves, the weights that FSDP2 does, and shapes of a DTensor's
    shards."""
    text = (Path(__file__).parents[2] / "docs/guide/ddp.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names, found = {}, {}
    torch.manual_seed(rank)
    for block in blocks[:-1]:  # the last one ends the group
        exec(re.sub(r"^(store|dist\.init_process_group).*\n", "", block, flags=re.MULTILINE), names)
        if "ddp(part).backward()" in block:
            found["DDP"] = [p.grad.numpy().copy() for p in names["ddp"].parameters()]
        elif "optimizer.step()" in block:
            found["FSDP2"] = [p.full_tensor().detach().numpy() for p in names["model"].parameters()]
        elif "D.to_local()" in block:
            found["DTensor"] = [tuple(names[x].grad.to_local().shape) for x in "QD"]
    return found
