"""Steps of losses.contrastive over the processes of torchrun, each with its share of a batch.

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

import torch
import torch.distributed as dist
import torch.nn.functional as F

import late_interaction as li
from bench.harness.batches import TEMPERATURE, Batch, draw_batch, step
from bench.harness.parity import worst_error
from bench.harness.processes import joined, keep_table, seconds
from bench.harness.run_header import add_table_arguments, listed
from bench.harness.shape import BatchShape
from late_interaction._doctor.timing import peak_mib

ROUNDS = 3
LEAST_S = 0.06  # of the steps of a round, at most STEPS of them
STEPS = 12
MEMORY_SHARE = 0.6  # of the device, that `gathered` may keep


class _Gathered(torch.autograd.Function):
    """All processes' documents, one after another. Their gradients are added up, and each goes home."""

    @staticmethod
    def forward(ctx, D):
        ctx.count = len(D)
        out = D.new_empty(dist.get_world_size() * len(D), *D.shape[1:])
        dist.all_gather_into_tensor(out, D.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        if not grad.is_cuda:  # gloo has no reduce_scatter_tensor
            dist.all_reduce(grad)
            return grad[dist.get_rank() * ctx.count :][: ctx.count]
        out = grad.new_empty(ctx.count, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out


def gathered_loss(here):
    """The mean over all processes' queries, so that gradients are those of losses.contrastive."""
    gather = _Gathered.apply

    def loss(batch):
        labels = torch.arange(len(batch.Q), device=batch.Q.device) + here.rank * len(batch.D)
        own = F.cross_entropy(li.maxsim(batch.Q, gather(batch.D)).float() / TEMPERATURE, labels) / here.world
        total = own.detach().clone()
        dist.all_reduce(total)
        return own + (total - own).detach()

    return loss


def measured(here, loss, batch, rounds, together):
    """A step's milliseconds, and process 0's MiB beside inputs and gradients."""
    once = seconds(here, lambda: step(loss, batch), 1, together)
    steps = max(1, min(STEPS, int(LEAST_S / once)))

    def call():
        for _ in range(steps):
            step(loss, batch)

    ms = 1e3 * seconds(here, call, rounds, together) / steps
    peak = peak_mib(lambda: step(loss, batch), here.device) if together or here.rank == 0 else None
    here.wait()
    return ms, 0.0 if peak is None else max(peak - (batch.Q.nbytes + batch.D.nbytes) / 2**20, 0.0)


def fits(here, shape):
    """Whether the winners of a process' scores, and cross entropy's copies of them, stay."""
    if here.device.type != "cuda":
        return True
    kept = shape.Nq // here.world * shape.Nq * (2 * shape.Lq + 12)
    return kept <= MEMORY_SHARE * torch.cuda.get_device_properties(here.device).total_memory


def differences(here, losses, own, whole, tail):
    """How far losses and process 0's gradients are from those of the whole batch alone."""
    found = [step(loss, own) for loss in losses]
    if here.rank:
        return ""
    value, of_Q, of_D = step(
        lambda b: li.losses.contrastive(b.Q, b.D, temperature=TEMPERATURE, tail=tail), whole
    )
    wanted = [x.double() for x in (value, of_Q[: len(own.Q)], of_D[: len(own.D)])]
    return " / ".join(f"{worst_error(each, wanted):.1g}" for each in found)


def measure(here, shape, tail, rounds):
    torch.manual_seed(0)  # every process draws the whole batch
    whole = draw_batch(shape, here.device, torch.bfloat16 if here.device.type == "cuda" else torch.float32)
    count = shape.Nq // here.world
    mine = slice(here.rank * count, (here.rank + 1) * count)
    own, share = Batch(whole.Q[mine], whole.D[mine]), Batch(whole.Q[:count], whole.D)

    def loss(group):
        return lambda b: li.losses.contrastive(b.Q, b.D, temperature=TEMPERATURE, tail=tail, group=group)

    def of_share(b):
        labels = torch.arange(len(b.Q), device=b.Q.device)
        return li.losses.contrastive(b.Q, b.D, temperature=TEMPERATURE, tail=tail, labels=labels)

    ms, mib = measured(here, loss(dist.group.WORLD), own, rounds, together=True)
    part, _ = measured(here, of_share, share, rounds, together=False)
    alone, alone_mib = measured(here, loss(None), whole, rounds, together=False)
    losses, gathered = [loss(dist.group.WORLD)], (None, None)
    if not tail and fits(here, shape):
        losses.append(gathered_loss(here))
        gathered = measured(here, losses[1], own, rounds, together=True)
    off = differences(here, losses, own, whole, tail)
    here.wait()
    return {
        "batch": f"{shape.Nq:,}", "tail": f"{tail:.2g}", "share ms": part, "group ms": ms,
        "of share": f"{100 * part / ms:.1f}%", "alone ms": alone,
        "of ideal": f"{100 * alone / (here.world * ms):.1f}%", "group MiB": f"{mib:.0f}",
        "alone MiB": f"{alone_mib:.0f}", "gathered ms": gathered[0], "gathered MiB": gathered[1], "off": off,
    }  # fmt: skip


def add_arguments(p):
    p.add_argument("--batches", type=listed(int), default="2048,4096,8192,16384", help="of all processes")
    p.add_argument("--tails", type=listed(float), default=f"0,{2**-10}")
    add_table_arguments(p, Lq=32, Ld=180, dims=128, rounds=ROUNDS)


def run(args):
    with joined(args.device) as here:
        rows = []
        for batch in args.batches:
            count = batch // here.world * here.world
            shape = BatchShape(f"{count}", count, count, args.Lq, args.Ld, args.dims)
            for tail in args.tails:
                rows.append(measure(here, shape, tail, args.rounds))
        sizes = f"queries of {args.Lq} tokens, documents of {args.Ld}, {args.dims} dims"
        keep_table(here, args, f"{sizes}, temperature {TEMPERATURE}", rows)
    return 0
