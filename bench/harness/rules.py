"""The rules of a record, which make its figures comparable and repeatable.

1. A group (suite, shape, op and, for steps, the kind of winners) comes from one run: all its implementations
   and variants are measured in one process, one after the other or interleaved.
2. Implementations that are compared were timed by one clock.
3. A step's gradients were compared with the reference before it was timed.
4. The command of its run is one that today's program takes, and it measures this suite, shape, variant and
   implementation.

`python -m bench check` names the rows that break a rule, and so does a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from bench.harness.results import Row, by_group, split

Problem = tuple[tuple[object, ...], str]  # the group, and what is wrong with it


class NoSuchCommandError(Exception):
    """Today's program does not take a recorded command; the message says why."""


class Coverage(Protocol):
    """What a recorded command measures."""

    def problem(self, row: Row) -> str | None:
        """Why the command does not give this row, or None if it does."""
        ...


def _one_run(rows: Sequence[Row]) -> str | None:
    runs = sorted({r["run"] for r in rows})
    return f"rows of {len(runs)} runs: {', '.join(runs)}" if len(runs) > 1 else None


def _one_clock(rows: Sequence[Row]) -> str | None:
    clocks: dict[object, set[object]] = {}
    for row in rows:
        if row.get("gpu_method"):
            clocks.setdefault(row.get("variant"), set()).add(row["gpu_method"])
    mixed = [variant for variant, found in clocks.items() if len(found) > 1]
    return f"timed by graphs and by events{f': {mixed[0]}' if mixed[0] else ''}" if mixed else None


def _gradients(rows: Sequence[Row]) -> str | None:
    for row in rows:
        compared = row.get("grad_err") is not None or row["suite"] in ("training", "cpu")
        timed = row["gpu_us"] is not None or row["wall_us"] is not None
        if row["op"] == "fwd+bwd" and timed and not compared and row["suite"] != "first-call":
            return f"{row['impl']}: timed, but its gradients were not compared"
    return None


_RULES: tuple[Callable[[Sequence[Row]], str | None], ...] = (_one_run, _one_clock, _gradients)


def problems(rows: Iterable[Row], coverage_of: Callable[[Row], Coverage]) -> list[Problem]:
    """What is wrong with a record, group by group. `coverage_of` takes the header of a run."""
    headers, measured = split(rows)
    coverages: dict[str, Coverage | str] = {}
    for header in headers:
        try:
            coverages[header["run"]] = coverage_of(header)
        except NoSuchCommandError as error:
            coverages[header["run"]] = f"`{header['command']}` is no command: {error}"
    out = []
    for group, members in by_group(measured).items():
        found = [problem for rule in _RULES if (problem := rule(members))]
        for row in members:
            coverage = coverages.get(row["run"], f"no header of run {row['run']}")
            problem = coverage if isinstance(coverage, str) else coverage.problem(row)
            if problem and problem not in found:
                found.append(problem)
        out += [(group, problem) for problem in found]
    return out


def problem_text(problem: Problem) -> str:
    group, what = problem
    return f"{' '.join(str(part) for part in group if part)}: {what}"
