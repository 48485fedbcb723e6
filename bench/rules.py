"""What a record must keep to, so that its figures can be compared and taken again.

1. A group (suite, shape, op and, of steps, the kind of winners) comes from one run: all implementations and
   variants of it, in one process, one after the other or in turns.
2. Implementations that stand beside each other were timed by one clock.
3. A step's gradients were compared before it was timed.
4. The command of its run is one that today's program takes, and gives rows of this suite, shape, variant and
   implementation.

`python -m bench.report --check` says which rows do not, and so does a test.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from collections.abc import Callable, Iterable, Sequence

from . import options, plans, sweep
from .catalog import CPU, ON_CPU, SUITES, Suite
from .cpu import GEMM, MAXSIM_CPU
from .draws import draw_shapes
from .impls import EINSUM, KEYS, OURS
from .results import Row, by_group, split
from .shapes import Shape, select

Problem = tuple[tuple[object, ...], str]  # the group, and what is wrong with it


class _NoSuchCommandError(Exception):
    pass


def _arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return parser.parse_args([*words])
    except SystemExit as stop:
        raise _NoSuchCommandError(told.getvalue().strip().splitlines()[-1]) from stop


class _Command:
    """What a recorded command measures."""

    def __init__(self, header: Row) -> None:
        words = shlex.split(header["command"])
        program, given = " ".join(words[:3]), words[3:]
        self.suites: dict[str, Suite] = {}
        self.impls = {cls.name for cls in KEYS.values()}
        if program == "python -m bench":
            device = "cuda" if header["gpu"] else "cpu"  # the default of the machine that it ran on
            self._of_bench(_arguments(options.parser(), ["--device", device, *given]))
        elif program == "python -m bench.sweep":
            args = _arguments(sweep.parser(), given)
            self.impls = {KEYS[key].name for key in args.impl.split(",")}
            self.suites[sweep.SUITE] = Suite(draw_shapes(args.count, args.seed))
        elif program == "python -m bench.plans":
            shapes = [shape for shape, _ in plans.jobs_of(_arguments(plans.parser(), given))]
            self.impls = {OURS}
            self.suites[plans.SUITE] = Suite(shapes, variants=tuple(plans.VARIANTS))
        else:
            raise _NoSuchCommandError(f"{program} records nothing")

    def _of_bench(self, args: argparse.Namespace) -> None:
        if problem := options.problem(args):
            raise _NoSuchCommandError(problem)
        if args.device == "cpu":
            self.suites[CPU] = Suite(select(ON_CPU.shapes, args.shapes))
            self.impls = {OURS, EINSUM, MAXSIM_CPU, GEMM}
            return
        if args.impl:
            self.impls = {KEYS[key].name for key in args.impl}
        for name in args.suite or SUITES:
            suite = SUITES[name]
            self.suites[name] = Suite(select(suite.shapes, args.shapes), variants=suite.variants)

    def problem(self, row: Row) -> str | None:
        suite = self.suites.get(row["suite"])
        if suite is None:
            return "its command does not measure this suite"
        if not any(_same(shape, row) for shape in suite.shapes):
            return "its command does not measure this shape"
        if row.get("variant") not in suite.variants:
            return f"there is no variant {row.get('variant')!r}"
        if row["impl"] not in self.impls:
            return f"its command does not measure {row['impl']}"
        return None


def _same(shape: Shape, row: Row) -> bool:
    """A variant may take one of a shape's queries."""
    sizes = (shape.name, shape.Nd, shape.Lq, shape.Ld, shape.d, shape.layout)
    return sizes == tuple(row[k] for k in ("shape", "Nd", "Lq", "Ld", "d", "layout"))


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
        compared = row.get("grad_err") is not None or row["suite"] in ("training", CPU)
        timed = row["gpu_us"] is not None or row["wall_us"] is not None
        if row["op"] == "fwd+bwd" and timed and not compared and row["suite"] != "first-call":
            return f"{row['impl']}: timed, but its gradients were not compared"
    return None


_RULES: tuple[Callable[[Sequence[Row]], str | None], ...] = (_one_run, _one_clock, _gradients)


def problems(rows: Iterable[Row]) -> list[Problem]:
    """What is wrong with a record, group by group."""
    headers, measured = split(rows)
    runs = {h["run"]: h for h in headers}
    commands: dict[str, _Command | str] = {}
    for run, header in runs.items():
        try:
            commands[run] = _Command(header)
        except _NoSuchCommandError as error:
            commands[run] = f"`{header['command']}` is no command: {error}"
    out = []
    for group, members in by_group(measured).items():
        found = [problem for rule in _RULES if (problem := rule(members))]
        for row in members:
            command = commands.get(row["run"], f"no header of run {row['run']}")
            problem = command if isinstance(command, str) else command.problem(row)
            if problem and problem not in found:
                found.append(problem)
        out += [(group, problem) for problem in found]
    return out


def told(problem: Problem) -> str:
    group, what = problem
    return f"{' '.join(str(part) for part in group if part)}: {what}"
