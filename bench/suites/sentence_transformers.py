"""Sentence Transformers' multi-vector models with and without the patch, on one device.

Two kinds of work, each with the patch on and with it off (LATE_INTERACTION_DISABLE=1: then every call runs
Sentence Transformers' own code), interleaved, in one process:

- a training step of each multi-vector loss: forward and backward of the loss alone, from token embeddings
  that are given, because the encoder is the same in both;
- retrieval evaluation: scoring and ranking of embeddings that are given (bench/suites/st_evaluation.py).

Before anything is timed, both ways must agree: a step's loss and gradients on the batch's first queries in
float32, an evaluation's metrics. A time is the median of warm, synchronized calls; of calls that take over 20
seconds it is that of the first, and one that takes over `--limit` seconds is given up. Peak memory is what a
call allocates above what was there (GPUs alone). A way that runs out of memory has "out of memory" for a
time.

    python -m bench st                                     # everything
    python -m bench st --only losses --batches 32 256
    python -m bench st --only evaluation --corpora nano 5000x100k --limit 60
    python -m bench st --out bench/results/st-nvidia-h200.json     # recorded: `report` makes a table of it
    python -m bench st --dry-run                           # tiny shapes, without a GPU
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.ceilings import Ceilings
from bench.harness.results import Row
from bench.harness.run_header import new_header, package_version
from bench.harness.text import align, error_text, number
from bench.harness.with_and_without import WITH, WITHOUT, interleaved, patched
from bench.harness.work_record import WorkRecord
from bench.suites import st_evaluation

Keep = Callable[[Row], None]
D = 128
QUERY, DOCUMENT = 32, 300  # tokens in training
WAYS = 8  # documents of a query in distillation
CHECKED = 16  # queries whose gradients are compared
# Relative error of a loss and of gradients in float32: some ties are won by another token.
SAME = 1e-3
BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
CPU_BATCHES = (32, 64, 128, 256)  # of 512, the similarities that PyTorch keeps are over 20 GB


# ---- training ----


class Given(torch.nn.Module):
    """An encoder whose embeddings are its features."""

    def forward(self, features: dict[str, Any], task: str | None = None) -> dict[str, Any]:
        return {key: features[key] for key in ("token_embeddings", "attention_mask")}


def column(rows: int, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tokens = normalize(torch.randn(rows, length, D, device=device), dim=-1).to(dtype)
    lengths = torch.randint(length // 2, length + 1, (rows, 1), device=device)
    mask = torch.arange(length, device=device) < lengths
    return {"token_embeddings": tokens, "attention_mask": mask}


def losses() -> dict[str, tuple[Callable[[], Any], int]]:
    """Each loss, and how many documents a query has."""
    module = __import__("sentence_transformers.multi_vector_encoder.losses", fromlist=["losses"])
    mnrl = module.MultiVectorMultipleNegativesRankingLoss
    cached = module.CachedMultiVectorMultipleNegativesRankingLoss
    return {
        "MultipleNegativesRanking": (lambda: mnrl(Given()), 1),
        "CachedMultipleNegativesRanking": (lambda: cached(Given(), mini_batch_size=32), 1),
        "DistillKLDiv": (lambda: module.MultiVectorDistillKLDivLoss(Given()), WAYS),
        "MarginMSE": (lambda: module.MultiVectorMarginMSELoss(Given()), 2),
    }


def step(
    loss: Any, columns: Sequence[dict[str, torch.Tensor]], labels: torch.Tensor | None
) -> list[torch.Tensor]:
    """The loss, and the gradients of all embeddings."""
    leaves = [{**x, "token_embeddings": x["token_embeddings"].detach().requires_grad_()} for x in columns]
    value = loss(leaves, labels)
    value.backward()
    gradients = [x["token_embeddings"].grad for x in leaves]
    return [value.detach(), *(g for g in gradients if g is not None)]


def disagreement(loss: Any, columns: Sequence[dict[str, torch.Tensor]], labels: torch.Tensor | None) -> float:
    """The largest relative error between the two ways, on the first queries in float32."""
    few = [
        {
            "token_embeddings": x["token_embeddings"][:CHECKED].float(),
            "attention_mask": x["attention_mask"][:CHECKED],
        }
        for x in columns
    ]
    found = []
    for way in (WITH, WITHOUT):
        with patched(way):
            found.append(step(loss, few, None if labels is None else labels[:CHECKED]))
    errors = ((a - b).norm() / b.norm().clamp_min(1e-9) for a, b in zip(*found, strict=True))
    return max(float(x) for x in errors)


def measure_losses(args: argparse.Namespace, device: torch.device, keep: Keep) -> list[Row]:
    rows = []
    for name, (build, documents) in losses().items():
        for batch in args.batches:
            row: Row = {"work": name, "batch": batch, "documents": documents}
            try:
                columns = [column(batch, args.query, device, args.dtype)]
                columns += [column(batch, args.document, device, args.dtype) for _ in range(documents)]
                labels = torch.randn(batch, documents, device=device) if documents > 1 else None
                loss = build()
                row["disagreement"] = disagreement(loss, columns, labels)
                if row["disagreement"] > SAME:
                    raise ValueError(f"the two ways disagree by {row['disagreement']:.2g}: not timed")

                def call(loss: Any = loss, columns: Any = columns, labels: Any = labels) -> Any:
                    return step(loss, columns, labels)

                row |= interleaved({WITH: call, WITHOUT: call}, device, args.rounds)
            except Exception as error:
                row["error"] = error_text(error)
            columns = []
            rows.append(show(row))
            keep(row)
    return rows


# ---- the program ----


def show(row: Row) -> Row:
    cells = [str(row["work"]), str(row["batch"])]
    for way in (WITHOUT, WITH):
        cells.append(f"{way} {row.get(f'{way}_error') or number(row.get(f'{way}_ms'))} ms")
        cells.append(f"{number(row.get(f'{way}_peak_mib'))} MiB")
    if row.get("with_ms") and row.get("without_over_ms"):
        row["speedup_over"] = row["without_over_ms"] / row["with_ms"]
    if row.get("with_ms") and row.get("without_ms"):
        row["speedup"] = row["without_ms"] / row["with_ms"]
        cells.append(f"{row['speedup']:.2f}x")
    print(" | ".join(cells) + (f" | {row['error']}" if "error" in row else ""), flush=True)
    return row


def _speedup(row: Row) -> str:
    return f"over {row['speedup_over']:.1f}" if row.get("speedup_over") else number(row.get("speedup"))


def table(rows: Sequence[Row]) -> str:
    head = ["work", "batch", "without ms", "with ms", "speedup", "without MiB", "with MiB", "disagreement"]
    body = [
        [
            str(row["work"]), str(row["batch"]),
            row.get("without_error") or row.get("error") or number(row.get("without_ms")),
            row.get("with_error") or row.get("error") or number(row.get("with_ms")),
            _speedup(row), number(row.get("without_peak_mib")), number(row.get("with_peak_mib")),
            f"{row['disagreement']:.1e}" if "disagreement" in row else "-",
        ]
        for row in rows
    ]  # fmt: skip
    return align(head, body)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: by the device")
    parser.add_argument("--only", choices=["losses", "evaluation"])
    parser.add_argument("--batches", type=int, nargs="+", help="queries of a training step")
    parser.add_argument(
        "--corpora",
        choices=[*st_evaluation.NAMES],
        nargs="+",
        help="of the evaluation; default: by the device",
    )
    parser.add_argument("--limit", type=float, help="seconds that an evaluation may take")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each way")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes: whether it runs at all")
    parser.add_argument("--out", type=Path, help="a record, written row by row; others of its rows stay")


def _shapes(args: argparse.Namespace) -> None:
    """What the device measures, where the arguments do not say."""
    on_gpu = torch.device(args.device).type == "cuda"
    args.dtype = getattr(torch, args.dtype or ("bfloat16" if on_gpu else "float32"))
    args.query, args.document = QUERY, DOCUMENT
    args.corpora = args.corpora or (st_evaluation.NAMES if on_gpu else st_evaluation.ON_CPU)
    args.batches = args.batches or (BATCHES if on_gpu else CPU_BATCHES)
    if args.dry_run:
        args.query, args.document, args.rounds, args.batches = 4, 9, 1, (4,)
        args.corpora = [*st_evaluation.TINY]


def measure(args: argparse.Namespace) -> list[Row]:
    """The rows, printed as they come and as a table."""
    _shapes(args)
    device = torch.device(args.device)
    os.environ.setdefault("LIK_SUPPRESS_NORM_WARN", "1")
    torch.manual_seed(0)
    top = new_header(
        device, Ceilings(), sys.argv[1:], dtype=str(args.dtype), query=args.query, document=args.document,
        packages={name: package_version(name) for name in ("sentence-transformers", "transformers")},
    )  # fmt: skip
    keep = WorkRecord(args.out, top).keep if args.out else lambda row: None
    li.patch("sentence-transformers")
    try:
        rows = [] if args.only == "evaluation" else measure_losses(args, device, keep)
        rows += [] if args.only == "losses" else st_evaluation.measure(args, device, show, keep)
    finally:
        li.unpatch("sentence-transformers")
    print(table(rows))
    return rows


def run(args: argparse.Namespace) -> int:
    measure(args)
    return 0
