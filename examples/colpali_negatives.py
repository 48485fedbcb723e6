"""ColPali training with explicit negatives, by colpali-engine's loss on these kernels.

    python examples/colpali_negatives.py                   # needs colpali-engine

The images are grids of 8 x 8 coloured patches, each with a word drawn as a pattern; a query asks for two
patterns. A query's explicit negatives have one of the two, so that each of its words is found in them, but
not both. The model, with random weights, projects patches and words as ColPali's head does. The first batch's
loss is computed with and without the patch, and must agree.
"""

from __future__ import annotations

import argparse

import torch
from letters import device, mrr
from torch import Tensor, nn
from torch.nn.functional import normalize

import late_interaction as li

WORDS, WIDTH, DIM, GRID = (
    40,
    48,
    128,
    64,
)  # patterns; numbers of a patch, of an embedding; patches of an image
BATCH, NEGATIVES, HELD_OUT = 16, 3, 100


class TinyColPali(nn.Module):
    """Patches and words to unit vectors of DIM numbers, by a layer or two each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, DIM)
        self.patches = nn.Sequential(nn.Linear(WIDTH, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def queries(self, words: Tensor) -> Tensor:
        return normalize(self.words(words), dim=-1)

    def images(self, patches: Tensor) -> Tensor:
        return normalize(self.patches(patches), dim=-1)


class Pages:
    """Draws images that hold given patterns among patches without one."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.patterns = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0))

    def words(self, rows: int) -> Tensor:
        """Two different words for each query, ``[rows, 2]``."""
        return torch.rand(rows, WORDS, generator=self.generator).topk(2).indices

    def draw(self, words: Tensor) -> Tensor:
        """``[..., GRID, WIDTH]`` for words ``[..., n]``."""
        image = 0.3 * torch.randn(*words.shape[:-1], GRID, WIDTH, generator=self.generator)
        places = torch.rand(*words.shape[:-1], GRID, generator=self.generator).topk(words.shape[-1]).indices
        index = places[..., None].expand(*places.shape, WIDTH)
        return image.scatter(-2, index, self.patterns[words])

    def negatives(self, words: Tensor) -> Tensor:
        """``[rows, NEGATIVES, GRID, WIDTH]``: each holds one of the query's words, and another one."""
        kept = torch.randint(2, (len(words), NEGATIVES), generator=self.generator)
        others = torch.randint(1, WORDS, (len(words), NEGATIVES), generator=self.generator)
        one = words.gather(1, kept)
        # A number of words further on: never the same one, seldom the query's other one.
        return self.draw(torch.stack([one, (one + others) % WORDS], -1))


def quality(model: TinyColPali) -> float:
    pages = Pages(seed=1)
    words = pages.words(HELD_OUT)
    with torch.no_grad():
        Q, D = model.queries(words.to(device())), model.images(pages.draw(words).to(device()))
        return mrr(li.maxsim(Q, D).topk(10).indices)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    from colpali_engine.loss.late_interaction_losses import ColbertNegativeCELoss

    options = {"temperature": 1.0, "normalize_scores": False, "in_batch_term_weight": 0.5}
    model, pages = TinyColPali().to(device()), Pages(seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    before = quality(model)
    loss_fn = ColbertNegativeCELoss(**options)
    for step in range(args.steps):
        words = pages.words(BATCH)
        images, negatives = pages.draw(words).to(device()), pages.negatives(words).to(device())
        batch = model.queries(words.to(device())), model.images(images), model.images(negatives)
        if step == 0:
            theirs = loss_fn(*batch).item()
            li.patch("colpali-engine")
            loss_fn = ColbertNegativeCELoss(**options)
        loss = loss_fn(*batch)
        if step == 0:
            if abs(loss.item() - theirs) > 1e-4 * abs(theirs):
                raise SystemExit(f"with the patch the loss is {loss.item()}, without it {theirs}")
            print(f"first loss {loss.item():.5f}, without the patch {theirs:.5f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"after {args.steps} steps: loss {loss.item():.4f}")
    print(f"held-out MRR@10: {before:.4f} before, {quality(model):.4f} after")


if __name__ == "__main__":
    main()
