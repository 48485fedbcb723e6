"""From a dataset to a ColBERT model, by PyLate and Sentence Transformers' trainer on these kernels.

    python examples/train_pylate.py                        # needs pylate

A small BERT with random weights learns to find docstrings. A batch of any size is exact: the library's cached
loss encodes it in parts, and the patch scores them without storing a similarity. (PyLate and Sentence
Transformers 6 exclude each other.)
"""

from __future__ import annotations

import argparse
import tempfile

from datasets import Dataset
from letters import device, texts
from pylate import evaluation, losses, models, utils
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
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
        li.patch("pylate")
        model = models.ColBERT(folder, embedding_size=64, document_length=60, device=str(device()))

        train = Dataset.from_dict({"query": queries[HELD_OUT:], "document": documents[HELD_OUT:]})
        evaluator = evaluation.PyLateInformationRetrievalEvaluator(
            queries={str(i): queries[i] for i in range(HELD_OUT)},
            corpus={str(i): documents[i] for i in range(CORPUS)},
            relevant_docs={str(i): {str(i)} for i in range(HELD_OUT)},
        )
        before = evaluator(model)[evaluator.primary_metric]

        args = SentenceTransformerTrainingArguments(
            output_dir=f"{folder}/run",
            per_device_train_batch_size=options.batch,  # all of it are negatives: 1024 and more
            max_steps=options.steps,
            learning_rate=2e-3,  # of random weights; 1e-5 to 3e-5 for a checkpoint
            batch_sampler="no_duplicates",  # no query's document is another one's negative
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        loss = losses.CachedContrastive(model, mini_batch_size=16)  # what fits the GPU
        collator = utils.ColBERTCollator(tokenize_fn=model.tokenize)
        trainer = SentenceTransformerTrainer(
            model=model, args=args, train_dataset=train, loss=loss, data_collator=collator
        )
        trainer.train()

        model.save_pretrained(f"{folder}/trained")
        after = evaluator(models.ColBERT(f"{folder}/trained"))[evaluator.primary_metric]
    print(f"calls on these kernels: {li.patched()['pylate'].served}")
    print(f"held-out {evaluator.primary_metric}: {before:.4f} before, {after:.4f} after")


if __name__ == "__main__":
    main()
