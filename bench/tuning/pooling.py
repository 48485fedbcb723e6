"""How long documents take to be pooled.

    python -m bench pooling
    python -m bench pooling --out FILE

Documents are unit tokens around topics of their own, so that some resemble each other. Times are the least of
some rounds in turn, with what the host does before and after the kernels. Where scipy is installed, it
clusters some of the documents by Ward's method on a CPU, as PyLate and Sentence Transformers call it.
"""

import importlib
import time
from functools import partial

import torch
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.run_header import add_table_arguments, keep_text, table
from late_interaction._doctor.timing import in_turn

ROUNDS = 5
# Topics of a document, and how far its tokens lie from them.
TOPICS, NOISE = 64, 1.0
SCIPY_DOCUMENTS = 4


def draw(documents, Ld, d, device):
    torch.manual_seed(0)
    topics = torch.randn(documents, TOPICS, d, device=device)
    chosen = torch.randint(TOPICS, (documents, Ld, 1), device=device).expand(-1, -1, d)
    return normalize(topics.gather(1, chosen) + NOISE * torch.randn(documents, Ld, d, device=device), dim=-1)


def by_scipy(D, pool_factor):
    """Seconds a document of the distances and Ward's clusters."""
    hierarchy = importlib.import_module("scipy.cluster.hierarchy")
    start = time.perf_counter()
    for document in D[:SCIPY_DOCUMENTS].float().cpu():
        distances = (1 - document @ document.T).numpy()
        upper = distances[torch.triu_indices(*distances.shape, 1).unbind()]
        tree = hierarchy.linkage(upper, "ward")
        hierarchy.fcluster(tree, len(document) // pool_factor, criterion="maxclust")
    return (time.perf_counter() - start) / min(SCIPY_DOCUMENTS, len(D))


def add_arguments(p):
    add_table_arguments(p, pool_factor=2, documents=1000, Ld=1030, d=128)


def run(args):
    D = draw(args.documents, args.Ld, args.d, args.device)
    calls = {
        f"{method}, {dtype}": partial(
            li.pool_tokens, D.to(getattr(torch, dtype)), args.pool_factor, method=method, normalize=True
        )
        for dtype in ("float32", "bfloat16")
        for method in ("ward", "kmeans")
    }
    rows = []
    for name, found in in_turn(calls, torch.device(args.device), ROUNDS).items():
        each = min(found) / args.documents
        rows.append({"": name, "ms": 1e3 * min(found), "us a document": 1e6 * each, "documents/s": 1 / each})
    try:
        each = by_scipy(D, args.pool_factor)
        rows.append({"": "ward by scipy, a CPU", "us a document": 1e6 * each, "documents/s": 1 / each})
    except ImportError:
        rows.append({"": "ward by scipy, a CPU", "ms": "not installed"})
    title = f"documents {list(D.shape)}, pool factor {args.pool_factor}"
    keep_text(f"{title}\n{table(rows)}", args)
    return 0
