"""The tables of docs/benchmarks.md, as Markdown, from recorded rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.harness.ceilings import floor_us
from bench.harness.library import (
    COMPILED,
    EINSUM,
    FLASH,
    GEMM,
    LIK,
    MAXSIM_CPU,
    NUMKONG,
    OURS,
)
from bench.harness.results import Row, best, groups, split
from bench.harness.run_header import todays_command
from bench.harness.text import number
from bench.suites import first_call, from_hidden, heads, plaid, retrieval
from bench.suites.cpu import corpus_search, instruction_sets
from bench.suites.cpu import threads as cpu_threads

OVER = "over best other"


def stamp(headers: Sequence[Row]) -> str:
    """Devices, versions and commands of the runs; runs on equal devices and versions share a paragraph."""
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
        command = todays_command(h["command"])
        when = f"commit {(h['commit'] or 'unknown')[:7]}, {h['run'][:10]}: `{command}`{ceilings}"
        runs.setdefault(f"{device}; {packages}.", []).append(f"- {when}")
    return "\n\n".join("\n".join([f"{made_with} Runs:", "", *lines]) for made_with, lines in runs.items())


def section(title: str, note: str, body: str) -> list[str]:
    return [f"**{title}** {note}", body] if body else []


def table(head: Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    rule = [":--" if i < left else "--:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])


def why_not(rows: Sequence[Row]) -> str:
    """Why none of these rows has a time."""
    for row in rows:
        if row.get("over_limit_s"):
            return f"over {number(row['over_limit_s']).removesuffix('.0')} s"
    for row in rows:
        if row.get("error"):
            return "wrong" if "parity" in row["error"] else "fails"
    return "-"


def us(row: Row) -> str:
    """GPU / wall microseconds."""
    return f"{number(row['gpu_us'])} / {number(row['wall_us'])}"


def us_and_mib(row: Row) -> str:
    return f"{us(row)} / {number(row['peak_mib'])}"


def cell(rows: Sequence[Row], figure: Callable[[Row], str] = us, key: str = "gpu_us") -> str:
    """The figure of the fastest row, or why there is none."""
    row = best(rows, key)
    return figure(row) if row else why_not(rows)


def _of(group: Sequence[Row], *impls: str) -> list[Row]:
    return [r for r in group if r["impl"] in impls]


def over_best_other(ours: Row | None, others: Sequence[Row]) -> str:
    """The time of the fastest of all others over ours, by the same clock."""
    same = [r for r in others if ours and r.get("gpu_method") == ours.get("gpu_method")]
    fastest = best(same)
    return f"{fastest['gpu_us'] / ours['gpu_us']:.2f}x" if ours and fastest else "-"


def _name(row: Row) -> str:
    return str(row["shape"]) + ("\\*" if row.get("gpu_method") == "events" else "")


def _floor(row: Row, headers: Sequence[Row]) -> str:
    run = next((h for h in headers if h["run"] == row.get("run")), None)
    return number(run and floor_us(row, run))


def size(row: Row) -> str:
    shape = f"{row['Nq']} x {row['Nd']}, {row['Lq']}, {row['Ld']}"
    shape += {"kd": " (KD)", "pairs": " (pairs)"}.get(row["layout"], "")
    return shape + (f", d={row['d']}" if row["d"] != 128 else "")


def forward_table(record: Sequence[Row], suite: str = "forward") -> str:
    headers, rows = split(record)
    body = []
    for group in groups(r for r in rows if r["suite"] == suite).values():
        mine = _of(group, OURS)
        ours = best(mine)
        if ours is None:
            continue
        others = (_of(group, LIK), _of(group, FLASH), _of(group, EINSUM, COMPILED))
        cells = [_floor(ours, headers), us(ours), *map(cell, others)]
        body.append(
            [_name(ours), size(ours), *cells, over_best_other(ours, [r for r in group if r not in mine])]
        )
    head = ["shape", "Nq x Nd, Lq, Ld", "floor", OURS, LIK, FLASH, "PyTorch", OVER]
    return table(head, body, left=2) if body else ""


def training_table(record: Sequence[Row], suite: str = "training") -> str:
    headers, rows = split(record)
    steps = groups(r for r in rows if r["suite"] == suite)
    skewed = {g[0]["shape"]: best(_of(g, OURS)) for g in steps.values() if g[0]["winners"] == "skewed"}
    body = []
    for group in steps.values():
        mine = _of(group, OURS)
        ours = best(mine)
        if ours is None or ours["winners"] != "uniform":
            continue
        hot = skewed.get(ours["shape"])
        others = (_of(group, LIK), _of(group, FLASH), _of(group, EINSUM, COMPILED))
        cells = [_floor(ours, headers), us(ours), number(hot and hot["gpu_us"]), *map(cell, others)]
        body.append(
            [_name(ours), size(ours), *cells, over_best_other(ours, [r for r in group if r not in mine])]
        )
    sizes = "Nq x Nd (or K), Lq, Ld"
    head = ["shape", sizes, "floor", OURS, "skewed", LIK, FLASH, "PyTorch", OVER]
    return table(head, body, left=2) if body else ""


def memory_table(rows: Sequence[Row]) -> str:
    body = []
    for group in groups(r for r in rows if r["suite"] == "training" and r["winners"] == "uniform").values():

        def mib(impl: str, backward: str | None = None, group: Sequence[Row] = group) -> str:
            found = [r for r in group if r["impl"] == impl and r["backward"] == backward]
            return cell(found, lambda row: number(row["peak_mib"]), "peak_mib")

        figures = [mib(OURS, "lowmem"), mib(OURS, "unified"), mib(LIK, "lowmem"), mib(LIK, "unified")]
        body.append([f"{group[0]['shape']}", *figures, mib(FLASH), mib(EINSUM)])
    head = ["shape", "ours lowmem", "ours unified", "LIK lowmem", "LIK unified", FLASH, EINSUM]
    return table(head, body) if body else ""


def heads_table(rows: Sequence[Row]) -> str:
    body = []
    steps: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["suite"] == heads.SUITE:
            steps.setdefault((row["variant"], row["shape"]), []).append(row)
    for (variant, _), group in steps.items():
        einsum, lik, ours = (_of(group, impl) for impl in (EINSUM, LIK, OURS))
        cells = [
            cell(found, lambda r: f"{number(r['gpu_us'])} / {number(r['peak_mib'])}")
            for found in (einsum, lik, ours)
        ]
        body.append([variant, size(group[0]), *cells, over_best_other(best(ours), [*einsum, *lik])])
    head = ["loss", "B x n, Lq, Ld", EINSUM, LIK, OURS, OVER]
    return table(head, body, left=2) if body else ""


def _variant(group: Sequence[Row], impl: str, variant: str) -> list[Row]:
    return [r for r in group if (r["impl"], r["variant"]) == (impl, variant)]


def beside_maxsim_table(
    rows: Sequence[Row], suite: str, variants: Sequence[str], function: str, peer: str
) -> str:
    """A line for each shape and variant: our maxsim step, our step of `function`, and the peer's."""
    body = []
    for group in groups(r for r in rows if r["suite"] == suite).values():
        for name in variants:
            mine, theirs = (_variant(group, impl, name) for impl in (OURS, peer))
            ours = best(mine)
            times = f"{ours['over_maxsim']:.2f}" if ours and ours.get("over_maxsim") else "-"
            clock = "\\*" if ours and ours.get("gpu_method") == "events" else ""
            cells = [cell(each, us_and_mib) for each in (_variant(group, OURS, "maxsim"), mine)]
            faster = over_best_other(ours, theirs)
            body.append([size(group[0]), name + clock, *cells, times, cell(theirs, us_and_mib), faster])
    head = ["Nq x Nd, Lq, Ld", "", "`maxsim`", f"`{function}`", "times `maxsim`", peer]
    return table([*head, "over the peer"], body, left=2) if body else ""


