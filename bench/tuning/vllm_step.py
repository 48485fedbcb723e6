"""What vLLM's runner takes to score a step of a server, by its own Triton kernel and with the patch.

    python -m bench vllm-step --vllm FOLDER --out bench/results/vllm-<device>.txt

A step is one query with some candidates, views of one tensor of hidden states. `own` is
`LateInteractionRunner._score` as it is: documents are packed, and halved to float16 for its kernel, which the
autotuner has tuned before. `patched` is the same method after `li.patch("vllm")`. Wall time is the median of
rounds that take turns, from the call to the end of the device's work; device time is the sum of the kernels
and copies of a step, by PyTorch's profiler. `error` is the largest difference of a score from float64, over
the largest score.

vLLM need not be installed: FOLDER is a wheel's content, of which `vllm/v1/pool` is enough. Of other modules
that this folder imports stand-ins are made.
"""

import importlib
import logging
import statistics
import sys
import warnings
from itertools import product
from pathlib import Path
from types import ModuleType

import torch
from torch.profiler import ProfilerActivity, profile

import late_interaction as li
from bench.harness.run_header import add_table_arguments, keep_text, listed, table
from late_interaction._doctor.text import error_text
from late_interaction._doctor.timing import in_turn, sync

RUNNER = "vllm.v1.pool.late_interaction_runner"
LENGTHS = "20,180,300,1030,20-1030"
PROFILED = 5  # steps, whose kernels are added up


def load_runner(folder):
    """The class of vLLM's runner, from the files of its wheel; a new one with each call."""
    pool = folder / "vllm" / "v1" / "pool"
    if not (pool / "late_interaction_runner.py").is_file():
        raise FileNotFoundError(f"--vllm must hold vllm/v1/pool of a wheel of vLLM, and {folder} does not")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    import triton
    import triton.language

    for name, path in (("vllm", None), ("vllm.v1", None), ("vllm.v1.pool", str(pool))):
        package = _stand_in(name)
        package.__path__ = [path] if path else []
    _stand_in("vllm.logger", init_logger=logging.getLogger)
    _stand_in("vllm.pooling_params", LateInteractionParams=object, PoolingParams=object)
    _stand_in("vllm.v1.outputs", PoolerOutput=object)
    _stand_in("vllm.triton_utils", triton=triton, tl=triton.language)
    return importlib.import_module(RUNNER).LateInteractionRunner


def _stand_in(name, **members):
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    outer, _, own = name.rpartition(".")
    if outer:
        setattr(sys.modules[outer], own, module)
    return module


def draw(candidates, lengths, Lq, d, dtype, device):
    """The query, and documents that lie in one tensor of hidden states."""
    generator = torch.Generator().manual_seed(0)
    least, _, most = lengths.partition("-")
    sizes = torch.randint(int(least), int(most or least) + 1, (candidates,), generator=generator).tolist()
    both = torch.randn(Lq + sum(sizes), d, generator=generator)
    hidden = torch.nn.functional.normalize(both, dim=-1).to(device, dtype)
    query, documents = hidden.split((Lq, sum(sizes)))
    return query.clone(), list(documents.split(sizes))


def device_time(call, device):
    """Microseconds of the kernels and copies of a call."""
    if device.type != "cuda":
        return float("nan")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            call()
        sync(device)
    return sum(event.self_device_time_total for event in seen.key_averages()) / PROFILED


def error(scores, query, documents):
    wanted = torch.stack([(query.double() @ x.double().T).amax(1).sum() for x in documents])
    return float((torch.stack(scores).double() - wanted).abs().max() / wanted.abs().max())


def both_ways(folder, device):
    """Score a step by the runner's own method, and by what the patch puts in place of another copy's."""
    own, patched = load_runner(folder)(), load_runner(folder)
    before = patched._score
    with warnings.catch_warnings():  # of what a server's step does not need
        warnings.simplefilter("ignore")
        li.patch("vllm")
    if patched._score is before:
        raise RuntimeError("patch('vllm') left the runner as it is")

    def by_own(queries, documents):
        scores = own._score(queries, documents)
        if device.type == "cuda" and not own._flash_enabled:
            raise RuntimeError("vLLM's own kernel failed, and its runner turned it off")
        return scores

    return {"own": by_own, "patched": patched()._score}


def rows(args, ways):
    device = torch.device(args.device)
    for dtype, lengths, count in product(args.dtypes, args.lengths, args.candidates):
        row = {"dtype": dtype, "tokens": lengths, "candidates": f"{count:,}"}
        try:
            yield row | measure(args, ways, dtype, lengths, count, device)
        except Exception as failure:  # of one shape, which must not end the others
            yield row | {"own us": error_text(failure)[:60]}


def measure(args, ways, dtype, lengths, count, device):
    query, documents = draw(count, lengths, args.Lq, args.dims, getattr(torch, dtype), device)
    queries = [query] * count
    calls = {name: lambda way=way: way(queries, documents) for name, way in ways.items()}
    off = {name: error(call(), query, documents) for name, call in calls.items()}
    times = in_turn(calls, device, args.rounds)
    wall = {name: 1e6 * statistics.median(taken) for name, taken in times.items()}
    return {
        **{f"{name} us": us for name, us in wall.items()},
        **{f"{name} device us": device_time(call, device) for name, call in calls.items()},
        "own / patched": f"{wall['own'] / wall['patched']:.2f}x",
        "error, own / patched": " / ".join(f"{x:.1g}" for x in off.values()),
    }


def add_arguments(p):
    p.add_argument("--vllm", type=Path, required=True, help="the folder with vllm/v1/pool of a wheel")
    p.add_argument("--candidates", type=listed(int), default="1,10,100,1000")
    p.add_argument("--lengths", type=listed(str), default=LENGTHS, help="of documents, or the least and most")
    p.add_argument("--dtypes", type=listed(str), default="float32,bfloat16")
    add_table_arguments(p, Lq=32, dims=128, rounds=20)


def run(args):
    ways = both_ways(args.vllm, torch.device(args.device))
    title = f"a query of {args.Lq} tokens, {args.dims} dims, documents in one tensor"
    keep_text(f"{title}\n{table(list(rows(args, ways)))}", args)
    return 0
