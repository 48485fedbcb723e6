"""What calls of all processes of a group share: facts that are gathered and compared, and their errors."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from late_interaction._checks.messages import abbreviate

# The first fact of a process that refused its arguments.
REFUSED = -1


def position(group: Any) -> tuple[int, int]:
    if not _is_group(group):
        raise TypeError(f"group must be a torch.distributed process group or None, got {abbreviate(group)}")
    if not dist.is_initialized():
        raise ValueError(
            "group must belong to torch.distributed as it is initialized now, and it is not initialized"
        )
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"group must hold this process, rank {dist.get_rank()} of the world, and does not")
    return rank, world


def _is_group(group: Any) -> bool:
    """Tell whether this is a process group, or what a process that is not in a new group holds for it."""
    if not dist.is_available():
        return False
    return isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER


def gathered(caller: str, group: Any, values: Tensor, what: str) -> Tensor:
    """Gather values of one shape from all processes, in the order of ranks: ``[processes, ...]``."""
    return gathering(caller, group, values, what)()


def gathering(caller: str, group: Any, values: Tensor, what: str) -> Callable[[], Tensor]:
    """Begins what :func:`gathered` does. What it returns waits for the values of all processes.

    The wait is the caller's own, because TORCH_NCCL_BLOCKING_WAIT holds for Work.wait() alone: without it
    NCCL only orders the stream, and the host would find out about a lost rank where it reads the values.
    """
    world = dist.get_world_size(group)
    into, own = values.new_empty(world * values.numel()), values.contiguous().view(-1)
    try:
        work = dist.all_gather_into_tensor(into, own, group=group, async_op=True)
    except RuntimeError as error:
        raise exchange_failed(caller, what, error) from error

    def wait() -> Tensor:
        try:
            work.wait()
        except RuntimeError as error:
            raise exchange_failed(caller, what, error) from error
        return into.view(world, *values.shape)

    return wait


def exchanged_facts(
    caller: str, group: Any, facts: Sequence[float], device: torch.device
) -> list[list[float]]:
    """Exchange a few numbers of every process, in the order of ranks, on the host.

    Where the group has a backend for the CPU, they do not touch the device, and the host runs ahead of it.
    Else they go by a stream of their own: the host waits for them and not for the work that the current
    stream has still to do.
    """
    if device.type != "cuda" or _serves_cpu(group):
        own = torch.tensor(facts, dtype=torch.float64, device="cpu" if device.type == "cuda" else device)
        return gathered(caller, group, own, "sizes").tolist()
    with on_stream_of_facts(device):
        own = torch.tensor(facts, dtype=torch.float64, device=device)
        found = gathered(caller, group, own, "sizes").tolist()
    return found


def on_stream_of_facts(device: torch.device) -> AbstractContextManager[Any]:
    """Return where a GPU exchanges what does not wait for the work of the current stream."""
    return torch.cuda.stream(_stream_of_facts(device)) if device.type == "cuda" else nullcontext()


def _serves_cpu(group: Any) -> bool:
    """Tell whether tensors on the CPU can be exchanged, as in a group of ``cpu:gloo,cuda:nccl``."""
    return any(part.split(":")[0] == "cpu" for part in dist.get_backend_config(group).split(","))


@cache
def _stream_of_facts(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def check_refused(caller: str, table: Sequence[Sequence[float]]) -> None:
    refused = [str(i) for i, row in enumerate(table) if row[0] == REFUSED]
    if refused:
        raise RuntimeError(
            f"{caller}: rank {', '.join(refused)} of the group refused its arguments; see its error"
        )


def check_alike(caller: str, found: Mapping[str, Sequence[Any]]) -> None:
    """Require that all processes have the same value of each name.

    Values are in the order of ranks; None is one that a process does not have.
    """
    for name, values in found.items():
        ranks: dict[Any, list[str]] = {}
        for rank, value in enumerate(values):
            if value is not None:
                ranks.setdefault(value, []).append(str(rank))
        if len(ranks) > 1:
            shown = ", ".join(f"{value} on rank {', '.join(of)}" for value, of in ranks.items())
            raise ValueError(f"{caller}: every rank of the group must have the same {name}, got {shown}")


class Agreed:
    """Compare options in which processes must agree, named as messages name them.

    As text they take few numbers of an exchange, whatever they are. Their values are exchanged where these
    numbers differ.
    """

    numbers = 6  # five of 48 bits of a digest, and the length of the text

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = {name: str(value) for name, value in options.items()}
        self._text = json.dumps(self.options).encode()

    def facts(self) -> list[float]:
        digest = hashlib.sha256(self._text).digest()
        words = [int.from_bytes(digest[i : i + 6], "big") for i in range(0, 30, 6)]
        return [*map(float, words), float(len(self._text))]

    def check(self, caller: str, group: Any, facts: Sequence[Sequence[float]], device: torch.device) -> None:
        """Compare the facts of all processes. Each of them exchanges the values, or none."""
        if all(row == facts[0] for row in facts):
            return
        room = [0.0] * int(max(row[-1] for row in facts))
        told = exchanged_facts(caller, group, [*map(float, self._text), *room][: len(room)], device)
        lengths = [int(row[-1]) for row in facts]
        every = [json.loads(bytes(map(int, row[:n]))) for row, n in zip(told, lengths, strict=True)]
        check_alike(caller, {name: [x.get(name) for x in every] for name in self.options})


def exchange_failed(caller: str, what: str, error: RuntimeError) -> RuntimeError:
    return RuntimeError(
        f"{caller}: the exchange of {what} with the other ranks of the group failed on rank"
        f" {dist.get_rank()}: a rank has ended, raised an error or does not call the same function ({error})"
    )