def hidden_table(rows: Sequence[Row]) -> str:
    body = []
    for group in groups(r for r in rows if r["suite"] == from_hidden.SUITE).values():
        unfused, ours = (_variant(group, OURS, v) for v in (from_hidden.UNFUSED, from_hidden.FUSED))
        lik = _variant(group, LIK, from_hidden.FUSED)
        what = "forward" if group[0]["op"] == "fwd" else "training step"
        cells = [cell(found, us_and_mib) for found in (unfused, lik, ours)]
        body.append([size(group[0]), what, *cells, over_best_other(best(ours), [*unfused, *lik])])
    head = ["Nq x Nd, Lq, Ld", "", "linear, normalize, our maxsim", LIK, OURS, OVER]
    return table(head, body, left=2) if body else ""


def beside_peer_table(rows: Sequence[Row], suite: str) -> str:
    """A line for each shape and variant. No suite here has both peers."""
    body = []
    for group in groups(r for r in rows if r["suite"] == suite).values():
        for variant in dict.fromkeys(r["variant"] for r in group):
            ours = best(_variant(group, OURS, variant))
            if ours is not None:
                whole = not ours.get("nbits") or variant == plaid.CENTROIDS
                bits = "" if whole else f", {ours['nbits']} bit"
                listed = f", {ours['pairs']:,} pairs" if ours.get("pairs") else ""
                clock = "\\*" if ours.get("gpu_method") == "events" else ""
                lik, flash = (_variant(group, impl, variant) for impl in (LIK, FLASH))
                theirs = cell(lik or flash) + (f" ({FLASH})" if flash else "")
                what = variant + bits + listed + clock
                body.append([size(ours), what, us(ours), theirs, over_best_other(ours, lik or flash)])
    head = ["Nq x Nd, Lq, Ld", "", OURS, LIK, "over the peer"]
    return table(head, body, left=2) if body else ""


