"""What all suites of one run share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bench.harness.ceilings import Ceilings
from bench.harness.library import Implementation
from bench.harness.shape import Shape, itemsize
from bench.harness.timing import Effort

# A call that takes longer hardly gains from inputs in the L2 cache: it needs no other input sets.
ROTATE_BELOW_US = 200.0


@dataclass
class Settings:
    device: torch.device
    dtype: torch.dtype
    implementations: Sequence[Implementation]
    effort: Effort
    ceilings: Ceilings
    limit_s: float  # for the first calls of one implementation on one shape: compilation and tuning
    retune: bool = False
    compile_all: bool = False
    compiles: bool = True  # measure our training step with torch.compile
    gave_up: set[tuple[object, ...]] = field(default_factory=set)
    # Batch and seconds of the last step of each kind, from which the time at a larger batch follows.
    steps_s: dict[tuple[object, ...], tuple[int, float]] = field(default_factory=dict)
    log: Callable[[str], None] = field(default=lambda line: print(line, flush=True))

    @property
    def cache_bytes(self) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def floor_us(self, shape: Shape, op: str) -> float | None:
        """The larger of FLOPs over cuBLAS' rate and bytes over the read rate, by the ceilings of this run."""
        flops, bandwidth = self.ceilings.cublas_tflops, self.ceilings.read_tbps
        if flops is None or bandwidth is None:
            return None
        return shape.floor_us(op, itemsize(self.dtype), 1e12 * flops, 1e12 * bandwidth)
