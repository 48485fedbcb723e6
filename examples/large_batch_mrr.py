"""The demo's head, trained in batches that do not fit: MRR against the size of the batch.

    python examples/large_batch_mrr.py                       # needs what `make demo` installs; six minutes

A budget of 4 MiB for the activations that autograd keeps of the encoder (here: the head) holds 8 pairs,
however long they are. `cached_contrastive_step` encodes larger batches in parts of 8, up to 256 pairs, within
the same budget; the embeddings of the whole batch are beside it, and are printed. All train with the same
learning rate: once for as many steps, once with every pair seen equally often. Three seeds draw the head that
training starts from and the order of the pairs, the same for all sizes of the batch. The plot of means over
the seeds, between the least and the largest, goes to docs/large_batch_mrr.png.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the demo lies beside this folder

import late_interaction as li  # noqa: E402
from demo.__main__ import set_environment  # noqa: E402
from demo.corpus import build_pairs  # noqa: E402
from demo.encode import Encoder, Tokens  # noqa: E402
from demo.evaluate import TOP  # noqa: E402
from demo.steps import held_out_quality, in_writable  # noqa: E402
from demo.train import new_head, split  # noqa: E402

MIB = 1 << 20
BUDGET = 4 * MIB
TIMES = (1, 2, 4, 8, 16, 32)
LEARNING_RATE, TEMPERATURE = 1e-3, 1.0  # scores are sums over the tokens of a query, as in the demo
STEPS, EPOCHS, SEEDS = 60, 6, 3
PICTURE = ROOT / "docs" / "large_batch_mrr.png"


class Meter:
    """Bytes that autograd keeps for the backward: now, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __enter__(self) -> None:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)
        self.hooks.__enter__()

    def __exit__(self, *exception: object) -> None:
        self.hooks.__exit__(*exception)

    def _keep(self, tensor: Tensor) -> _Kept:
        return _Kept(self, tensor)


class _Kept:
    """A tensor that is kept, counted for as long."""

    def __init__(self, meter: Meter, tensor: Tensor) -> None:
        self.meter, self.tensor = meter, tensor
        meter.now += tensor.nbytes
        meter.most = max(meter.most, meter.now)

    def __del__(self) -> None:
        self.meter.now -= self.tensor.nbytes


