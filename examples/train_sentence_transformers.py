"""From a dataset to a multi-vector model, by Sentence Transformers' trainer on these kernels.

    python examples/train_sentence_transformers.py         # needs sentence-transformers 6 and datasets

A small BERT with random weights learns to find docstrings. A batch of any size is exact: the library's cached
loss encodes it in parts, and the patch scores all of it without storing a similarity.
"""

from __future__ import annotations

import argparse
import tempfile

from datasets import Dataset
from letters import texts
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
from tiny_bert import save_tiny_bert

import late_interaction as li

HELD_OUT, CORPUS = 60, 200


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    queries, documents = texts()
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_bert(folder)
        li.patch("sentence-transformers")
        model = MultiVectorEncoder(folder)  # in earnest: "answerdotai/ModernBERT-base"

        train = Dataset.from_dict({"query": queries[HELD_OUT:], "document": documents[HELD_OUT:]})
        evaluator = MultiVectorInformationRetrievalEvaluator(
            queries={str(i): queries[i] for i in range(HELD_OUT)},
            corpus={str(i): documents[i] for i in range(CORPUS)},
            relevant_docs={str(i): {str(i)} for i in range(HELD_OUT)},
        )
        before = evaluator(model)[evaluator.primary_metric]

        args = MultiVectorEncoderTrainingArguments(
            output_dir=f"{folder}/run",
            per_device_train_batch_size=options.batch,  # all of it are negatives: 1024 and more
            max_steps=options.steps,
            learning_rate=2e-3,  # of random weights; 1e-5 to 3e-5 for a checkpoint
            batch_sampler="no_duplicates",  # no query's document is another one's negative
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        loss = CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=16)  # what fits the GPU
        trainer = MultiVectorEncoderTrainer(model=model, args=args, train_dataset=train, loss=loss)
        trainer.train()

        model.save_pretrained(f"{folder}/trained")
        after = evaluator(MultiVectorEncoder(f"{folder}/trained"))[evaluator.primary_metric]
    print(f"calls on these kernels: {li.patched()['sentence-transformers'].served}")
    print(f"held-out {evaluator.primary_metric}: {before:.4f} before, {after:.4f} after")


if __name__ == "__main__":
    main()
