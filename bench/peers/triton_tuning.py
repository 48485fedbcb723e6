"""Compiles and tunes the kernels of the Triton peers for a list of shapes, before any shape is timed.

A peer's first call of a new kind compiles every configuration that its autotuner tries, one after the
other, and times each for an eighth of a second: minutes over hundreds of shapes, all of it on one core.
Here

1. every call is made once with the kernels' launch replaced, which says what it would tune;
2. processes on the other cores compile all configurations for one shape of each key: the code lies in
   Triton's cache on disk, where the measuring process finds it;
3. the measuring process lets the peers' own autotuners choose, on a shape that fills the GPU;
4. the other processes compile the chosen configuration for the remaining shapes.

The peers choose by their own rule among their own configurations; what changes is where compilation happens
and how long each candidate is timed. Whatever is missed here is compiled and tuned at the first call, as
always.
"""

import contextlib
import importlib
import math
import multiprocessing
import os
import pkgutil
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bench.harness.shape import Shape
from bench.peers.implementations import KEYS
from late_interaction._doctor.text import error_text
from late_interaction._doctor.timing import time_limit

PACKAGES = ("late_interaction_kernels", "flash_maxsim")
PARTS = 3  # jobs that share the configurations of a key
TUNE_ON = 2e11  # padded FLOPs, about 2 ms: a key is tuned on its largest shape up to this
STALLED_S = 60.0  # without a finished job, a process has died with its job
BENCH_MS = {"warmup": 2, "rep": 8}  # arguments of Triton's do_bench, for each configuration

Chosen = dict[tuple[str, str], dict[tuple[Any, ...], Any]]  # (module, kernel) -> key -> configuration


def padded_dim(d):
    return 1 << (d - 1).bit_length()


def padded_work(shape):
    """FLOPs of the tiles that cover a shape, as the peers cut it."""
    Lq = 128 * math.ceil(shape.Lq / 128) if shape.Lq > 512 else max(32, 1 << (shape.Lq - 1).bit_length())
    Ld = 64 * math.ceil(shape.Ld / 64)
    return 2.0 * shape.Nq * shape.Nd * Lq * Ld * max(64, padded_dim(shape.d))


class Job(NamedTuple):
    """A call that is made to compile a kernel."""

    peer: str
    shape: Shape
    part: int | None  # which part of the configurations; None: the chosen one
    chosen: Chosen
    op: str = "fwd"


class _Found(Exception):  # noqa: N818, not an error
    """Raised instead of a launch: the kernel and its key."""

    def __init__(self, kernel, key):
        super().__init__(kernel)
        self.kernel, self.key = kernel, key


def autotuners():
    """Every autotuned kernel of the peers, by the module that defines it and its name."""
    out = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in PACKAGES:
            for kernel in list(vars(module).values()):
                if type(kernel).__name__ == "Autotuner":
                    out[kernel.base_fn.__module__, kernel.base_fn.__name__] = kernel
    return out


def import_all():
    """Imports all modules of the peers, so that autotuners() is complete."""
    for package in PACKAGES:
        for module in pkgutil.iter_modules(getattr(sys.modules.get(package), "__path__", [])):
            with contextlib.suppress(Exception):
                importlib.import_module(f"{package}.{module.name}")


def _key_of(tuner, args, kwargs):
    """The key under which a call is tuned, as triton.runtime.autotuner makes it."""
    given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    known = {k: v for k, v in given.items() if k in tuner.arg_names}
    key = [known[k] for k in tuner.keys if k in known]
    return (*key, *(str(v.dtype) for v in known.values() if hasattr(v, "dtype")))


@contextmanager
def _nothing_launches():
    """In this context a kernel's launch raises _Found instead."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    before = autotuner.run, jit.run

    def tuned(self, *args, **kwargs):
        raise _Found(self.base_fn.__name__, _key_of(self, args, kwargs))

    def plain(self, *args, **kwargs):
        raise _Found(getattr(self, "__name__", "?"), None)

    autotuner.run, jit.run = tuned, plain
    try:
        yield
    finally:
        autotuner.run, jit.run = before


def _call(impl, shape, op="fwd"):
    """One forward, or one step by each strategy, on uninitialized memory: compilation does not depend on
    values."""
    Q = torch.empty(shape.q_shape, device="cuda", dtype=torch.bfloat16)
    D = torch.empty(shape.d_shape, device="cuda", dtype=torch.bfloat16)
    if op == "fwd":
        impl.score(shape, None, train=False)(Q, D)
        return
    for strategy in impl.backwards:
        leaves = Q.detach().requires_grad_(), D.detach().requires_grad_()
        scores = impl.score(shape, strategy, train=True)(*leaves)
        torch.autograd.grad(scores, leaves, torch.zeros_like(scores))


def find_keys(peers, shapes):
    """The keys that these calls are tuned under, with their shapes; calls without one are left out."""
    out = {}
    with _nothing_launches():
        for shape in shapes:
            for peer, impl in peers.items():
                try:
                    _call(impl, shape)
                except _Found as found:
                    if found.key is not None:
                        out.setdefault((peer, found.kernel, found.key), []).append(shape)
                except Exception:  # reported when the shape is measured
                    continue
    return out


def representative(shapes):
    """The shape to tune on: large enough to fill the GPU, small enough to try many configurations on."""
    small = [s for s in shapes if padded_work(s) <= TUNE_ON]
    return max(small, key=padded_work) if small else min(shapes, key=padded_work)


# ---- the processes that compile ----

_peers = {}


def _start_worker(peers):
    torch.set_num_threads(1)
    with contextlib.suppress(Exception):  # a process that fails here would be started again without end
        for peer in peers:
            _peers[peer] = KEYS[peer]()
    import_all()
    for kernel in autotuners().values():
        kernel.cache_results = False  # times taken beside other processes are worthless
        kernel.do_bench = _launch_once


def _launch_once(kernel_call, **_):
    kernel_call()
    return [0.0, 0.0, 0.0]


def _compile(job):
    """One call, which leaves its compiled kernels in Triton's cache. Returns the error, if any."""
    tuners = autotuners()
    configs = {name: kernel.configs for name, kernel in tuners.items()}
    try:
        for name, kernel in tuners.items():
            kernel.cache.clear()
            if job.part is None:
                kernel.cache.update(job.chosen.get(name, {}))
            else:
                kernel.configs = kernel.configs[job.part :: PARTS] or kernel.configs
        _call(_peers[job.peer], job.shape, job.op)
        torch.cuda.synchronize()
    except Exception as error:
        return error_text(error)
    finally:
        for name, kernel in tuners.items():
            kernel.configs = configs[name]
        torch.cuda.empty_cache()
    return None


