"""Steps of losses.contrastive of single vectors by the processes of torchrun, beside cuBLAS' own rate.

    torchrun --nproc-per-node 2 -m bench single-vectors --out bench/results/single-vectors-<device>.txt

Each process has batch / processes queries and as many documents: unit vectors, in bf16 on a GPU. A step is
forward and both gradients, with `group` of all processes. `products` is the time of four passes of products
(scores in the forward, scores again and two gradients in the backward: `8 * d * batch^2 / processes`
operations) at the rate that cuBLAS sustains, which is measured first: products of 8192^3 for --sustain
seconds on all processes at once, the slowest one's rate. MiB are a process' peak beside inputs and gradients.
`off`: the largest differences of the losses of some queries, and of the gradients of these and of some
documents, from float64, over the largest value.

The second table has the pieces of a step on one process: a block's weights from its product, and the products
of these weights with documents and with queries.
"""

import math
import time

import torch
import torch.distributed as dist

import late_interaction as li
from bench.harness.processes import joined, keep_table, seconds
from bench.harness.run_header import add_table_arguments, listed, table
from late_interaction._contrastive.kernels import add_product, product
from late_interaction._contrastive.single_shards import _SIDE
from late_interaction._doctor.text import number
from late_interaction._doctor.timing import peak_mib

TEMPERATURE = 0.05
SAMPLE = 64  # queries, and documents, that are compared with float64
CHUNK = 1 << 17  # rows that are drawn, or compared, at a time


def draw(here, count, d):
    """This process's queries and documents ``[count, 1, d]``: document i resembles query i."""
    generator = torch.Generator(here.device).manual_seed(here.rank)
    dtype = torch.bfloat16 if here.device.type == "cuda" else torch.float32
    Q, D = (torch.empty(count, 1, d, dtype=dtype, device=here.device) for _ in range(2))
    for q, x in zip(Q.split(CHUNK), D.split(CHUNK), strict=True):
        own = torch.randn(q.shape, generator=generator, device=here.device)
        other = torch.randn(q.shape, generator=generator, device=here.device)
        q.copy_(torch.nn.functional.normalize(own, dim=-1))
        x.copy_(torch.nn.functional.normalize(own + 2 * other, dim=-1))
    return Q.requires_grad_(), D.requires_grad_()


def sustained_tflops(here, limit, n=8192):
    """The rate of the slowest process's products, over all of these seconds."""
    n = n if here.device.type == "cuda" else 512
    dtype = torch.bfloat16 if here.device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=here.device).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    torch.mm(a, b, out=c)
    here.wait()
    start, count, took = time.perf_counter(), 0, 0.0
    while took < limit or not count:
        for _ in range(100 if here.device.type == "cuda" else 1):
            torch.mm(a, b, out=c)
        count += 100 if here.device.type == "cuda" else 1
        here.sync()
        took = time.perf_counter() - start
    return 2 * n**3 / here.slowest(took / count) * 1e-12


def step(Q, D, reduction="mean"):
    loss = li.losses.contrastive(Q, D, temperature=TEMPERATURE, group=dist.group.WORLD, reduction=reduction)
    return (loss.detach(), *torch.autograd.grad(loss, (Q, D)))


# ---- differences from float64 ----


def off(here, Q, D):
    """Compare losses and gradients of some rows with what float64 makes of all."""
    found = step(Q, D)
    with torch.no_grad():
        losses = li.losses.contrastive(
            Q, D, temperature=TEMPERATURE, group=dist.group.WORLD, reduction="none"
        ).double()
        q, d = Q.detach().squeeze(1), D.detach().squeeze(1)
        batch = here.world * len(q)
        wanted = _of_queries(here, q[:SAMPLE].double(), d, batch)
        of_d = _of_documents(here, q, d, losses, batch)
        pairs = [(losses[:SAMPLE], wanted[0]), (found[1].squeeze(1)[:SAMPLE], wanted[1])]
        pairs += [(found[2].squeeze(1)[:SAMPLE], of_d)]
        errors = [float((got.double() - want).abs().max() / want.abs().max()) for got, want in pairs]
    return " / ".join(f"{here.slowest(x):.1g}" for x in errors)


def _each(here, own):
    """One process's rows after the other's, in chunks."""
    found = []
    for rank in range(here.world):
        for chunk in own.split(CHUNK):
            x = chunk.contiguous() if rank == here.rank else torch.empty_like(chunk)
            dist.broadcast(x, rank)
            found.append(x)
    return found


