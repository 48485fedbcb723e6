"""The options of a corpus that is written."""

from dataclasses import dataclass
from typing import Any

import torch

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import check_flag, check_integer, check_positive
from late_interaction._progress import Progress
from late_interaction.codecs import Codec, Residual
from late_interaction.codecs._codec import check_dtype
from late_interaction.corpus import _codec_files, _files, _tokens

SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class BuilderOptions:
    """Hold what :meth:`Corpus.create` was asked for, checked."""

    d: int
    dtype: torch.dtype | None
    codec: Codec | None
    normalize: bool
    resume: bool
    shard_bytes: int
    progress: Progress
    total: int | None

    def __post_init__(self) -> None:
        if self.d or self.total != 0:  # no document may say what d is
            check_positive("d", self.d)
        self._check_kind()
        check_flag("normalize", self.normalize)
        check_flag("resume", self.resume)
        check_positive("shard_bytes", self.shard_bytes)
        if self.total is not None:
            check_integer("total", self.total)
            if self.total < 0:
                raise ValueError(f"total must be at least 0, got {abbreviate(self.total)}")
        elif self.progress is not False:
            raise ValueError(
                "total must be the number of documents to come where progress is asked for, got None"
            )

    def _check_kind(self) -> None:
        if self.codec is None:
            if self.dtype is not None:
                check_dtype(self.dtype, _tokens.FLOATS)
            return
        _tokens.check_codec(self.codec)
        if self.dtype is not None:
            raise ValueError(f"dtype must be None where a codec is given, got {abbreviate(self.dtype)}")
        if isinstance(self.codec, Residual) and self.codec.d != self.d:
            raise ValueError(f"codec must be for d = {self.d}, got one for {self.codec.d}")

    def entries(self) -> dict[str, Any]:
        """Return the metadata of generation 0 of the corpus, which has no document."""
        return {
            "format": _files.FORMAT,
            "version": _files.VERSION,
            "dtype": self.stored.name,
            "d": self.d,
            "normalized": self.normalize,
            "codec": _codec_files.entry_of(self.stored.codec),
            "shard_bytes": self.shard_bytes,
            "has": {"ids": None, "columns": None},
            "complete": False,
            "generation": 0,
            "compacted": 0,
            "next_shard": 0,
            "shards": [],
            "deleted": [],
        }

    @property
    def stored(self) -> _tokens.Stored:
        if self.codec is not None:
            return _tokens.Stored(self.d, self.codec.stored, self.codec.to("cpu"))
        return _tokens.Stored(self.d, self.dtype or torch.float16)
