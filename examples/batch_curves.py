"""What a larger batch buys for the same GPU seconds: held-out MRR of a small model.

    python examples/batch_curves.py --descriptions Translation-en.xz    # needs transformers
    python examples/batch_curves.py --plot                              # from the file that --out wrote

A proxy: an encoder of four layers and 256 dims that trains from random weights on Debian's package
descriptions (https://deb.debian.org/debian/dists/bookworm/main/i18n/Translation-en.xz), whose one line is to
find the text below it. Every size of the batch trains for the same seconds, three seeds each; evaluation does
not count. Batches of more than --part pairs are encoded in parts, twice (`cached_contrastive_step`). The
learning rate grows with the root of the batch.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import late_interaction as li  # noqa: E402

WORDS, BUCKETS = 20_000, 2_000  # frequent words; others share these many by their letters
QUERY, DOCUMENT = 16, 64  # tokens, at most
HELD_OUT, TOP = 2_000, 10
HIDDEN, LAYERS, DIM = 256, 4, 128
TEMPERATURE = 0.25  # scores are sums over the few tokens of a query
LEARNING_RATE, OF_BATCH = 1e-3, 256  # the rate of a batch of so many
RESULTS, PICTURE = ROOT / "docs" / "batch_curves.json", ROOT / "docs" / "batch_curves.png"


@dataclass
class Curve:
    """One training run: GPU seconds and held-out MRR."""

    batch: int
    seed: int
    steps: int = 0
    pairs_a_second: float = 0.0
    points: list[tuple[float, float]] = field(default_factory=list)


# ---- data ----


def descriptions(path: Path) -> list[tuple[str, str]]:
    """The (one line, text) of packages, each line and each text once, in the order of the file."""
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        records = file.read().split("\n\n")
    found: list[tuple[str, str]] = []
    seen: set[str] = set()
    for record in records:
        line, _, text = record.partition("Description-en: ")[2].partition("\n")
        text = " ".join(text.split()[:DOCUMENT])
        if len(line.split()) < 3 or len(text.split()) < 12 or line in seen or text in seen:
            continue
        seen |= {line, text}
        found.append((line, text))
    return found


def tokens_of(texts: list[str], length: int, numbers: dict[str, int]) -> Tensor:
    """Token ids ``[texts, length]``; 0 is padding."""
    found = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in zip(found, texts, strict=True):
        ids = [
            numbers.get(word, 1 + len(numbers) + sum(map(ord, word)) * 31 % BUCKETS) for word in _words(text)
        ]
        row[: len(ids[:length])] = torch.tensor(ids[:length] or [1])
    return found


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9+#]+", text.lower())


@dataclass
class Data:
    queries: Tensor  # token ids
    documents: Tensor
    train: Tensor  # numbers of pairs
    held_out: Tensor

    @staticmethod
    def of(pairs: list[tuple[str, str]], device: torch.device) -> Data:
        counts = Counter(word for pair in pairs for text in pair for word in _words(text))
        numbers = {word: i + 1 for i, (word, _) in enumerate(counts.most_common(WORDS))}
        sides = [
            tokens_of(list(texts), length, numbers).to(device)
            for texts, length in zip(zip(*pairs, strict=True), (QUERY, DOCUMENT), strict=True)
        ]
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).to(device)
        held_out = min(HELD_OUT, len(pairs) // 5)
        return Data(*sides, order[held_out:], order[:held_out])


# ---- model and steps ----


class Encoder(nn.Module):
    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            vocab_size=1 + WORDS + BUCKETS, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
            num_attention_heads=4, intermediate_size=4 * HIDDEN, max_position_embeddings=DOCUMENT,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        half = ids.is_cuda
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=half):
            states = self.bert(input_ids=ids, attention_mask=(ids > 0).long()).last_hidden_state
            out = nn.functional.normalize(self.head(states).float(), dim=-1)
        return out.bfloat16() if half else out


def loss_of(Q: Tensor, D: Tensor, q_ids: Tensor, d_ids: Tensor) -> Tensor:
    q, d = li.Tokens(Q, q_ids > 0), li.Tokens(D, d_ids > 0)
    return li.losses.contrastive(q, d, temperature=TEMPERATURE)


class Trainer:
    def __init__(self, data: Data, batch: int, part: int, seed: int) -> None:
        torch.manual_seed(seed)
        device = data.queries.device
        self.data, self.batch, self.part = data, batch, part
        self.model = Encoder().to(device)
        rate = LEARNING_RATE * (batch / OF_BATCH) ** 0.5
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.warm_up = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 20)
        )
        self.pairs = self._pairs(torch.Generator().manual_seed(seed))

    def _pairs(self, generator: torch.Generator) -> Iterator[Tensor]:
        waiting = self.data.train[:0]
        while True:
            while len(waiting) < self.batch:
                order = torch.randperm(len(self.data.train), generator=generator).to(waiting.device)
                waiting = torch.cat((waiting, self.data.train[order]))
            yield waiting[: self.batch]
            waiting = waiting[self.batch :]

    def encode(self, pairs: Tensor) -> tuple[Tensor, ...]:
        q, d = self.data.queries[pairs], self.data.documents[pairs]
        return self.model(q), self.model(d), q, d

    def step(self) -> None:
        pairs = next(self.pairs)
        self.optimizer.zero_grad()
        if len(pairs) <= self.part:
            loss_of(*self.encode(pairs)).backward()
        else:
            li.cached_contrastive_step(self.encode, pairs.split(self.part), loss_of)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.warm_up.step()

    @torch.no_grad()
    def mrr(self) -> float:
        """Mean of 1 / rank of each held-out query's text among all texts, 0 below the first ten."""
        data = self.data
        self.model.eval()
        D = torch.cat([self.model(x) for x in data.documents.split(2048)])
        ids = data.queries[data.held_out]
        Q = torch.cat([self.model(x) for x in ids.split(2048)])
        self.model.train()
        ranking = li.search(Q, D, TOP, q_mask=ids > 0, d_mask=data.documents > 0).indices
        hits = ranking == data.held_out.unsqueeze(1)
        ranks = torch.arange(1, TOP + 1, device=hits.device)
        return float((hits / ranks).sum(1).mean())