def _of_queries(here, q, d, batch):
    """The losses of this process's first queries, and their gradients."""
    chunks = _each(here, d)
    scores = torch.cat([q @ x.double().t() for x in chunks], 1) / TEMPERATURE
    rows = torch.arange(len(q), device=q.device)
    label = here.rank * len(d) + rows
    losses = scores.logsumexp(1) - scores[rows, label]
    weights = scores.softmax(1)
    weights[rows, label] -= 1
    grad, begin = torch.zeros_like(q), 0
    for x in chunks:
        grad += weights[:, begin : begin + len(x)] @ x.double()
        begin += len(x)
    return losses, grad / (TEMPERATURE * batch)


def _of_documents(here, q, d, losses, batch):
    """The gradients of this process's first documents, by the losses of all queries."""
    found = torch.zeros(0)
    for rank in range(here.world):
        some = d[:SAMPLE].contiguous() if rank == here.rank else torch.empty_like(d[:SAMPLE])
        dist.broadcast(some, rank)
        some, grad = some.double(), torch.zeros_like(some, dtype=torch.float64)
        for begin in range(0, len(q), CHUNK):
            rows = slice(begin, begin + CHUNK)
            x = q[rows].double()
            labels = (x * d[rows].double()).sum(1) / TEMPERATURE
            weights = (x @ some.t() / TEMPERATURE - (losses[rows] + labels).unsqueeze(1)).exp_()
            if rank == here.rank and begin == 0:
                weights.diagonal().sub_(1)
            grad += weights.t() @ x
        dist.all_reduce(grad)
        found = grad if rank == here.rank else found
    return found / (TEMPERATURE * batch)


# ---- the pieces of a step ----


def pieces(here, d, least=0.3):
    """TFLOP/s of what a block goes through, on process 0 alone."""
    if here.rank or here.device.type != "cuda":
        return ""
    side = _SIDE["cuda"]
    q, x = (torch.nn.functional.normalize(torch.randn(side, d, device=here.device), dim=1).bfloat16()
            for _ in range(2))  # fmt: skip
    weights = torch.empty(side, side, dtype=torch.bfloat16, device=here.device)
    sums, factor = torch.zeros(side, d, device=here.device), torch.ones(side, device=here.device)
    inverse = torch.tensor(1 / TEMPERATURE, device=here.device)
    ops = torch.ops.late_interaction
    calls = {
        "weights from the product": lambda: ops.softmax_product_rows_(
            q, x, inverse, None, side, factor, weights, None
        ),
        "weights @ documents": lambda: product(weights, x),
        "weights.T @ queries, added": lambda: add_product(sums, weights.t(), q),
        "queries @ documents.T, float32": lambda: product(q[:4096], x.t()),
    }
    rows = []
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < least:
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            count += 20
        flops = 2 * side * side * d * (0.25 if name.endswith("float32") else 1.0)
        tflops = flops * count / (time.perf_counter() - start) * 1e-12
        rows.append({"piece of a step": name, "TFLOP/s": f"{tflops:.0f}"})
    return table(rows)


# ---- the command ----


def measure(here, batch, d, tflops, rounds):
    count = batch // here.world
    Q, D = draw(here, count, d)
    row = {"batch": f"{count * here.world:,}", "processes": str(here.world)}
    try:
        took = seconds(here, lambda: step(Q, D), rounds)
        products = 8 * d * (count * here.world) ** 2 / here.world / (tflops * 1e12)
        row |= {"step ms": 1e3 * took, "products ms": 1e3 * products, "step / products": took / products}
        peak = peak_mib(lambda: step(Q, D), here.device)  # with the gradients
        row["MiB"] = math.nan if peak is None else here.slowest(peak - (Q.nbytes + D.nbytes) / 2**20)
        row["off: loss / dQ / dD"] = off(here, Q, D)
    except torch.OutOfMemoryError as error:  # of one size, which must not end the others
        row["MiB"] = str(error)[:60]
    return row


def add_arguments(p):
    p.add_argument("--batches", type=listed(int), default="65536,262144,1048576", help="of all processes")
    p.add_argument("--sustain", type=float, default=30.0, help="seconds of cuBLAS' products")
    add_table_arguments(p, dims=512, rounds=3)


def run(args):
    with joined(args.device) as here:
        tflops = sustained_tflops(here, args.sustain)
        rows = [measure(here, batch, args.dims, tflops, args.rounds) for batch in args.batches]
        title = f"single vectors, {args.dims} dims, temperature {TEMPERATURE}; cuBLAS sustains "
        title += f"{number(tflops)} TFLOP/s over {args.sustain:g} s"
        more = pieces(here, args.dims)
        here.wait()
        keep_table(here, args, title, rows, more)
    return 0
