"""The processes of torchrun, one a GPU or all on a CPU, and times that they take together."""

import os
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.harness.run_header import keep_text, table


@dataclass
class Here:
    """This process among all."""

    rank: int
    world: int
    device: torch.device

    def slowest(self, seconds):
        x = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return float(x)

    def sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wait(self):
        dist.barrier()
        self.sync()


@contextmanager
def joined(kind):
    """In this context the processes that torchrun started, or this one alone, are a group."""
    if "RANK" not in os.environ:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT="29541", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"
        )
    device = torch.device(kind)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Here(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def seconds(here, call, rounds, together=True):
    """The median of the slowest process's times; of process 0 alone, or of all at once."""
    return seconds_in_turn(here, [(call, together)], rounds)[0]


def seconds_in_turn(here, calls, rounds):
    """The same of several calls that take turns: clocks that drift do not change their ratios. Beside each
    call, whether all processes make it."""
    times = [[] for _ in calls]
    for turn in range(rounds + 1):
        for (call, together), taken in zip(calls, times, strict=True):
            here.wait()
            start = time.perf_counter()
            if together or here.rank == 0:
                call()
                here.sync()
            took = here.slowest(time.perf_counter() - start if together or here.rank == 0 else 0.0)
            taken += [took] if turn else []  # the first one warms up
    return [statistics.median(taken) for taken in times]


def keep_table(here, args, title, rows, more=""):
    """Print what process 0 measured, and append it to the file --out."""
    if here.rank == 0:
        text = f"{title}, {here.world} processes\n{table(rows)}" + (f"\n{more}" if more else "")
        keep_text(text, args, f"torchrun --nproc-per-node {here.world}")
