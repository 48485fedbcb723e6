"""`python -m demo.curves`: the same head trained through `maxsim` and through PyTorch's own operators.

Same seed, same batches of 16, 300 steps each. Writes docs/training.png: both losses, their difference, and
what the held-out queries find in the end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from demo.__main__ import set_environment
from demo.corpus import build_pairs
from demo.encode import Encoder
from demo.evaluate import TOP, Quality
from demo.steps import held_out_quality, in_writable, pick_device
from demo.train import Score, maxsim_scores, new_head, split, train_head
from late_interaction.reference import maxsim_reference

STEPS, BATCH = 300, 16
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "training.png"


def einsum_scores(Q: Tensor, D: Tensor, q_mask: Tensor, d_mask: Tensor) -> Tensor:
    """MaxSim by torch.einsum and a maximum over the whole similarity tensor."""
    return maxsim_reference(Q, D, q_mask, d_mask, normalize=True)


SCORES: dict[str, Score] = {"torch.einsum": einsum_scores, "late_interaction.maxsim": maxsim_scores}


def draw(path: Path, losses: dict[str, Sequence[float]], found: dict[str, Quality], machine: str) -> None:
    """Both curves in one panel, their difference below, MRR in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8.0, 5.4), dpi=130, sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    styles = ({"color": "#e08214", "linewidth": 3.2}, {"color": "#1f3b73", "linewidth": 1.1})
    for (name, curve), style in zip(losses.items(), styles, strict=True):
        above.plot(curve, label=f"{name}: held-out MRR@{TOP} {found[name].mrr:.4f}", **style)
    above.set_ylabel("loss of the batch")
    above.legend(frameon=False)
    above.set_title(f"One head, one seed, two ways to the scores ({machine}, float32)", fontsize=10)
    theirs, ours = losses.values()
    difference = [abs(a - b) / a for a, b in zip(theirs, ours, strict=True)]
    below.plot([max(x, 1e-9) for x in difference], color="#555555", linewidth=0.9)  # equal ones too
    below.set_yscale("log")
    below.set_ylabel("relative\ndifference")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def main() -> int:
    picture = in_writable(PICTURE)
    device, machine = pick_device()
    pairs = build_pairs()
    queries, documents = Encoder(device).encode([p.query for p in pairs], [p.document for p in pairs])
    train, held_out = split(len(pairs))
    losses: dict[str, Sequence[float]] = {}
    found: dict[str, Quality] = {}
    for name, score in SCORES.items():
        head = new_head(queries.embeddings.shape[-1], device)
        losses[name] = train_head(head, queries, documents, train, score=score, steps=STEPS, batch_size=BATCH)
        found[name] = held_out_quality(head, queries, documents, held_out)
        print(
            f"{name}: loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f}, MRR@{TOP} {found[name].mrr:.4f}"
        )
    draw(picture, losses, found, machine.split(",")[0])
    print(picture)
    return 0


if __name__ == "__main__":
    set_environment()
    torch.manual_seed(0)
    sys.exit(main())
