"""Times every plan that a forward could have, on random shapes, and says what the planner's choice costs.

Shapes are those of `sweep` for the same seed. Some have a fifth of the document tokens masked, and some are
calls with saved winners, normalization or 8-bit codes, which have kernels of their own. Every plan that the
library names for a shape (the alternatives of `explain_plan`) is forced once: its scores are compared with
those of the chosen plan, and it is timed. Regret is the time of the chosen plan over that of the best,
less 1. The thresholds in csrc/cuda/forward/sm90_rules.cpp follow the plain and masked calls;
tools/kernel_gains.py reads all of them.
"""

import gc
import statistics
import time
from contextlib import contextmanager

import torch

from bench.harness import results, run_header
from bench.harness.inputs import draw, quantize
from bench.harness.library import OURS
from bench.harness.results import new_row
from bench.harness.shape import IN_BATCH, PAIRS
from bench.tuning import kernel_fingerprint, random_shapes
from bench.tuning.plan_regret import H200, MASKED, OTHERS, PLAIN, SUITE, VARIANTS, names
from bench.tuning.random_shapes import draw_shapes
from late_interaction._doctor.checks import relative_error
from late_interaction._doctor.text import error_text
from late_interaction._doctor.timing import QUICK, sets_of_bytes, wall_time

COPIES = "copies"  # the plan for codes that no kernel multiplies
CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
GRAPH_US = 500.0  # GPU time of a graph, about
ROUNDS = 5
CLOSE = 1.15  # a plan within this factor of the best is timed again, interleaved
FAR = 2.5  # a plan beyond this factor at a first glance is not timed further
GLANCE_US = 200.0  # a glance at less may have timed the host, and excludes no plan
TOLERANCE = 1e-2

_cuda = torch.cuda


@contextmanager
def forced(name):
    """Every forward in the body takes this plan."""
    torch.ops.late_interaction.forced_plan(name)
    try:
        yield
    finally:
        torch.ops.late_interaction.forced_plan("")


# ---- time ----


class Clock:
    """GPU time by small CUDA graphs that share their memory. A few milliseconds a plan."""

    def __init__(self):
        self.stream = _cuda.Stream()
        self.pool = _cuda.graph_pool_handle()
        # One graph that stays keeps the pool alive between shapes.
        self.anchor = self.capture([lambda: torch.zeros(1, device="cuda")])

    def capture(self, calls):
        graph = _cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool)
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        return graph

    def glance(self, calls):
        """Microseconds of a call, or of enqueueing it if that takes longer."""
        start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return float(1e3 * start.elapsed_time(end) / len(calls))

    def graph(self, calls, about_us):
        """A function that replays `calls`, each at least once, and returns the microseconds of one."""
        rounds = max(1, round(GRAPH_US / about_us / len(calls)))
        graph = self.capture([*calls] * rounds)

        def replay():
            return self.glance([graph.replay]) / (rounds * len(calls))

        replay()
        return replay


def time_plans(plans, calls, clock):
    """(plan -> microseconds, plans that were only glanced at). Without a clock: wall time, nothing forced."""
    if clock is None:
        return {name: wall_time(calls, QUICK, torch.device("cpu")) for name in plans}, []
    gc.disable()  # freeing another graph's memory in the middle would spoil a capture
    try:
        return _time_interleaved(plans, calls, clock)
    finally:
        gc.enable()


def _time_interleaved(plans, calls, clock):
    times = {}
    replays = {}
    rough = []
    for name in plans:
        with forced(name):
            about = clock.glance(calls)  # the first call may load the kernel
            about = min(about, clock.glance(calls)) if about > GLANCE_US else about
            if times and about > max(GLANCE_US, FAR * min(times.values())):
                times[name] = about
                rough.append(name)
                continue
            replays[name] = clock.graph(calls, about)
        times[name] = statistics.median(replays[name]() for _ in range(2))
    best = min(times.values())
    close = {name: replay for name, replay in replays.items() if times[name] < CLOSE * best}
    again = {name: [] for name in close}
    for _ in range(ROUNDS):
        for name, replay in close.items():
            again[name].append(replay())
    return times | {name: statistics.median(found) for name, found in again.items()}, rough


# ---- a shape ----


def _calls(shape, variant, sets, mask):
    ops = torch.ops.late_interaction

    def call(x):
        D = x.D.unsqueeze(1) if shape.layout == PAIRS else x.D
        if variant.dtype in CODES:
            (q, scale_q), (c, scale_d) = (quantize(t, CODES[variant.dtype], True) for t in (x.Q, D))
            return lambda: ops.maxsim_quantized(q, c, scale_q, scale_d, None, mask)
        op = ops.maxsim_winners.default if variant.winners else ops.maxsim.default
        return lambda: op(x.Q, D, None, mask, variant.normalize)

    return [call(x) for x in sets]