def spare_cores():
    return max(1, min(14, (os.cpu_count() or 2) - 2))


@dataclass
class Compilers:
    """A pool of processes that compile, started once and idle while the GPU is timed. With 0 processes the
    first calls compile, which is no loss if Triton's cache on disk has the kernels."""

    peers: Sequence[str]
    processes: int = field(default_factory=spare_cores)
    _pool: Any = None

    def __enter__(self):
        if self.processes:
            context = multiprocessing.get_context("spawn")
            self._pool = context.Pool(self.processes, _start_worker, (tuple(self.peers),))
        return self

    def __exit__(self, *_):
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    def run(self, jobs, seconds):
        """Compiles until all is done, the time is up or nothing finishes any more. Returns what it did."""
        if self.processes == 0:
            return "left to the calls"
        start = moved = time.perf_counter()
        pending = [self._pool.apply_async(_compile, (job,)) for job in jobs]
        done = 0
        while done < len(jobs) and time.perf_counter() < min(start + seconds, moved + STALLED_S):
            time.sleep(0.02)
            ready = sum(result.ready() for result in pending)
            if ready > done:
                done, moved = ready, time.perf_counter()
        problems = [problem for result in pending if result.ready() and (problem := _outcome(result))]
        if done < len(jobs):  # what still runs would disturb the next timings
            self.__exit__()
            self.__enter__()
        text = f"{done} of {len(jobs)} jobs in {time.perf_counter() - start:.0f} s"
        return text + (f", {len(problems)} failed, first: {problems[0][:120]}" if problems else "")


def _outcome(result):
    try:
        problem = result.get()
    except Exception as error:  # raised in the process, or while its result was returned
        return error_text(error)
    return problem


# ---- run --warm: compile every configuration of every shape ----


def warm(implementations, shapes, op, seconds, log):
    """Fills Triton's cache on disk, on the other cores. The peers tune at their first calls as usual, but
    need not compile then."""
    known = {impl.name for impl in implementations}
    peers = [key for key in ("lik", "flash") if KEYS[key].name in known]
    if not peers or op == "bwd" or not torch.cuda.is_available():  # a step compiles those of a backward
        return
    jobs = [Job(peer, shape, part, {}, op) for shape in shapes for peer in peers for part in range(PARTS)]
    with Compilers(peers) as compilers:
        log(f"compiled ahead for {', '.join(peers)}: {compilers.run(jobs, seconds)}")


# ---- the process that measures ----


def _shorten_tuning():
    bench = importlib.import_module("triton.testing").do_bench

    def quick(kernel_call, quantiles):
        return bench(kernel_call, quantiles=quantiles, **BENCH_MS)

    for kernel in autotuners().values():
        kernel.do_bench = quick
        kernel.cache_results = True  # a second run finds them in Triton's cache


def prepare(peers, shapes, compilers, seconds, log):
    """Steps 1 to 4 for these shapes, in at most about `seconds`."""
    start = time.perf_counter()

    def left():
        return max(1.0, seconds - (time.perf_counter() - start))

    import_all()
    keys = find_keys(peers, shapes)
    tuned = {(name, key) for (_, name), kernel in autotuners().items() for key in kernel.cache}
    new = {key: representative(s) for key, s in keys.items() if key[1:] not in tuned}
    log(f"{len(keys)} keys, {len(new)} new, in {time.perf_counter() - start:.0f} s")
    parts = [Job(key[0], shape, part, {}) for key, shape in new.items() for part in range(PARTS)]
    log(f"configurations of the new keys: {compilers.run(parts, 0.5 * left())}")

    _shorten_tuning()
    began, failed = time.perf_counter(), 0
    for (peer, _, _), shape in new.items():
        if left() <= 1.0:
            break
        try:
            with time_limit(20):
                _call(peers[peer], shape)
                torch.cuda.synchronize()
        except Exception:  # reported when the shape is measured
            failed += 1
    torch.cuda.empty_cache()
    log(f"tuned in {time.perf_counter() - began:.0f} s, {failed} failed")

    chosen = {name: dict(kernel.cache) for name, kernel in autotuners().items()}
    rest = [Job(peer, shape, None, chosen) for shape in shapes for peer in peers]
    log(f"chosen configurations: {compilers.run(rest, left())}")
