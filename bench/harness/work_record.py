"""A record of pieces of work, each with and without something: rows by name of the work and its batch."""

from __future__ import annotations

import json
from pathlib import Path

from bench.harness.results import Row, read, split


class WorkRecord:
    """The file that rows are written to as they come. Rows of the same work in it are replaced."""

    def __init__(self, path: Path, header: Row) -> None:
        self.path, self.header = path, header
        headers, self.rows = split(read(path)) if path.exists() else ([], [])
        self.headers = {h["run"]: h for h in headers}

    def keep(self, row: Row) -> None:
        def work(x: Row) -> tuple[object, ...]:
            return x["work"], x["batch"]

        self.rows = [x for x in self.rows if work(x) != work(row)] + [{**row, "run": self.header["run"]}]
        runs = {x["run"] for x in self.rows}
        headers = [h for run, h in {**self.headers, self.header["run"]: self.header}.items() if run in runs]
        self.path.write_text(json.dumps([*headers, *self.rows], indent=1) + "\n")