def _scores(out):
    return out[0] if isinstance(out, tuple) else out


def run_shape(shape, variant_name, device, clock):
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    here = H200
    if properties is not None:
        here = 10 * properties.major + properties.minor, properties.multi_processor_count
    cache = 0 if properties is None else properties.L2_cache_size
    variant = VARIANTS[variant_name]
    plans = names(shape, variant, *here)
    if plans == [COPIES]:
        row = new_row(SUITE, shape, "fwd", torch.bfloat16, OURS, variant=variant_name, plan=COPIES)
        return {**row, "skipped": "no kernel multiplies such codes: float32 copies are scored"}
    count = sets_of_bytes(shape.input_bytes(2), cache, limit=32)
    sets = [draw(shape, device, torch.bfloat16) for _ in range(count)]
    mask = None
    if variant.masked:
        documents = (shape.Nd,) if shape.layout == IN_BATCH else (shape.Nq, shape.Nd)
        mask = torch.rand(*documents, shape.Ld, device=device) < 0.8
    calls = _calls(shape, variant, sets, mask)
    row = new_row(SUITE, shape, "fwd", torch.bfloat16, OURS, variant=variant_name, plan=plans[0])
    with torch.no_grad():
        wanted = _scores(calls[0]())
        wrong = []
        for name in plans if on_gpu else ():
            with forced(name):
                found = _scores(calls[0]())
            if not relative_error(found, wanted.double()) <= TOLERANCE:
                wrong.append(name)
        times, rough = time_plans(plans, calls, clock)
    best = min(times, key=times.__getitem__)
    row.update(device=here, best=best, regret=times[plans[0]] / times[best] - 1)
    row.update(gpu_us=times[plans[0]] if on_gpu else None, rough=rough)
    row["times"] = {name: float(f"{us:.4g}") for name, us in times.items()}
    if wrong:
        row["mismatch"] = wrong
    return row


# ---- the run ----


def add_arguments(p):
    random_shapes.add_arguments(p, SUITE)
    p.add_argument("--masked", type=int, default=60, help="shapes more, with a mask; default: 60")
    p.add_argument("--others", type=int, default=0, help="shapes in each of the other variants")


def jobs_of(args):
    """Every shape and variant of a run. Masked shapes are spread out, so that a stopped run has some too."""
    jobs = [(s, PLAIN) for s in draw_shapes(args.count, args.seed, small=args.dry_run)]
    for n, shape in enumerate(draw_shapes(args.masked, args.seed + 1, small=args.dry_run)):
        jobs.insert(n * (1 + args.count // max(1, args.masked)), (shape, MASKED))
    others = draw_shapes(args.others, args.seed + 2, small=args.dry_run)
    return jobs + [(shape, variant) for shape in others for variant in OTHERS]


def _missing(jobs, path):
    """The jobs of every shape that a record lacks a variant of: --merge replaces a shape as a whole."""
    recorded = {(r["shape"], r["variant"]) for r in results.split(results.read(path))[1]}
    lacking = {shape.name for shape, variant in jobs if (shape.name, variant) not in recorded}
    return [(shape, variant) for shape, variant in jobs if shape.name in lacking]


def run(args):
    start = time.perf_counter()
    device, path = random_shapes.begin(args, SUITE)
    jobs = jobs_of(args)
    if args.merge and path.exists():
        jobs = _missing(jobs, path)
    header = run_header.new_header(
        device, None, args.arguments, seed=args.seed, kernels=kernel_fingerprint.fingerprint()
    )
    out = results.Results(path, header, args.merge)
    clock = None if args.dry_run else Clock()
    rows = []
    for shape, variant in jobs:
        if time.perf_counter() - start > args.seconds:
            print(f"stopped in time, after {len(rows)} of {len(jobs)} shapes")
            break
        try:
            rows.append(run_shape(shape, variant, device, clock))
        except Exception as error:  # one shape must not end the run
            rows.append(new_row(SUITE, shape, "fwd", torch.bfloat16, OURS, variant=variant))
            rows[-1]["error"] = error_text(error)
        if device.type == "cuda" and torch.cuda.memory_reserved(device) > 20e9:
            torch.cuda.empty_cache()
    out.add(rows)
    results.print_faults(rows)
    rows = results.split(results.read(path))[1]
    print(f"{len(rows)} shapes in {path}, {time.perf_counter() - start:.0f} s")
    return 0
