"""The options of a corpus that is written."""

from dataclasses import dataclass

import torch

from late_interaction._checks.options import check_flag, check_positive
from late_interaction._progress import Progress
from late_interaction.corpus import _tokens


@dataclass(frozen=True)
class BuilderOptions:
    """What :meth:`Corpus.create` was asked for, checked."""

    d: int
    dtype: torch.dtype
    normalize: bool
    resume: bool
    shard_bytes: int
    progress: Progress
    total: int | None

    def __post_init__(self) -> None:
        check_positive("d", self.d)
        _tokens.check_dtype(self.dtype)
        check_flag("normalize", self.normalize)
        check_flag("resume", self.resume)
        check_positive("shard_bytes", self.shard_bytes)
        if self.total is not None:
            check_positive("total", self.total)
        elif self.progress is not False:
            raise ValueError(
                "total must be the number of documents to come where progress is asked for, got None"
            )
