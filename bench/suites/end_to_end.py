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
the batch on that the encoder has no memory for, a step by `cached_contrastive_step` (GradCache), whichever the
loss. Batches double from 32 until vanilla's loss runs out of memory, and once more. A variant that ran out of
memory is left out of larger batches. Before anything is timed, the loss and its gradients of every variant are
compared with exact ones. Variants run interleaved in one process: a warm-up call and the median of the next
ones, or one call where it takes over a second. A recipe begins nothing that would end after its share of
--seconds.

    python -m bench end-to-end --out bench/results/end-to-end-nvidia-h200.json    # `report` shows it
    python -m bench end-to-end --only colqwen2 --batches 512 --seconds 400
    python -m bench end-to-end --dry-run                                          # tiny models, no GPU
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness import batches
from bench.harness.batches import TEMPERATURE, Batch, Loss
from bench.harness.ceilings import Ceilings
from bench.harness.library import EINSUM, LIK, OURS, UnsupportedError
from bench.harness.parity import worst_error
from bench.harness.results import Row, split
from bench.harness.run_header import new_header, package_version
from bench.harness.shape import BatchShape
from bench.harness.text import error_text, number
from bench.harness.work_record import WorkRecord
from bench.peers import losses
from bench.peers.encoders import DIM, RECIPES, Encoder, Recipe
from bench.peers.losses import Method
from bench.suites.training_steps import (
    ENCODER,
    Call,
    Step,
    alone_call,
    interleaved,
    optimizer_of,
    release,
    step_call,
)

Keep = Callable[[Row], None]
VANILLA, ST, PEER, MAXSIM, EXACT = "vanilla", "Sentence Transformers", "LIK", "maxsim", "contrastive_loss"
VARIANTS = (VANILLA, ST, PEER, MAXSIM, EXACT)
ALONE, STEP, CACHED = "loss alone", "step", "GradCache step"
MODES = (ALONE, STEP, CACHED)
BATCHES = tuple(32 << n for n in range(9))
MAXSIM_UP_TO = 256  # in a step; contrastive_loss keeps the winners too where they are small
CHECKED = 128  # queries of the batch whose gradients are compared
SECONDS = 210.0
AGAIN = 1.5  # about what GradCache's second forward adds to a step
LEFT_OUT = "not run"


# ---- the losses ----


def _sentence_transformers(shape: BatchShape) -> Loss:
    maxsim: Any = importlib.import_module("sentence_transformers.util.similarity").maxsim

    def run(x: Batch) -> torch.Tensor:
        scores = maxsim(x.Q, x.D)
        return F.cross_entropy(scores / TEMPERATURE, torch.arange(len(scores), device=scores.device))

    return run


def _has_sentence_transformers() -> bool:
    try:
        return hasattr(importlib.import_module("sentence_transformers.util.similarity"), "maxsim")
    except ImportError:
        return False


def methods_of(recipe: Recipe, shape: BatchShape, device: torch.device) -> dict[str, Method]:
    """Who computes the loss here, in the order of VARIANTS."""
    found = {(m.impl, m.variant): m for m in losses.methods(shape)}
    vanilla = found[EINSUM, losses.SCORED]
    out = {VANILLA: vanilla}
    if recipe.is_text and _has_sentence_transformers():
        out[ST] = Method(ST, losses.SCORED, _sentence_transformers, vanilla.kept_bytes, vanilla.limits)
    if device.type == "cuda" and importlib.util.find_spec("late_interaction_kernels"):
        out[PEER] = found[LIK, losses.SCORED]
    return {**out, MAXSIM: found[OURS, losses.SAVED], EXACT: found[OURS, losses.EXACT]}


def gradient_errors(
    methods: dict[str, Method], shape: BatchShape, encoder: Encoder
) -> dict[str, float | str]:
    """The largest relative error of each loss and its gradients on planted inputs, or why it is not timed."""
    drawn = batches.draw_batch(shape, encoder.device, encoder.dtype)
    known = batches.plant_batch(shape, drawn)
    out: dict[str, float | str] = {}
    for name, method in methods.items():
        try:
            found = batches.step(method.make(shape), known.batch)
            gradients = [x.view(y.shape) for x, y in zip(found[1:], known.gradients, strict=True)]
            error = worst_error((found[0], *gradients), [known.loss, *known.gradients])
            out[name] = error if error <= method.limits[1] else f"wrong: off by {error:.2g}"
        except Exception as error:  # the others are timed all the same
            out[name] = error_text(error)
    return out


# ---- one recipe ----


