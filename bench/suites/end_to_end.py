"""Training steps of whole recipes, encoder and optimizer included, with each library's MaxSim in the loss.

The encoders are those of GTE-ModernColBERT, ColQwen2 and ColModernVBERT, of their true sizes with random
weights (bench/peers/encoders.py). The loss is cross entropy over the scores of all pairs of a batch, and what
differs is who computes it:

- `vanilla`: einsum, max and sum, as Sentence Transformers, PyLate and colpali-engine write it;
- `Sentence Transformers`: its own `maxsim`, which works through the documents in chunks (text alone);
- `LIK`: `late_interaction_kernels.maxsim`;
- `maxsim`: late_interaction's, up to a batch of 256 in a step;
- `contrastive_loss`: late_interaction's.

Three things are timed at each batch: the loss alone, on embeddings of the recipe's sizes; a step; and, from
the batch on that the encoder has no memory for, a step by `cached_contrastive_step` (GradCache), whichever
the loss. Batches double from 32 until vanilla's loss runs out of memory, and once more. A variant that ran
out of memory is left out of larger batches. Before anything is timed, the loss and its gradients of every
variant are compared with exact ones. Variants run interleaved in one process, in another order each round: a
warm-up call and the median of the next ones, at least --rounds and as many as take three seconds (40 at
most), with their spread; after a warm-up of over a second one call, and of calls that take over three seconds
the first, which is the only one. A recipe begins nothing that would end after its share of --seconds.

    python -m bench end-to-end --out bench/results/end-to-end-nvidia-h200.json    # `report` shows it
    python -m bench end-to-end --only colqwen2 --batches 512 --seconds 400
    python -m bench end-to-end --dry-run                                          # tiny models, no GPU
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.harness.batches import TEMPERATURE
from bench.harness.ceilings import Ceilings
from bench.harness.results import Row, split
from bench.harness.run_header import new_header, package_version
from bench.harness.work_record import WorkRecord
from bench.peers.encoders import RECIPES, Recipe
from bench.suites.recipe_run import MODES, RecipeRun
from bench.suites.training_steps import release

BATCHES = tuple(32 << n for n in range(9))
SECONDS = 210.0


# ---- the record ----


def _broken_command(header: Row) -> str | None:
    words = shlex.split(header["command"])
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    try:
        unknown = parser.parse_known_args(words[4:])[1]
    except argparse.ArgumentError as error:
        return f"`{header['command']}` is no command: {error}"
    if words[:4] != ["python", "-m", "bench", "end-to-end"] or unknown:
        return f"`{header['command']}` is no command of this suite"
    return None


def broken_rules(record: Sequence[Row]) -> list[str]:
    """What is wrong with a record: a row of no run, a command that the program does not take, a time of a
    loss whose gradients were not compared."""
    headers, rows = split(record)
    out = [problem for header in headers if (problem := _broken_command(header))]
    runs = {header["run"] for header in headers}
    for row in rows:
        where = f"{row['work']}, {row['batch']}"
        if row["run"] not in runs:
            out.append(f"{where}: no header of run {row['run']}")
        for name, values in row["variants"].items():
            if "s" in values and not isinstance(values.get("grad_err"), float):
                out.append(f"{where}, {name}: timed, but its gradients were not compared")
    return out


# ---- the program ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=_names, help=f"some of {','.join(RECIPES)}")
    parser.add_argument("--batches", type=int, nargs="+", help="queries, and as many documents")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each variant, at least")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for all recipes, building them included"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry-run", action="store_true", help="tiny models: whether it runs at all")
    parser.add_argument("--out", type=Path, help="a record, written row by row; others of its rows stay")


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in RECIPES:
            raise argparse.ArgumentTypeError(f"there is no recipe {name!r}: {', '.join(RECIPES)}")
    return names


def _missing(recipe: Recipe) -> list[str]:
    return [name for name in recipe.packages if importlib.util.find_spec(name) is None]


def measure(args: argparse.Namespace) -> list[Row]:
    """The rows, printed as they come."""
    device = torch.device(args.device)
    os.environ.setdefault("LIK_SUPPRESS_NORM_WARN", "1")
    torch.manual_seed(0)
    wanted = args.only or list(RECIPES)
    packages = {name: package_version(name) for name in ("transformers", "peft", "sentence-transformers")}
    top = new_header(
        device, Ceilings(), args.arguments, packages={k: v for k, v in packages.items() if v},
        temperature=TEMPERATURE, recipes={name: RECIPES[name].about for name in wanted},
    )  # fmt: skip
    keep = WorkRecord(args.out, top).keep if args.out else lambda row: None
    rows: list[Row] = []
    end = time.monotonic() + args.seconds
    for i, name in enumerate(wanted):
        recipe = RECIPES[name]
        if missing := _missing(recipe):
            print(f"{name} is not measured: no package {', '.join(missing)}", flush=True)
            continue
        weights = [RECIPES[other].weight for other in wanted[i:]]
        until = time.monotonic() + (end - time.monotonic()) * weights[0] / sum(weights)
        encoder = recipe.build(device, args.dry_run, True)
        run = RecipeRun(recipe, encoder, keep, args.rounds, until, args.modes, dry_run=args.dry_run)
        if args.dry_run:
            run.part, run.rounds, run.enough_s = 3, 1, 0.0
        rows += run.measure(args.batches or ((4, 8) if args.dry_run else BATCHES))
        del run, encoder
        gc.collect()
        release(device)
    return rows


def run(args: argparse.Namespace) -> int:
    if torch.device(args.device).type != "cuda" and not args.dry_run:
        print("models of true sizes need a GPU; --dry-run takes tiny ones")
        return 2
    measure(args)
    return 0