def host_table(rows: Sequence[Row]) -> str:
    """Corpora that stay in the host's memory."""
    body = []
    for row in rows:
        if row["suite"] == retrieval.SUITE and row.get("over_bus"):
            rate = row["bus_gbps"] / row["over_bus"]
            share = f"{100 / row['over_bus']:.0f}%"
            body.append([size(row), row["variant"], number(row["wall_us"]), f"{rate:.1f}", share])
    head = ["Nq x Nd, Lq, Ld", "memory", "wall us", "GB/s", "of the bus"]
    return table(head, body, left=2) if body else ""


def first_call_table(rows: Sequence[Row]) -> str:
    """A line for each library and state of its kernel cache: import, first forward, first step."""
    found: dict[tuple[str, str | None], dict[str, Row]] = {}
    for row in rows:
        if row["suite"] == first_call.SUITE:
            found.setdefault((row["impl"], row.get("jit_cache")), {})[row["op"]] = row
    body = []
    for (impl, cache), ops in found.items():
        calls = [[ops[op]] if op in ops else [] for op in first_call.OPS]
        imports = [r for each in calls for r in each if r.get("import_ms") is not None]
        cells = [cell(each, lambda r: f"{r['wall_us'] * 1e-3:,.0f}", "wall_us") for each in calls]
        imported = cell(imports, lambda r: f"{r['import_ms']:,.0f}", "import_ms")
        body.append([impl, cache or "-", imported, *cells])
    head = ["", "kernel cache", "import, ms", "first forward, ms", "first training step, ms"]
    return table(head, body, left=2) if body else ""