@dataclass
class RecipeRun:
    """Measures a recipe, batch by batch, until a moment of time.monotonic()."""

    recipe: Recipe
    encoder: Encoder
    keep: Keep
    rounds: int
    until: float
    modes: Sequence[str] = MODES
    part: int | None = None  # of GradCache; None: the recipe's
    dry_run: bool = False
    dead: dict[str, set[str]] = field(default_factory=lambda: {mode: set() for mode in MODES})
    pace: dict[str, tuple[int, float]] = field(default_factory=dict)  # a batch, and the seconds of its call
    over: set[str] = field(default_factory=set)  # modes without time or memory for more

    def __post_init__(self) -> None:
        self.optimizer = optimizer_of(self.encoder)
        self.part = self.part or self.recipe.part

    def shape(self, batch: int) -> BatchShape:
        e = self.encoder
        return BatchShape(f"{self.recipe.name}-{batch}", batch, batch, e.query, e.document, DIM)

    def measure(self, wanted: Sequence[int]) -> list[Row]:
        checked = self.shape(min(CHECKED, 8) if self.dry_run else CHECKED)
        errors = gradient_errors(methods_of(self.recipe, checked, self.encoder.device), checked, self.encoder)
        rows: list[Row] = []
        for batch in wanted:
            gone = VANILLA in self.dead[ALONE] | self.dead[CACHED]  # this batch is the one beyond
            for mode in self.modes:
                if row := self._measure(mode, batch, errors):
                    rows.append(show(row))
                    self.keep(row)
            if gone or set(self.modes) <= self.over:
                break
        return rows

    def _is_due(self, mode: str) -> bool:
        """GradCache's turn comes where the encoder has no memory for a whole batch."""
        if mode in self.over:
            return False
        no_step = STEP not in self.modes or self.dry_run
        return mode != CACHED or no_step or STEP in self.over

    def _measure(self, mode: str, batch: int, errors: dict[str, float | str]) -> Row | None:
        if not self._is_due(mode):
            return None
        row: Row = {
            "work": f"{self.recipe.name}, {mode}", "batch": batch, "recipe": self.recipe.name, "mode": mode,
            "query": self.encoder.query, "document": self.encoder.document, "variants": {},
        }  # fmt: skip
        if mode == CACHED:
            row["part"] = self.part
        calls = self._calls(mode, batch, errors, row["variants"])
        if calls:
            expected = self._expected(mode, batch) * len(calls)
            left = self.until - time.monotonic()
            if expected > left:
                self.over |= {mode, CACHED} if mode == STEP else {mode}
                row["variants"] |= {name: {"error": LEFT_OUT} for name in calls}
                return row
            rounds = self.rounds if expected * (1 + self.rounds) <= left else 0
            found = interleaved(calls, self.encoder.device, rounds, whole_memory=mode != ALONE)
            for name, values in found.items():
                row["variants"][name] = {**values, "grad_err": errors[name]}
            self._learn(mode, batch, found)
        row["variants"] = {name: row["variants"][name] for name in VARIANTS if name in row["variants"]}
        release(self.encoder.device)
        return row if row["variants"] else None

    def _calls(
        self, mode: str, batch: int, errors: dict[str, float | str], refused: dict[str, Row]
    ) -> dict[str, Call]:
        """What is timed. `refused` gets the variants that are not, with the reason."""
        shape = self.shape(batch)
        embeddings = (
            batches.draw_batch(shape, self.encoder.device, self.encoder.dtype) if mode == ALONE else None
        )
        step = Step(self.encoder, self.optimizer, self.part if mode == CACHED else None)
        calls: dict[str, Call] = {}
        for name, method in methods_of(self.recipe, shape, self.encoder.device).items():
            if name in self.dead[mode] or (name == MAXSIM and mode != ALONE and batch > MAXSIM_UP_TO):
                continue
            if isinstance(errors[name], str):
                refused[name] = {"error": errors[name]}
                continue
            try:
                loss = method.make(shape)
            except UnsupportedError as reason:
                refused[name] = {"error": f"unsupported: {reason}"}
                continue
            calls[name] = alone_call(loss, embeddings) if embeddings else step_call(step, loss, batch)
        return calls

    def _expected(self, mode: str, batch: int) -> float:
        """Seconds of a call, by those of a smaller batch."""
        if mode == CACHED and CACHED not in self.pace and STEP in self.pace:
            earlier, seconds = self.pace[STEP]
            return AGAIN * seconds * batch / earlier
        earlier, seconds = self.pace.get(mode, (batch, 0.0))
        return seconds * (batch / earlier) ** (2 if mode == ALONE else 1)

    def _learn(self, mode: str, batch: int, found: dict[str, Row]) -> None:
        timed = [values["s"] for values in found.values() if "s" in values]
        if timed:
            self.pace[mode] = batch, max(timed)
        failed = {name for name, values in found.items() if "error" in values}
        self.dead[mode] |= failed
        if failed == set(found) or any(values.get("where") == ENCODER for values in found.values()):
            self.over.add(mode)


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


def show(row: Row) -> Row:
    cells = [row["work"], str(row["batch"])]
    for name, values in row["variants"].items():
        if "error" in values:
            where = f" ({values['where']})" if values.get("where") else ""
            cells.append(f"{name} {values['error']}{where}")
        else:
            share = f", loss {1e3 * values['loss_s']:.3g} ms" if "loss_s" in values else ""
            memory = f", {number(values['peak_mib'])} MiB" if "peak_mib" in values else ""
            cells.append(f"{name} {values['s']:.4g} s{share}{memory}")
    print(" | ".join(cells), flush=True)
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=_names, help=f"some of {','.join(RECIPES)}")
    parser.add_argument("--batches", type=int, nargs="+", help="queries, and as many documents")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each variant")
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
            run.part, run.rounds = 3, 1
        rows += run.measure(args.batches or ((4, 8) if args.dry_run else BATCHES))
        del run, encoder
        release(device)
    return rows


def run(args: argparse.Namespace) -> int:
    if torch.device(args.device).type != "cuda" and not args.dry_run:
        print("models of true sizes need a GPU; --dry-run takes tiny ones")
        return 2
    measure(args)
    return 0
