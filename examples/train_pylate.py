"""Training a ColBERT model of PyLate on these kernels: one call before the loss is built.

    python examples/train_pylate.py                        # needs pylate

A small BERT with random weights learns to find docstrings, with the library's model and loss. The first
batch's loss is computed with and without the patch, and must agree. (PyLate and Sentence Transformers 6
exclude each other.)
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from letters import device, mrr, padded, texts
from pylate import losses, models, scores
from sentence_transformers.util import batch_to_device
from tiny_bert import save_tiny_bert

import late_interaction as li

HELD_OUT, CORPUS, BATCH = 60, 200, 16


def unpacked(embeddings: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    packed = li.Tokens.from_list(embeddings)
    return padded(packed.values, packed.offsets)


def quality(model: models.ColBERT, queries: list[str], documents: list[str]) -> float:
    """How well held-out queries find their documents, by the library's own scoring, which is patched."""
    (Q, q_mask), (D, d_mask) = (
        unpacked([torch.as_tensor(x) for x in model.encode(texts, is_query=is_query)])
        for texts, is_query in ((queries, True), (documents, False))
    )
    return mrr(scores.colbert_scores(Q, D, q_mask, d_mask).topk(10).indices)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_bert(folder)
        model = models.ColBERT(folder, embedding_size=64, document_length=60, device=str(device()))
    queries, documents = texts()
    held_out = queries[:HELD_OUT], documents[:CORPUS]
    plain = losses.Contrastive(model)
    li.patch("pylate")
    loss_fn = losses.Contrastive(model)
    before = quality(model, *held_out)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        chosen = torch.randint(HELD_OUT, len(queries), (BATCH,), generator=generator).tolist()
        features = [
            batch_to_device(model.tokenize([side[i] for i in chosen], is_query=is_query), model.device)
            for side, is_query in ((queries, True), (documents, False))
        ]
        if step == 0:
            check_without_patch(model, plain, loss_fn, features)
        loss = loss_fn(features, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"after {args.steps} steps: loss {loss.item():.4f}")
    print(f"held-out MRR@10: {before:.4f} before, {quality(model, *held_out):.4f} after")


def check_without_patch(
    model: models.ColBERT, plain: torch.nn.Module, loss_fn: torch.nn.Module, features: list[dict]
) -> None:
    """`plain` was built before the patch, and keeps PyLate's own scores."""
    model.eval()  # without dropout
    with torch.no_grad():
        theirs, patched = plain(features, None).item(), loss_fn(features, None).item()
    model.train()
    if abs(patched - theirs) > 1e-4 * abs(theirs):
        raise SystemExit(f"with the patch the loss is {patched}, without it {theirs}")
    print(f"first loss {patched:.5f}, without the patch {theirs:.5f}")


if __name__ == "__main__":
    main()