@dataclass
class Data:
    """Frozen token embeddings of all pairs."""

    queries: Tokens
    documents: Tokens

    def take(self, pairs: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Packed tokens and lengths of the queries, and of the documents."""
        found = []
        for side in (self.queries, self.documents):
            at = pairs.to(side.mask.device)
            mask = side.mask[at]
            found.append((side.embeddings[at][mask], mask.sum(1, dtype=torch.int32)))
        return found


def encode(head: nn.Module, data: Data, pairs: Tensor, meter: Meter) -> tuple[Tensor, ...]:
    """Embeddings and lengths of some pairs. What autograd keeps of it is metered."""
    (q, q_lengths), (d, d_lengths) = data.take(pairs)
    with meter:
        return head(q), head(d), q_lengths, d_lengths


def loss_of(Q: Tensor, D: Tensor, q_lengths: Tensor, d_lengths: Tensor) -> Tensor:
    offsets = [nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (q_lengths, d_lengths)]
    q, d = (li.Tokens.packed(*x) for x in zip((Q, D), offsets, strict=True))
    return li.losses.contrastive(q, d, temperature=TEMPERATURE, normalize=True)


def largest_batch(head: nn.Module, data: Data, pairs: Tensor, budget: int) -> int:
    """The largest power of two of pairs whose activations fit the budget, by the longest of them."""
    tokens = data.queries.mask.sum(1) + data.documents.mask.sum(1)
    longest = pairs[tokens.cpu()[pairs].argsort(descending=True)]
    size = 1
    while 2 * size <= len(pairs):
        meter = Meter()
        kept = encode(head, data, longest[: 2 * size], meter)
        del kept
        if meter.most > budget:
            break
        size *= 2
    return size


@dataclass
class Trained:
    """One batch size, and what came of it."""

    batch: int
    steps: int
    kept: int  # bytes of the encoder's activations at most
    embeddings: int  # bytes of the largest batch's embeddings
    seconds: float
    mrrs: tuple[float, ...]  # of each seed

    @property
    def mrr(self) -> float:
        return mean(self.mrrs)

    @staticmethod
    def of_seeds(each: Sequence[Trained]) -> Trained:
        """The same batch size with several seeds."""
        first = each[0]
        kept, embeddings = max(x.kept for x in each), max(x.embeddings for x in each)
        mrrs = tuple(mrr for x in each for mrr in x.mrrs)
        return Trained(first.batch, first.steps, kept, embeddings, mean(x.seconds for x in each), mrrs)


def train(
    data: Data, train_pairs: Tensor, held_out: Tensor, batch: int, part: int, steps: int, seed: int = 0
) -> Trained:
    """Trains a new head for some steps in batches of this size, encoded in parts."""
    head = new_head(data.queries.embeddings.shape[-1], data.queries.mask.device, seed)
    optimizer = torch.optim.Adam(head.parameters(), lr=LEARNING_RATE)
    generator, meter = torch.Generator().manual_seed(seed), Meter()
    embeddings, waiting, start = 0, train_pairs[:0], time.perf_counter()

    def loss(*outputs: Tensor) -> Tensor:
        nonlocal embeddings
        embeddings = max(embeddings, outputs[0].nbytes + outputs[1].nbytes)
        return loss_of(*outputs)

    for _ in range(steps):
        if len(waiting) < batch:
            waiting = train_pairs[torch.randperm(len(train_pairs), generator=generator)]
        pairs, waiting = waiting[:batch], waiting[batch:]
        optimizer.zero_grad()
        li.cached_contrastive_step(lambda part: encode(head, data, part, meter), pairs.split(part), loss)
        optimizer.step()
    seconds = time.perf_counter() - start
    mrr = held_out_quality(head, data.queries, data.documents, held_out).mrr
    return Trained(batch, steps, meter.most, embeddings, seconds, (mrr,))


def draw(path: Path, before: float, found: dict[str, list[Trained]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8.0, 4.0), dpi=130, layout="constrained")
    styles = ({"color": "#1f3b73", "marker": "o"}, {"color": "#669bbc", "marker": "s"})
    for (label, runs), style in zip(found.items(), styles, strict=True):
        sizes = [x.batch for x in runs]
        axes.plot(sizes, [x.mrr for x in runs], label=label, **style)
        least, most = ([f(x.mrrs) for x in runs] for f in (min, max))
        axes.fill_between(sizes, least, most, color=style["color"], alpha=0.18, linewidth=0)
    batches = [x.batch for x in runs]
    seeds = len(runs[0].mrrs)
    axes.axhline(before, color="#555555", linewidth=0.9, linestyle=":", label="before training")
    axes.axvspan(batches[0] / 1.2, batches[0] * 1.2, color="#e08214", alpha=0.25, label="fits without parts")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.set_xlabel(f"batch, in parts of {batches[0]} ({BUDGET // MIB} MiB of activations)")
    axes.set_ylabel(f"held-out MRR@{TOP}" + (f" ({seeds} seeds: mean, range)" if seeds > 1 else ""))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.07))  # above the dotted line
    axes.set_title("The demo's head by the size of its contrastive batch", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def run(
    data: Data, steps: int, epochs: int, picture: Path | None, seeds: int = SEEDS
) -> dict[str, list[Trained]]:
    """Trains at every batch size, prints a line for each, and draws."""
    train_pairs, held_out = split(len(data.queries.mask))
    width, device = data.queries.embeddings.shape[-1], data.queries.mask.device
    heads = [new_head(width, device, seed) for seed in range(seeds)]
    before = mean(held_out_quality(head, data.queries, data.documents, held_out).mrr for head in heads)
    head = heads[0]
    part = largest_batch(head, data, train_pairs, BUDGET)
    print(f"{BUDGET // MIB} MiB of activations hold {part} pairs; MRR@{TOP} before training {before:.4f}")
    batches = [part * times for times in TIMES if part * times <= len(train_pairs)]
    found: dict[str, list[Trained]] = {}
    for label, count in ((f"{steps} steps", None), (f"every pair {epochs} times", epochs * len(train_pairs))):
        print(f"{label}:")
        found[label] = []
        for batch in batches:
            wanted = steps if count is None else count // batch
            each = Trained.of_seeds(
                [train(data, train_pairs, held_out, batch, part, wanted, seed) for seed in range(seeds)]
            )
            took = f"{each.steps:4} steps, {each.seconds:5.1f} s"
            memory = f"activations {each.kept / MIB:.1f} MiB, embeddings {each.embeddings / MIB:.1f} MiB"
            mrr = f"MRR@{TOP} {each.mrr:.4f} ({min(each.mrrs):.4f} to {max(each.mrrs):.4f})"
            print(f"  batch {batch:4}: {took}, {memory}, {mrr}", flush=True)
            found[label].append(each)
    if picture:
        draw(picture, before, found)
        print(picture)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=PICTURE, help="the plot")
    args = parser.parse_args()
    picture = in_writable(args.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = build_pairs()
    tokens = Encoder(device).encode([p.query for p in pairs], [p.document for p in pairs])
    run(Data(*tokens), args.steps, args.epochs, picture, args.seeds)


if __name__ == "__main__":
    set_environment()
    main()
