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

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.run_header import keep_text, text_head
from bench.harness.text import align
from late_interaction import codecs

ROUNDS = 7
TOP = 10
CODECS = {
    "fp8": codecs.Fp8(),
    "int8": codecs.Int8(),
    "hamming": codecs.Bits(1, scales=False),
    "1bit": codecs.Bits(1),
    "4bit": codecs.Bits(4),
}


@dataclass
class Texts:
    """Unit tokens and their masks."""

    Q: Tensor
    D: Tensor
    q_mask: Tensor | None = None
    d_mask: Tensor | None = None


def draw(documents: int, Ld: int, queries: int, Lq: int, d: int, device: str) -> Texts:
    torch.manual_seed(0)
    topics = torch.randn(documents, 1, d, device=device)
    D = torch.randn(documents, Ld, d, device=device) + 0.5 * topics
    chosen = torch.randint(documents, (queries,), device=device)
    Q = D[chosen, torch.randint(Ld, (Lq, 1), device=device)].transpose(0, 1)
    Q = Q + torch.randn(Q.shape, device=device)
    return Texts(normalize(Q, dim=-1), normalize(D, dim=-1))


def demo(queries: int, device: str, kept: Path | None = None) -> Texts:
    """kept: a file that keeps the tokens, so that they are encoded once."""
    if kept is not None and kept.exists():
        return Texts(*(x.to(device) for x in torch.load(kept)))
    from demo.corpus import build_pairs
    from demo.encode import Encoder

    pairs = build_pairs()
    encoder = Encoder(torch.device(device))
    Q, D = encoder.encode([p.query for p in pairs[:queries]], [p.document for p in pairs])
    tokens = [x.to(device) for x in (Q.embeddings, D.embeddings, Q.mask, D.mask)]
    if kept is not None:
        torch.save([x.cpu() for x in tokens], kept)
    return Texts(*tokens)


@dataclass
class Way:
    """A way to score all documents, the bytes of documents that it reads, and a search by it."""

    scores: Callable[[], Tensor]
    size: int
    search: Callable[[], object]


def passes(x: Texts, candidates: int) -> dict[str, Way]:
    found: dict[str, Way] = {}
    masks: dict[str, Any] = {"q_mask": x.q_mask, "d_mask": x.d_mask}
    Q, D = x.Q.bfloat16(), x.D.bfloat16()
    found["bfloat16"] = Way(
        lambda: li.maxsim(Q, D, **masks), 2 * D.numel(), lambda: li.search(Q, D, TOP, **masks)
    )
    tokens, coarse = li.Tokens(x.Q, x.q_mask), {**masks, "candidates": candidates}
    for name, codec in CODECS.items():
        codes = codec.encode(li.Tokens(x.D, x.d_mask))
        query = tokens if isinstance(codec, codecs.Bits) and codec.scales else codec.encode(tokens)
        size = codes.values.numel() + (0 if codes.scales is None else 4 * codes.scales.numel())
        if isinstance(codec, codecs.Bits):
            search = lambda codes=codes: li.search(Q, D, TOP, coarse=codes, **coarse)  # noqa: E731
        else:
            search = lambda q=query, codes=codes: li.search(q, codes, TOP)  # noqa: E731
        found[name] = Way(lambda q=query, codes=codes: li.maxsim(q, codes), size, search)  # type: ignore[misc]
    return found


def seconds(calls: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    least = dict.fromkeys(calls, float("inf"))
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                least[name] = min(least[name], time.perf_counter() - start)
    return least


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--demo", action="store_true", help="real text in place of random tokens")
    p.add_argument("--tokens", type=Path, help="a file that keeps the tokens of --demo")
    p.add_argument("--documents", type=int, default=20000)
    p.add_argument("--candidates", type=int, nargs="+", default=[10, 30, 100])
    p.add_argument("--rescored", type=int, default=30, help="candidates of a whole search; default: 30")
    p.add_argument("--out", type=Path, help="a file that the table is appended to")
    for name, default in (("Ld", 128), ("queries", 4), ("Lq", 32), ("d", 128)):
        p.add_argument(f"--{name}", type=int, default=default)


def run(args: argparse.Namespace) -> int:
    if args.demo:
        x = demo(args.queries, args.device, args.tokens)
    else:
        x = draw(args.documents, args.Ld, args.queries, args.Lq, args.d, args.device)
    best = li.maxsim(x.Q, x.D, x.q_mask, x.d_mask).topk(TOP).indices
    ways = passes(x, min(args.rescored, len(x.D)))
    times = seconds({name: way.scores for name, way in ways.items()}, args.device)
    searches = seconds({name: way.search for name, way in ways.items()}, args.device)
    head = [
        "",
        "ms",
        "MB",
        "GB/s",
        "over fp8",
        "search ms",
        *(f"recall@{TOP} of {n}" for n in args.candidates),
    ]
    rows = []
    for name, way in ways.items():
        scores, row = way.scores(), [name, f"{1e3 * times[name]:.3f}", f"{way.size / 1e6:.0f}"]
        row += [f"{way.size / times[name] * 1e-9:.1f}", f"{times[name] / times['fp8']:.3f}"]
        row.append(f"{1e3 * searches[name]:.3f}")
        for candidates in args.candidates:
            found = scores.topk(candidates).indices
            hits = (found.unsqueeze(-1) == best.unsqueeze(-2)).any(-2)
            row.append(f"{hits.float().mean():.4f}")
        rows.append(row)
    what = "docstrings of make demo" if args.demo else "random documents"
    title = (
        f"{what}: queries {list(x.Q.shape)}, documents {list(x.D.shape)}, {args.rescored} candidates rescored"
    )
    told = text_head(torch.device(args.device), args.arguments)
    keep_text(f"{title}\n{align(head, rows)}", args.out, told)
    return 0
