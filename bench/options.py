"""The command line of `python -m bench`, which a record's header repeats."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .catalog import SUITES
from .impls import KEYS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMIT_S, FULL_LIMIT_S = 40.0, 240.0


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure late_interaction beside its peers, in one process, on this machine.",
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", choices=["cuda", "cpu"], default=here)
    p.add_argument("--suite", type=_list, default=[], help=f"some of {','.join(SUITES)} (GPU); default: all")
    p.add_argument("--shapes", type=_list, default=[], help="names or parts of names, comma-separated")
    p.add_argument("--impl", type=_list, default=[], help=f"some of {','.join(KEYS)}; default: all")
    p.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of the GPU suites")
    p.add_argument("--quick", action="store_true", help="fewer repetitions, no first calls, no torch.compile")
    p.add_argument(
        "--full", action="store_true", help="tune the peers for every shape, torch.compile every shape"
    )
    p.add_argument("--limit", type=float, help="seconds that one implementation may compile and tune a shape")
    p.add_argument(
        "--warm", type=float, default=0.0, metavar="SECONDS",
        help="first compile for the Triton peers on all cores, at most this long for each suite",
    )  # fmt: skip
    p.add_argument("--out", type=Path, help="the JSON file; default: bench/results/<device>.json")
    p.add_argument(
        "--merge",
        action="store_true",
        help="put what is measured now in the place of the same groups in --out",
    )
    p.add_argument("--no-plot", action="store_true")
    p.add_argument("--dry-run", action="store_true", help="the GPU suites on the CPU, in tiny shapes")
    return p


def problem(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, in one line."""
    for flag, given, known in (("--suite", args.suite, (*SUITES,)), ("--impl", args.impl, (*KEYS,))):
        if unknown := [g for g in given if g not in known]:
            return f"{flag} {','.join(unknown)} is none of {','.join(known)}"
    if args.merge and (args.impl or args.dtype != "bf16"):
        return "--merge replaces whole groups: it goes with neither --impl nor --dtype"
    return None


def is_filtered(args: argparse.Namespace) -> bool:
    """Whether the run leaves out something of what a record holds."""
    return bool(args.suite or args.shapes or args.impl or args.quick or args.dtype != "bf16" or args.dry_run)
