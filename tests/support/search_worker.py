"""What the processes of tests/search/test_group_search.py run, one a rank."""

from itertools import accumulate
from unittest import mock

import torch
import torch.distributed as dist

import late_interaction as li
from tests.support.coded import BITS, FP8, INT8
from tests.support.corpora import in_memory

COUNTS = (9, 0, 14)  # documents of each rank
OF_DOCUMENTS = ("d_mask", "subset")

CODECS = {"int8": INT8, "float8": FP8, "bits": BITS}

# kind of documents, k, options
SEARCHES = {
    "padded": ("padded", 7, {}),
    "one": ("padded", 1, {"normalize": True}),
    "normalized": ("padded", 12, {"normalize": True}),
    "all": ("padded", 50, {"largest": False}),
    "float64": ("float64", 8, {}),
    "bfloat16": ("bfloat16", 8, {"chunk_bytes": 500, "largest": False}),
    "float16": ("float16", 12, {}),
    "masked": ("masked", 5, {}),
    "empty": ("empty", 20, {}),
    "kept": ("empty", 20, {"keep_empty": True, "largest": False}),
    "empty float64": ("empty float64", 20, {"largest": False}),
    "int8": ("int8", 6, {}),
    "float8": ("float8", 6, {}),
    "bits": ("bits", 6, {}),
    "corpus": ("corpus", 11, {}),
    "subset": ("subset", 9, {}),
    "list": ("list", 9, {"normalize": True}),
}


def documents(dtype=torch.float32):
    torch.manual_seed(7)
    return [torch.randn(n, 16).to(dtype) for n in torch.randint(0, 30, (23,)).tolist()]


def queries():
    torch.manual_seed(8)
    return torch.randn(4, 6, 16)


def inputs(kind):
    """Queries, all documents, and what comes with them. Scores tie across ranks; one is NaN."""
    torch.manual_seed(9)
    Q, D, more = queries(), torch.randn(sum(COUNTS), 5, 16), {}
    if kind == "corpus":
        return Q, None, more
    D[12:20], D[3, 2] = D[:8], torch.nan
    if kind in CODECS:
        D[3] = D[4]
        return CODECS[kind].encode(Q), CODECS[kind].encode(D), more
    if kind in ("masked", "float16"):
        more = {"q_mask": torch.rand(4, 6) < 0.7, "d_mask": torch.rand(len(D), 5) < 0.7}
    if kind == "subset":
        more = {"subset": torch.arange(len(D)) % 3 == 0}
    if kind == "list":
        return li.Tokens(Q), list(D), more
    if kind.startswith("empty"):
        more = {"d_mask": (torch.arange(len(D)) % 4 != 1).unsqueeze(1).expand(-1, 5)}
        kind = kind.removeprefix("empty ")
    if kind in ("float64", "bfloat16", "float16"):
        Q, D = (x.to(getattr(torch, kind)) for x in (Q, D))
    return Q, D, more


