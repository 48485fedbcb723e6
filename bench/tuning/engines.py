"""Index or exact search: what engines of multi-vector search build, take and find, beside this library.

    python -m bench engines --device cpu --tokens descriptions.pt --out bench/results/engines-cpu.txt

Texts are Debian's package descriptions: the first line is the query, the rest is the document, and embeddings
are all-MiniLM-L6-v2's, turned to 128 dims by a fixed orthogonal matrix, in float16 for every engine.
Documents beyond --real are planted: the tokens of real ones with noise. Recall is the share of the ten best
documents of an exact search of these tokens, whose sums are float32. On a GPU our corpus is copied there.
`build s` begins with tokens in memory and ends behind the first query, which may still make something; MB are
those of the folder then, with all settings so far. `one` is the median of single queries, `batch` the time of
all of them in one call. Settings other than those named are each engine's own.
"""

import lzma
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.run_header import add_table_arguments, keep_text, package_version
from late_interaction._doctor.text import align, error_text, number
from late_interaction._doctor.timing import wall_seconds

SOURCE = "http://deb.debian.org/debian/dists/bookworm/main/i18n/Translation-en.xz"
DIM, LONGEST, TOP = 128, 128, 10
NOISE = 0.5  # beside a real token's norm of 1
AT_ONCE = 20_000  # documents that are planted together

Tokens = list[Tensor]
Search = Callable[[Tokens], Sequence[Sequence[int]]]
Settings = dict[str, Search]


# ---- texts and their tokens ----


def descriptions(sources):
    """Return (first line, rest) of every description that has a rest, each rest once."""
    found = {}
    for entry in chain.from_iterable(map(_entries, sources)):
        head, _, body = entry.partition("Description-en: ")
        query, _, rest = body.partition("\n")
        document = " ".join(word for word in rest.split() if word != ".")
        if head and query and document:
            found.setdefault(document, query)
    return [(query, document) for document, query in found.items()]


def _entries(source):
    with urllib.request.urlopen(source, timeout=60) as response:
        return lzma.decompress(response.read()).decode().split("\n\n")


def encoded(count, queries, device, kept, sources):
    """Return the tokens of `queries` first lines and of `count` documents. `kept`: a file that keeps them."""
    if kept is not None and kept.exists():
        saved = torch.load(kept)
        if len(saved["documents"]) >= count and len(saved["queries"]) >= queries:
            return saved["queries"][:queries], saved["documents"][:count]
    from demo.encode import Encoder

    pairs = descriptions(sources)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(pairs), generator=generator)[:count].tolist()
    model = Encoder(torch.device(device)).model
    model.max_seq_length = LONGEST
    turn = torch.nn.init.orthogonal_(torch.empty(DIM, 384), generator=generator).to(device)

    def encode(texts, task):
        tokens = task(texts, batch_size=64 if device == "cpu" else 512, show_progress_bar=True)
        return [normalize(x.to(device).float() @ turn.T, dim=-1).half().cpu() for x in tokens]

    Q = encode([pairs[i][0] for i in order[:queries]], model.encode_query)
    D = encode([pairs[i][1] for i in order], model.encode_document)
    if kept is not None:
        torch.save({"queries": Q, "documents": D}, kept)
    return Q, D


def planted(documents, count, device):
    """Return `count` further documents: noisy copies of real ones, in a file: they may exceed memory."""
    generator = torch.Generator(device).manual_seed(1)
    chosen = torch.randint(len(documents), (count,), generator=generator, device=device).tolist()
    size = sum(len(documents[i]) for i in chosen)
    with tempfile.NamedTemporaryFile() as file:
        kept = torch.from_file(file.name, shared=True, size=max(size, 1) * DIM, dtype=torch.float16)
    found, kept = [], kept.view(-1, DIM)
    for start in range(0, count, AT_ONCE):
        originals = [documents[i] for i in chosen[start : start + AT_ONCE]]
        tokens = torch.cat(originals).to(device, torch.float32)
        noise = torch.randn(tokens.shape, generator=generator, device=device) * (NOISE / DIM**0.5)
        here, kept = kept.tensor_split([len(tokens)])
        here.copy_(normalize(tokens + noise, dim=-1))
        found += here.split([len(x) for x in originals])
    return found


def corpus_of(documents, folder, device, **options):
    """Return a corpus in a folder, whose documents are encoded on the device."""
    with li.Corpus.create(folder, d=DIM, **options) as builder:
        for start in range(0, len(documents), AT_ONCE):
            some = documents[start : start + AT_ONCE]
            builder.add(torch.cat(some).to(device).split([*map(len, some)]))
    return li.Corpus.open(folder)


