"""The machine and its installed distributions."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from late_interaction import ops
from late_interaction.integrations._shared.compat import installed_release
from late_interaction.plan import explain_plan

package_version = installed_release


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def said(*command: str, folder: Path | None = None) -> str | None:
    """Return the first line that a program prints, or None where it fails."""
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip().partition("\n")[0] or None


def driver() -> str | None:
    """Return the version of the NVIDIA driver, as nvidia-smi says it."""
    return said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def gpu_name(device: torch.device) -> str:
    """Return what a GPU calls itself, and what it is planned as if that is another."""
    name: str = torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    planned = ops.cuda_capability()
    return name if planned == 10 * major + minor else f"{name} planned as {planned // 10}.{planned % 10}"


def planned_rates(**gpu: Any) -> dict[str, int | None]:
    """Return the planner's rates of a GPU, as :func:`late_interaction.explain_plan` names it.

    They are operations a clock and multiprocessor; None where its tensor cores have no such type.
    """

    def said_of(dtype: torch.dtype) -> str:
        shape = (1, 32, 128), (1000, 300, 128)
        text = explain_plan(*shape, dtype=dtype, precision="highest", winners=False, **gpu)
        return str(re.findall(r"(?<=rates ).*", text)[0])

    int8, fp8, exact = map(said_of, (torch.int8, torch.float8_e4m3fn, torch.float32))
    fp16, tf32, ffma = map(int, re.findall(r"(\d+)(?: operations| in| by)", exact))
    codes = {"int8": int(int8.split()[0]), "fp8": None if "widened" in fp8 else int(fp8.split()[0])}
    return {"fp16": fp16, **codes, "tf32": tf32, "ffma": ffma}