def train(data: Data, batch: int, part: int, seed: int, marks: list[float]) -> Curve:
    """Train until the last of these seconds, and evaluate at each of them."""
    trainer, curve, seconds = Trainer(data, batch, part, seed), Curve(batch, seed), 0.0
    device, waiting = data.queries.device, list(marks)
    while waiting:
        start = time.perf_counter()
        trainer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds += time.perf_counter() - start
        curve.steps += 1
        if seconds >= waiting[0]:
            curve.points.append((seconds, trainer.mrr()))
            waiting = [x for x in waiting if x > seconds]
    curve.pairs_a_second = curve.steps * batch / seconds
    return curve


# ---- results ----


def table(curves: list[Curve], marks: list[float]) -> str:
    """Held-out MRR, mean (least to most) over the seeds."""
    lines = ["batch  steps  pairs/s " + "".join(f"{f'{mark:g} s':>26}" for mark in marks)]
    for batch in sorted({x.batch for x in curves}):
        own = [x for x in curves if x.batch == batch]
        cells = []
        for mark in marks:
            found = [next((mrr for t, mrr in x.points if t >= mark), float("nan")) for x in own]
            cells.append(f"{mean(found):.4f} ({min(found):.4f} to {max(found):.4f})")
        steps, speed = (mean(getattr(x, name) for x in own) for name in ("steps", "pairs_a_second"))
        lines.append(f"{batch:5}  {steps:5.0f}  {speed:7,.0f} " + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def draw(kept: dict[str, object], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = [Curve(**x) for x in kept["curves"]]  # type: ignore[attr-defined]
    figure, axes = plt.subplots(figsize=(8.0, 4.0), dpi=130, layout="constrained")
    sizes = sorted({x.batch for x in curves})
    for i, batch in enumerate(sizes):
        own = [x.points for x in curves if x.batch == batch]
        color = plt.get_cmap("viridis")(i / max(1, len(sizes)))
        seconds = [mean(point[0] for point in points) for points in zip(*own, strict=False)]
        mrrs = [[point[1] for point in points] for points in zip(*own, strict=False)]
        axes.plot(seconds, list(map(mean, mrrs)), marker="o", color=color, label=f"batch {batch:,}")
        axes.fill_between(seconds, list(map(min, mrrs)), list(map(max, mrrs)), color=color, alpha=0.18)
    axes.set_xlabel(f"GPU seconds of training, {kept['device']}")
    axes.set_ylabel(f"held-out MRR@{TOP} ({len(own)} seeds: mean, range)")
    axes.set_title("A proxy: a small encoder from random weights, Debian's package descriptions", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def numbers(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--descriptions", type=Path, help="Debian's Translation-en, or its .xz")
    parser.add_argument("--batches", type=numbers, default=[64, 256, 1024, 4096])
    parser.add_argument("--marks", type=numbers, default=[1, 2, 4, 8], help="seconds to evaluate at")
    parser.add_argument("--part", type=int, default=1024, help="pairs that are encoded at a time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--plot", action="store_true", help="draw what --out has, and train nothing")
    args = parser.parse_args()
    if args.plot:
        draw(json.loads(args.out.read_text()), args.picture)
        return
    if args.descriptions is None:
        parser.error("--descriptions must name Debian's Translation-en")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Data.of(descriptions(args.descriptions), device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{len(data.train):,} pairs to train on, {len(data.held_out):,} held out, {name}", flush=True)
    curves: list[Curve] = []
    for batch in map(int, args.batches):
        train(data, batch, args.part, 99, [1e-9])  # warms up: compiled and tuned kernels
        for seed in range(args.seeds):
            curves.append(train(data, batch, args.part, seed, args.marks))
            print(f"batch {batch}, seed {seed}: {curves[-1].points}", flush=True)
            kept = {"device": name, "pairs": len(data.train), "curves": [asdict(x) for x in curves]}
            args.out.write_text(json.dumps(kept, indent=1) + "\n")
    print(table(curves, args.marks))


if __name__ == "__main__":
    main()
