"""Contrastive training over several processes: every query meets the documents of all of them.

    torchrun --nproc-per-node 2 examples/contrastive_ddp.py             # NCCL where each has a GPU, else gloo

Each process encodes its own part of the batch, and `losses.contrastive(group=...)` passes the documents round
a ring. DistributedDataParallel averages gradients, hence `scale_by_world=True`. At each step every process
also computes the whole batch alone: losses and gradients must be the same, or it ends with an error.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from late_interaction import losses

WIDTH, DIM = 64, 32  # of an input token, and of an embedding
QUERY, DOCUMENT = 8, 24  # tokens
TOLERANCE = 1e-4  # relative; a winner that another rounding changes counts too


class Encoder(nn.Module):
    """Projects the tokens of queries and documents. One call for both: DistributedDataParallel wants that."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, DIM, bias=False)

    def forward(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        return self.project(queries), self.project(documents)


def draw(step: int, count: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, the same in every process. A quarter of the numbers of a document's first
    tokens are those of its query; all others are noise."""
    generator = torch.Generator().manual_seed(step)
    queries = torch.randn(count, QUERY, WIDTH, generator=generator)
    documents = torch.randn(count, DOCUMENT, WIDTH, generator=generator)
    documents[:, :QUERY, : WIDTH // 4] = queries[..., : WIDTH // 4]
    return queries, documents


def train(rank: int, world: int, device: torch.device, steps: int, per_process: int) -> float:
    """Trains in the group. Returns the largest relative difference of a loss or a gradient from one process.

    At each step one process computes the whole batch with the group's weights of that step. Two trainings
    side by side would not do: their rounding differs, and training makes such differences larger.
    """
    torch.manual_seed(0)
    together = DistributedDataParallel(Encoder().to(device))
    optimizer = torch.optim.SGD(together.parameters(), lr=0.5)
    own = slice(rank * per_process, (rank + 1) * per_process)
    worst = 0.0
    for step in range(steps):
        alone = copy.deepcopy(together.module)
        alone.zero_grad()
        queries, documents = (x.to(device) for x in draw(step, world * per_process))
        wanted = losses.contrastive(*alone(queries, documents), normalize=True)
        wanted.backward()
        optimizer.zero_grad()
        loss = losses.contrastive(
            *together(queries[own], documents[own]), normalize=True,
            group=dist.group.WORLD, scale_by_world=True,
        )  # fmt: skip
        loss.backward()
        gradients = alone.project.weight.grad, together.module.project.weight.grad
        optimizer.step()
        off = ((gradients[0] - gradients[1]).norm() / gradients[0].norm()).item()
        worst = max(worst, abs(loss.item() / world / wanted.item() - 1), off)
        if rank == 0 and step % 10 in (0, 9):
            both = f"{loss.item() / world:.5f} of {world} processes, {wanted.item():.5f} of one"
            print(f"step {step:3}: loss {both}")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64, help="queries of each process")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"start it by torchrun: torchrun --nproc-per-node 2 {sys.argv[0]} (1 runs one process)")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        worst = train(rank, world, device, args.steps, args.batch)
        if worst > TOLERANCE:
            raise SystemExit(f"rank {rank}: the group is off by {worst:.1e} from one process")
        if rank == 0:
            print(f"{world} processes and one differ by at most {worst:.1e}, in losses and in gradients")
    finally:
        gc.collect()  # cycles in DDP hold the group, and gloo may abort a process that ends with one
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
