"""Searches of a GPU's residual codes of MS MARCO's shape: 8.8 million passages, 590 million tokens.

    python -m bench passages --out bench/results/engines-nvidia-h200.txt

Codes and centroids are drawn at random on the GPU, so times and bytes are those of such a corpus, and what is
found means nothing. Lengths are lognormal, 67 tokens on average, at most 180. Times are the median of some
searches for the ten best, one query a call, with what the host does.
"""

import statistics
from functools import partial

import torch
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.run_header import add_table_arguments, keep_text, table
from late_interaction._doctor.timing import in_turn

ROUNDS = 20
TOP, D, LONGEST = 10, 128, 180


def draw(documents, tokens, n_centroids, device):
    """A corpus of about so many tokens, of 2-bit residuals."""
    torch.manual_seed(0)
    lengths = torch.empty(documents, device=device).log_normal_(0.0, 0.5)
    lengths = (lengths * (tokens / lengths.sum())).round().clamp(1, LONGEST).long()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    count = int(offsets[-1])
    centroids = normalize(torch.randn(n_centroids, D, device=device), dim=-1).half()
    weights = torch.tensor([-0.06, -0.02, 0.02, 0.06], device=device)
    codec = li.codecs.Residual(centroids, (weights[1:] + weights[:-1]) / 2, weights.half())
    residuals = torch.empty(count, D // 4, dtype=torch.uint8, device=device).random_(256)
    nearest = torch.randint(n_centroids, (count,), dtype=torch.int32, device=device)
    return li.Corpus.from_codes(li.Codes.packed(codec, residuals, offsets, None, nearest))


def add_arguments(p):
    add_table_arguments(p, documents=8_800_000, tokens=590_000_000, centroids=1 << 18, Lq=32)


def run(args):
    device = torch.device(args.device)
    corpus = draw(args.documents, args.tokens, args.centroids, args.device)
    Q = normalize(torch.randn(args.Lq, D, device=device), dim=-1).half()
    ways = {"exact": {}}
    for n in (100, 1000, 4000):
        ways[f"centroids, {n:,} candidates"] = {"coarse": "centroids", "candidates": n}
    rows = []
    for name, options in ways.items():
        search = partial(corpus.search, Q, TOP, normalize=True, **options)
        search()  # makes what it needs
        (times,) = in_turn({name: search}, device, ROUNDS).values()
        held = torch.cuda.memory_allocated() / 1e9 if device.type == "cuda" else float("nan")
        ms = {"one, ms": 1e3 * statistics.median(times), "slowest, ms": 1e3 * max(times)}
        rows.append({"search": name, **ms, "GB held": held})
    title = f"{len(corpus):,} passages, {corpus.tokens:,} tokens, 2 bits, {args.centroids:,} centroids"
    keep_text(f"{title}\n{table(rows)}", args)
    return 0