# ---- engines: what builds an index in a folder, and returns a search by each of its settings ----


def ours(codec, *passes):
    """Return what builds a corpus of a codec and searches it: exactly, and after first passes."""

    def build(documents, folder, device):
        options = {"dtype": torch.float16}
        if codec == "int8":
            options = {"codec": li.codecs.Int8()}
        elif codec == "residual":
            sample = torch.cat(documents[:: max(1, len(documents) // 2000)]).float()
            dtype = torch.float32 if device == "cpu" else torch.float16  # GPUs have tensor cores for it
            count = min(8192, len(sample) // 8)
            options = {"codec": li.codecs.Residual.train(sample.to(device), count, dtype=dtype)}
        corpus = corpus_of(documents, folder, device, **options).to(device)

        def at(**more):
            def search(Q):
                result = corpus.search([q.to(device) for q in Q], TOP, **more)
                return result.indices.tolist()

            return search

        pairs = [(coarse, n) for coarse in passes for n in (30, 100, 300)]
        rough = {f"{coarse}, {n}": at(coarse=coarse, candidates=n) for coarse, n in pairs}
        return {"exact": at(), **rough}

    return build


def fast_plaid(documents, folder, device):
    """Four bits, as is its default, and more of the lists that a query token probes."""
    from fast_plaid.search import FastPlaid

    index = FastPlaid(folder, device=device)
    index.create(documents)

    def at(probes):
        return lambda Q: [
            [i for i, _ in found]
            for found in index.search(Q, top_k=TOP, n_ivf_probe=probes, show_progress=False)
        ]

    return {f"probe {n}": at(n) for n in (8, 16, 32)}


def xtr_warp(documents, folder, device):
    from xtr_warp.search import XTRWarp

    index = XTRWarp(folder)
    index.create(documents, device=device, show_progress=False)
    index.load(device)
    threads = torch.get_num_threads()

    def at(**more):
        return lambda Q: [
            [i for i, _ in found]
            for found in index.search(Q, TOP, num_threads=threads, show_progress=False, **more)
        ]

    return {"its choice": at(), "probe 32": at(nprobe=32)}


def lance_table(documents, folder):
    """A table of LanceDB in a folder, without an index."""
    import lancedb as lib
    import numpy as np
    import pyarrow as pa

    values = pa.array(torch.cat(documents).float().flatten().numpy())
    ends = np.cumsum([0, *(len(x) for x in documents)], dtype=np.int32)
    each = pa.FixedSizeListArray.from_arrays(values, documents[0].shape[1])
    data = {"id": pa.array(range(len(documents))), "vector": pa.ListArray.from_arrays(pa.array(ends), each)}
    return lib.connect(folder).create_table("documents", pa.table(data))


def lancedb(documents, folder, device):
    table = lance_table(documents, folder)
    table.create_index(metric="cosine", vector_column_name="vector")

    def at(**more):
        def one(q):
            query = table.search(q.float().numpy()).limit(TOP).nprobes(more["nprobes"])
            query = query.refine_factor(more["refine"]) if more.get("refine") else query
            return query.to_arrow()["id"].to_pylist()

        return lambda Q: [one(q) for q in Q]

    return {"probe 20": at(nprobes=20), "probe 20, refined by 10": at(nprobes=20, refine=10)}


def qdrant_client(documents, **place):
    """Qdrant's local mode, which is exact and in Python; the server has an index."""
    import qdrant_client as lib

    models = lib.models
    client = lib.QdrantClient(**place)
    maximum = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    options = {"distance": models.Distance.DOT, "multivector_config": maximum}
    vectors = models.VectorParams(size=documents[0].shape[1], **options)
    client.create_collection("documents", vectors_config=vectors)
    for start in range(0, len(documents), 1000):
        part = enumerate(documents[start : start + 1000], start)
        client.upsert("documents", [models.PointStruct(id=i, vector=x.tolist()) for i, x in part])
    return client


def qdrant(documents, folder, device):
    client = qdrant_client(documents, path=folder)

    def search(Q):
        found = (client.query_points("documents", query=q.tolist(), limit=TOP).points for q in Q)
        return [[x.id for x in points] for points in found]

    return {"exact": search}


class Engine(NamedTuple):
    """A distribution, what builds its index, and the most documents it is given."""

    distribution: str
    build: Callable[[Tokens, str, str], Settings]
    most: int = 1 << 60


ENGINES = {
    "ours, float16": Engine("late-interaction", ours("float16")),
    "ours, int8": Engine("late-interaction", ours("int8", "bits", "muvera")),
    "ours, residual": Engine("late-interaction", ours("residual", "centroids")),
    "fast-plaid": Engine("fast-plaid", fast_plaid),
    "xtr-warp": Engine("xtr-warp-rs", xtr_warp),
    "LanceDB": Engine("lancedb", lancedb),
    "Qdrant, local": Engine("qdrant-client", qdrant, 20_000),
}


# ---- measuring ----


def rated(search, Q, exact, device):
    """Return milliseconds of one query and of all, and the recall."""
    found, here = search(Q), torch.device(device)  # warm
    one = statistics.median(wall_seconds(partial(search, [q]), here) for q in Q)
    batch = min(wall_seconds(partial(search, Q), here) for _ in range(3))
    return 1e3 * one, 1e3 * batch, li.evaluate_recall(found, exact, k=TOP)[TOP]


def rows_of(name, Q, D, exact, device):
    """Build an engine's index, and yield a row for each of its settings."""
    engine = ENGINES[name]
    version = package_version(engine.distribution)
    if not name.startswith("ours") and version is None:
        yield [name, "not installed"]
        return
    if len(D) > engine.most:
        yield [name, f"left out beyond {engine.most:,} documents"]
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "index"
        start = time.perf_counter()
        try:
            settings = engine.build(D, str(folder), device)
            built = time.perf_counter() - start
            for setting, search in settings.items():
                # Some make what they need then.
                made = wall_seconds(partial(search, Q[:1]), torch.device(device))
                size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                figures = [built + made, size / 1e6, *rated(search, Q, exact, device)]
                yield [name, setting, *map(number, figures[:-1]), f"{figures[-1]:.3f}"]
        except Exception as error:  # an engine that fails is a row
            yield [name, error_text(error)[:60]]


def draw(rows, path, title):
    """Plot milliseconds of one query against recall, an engine a colour."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(8.0, 5.0), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    series = {}
    for name, setting, _, _, one, _, recall in rows:
        kind = f"{name}, {setting.partition(',')[0]}" if name.startswith("ours") else name
        series.setdefault(kind, []).append((float(one.replace(",", "")), float(recall)))
    for kind, points in series.items():
        marker = "o" if kind.startswith("ours") else "s"
        axes.plot(*zip(*sorted(points), strict=True), marker=marker, label=kind)
    axes.set(xscale="log", xlabel="milliseconds of one query", ylabel=f"share of the {TOP} best documents")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


def add_arguments(p):
    add_table_arguments(p, documents=10_000, queries=32)
    p.add_argument("--real", type=int, default=10_000, help="at most so many are encoded; the others planted")
    p.add_argument(
        "--texts", nargs="+", default=[SOURCE], help="URLs of descriptions of packages, as Debian's"
    )
    p.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    p.add_argument("--tokens", type=Path, help="a file that keeps the tokens of the texts")
    p.add_argument("--plot", type=Path, help="a picture of time against recall")


def run(args):
    real = min(args.documents, args.real)
    Q, D = encoded(real, args.queries, args.device, args.tokens, args.texts)
    real = len(D)
    D += planted(D, args.documents - real, args.device)
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_of(D, f"{folder}/exact", args.device, dtype=torch.float16)
        exact = corpus.search([q.to(args.device) for q in Q], 3 * TOP)
    rows = []
    try:
        for row in (row for name in args.engines for row in rows_of(name, Q, D, exact, args.device)):
            print(*row, sep="  ", flush=True)
            rows.append(row)
    except KeyboardInterrupt:  # an engine takes for ever: keep the table of those before
        print("stopped", file=sys.stderr)
    head = ["engine", "setting", "build s", "MB", "one, ms", "batch, ms", f"recall@{TOP}"]
    table = align(head, [[*row, *[""] * (len(head) - len(row))] for row in rows], left=2)
    versions = {x.distribution: package_version(x.distribution) for x in ENGINES.values()}
    sizes = f"{len(D):,} documents, of which {real:,} are real, {sum(map(len, D)):,} tokens; {len(Q)} queries"
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    keep_text(f"{sizes}\n{said}\n{table}", args)
    if args.plot:
        draw([row for row in rows if len(row) == len(head)], args.plot, sizes)
    return 0
