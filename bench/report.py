"""Fills README.md, docs/benchmarks.md and docs/performance.md, between their markers, from the records.

`python -m bench.report`. Nothing in those parts is typed by hand; `--check` fails when they and the recorded
runs differ, and where a record breaks the rules of bench.rules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import benchmarks, performance, rules, summary
from .plot import roofline
from .plot import sweep as sweep_plot
from .results import DIRECTORY, ROOT, is_whole, read, records

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
PAGES: dict[str, Callable[[Path], str]] = {
    "docs/benchmarks.md": benchmarks.build,
    "docs/performance.md": performance.build,
}


def fill(text: str, generated: str) -> str:
    """`text` with what lies between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"it needs one {BEGIN} and, after it, one {END}")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{generated}\n{END}{after}"


def _draw(directory: Path) -> None:
    for path in records(directory):
        rows = read(path)
        target = directory / summary.PLOT
        if path.stem != "cpu" and is_whole(rows) and (problem := roofline(rows, target)):
            print(f"{path.name}: {problem}")
    for path in sorted(directory.glob("sweep-*.json")):
        if problem := sweep_plot(read(path), path.with_suffix(".png")):
            print(f"{path.name}: {problem}")


def broken_rules(directory: Path) -> list[str]:
    """What is wrong with the records of a folder, a line each."""
    paths = [
        *records(directory),
        *sorted(directory.glob("sweep-*.json")),
        *sorted(directory.glob("plans-*.json")),
    ]
    return [f"{path.name}: {rules.told(problem)}" for path in paths for problem in rules.problems(read(path))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=DIRECTORY)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if it would change")
    args = parser.parse_args(arguments)
    failed = False
    if args.check:
        for line in broken_rules(args.results):
            print(line, file=sys.stderr)
            failed = True
    else:
        _draw(args.results)
    pages = {args.readme.parent / name: build for name, build in PAGES.items()}
    for page, build in {args.readme: summary.build, **pages}.items():
        if page != args.readme and not page.exists():
            continue
        try:
            text = page.read_text()
            new = fill(text, build(args.results))
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
