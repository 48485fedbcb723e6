"""`python -m bench.record --part 1 --gpus 0,1 --out DIR`: the whole record of a GPU, in a few calls.

Each suite is one process on one GPU, in one go, and writes DIR/<job>.json after every shape; a GPU takes the
next job as soon as it is free. A job that would not end in time is not started, and is said at the end, with
how to go on. `python -m bench.merge DIR/*.json --out bench/results` makes the records of what is there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .results import ROOT, align, read, split

POLL_S = 0.5
MARGIN_S = 10.0  # of a call, for what follows the jobs


@dataclass(frozen=True)
class Job:
    name: str
    part: int
    seconds: float  # that it takes, about; more is not waited for than twice that
    arguments: tuple[str, ...]
    program: str = "bench"

    def command(self, out: Path, dry: bool, cores: int) -> list[str]:
        words = [sys.executable, "-m", self.program, *self.arguments, "--out", str(out / f"{self.name}.json")]
        words += ["--dry-run"] if dry else []
        if dry and self.program == "bench.plans":
            words += ["--masked", "1", "--others", "1"]
        if dry and self.program != "bench":
            words += ["--count", "2"]
        if self.program != "bench.plans":
            words += ["--no-plot"]
        if self.program == "bench.sweep":
            words += ["--processes", str(cores)]
        return words


def _suites(*names: str, limit: int = 20, warm: int = 0) -> tuple[str, ...]:
    warmed = ("--warm", str(warm)) if warm else ()
    return ("--suite", ",".join(names), "--limit", str(limit), *warmed)


# The longest first, so that the GPUs end at about the same time. Every suite is in one job.
JOBS = (
    Job("forward", 1, 240, _suites("forward", warm=90)),
    Job("training", 1, 330, _suites("training", warm=120)),
    Job("own", 1, 150, _suites("variants", "fp32", "steps")),
    Job("surface", 1, 150, _suites("quantized", "plaid", "retrieve")),
    Job("packed", 1, 120, _suites("fused-head", "varlen", "pairs-packed")),
    Job("sweep", 2, 400, ("--seconds", "420"), "bench.sweep"),
    Job("heads", 2, 200, _suites("heads")),
    Job(
        "plans", 2, 160, ("--seed", "1", "--count", "200", "--masked", "40", "--others", "60"), "bench.plans"
    ),
    Job("backward", 2, 100, _suites("backward")),
    Job("first-call", 2, 230, _suites("first-call")),
)


@dataclass
class _Running:
    job: Job
    gpu: str
    process: subprocess.Popen[str]
    log: IO[str]
    start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start


def _start(job: Job, gpu: str, out: Path, dry: bool, cores: int) -> _Running:
    log = (out / f"{job.name}.log").open("w")
    # Kernels that one job compiles lie there for the others.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "LIK_SUPPRESS_NORM_WARN": "1", "PYTHONUNBUFFERED": "1"}
    command = job.command(out, dry, cores)
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, text=True)
    return _Running(job, gpu, process, log)


@dataclass
class Recorder:
    """Runs jobs on GPUs until `end`, one on each at a time."""

    out: Path
    gpus: Sequence[str]
    end: float
    dry: bool = False
    outcomes: dict[str, tuple[str, float]] = field(default_factory=dict)  # job -> what came of it, seconds
    running: list[_Running] = field(default_factory=list)
    born: float = field(default_factory=time.perf_counter)

    def log(self, line: str) -> None:
        print(f"{time.perf_counter() - self.born:4.0f} s  {line}", flush=True)

    def run(self, jobs: Sequence[Job]) -> None:
        waiting = [*jobs]
        cores = max(1, (os.cpu_count() or 2) // len(self.gpus) - 2)
        try:
            while waiting or self.running:
                free = [gpu for gpu in self.gpus if gpu not in {r.gpu for r in self.running}]
                left = self.end - time.perf_counter()
                for gpu in free:
                    fits = [job for job in waiting if self.dry or job.seconds <= left]
                    if fits:
                        waiting.remove(fits[0])
                        self.running.append(_start(fits[0], gpu, self.out, self.dry, cores))
                        self.log(f"{fits[0].name} on GPU {gpu}")
                if not self.running:
                    break
                time.sleep(POLL_S)
                self.collect()
        finally:
            for each in self.running:  # interrupted
                each.process.kill()
        self.outcomes |= {job.name: ("not started: no time left", 0.0) for job in waiting}

    def collect(self) -> None:
        for each in [*self.running]:
            late = time.perf_counter() > self.end
            if late:
                each.process.terminate()
                each.process.wait()
            elif each.process.poll() is None:
                continue
            self.running.remove(each)
            each.log.close()
            code = each.process.returncode
            told = "stopped: out of time" if late else "done" if code == 0 else f"failed with {code}"
            self.outcomes[each.job.name] = told, each.seconds
            if told != "done":  # what it wrote is no whole suite
                path = self.out / f"{each.job.name}.json"
                if path.exists():
                    path.replace(path.with_suffix(".unfinished"))
            lines = (self.out / f"{each.job.name}.log").read_text().strip().splitlines()
            self.log(f"{each.job.name} {told} after {each.seconds:.0f} s: {lines[-1][:150] if lines else ''}")


def summary(out: Path, outcomes: dict[str, tuple[str, float]]) -> str:
    body = []
    for name, (told, seconds) in outcomes.items():
        path = out / f"{name}.json"
        rows = split(read(path))[1] if path.exists() else []
        timed = sum(r["gpu_us"] is not None or r["wall_us"] is not None for r in rows)
        errors = sum(bool(r.get("error")) for r in rows)
        over = sum(r.get("over_limit_s") is not None for r in rows)
        body.append([name, told, f"{seconds:.0f}", str(len(rows)), str(timed), str(errors), str(over)])
    return align(["job", "outcome", "seconds", "rows", "timed", "errors", "over limit"], body, left=2)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bench.record", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parts = sorted({job.part for job in JOBS})
    p.add_argument("--part", type=int, choices=parts, help="the jobs of one call; default: all jobs")
    p.add_argument("--jobs", default="", help=f"these instead: {','.join(job.name for job in JOBS)}")
    p.add_argument("--gpus", default="0", help="indices, comma-separated")
    p.add_argument("--out", type=Path, required=True, help="a folder; jobs whose file is there are done")
    p.add_argument("--seconds", type=float, default=590.0, help="that the call may take")
    p.add_argument("--list", action="store_true", help="say what would run, and stop")
    p.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    names = [name for name in args.jobs.split(",") if name]
    if unknown := set(names) - {job.name for job in JOBS}:
        print(f"--jobs {','.join(sorted(unknown))}: no such job", file=sys.stderr)
        return 2
    jobs = [job for job in JOBS if (job.name in names if names else args.part in (None, job.part))]
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in jobs if not (args.out / f"{job.name}.json").exists()]
    if args.list:
        for job in jobs:
            words = job.command(Path(), args.dry_run, 0)
            print(f"part {job.part}, {job.seconds:.0f} s: {shlex.join(['python', *words[1:]])}")
        return 0
    gpus = args.gpus.split(",")
    recorder = Recorder(args.out, gpus, time.perf_counter() + args.seconds - MARGIN_S, args.dry_run)
    recorder.run(jobs)
    print(f"\n{summary(args.out, recorder.outcomes)}")
    missing = [name for name, (told, _) in recorder.outcomes.items() if told != "done"]
    if missing:
        print(f"to go on: python -m bench.record --jobs {','.join(missing)} --gpus {args.gpus} --out DIR")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
