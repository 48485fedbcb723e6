"""The demo, step by step: encode, search, look at one hit, train a head, keep a corpus, draw the hit."""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import late_interaction
from demo import keep, show
from demo.corpus import Pair, build_pairs
from demo.encode import Encoder, Tokens, project, unpad
from demo.evaluate import TOP, Quality, quality, same_rankings, timed
from demo.train import DIM, new_head, split, train_head
from late_interaction._progress import bar as progress_bar

TIE = 1e-5  # a score adds up some 15 similarities in fp32: closer than this, rounding decides the order
CHUNK = 32  # queries that Sentence Transformers scores at a time: faster than larger chunks or all at once


def run() -> int:
    """Run every step. 0 if the fp32 ranking is Sentence Transformers' own and training helped, else 1."""
    picture = find_place("alignment.png")  # before the work of minutes
    device, machine = pick_device()
    print(f"late_interaction {late_interaction.__version__}, torch {torch.__version__}, {machine}")

    show.heading("1. Encode: the docstrings of Python's standard library")
    pairs = build_pairs()
    print(f"   {len(pairs):,} pairs; the first sentence of a docstring is to find the rest of it")
    encoder = Encoder(device)
    queries, documents = encoder.encode([p.query for p in pairs], [p.document for p in pairs])
    print(f"   {queries.count():,} query tokens, {documents.count():,} document tokens")

    head = new_head(queries.embeddings.shape[-1], device)
    Q, D = project(head, queries), project(head, documents)

    show.heading(f"2. Search: {len(pairs):,} queries x {len(pairs):,} documents, d = {DIM}")
    same, ranking = compare_scorers(encoder, Q, D)

    hit = pick_hit(ranking, Q, D)
    show.heading("3. Why it matched: one query and the winners of its tokens")
    similarity, winners = explain(hit, ranking, pairs, Q, D)

    show.heading(f"4. Train: a {head.in_features} x {DIM} head, in-batch negatives, gradients through maxsim")
    better = train_and_compare(head, queries, documents)

    show.heading("5. Keep: a corpus in a folder, int8, that is searched, filtered and changed")
    with tempfile.TemporaryDirectory() as folder:
        trained = project(head, queries), project(head, documents)
        keep.use(Path(folder) / "corpus", pairs, *trained, split(len(pairs))[1].to(device), hit)

    show.heading("6. Draw: the similarities of the hit of step 3")
    title = f"{pairs[hit].name}: every query token against every document token, winners ringed"
    show.alignment_picture(picture, title, Q.words[hit], D.words[hit], similarity, winners)
    print(f"   {picture}")
    return 0 if same and better else 1


def find_place(name: str) -> Path:
    """Where to write a file: in the virtual environment, or among temporary files if that cannot be."""
    if sys.prefix != sys.base_prefix:
        with suppress(OSError):
            return in_writable(Path(sys.prefix) / name)
    return Path(tempfile.mkdtemp(prefix="late_interaction-demo-")) / name


def in_writable(path: Path) -> Path:
    """The path, if its folder can be written to; else an OSError now, and not after minutes of work."""
    tempfile.TemporaryFile(dir=path.parent).close()
    return path


