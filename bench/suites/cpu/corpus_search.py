"""The CPU suite of searches: the ten best documents of a corpus, by the engines that hold multi-vector
documents in this process. All calls take turns, with all threads and in one thread, each after one of its own
that is not timed: compare figures within one run only. Each corpus and table is there before; a query comes
as each engine takes it."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench.harness.inputs import INT8, draw
from bench.harness.library import LANCEDB, NUMKONG, OURS, QDRANT
from bench.harness.parity import SCORES, relative_error
from bench.harness.results import Results, Row, new_row
from bench.harness.shape import Shape
from bench.harness.text import error_text, number
from bench.suites.cpu.calls import Call, time_interleaved

SUITE = "cpu-corpus"

ONE_THREAD = "one thread"
VARIANTS = (None, ONE_THREAD)
PEERS = (QDRANT, LANCEDB, NUMKONG)
# How a corpus stores its tokens. Residuals have 2 bits, and centroids that are trained on a few documents.
DTYPES = (torch.float32, torch.bfloat16, INT8, torch.uint8)
_BEST = 10

Found = tuple[torch.Tensor, torch.Tensor]  # scores and documents, best first
Search = Callable[[], Found]
Documents = Sequence[torch.Tensor]
Key = tuple[str, str, str | None]  # implementation, dtype, variant


def _corpus(documents: Documents, dtype: torch.dtype, folder: str) -> Any:
    lib = importlib.import_module("late_interaction.corpus")
    codecs = importlib.import_module("late_interaction.codecs")
    if dtype == torch.uint8:
        sample = torch.cat(tuple(documents[:200]))
        trained = codecs.Residual.train(sample, min(1024, len(sample) // 8), normalize=True)
        stored = {"codec": trained}
    elif dtype == torch.int8:
        stored = {"codec": codecs.Int8()}
    else:
        stored = {"codec": codecs.Fp8()} if dtype == torch.float8_e4m3fn else {"dtype": dtype}
    with lib.Corpus.create(folder, d=documents[0].shape[1], normalize=True, **stored) as builder:
        builder.add(list(documents))
    return lib.Corpus.open(folder)


def _qdrant(documents: Documents, Q: torch.Tensor, folder: str) -> Search:
    """Local mode, in memory."""
    lib = importlib.import_module("qdrant_client")
    models = lib.models
    client = lib.QdrantClient(":memory:")
    multivector = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    vectors = models.VectorParams(
        size=Q.shape[1], distance=models.Distance.DOT, multivector_config=multivector
    )
    client.create_collection("documents", vectors_config=vectors)
    points = [models.PointStruct(id=i, vector=x.tolist()) for i, x in enumerate(documents)]
    client.upsert("documents", points)
    query = Q.tolist()

    def search() -> Found:
        found = client.query_points("documents", query=query, limit=_BEST).points
        return torch.tensor([x.score for x in found]), torch.tensor([x.id for x in found])

    return search


def _lancedb(documents: Documents, Q: torch.Tensor, folder: str) -> Search:
    """A table without an index, on disk. Its distances are of cosines, one a query token, added up."""
    lib, pa = importlib.import_module("lancedb"), importlib.import_module("pyarrow")
    vectors = pa.array([x.tolist() for x in documents], pa.list_(pa.list_(pa.float32(), Q.shape[1])))
    data = pa.table({"id": list(range(len(documents))), "vector": vectors})
    table = lib.connect(folder).create_table("documents", data)
    query = Q.numpy()

    def search() -> Found:
        found = table.search(query).distance_type("cosine").limit(_BEST).to_arrow()
        distances = torch.tensor(found["_distance"].to_pylist())
        return len(Q) - distances, torch.tensor(found["id"].to_pylist())

    return search


def _numkong(documents: Documents, Q: torch.Tensor, folder: str) -> Search:
    """No engine: one document a call, and a sort by PyTorch. Distances are 1 minus a similarity each."""
    lib = importlib.import_module("numkong")
    packed = [lib.maxsim_pack(x.numpy(), "f32") for x in documents]
    query = lib.maxsim_pack(Q.numpy(), "f32")

    def search() -> Found:
        scores = len(Q) - torch.tensor([lib.maxsim_packed(query, x) for x in packed])
        found = scores.topk(_BEST)
        return found.values, found.indices

    return search


_SEARCHES = {QDRANT: _qdrant, LANCEDB: _lancedb, NUMKONG: _numkong}


def _prepared(
    name: str, dtype: torch.dtype, documents: Documents, Q: torch.Tensor, folder: str
) -> tuple[Search, Documents]:
    """A search, and the documents as it has them."""
    if name != OURS:
        return _SEARCHES[name](documents, Q, folder), documents
    corpus = _corpus(documents, dtype, folder)
    return lambda: corpus.search(Q, _BEST, normalize=True), corpus


def _scores(documents: Documents, Q: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize
    Q = unit(Q.double(), dim=-1)
    return torch.stack([(Q @ unit(x.double(), dim=-1).T).amax(1).sum() for x in documents])


def _problem(found: Found, wanted: torch.Tensor) -> str | None:
    """The documents that were found are the best, with these scores."""
    scores, documents = found
    error = relative_error(scores, wanted[documents])
    if error > SCORES:
        return f"parity: relative error {error:.2g}"
    worst = wanted.topk(_BEST).values[-1]
    missed = int((wanted[documents] < worst - SCORES * worst.abs()).sum())
    return f"parity: {missed} of the documents found are not the best" if missed else None


def _in_one_thread(call: Call) -> Call:
    threads = torch.get_num_threads()

    def run() -> object:
        torch.set_num_threads(1)
        try:
            return call()
        finally:
            torch.set_num_threads(threads)

    return run


def measure(shape: Shape, rounds: int) -> list[Row]:
    x = draw(shape, torch.device("cpu"), torch.float32)
    Q, documents = x.Q[0], list(torch.nn.functional.normalize(x.D, dim=-1))
    rows: dict[Key, Row] = {}
    calls: dict[Key, Call] = {}
    with ExitStack() as folders:
        for name, dtype in [*((OURS, dtype) for dtype in DTYPES), *((name, torch.float32) for name in PEERS)]:
            row = new_row(SUITE, shape, "search", dtype, name)
            key = name, str(row["dtype"]), None
            rows[key] = row
            folder = folders.enter_context(tempfile.TemporaryDirectory())
            try:
                search, stored = _prepared(name, dtype, documents, Q, str(Path(folder) / "documents"))
                if problem := _problem(search(), _scores(stored, Q)):
                    row["error"] = problem
                calls[key] = search
            except ImportError:
                row["skipped"] = "not installed"
            except Exception as error:  # recorded in the row
                row["error"] = error_text(error)
            if name == OURS and key in calls:
                alone = name, key[1], ONE_THREAD
                rows[alone], calls[alone] = {**row, "variant": ONE_THREAD}, _in_one_thread(search)
        for key, seconds in time_interleaved(calls, rounds, warm=True).items():
            rows[key]["wall_us"] = 1e6 * seconds
    return list(rows.values())


def line(rows: Sequence[Row]) -> str:
    first, parts = rows[0], []
    for row in rows:
        what = " ".join(str(row[k]) for k in ("impl", "dtype", "variant") if row.get(k))
        told = f"{number(row['wall_us'] / row['Nd'])} us" if row["wall_us"] else "not measured"
        problem = row.get("error") or row.get("skipped")
        parts.append(f"{what} {told}" + (f" ({problem[:60]})" if problem else ""))
    return f"cpu {first['shape']} search, a candidate: " + " | ".join(parts)


def run(results: Results, shapes: Sequence[Shape], rounds: int, log: Callable[[str], None]) -> None:
    for shape in shapes:
        rows = measure(shape, rounds)
        results.add(rows)
        log(line(rows))
