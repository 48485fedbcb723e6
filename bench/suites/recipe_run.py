"""Training steps of one recipe, batch by batch: the losses, the comparison of their gradients, and what to do
when memory or time ends. bench/suites/end_to_end.py says what is measured."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness import batches
from bench.harness.batches import TEMPERATURE, Batch, Loss
from bench.harness.library import EINSUM, LIK, OURS, UnsupportedError
from bench.harness.parity import worst_error
from bench.harness.results import Row
from bench.harness.shape import BatchShape
from bench.harness.text import error_text, number
from bench.peers import losses
from bench.peers.encoders import DIM, Encoder, Recipe
from bench.peers.losses import Method
from bench.suites.training_steps import (
    ENCODER,
    ENOUGH_S,
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
MAXSIM_UP_TO = 256  # in a step; contrastive_loss keeps the winners too where they are small
CHECKED = 128  # queries of the batch whose gradients are compared
AGAIN = 1.5  # about what GradCache's second forward adds to a step
LEFT_OUT = "not run"
# Similarities and scores that are rounded to bfloat16, as PyTorch's are here, move gradients by 0.22 to 0.36
# on an H200: they are timed all the same, with this error in their rows.
ROUNDED = (5e-2, 0.5)


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
    vanilla = replace(found[EINSUM, losses.SCORED], limits=ROUNDED)
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
    enough_s: float = ENOUGH_S  # of a variant's calls
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
        self._warm_up(wanted[0])
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

    def _warm_up(self, first: int) -> None:
        """Loads all kernels: the first call of a long step may be the one that is timed."""
        batch = min(first, self.part or first)
        loss = methods_of(self.recipe, self.shape(batch), self.encoder.device)[EXACT].make(self.shape(batch))
        for mode, part in ((STEP, None), (CACHED, self.part)):
            if mode in self.modes:
                call = step_call(Step(self.encoder, self.optimizer, part), loss, batch)
                interleaved({EXACT: call}, self.encoder.device, rounds=0, whole_memory=True)

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
            found = interleaved(calls, self.encoder.device, rounds, mode != ALONE, self.enough_s)
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
