"""What MUVERA's encodings find beside an exact search, and how fast they are made.

    python -m bench muvera
    python -m bench muvera --demo  # the docstrings of `make demo`, by all-MiniLM-L6-v2
    python -m bench muvera --out bench/results/muvera-cpu.txt
    python -m bench muvera --device cuda --speed-documents 20000  # speeds on a GPU alone

Recall is the share of the ten best documents by exact scores that is among the candidates; `needed` is how
many candidates hold 95% of them. Planted documents are tokens around a topic of their own; ten documents for
each query are made of its tokens with growing noise, so that the ten best are not there by chance. Speeds are
the least of some rounds, beside the rate at which the same threads or GPU copy memory; bytes are those of the
tokens read and of the encodings written.
"""

from functools import partial

import torch
from torch.nn.functional import normalize

import late_interaction as li
from bench.harness.run_header import add_table_arguments, keep_text, table
from bench.tuning.first_pass import demo
from late_interaction import Muvera
from late_interaction._doctor.timing import in_turn

TOP = 10
ROUNDS = 5
DEPTH = 1000
# k_sim, repetitions, d_proj of the configurations; a count sketch of the last.
CONFIGURATIONS = [(3, 20, 8, None), (4, 20, 8, None), (5, 20, 8, None), (5, 20, 16, None), (5, 20, 16, 2048)]


def planted(documents, Ld, queries, Lq, d):
    """Queries, and chunks of unit documents as float32, of which ten are each query's neighbours."""
    torch.manual_seed(0)
    Q = normalize(torch.randn(queries, Lq, d), dim=-1)
    places = torch.randperm(documents)[: queries * TOP].view(queries, TOP)
    noise = torch.linspace(0.4, 1.2, TOP) * d**-0.5  # the norm of a query's token is 1

    def chunks(size=50_000):
        for start in range(0, documents, size):
            count = min(size, documents - start)
            topics = torch.randn(count, 1, d)
            D = torch.randn(count, Ld, d).add_(topics, alpha=0.5)
            for query, rank in ((places >= start) & (places < start + count)).nonzero().tolist():
                own = Q[query, torch.randint(Lq, (Ld,))]
                D[places[query, rank] - start] = own + noise[rank] * torch.randn(Ld, d)
            yield normalize(D, dim=-1)

    return Q, chunks()


def searched(Q, q_mask, parts, d_mask, muveras):
    """The best documents of each query: exact ones, and those of each configuration, chunk by chunk."""
    exact, seen = li.TopK(Q, TOP, q_mask), 0
    codes = [m.encode_queries(li.Tokens(Q, q_mask)) for m in muveras]
    best = [(torch.empty(len(Q), 0), torch.empty(len(Q), 0, dtype=torch.int64)) for _ in muveras]
    for D in parts:
        exact.add(D, d_mask)
        at = torch.arange(seen, seen + len(D)).expand(len(Q), -1)
        for i, (muvera, (scores, places)) in enumerate(zip(muveras, best, strict=True)):
            scores = torch.cat((scores, codes[i] @ muvera.encode_documents(li.Tokens(D, d_mask)).t()), 1)
            kept, order = scores.topk(min(DEPTH, scores.shape[1]))
            best[i] = kept, torch.cat((places, at), 1).gather(1, order)
        seen += len(D)
    return exact.indices, [places for _, places in best]


def recall_table(exact, found, muveras, candidates):
    rows = []
    for muvera, places in zip(muveras, found, strict=True):
        hits = places.unsqueeze(1) == exact.unsqueeze(2)  # [Nq, TOP, DEPTH]
        share = hits.any(1).float().cumsum(1).mean(0) / TOP
        enough = (share >= 0.95).nonzero()
        needed = str(int(enough[0]) + 1) if len(enough) else f"> {len(share)}"
        shares = {f"recall@{TOP} of {n}": f"{share[min(n, len(share)) - 1]:.4f}" for n in candidates}
        rows.append({"": _name(muvera), "dims": str(muvera.dim), **shares, "needed": needed})
    return table(rows)


def _name(muvera):
    name = f"k_sim {muvera.k_sim}, {muvera.repetitions} repetitions, d_proj {muvera.d_proj}"
    return name if muvera.d_final is None else f"{name}, d_final {muvera.d_final}"


def speed_table(D):
    """Documents a second and GB/s of each configuration; of a copy of as much memory."""

    def least(call):
        return min(in_turn({"": call}, D.device, ROUNDS)[""])

    source = torch.randn(64 << 20, device=D.device)
    took = least(partial(torch.empty_like(source).copy_, source))
    rows = []
    for sizes in [*CONFIGURATIONS, (5, 20, None, None)]:
        muvera = Muvera(D.shape[-1], *sizes)
        seconds = least(partial(muvera.encode_documents, D))
        rows.append({
            "": _name(muvera), "dims": str(muvera.dim), "documents/s": len(D) / seconds,
            "us a token": f"{1e6 * seconds / len(D) / D.shape[1]:.2g}",
            "GB/s": (D.nbytes + 4 * len(D) * muvera.dim) / seconds * 1e-9,
        })  # fmt: skip
    rows.append({"": "a copy of memory", "GB/s": 2 * source.nbytes / took * 1e-9})
    return f"encoding of documents {list(D.shape)}, {str(D.dtype).removeprefix('torch.')}\n{table(rows)}"


def add_arguments(p):
    p.add_argument("--demo", action="store_true", help="real text in place of random tokens")
    p.add_argument("--candidates", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    add_table_arguments(p, documents=1_000_000, Ld=8, queries=20, Lq=16, d=64)
    p.add_argument(
        "--speed-documents", type=int, default=300, help="of 180 tokens of 128 dims, that are timed"
    )
    p.set_defaults(device="cpu")  # of a GPU speeds alone, in float32 and bfloat16
    p.add_argument("--configurations", type=int, nargs="+", help="by number, from 0; all by default")


def recalls(args):
    chosen = [CONFIGURATIONS[i] for i in args.configurations or range(len(CONFIGURATIONS))]
    if args.demo:
        x = demo(args.queries, "cpu")
        Q, q_mask, parts, d_mask = x.Q, x.q_mask, iter([x.D]), x.d_mask
        what = f"docstrings of make demo: queries {list(Q.shape)}, documents {list(x.D.shape)}"
    else:
        Q, parts = planted(args.documents, args.Ld, args.queries, args.Lq, args.d)
        q_mask = d_mask = None
        sizes = f"queries {list(Q.shape)}, {args.documents:,} documents of {args.Ld} tokens"
        what = f"planted neighbours: {sizes}"
    muveras = [Muvera(Q.shape[-1], *sizes) for sizes in chosen]
    exact, found = searched(Q, q_mask, parts, d_mask, muveras)
    return f"{what}\n{recall_table(exact, found, muveras, args.candidates)}"


def run(args):
    tables = [recalls(args)] if args.demo or args.device == "cpu" else []
    if args.speed_documents and not args.demo:
        D = normalize(torch.randn(args.speed_documents, 180, 128, device=args.device), dim=-1)
        tables += [speed_table(D)] + ([speed_table(D.bfloat16())] if args.device != "cpu" else [])
    keep_text("\n\n".join(tables), args)
    return 0
