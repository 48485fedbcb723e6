"""The files of a corpus: written with a checksum, read with their sizes checked, mapped into memory."""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT, VERSION = "late_interaction corpus", 1
METADATA = "metadata.json"
_READ = 8 << 20
# The errors of a filesystem without locks. A folder there does not keep a second builder out.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class CorpusError(ValueError):
    """A file of a corpus is missing, cut short, changed or not finished. The message names it.

    Args:
        message: what is wrong with which file.

    Example:
        >>> from late_interaction.corpus import CorpusError
        >>> issubclass(CorpusError, ValueError)
        True
    """


def bytes_of(x: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor, and keep it as long as the view."""
    size = x.numel() * x.element_size()
    if size == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * size).from_address(x.data_ptr())
    memory.tensor = x  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """Map a file of so many bytes as a 1-D tensor. Writing to the tensor leaves the file alone."""
    if size == 0:  # an empty file cannot be mapped
        return torch.empty(0, dtype=dtype, device="cpu")
    with torch.device("cpu"):
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).view(dtype)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have an OSError within say which file it is about."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


class HashedFile:
    """A file that is written from its beginning to its end, and its checksum."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes = path, 0
        self._hash = _hash()
        self._file = path.open("wb", buffering=0)

    def write(self, data: memoryview) -> None:
        self._hash.update(data)
        self.bytes += len(data)
        with _named(self.path):
            while data:
                data = data[self._file.write(data) :]  # a write of gigabytes is cut short by the system

    def finish(self) -> dict[str, Any]:
        """Return the file's entry in the metadata, once its bytes are on the disk."""
        with _named(self.path):
            os.fsync(self._file.fileno())
            self._file.close()
        return {"bytes": self.bytes, "blake2b": self._hash.hexdigest()}

    def close(self) -> None:
        self._file.close()


def write_file(path: Path, x: Tensor) -> dict[str, Any]:
    """Write a contiguous CPU tensor to the disk, and return the file's entry in the metadata."""
    with closing(HashedFile(path)) as file:
        file.write(bytes_of(x))
        return file.finish()


def entry_of(x: Tensor) -> dict[str, Any]:
    """Return the entry in the metadata of a file that holds a contiguous CPU tensor."""
    data = bytes_of(x)
    return {"bytes": len(data), "blake2b": _hash(data).hexdigest()}


def _hash(data: bytes | memoryview = b"") -> Any:
    return hashlib.blake2b(data, digest_size=16)


def checksum_of_entries(entries: dict[str, Any]) -> str:
    return _hash(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def write_metadata(path: Path, entries: dict[str, Any]) -> None:
    """Replace the file at once: a reader, or what is left after a crash, has the old one or the new one."""
    text = json.dumps(entries | {"checksum": checksum_of_entries(entries)}, indent=1)
    new = path.with_suffix(".new")
    with _named(path):
        try:
            with new.open("w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def lock_folder(folder: Path) -> int:
    """Keep other writers out of a folder until :func:`unlock` has the handle that is returned."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return handle
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise RuntimeError(f"{folder} is being written by another process or thread") from None
        raise
    return handle


def unlock(handle: int, owner: int) -> None:
    """Let other writers in. owner: the process that holds the lock, of which a fork has the handle, too."""
    if os.getpid() == owner:
        with suppress(OSError):  # a filesystem without locks
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make the names of the folder's files durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the entries of metadata.json, as they were written."""
    if path.exists() and not path.is_file():  # a pipe or a device may have no end
        raise CorpusError(f"{path} must be the metadata of a corpus, got no regular file")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        checksum = entries.pop("checksum")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CorpusError(
            f"{path} must be the metadata of a corpus, but it is cut short or changed: {error!r}"
        ) from None
    if entries.get("format") != FORMAT:
        raise CorpusError(
            f"{path} must be the metadata of a corpus, got the format {entries.get('format')!r}"
        )
    if entries.get("version") != VERSION:
        raise CorpusError(
            f"{path} must be of version {VERSION} of the format, which this release reads,"
            f" got {entries.get('version')!r}"
        )
    if checksum != checksum_of_entries(entries):
        raise CorpusError(f"{path} does not have the checksum that it was written with: it was changed")
    return dict(entries)


def check_size(path: Path, entry: dict[str, Any]) -> None:
    """Require that a file of a corpus has the bytes that its entry says."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CorpusError(f"{path} is missing, and the corpus has documents in it") from None
    if size != entry["bytes"]:
        kind = "cut short" if size < entry["bytes"] else "changed"
        raise CorpusError(f"{path} must have {entry['bytes']} bytes, got {size}: it was {kind}")


def check_checksum(path: Path, entry: dict[str, Any]) -> None:
    """Require that a file of a corpus has the checksum that its entry says. Reads all of it."""
    check_size(path, entry)
    own = _hash()
    with path.open("rb") as file:
        while data := file.read(_READ):
            own.update(data)
    if own.hexdigest() != entry["blake2b"]:
        raise CorpusError(f"{path} does not have the checksum that it was written with: it was changed")


def writing_failed(error: OSError, path: Path, state: str, then: str) -> OSError:
    """Make the error of a corpus that could not be written on, which says what is kept and what to do."""
    cause = error.strerror or str(error)
    advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see to that"
    return OSError(error.errno, f"{cause}: {state}; {advice}, and {then}", str(error.filename or path))
