"""Writes README.md and the pages of docs that hold figures, between their markers, from the records.

It draws the plots of bench/results, docs/large_batches.png and docs/end_to_end.png too. Nothing between the
markers is typed by hand: `python -m bench check` fails when a page and the records differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.harness.results import DIRECTORY, ROOT, SEPARATE_SUITES, Row, read, records, whole_record
from bench.report import benchmarks, end_to_end, gpus, large_batches, performance, plots, readme
from bench.suites import end_to_end as end_to_end_suite

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
PAGES: dict[str, Callable[[Path], str]] = {
    "docs/architecture.md": gpus.build,
    "docs/benchmarks.md": benchmarks.build,
    "docs/performance.md": performance.build,
    "docs/large_batches.md": large_batches.build,
}


def fill(text: str, generated: str) -> str:
    """`text` with what lies between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"it needs one {BEGIN} and, after it, one {END}")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{generated}\n{END}{after}"


def _draw(directory: Path, docs: Path) -> None:
    path = whole_record(directory)
    if path and (problem := plots.roofline(read(path), directory / readme.PLOT)):
        print(f"{path.name}: {problem}")
    for path in sorted(directory.glob("sweep-*.json")):
        if problem := plots.sweep(read(path), path.with_suffix(".png")):
            print(f"{path.name}: {problem}")
    if docs.exists():
        for problem in (
            *large_batches.draw(directory, docs / large_batches.PLOT),
            *end_to_end.draw(directory, docs / end_to_end.PLOT),
        ):
            print(problem)


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--readme", type=Path, default=ROOT / "README.md", help="docs/ lies beside it")
    p.add_argument("--results", type=Path, default=DIRECTORY, help="the folder of records")


def _fill_pages(args: argparse.Namespace, use: Callable[[Path, str, str], bool]) -> bool:
    """Calls use(page, its text, its new text) for each page. Whether all went well."""
    pages = {args.readme: readme.build}
    pages |= {page: build for name, build in PAGES.items() if (page := args.readme.parent / name).exists()}
    good = True
    for page, build in pages.items():
        try:
            text = page.read_text()
            new = fill(text, build(args.results))
        except (OSError, ValueError) as error:
            print(f"{page}: {error}", file=sys.stderr)
            good = False
            continue
        good &= use(page, text, new)
    return good


def write(args: argparse.Namespace) -> int:
    """Draws the plots and writes the pages."""
    _draw(args.results, args.readme.parent / "docs")
    return int(not _fill_pages(args, lambda page, text, new: page.write_text(new) >= 0))


def check(args: argparse.Namespace, broken_rules: Callable[[Sequence[Row]], list[str]]) -> int:
    """Changes nothing; 1 if a page would change or a record breaks a rule."""
    separate = [path for suite in SEPARATE_SUITES for path in sorted(args.results.glob(f"{suite}-*.json"))]
    broken = [
        f"{path.name}: {line}"
        for path in (*records(args.results), *separate)
        for line in broken_rules(read(path))
    ]
    broken += [
        f"{path.name}: {line}"
        for path in sorted(args.results.glob("end-to-end-*.json"))
        for line in end_to_end_suite.broken_rules(read(path))
    ]
    for line in broken:
        print(line, file=sys.stderr)

    def is_current(page: Path, text: str, new: str) -> bool:
        if text != new:
            print(f"{page} does not match {args.results}: run python -m bench report", file=sys.stderr)
        return text == new

    return int(not _fill_pages(args, is_current) or bool(broken))
