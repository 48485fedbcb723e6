"""What the processes of tests/test_group_search.py run, one a rank."""

from unittest import mock

import torch
import torch.distributed as dist

import late_interaction as li
from late_interaction import topk
from late_interaction.corpus import Corpus
from late_interaction.fp8 import quantize_fp8_per_token
from late_interaction.int8 import quantize_int8_per_token
from late_interaction.topk import maxsim_topk

COUNTS = (9, 0, 14)  # documents of each rank

# kind of documents, k, options
SEARCHES = {
    "padded": ("padded", 7, {}),
    "one": ("padded", 1, {"normalize": True}),
    "all": ("padded", 50, {"largest": False}),
    "float64": ("float64", 8, {}),
    "bfloat16": ("bfloat16", 8, {"chunk_size": 2}),
    "masked": ("masked", 5, {}),
    "int8": ("int8", 6, {}),
    "float8": ("float8", 6, {}),
    "corpus": ("corpus", 11, {}),
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
    if kind in ("int8", "float8"):
        D[3] = D[4]
        quantize = quantize_int8_per_token if kind == "int8" else quantize_fp8_per_token
        (Q, more["scale_Q"]), (D, more["scale_D"]) = quantize(Q), quantize(D)
        return Q, D, more
    if kind == "masked":
        more = {"q_mask": torch.rand(4, 6) < 0.7, "d_mask": torch.rand(len(D), 5) < 0.7}
    if kind in ("float64", "bfloat16"):
        Q, D = (x.to(getattr(torch, kind)) for x in (Q, D))
    return Q, D, more


def whole_corpus():
    docs = documents()
    offsets = torch.tensor([0, *(len(x) for x in docs)]).cumsum(0)
    return Corpus.from_packed(torch.cat(docs), offsets)


def own_part(rank, x):
    first = sum(COUNTS[:rank])
    return x[first : first + COUNTS[rank]]


def searches(rank, world):
    found = {}
    for name, (kind, k, options) in SEARCHES.items():
        Q, D, more = inputs(kind)
        if kind == "corpus":
            part = whole_corpus().parts(world)[rank]
            scores, indices = part.search(Q, k, group=dist.group.WORLD, **options)
        else:
            more = {x: own_part(rank, y) if x in ("d_mask", "scale_D") else y for x, y in more.items()}
            more |= {"group": dist.group.WORLD} | options
            scores, indices = maxsim_topk(Q, own_part(rank, D), k, **more)
        found[name] = scores.double().tolist(), indices.tolist()
    return found


def differing(rank, world, change):
    """Rank 1 passes something else."""
    Q, D, _ = inputs("padded")
    options = {"k": 3} | (change if rank == 1 else {})
    if "dtype" in options:
        Q, D = Q.double(), D.double()
        del options["dtype"]
    Q = Q[: options.pop("Nq", None)]
    if options.pop("seed", None):
        Q = Q.roll(1, 0)
    maxsim_topk(Q, own_part(rank, D), group=dist.group.WORLD, **options)


def raising(rank, world, when):
    Q, D, _ = inputs("padded")
    D = own_part(rank, D)
    if when == "before":
        li.retrieve(Q, D, 0 if rank == 1 else 3, group=dist.group.WORLD)
    if rank == 1:
        with mock.patch.object(topk.TopK, "add", side_effect=MemoryError("no room")):
            maxsim_topk(Q, D, 3, group=dist.group.WORLD)
    maxsim_topk(Q, D, 3, group=dist.group.WORLD)


def outside(rank, world):
    group = dist.new_group([0])
    return li.retrieve(torch.eye(4)[:1], torch.eye(4)[None], 1, group=group)[1].tolist()


def on_gpus(rank, world):
    Q, D, _ = inputs("padded")
    with torch.cuda.device(rank):
        D = own_part(rank, D) if rank else own_part(rank, D).cuda()  # rank 1's stay on the CPU
        scores, indices = maxsim_topk(Q.cuda(), D, 7, group=dist.group.WORLD)
    return scores.double().tolist(), indices.tolist()
