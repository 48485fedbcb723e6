"""Training on packed tokens: no padding is stored, multiplied or masked.

    python examples/packed_training.py

A batch is 64 queries and their documents, whose words lie end to end with offsets. The first step's loss is
also computed on the padded batch, and must agree. The program prints how well held-out queries find their
documents before and after.
"""

from __future__ import annotations

import argparse

import torch
from letters import LetterEncoder, device, mrr, padded, texts

import late_interaction as li

HELD_OUT = 200


def quality(encoder: LetterEncoder, queries: list[str], documents: list[str]) -> float:
    with torch.no_grad():
        Q, D = (li.Tokens.packed(*encoder(x)) for x in (queries, documents))
        return mrr(li.maxsim(Q, D).topk(10).indices)


def check_against_padding(
    encoder: LetterEncoder, queries: list[str], documents: list[str], loss: float
) -> None:
    """The padded batch has the same loss."""
    (Q, q_mask), (D, d_mask) = padded(*encoder(queries)), padded(*encoder(documents))
    same = li.losses.contrastive(li.Tokens(Q, q_mask), li.Tokens(D, d_mask)).item()
    if abs(same - loss) > 1e-3 * abs(same):
        raise SystemExit(f"the padded batch has loss {same}, the packed one {loss}")
    share = 1 - (q_mask.sum() + d_mask.sum()) / (q_mask.numel() + d_mask.numel())
    print(f"loss {loss:.5f}; padded {same:.5f}, where {share:.0%} of the tokens are padding")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    queries, documents = texts()
    order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(0)).tolist()
    held_out, train = order[:HELD_OUT], order[HELD_OUT:]
    sides = [queries[i] for i in held_out], [documents[i] for i in held_out + train]
    encoder = LetterEncoder().to(device())
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.02)
    before = quality(encoder, *sides)
    generator = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        chosen = torch.randperm(len(train), generator=generator)[: args.batch].tolist()
        batch = [queries[train[i]] for i in chosen], [documents[train[i]] for i in chosen]
        Q, D = (li.Tokens.packed(*encoder(side)) for side in batch)
        loss = li.losses.contrastive(Q, D)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            check_against_padding(encoder, *batch, loss.item())
        optimizer.step()
    print(f"after {args.steps} steps: loss {loss.item():.5f}")
    print(f"held-out MRR@10: {before:.4f} before, {quality(encoder, *sides):.4f} after")


if __name__ == "__main__":
    main()
