"""Say what is installed, and how right and how fast it is here: ``python -m late_interaction.doctor``.

It prints tables, and with ``--json FILE`` writes the same to a file, which names nobody and no folder: post
it with a question or a report. The status is 1 if an operator is wrong.

The file is an object of these keys:

- ``version``: 1, of this form; ``made``: the day;
- ``device``: ``type``, ``name``, ``cpu``, ``threads``, and of a GPU ``driver``, ``capability``,
  ``planned_as`` and ``multiprocessors``;
- ``installed``: distributions and their versions, null for what is missing; ``libraries``: what serves
  ``cpu`` (its instruction set) and ``cuda`` (the build, or why there is none);
- ``operators``: rows of ``check``, ``dtype``, ``error`` (relative, against float64), ``limit``, ``ok`` and
  ``raised``;
- ``ceilings``: ``product_bf16_tflops``, ``product_tf32_tflops`` (float32 at precision "high"),
  ``read_gb_s``, ``copy_gb_s``, ``call_us`` and ``step_us``, the host's share of PyTorch's smallest call and
  step; ``rates``: rows of ``type``, ``measured``, ``planned`` (operations a clock and multiprocessor) and
  ``differs``, of a GPU;
- ``timings``: rows of ``shape``, ``Nq``, ``Nd``, ``Lq``, ``Ld``, ``d``, ``dtype``, ``step`` (with both
  gradients) and ``us``, the microseconds of each library or why it has none.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from late_interaction import __version__, ops
from late_interaction._doctor import checks, speed
from late_interaction._doctor.ceilings import measure_ceilings
from late_interaction._doctor.machine import cpu_name, driver, gpu_name, package_version
from late_interaction._doctor.text import align, number, without_folders
from late_interaction._doctor.timing import QUICK
from late_interaction.ops._gpu_fit import why_on_no_gpu
from late_interaction.ops._library import cuda_build, operators

__all__: list[str] = []  # a command

_PEERS = ("late-interaction-kernels", "flash-maxsim", "maxsim-cpu")
_BESIDE = ("triton", "sentence-transformers", "pylate", "colpali-engine", "transformers", "numpy")


def examine(device: torch.device) -> dict[str, Any]:
    """Check and time the operators on a device, within a minute or two, in the form that the module says."""
    on_gpu = device.type == "cuda"
    os.environ.setdefault("LIK_SUPPRESS_NORM_WARN", "1")  # tokens are drawn with and without a norm of 1
    versions = {"late_interaction": __version__, "python": platform.python_version()}
    installed = versions | {"torch": torch.__version__} | {x: package_version(x) for x in (*_PEERS, *_BESIDE)}
    missing = _why_no_cuda()
    cuda = f"none: {missing}" if missing else f"_cuda, {cuda_build}"
    found: dict[str, Any] = {
        "version": 1, "made": date.today().isoformat(), "device": _device(device), "installed": installed,
        "libraries": {"cpu": f"_C, {operators.cpu_isa('')}", "cuda": cuda},
        "operators": [*checks.run(device)],
    }  # fmt: skip
    size, gib = (8192, 4.0) if on_gpu else (2048, 0.5)
    if on_gpu:
        gib = min(gib, torch.cuda.get_device_properties(device).total_memory / 2**33)
    c = measure_ceilings(QUICK, device, size, gib)
    found["ceilings"] = {
        "product_bf16_tflops": c.cublas_tflops, "product_tf32_tflops": c.cublas_tf32_tflops,
        "read_gb_s": 1e3 * (c.read_tbps or 0), "copy_gb_s": 1e3 * (c.copy_tbps or 0),
        "call_us": c.product_us, "step_us": c.product_step_us,
    }  # fmt: skip
    native = on_gpu and not _is_forced(device)
    found["rates"] = speed.rates(c, device) if native else []
    found["timings"] = [*speed.timings(device, installed)]
    return found


def _is_forced(device: torch.device) -> bool:
    major, minor = torch.cuda.get_device_capability(device)
    return ops.cuda_capability() != 10 * major + minor


def _device(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"type": device.type, "cpu": cpu_name(), "threads": torch.get_num_threads()}
    if device.type == "cpu":
        return found | {"name": found["cpu"]}
    gpu = torch.cuda.get_device_properties(device)
    return found | {
        "name": gpu_name(device), "driver": driver(), "capability": [gpu.major, gpu.minor],
        "planned_as": ops.cuda_capability(), "multiprocessors": gpu.multi_processor_count,
    }  # fmt: skip


def _why_no_cuda() -> str | None:
    """Say why nothing serves the CUDA tensors of this process; None where there is a library for them."""
    reason = ops.cuda_missing
    if reason is None and cuda_build is not None and torch.cuda.is_available():
        reason = why_on_no_gpu(cuda_build)
    return reason and without_folders(reason)


def report(found: dict[str, Any]) -> str:
    """Write what :func:`examine` found as tables."""
    device, libraries, checked = found["device"], found["libraries"], found["operators"]
    facts = {name: version or "-" for name, version in found["installed"].items()} | {
        "device": f"{device['name']}, {device['threads']} threads", "driver": device.get("driver") or "-",
        "CPU tensors": libraries["cpu"], "CUDA tensors": libraries["cuda"],
    }  # fmt: skip
    best = [[name.replace("_", " "), number(value)] for name, value in found["ceilings"].items()]
    of = ("type", "measured", "planned")
    rates = [
        [row["type"], *(number(row[x]) for x in of[1:]), "over 20% apart" if row["differs"] else ""]
        for row in found["rates"]
    ]
    names = list(dict.fromkeys(name for row in found["timings"] for name in row["us"]))
    times = [[_call(row), *(_cell(row["us"].get(name)) for name in names)] for row in found["timings"]]
    wrong = sum(not row["ok"] for row in checked)
    parts = [
        align(["", ""], [[*fact] for fact in facts.items()], 2).split("\n", 2)[2],
        align(["operator: error beside float64", *checks.LIMITS, ""], _errors(checked)),
        align(["ceiling, by PyTorch", ""], best),
        align(["operations a clock and multiprocessor", *of[1:], ""], rates) if rates else "",
        align(["microseconds: Nq x Nd, Lq, Ld", *names], times),
        f"{wrong} of {len(checked)} checks are WRONG" if wrong else f"All {len(checked)} checks agree.",
    ]
    return "\n\n".join(part for part in parts if part)


def _errors(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return a line for each check, with its errors by dtype."""
    by_check: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_check.setdefault(row["check"], {})[row["dtype"]] = row
    lines = []
    for check, found in by_check.items():
        cells = [_error(found.get(dtype)) for dtype in checks.LIMITS]
        said = [row["raised"] or f"WRONG: over {row['limit']:g}" for row in found.values() if not row["ok"]]
        lines.append([check, *cells, "; ".join(said) or "ok"])
    return lines


def _error(row: dict[str, Any] | None) -> str:
    return "" if row is None else "-" if row["error"] is None else f"{row['error']:.0e}"


def _call(row: dict[str, Any]) -> str:
    step = ", both gradients" if row["step"] else ""
    return f"{row['Nq']} x {row['Nd']}, {row['Lq']}, {row['Ld']}, {row['dtype']}{step}"


def _cell(time: float | str | None) -> str:
    return time.partition(":")[0] if isinstance(time, str) else number(time)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m late_interaction.doctor", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--cpu", action="store_true", help="the CPU, though there is a GPU that is served")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings, to post")
    parser.add_argument("--capability", type=int, metavar="N", help="plan as for 8.0 (80), ...")
    args = parser.parse_args(arguments)
    if args.capability:
        ops.cuda_capability(args.capability)
    on_cpu = args.cpu or not torch.cuda.is_available() or _why_no_cuda()
    device = torch.device("cpu" if on_cpu else "cuda")
    found = examine(device)
    print(report(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(not all(row["ok"] for row in found["operators"]))


if __name__ == "__main__":
    sys.exit(main())
