"""The CPU suite of searches: the ten best documents of a corpus, by the engines that hold multi-vector
documents in this process. All calls take turns, with all threads and in one thread, each after one of its
own that is not timed: compare figures within one run only. Each corpus and table is there before; a query
comes as each engine takes it."""

import importlib
import tempfile
from functools import cache, partial

import torch
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.inputs import INT8, draw
from bench.harness.library import LANCEDB, NUMKONG, OURS, QDRANT
from bench.harness.parity import SCORES
from bench.suites.cpu import CPU, in_turns
from bench.tuning.engines import lance_table, qdrant_client
from late_interaction import codecs
from late_interaction._doctor.checks import relative_error

ONE_THREAD = "one thread"
VARIANTS = (None, ONE_THREAD)
PEERS = (QDRANT, LANCEDB, NUMKONG)
# How a corpus stores its tokens. Residuals have 2 bits, and centroids that are trained on a few documents.
DTYPES = (torch.float32, torch.bfloat16, INT8, torch.uint8)
BEST = 10


def _corpus(documents, dtype, folder):
    stored = {"dtype": dtype}
    if dtype == torch.uint8:
        sample = torch.cat(tuple(documents[:200]))
        stored = {"codec": codecs.Residual.train(sample, min(1024, len(sample) // 8), normalize=True)}
    elif dtype == INT8:
        stored = {"codec": codecs.Int8()}
    with li.Corpus.create(folder, d=documents[0].shape[1], normalize=True, **stored) as builder:
        builder.add(list(documents))
    return li.Corpus.open(folder)


def _qdrant(documents, Q, folder):
    """Local mode, in memory."""
    client = qdrant_client(documents, location=":memory:")
    query = Q.tolist()

    def search():
        found = client.query_points("documents", query=query, limit=BEST).points
        return torch.tensor([x.score for x in found]), torch.tensor([x.id for x in found])

    return search


def _lancedb(documents, Q, folder):
    """A table without an index, on disk. Its distances are of cosines, one a query token, added up."""
    table = lance_table(documents, folder)
    query = Q.numpy()

    def search():
        found = table.search(query).distance_type("cosine").limit(BEST).to_arrow()
        distances = torch.tensor(found["_distance"].to_pylist())
        return len(Q) - distances, torch.tensor(found["id"].to_pylist())

    return search


def _numkong(documents, Q, folder):
    """No engine: one document a call, and a sort by PyTorch. Distances are 1 minus a similarity each."""
    lib = importlib.import_module("numkong")
    query, *packed = (lib.maxsim_pack(x.numpy(), "f32") for x in (Q, *documents))

    def search():
        scores = len(Q) - torch.tensor([lib.maxsim_packed(query, x) for x in packed])
        found = scores.topk(BEST)
        return found.values, found.indices

    return search


_SEARCHES = {QDRANT: _qdrant, LANCEDB: _lancedb, NUMKONG: _numkong}


def _scores(documents, Q):
    Q = normalize(Q.double(), dim=-1)
    return torch.stack([(Q @ normalize(x.double(), dim=-1).T).amax(1).sum() for x in documents])


def problem(found, wanted):
    """Why the documents that were found are not the best, with these scores; None if they are."""
    scores, documents = found
    error = relative_error(scores, wanted[documents])
    if error > SCORES:
        return f"parity: relative error {error:.2g}"
    worst = wanted.topk(BEST).values[-1]
    missed = int((wanted[documents] < worst - SCORES * worst.abs()).sum())
    return f"parity: {missed} of the documents found are not the best" if missed else None


def _in_one_thread(call):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return call()
    finally:
        torch.set_num_threads(threads)


def measure(b):
    x = draw(b.shape, CPU, torch.float32)
    Q, documents = x.Q[0], list(normalize(x.D, dim=-1))
    rows = [b.row(OURS, "search", variant, dtype) for dtype in DTYPES for variant in VARIANTS]
    rows += [b.row(name, "search", None, torch.float32) for name in PEERS]
    with tempfile.TemporaryDirectory() as folder:

        @cache
        def search_of(name, dtype):
            """A search, and what is wrong with it."""
            place, stored = f"{folder}/{name}-{dtype}", documents
            if name == OURS:
                stored = _corpus(documents, getattr(torch, dtype), place)
                search = partial(stored.search, Q, BEST, normalize=True)
            else:
                search = _SEARCHES[name](documents, Q, place)
            return search, problem(search(), _scores(stored, Q))

        def prepare(row):
            search, wrong = search_of(row["impl"], row["dtype"])
            row |= {"error": wrong} if wrong else {}
            return partial(_in_one_thread, search) if row.get("variant") else search, None

        return in_turns(b, rows, prepare, warm=True)
