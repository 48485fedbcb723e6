"""Makes the whole record of a GPU in a few calls: a job for each group of suites, the sweep and the plans.

    python -m bench record --part 1 --gpus 0,1 --out DIR     # then --part 2; or
    python -m bench record --gpus 0,1,2,3 --out DIR
    python -m bench merge DIR/*.json                         # into the records of bench/results

Each job is one process on one GPU and writes DIR/<job>.json. A GPU takes the longest job that is left as soon
as it is free. A job that would not end in time is not started; the end of a call says which jobs are missing
and how to go on. A job whose file is there is not run again. The sweep, for which the peers compile for
minutes, takes the time that is left and goes on from there in the next call, if the machine has kept its
cache. Needs PyTorch and numpy alone, and no network.
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

from bench.harness.results import ROOT, read, split
from bench.harness.text import align

POLL_S = 0.5
MARGIN_S = 10.0  # of a call, for what follows the jobs
UNFINISHED = ".unfinished"  # the ending of a job's file that may lack shapes


@dataclass(frozen=True)
class Job:
    """One process on one GPU."""

    name: str
    part: int
    seconds: float  # how long it takes on an H200, about
    arguments: tuple[str, ...]  # of `python -m bench`
    least: float = 0.0  # it is not started when less time is left; 0: than `seconds`

    def fits(self, left: float) -> bool:
        return (self.least or self.seconds) <= left

    def command(self, out: Path, dry: bool, cores: int, left: float = 1e9) -> list[str]:
        kind = self.arguments[0]
        words = [sys.executable, "-m", "bench", *self.arguments, "--out", str(out / f"{self.name}.json")]
        if dry:
            words += ["--dry-run"]
            words += ["--count", "2"] if kind in ("sweep", "plans") else []
            words += ["--masked", "1", "--others", "1"] if kind == "plans" else []
        if kind == "sweep":
            words += ["--processes", str(cores), "--seconds", f"{min(self.seconds, left) - MARGIN_S:.0f}"]
        return words


def _suites(*names: str, limit: int = 20, warm: int = 0) -> tuple[str, ...]:
    warmed = ("--warm", str(warm)) if warm else ()
    return ("run", "--suite", ",".join(names), "--limit", str(limit), *warmed)


# A part is ten minutes of two GPUs. Every suite is in one job.
JOBS = (
    Job("training", 1, 370, _suites("training", warm=120)),
    Job("first-call", 1, 270, _suites("first-call")),
    Job("backward", 1, 220, _suites("backward")),
    Job("forward", 1, 190, _suites("forward", warm=90)),
    Job("heads", 1, 75, _suites("heads")),
    Job("sweep", 2, 450, ("sweep", "--merge"), least=150),
    Job("short", 2, 190, _suites("short", "short-steps", warm=60)),
    Job("surface", 2, 110, _suites("quantized", "plaid", "retrieve")),
    Job("plans", 2, 105, ("plans", "--seed", "1", "--count", "200", "--masked", "40", "--others", "60")),
    Job("contrastive", 2, 90, _suites("contrastive", limit=60)),
    Job("packed", 2, 80, _suites("fused-head", "varlen", "pairs-packed")),
    Job("own", 2, 75, _suites("variants", "fp32", "steps")),
    Job("host", 2, 50, _suites("host")),
    Job("xtr", 2, 30, _suites("xtr", "smooth")),
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


def _start(job: Job, gpu: str, out: Path, dry: bool, cores: int, left: float) -> _Running:
    log = (out / f"{job.name}.log").open("w")
    before = out / f"{job.name}{UNFINISHED}"
    if "--merge" in job.arguments and before.exists():
        before.replace(out / f"{job.name}.json")
    # Jobs share the cache of Triton: a kernel that one of them compiled is there for the next.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "LIK_SUPPRESS_NORM_WARN": "1", "PYTHONUNBUFFERED": "1"}
    command = job.command(out, dry, cores, left)
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, text=True)
    return _Running(job, gpu, process, log)


@dataclass
class Recorder:
    """Runs jobs on GPUs until `end`, one on each at a time."""

    out: Path
    gpus: Sequence[str]
    end: float
    dry: bool = False
    outcomes: dict[str, tuple[str, float]] = field(default_factory=dict)  # job -> (outcome, seconds)
    running: list[_Running] = field(default_factory=list)
    born: float = field(default_factory=time.perf_counter)

    def log(self, line: str) -> None:
        print(f"{time.perf_counter() - self.born:4.0f} s  {line}", flush=True)

    def run(self, jobs: Sequence[Job]) -> None:
        waiting = [*jobs]
        # How many processes compile for the sweep: each job has its share of the cores, less two for itself.
        cores = max(1, (os.cpu_count() or 2) // len(self.gpus) - 2)
        try:
            while waiting or self.running:
                free = [gpu for gpu in self.gpus if gpu not in {r.gpu for r in self.running}]
                left = self.end - time.perf_counter()
                for gpu in free:
                    fits = [job for job in waiting if self.dry or job.fits(left)]
                    if fits:
                        job = max(fits, key=lambda job: job.seconds)
                        waiting.remove(job)
                        self.running.append(_start(job, gpu, self.out, self.dry, cores, left))
                        self.log(f"{job.name} on GPU {gpu}")
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
            outcome = "stopped: out of time" if late else "done" if code == 0 else f"failed with {code}"
            self.outcomes[each.job.name] = outcome, each.seconds
            if outcome != "done":  # its file may lack shapes
                path = self.out / f"{each.job.name}.json"
                if path.exists():
                    path.replace(path.with_suffix(UNFINISHED))
            lines = (self.out / f"{each.job.name}.log").read_text().strip().splitlines()
            last = lines[-1][:150] if lines else ""
            self.log(f"{each.job.name} {outcome} after {each.seconds:.0f} s: {last}")


def summary(out: Path, outcomes: dict[str, tuple[str, float]]) -> str:
    body = []
    for name, (outcome, seconds) in outcomes.items():
        path = out / f"{name}.json"
        rows = split(read(path))[1] if path.exists() else []
        timed = sum(r["gpu_us"] is not None or r["wall_us"] is not None for r in rows)
        errors = sum(bool(r.get("error")) for r in rows)
        over = sum(r.get("over_limit_s") is not None for r in rows)
        body.append([name, outcome, f"{seconds:.0f}", str(len(rows)), str(timed), str(errors), str(over)])
    return align(["job", "outcome", "seconds", "rows", "timed", "errors", "over limit"], body, left=2)


def add_arguments(p: argparse.ArgumentParser) -> None:
    parts = sorted({job.part for job in JOBS})
    p.add_argument("--part", type=int, choices=parts, help="the jobs of one call; default: all jobs")
    p.add_argument("--jobs", default="", help=f"these instead: {','.join(job.name for job in JOBS)}")
    p.add_argument("--gpus", default="0", help="indices, comma-separated")
    p.add_argument("--out", type=Path, required=True, help="a folder; jobs whose file is there are done")
    p.add_argument("--seconds", type=float, default=590.0, help="how long the call may take; default: 590")
    p.add_argument("--list", action="store_true", help="print what would run, and stop")
    p.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")


def run(args: argparse.Namespace) -> int:
    names = [name for name in args.jobs.split(",") if name]
    if unknown := set(names) - {job.name for job in JOBS}:
        print(f"--jobs {','.join(sorted(unknown))}: no such job", file=sys.stderr)
        return 2
    jobs = [job for job in JOBS if (job.name in names if names else args.part in (None, job.part))]
    out = args.out.resolve()  # jobs run in the root of the checkout
    out.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in jobs if not (out / f"{job.name}.json").exists()]
    if args.list:
        for job in jobs:
            words = job.command(Path(), args.dry_run, 0)
            print(f"part {job.part}, {job.seconds:.0f} s: {shlex.join(['python', *words[1:]])}")
        return 0
    gpus = args.gpus.split(",")
    recorder = Recorder(out, gpus, time.perf_counter() + args.seconds - MARGIN_S, args.dry_run)
    recorder.run(jobs)
    print(f"\n{summary(out, recorder.outcomes)}")
    missing = [name for name, (outcome, _) in recorder.outcomes.items() if outcome != "done"]
    if missing:
        print(f"to go on: python -m bench record --jobs {','.join(missing)} --gpus {args.gpus} --out DIR")
    return int(bool(missing))
