"""Distillation: an encoder learns to score each query's candidates as a teacher does.

    python examples/distil.py

The teacher is tf-idf, which ranks better here than the untrained encoder; a cross-encoder's scores go the
same way. Each query has eight candidates, four that the teacher finds best and four others. The program
prints how well held-out queries find their documents before and after, and how well the teacher does.
"""

from __future__ import annotations

import argparse

import torch
from letters import LetterEncoder, device, mrr, texts, word_scores

import late_interaction as li

TEMPERATURE, TEACHER_TEMPERATURE = 1.0, 0.1  # of sums over the words of a query, and of cosines
HELD_OUT, BATCH, BEST, OTHERS = 200, 32, 4, 4


def quality(encoder: LetterEncoder, queries: list[str], documents: list[str]) -> float:
    with torch.no_grad():
        Q, D = (li.Tokens.packed(*encoder(x)) for x in (queries, documents))
        return mrr(li.maxsim(Q, D).topk(10).indices)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    queries, documents = texts()
    order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(0)).tolist()
    queries, documents = [queries[i] for i in order], [documents[i] for i in order]
    teacher = word_scores(queries, documents)
    held_out = queries[:HELD_OUT], documents
    encoder = LetterEncoder().to(device())
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.02)
    print(f"held-out MRR@10 of the teacher: {mrr(teacher[:HELD_OUT].topk(10).indices):.4f}")
    print(f"before: {quality(encoder, *held_out):.4f}")
    generator = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        chosen = torch.randint(HELD_OUT, len(queries), (BATCH,), generator=generator)
        best = teacher[chosen].topk(BEST).indices
        others = torch.randint(len(documents), (BATCH, OTHERS), generator=generator)
        candidates = torch.cat([best, others], 1)  # [BATCH, K]
        Q = li.Tokens.packed(*encoder([queries[i] for i in chosen.tolist()]))
        D = li.Tokens.packed(*encoder([documents[i] for i in candidates.flatten().tolist()]))
        loss = li.losses.distill_kl_div(
            Q,
            D,
            teacher[chosen].gather(1, candidates).to(Q.device),
            temperature=TEMPERATURE,
            teacher_temperature=TEACHER_TEMPERATURE,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, args.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}")
    print(f"after: {quality(encoder, *held_out):.4f}")


if __name__ == "__main__":
    main()
