"""Which rows the command of a recorded run measures, by the programs of today."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from collections.abc import Callable, Iterable, Sequence

from bench.harness import rules, sweep_summary
from bench.harness.library import EINSUM, GEMM, MAXSIM_CPU, NUMKONG, OURS
from bench.harness.named_shapes import select
from bench.harness.results import Row
from bench.harness.run_header import todays_command
from bench.harness.shape import Shape
from bench.peers.implementations import KEYS
from bench.suites import run, sweep
from bench.suites.catalog import ON_CPU, SUITES
from bench.tuning import plan_regret, plans
from bench.tuning.random_shapes import draw_shapes

Variants = tuple[str | None, ...]


def _parse(
    add_arguments: Callable[[argparse.ArgumentParser], None], words: Sequence[str]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args([*words])
    except SystemExit as stop:
        raise rules.NoSuchCommandError(said.getvalue().strip().splitlines()[-1]) from stop


class Coverage:
    """What a recorded command measures: shapes and variants by suite, and implementations."""

    def __init__(self, header: Row) -> None:
        words = shlex.split(todays_command(header["command"]))
        command, given = words[3:4], words[4:]
        self.suites: dict[str, tuple[Sequence[Shape], Variants]] = {}
        self.impls = {cls.name for cls in KEYS.values()}
        if words[:3] != ["python", "-m", "bench"] or command not in (["run"], ["sweep"], ["plans"]):
            raise rules.NoSuchCommandError(f"{' '.join(words[:4])} records nothing")
        if command == ["run"]:
            device = "cuda" if header["gpu"] else "cpu"  # the default of the machine that it ran on
            self._cover_run(_parse(run.add_arguments, ["--device", device, *given]))
        elif command == ["sweep"]:
            args = _parse(sweep.add_arguments, given)
            self.impls = {KEYS[key].name for key in args.impl.split(",")}
            self.suites[sweep_summary.SUITE] = draw_shapes(args.count, args.seed), (None,)
        else:
            jobs = plans.jobs_of(_parse(plans.add_arguments, given))
            self.impls = {OURS}
            self.suites[plan_regret.SUITE] = [shape for shape, _ in jobs], tuple(plan_regret.VARIANTS)

    def _cover_run(self, args: argparse.Namespace) -> None:
        if problem := run.problem(args):
            raise rules.NoSuchCommandError(problem)
        if args.device == "cpu":
            for name, suite in ON_CPU.items():
                if args.suite and name not in args.suite:
                    continue
                self.suites[name] = select(suite.shapes, args.shapes), suite.variants
            self.impls = {OURS, EINSUM, MAXSIM_CPU, NUMKONG, GEMM}
            return
        if args.impl:
            self.impls = {KEYS[key].name for key in args.impl}
        for name in args.suite or SUITES:
            suite = SUITES[name]
            shapes = [*suite.shapes, *(suite.large if args.large else ())]
            self.suites[name] = select(shapes, args.shapes), suite.variants

    def problem(self, row: Row) -> str | None:
        if row["suite"] not in self.suites:
            return "its command does not measure this suite"
        shapes, variants = self.suites[row["suite"]]
        if not any(_is_of(row, shape) for shape in shapes):
            return "its command does not measure this shape"
        if row.get("variant") not in variants:
            return f"there is no variant {row.get('variant')!r}"
        suite = SUITES.get(row["suite"]) or ON_CPU.get(row["suite"])
        if row["impl"] not in self.impls and row["impl"] not in (suite.peers if suite else ()):
            return f"its command does not measure {row['impl']}"
        return None


def _is_of(row: Row, shape: Shape) -> bool:
    """Nq is not compared: a variant may score one of a shape's queries."""
    sizes = (shape.name, shape.Nd, shape.Lq, shape.Ld, shape.d, shape.layout)
    return sizes == tuple(row[k] for k in ("shape", "Nd", "Lq", "Ld", "d", "layout"))


def broken_rules(rows: Iterable[Row]) -> list[str]:
    """What is wrong with a record, a line each."""
    return [rules.problem_text(problem) for problem in rules.problems(rows, Coverage)]
