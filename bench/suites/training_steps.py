"""A training step of an encoder with a contrastive loss, timed as a whole and in its loss.

The graph is cut at the embeddings: the loss gets leaves, and their gradients go on into the encoder. The work
is that of one backward, and the moments before the loss and after its backward can be marked, by CUDA events
on a GPU. The optimizer's learning rate is 0, so that every step starts from the same weights; it does all of
its work.
"""

import gc
import itertools
import random
import statistics
import time
from dataclasses import dataclass, field

import torch

from bench.harness.batches import Batch
from bench.harness.results import Row
from bench.peers.encoders import Encoder
from late_interaction import cached_contrastive_step
from late_interaction._doctor.text import error_text
from late_interaction._doctor.timing import quartiles, release, sync

LONG_S = 1.0  # of a call that takes longer, one is timed after the warm-up
VERY_LONG_S = 3.0  # and of one that takes longer still the warm-up itself
ENOUGH_S, MOST_CALLS = 3.0, 40  # short calls are repeated until they have taken so long, or so often
ENCODER, LOSS = "encoder", "loss"
OUT_OF_MEMORY = "out of memory"


class Marks:
    """The moments of one step, in order."""

    def __init__(self, device):
        self._on_gpu = device.type == "cuda"
        self._before = 0.0
        self._after = 0.0
        self._waiting = 0
        self.where = ENCODER  # what runs now

    def _now(self):
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(self, loss):
        """The loss of embeddings that are leaves; marked before it and once both have their gradients."""

        def run(Q, D):
            for leaf in (Q, D):
                leaf.register_post_accumulate_grad_hook(self._got_gradient)
            self.where, self._waiting = LOSS, 2
            self._before = self._now()
            return loss(Batch(Q, D))

        return run

    def _got_gradient(self, _):
        self._waiting -= 1
        if self._waiting == 0:
            self._after = self._now()
            self.where = ENCODER

    def loss_seconds(self):
        """Seconds from the first mark to the second. The device must have finished."""
        if self._on_gpu:
            return 1e-3 * float(self._before.elapsed_time(self._after))
        return float(self._after - self._before)


@dataclass
class Step:
    """Steps of one encoder with its optimizer."""

    encoder: Encoder
    part: int | None = None  # queries that GradCache encodes at a time; None: all at once, without GradCache
    seed: int = 0
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self):
        fused = self.encoder.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.encoder.trained(), lr=0.0, fused=fused)

    def gradients(self, loss, batch, marks):
        """Leaves the gradients in the weights. Returns the loss."""
        timed = marks.around(loss)
        if self.part is not None:
            begins = range(0, batch, self.part)
            parts = [(min(self.part, batch - begin), self.seed + begin) for begin in begins]
            with self.encoder.autocast():
                return cached_contrastive_step(lambda part: self.encoder.embed(*part), parts, timed)
        with self.encoder.autocast():
            embedded = self.encoder.embed(batch, self.seed)
            leaves = [x.detach().requires_grad_() for x in embedded]
            value = timed(*leaves)
        value.backward()
        torch.autograd.backward(list(embedded), [x.grad for x in leaves])
        return value.detach()

    def run(self, loss, batch, marks):
        """A whole step. Returns the loss."""
        torch.manual_seed(self.seed)  # dropout is the same for every loss
        try:
            value = self.gradients(loss, batch, marks)
            self.optimizer.step()
            return value
        finally:
            self.optimizer.zero_grad(set_to_none=True)


def loss_alone(loss, embeddings, marks):
    """The loss alone, with the gradients of both embeddings."""
    leaves = embeddings.leaves()
    value = marks.around(loss)(leaves.Q, leaves.D)
    value.backward()
    return value.detach()


# ---- timing ----


@dataclass
class Variant:
    """What was measured of one loss at one batch."""

    seconds: list[float] = field(default_factory=list)
    loss_seconds: list[float] = field(default_factory=list)
    peak_mib: float | None = None
    loss: float | None = None
    problem: Row | None = None  # an error, and what ran out of memory
    enough: bool = False  # no further call

    def done(self, calls, enough_s):
        if self.problem is not None or self.enough:
            return True
        if len(self.seconds) < max(1, calls):
            return False
        return calls == 0 or len(self.seconds) >= MOST_CALLS or sum(self.seconds) >= enough_s

    def row(self):
        if self.problem is not None:
            return self.problem
        row = {"s": statistics.median(self.seconds), "calls": len(self.seconds), "loss": self.loss}
        if len(self.seconds) > 1:
            row["spread"] = quartiles(self.seconds)[1]
        row["loss_s"] = statistics.median(self.loss_seconds)
        return row if self.peak_mib is None else {**row, "peak_mib": self.peak_mib}


def interleaved(calls, device, rounds, whole_memory, enough_s=ENOUGH_S):
    """Each call's median seconds, those of its loss, and its peak memory: all that is allocated, or with
    whole_memory=False what the call adds. The first call of each is warm-up; with rounds=0, or where it takes
    over VERY_LONG_S, it is the only one. Else there are at least `rounds` more, and as many as take
    `enough_s`, in another order each time. A call that fails says why."""
    found = {name: Variant() for name in calls}
    order, shuffled = list(calls), random.Random(0)
    for turn in itertools.count():
        waiting = [name for name in order if not found[name].done(rounds, enough_s)]
        if not waiting:
            break
        for name in waiting:
            if turn == 0:
                release(device)
            _time(found[name], calls[name], device, whole_memory, keep=turn > 0 or rounds == 0)
            if found[name].problem is not None:
                release(device)  # tensors that the traceback held
        shuffled.shuffle(order)
    return {name: variant.row() for name, variant in found.items()}


def _time(variant, call, device, whole_memory, keep):
    marks, before = Marks(device), 0
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = 0 if whole_memory else torch.cuda.memory_allocated(device)
    gc.disable()  # walking through all of what is imported takes as long as a small step
    start = time.perf_counter()
    try:
        value = call(marks)
        sync(device)
        took = time.perf_counter() - start
        variant.loss = float(value)
    except Exception as error:  # one failure must not end the run
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
        variant.problem = {"error": error_text(error)}
        if out_of_memory:
            variant.problem = {"error": OUT_OF_MEMORY, "where": marks.where}
        return
    finally:
        gc.enable()
    if on_gpu:
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
        variant.peak_mib = max(peak, variant.peak_mib or 0.0)
    # A first call that is mostly its loss has compiled or tuned kernels.
    warm_up_counts = took > VERY_LONG_S and marks.loss_seconds() < took / 2
    if keep or warm_up_counts:
        variant.enough = took > LONG_S
        variant.seconds.append(took)
        variant.loss_seconds.append(marks.loss_seconds())
