"""`python -m bench.merge PART.json ... --out FOLDER`: puts recorded runs together, group by group.

What was measured on one device goes to one record of FOLDER (by default bench/results): `<device>.json`,
`sweep-<device>.json`, `plans-<device>.json`. A group of a later file takes the place of the same group of an
earlier one and of the record, with all its implementations and variants; one that lacks an implementation is
refused, and so is what breaks bench.rules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import plans, rules, sweep
from .results import DIRECTORY, IncompleteError, Row, read, replaced, slug, split, write


def record_of(part: Sequence[Row]) -> str:
    """The name of the record that these rows belong to."""
    headers, rows = split(part)
    device = slug(headers[-1]["gpu"] or "cpu")
    kinds = {f"{r['suite']}-" if r["suite"] in (sweep.SUITE, plans.SUITE) else "" for r in rows}
    if len(kinds) != 1:
        raise ValueError(f"rows of {len(kinds)} kinds of record in one file")
    return f"{kinds.pop()}{device}.json"


def merged(parts: Sequence[Sequence[Row]]) -> list[Row]:
    out: list[Row] = []
    for part in parts:
        out = replaced(out, part)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.merge", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=DIRECTORY)
    parser.add_argument("--fresh", action="store_true", help="start anew instead of from the records there")
    args = parser.parse_args(arguments)
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
    broken = [rules.told(problem) for rows in done.values() for problem in rules.problems(rows)]
    for line in broken:
        print(line, file=sys.stderr)
    if broken:
        return 1
    for path, rows in done.items():
        write(path, rows)
        print(f"{len(split(rows)[1])} rows in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
