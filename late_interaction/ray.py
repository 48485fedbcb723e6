"""Exact search of a Ray dataset: :func:`retrieve`, for Ray Data 2.60. The work stands in
:mod:`late_interaction._ray`.
"""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.choices import Precision
from late_interaction._checks.options import check_flag, check_integer, check_positive, check_precision
from late_interaction._checks.tensors import check_mask
from late_interaction._ray.pool import Block, Pool
from late_interaction._ray.scorer import Scorer
from late_interaction._scoring.norm_warning import look
from late_interaction._search.selection import NO_DOCUMENT
from late_interaction.topk import TopK

__all__ = ["retrieve"]

# What so many blocks found is merged at a time.
_MERGED = 64


def retrieve(
    dataset: Any,
    Q: Tensor,
    k: int,
    q_mask: Tensor | None = None,
    *,
    column: str = "vector",
    normalize: bool = False,
    largest: bool = True,
    precision: Precision | None = None,
    workers: int | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    retries: int = 3,
    keep_empty: bool = False,
) -> tuple[Tensor, Tensor]:
    """The ``k`` best documents of each query, of a ``ray.data.Dataset`` with a document a row.

    Ray Data reads the dataset as a stream of blocks; workers, an actor each, search them by
    :meth:`late_interaction.corpus.Corpus.search`; this process merges what they find by
    :meth:`late_interaction.topk.TopK.merge`. A block whose worker is lost is searched again by another one:
    no document is lost, none is counted twice, and the result does not depend on it. Nor does it depend on
    the number of workers.

    Args:
        dataset: the documents. Its blocks are the unit of work: some tens of MB each are best.
        Q: ``[Nq, Lq, d]`` or ``[Lq, d]``, floating-point, on any device. Rounded to the dtype of the
            documents.
        k: how many; at most all documents come back.
        q_mask: ``[Nq, Lq]``, True = keep.
        column: the column of the documents: ``list<fixed_size_list<float>>`` or ``list<list<float>>`` of
            float32 or float16, which are scored where they lie; or NumPy arrays ``[L, d]``, in a copy.
        normalize: L2-normalize every token first.
        largest: the highest scores, or else the lowest.
        precision: as in :func:`late_interaction.maxsim`.
        workers: how many. None: one for each ``num_gpus``, or else for each ``num_cpus`` but one CPU that is
            left for reading.
        num_cpus: the CPUs that each worker reserves, and the threads that it scores with.
        num_gpus: the GPUs that each worker reserves. Above 0, it scores on the first of them.
        retries: how many workers may be lost.
        keep_empty: rank documents without tokens too, by their score of 0.

    Returns:
        ``(scores, indices)``: float32 and int64, each ``[Nq, min(k, documents)]`` (one dim less for a 2-D
        ``Q``), best first, on the device of ``Q``. Indices are numbers of rows in the order of the dataset.
        Among equal scores the lowest comes first. A document takes no rank by a query with which its score is
        NaN: where fewer documents take a rank, the last entries are -inf (inf for ``largest=False``) and -1.

    Raises:
        ImportError: ray is not installed.
        TypeError, ValueError: an argument of a wrong type or value, or documents that no corpus can be made
            of. What a worker raises is a ``RayTaskError``, too.
        RuntimeError: more than ``retries`` workers were lost.

    Complexity: ``12 * Nq * k`` bytes travel to this process for each block. Two blocks a worker are under
        way.

    Example:
        >>> import late_interaction.ray                                        # doctest: +SKIP
        >>> dataset = ray.data.read_parquet("s3://bucket/documents")           # doctest: +SKIP
        >>> scores, rows = late_interaction.ray.retrieve(dataset, Q, 10, num_gpus=1)  # doctest: +SKIP
    """
    ray = _ray()
    if not isinstance(dataset, ray.data.Dataset):
        raise TypeError(f"dataset must be a ray.data.Dataset, got {type(dataset).__name__}")
    if not isinstance(column, str):
        raise TypeError(f"column must be the name of a column, got {type(column).__name__}")
    check_flag("normalize", normalize)
    check_precision(precision)
    check_integer("retries", retries)
    if retries < 0:
        raise ValueError(f"retries must not be negative, got {retries}")
    if workers is not None:
        check_positive("workers", workers)
    search: dict[str, Any] = {"largest": largest, "keep_empty": keep_empty}
    best = _best(Q, k, search)
    mask = check_mask("q_mask", q_mask, "Q", Q.unsqueeze(0) if Q.dim() == 2 else Q)
    if not normalize:
        look("ray.retrieve", Q, mask)
    queries = ray.put((Q.detach().cpu(), None if mask is None else mask.cpu()))
    options = search | {"normalize": normalize, "precision": precision}
    device = "cuda" if num_gpus else "cpu"
    actor = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0)(Scorer)
    count = workers or _default_workers(ray, num_cpus, num_gpus)
    pool = Pool(lambda: actor.remote(queries, column, k, options, device), count, retries)
    parts: list[TopK] = []
    blocks = _blocks(dataset)
    try:
        for block, (scores, indices) in pool.search(blocks):
            part = _best(Q, k, search, block.offset)
            found = {"scores": scores, "indices": indices}
            tensors = {
                name: torch.tensor(x, device="cpu").reshape(-1, x.shape[-1]) for name, x in found.items()
            }
            places = tensors["indices"]
            tensors["indices"] = torch.where(places < 0, NO_DOCUMENT, places + block.offset)
            stop = block.offset + block.documents
            seen = {"seen": block.documents, "next": stop, "ranges": [[block.offset, stop]]}
            part.load_state_dict({**part.state_dict(), **tensors, **seen})
            parts.append(part)
            if len(parts) == _MERGED:
                best.merge(*parts)
                parts.clear()
    finally:
        pool.close()
        blocks.close()  # ends the reading where the search ended early
    best.merge(*parts)
    return best.scores, best.indices


def _ray() -> Any:
    try:
        import pyarrow  # noqa: F401
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(
            "late_interaction.ray.retrieve needs Ray Data: pip install 'late-interaction[ray]'"
        ) from error
    return ray


def _best(Q: Tensor, k: int, search: dict[str, Any], offset: int = 0) -> TopK:
    """The best of no documents yet. Scores are float32, whatever the dtype of the queries."""
    queries = Q.float() if isinstance(Q, Tensor) and Q.dtype == torch.float64 else Q
    return TopK(queries, k, **search, first=offset)


def _default_workers(ray: Any, num_cpus: float, num_gpus: float) -> int:
    there = ray.cluster_resources()
    if num_gpus:
        return max(int(there.get("GPU", 0) / num_gpus), 1)
    return max(int((there.get("CPU", 1) - 1) / num_cpus), 1) if num_cpus else 1


def _blocks(dataset: Any) -> Generator[Block, None, None]:
    """The blocks that have rows, in the order of the dataset, as they are read."""
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
