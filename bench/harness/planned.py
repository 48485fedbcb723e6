"""The GPU that a record names: the one that is here, or an older one that it is planned as."""

from __future__ import annotations

import argparse
import os

import torch

from late_interaction import ops

OLDEST_WITH_WGMMA = 90


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--capability", type=int, metavar="N",
        help="plan for compute capability N, 80 for 8.0, and have Triton compile no wgmma below 90; the"
        " record is that of a device of its own",
    )  # fmt: skip


def plan_as(capability: int | None) -> None:
    """Before Triton compiles anything, which reads the variable."""
    if capability is None:
        return
    ops.cuda_capability(capability)
    if capability < OLDEST_WITH_WGMMA:
        os.environ["DISABLE_MMA_V3"] = "1"


def gpu_name(device: torch.device) -> str:
    name: str = torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    planned = ops.cuda_capability()
    return name if planned == 10 * major + minor else f"{name} planned as {planned // 10}.{planned % 10}"
