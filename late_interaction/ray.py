"""Documents in a Ray dataset, for Ray Data 2.60: :class:`Documents`.

The work stands in :mod:`late_interaction._ray`.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from late_interaction._checks.options import check_integer, check_positive
from late_interaction._ray.search import RaySearch, import_ray
from late_interaction._search.prepare import prepare

__all__ = ["Documents"]


@dataclass(frozen=True, eq=False)
class Documents:
    """Say how a ``ray.data.Dataset`` with a document a row is searched, by :func:`late_interaction.search`.

    Ray Data reads the dataset as a stream of blocks; workers, an actor each, search them; the process that
    searches merges what they find by :meth:`late_interaction.TopK.merge`. A block whose worker is lost is
    searched again by another one: no document is lost, none is counted twice, and the result depends on
    neither that nor the number of workers. Indices are numbers of rows in the order of the dataset. Queries
    are rounded to the dtype of the documents, and scores are float32.

    Args:
        dataset: the documents. Its blocks are the unit of work: some tens of MB each are best.
        column: the column of the documents: ``list<fixed_size_list<float>>`` or ``list<list<float>>`` of
            float32 or float16, which are scored where they lie; or NumPy arrays ``[L, d]``, in a copy.
        workers: how many. None: one for each ``num_gpus``, or else for each ``num_cpus`` but one CPU that is
            left for reading.
        num_cpus: the CPUs that each worker reserves, and the threads that it scores with.
        num_gpus: the GPUs that each worker reserves. Above 0, it scores on the first of them.
        retries: how many workers may be lost.

    Raises:
        ImportError: ray is not installed.
        TypeError, ValueError: an argument of a wrong type or value. In a search also documents that no corpus
            can be made of; what a worker raises is a ``RayTaskError``, too.

    Complexity: ``12 * Nq * k`` bytes travel to the process that searches for each block. Two blocks a worker
        are under way.

    Example:
        >>> import late_interaction as li
        >>> dataset = ray.data.read_parquet("s3://bucket/documents")                        # doctest: +SKIP
        >>> scores, rows = li.search(Q, li.ray.Documents(dataset, num_gpus=1))              # doctest: +SKIP
    """

    dataset: Any
    _: KW_ONLY
    column: str = "vector"
    workers: int | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    retries: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.dataset, import_ray().data.Dataset):
            raise TypeError(f"dataset must be a ray.data.Dataset, got {type(self.dataset).__name__}")
        if not isinstance(self.column, str):
            raise TypeError(f"column must be the name of a column, got {type(self.column).__name__}")
        check_integer("retries", self.retries)
        if self.retries < 0:
            raise ValueError(f"retries must not be negative, got {self.retries}")
        if self.workers is not None:
            check_positive("workers", self.workers)


prepare.register(Documents, RaySearch)
