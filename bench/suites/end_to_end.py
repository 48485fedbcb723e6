"""Training steps of whole recipes, encoder and optimizer included, with each library's MaxSim in the loss.

The encoders are those of GTE-ModernColBERT, ColQwen2 and ColModernVBERT, of their true sizes with random
weights (bench/peers/encoders.py). The loss is cross entropy over the scores of all pairs of a batch, and what
differs is who computes it:

- `vanilla`: einsum, max and sum, as Sentence Transformers, PyLate and colpali-engine write it;
- `Sentence Transformers`: its own `maxsim`, which works through the documents in chunks (text alone);
- `LIK`: `late_interaction_kernels.maxsim`;
- `maxsim`: late_interaction's, up to a batch of 256 in a step;
- `losses.contrastive`: late_interaction's.

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

import argparse
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from bench.harness import batches
from bench.harness.batches import TEMPERATURE
from bench.harness.library import EINSUM, LIK, OURS, UnsupportedError
from bench.harness.results import Results, Row
from bench.harness.run_header import new_header
from bench.harness.shape import BatchShape
from bench.peers import losses
from bench.peers.encoders import DIM, RECIPES, Encoder, Recipe
from bench.peers.losses import Method
from bench.suites.training_steps import ENCODER, ENOUGH_S, Step, interleaved, loss_alone
from late_interaction._doctor.machine import package_version
from late_interaction._doctor.text import error_text, number
from late_interaction._doctor.timing import release

Keep = Callable[[Row], None]
VANILLA, ST, PEER, MAXSIM, EXACT = "vanilla", "Sentence Transformers", "LIK", "maxsim", "contrastive_loss"
VARIANTS = (VANILLA, ST, PEER, MAXSIM, EXACT)
ALONE, STEP, CACHED = "loss alone", "step", "GradCache step"
MODES = (ALONE, STEP, CACHED)
BATCHES = tuple(32 << n for n in range(9))
SECONDS = 210.0
MAXSIM_UP_TO = 256  # in a step; losses.contrastive keeps the winners too where they are small
CHECKED = 128  # queries of the batch whose gradients are compared
AGAIN = 1.5  # about what GradCache's second forward adds to a step
LEFT_OUT = "not run"
# Similarities and scores that are rounded to bfloat16, as PyTorch's are here, move gradients by 0.22 to 0.36
# on an H200: they are timed all the same, with this error in their rows.
ROUNDED = (5e-2, 0.5)


# ---- who computes the loss ----


def _sentence_transformers(shape):
    maxsim = importlib.import_module("sentence_transformers.util.similarity").maxsim
    return lambda x: losses.scores_to_loss(maxsim(x.Q, x.D))


def _has_sentence_transformers():
    try:
        return hasattr(importlib.import_module("sentence_transformers.util.similarity"), "maxsim")
    except ImportError:
        return False


def methods_of(recipe, shape, device):
    """Who computes the loss here, in the order of VARIANTS."""
    found = {(m.impl, m.variant): m for m in losses.methods(shape)}
    vanilla = replace(found[EINSUM, losses.SCORED], limits=ROUNDED)
    out = {VANILLA: vanilla}
    if recipe.is_text and _has_sentence_transformers():
        out[ST] = Method(ST, losses.SCORED, _sentence_transformers, vanilla.kept_bytes, vanilla.limits)
    if device.type == "cuda" and importlib.util.find_spec("late_interaction_kernels"):
        out[PEER] = found[LIK, losses.SCORED]
    return {**out, MAXSIM: found[OURS, losses.SAVED], EXACT: found[OURS, losses.EXACT]}


def gradient_errors(methods, shape, encoder):
    """The largest relative error of each loss and its gradients on planted inputs, or why it is not timed."""
    known = batches.plant_batch(shape, batches.draw_batch(shape, encoder.device, encoder.dtype))
    out = {}
    for name, method in methods.items():
        try:
            error = known.error(batches.step(method.make(shape), known.batch))
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
    enough_s: float = ENOUGH_S  # of a variant's calls
    part: int | None = None  # of GradCache; None: the recipe's
    dry_run: bool = False
    dead: dict[str, set[str]] = field(default_factory=lambda: {mode: set() for mode in MODES})
    pace: dict[str, tuple[int, float]] = field(default_factory=dict)  # a batch, and the seconds of its call
    over: set[str] = field(default_factory=set)  # modes without time or memory for more

    def __post_init__(self):
        self.part = self.part or self.recipe.part
        self.steps = {STEP: Step(self.encoder), CACHED: Step(self.encoder, self.part)}
        self.steps[CACHED].optimizer = self.steps[STEP].optimizer  # whose state has memory of its own

    def shape(self, batch):
        e = self.encoder
        return BatchShape(f"{self.recipe.name}-{batch}", batch, batch, e.query, e.document, DIM)

    def methods(self, batch):
        return methods_of(self.recipe, self.shape(batch), self.encoder.device)

    def measure(self, wanted):
        checked = min(CHECKED, 8) if self.dry_run else CHECKED
        errors = gradient_errors(self.methods(checked), self.shape(checked), self.encoder)
        self._warm_up(wanted[0])
        rows = []
        for batch in wanted:
            gone = VANILLA in self.dead[ALONE] | self.dead[CACHED]  # this batch is the one beyond
            for mode in self.modes:
                if self._is_due(mode) and (row := self._measure(mode, batch, errors)):
                    rows.append(row)
                    show(row)
                    self.keep(row)
            if gone or set(self.modes) <= self.over:
                break
        return rows

    def _warm_up(self, first):
        """Loads all kernels: the first call of a long step may be the one that is timed."""
        batch = min(first, self.part or first)
        loss = self.methods(batch)[EXACT].make(self.shape(batch))
        for mode in (STEP, CACHED):
            if mode in self.modes:
                call = partial(self.steps[mode].run, loss, batch)
                interleaved({EXACT: call}, self.encoder.device, rounds=0, whole_memory=True)

    def _is_due(self, mode):
        """GradCache's turn comes where the encoder has no memory for a whole batch."""
        no_step = STEP not in self.modes or self.dry_run or STEP in self.over
        return mode not in self.over and (mode != CACHED or no_step)

    def _measure(self, mode, batch, errors):
        row = {
            "work": f"{self.recipe.name}, {mode}", "batch": batch, "recipe": self.recipe.name, "mode": mode,
            "query": self.encoder.query, "document": self.encoder.document, "variants": {},
            **({"part": self.part} if mode == CACHED else {}),
        }  # fmt: skip
        variants = row["variants"]
        if calls := self._calls(mode, batch, errors, variants):
            expected = self._expected(mode, batch) * len(calls)
            left = self.until - time.monotonic()
            if expected > left:
                self.over |= {mode, CACHED} if mode == STEP else {mode}
                variants |= {name: {"error": LEFT_OUT} for name in calls}
                return row
            rounds = self.rounds if expected * (1 + self.rounds) <= left else 0
            found = interleaved(calls, self.encoder.device, rounds, mode != ALONE, self.enough_s)
            variants |= {name: {**values, "grad_err": errors[name]} for name, values in found.items()}
            self._learn(mode, batch, found)
        row["variants"] = {name: variants[name] for name in VARIANTS if name in variants}
        release(self.encoder.device)
        return row if variants else None

    def _calls(self, mode, batch, errors, refused):
        """List the variants to time. `refused` gets the others, with the reason."""
        shape, encoder, calls = self.shape(batch), self.encoder, {}
        drawn = batches.draw_batch(shape, encoder.device, encoder.dtype) if mode == ALONE else None
        for name, method in self.methods(batch).items():
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
            calls[name] = (
                partial(loss_alone, loss, drawn) if drawn else partial(self.steps[mode].run, loss, batch)
            )
        return calls

    def _expected(self, mode, batch):
        """Seconds of a call, by those of a smaller batch."""
        if mode == CACHED and CACHED not in self.pace and STEP in self.pace:
            earlier, seconds = self.pace[STEP]
            return AGAIN * seconds * batch / earlier
        earlier, seconds = self.pace.get(mode, (batch, 0.0))
        return seconds * (batch / earlier) ** (2 if mode == ALONE else 1)

    def _learn(self, mode, batch, found):
        timed = [values["s"] for values in found.values() if "s" in values]
        if timed:
            self.pace[mode] = batch, max(timed)
        failed = {name for name, values in found.items() if "error" in values}
        self.dead[mode] |= failed
        if failed == set(found) or any(values.get("where") == ENCODER for values in found.values()):
            self.over.add(mode)


