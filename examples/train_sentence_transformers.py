"""Training a multi-vector model of Sentence Transformers on these kernels: one call, and its code stays as it
is.

    python examples/train_sentence_transformers.py         # needs sentence-transformers 6

A small BERT with random weights learns to find docstrings, with the library's model, loss and evaluator. The
first batch's loss is computed with and without the patch, and must agree.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from letters import device, texts
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss
from sentence_transformers.util import batch_to_device
from tiny_bert import save_tiny_bert

import late_interaction as li

HELD_OUT, CORPUS, BATCH = 60, 200, 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    li.patch("sentence-transformers")
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_bert(folder)
        model = MultiVectorEncoder(folder, device=str(device()))
    loss_fn = MultiVectorMultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    queries, documents = texts()
    evaluate = MultiVectorInformationRetrievalEvaluator(
        queries={str(i): queries[i] for i in range(HELD_OUT)},
        corpus={str(i): documents[i] for i in range(CORPUS)},
        relevant_docs={str(i): {str(i)} for i in range(HELD_OUT)},
    )
    before = evaluate(model)[evaluate.primary_metric]

    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        chosen = torch.randint(HELD_OUT, len(queries), (BATCH,), generator=generator).tolist()
        features = [
            batch_to_device(model.preprocess([side[i] for i in chosen], task=task), model.device)
            for side, task in ((queries, "query"), (documents, "document"))
        ]
        if step == 0:
            check_without_patch(model, loss_fn, features)
        loss = loss_fn(features, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"after {args.steps} steps: loss {loss.item():.4f}")
    after = evaluate(model)[evaluate.primary_metric]
    print(f"held-out {evaluate.primary_metric}: {before:.4f} before, {after:.4f} after")


def check_without_patch(model: MultiVectorEncoder, loss_fn: torch.nn.Module, features: list[dict]) -> None:
    model.eval()  # without dropout
    with torch.no_grad():
        patched = loss_fn(features, None).item()
        li.unpatch("sentence-transformers")
        theirs = loss_fn(features, None).item()
        li.patch("sentence-transformers")
    model.train()
    if abs(patched - theirs) > 1e-4 * abs(theirs):
        raise SystemExit(f"with the patch the loss is {patched}, without it {theirs}")
    print(f"first loss {patched:.5f}, without the patch {theirs:.5f}")


if __name__ == "__main__":
    main()
