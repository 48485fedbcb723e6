"""Steps of contrastive_loss over the processes of torchrun, each with its share of a batch.

    torchrun --nproc-per-node 2 -m bench weak-scaling --out bench/results/weak-scaling-<device>.txt

A process of `group` has batch / processes queries and as many documents, and scores its queries with all
documents. `share` is the same number of products on process 0 without a group: so many queries with the whole
batch's documents. `of share` is share / group: what is left of it is the exchange. `alone` is the whole batch
on process 0, `of ideal` alone / (processes * group). `gathered` is what trainers do: all documents are
gathered padded, `maxsim` scores them, and `cross_entropy` takes the scores. Medians of rounds that begin at a
barrier, each of several steps one after another; MiB are of process 0 at its peak, beside inputs and
gradients. `off` is the largest difference of a loss and process 0's gradients from those alone, over the
largest value, of the group and, where there is a second number, gathered.

Documents are drawn as those of the suite `contrastive`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import late_interaction as li
from bench.harness.batches import TEMPERATURE, Batch, Loss, draw_batch, step
from bench.harness.parity import worst_error
from bench.harness.processes import Here, joined, seconds
from bench.harness.run_header import keep_text, text_head
from bench.harness.shape import BatchShape
from bench.harness.text import align

ROUNDS = 3
LEAST_S = 0.06  # of the steps of a round, at most STEPS of them
STEPS = 12
MEMORY_SHARE = 0.6  # of the device, that `gathered` may keep


class _Gathered(torch.autograd.Function):
    """All processes' documents, one after another. Their gradients are added up, and each goes home."""

    @staticmethod
    def forward(ctx: Any, D: Tensor) -> Tensor:
        ctx.count = len(D)
        out = D.new_empty(dist.get_world_size() * len(D), *D.shape[1:])
        dist.all_gather_into_tensor(out, D.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if not grad.is_cuda:  # gloo has no reduce_scatter_tensor
            dist.all_reduce(grad)
            return grad[dist.get_rank() * ctx.count :][: ctx.count]
        out = grad.new_empty(ctx.count, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out


def gathered_loss(here: Here) -> Loss:
    """The mean over all processes' queries, so that gradients are those of contrastive_loss."""
    gather: Any = _Gathered.apply

    def loss(batch: Batch) -> Tensor:
        labels = torch.arange(len(batch.Q), device=batch.Q.device) + here.rank * len(batch.D)
        own = F.cross_entropy(li.maxsim(batch.Q, gather(batch.D)).float() / TEMPERATURE, labels) / here.world
        total = own.detach().clone()
        dist.all_reduce(total)
        return own + (total - own).detach()

    return loss


@dataclass
class Measured:
    ms: float
    mib: float  # of process 0


def measured(here: Here, loss: Loss, batch: Batch, rounds: int, together: bool) -> Measured:
    """A step's time, and its memory beside inputs and gradients."""
    once = seconds(here, lambda: step(loss, batch), 1, together)
    steps = max(1, min(STEPS, int(LEAST_S / once)))

    def call() -> None:
        for _ in range(steps):
            step(loss, batch)

    ms = 1e3 * seconds(here, call, rounds, together) / steps
    mib = 0.0
    if here.device.type == "cuda" and (together or here.rank == 0):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(loss, batch)
        here.sync()
        mib = (torch.cuda.max_memory_allocated() - before - batch.Q.nbytes - batch.D.nbytes) / 2**20
    here.wait()
    return Measured(ms, max(mib, 0.0))


def fits(here: Here, shape: BatchShape) -> bool:
    """Whether the winners of a process' scores, and cross entropy's copies of them, stay."""
    if here.device.type != "cuda":
        return True
    kept = shape.Nq // here.world * shape.Nq * (2 * shape.Lq + 12)
    return kept <= MEMORY_SHARE * torch.cuda.get_device_properties(here.device).total_memory


def differences(here: Here, losses: list[Loss], own: Batch, whole: Batch, tail: float) -> str:
    """How far losses and process 0's gradients are from those of the whole batch alone."""
    found = [step(loss, own) for loss in losses]
    if here.rank:
        return ""
    value, of_Q, of_D = step(
        lambda b: li.contrastive_loss(b.Q, b.D, temperature=TEMPERATURE, tail=tail), whole
    )
    wanted = [x.double() for x in (value, of_Q[: len(own.Q)], of_D[: len(own.D)])]
    return " / ".join(f"{worst_error(each, wanted):.1g}" for each in found)


def measure(here: Here, shape: BatchShape, tail: float, rounds: int) -> list[str]:
    torch.manual_seed(0)  # every process draws the whole batch
    whole = draw_batch(shape, here.device, torch.bfloat16 if here.device.type == "cuda" else torch.float32)
    count = shape.Nq // here.world
    mine = slice(here.rank * count, (here.rank + 1) * count)
    own, share = Batch(whole.Q[mine], whole.D[mine]), Batch(whole.Q[:count], whole.D)

    def loss(group: Any) -> Loss:
        return lambda b: li.contrastive_loss(b.Q, b.D, temperature=TEMPERATURE, tail=tail, group=group)

    def of_share(b: Batch) -> Tensor:
        labels = torch.arange(len(b.Q), device=b.Q.device)
        return li.contrastive_loss(b.Q, b.D, temperature=TEMPERATURE, tail=tail, labels=labels)

    group = measured(here, loss(dist.group.WORLD), own, rounds, together=True)
    part = measured(here, of_share, share, rounds, together=False)
    alone = measured(here, loss(None), whole, rounds, together=False)
    losses = [loss(dist.group.WORLD)]
    other = None
    if not tail and fits(here, shape):
        losses.append(gathered_loss(here))
        other = measured(here, losses[1], own, rounds, together=True)
    off = differences(here, losses, own, whole, tail)
    here.wait()
    times = [f"{x.ms:.2f}" for x in (part, group)]
    ideal = [f"{alone.ms:.2f}", f"{100 * alone.ms / (here.world * group.ms):.1f}%"]
    memory = [f"{group.mib:.0f}", f"{alone.mib:.0f}"]
    gathered = [f"{other.ms:.2f}", f"{other.mib:.0f}"] if other else ["-", "-"]
    head = [f"{shape.Nq:,}", f"{tail:.2g}"]
    return [*head, *times, f"{100 * part.ms / group.ms:.1f}%", *ideal, *memory, *gathered, off]


def _numbers(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--batches", type=_numbers, default="2048,4096,8192,16384", help="of all processes")
    p.add_argument("--tails", type=_numbers, default=f"0,{2**-10}")
    for name, default in (("Lq", 32), ("Ld", 180), ("dims", 128), ("rounds", ROUNDS)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--out", type=Path, help="a file that the table is appended to")


def run(args: argparse.Namespace) -> int:
    here = joined(args.device)
    try:
        rows = []
        for batch in args.batches:
            count = int(batch) // here.world * here.world
            shape = BatchShape(f"{count}", count, count, args.Lq, args.Ld, args.dims)
            for tail in args.tails:
                rows.append(measure(here, shape, tail, args.rounds))
                if here.rank == 0:
                    print(*rows[-1], flush=True)
        if here.rank == 0:
            head = ["batch", "tail", "share ms", "group ms", "of share", "alone ms", "of ideal", "group MiB"]
            head += ["alone MiB", "gathered ms", "gathered MiB", "off"]
            sizes = f"queries of {args.Lq} tokens, documents of {args.Ld}, {args.dims} dims"
            title = f"{sizes}, temperature {TEMPERATURE}, {here.world} processes"
            program = f"torchrun --nproc-per-node {here.world}"
            keep_text(
                f"{title}\n{align(head, rows)}", args.out, text_head(here.device, args.arguments, program)
            )
    finally:
        dist.destroy_process_group()
    return 0
