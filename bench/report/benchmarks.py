"""The generated part of docs/benchmarks.md: every library beside the others, from the recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.harness.library import EINSUM, SENTENCE_TRANSFORMERS
from bench.harness.results import Row, device_of, is_whole, of_a_cpu, read, records, split
from bench.report import end_to_end, sentence_transformers, tables
from bench.report.tables import section
from bench.suites import first_call, pairs, plaid, retrieval, smooth, varlen, xtr

_BESIDE_PEER = (
    (
        "Packed sequences.",
        varlen.SUITE,
        "`maxsim_varlen`: lengths up to Lq and Ld, short ones more often; `padded`: `maxsim_padded`, each"
        " query with documents of its own.",
    ),
    (
        "Listed pairs.",
        pairs.SUITE,
        "`score_pairs_packed`: each of 10,000 documents with one of 100 queries; all pairs of a dense batch,"
        " and a tenth of those. One query: `rerank_direct`, documents in no order.",
    ),
    ("Residual-compressed documents.", plaid.SUITE, "65,536 centroids, random codes."),
    ("The best 100 documents.", retrieval.SUITE, ""),
)


def _gpu(record: Sequence[Row]) -> list[str]:
    headers, rows = split(record)
    parts = section(
        "Forward, no gradient.",
        "Microseconds, GPU time / wall time (call + synchronize). `floor` is the larger of FLOPs over "
        "cuBLAS' rate and bytes over that of a large read, both measured in the same run.",
        tables.forward_table(record),
    )
    parts += section(
        "Forward and both gradients.",
        "The fastest gradient strategy of each library. `skewed`: our GPU time when a few document tokens "
        "win most (winner index Ld x u^4).",
        tables.training_table(record),
    )
    parts += section("Peak memory of that step.", "MiB above the inputs.", tables.memory_table(rows))
    parts += section(
        "Short documents, no gradient.",
        "As the first table, of documents of 1 to 64 tokens.",
        tables.forward_table(record, "short"),
    )
    parts += section(
        "Short documents, forward and both gradients.",
        "As the second table.",
        tables.training_table(record, "short-steps"),
    )
    parts += section(
        "Whole losses, forward and backward.",
        "Microseconds of one after another, by events / peak MiB: colpali-engine's explicit-negative heads,"
        " which are the same without an in-batch term, and PyLate's contrastive loss, in chunks of 32 x 32.",
        tables.heads_table(rows),
    )
    parts += section(
        "XTR scores, forward and both gradients.",
        "GPU / wall microseconds / peak MiB, results included. Each query token selects the k largest of its"
        ' similarities with all document tokens (`rule="paper"`). `maxsim` is our step on the same inputs;'
        " Sentence Transformers builds the grid of all similarities, in bfloat16, and is written out here"
        " without its masks.",
        tables.beside_maxsim_table(rows, xtr.SUITE, xtr.ALL[1:], "xtr_scores", SENTENCE_TRANSFORMERS),
    )
    parts += section(
        "Smooth maximum, forward and both gradients.",
        "GPU / wall microseconds / peak MiB, results included, with `tau=0.1`. PyTorch builds all"
        " similarities by one einsum.",
        tables.beside_maxsim_table(rows, smooth.SUITE, (smooth.SMOOTH,), "smooth_maxsim", EINSUM),
    )
    parts += section(
        "Scores from hidden states.",
        "GPU / wall microseconds / peak MiB, results included, of projecting d_model = 768 to d = 128, "
        "normalizing and scoring.",
        tables.hidden_table(rows),
    )
    for title, suite, note in _BESIDE_PEER:
        table = tables.beside_peer_table(rows, suite)
        parts += section(title, f"{note} GPU / wall microseconds.".strip(), table)
    parts += section(
        "The best 100 documents of a corpus in the host's memory,", "beside one copy from pinned memory.",
        tables.host_table(rows),
    )  # fmt: skip
    parts += section(
        "First call in a fresh process.",
        "The import of the library and its first call, with CUDA initialised and PyTorch's own first "
        "backward done; of Triton's kernels with an empty cache on disk (cold) and with the cache just made "
        f"(warm). The median of {first_call.SAMPLES} processes, of cold caches one.",
        tables.first_call_table(rows),
    )
    return [f"## On one {device_of(headers)}", *parts, tables.stamp(headers)] if parts else []


def _cpu(rows: Sequence[Row]) -> list[str]:
    headers, measured = split(rows)
    of = f"{headers[0]['cpu']}, {headers[0]['threads']} threads"
    note = "GFLOP/s; implementations take turns, so read each row as ratios. NumKong takes one"
    note += " document a call, in one thread; its release 7.8.6 ranks tokens by int8 codes without their"
    note += " scales. Wrong: scores are off by over 1%."
    parts = section(f"{of}.", note, tables.cpu_table(measured))
    each = "GFLOP/s of the forward with each instruction set that the CPU has, one run."
    parts += section(f"{of}, by instruction set.", each, tables.instruction_set_table(measured))
    threads = "GFLOP/s of the forward in calls without a pause: of documents from memory, and of one document"
    threads += " as often, which stays in the caches. GB/s are those of documents from memory."
    parts += section(f"{of}, more and more of them.", threads, tables.threads_table(measured))
    small = "Microseconds of wall time of a bfloat16 call 5 ms after the one before, when the threads of"
    small += " PyTorch's pool sleep. Calls of under a million multiply-adds take one thread."
    parts += section(f"{of}, small calls.", small, tables.small_calls_table(measured))
    searches = "Microseconds a candidate: the ten best of 2,000 documents of 100 tokens for a query of"
    searches += " 32, d = 128. qdrant-client in its local mode, LanceDB embedded and without an index;"
    searches += " NumKong scores a document a call and takes one thread. Wrong: scores are off by over 1%."
    parts += section(f"{of}, search of a corpus.", searches, tables.corpus_table(measured))
    return [*parts, tables.stamp(headers)] if parts else []


def build(directory: Path) -> str:
    """The Markdown between the markers."""
    parts: list[str] = []
    for path in records(directory):
        rows = read(path)
        if of_a_cpu(path):
            parts += _cpu(rows)
        elif is_whole(rows):
            parts += _gpu(rows)
    parts += sentence_transformers.build(directory)
    parts += end_to_end.build(directory)
    return "\n\n".join(parts) if parts else "No run is recorded yet."
