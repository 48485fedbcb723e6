"""Fills README.md and docs/performance.md, between their bench markers, from the recorded runs.

`python -m bench.report`. Nothing in those parts is typed by hand; `--check` fails when they and the recorded
runs differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import heads, hidden, pairs, performance, plaid, retrieval, targets, varlen
from .impls import COMPILED, EINSUM, FLASH, LIK, OURS
from .plot import roofline
from .plot import sweep as sweep_plot
from .results import DIRECTORY, ROOT, Row, apart, best, groups, is_whole, number, read, records, split

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
PLOT = "roofline.png"


def _table(head: Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    rule = [":--" if i < left else "--:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])


def _us(row: Row | None) -> str:
    """GPU / wall microseconds."""
    if row is None:
        return "-"
    return f"{number(row['gpu_us'])} / {number(row['wall_us'])}"


def _size(row: Row) -> str:
    shape = f"{row['Nq']} x {row['Nd']}, {row['Lq']}, {row['Ld']}"
    shape += {"kd": " (KD)", "pairs": " (pairs)"}.get(row["layout"], "")
    return shape + (f", d={row['d']}" if row["d"] != 128 else "")


def _of(group: Sequence[Row], *impls: str) -> Row | None:
    return best([r for r in group if r["impl"] in impls])


def _speedup(ours: Row | None, peer: Row | None) -> str:
    return f"{peer['gpu_us'] / ours['gpu_us']:.2f}x" if ours and peer else "-"


def forward_table(rows: Sequence[Row]) -> str:
    body = []
    for group in groups(r for r in rows if r["suite"] == "forward").values():
        ours = _of(group, OURS)
        if ours is None:
            continue
        body.append([
            f"{ours['shape']}", _size(ours), number(ours["floor_us"]), _us(ours), _us(_of(group, LIK)),
            _us(_of(group, FLASH)), _us(_of(group, EINSUM, COMPILED)), _speedup(ours, _of(group, LIK, FLASH)),
        ])  # fmt: skip
    head = ["shape", "Nq x Nd, Lq, Ld", "floor", OURS, LIK, FLASH, "PyTorch", "over best peer"]
    return _table(head, body, left=2) if body else ""


def training_table(rows: Sequence[Row]) -> str:
    steps = groups(r for r in rows if r["suite"] == "training")
    skewed = {g[0]["shape"]: _of(g, OURS) for g in steps.values() if g[0]["winners"] == "skewed"}
    body = []
    for group in steps.values():
        ours = _of(group, OURS)
        if ours is None or ours["winners"] != "uniform":
            continue
        hot = skewed.get(ours["shape"])
        body.append([
            f"{ours['shape']}", _size(ours), number(ours["floor_us"]), _us(ours),
            number(hot and hot["gpu_us"]), _us(_of(group, LIK)), _us(_of(group, FLASH)),
            _us(_of(group, EINSUM, COMPILED)), _speedup(ours, _of(group, LIK, FLASH)),
        ])  # fmt: skip
    size = "Nq x Nd (or K), Lq, Ld"
    head = ["shape", size, "floor", OURS, "skewed", LIK, FLASH, "PyTorch", "over best peer"]
    return _table(head, body, left=2) if body else ""


def memory_table(rows: Sequence[Row]) -> str:
    body = []
    for group in groups(r for r in rows if r["suite"] == "training" and r["winners"] == "uniform").values():

        def mib(impl: str, backward: str | None = None, group: Sequence[Row] = group) -> str:
            row = best([r for r in group if r["impl"] == impl and r["backward"] == backward], "peak_mib")
            return number(row and row["peak_mib"])

        figures = [mib(OURS, "lowmem"), mib(OURS, "unified"), mib(LIK, "lowmem"), mib(LIK, "unified")]
        body.append([f"{group[0]['shape']}", *figures, mib(FLASH), mib(EINSUM)])
    head = ["shape", "ours lowmem", "ours unified", "LIK lowmem", "LIK unified", FLASH, EINSUM]
    return _table(head, body) if body else ""


def heads_table(rows: Sequence[Row]) -> str:
    impls = (EINSUM, LIK, OURS)
    body = []
    steps: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["suite"] == heads.SUITE:
            steps.setdefault((row["variant"], row["shape"]), []).append(row)
    for (variant, _), group in steps.items():
        found = [_of(group, impl) for impl in impls]
        cells = [f"{number(r['gpu_us'])} / {number(r['peak_mib'])}" if r else "-" for r in found]
        body.append([variant, _size(group[0]), *cells, _speedup(found[-1], best(filter(None, found[:-1])))])
    head = ["loss", "B x n, Lq, Ld", *impls, "over best peer"]
    return _table(head, body, left=2) if body else ""


def _variant(group: Sequence[Row], impl: str, variant: str) -> Row | None:
    return best([r for r in group if (r["impl"], r["variant"]) == (impl, variant)])


def hidden_table(rows: Sequence[Row]) -> str:
    body = []
    for group in groups(r for r in rows if r["suite"] == hidden.SUITE).values():
        unfused, ours = (_variant(group, OURS, v) for v in (hidden.UNFUSED, hidden.FUSED))
        lik = _variant(group, LIK, hidden.FUSED)
        what = "forward" if group[0]["op"] == "fwd" else "training step"
        cells = [f"{_us(r)} / {number(r['peak_mib'])}" if r else "-" for r in (unfused, lik, ours)]
        body.append([_size(group[0]), what, *cells, _speedup(ours, best(filter(None, (unfused, lik))))])
    head = ["Nq x Nd, Lq, Ld", "", "linear, normalize, our maxsim", LIK, OURS, "over the better"]
    return _table(head, body, left=2) if body else ""


def beside_lik_table(rows: Sequence[Row], suite: str) -> str:
    """A line a shape and variant."""
    body = []
    for group in groups(r for r in rows if r["suite"] == suite).values():
        for variant in dict.fromkeys(r["variant"] for r in group):
            ours, lik = (_variant(group, impl, variant) for impl in (OURS, LIK))
            if ours is not None:
                whole = not ours.get("nbits") or variant == plaid.CENTROIDS
                bits = "" if whole else f", {ours['nbits']} bit"
                listed = f", {ours['pairs']:,} pairs" if ours.get("pairs") else ""
                others = (_variant(group, impl, variant) for impl in (plaid.FAST_PLAID, FLASH))
                peer = lik or next((other for other in others if other is not None), None)
                theirs = _us(peer) + (f" ({peer['impl']})" if peer is not None and lik is None else "")
                body.append([_size(ours), variant + bits + listed, _us(ours), theirs, _speedup(ours, peer)])
    head = ["Nq x Nd, Lq, Ld", "", OURS, LIK, "over LIK"]
    return _table(head, body, left=2) if body else ""


def host_table(rows: Sequence[Row]) -> str:
    """Corpora that stay in the host's memory."""
    body = []
    for row in rows:
        if row["suite"] == retrieval.SUITE and row.get("over_bus"):
            rate = row["bus_gbps"] / row["over_bus"]
            share = f"{100 / row['over_bus']:.0f}%"
            body.append([_size(row), row["variant"], number(row["wall_us"]), f"{rate:.1f}", share])
    head = ["Nq x Nd, Lq, Ld", "memory", "wall us", "GB/s", "of the bus"]
    return _table(head, body, left=2) if body else ""


