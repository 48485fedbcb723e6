"""Blocks of a dataset, given to actors one by one. A block whose worker is lost goes to another one."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# A worker has one block that it scores and one that is on its way to it.
_BLOCKS_A_WORKER = 2


@dataclass(frozen=True)
class Block:
    """Rows of a dataset: ``first`` to ``stop`` of an object, of which the first has the number ``offset``."""

    ref: Any
    first: int
    stop: int
    offset: int

    @property
    def documents(self) -> int:
        return self.stop - self.first


class Pool:
    """Actors, and the calls that they have been given.

    Args:
        start: makes an actor.
        workers: how many there are.
        retries: how many workers may be lost before the search ends with an error.
    """

    def __init__(self, start: Callable[[], Any], workers: int, retries: int) -> None:
        self._start, self._retries = start, retries
        self._starting: dict[Any, Any] = {}  # what each call of start() returns, and its actor
        self._calls: dict[Any, tuple[Any, Block]] = {}
        self._load: dict[Any, int] = {}  # how many blocks each actor that runs has
        self._lost: list[BaseException] = []
        for _ in range(workers):
            self._start_one()

    def search(self, blocks: Iterator[Block]) -> Iterator[tuple[Block, tuple[Any, Any]]]:
        """Each block once, as they are done, and what :meth:`Scorer.search` found in it."""
        import ray

        again: deque[Block] = deque()  # blocks whose workers were lost
        coming = True
        while coming or again or self._calls:
            while (coming or again) and (actor := self._free()) is not None:
                block = again.popleft() if again else next(blocks, None)
                if block is None:
                    coming = False
                    break
                call = actor.search.remote(block.ref, block.first, block.stop)
                self._calls[call] = actor, block
                self._load[actor] += 1
            waited = [*self._calls, *self._starting]
            if not (coming or again or self._calls):
                return
            (ready,), _ = ray.wait(waited, num_returns=1)
            if ready in self._starting:
                self._started(ready)
                continue
            actor, block = self._calls.pop(ready)
            try:
                found = ray.get(ready)
            except _losses() as error:
                self._replace(actor, error, block)
                again.append(block)
            else:
                self._load[actor] -= 1
                yield block, found

    def close(self) -> None:
        import ray

        for actor in (*self._load, *self._starting.values()):
            ray.kill(actor)

    def _start_one(self) -> None:
        actor = self._start()
        self._starting[actor.start.remote()] = actor

    def _started(self, ready: Any) -> None:
        import ray

        actor = self._starting.pop(ready)
        try:
            ray.get(ready)
        except _losses() as error:
            self._count_loss(error, "while it started")
            self._start_one()
        else:
            self._load[actor] = 0

    def _free(self) -> Any:
        """Return the actor that has the fewest blocks, or None where all have enough."""
        free = [actor for actor, load in self._load.items() if load < _BLOCKS_A_WORKER]
        return min(free, key=lambda actor: self._load[actor], default=None)

    def _replace(self, actor: Any, error: BaseException, block: Block) -> None:
        """Start a worker for one that was lost, once: its other calls fail, too."""
        import ray

        if actor in self._load:
            del self._load[actor]
            ray.kill(actor)  # it may run still where only its result was lost
            given = [block, *(other for its, other in self._calls.values() if its is actor)]
            scored = min(given, key=lambda x: x.offset)  # the others waited for it
            last = scored.offset + scored.documents - 1
            self._count_loss(error, f"with documents {scored.offset} to {last}")
            self._start_one()

    def _count_loss(self, error: BaseException, when: str) -> None:
        self._lost.append(error)
        if len(self._lost) > self._retries:
            raise RuntimeError(
                f"search: {len(self._lost)} workers were lost, the last one {when}, and retries is"
                f" {self._retries} ({error})"
            ) from error


def _losses() -> tuple[type[BaseException], ...]:
    """Return what Ray raises where a worker, or the machine that had its result, is lost."""
    from ray import exceptions

    return (
        exceptions.RayActorError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,
        exceptions.OutOfMemoryError,
    )