def own(rank, world):
    """The documents of a rank: as COUNTS says, or as even parts of all where there are more ranks."""
    ends = [0, *accumulate(COUNTS)]
    if world > len(COUNTS):
        ends = [sum(COUNTS) * i // world for i in range(world + 1)]
    return slice(ends[rank], ends[rank + 1])


def searches(rank, world):
    found, mine = {}, own(rank, world)
    for name, (kind, k, options) in SEARCHES.items():
        Q, D, more = inputs(kind)
        options = {"group": dist.group.WORLD} | options
        if kind == "corpus":
            scores, indices = in_memory(documents()).parts(world)[rank].search(Q, k, **options)
        else:
            more = {x: y[mine] if x in OF_DOCUMENTS else y for x, y in more.items()}
            scores, indices = li.search(Q, D[mine], k, **more, **options)
        found[name] = scores.double().tolist(), indices.tolist()
    return found


def differing(rank, world, change):
    """Rank 1 passes something else."""
    Q, D, _ = inputs("padded")
    options = {"k": 3} | (change if rank == 1 else {})
    dtype = getattr(torch, options.pop("dtype", "float32"))
    Q, D = Q.to(dtype), D.to(dtype)
    if options.pop("masked", None):
        options["q_mask"] = torch.zeros(Q.shape[:2], dtype=torch.bool)
    if "scale" in change:  # codes on both ranks, that mean something else on the second
        scale = options.pop("scale", 1.0)
        Q, D = (li.Codes(INT8, x.sign().char(), torch.ones(x.shape[:2])) for x in (Q, D))
        Q.scales.mul_(scale)
    li.search(Q, D[own(rank, world)], group=dist.group.WORLD, **options)


def raising(rank, world, when):
    Q, D, _ = inputs("padded")
    D = D[own(rank, world)]
    if when == "before":
        li.search(Q, D, 0 if rank == 1 else 3, group=dist.group.WORLD)
    if rank == 1:
        with mock.patch.object(li.TopK, "_add_checked", side_effect=MemoryError("no room")):
            li.search(Q, D, 3, group=dist.group.WORLD)
    li.search(Q, D, 3, group=dist.group.WORLD)


def outside(rank, world):
    group = dist.new_group([0])
    return li.search(torch.eye(4)[:1], torch.eye(4)[None], 1, group=group).indices.tolist()


# Queries, documents, tokens of both, dims, dtype, and whether tokens are normalized and masked: few documents
# a rank, whose calls are planned otherwise than those of all.
GPU_SHARDS = [
    (16, 700, 32, 128, 128, "bfloat16", False, False),
    (1, 900, 32, 128, 128, "bfloat16", True, False),
    (40, 330, 32, 60, 128, "float16", True, True),
    (2, 1500, 21, 300, 96, "bfloat16", False, True),
    (5, 400, 32, 200, 320, "float32", True, False),
    (64, 2000, 32, 64, 128, "bfloat16", True, False),
    (3, 800, 7, 16, 64, "float16", False, False),
    (16, 1200, 32, 128, 128, "float8_e4m3fn", False, False),
    (5, 1500, 32, 300, 320, "float32", False, False),  # halves of it are planned as any number of documents
]


def gpu_inputs(sizes):
    Nq, Nd, Lq, Ld, d, dtype, normalize, masked = sizes
    generator = torch.Generator().manual_seed(11)
    Q, D = torch.randn(Nq, Lq, d, generator=generator), torch.randn(Nd, Ld, d, generator=generator)
    more = {"normalize": normalize}
    if masked:
        more["d_mask"] = (torch.rand(Nd, Ld, generator=generator) < 0.8).cuda()
    Q, D = Q.cuda(), D.cuda()
    if dtype == "float8_e4m3fn":
        return FP8.encode(Q), FP8.encode(D), more
    return Q.to(getattr(torch, dtype)), D.to(getattr(torch, dtype)), more


def shards_on_gpus(rank, world):
    """Shards of all sizes, twice in the GPU's memory, after a search of another size, and in the host's."""
    found = []
    torch.cuda.set_device(rank)
    for sizes in GPU_SHARDS:
        Q, D, more = gpu_inputs(sizes)
        for first in (7, len(D) // 2):
            part = slice(0, first) if rank == 0 else slice(first, len(D))
            own = {x: y[part] if x in OF_DOCUMENTS else y for x, y in more.items()}
            for host in (False, False, True):
                documents = D[part].to("cpu") if host else D[part]
                here = {x: y.cpu() if host and x == "d_mask" else y for x, y in own.items()}
                scores, indices = li.search(Q, documents, 20, group=dist.group.WORLD, **here)
                found.append((scores.double().tolist(), indices.tolist()))
    return found


def on_gpus(rank, world):
    Q, D, _ = inputs("padded")
    with torch.cuda.device(rank):
        D = D[own(rank, world)] if rank else D[own(rank, world)].cuda()  # rank 1's stay on the CPU
        scores, indices = li.search(Q.cuda(), D, 7, group=dist.group.WORLD)
    return scores.double().tolist(), indices.tolist()