def first_call_table(rows: Sequence[Row]) -> str:
    body = []
    wanted = [r for r in rows if r["suite"] == "first-call" and r["wall_us"] is not None]
    for row in wanted:
        cache = f" ({row['jit_cache']} kernel cache)" if row.get("jit_cache") else ""
        what = "forward" if row["op"] == "fwd" else "training step"
        body.append([f"{row['impl']}{cache}", what, f"{row['wall_us'] * 1e-3:,.0f}"])
    return _table(["first call in a fresh process", "", "ms"], body, left=2) if body else ""


def cpu_table(rows: Sequence[Row]) -> str:
    names = [OURS, "maxsim-cpu", EINSUM, "torch GEMM"]
    body = []
    for group in groups(r for r in rows if r["suite"] == "cpu").values():
        first = group[0]
        what = "forward" if first["op"] == "fwd" else "training step"
        cells = []
        for name in names:
            row = best([r for r in group if r["impl"] == name], "wall_us")
            wrong = row is not None and "parity" in (row.get("error") or "")
            cells.append(number(row and row["gflops"]) + (" (wrong)" if wrong else ""))
        body.append([f"{_size(first)}, {first['dtype']}, {what}", *cells])
    head = ["Nq x Nd, Lq, Ld", *names[:-1], "the GEMM alone"]
    return _table(head, body) if body else ""


def _stamp(headers: Sequence[Row]) -> str:
    """What the figures were measured with: one paragraph for runs that differ in commit and command alone."""
    runs: dict[str, list[str]] = {}
    for h in headers:
        device = f"{h['gpu']}, driver {h['driver']}" if h["gpu"] else f"{h['cpu']}, {h['threads']} threads"
        packages = ", ".join(f"{k} {v}" for k, v in h["versions"].items())
        ceilings = ""
        if h.get("cublas_tflops"):
            ceilings = (
                f", beside cuBLAS bf16 8192^3 at {h['cublas_tflops']:.0f} TFLOP/s, "
                f"reads at {h['read_tbps']:.2f} TB/s"
            )
        when = f"commit {(h['commit'] or 'unknown')[:7]}, {h['run'][:10]}: `{h['command']}`{ceilings}"
        runs.setdefault(f"{device}; {packages}.", []).append(f"- {when}")
    return "\n\n".join("\n".join([f"{made_with} Runs:", "", *lines]) for made_with, lines in runs.items())


