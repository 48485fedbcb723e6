"""`python -m bench.merge PART.json ... --out RECORD.json`: puts recorded runs together, group by group.

A group of a later file takes the place of the same group of an earlier one and of RECORD, with all its
implementations and variants; one that lacks an implementation is refused. So is what breaks bench.rules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import rules
from .results import IncompleteError, Row, read, replaced, split, write


def merged(parts: Sequence[Sequence[Row]]) -> list[Row]:
    out: list[Row] = []
    for part in parts:
        out = replaced(out, part)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.merge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fresh", action="store_true", help="start anew instead of from what --out holds")
    args = parser.parse_args(arguments)
    files = [*([args.out] if args.out.exists() and not args.fresh else []), *args.parts]
    try:
        rows = merged([read(path) for path in files])
    except (OSError, ValueError) as error:
        kind = "" if isinstance(error, IncompleteError) else f"{type(error).__name__}: "
        print(f"{kind}{error}", file=sys.stderr)
        return 1
    found = rules.problems(rows)
    for problem in found:
        print(rules.told(problem), file=sys.stderr)
    if found:
        return 1
    write(args.out, rows)
    print(f"{len(split(rows)[1])} rows of {len(files)} files in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