def cpu_table(rows: Sequence[Row]) -> str:
    names = [OURS, MAXSIM_CPU, NUMKONG, EINSUM, GEMM]
    body = []
    for group in groups(r for r in rows if r["suite"] == "cpu").values():
        first = group[0]
        what = "forward" if first["op"] == "fwd" else "training step"
        cells = []
        for name in names:
            row = best([r for r in group if r["impl"] == name], "wall_us")
            wrong = row is not None and "parity" in (row.get("error") or "")
            cells.append(number(row and row["gflops"]) + (" (wrong)" if wrong else ""))
        body.append([f"{size(first)}, {first['dtype']}, {what}", *cells])
    head = ["Nq x Nd, Lq, Ld", *names[:-1], "the GEMM alone"]
    return table(head, body) if body else ""


def instruction_set_table(rows: Sequence[Row]) -> str:
    rows = [row for row in rows if row["suite"] == instruction_sets.SUITE]
    dtypes = [kind for kind in instruction_sets.KINDS if any(row["dtype"] == kind for row in rows)]
    body = []
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["shape"], row["variant"]), []).append(row)
    for (_, name), line in lines.items():
        found = {r["dtype"]: number(r["gflops"]) for r in line}
        body.append([size(line[0]), f"`{name}`", *(found.get(dtype, "-") for dtype in dtypes)])
    return table(["Nq x Nd, Lq, Ld", "", *dtypes], body, left=2) if body else ""


def _each(row: Row | None) -> str:
    if not row or not row["wall_us"]:
        return "-"
    return number(row["wall_us"] / row["Nd"]) + (" (wrong)" if row.get("error") else "")


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def threads_table(rows: Sequence[Row]) -> str:
    """GFLOP/s by threads; of plain reads GB/s."""
    where = {cpu_threads.MEMORY: "from memory", cpu_threads.CACHE: "one document, in the caches"}
    rows = [r for r in rows if r["suite"] == cpu_threads.SUITE and r["variant"] != cpu_threads.APART]
    counts = sorted({row["threads"] for row in rows})
    lines: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault((row["shape"], row["dtype"], row["variant"]), {})[row["threads"]] = row
    body = []
    for (_, dtype, variant), line in lines.items():
        read = variant == cpu_threads.READ
        told = ["GB/s of a plain read", ""] if read else [dtype, where[variant]]
        figures = [number(line[n]["gbps" if read else "gflops"]) if n in line else "-" for n in counts]
        last = line.get(counts[-1])
        gbps = number(last["gbps"]) if last and last.get("gbps") else "-"
        body.append([size(next(iter(line.values()))), *told, *figures, gbps])
    head = ["Nq x Nd, Lq, Ld", "", "documents", *map(_threads, counts), "GB/s with all"]
    return table(head, body, left=3) if body else ""


def small_calls_table(rows: Sequence[Row]) -> str:
    """Microseconds by threads."""
    rows = [r for r in rows if r["suite"] == cpu_threads.SUITE and r["variant"] == cpu_threads.APART]
    counts = sorted({row["threads"] for row in rows})
    lines: dict[str, dict[int, Row]] = {}
    for row in rows:
        lines.setdefault(row["shape"], {})[row["threads"]] = row
    body = [
        [size(next(iter(line.values()))), *(number(line[n]["wall_us"]) if n in line else "-" for n in counts)]
        for line in lines.values()
    ]
    return table(["Nq x Nd, Lq, Ld", *map(_threads, counts)], body) if body else ""


def corpus_table(rows: Sequence[Row]) -> str:
    """Microseconds a candidate."""
    stored = {"uint8": "residuals of 2 bits"}
    lines: dict[tuple[str, str], dict[object, Row]] = {}
    for row in rows:
        if row["suite"] == corpus_search.SUITE:
            lines.setdefault((row["impl"], row["dtype"]), {})[row.get("variant")] = row
    body = []
    for (name, dtype), found in lines.items():
        cells = [_each(found.get(variant)) for variant in corpus_search.VARIANTS]
        body.append([name, stored.get(dtype, dtype), *cells])
    return table(["", "stored as", "all threads", "one thread"], body, left=2) if body else ""
