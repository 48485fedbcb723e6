"""Times late_interaction beside the peers that are installed, in one process, on this machine.

Results are compared with an fp64 reference before anything is timed. On a GPU it runs the suites below, on a
machine without one the CPU suite. A run without filters writes bench/results/<device>.json; a filtered one
writes <device>.partial.json, unless --merge or --out is given. `python -m bench report` makes the pages.
"""

import sys
import time
from pathlib import Path

import torch

from bench.harness import measuring, named_shapes, results, run_header
from bench.harness.measuring import Settings
from bench.peers import triton_tuning
from bench.peers.implementations import KEYS, load
from bench.suites.catalog import ON_CPU, SUITES
from late_interaction._doctor.ceilings import Ceilings, measure_ceilings
from late_interaction._doctor.timing import QUICK, Effort

LIMIT_S = 40.0
TUNING = "once for each key of their own caches, at the first shape"
LISTS = "\n".join([
    "suites:",
    *(f"  {name:13} {suite.about}" for name, suite in SUITES.items()),
    "\nsuites of a CPU:",
    *(f"  {name:13} {suite.about}" for name, suite in ON_CPU.items()),
    "\nimplementations:",
    *(f"  {key:13} {implementation.name}" for key, implementation in KEYS.items()),
])  # fmt: skip


# ---- the command line, which a record's header repeats ----


def add_arguments(p):
    here, words = "cuda" if torch.cuda.is_available() else "cpu", run_header.listed(str)
    p.add_argument("--device", choices=["cuda", "cpu"], default=here, help="default: the GPU if there is one")
    p.add_argument("--suite", type=words, default=[], help="suites, comma-separated; default: all")
    p.add_argument("--shapes", type=words, default=[], help="names or parts of names, comma-separated")
    p.add_argument("--impl", type=words, default=[], help=f"some of {','.join(KEYS)}; default: all")
    p.add_argument("--quick", action="store_true", help="fewer repetitions, no first calls, no torch.compile")
    p.add_argument("--limit", type=float, help="seconds that one implementation may compile and tune a shape")
    p.add_argument(
        "--warm", type=float, default=0.0, metavar="SECONDS",
        help="compile for the Triton peers on all cores first, at most this long for each suite",
    )  # fmt: skip
    p.add_argument("--large", action="store_true", help="also the shapes that take minutes (contrastive)")
    p.add_argument("--out", type=Path, help="the JSON file; default: bench/results/<device>.json")
    p.add_argument(
        "--merge", action="store_true", help="replace the groups of --out that are measured, keep the others"
    )
    p.add_argument("--dry-run", action="store_true", help="the GPU suites on the CPU, in tiny shapes")
    run_header.add_capability(p)


def problem(args):
    """What is wrong with the arguments, in one line."""
    suites = (*SUITES, *ON_CPU)
    for flag, given, known in (("--suite", args.suite, suites), ("--impl", args.impl, (*KEYS,))):
        if unknown := [g for g in given if g not in known]:
            return f"{flag} {','.join(unknown)} is none of {','.join(known)}"
    if args.merge and args.impl:
        return "--merge replaces whole groups, so it does not take --impl"
    return None


def _missing_here(args):
    """Why the device cannot do what the arguments ask for."""
    on_gpu = args.device == "cuda" or args.dry_run
    if other := [name for name in args.suite if name not in (SUITES if on_gpu else ON_CPU)]:
        return f"--suite {','.join(other)} is for a {'CPU' if on_gpu else 'GPU'}"
    if args.device == "cuda" and not args.dry_run and not torch.cuda.is_available():
        return "--device cuda, but PyTorch sees no GPU"
    return None


def chosen(args, on_gpu):
    """The shapes of each suite that the arguments ask for."""
    known = SUITES if on_gpu else ON_CPU
    out = {}
    for name in args.suite or known:
        suite = known[name]
        shapes = suite.tiny if args.dry_run else [*suite.shapes, *(suite.large if args.large else ())]
        out[name] = named_shapes.select(shapes, args.shapes)
    return out


# ---- the run ----


def _target(args, device):
    """The file that is written: the device's record for a whole run, a partial file for a filtered one."""
    if args.out:
        return Path(args.out)
    name = "cpu" if device.type == "cpu" else results.slug(run_header.gpu_name(device))
    filtered = args.suite or args.shapes or args.impl or args.quick or args.dry_run
    name = "dry-run" if args.dry_run else name
    return results.DIRECTORY / f"{name}{'.partial' if filtered and not args.merge else ''}.json"


def _settings(args, device):
    on_gpu = device.type == "cuda" or args.dry_run
    keys = args.impl or [k for k in KEYS if not (args.quick and k == "compile")]
    implementations, missing = load(keys, device) if on_gpu else ([], {})
    for name, why in missing.items():
        print(f"{name} is not measured: {why}")
    effort = QUICK if args.quick or args.dry_run else Effort()
    return Settings(
        device=device, dtype=torch.bfloat16, implementations=implementations, effort=effort,
        ceilings=measure_ceilings(effort, device) if device.type == "cuda" else Ceilings(),
        limit_s=args.limit or LIMIT_S, compiles=not args.quick,
    )  # fmt: skip


def _header(args, settings):
    more = {"l2_mib": settings.cache_bytes / 2**20, "peers_tuned": TUNING} if settings.on_gpu else {}
    header = run_header.new_header(settings.device, settings.ceilings, args.arguments, **more)
    c = settings.ceilings
    if c.cublas_tflops:
        products = f"cuBLAS bf16 {c.cublas_tflops:.0f} and TF32 {c.cublas_tf32_tflops:.0f} TFLOP/s"
        print(f"{header['gpu']}: {products}, reads {c.read_tbps:.2f} TB/s, copies {c.copy_tbps:.2f} TB/s")
    return header


def run(args):
    if wrong := problem(args) or _missing_here(args):
        print(wrong, file=sys.stderr)
        return 2
    start = time.perf_counter()
    device = torch.device("cpu" if args.dry_run else args.device)
    torch.manual_seed(0)
    settings = _settings(args, device)
    on_gpu = settings.on_gpu or args.dry_run
    out = results.Results(_target(args, device), _header(args, settings), args.merge)
    try:
        for name, shapes in chosen(args, on_gpu).items():
            suite = (SUITES if on_gpu else ON_CPU)[name]
            if args.quick and name == "first-call" and not args.suite:
                continue
            if args.warm and suite.op:
                triton_tuning.warm(settings.implementations, shapes, suite.op, args.warm, settings.log)
            measuring.run(settings, out, name, shapes, suite.measure)
    except results.IncompleteError as incomplete:
        print(incomplete, file=sys.stderr)
        return 2
    results.print_faults(out.rows)
    print(f"{len(out.rows)} rows in {out.path}, {time.perf_counter() - start:.0f} s")
    return 0
