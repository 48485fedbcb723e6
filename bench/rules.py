"""The rules of a record, which make its figures comparable and repeatable.

1. A group (suite, shape, op and, for steps, the kind of winners) comes from one run: all its implementations
   and variants are measured in one process, one after the other or interleaved.
2. Implementations that are compared were timed by one clock.
3. A step's gradients were compared with the reference before it was timed, but for a first call.
4. The command of its run is one that today's program takes, and it measures this suite, shape, variant and
   implementation.

`python -m bench check` names the rows that break a rule, and so does a test.
"""

import argparse
import contextlib
import io
import shlex

from bench.harness.library import EINSUM, GEMM, MAXSIM_CPU, NUMKONG, OURS
from bench.harness.results import by_group, split
from bench.peers.implementations import KEYS
from bench.suites import end_to_end, run, sentence_transformers, sweep
from bench.suites.catalog import ON_CPU, SUITES
from bench.tuning import plan_regret, plans
from bench.tuning.random_shapes import draw_shapes

ADD_ARGUMENTS = {
    "run": run.add_arguments, "sweep": sweep.add_arguments, "plans": plans.add_arguments,
    "st": sentence_transformers.add_arguments, "end-to-end": end_to_end.add_arguments,
}  # fmt: skip


class NoSuchCommandError(Exception):
    """Today's program does not take a recorded command; the message says why."""


def _parsed(command):
    words = shlex.split(command)
    name = words[3] if len(words) > 3 else ""
    if words[:3] != ["python", "-m", "bench"] or name not in ADD_ARGUMENTS:
        raise NoSuchCommandError(f"{' '.join(words[:4])} records nothing")
    parser, said = argparse.ArgumentParser(), io.StringIO()
    ADD_ARGUMENTS[name](parser)
    try:
        with contextlib.redirect_stderr(said):
            return name, parser.parse_args(words[4:])
    except SystemExit as stop:
        raise NoSuchCommandError(said.getvalue().strip().splitlines()[-1]) from stop


class Coverage:
    """Return what a recorded command measures: shapes and variants by suite, and implementations."""

    def __init__(self, header):
        name, args = _parsed(header["command"])
        self.suites = {}
        self.impls = {cls.name for cls in KEYS.values()}
        if name == "run":
            if problem := run.problem(args):
                raise NoSuchCommandError(problem)
            on_gpu = bool(header["gpu"])
            if args.impl:
                self.impls = {KEYS[key].name for key in args.impl}
            if not on_gpu:
                self.impls = {OURS, EINSUM, MAXSIM_CPU, NUMKONG, GEMM}
            for suite, shapes in run.chosen(args, on_gpu).items():
                self.suites[suite] = shapes, (SUITES if on_gpu else ON_CPU)[suite].variants
        elif name == "sweep":
            self.impls = {KEYS[key].name for key in args.impl}
            self.suites[sweep.SUITE] = draw_shapes(args.count, args.seed), (None,)
        elif name == "plans":
            self.impls = {OURS}
            shapes = [shape for shape, _ in plans.jobs_of(args)]
            self.suites[plan_regret.SUITE] = shapes, tuple(plan_regret.VARIANTS)

    def problem(self, row):
        """Why the command does not give this row, or None if it does."""
        if "work" in row:
            return None
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


def _is_of(row, shape):
    """Nq is not compared: a variant may score one of a shape's queries."""
    sizes = (shape.name, shape.Nd, shape.Lq, shape.Ld, shape.d, shape.layout)
    return sizes == tuple(row[k] for k in ("shape", "Nd", "Lq", "Ld", "d", "layout"))


def _one_run(rows):
    runs = sorted({r["run"] for r in rows})
    return f"rows of {len(runs)} runs: {', '.join(runs)}" if len(runs) > 1 else None


def _one_clock(rows):
    clocks = {}
    for row in rows:
        if row.get("gpu_method"):
            clocks.setdefault(row.get("variant"), set()).add(row["gpu_method"])
    mixed = [variant for variant, found in clocks.items() if len(found) > 1]
    return f"timed by graphs and by events{f': {mixed[0]}' if mixed[0] else ''}" if mixed else None


def _gradients(rows):
    for row in rows:
        for name, values in row.get("variants", {}).items():  # of a recipe's step
            if "s" in values and not isinstance(values.get("grad_err"), float):
                return f"{name}: timed, but its gradients were not compared"
        compared = row.get("grad_err") is not None or row.get("suite") == "first-call"  # a process of its own
        timed = row.get("gpu_us") is not None or row.get("wall_us") is not None
        if row.get("op") == "fwd+bwd" and timed and not compared:
            return f"{row['impl']}: timed, but its gradients were not compared"
    return None


def broken_rules(record):
    """List the faults of a record: a group and its problem each."""
    headers, measured = split(record)
    coverages = {}
    for header in headers:
        try:
            coverages[header["run"]] = Coverage(header)
        except NoSuchCommandError as error:
            coverages[header["run"]] = f"`{header['command']}` is no command: {error}"
    out = []
    for group, rows in by_group(measured).items():
        found = [problem for rule in (_one_run, _one_clock, _gradients) if (problem := rule(rows))]
        for row in rows:
            coverage = coverages.get(row["run"], f"no header of run {row['run']}")
            problem = coverage if isinstance(coverage, str) else coverage.problem(row)
            if problem and problem not in found:
                found.append(problem)
        where = " ".join(str(part) for part in group if part)
        out += [f"{where}: {problem}" for problem in found]
    return out
