"""What a first pass over codes of a few bits costs beside exact scores, and which of the best it finds.

    python -m bench first-pass
    python -m bench first-pass --demo  # the docstrings of `make demo`, by all-MiniLM-L6-v2
    python -m bench first-pass --queries 1 --out bench/results/first-pass-nvidia-h100-80gb-hbm3.txt

Times are the least of some rounds in turn: `ms` of all scores, with the bytes of documents that they read and
the rate; `search ms` of the ten best by `search`, which scores the best candidates exactly where a first
pass has found them. Recall is the share of the ten best documents by exact scores that is among the
candidates. Random documents are tokens around a topic of their own; queries are made of their tokens, with
noise. All but one of the ten best are there by chance: the recall of few bits is low.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.run_header import add_table_arguments, keep_text, table
from late_interaction import codecs
from late_interaction._doctor.timing import in_turn

ROUNDS = 7
TOP = 10
CODECS = {
    "fp8": codecs.Fp8(), "int8": codecs.Int8(), "hamming": codecs.Bits(1, scales=False),
    "1bit": codecs.Bits(1), "4bit": codecs.Bits(4),
}  # fmt: skip


class Texts(NamedTuple):
    """Unit tokens and their masks."""

    Q: Tensor
    D: Tensor
    q_mask: Tensor | None = None
    d_mask: Tensor | None = None


def draw(documents, Ld, queries, Lq, d, device):
    torch.manual_seed(0)
    topics = torch.randn(documents, 1, d, device=device)
    D = torch.randn(documents, Ld, d, device=device) + 0.5 * topics
    chosen = torch.randint(documents, (queries,), device=device)
    Q = D[chosen, torch.randint(Ld, (Lq, 1), device=device)].transpose(0, 1)
    Q = Q + torch.randn(Q.shape, device=device)
    return Texts(normalize(Q, dim=-1), normalize(D, dim=-1))


def demo(queries, device):
    from demo.corpus import build_pairs
    from demo.encode import Encoder

    pairs = build_pairs()
    encoder = Encoder(torch.device(device))
    Q, D = encoder.encode([p.query for p in pairs[:queries]], [p.document for p in pairs])
    return Texts(*(x.to(device) for x in (Q.embeddings, D.embeddings, Q.mask, D.mask)))


class Way(NamedTuple):
    """A way to score all documents, the bytes of documents that it reads, and a search by it."""

    scores: Callable[[], Tensor]
    size: int
    search: Callable[[], object]


def ways(x, candidates):
    masks = {"q_mask": x.q_mask, "d_mask": x.d_mask}
    Q, D = x.Q.bfloat16(), x.D.bfloat16()
    search = partial(li.search, Q, D, TOP, **masks)
    found = {"bfloat16": Way(partial(li.maxsim, Q, D, **masks), D.nbytes, search)}
    tokens = li.Tokens(x.Q, x.q_mask)
    for name, codec in CODECS.items():
        codes = codec.encode(li.Tokens(x.D, x.d_mask))
        bits = isinstance(codec, codecs.Bits)
        query = tokens if bits and codec.scales else codec.encode(tokens)
        size = codes.values.numel() + (0 if codes.scales is None else 4 * codes.scales.numel())
        search = partial(li.search, query, codes, TOP)
        if bits:
            search = partial(li.search, Q, D, TOP, coarse=codes, candidates=candidates, **masks)
        found[name] = Way(partial(li.maxsim, query, codes), size, search)
    return found


def add_arguments(p):
    add_table_arguments(p, documents=20_000, Ld=128, queries=4, Lq=32, d=128)
    p.add_argument("--demo", action="store_true", help="real text in place of random tokens")
    p.add_argument("--candidates", type=int, nargs="+", default=[10, 30, 100])
    p.add_argument("--rescored", type=int, default=30, help="candidates of a whole search; default: 30")


def run(args):
    device = torch.device(args.device)
    if args.demo:
        x = demo(args.queries, args.device)
    else:
        x = draw(args.documents, args.Ld, args.queries, args.Lq, args.d, args.device)
    best = li.maxsim(x.Q, x.D, x.q_mask, x.d_mask).topk(TOP).indices
    found = ways(x, min(args.rescored, len(x.D)))
    taken = in_turn({name: way.scores for name, way in found.items()}, device, ROUNDS)
    searches = in_turn({name: way.search for name, way in found.items()}, device, ROUNDS)
    rows = []
    for name, way in found.items():
        seconds, scores = min(taken[name]), way.scores()
        row = {
            "": name, "ms": f"{1e3 * seconds:.3f}", "MB": f"{way.size / 1e6:.0f}",
            "GB/s": way.size / seconds * 1e-9, "over fp8": f"{seconds / min(taken['fp8']):.3f}",
            "search ms": f"{1e3 * min(searches[name]):.3f}",
        }  # fmt: skip
        for n in args.candidates:
            hits = (scores.topk(n).indices.unsqueeze(-1) == best.unsqueeze(-2)).any(-2)
            row[f"recall@{TOP} of {n}"] = f"{hits.float().mean():.4f}"
        rows.append(row)
    what = "docstrings of make demo" if args.demo else "random documents"
    sizes = f"queries {list(x.Q.shape)}, documents {list(x.D.shape)}, {args.rescored} candidates rescored"
    keep_text(f"{what}: {sizes}\n{table(rows)}", args)
    return 0
