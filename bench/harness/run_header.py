"""The header of a run: where, when and with what its rows were measured."""

import dataclasses
import os
import platform
import shlex
from datetime import datetime, timezone
from pathlib import Path

import torch

from bench.harness.library import LIK, OURS
from bench.harness.results import ROOT
from late_interaction import ops
from late_interaction._doctor.ceilings import Ceilings
from late_interaction._doctor.machine import cpu_name, driver, gpu_name, package_version, said
from late_interaction._doctor.text import align, number

_FILES = ("--out", "--tokens", "--plot", "--vllm")
_PACKAGES = (
    "triton", LIK, "flash-maxsim", "inf-cl", "numpy", "maxsim-cpu", "numkong", "qdrant-client", "lancedb",
)  # fmt: skip
OLDEST_WITH_WGMMA = 90


# ---- the GPU that a record names: the one that is here, or an older one that it is planned as ----


def add_capability(parser):
    parser.add_argument(
        "--capability", type=int, metavar="N",
        help="plan for compute capability N, 80 for 8.0, and have Triton compile no wgmma below 90; the"
        " record is that of a device of its own",
    )  # fmt: skip


def plan_as(capability):
    """Before Triton compiles anything, which reads the variable."""
    if capability is None:
        return
    ops.cuda_capability(capability)
    if capability < OLDEST_WITH_WGMMA:
        os.environ["DISABLE_MMA_V3"] = "1"


# ---- what else a header says ----


def _commit():
    """The commit that is measured: LATE_INTERACTION_COMMIT (for a copy without history), or what git says."""
    described = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return os.environ.get("LATE_INTERACTION_COMMIT") or said(*described, folder=ROOT)


def command_of(arguments, program="python"):
    """The command without files: a record names no place on the machine that it was made on."""
    words = [word for i, word in enumerate(arguments) if not i or arguments[i - 1] not in _FILES]
    flags = tuple(f"{flag}=" for flag in _FILES)
    words = [word for word in words if word not in _FILES and not word.startswith(flags)]
    return shlex.join([*shlex.split(program), "-m", "bench", *words])


def new_header(device, ceilings=None, arguments=(), **values):
    """Where, when and with what the rows that share its `run` were measured. `arguments` are those of
    `python -m bench`."""
    on_gpu, file = device.type == "cuda", ROOT / "VERSION"
    own = package_version("late-interaction") or (file.read_text().strip() if file.exists() else None)
    versions = {OURS: own, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {"cuda": torch.version.cuda, **{name: package_version(name) for name in _PACKAGES}}
    return {
        "kind": "header",
        "run": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "versions": {k: v for k, v in versions.items() if v is not None},
        "gpu": gpu_name(device) if on_gpu else None,
        "driver": driver() if on_gpu else None,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "command": command_of(arguments),
        **dataclasses.asdict(ceilings or Ceilings()),
        **values,
    }


def add_table_arguments(p, **sizes):
    """The options of a command that prints tables: the device, sizes with their defaults, and a file."""
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in sizes.items():
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
    p.add_argument("--out", type=Path, help="a file that the tables are appended to")


def listed(kind):
    """For an argument's type: values that commas separate."""
    return lambda text: [kind(part) for part in text.split(",") if part]


def table(rows, left=1):
    """Rows as plain text, of words and figures: columns are their keys, of which a row may lack some."""
    head = [*dict.fromkeys(key for row in rows for key in row)]
    cells = [[row.get(key, "") for key in head] for row in rows]
    return align(head, [[x if isinstance(x, str) else number(x) for x in row] for row in cells], left)


def keep_text(text, args, program="python"):
    """Print tables, and append them to the file --out, below a line with what a header says."""
    print(text)
    if args.out is None:
        return
    who, device = f"{cpu_name()}, {torch.get_num_threads()} threads", torch.device(args.device)
    if device.type == "cuda":
        who = f"{gpu_name(device)}, driver {driver()}"
    made_with = f"torch {torch.__version__}, commit {_commit()}: `{command_of(args.arguments, program)}`"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(f"{who}, {made_with}\n\n{text}\n\n")
