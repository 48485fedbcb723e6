"""A search by several processes, each with a shard of the documents, beside one process that has all of them.

    python -m bench shards  # one process
    torchrun --nproc-per-node 2 -m bench shards --out bench/results/shards-nvidia-h100-80gb-hbm3.txt

`alone` is the time of process 0 with the whole corpus, `its shard` that of the slowest process with its own,
all at once and without an exchange, `together` that of the search of all by their group: medians of rounds in
which the three take turns, each from a barrier on. `of ideal` is alone / (processes * together). `bits` says
whether the search of all has the scores and documents of the one alone. A corpus in the host's memory is
pinned; a copy is that of its bytes without a search, by one process or by all at once.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.processes import joined, keep_table, seconds, seconds_in_turn
from bench.harness.run_header import add_table_arguments
from late_interaction.codecs import Fp8

FP8 = Fp8()
K = 100
ROUNDS = 11
# Documents that one seed draws.
BLOCK = 10_000


@dataclass
class Kind:
    """How a corpus is stored."""

    name: str
    documents: int
    is_fp8: bool = False
    on_host: bool = False


def drawn(first, stop, shape, device):
    """Unit documents first to stop, a block at a time with its place: the same whoever draws them."""
    for block in range(first // BLOCK, -(-stop // BLOCK)):
        generator = torch.Generator(device).manual_seed(block)
        x = torch.randn(BLOCK, *shape, generator=generator, device=device)
        begin = max(first - block * BLOCK, 0)
        yield block * BLOCK + begin - first, normalize(x[begin : stop - block * BLOCK], dim=-1)


def made(kind, first, stop, shape, device):
    at = torch.device("cpu") if kind.on_host else device
    options = {"device": at, "pin_memory": kind.on_host and device.type == "cuda"}
    dtype = torch.float8_e4m3fn if kind.is_fp8 else torch.bfloat16
    D = torch.empty(stop - first, *shape, dtype=dtype, **options)
    scales = torch.empty(stop - first, shape[0], **options)
    for place, x in drawn(first, stop, shape, device):
        rows = slice(place, place + len(x))
        if kind.is_fp8:
            codes = FP8.encode(x)
            D[rows], scales[rows] = codes.values, codes.scales
        else:
            D[rows] = x.to(dtype)
    return li.Codes(FP8, D, scales) if kind.is_fp8 else D


def copying(corpus, device):
    """Copies the corpus to the device by chunks of 256 MiB, into two buffers in turn."""
    size = max((256 << 20) // max(corpus[0].nbytes, 1), 1)
    targets = [torch.empty_like(corpus[:size], device=device) for _ in range(2)]

    def call():
        for i, source in enumerate(corpus.split(size)):
            targets[i % 2][: len(source)].copy_(source, non_blocking=True)

    return call


def rate(here, kind, corpus, rounds, together):
    """GB/s at which the host's memory is copied to the GPUs, without a search."""
    if not kind.on_host or isinstance(corpus, li.Codes):
        return ""
    took = seconds(here, copying(corpus, here.device) if len(corpus) else lambda: None, rounds, together)
    return f"{kind.documents * corpus.shape[1] * corpus.shape[2] * corpus.itemsize / took * 1e-9:.1f}"


def difference(found, wanted):
    if all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True)):
        return "same"
    far = (found.scores - wanted.scores).abs().max() / wanted.scores.abs().max()
    return f"off by {float(far):.1g}, {int((found.indices != wanted.indices).sum())} documents"


def measure(here, kind, Q, shape, rounds):
    whole = made(kind, 0, kind.documents if here.rank == 0 else 0, shape, here.device)
    first, stop = (kind.documents * i // here.world for i in (here.rank, here.rank + 1))
    own = made(kind, first, stop, shape, here.device)
    bus, buses = rate(here, kind, whole, rounds, together=False), rate(here, kind, own, rounds, together=True)
    calls = [
        (lambda: li.search(Q, whole, K), False),
        (lambda: li.search(Q, own, K), True),
        (lambda: li.search(Q, own, K, group=dist.group.WORLD), True),
    ]
    alone, share, together = seconds_in_turn(here, calls, rounds)
    found = li.search(Q, own, K, group=dist.group.WORLD)
    bits = difference(found, li.search(Q, whole, K)) if here.rank == 0 else ""
    return {
        "": kind.name, "documents": f"{kind.documents:,}", "alone ms": 1e3 * alone,
        "its shard ms": 1e3 * share, "together ms": 1e3 * together,
        "of ideal": f"{100 * alone / (here.world * together):.1f}%", "bits": bits, "one copy GB/s": bus,
        "all copies GB/s": buses,
    }  # fmt: skip


def exchange(here, Q, shape, rounds):
    """What the exchange alone takes: a search of so few documents that scoring them takes no time."""
    own = made(Kind("", 0), here.rank * 200, here.rank * 200 + 200, shape, here.device)
    calls = [(lambda g=g: li.search(Q, own, K, group=g), True) for g in (None, dist.group.WORLD)]
    times = seconds_in_turn(here, calls, 5 * rounds)
    return (
        f"200 documents a process: {1e6 * times[0]:.0f} us without an exchange, {1e6 * times[1]:.0f} us with"
    )


def add_arguments(p):
    p.add_argument("--host-documents", type=int, default=200_000, help="of the corpus in the host's memory")
    add_table_arguments(p, documents=1_000_000, queries=16, Lq=32, Ld=128, dims=128, rounds=ROUNDS)


def run(args):
    with joined(args.device) as here:
        torch.manual_seed(0)
        shape = args.Ld, args.dims
        Q = normalize(torch.randn(args.queries, args.Lq, args.dims), dim=-1).to(here.device, torch.bfloat16)
        kinds = [
            Kind("fp8 on the GPUs", args.documents, is_fp8=True),
            Kind("bfloat16 on the GPUs", args.documents),
            Kind("bfloat16 in pinned memory", args.host_documents, on_host=True),
        ]
        rows = []
        for kind in kinds:
            rows.append(measure(here, kind, Q, shape, args.rounds))
            if here.device.type == "cuda":
                torch.cuda.empty_cache()
        sizes = f"queries {list(Q.shape)}, documents of {list(shape)}, the best {K}"
        keep_table(here, args, sizes, rows, exchange(here, Q, shape, args.rounds))
    return 0