def show(row):
    cells = [row["work"], str(row["batch"])]
    for name, values in row["variants"].items():
        if "error" in values:
            cells.append(f"{name} {values['error']} {values.get('where', '')}".rstrip())
        else:
            told = f"{name} {values['s']:.4g} s, loss {1e3 * values['loss_s']:.3g} ms"
            cells.append(f"{told}, {number(values.get('peak_mib'))} MiB")
    print(" | ".join(cells), flush=True)


# ---- the program ----


def _names(text):
    names = text.split(",")
    for name in names:
        if name not in RECIPES:
            raise argparse.ArgumentTypeError(f"there is no recipe {name!r}: {', '.join(RECIPES)}")
    return names


def add_arguments(parser):
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


def run(args):
    device = torch.device(args.device)
    if device.type != "cuda" and not args.dry_run:
        print("models of true sizes need a GPU; --dry-run takes tiny ones")
        return 2
    os.environ.setdefault("LIK_SUPPRESS_NORM_WARN", "1")
    torch.manual_seed(0)
    wanted = [RECIPES[name] for name in args.only or RECIPES]
    packages = {name: package_version(name) for name in ("transformers", "peft", "sentence-transformers")}
    header = new_header(
        device, None, args.arguments, packages={k: v for k, v in packages.items() if v},
        temperature=TEMPERATURE, recipes={recipe.name: recipe.about for recipe in wanted},
    )  # fmt: skip
    out = Results(args.out, header, merge=True)
    end = time.monotonic() + args.seconds
    for i, recipe in enumerate(wanted):
        if missing := [name for name in recipe.packages if importlib.util.find_spec(name) is None]:
            print(f"{recipe.name} is not measured: no package {', '.join(missing)}", flush=True)
            continue
        weights = [other.weight for other in wanted[i:]]
        until = time.monotonic() + (end - time.monotonic()) * weights[0] / sum(weights)
        made = RecipeRun(
            recipe, recipe.build(device, args.dry_run, True), lambda row: out.add([row]), args.rounds, until,
            args.modes, dry_run=args.dry_run,
        )  # fmt: skip
        if args.dry_run:
            made.steps[CACHED].part, made.part, made.rounds, made.enough_s = 3, 3, 1, 0.0
        made.measure(args.batches or ((4, 8) if args.dry_run else BATCHES))
        del made
        release(device)
    return 0