def pick_device() -> tuple[torch.device, str]:
    """The GPU if there is one and the library has kernels for it, else the CPU; and what to call it."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), f"CPU, {torch.get_num_threads()} threads"
    if late_interaction.ops.cuda_missing:
        return torch.device("cpu"), f"CPU, for want of CUDA kernels: {late_interaction.ops.cuda_missing}"
    return torch.device("cuda"), torch.cuda.get_device_name()


def compare_scorers(encoder: Encoder, Q: Tokens, D: Tokens) -> tuple[bool, Tensor]:
    """Rank all documents for all queries with Sentence Transformers and with `search`; print both.

    Returns whether the fp32 rankings are the same, and ours, [Nq, TOP].
    """
    device = Q.mask.device
    wanted = torch.arange(len(Q.words), device=device)
    ragged_Q, ragged_D = unpad(Q.embeddings, Q.mask), unpad(D.embeddings, D.mask)

    def theirs() -> Tensor:
        chunks = []
        with progress_bar(len(ragged_Q), desc="   their scoring", unit="queries", **show.BAR) as bar:
            for start in range(0, len(ragged_Q), CHUNK):
                chunks.append(encoder.similarity(ragged_Q[start : start + CHUNK], ragged_D))
                bar.update(len(chunks[-1]))
        return torch.cat(chunks)

    def ours(dtype: torch.dtype) -> Tensor:
        q, d = Q.embeddings.to(dtype), D.embeddings.to(dtype)
        return late_interaction.search(q, d, TOP, q_mask=Q.mask, d_mask=D.mask).indices

    encoder.similarity(ragged_Q[:1], ragged_D[:1])  # warm up: threads, libraries, device
    scores, seconds = timed(theirs, device)
    rows = [
        _row("Sentence Transformers, fp32", seconds, quality(scores.topk(TOP).indices, wanted), "", wanted)
    ]
    rankings = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        late_interaction.search(Q.embeddings[:1].to(dtype), D.embeddings[:1].to(dtype), 1)
        ranking, seconds = timed(partial(ours, dtype), device)
        same = f"{same_rankings(ranking, scores, TIE):,} / {len(wanted):,}"
        rows.append(_row(f"late_interaction, {name}", seconds, quality(ranking, wanted), same, wanted))
        rankings.append(ranking)
    header = ("scorer", "seconds", "queries/s", f"MRR@{TOP}", f"recall@{TOP}", f"same top {TOP}")
    print(show.table(header, rows, "<>>>>>"))
    print("   bf16 rounds the embeddings to 8 bits before it multiplies, so close neighbours may swap.")
    return same_rankings(rankings[0], scores, TIE) == len(wanted), rankings[0]


def _row(name: str, seconds: float, found: Quality, same: str, wanted: Tensor) -> tuple[str, ...]:
    speed = f"{len(wanted) / seconds:,.0f}"
    return (name, f"{seconds:.2f}", speed, f"{found.mrr:.4f}", f"{found.recall:.4f}", same)


def pick_hit(ranking: Tensor, Q: Tokens, D: Tokens) -> int:
    """A query whose document came first, both short enough to read on one screen."""
    first = (ranking[:, 0].cpu() == torch.arange(len(ranking))).tolist()
    readable = [
        i
        for i, (q, d) in enumerate(zip(Q.words, D.words, strict=True))
        if 9 <= len(q) <= 14 and 30 <= len(d) <= 44
    ]
    hits = [i for i in readable if first[i]] or [i for i, is_first in enumerate(first) if is_first] or [0]
    # The fewer words query and document share, the more the embeddings had to do.
    return min(hits, key=lambda i: len(set(Q.words[i]) & set(D.words[i])) / len(set(Q.words[i])))


def explain(hit: int, ranking: Tensor, pairs: list[Pair], Q: Tokens, D: Tokens) -> tuple[Tensor, Tensor]:
    """Print the best documents of one query and the winners in the first of them.

    Returns the similarities [Lq, Ld] and the winners [Lq] of the hit.
    """
    q, d = Q.embeddings[hit][Q.mask[hit]], D.embeddings[hit][D.mask[hit]]
    scores, winners = late_interaction.maxsim_with_winners(q[None], d[None])
    similarity = q @ d.T
    print(f'   "{pairs[hit].query}"\n')
    best = ranking[hit, :3].tolist()
    candidates = D.embeddings[best], D.mask[best]
    totals = late_interaction.maxsim(q[None], candidates[0], d_mask=candidates[1])[0].tolist()
    print(
        show.table(
            ("rank", "score", "document"),
            [
                (str(i + 1), f"{s:.2f}", show.shorten(f"{pairs[n].name}: {pairs[n].document}", 70))
                for i, (n, s) in enumerate(zip(best, totals, strict=True))
            ],
            ">><",
        )
    )
    print()
    rows = show.alignment_rows(Q.words[hit], D.words[hit], similarity, winners[0, 0])
    print(show.table(("query token", "similarity", f"winner, in the text of {pairs[hit].name}"), rows, "<><"))
    print(f"\n   The similarities add up to the score, {scores.item():.2f}.")
    return similarity, winners[0, 0]


def train_and_compare(head: torch.nn.Linear, queries: Tokens, documents: Tokens) -> bool:
    """Train the head on one part of the pairs; print how the rest fares before and after. True if better."""
    train, held_out = split(len(queries.words))
    before = held_out_quality(head, queries, documents, held_out)
    losses = train_head(head, queries, documents, train)
    after = held_out_quality(head, queries, documents, held_out)
    print(
        f"   {len(train):,} pairs trained on, loss {losses[0]:.2f} -> {losses[-1]:.2f}; "
        f"{len(held_out):,} queries held out, {len(documents.words):,} documents"
    )
    rows = [(name, f"{q.mrr:.4f}", f"{q.recall:.4f}") for name, q in (("before", before), ("after", after))]
    print(show.table(("held-out queries", f"MRR@{TOP}", f"recall@{TOP}"), rows, "<>>"))
    return after.mrr > before.mrr


def held_out_quality(head: torch.nn.Module, queries: Tokens, documents: Tokens, held_out: Tensor) -> Quality:
    Q, D = project(head, queries), project(head, documents)
    held_out = held_out.to(Q.mask.device)
    _, ranking = late_interaction.search(
        Q.embeddings[held_out], D.embeddings, TOP, q_mask=Q.mask[held_out], d_mask=D.mask
    )
    return quality(ranking, held_out)
