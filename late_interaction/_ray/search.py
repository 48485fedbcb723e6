"""The search of a Ray dataset: blocks go to workers, which are actors, and what they find is merged."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.tensors import check_mask
from late_interaction._search.prepare import Options, Search, padded
from late_interaction._search.selection import NO_DOCUMENT, Found
from late_interaction._search.topk import TopK
from late_interaction.corpus import Corpus
from late_interaction.corpus._arrow import check_type

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


class Scorer:
    """The best documents of one block after another. Each worker of the cluster runs one.

    Args:
        queries: ``Q`` and ``q_mask``, on the CPU.
        column: the column of the documents.
        k: how many.
        options: of :meth:`late_interaction.Corpus.search`.
        device: where to score.
    """

    def __init__(
        self, queries: tuple[Tensor, Tensor | None], column: str, k: int, options: dict[str, Any], device: str
    ) -> None:
        self._Q, self._q_mask = (None if x is None else x.to(device) for x in queries)
        self._column, self._k, self._options = column, k, options

    def start(self) -> None:
        """Return once the actor runs."""

    def search(self, block: Any, first: int, stop: int) -> tuple[Any, Any]:
        """Scores and indices, as NumPy arrays, of rows of a block. Indices count from the row ``first``."""
        assert self._Q is not None
        corpus = corpus_of(block, self._column, first, stop, self._Q.shape[-1])
        scores, indices = corpus.search(self._Q, self._k, q_mask=self._q_mask, **self._options)
        return scores.cpu().numpy(), indices.cpu().numpy()


def corpus_of(block: Any, column: str, first: int, stop: int, d: int) -> Corpus:
    """Read the documents of some rows of a block: Arrow's lists as they lie, NumPy's arrays in a copy.

    d: that of the queries, for rows that have no token to say it.
    """
    import pyarrow as pa
    from ray.data.block import BlockAccessor

    table = BlockAccessor.for_block(block).to_arrow()
    if column not in table.column_names:
        raise ValueError(
            f"column must be one of the dataset's, {', '.join(map(repr, table.column_names))}, got {column!r}"
        )
    rows = table[column].slice(first, stop - first)
    if isinstance(rows.type, pa.BaseExtensionType):
        return _corpus_of_arrays([x for chunk in rows.chunks for x in _arrays(chunk)], column)
    own, _ = check_type(pa, rows.type, len(rows))
    return Corpus.from_arrow(rows, d=None if own else d)


def _arrays(chunk: Any) -> Any:
    if hasattr(chunk, "to_numpy_ndarray"):  # Arrow's own type for tensors of one shape; others are Ray's
        return chunk.to_numpy_ndarray()
    return chunk.to_numpy(zero_copy_only=False)


def _corpus_of_arrays(documents: list[Any], column: str) -> Corpus:
    import numpy as np

    shapes = sorted({x.shape[1:] if x.ndim == 2 else x.shape for x in documents})
    if len(shapes) != 1 or documents[0].ndim != 2:
        raise ValueError(f"column {column!r} must hold [L, d] arrays of one d, got shapes [..., {shapes}]")
    offsets = np.cumsum([0, *map(len, documents)])
    return Corpus.from_numpy(np.concatenate(documents), offsets)


# What so many blocks found is merged at a time.
_MERGED = 64
_SERVED = ("k", "q_mask", "normalize", "largest", "keep_empty", "precision")


class RaySearch(Search):
    """A search of :class:`late_interaction.ray.Documents`."""

    def __init__(self, documents: Any, Q: Any, options: Options) -> None:
        options.refuse("for a Ray dataset", *(x.name for x in fields(options) if x.name not in _SERVED))
        self._documents, self._options = documents, options
        self.one_query = isinstance(Q, Tensor) and Q.dim() == 2
        self._Q, mask = padded("Q", Q, options.q_mask)
        self._best = self._none()
        batch = self._Q.unsqueeze(0) if self.one_query else self._Q
        self._q_mask = check_mask("q_mask", mask, "Q", batch)
        self.queries = batch, self._q_mask

    def _none(self, first: int = 0) -> TopK:
        """Return the best of no documents yet. Scores are float32, whatever the dtype of the queries."""
        Q = self._Q
        queries = Q.float() if isinstance(Q, Tensor) and Q.dtype == torch.float64 else Q
        k, largest, keep_empty = self._options.k, self._options.largest, self._options.keep_empty
        return TopK(queries, k, largest=largest, keep_empty=keep_empty, first=first)

    def run(self, documents: int | None) -> Found:
        ray, given, best = import_ray(), self._documents, self._best
        mask = None if self._q_mask is None else self._q_mask.cpu()
        queries = ray.put((self._Q.detach().cpu(), mask))
        device, options = "cuda" if given.num_gpus else "cpu", self._options.shared()
        actor = ray.remote(num_cpus=given.num_cpus, num_gpus=given.num_gpus, max_restarts=0)(Scorer)
        count = given.workers or _default_workers(ray, given.num_cpus, given.num_gpus)
        scorer = queries, given.column, self._options.k, options, device
        pool = Pool(lambda: actor.remote(*scorer), count, given.retries)
        parts: list[TopK] = []
        blocks = _blocks(given.dataset)
        try:
            for block, (scores, indices) in pool.search(blocks):
                parts.append(self._part(block, scores, indices))
                if len(parts) == _MERGED:
                    best.merge(*parts)
                    parts.clear()
        finally:
            pool.close()
            blocks.close()  # ends the reading where the search ended early
        best.merge(*parts)
        return best._scores, best._indices

    def _part(self, block: Block, scores: Any, indices: Any) -> TopK:
        """Return what was found in a block, with the numbers that its rows have in the dataset."""
        part = self._none(block.offset)
        found, places = (torch.tensor(x, device="cpu").reshape(-1, x.shape[-1]) for x in (scores, indices))
        places = torch.where(places < 0, NO_DOCUMENT, places + block.offset)
        stop = block.offset + block.documents
        seen = {"seen": block.documents, "next": stop, "ranges": [[block.offset, stop]]}
        part.load_state_dict({**part.state_dict(), "scores": found, "indices": places, **seen})
        return part


def import_ray() -> Any:
    try:
        import pyarrow  # noqa: F401
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(
            "a search of a Ray dataset needs Ray Data: pip install 'late-interaction[ray]'"
        ) from error
    return ray


def _default_workers(ray: Any, num_cpus: float, num_gpus: float) -> int:
    there = ray.cluster_resources()
    if num_gpus:
        return max(int(there.get("GPU", 0) / num_gpus), 1)
    return max(int((there.get("CPU", 1) - 1) / num_cpus), 1) if num_cpus else 1


def _blocks(dataset: Any) -> Generator[Block, None, None]:
    """Yield the blocks that have rows, in the order of the dataset, as they are read."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    offset = 0
    try:
        for bundle in dataset.iter_internal_ref_bundles():
            for entry, piece in zip(bundle.blocks, bundle.slices, strict=True):
                first, stop = 0, entry.metadata.num_rows
                if piece is not None:
                    first, stop = piece.start_offset, piece.end_offset
                if first < stop:
                    yield Block(entry.ref, first, stop, offset)
                    offset += stop - first
    finally:
        options.preserve_order = before
