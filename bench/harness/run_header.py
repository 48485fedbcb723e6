"""The header of a run: where, when and with what its rows were measured."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.harness import planned
from bench.harness.ceilings import Ceilings
from bench.harness.library import LIK, OURS
from bench.harness.results import ROOT, Row


def package_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit that is measured: LATE_INTERACTION_COMMIT (for a copy without history), or what git says."""
    if given := os.environ.get("LATE_INTERACTION_COMMIT"):
        return given
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip() or None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0] if lines else None


def _own_version() -> str | None:
    installed = package_version("late-interaction")
    file = ROOT / "VERSION"
    return installed or (file.read_text().strip() if file.exists() else None)


_FILES = ("--out", "--tokens")


def _without_files(arguments: Sequence[str]) -> list[str]:
    """The arguments without files: a record names no place on the machine that it was made on."""
    out: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith(tuple(f"{flag}=" for flag in _FILES)):
            skip = argument in _FILES
            out += [] if skip else [argument]
        else:
            skip = False
    return out


def todays_command(command: str) -> str:
    """A recorded command as today's program takes it.

    In earlier records the program alone stands for `run`, and the module bench.sweep for `sweep`. --no-plot
    kept both from drawing; now `report` alone draws.
    """
    words = [word for word in shlex.split(command) if word != "--no-plot"]
    if words[:2] != ["python", "-m"]:
        return command
    program, arguments = words[2], words[3:]
    if program.startswith("bench."):
        arguments = [program.removeprefix("bench."), *arguments]
    elif program == "bench" and (not arguments or arguments[0].startswith("-")):
        arguments = ["run", *arguments]
    return shlex.join(["python", "-m", "bench", *arguments])


def new_header(device: torch.device, ceilings: Ceilings, arguments: Sequence[str] = (), **values: Any) -> Row:
    """Where, when and with what the rows that share its `run` were measured. `arguments` are those of
    `python -m bench`."""
    on_gpu = device.type == "cuda"
    versions = {
        OURS: _own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{p: package_version(p) for p in ("triton", LIK, "flash-maxsim", "inf-cl", "numpy")},
        **{p: package_version(p) for p in ("maxsim-cpu", "numkong", "qdrant-client", "lancedb")},
    }
    header: Row = {
        "kind": "header",
        "run": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "versions": {k: v for k, v in versions.items() if v is not None},
        "gpu": planned.gpu_name(device) if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "command": shlex.join(["python", "-m", "bench", *_without_files(arguments)]),
        "cublas_tflops": ceilings.cublas_tflops,
        "cublas_tf32_tflops": ceilings.cublas_tf32_tflops,
        "read_tbps": ceilings.read_tbps,
        "copy_tbps": ceilings.copy_tbps,
        "product_us": ceilings.product_us,
        "product_step_us": ceilings.product_step_us,
    }
    header.update(values)
    return header


def text_head(device: torch.device, arguments: Sequence[str], program: str = "python") -> str:
    """The same in one line, for a record that is a text file."""
    who = f"{cpu_name()}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        who = f"{planned.gpu_name(device)}, driver {_driver()}"
    command = shlex.join([*shlex.split(program), "-m", "bench", *_without_files(arguments)])
    return f"{who}, torch {torch.__version__}, commit {_commit()}: `{command}`"


def keep_text(text: str, path: Path | None, head: str) -> None:
    """Prints tables, and appends them to a text file with their head."""
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{head}\n\n{text}\n\n")
