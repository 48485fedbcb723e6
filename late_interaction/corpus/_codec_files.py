"""The codec of a corpus of residuals: three files of its folder, and their entry in the metadata."""

from pathlib import Path
from typing import Any

import torch

from late_interaction.codecs import Codec, Residual
from late_interaction.corpus import _files, _tokens

_PARTS = ("centroids", "bucket_cutoffs", "bucket_weights")


def entry_of(codec: Codec | None) -> dict[str, Any] | None:
    """Return what the metadata says of a codec, beside the name of what it stores."""
    if not isinstance(codec, Residual):
        return None
    files = {part: _files.entry_of(getattr(codec, part)) for part in _PARTS}
    dtype = _tokens.name_of(codec.centroids.dtype)
    return {"nbits": codec.nbits, "centroids": len(codec.centroids), "dtype": dtype, "files": files}


def write(folder: Path, codec: Codec | None) -> None:
    """Write the files that are not there as they should be."""
    entry = entry_of(codec)
    for part, wanted in ({} if entry is None else entry["files"]).items():
        try:
            _files.check_checksum(folder / f"codec.{part}", wanted)
        except _files.CorpusError:
            _files.write_file(folder / f"codec.{part}", getattr(codec, part))


def open_codec(folder: Path, entries: dict[str, Any]) -> Codec | None:
    entry = entries["codec"]
    if entry is None:
        return _tokens.CODECS.get(entries["dtype"])
    for part, file in entry["files"].items():  # they are small, and all tokens hang on them
        _files.check_checksum(folder / f"codec.{part}", file)
    mapped = [
        _files.mapped(folder / f"codec.{part}", entry["files"][part]["bytes"], dtype)
        for part, dtype in zip(_PARTS, (_tokens.NAMES[entry["dtype"]], *[torch.float32] * 2), strict=True)
    ]
    return Residual(mapped[0].view(entry["centroids"], entries["d"]), mapped[1], mapped[2])


def equal(a: Codec | None, b: Codec | None) -> bool:
    return a is not None and b is not None and a.to("cpu") == b.to("cpu")
