"""Times the losses over all pairs of a batch on a GPU, by the blocks that they share.

``python tools/time_losses.py [B ...]`` prints the milliseconds of each loss's forward and of its step, and
the MiB that a step takes beside inputs and gradients.
"""

import sys
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

import late_interaction as li

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "contrastive": lambda Q, D: li.contrastive_loss(Q, D, temperature=0.05),
    "pairwise": lambda Q, D: li.pairwise_loss(Q, D, temperature=0.05),
    "sigmoid": lambda Q, D: li.sigmoid_loss(Q, D, temperature=0.05, bias=-200.0),
    "recall": lambda Q, D: li.recall_loss(Q, D, temperature=0.3),
}


def batch(B: int, Lq: int = 32, Ld: int = 180, d: int = 128) -> tuple[Tensor, Tensor]:
    """Unit tokens in bf16, of which document ``i`` resembles query ``i``."""
    Q, D = (torch.randn(B, L, d, device="cuda", dtype=torch.bfloat16) for L in (Lq, Ld))
    D[:, :Lq] += Q
    Q, D = (torch.nn.functional.normalize(x, dim=-1) for x in (Q, D))
    return Q.requires_grad_(), D.requires_grad_()


def milliseconds(run: Callable[[], object], runs: int = 5) -> float:
    run()
    found = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return median(found)


def row(loss: Loss, Q: Tensor, D: Tensor) -> tuple[float, float, float]:
    with torch.no_grad():
        forward = milliseconds(lambda: loss(Q, D))
    step = milliseconds(lambda: torch.autograd.grad(loss(Q, D), (Q, D)))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(loss(Q, D), (Q, D))
    beside = torch.cuda.max_memory_allocated() - before - (Q.numel() + D.numel()) * Q.itemsize
    return forward, step, beside / 2**20


def main(sizes: list[int]) -> None:
    print(torch.cuda.get_device_name(), torch.__version__, li.__version__)
    print(f"{'B':>6} {'loss':>12} {'forward ms':>11} {'step ms':>9} {'MiB':>7}")
    for B in sizes:
        Q, D = batch(B)
        for name, loss in LOSSES.items():
            forward, step, beside = row(loss, Q, D)
            print(f"{B:>6} {name:>12} {forward:>11.2f} {step:>9.2f} {beside:>7.0f}")


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or [512, 2048, 8192])
