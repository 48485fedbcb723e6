"""Merges the files that `python -m bench record` wrote into records.

What was measured on one device goes to the records of that device in --out: `<device>.json`,
`sweep-<device>.json` and `plans-<device>.json`. A group (suite, shape, op) of a later file replaces the
same group of an earlier file and of the record, with all its implementations and variants. A group that
lacks an implementation of the record is refused, and so is one that breaks a rule of
bench/harness/rules.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.harness.results import (
    DIRECTORY,
    SEPARATE_SUITES,
    IncompleteError,
    Row,
    read,
    replaced,
    slug,
    split,
    write,
)


def record_of(part: Sequence[Row]) -> str:
    """The name of the record that these rows belong to."""
    headers, rows = split(part)
    device = slug(headers[-1]["gpu"] or "cpu")
    kinds = {f"{r['suite']}-" if r["suite"] in SEPARATE_SUITES else "" for r in rows}
    if len(kinds) != 1:
        raise ValueError(f"rows of {len(kinds)} kinds of record in one file")
    return f"{kinds.pop()}{device}.json"


def merged(parts: Sequence[Sequence[Row]]) -> list[Row]:
    out: list[Row] = []
    for part in parts:
        out = replaced(out, part)
    return out


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("parts", type=Path, nargs="+", metavar="FILE", help="files of `record`, or other records")
    p.add_argument(
        "--out", type=Path, default=DIRECTORY, help="the folder of records; default: bench/results"
    )
    p.add_argument("--fresh", action="store_true", help="start anew instead of from the records there")


def run(args: argparse.Namespace, broken_rules: Callable[[Sequence[Row]], list[str]]) -> int:
    records: dict[Path, list[list[Row]]] = {}
    try:
        for part in map(read, args.parts):
            path = args.out / record_of(part)
            before = [read(path)] if path.exists() and not args.fresh else []
            records.setdefault(path, before).append(part)
        done = {path: merged(parts) for path, parts in records.items()}
    except (OSError, ValueError) as error:
        kind = "" if isinstance(error, IncompleteError) else f"{type(error).__name__}: "
        print(f"{kind}{error}", file=sys.stderr)
        return 1
    broken = [line for rows in done.values() for line in broken_rules(rows)]
    for line in broken:
        print(line, file=sys.stderr)
    if broken:
        return 1
    for path, rows in done.items():
        write(path, rows)
        print(f"{len(split(rows)[1])} rows in {path}")
    return 0