def _section(title: str, note: str, table: str) -> list[str]:
    return [f"**{title}** {note}", table] if table else []


def _gpu_report(rows: Sequence[Row]) -> list[str]:
    headers, rows = split(rows)
    parts = _section(
        "Forward, no gradient.",
        "Microseconds, GPU time / wall time (call + synchronize). `floor` is the larger of FLOPs over "
        "790 TFLOP/s and bytes over 4.3 TB/s (on an H200; elsewhere over the ceilings of the run).",
        forward_table(rows),
    )
    parts += _section(
        "Forward and both gradients.",
        "The fastest gradient strategy of each library. `skewed`: our GPU time when a few document tokens "
        "win most (winner index Ld x u^4).",
        training_table(rows),
    )
    parts += _section("Peak memory of that step,", "MiB above the inputs.", memory_table(rows))
    parts += _section(
        "Whole losses, forward and backward.",
        "Microseconds of one after another / peak MiB: colpali-engine's explicit-negative heads, which are"
        " the same without an in-batch term, and PyLate's contrastive loss, scored in chunks of 32 x 32.",
        heads_table(rows),
    )
    parts += _section(
        "Scores from hidden states.",
        "GPU / wall microseconds / peak MiB, results included, of projecting d_model = 768 to d = 128,"
        f" normalizing and scoring.{apart(r for r in rows if r['suite'] == hidden.SUITE)}",
        hidden_table(rows),
    )
    for title, suite, note in (
        (
            "Packed sequences,",
            varlen.SUITE,
            "`maxsim_varlen`: lengths up to Lq and Ld, short ones more often; `padded`: `maxsim_padded`, each"
            " query with documents of its own.",
        ),
        (
            "Listed pairs,",
            pairs.SUITE,
            "`score_pairs_packed`: each of 10,000 documents with one of 100 queries; all pairs of a dense"
            " batch, and a tenth of those. One query: `rerank_direct`, documents in no order.",
        ),
        (
            "Residual-compressed documents,",
            plaid.SUITE,
            "65,536 centroids, random codes; `search`: an index that fast-plaid built, all of it candidates.",
        ),
        ("The best 100 documents.", retrieval.SUITE, ""),
    ):
        parts += _section(title, f"{note} GPU / wall microseconds.".strip(), beside_lik_table(rows, suite))
    parts += _section(
        "The best 100 documents of a corpus in the host's memory,", "beside one copy from pinned memory.",
        host_table(rows),
    )  # fmt: skip
    parts += _section("First call,", "CUDA initialised, library not yet imported.", first_call_table(rows))
    verdicts = targets.grouped(targets.judge([*headers, *rows]))
    parts += _section(
        "Targets", "by the ceilings of the same run ([shape by shape](docs/performance.md)).",
        _table(targets.GROUPED_HEAD, verdicts) if verdicts else "",
    )  # fmt: skip
    return [*parts, _stamp(headers)] if parts else []


def build(directory: Path = DIRECTORY) -> str:
    """The Markdown between the markers."""
    parts: list[str] = []
    if (directory / PLOT).exists():
        parts.append(f"![Roofline of the MaxSim forward](bench/results/{PLOT})")
    for path in records(directory):
        rows = read(path)
        if path.stem == "cpu":
            headers, measured = split(rows)
            table = cpu_table(measured)
            note = "GFLOP/s; implementations take turns, so read each row as ratios."
            parts += [*_section("CPU,", note, table), _stamp(headers)] if table else []
        elif is_whole(rows):
            parts += _gpu_report(rows)
    if not parts:
        parts = ["No run is recorded yet: `make bench` on a GPU writes bench/results."]
    return "\n\n".join(parts)


def fill(text: str, generated: str) -> str:
    """`text` with what lies between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"it needs one {BEGIN} and, after it, one {END}")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{generated}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=DIRECTORY)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if it would change")
    args = parser.parse_args(arguments)
    if not args.check:
        for path in records(args.results):
            rows = read(path)
            if path.stem != "cpu" and is_whole(rows) and (problem := roofline(rows, args.results / PLOT)):
                print(f"{path.name}: {problem}")
        for path in sorted(args.results.glob("sweep-*.json")):
            if problem := sweep_plot(read(path), path.with_suffix(".png")):
                print(f"{path.name}: {problem}")
    pages: dict[Path, Callable[[], str]] = {args.readme: lambda: build(args.results)}
    page = args.readme.parent / "docs" / "performance.md"
    if page.exists():
        pages[page] = lambda: performance.build(args.results, _table, _stamp)
    failed = False
    for page, generated in pages.items():
        try:
            text = page.read_text()
            new = fill(text, generated())
        except (OSError, ValueError) as error:
            print(f"{page}: {error}", file=sys.stderr)
            failed = True
            continue
        if not args.check:
            page.write_text(new)
        elif new != text:
            print(f"{page} does not match {args.results}: run python -m bench.report", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
