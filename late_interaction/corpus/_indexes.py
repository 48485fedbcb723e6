"""Indexes of other libraries, opened where they lie: of ColBERT, and of fast-plaid; PyLate has either.

An index is chunks of documents. ``doclens.N.json`` has the length of each, ``N.codes`` the centroid of each
token and ``N.residuals`` its buckets, as ``torch.save`` (ColBERT) or NumPy (fast-plaid) writes them; from 1.7
on fast-plaid moves chunks to ``merged_codes.npy`` and ``merged_residuals.npy``. What fast-plaid deletes
leaves the files. What PyLate's ColBERT deletes stays, with a length of 0 and without an id.
"""

import json
import pickle
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.plaid import NBITS
from late_interaction.codecs import Residual, reverse_bits
from late_interaction.codecs._index_files import mirror
from late_interaction.corpus import _tokens
from late_interaction.corpus._files import METADATA, CorpusError
from late_interaction.corpus._shards import Shard

COLBERT, FAST_PLAID = "an index of ColBERT", "an index of fast-plaid"
_INNER = "fast_plaid_index"  # PyLate's folder has that of fast-plaid in it, beside the ids
_IDS = ("plaid_ids_to_documents_ids.pkl", "plaid_ids_to_documents_ids.sqlite")  # of newer, of older PyLate
_SIGNS = ("plan.json", "centroids.pt", "centroids.npy")


@dataclass(frozen=True)
class IndexShard(Shard):
    """Residuals as index files hold them: bits from the highest down, of tokens that are unit vectors.

    mirrored: what scores them as they are.
    """

    mirrored: Residual | None = None

    @property
    def is_of_index(self) -> bool:
        """Tell residuals from what may be stored of these documents in their place."""
        return isinstance(self.codec, Residual)

    def stored(self, rows: list[slice] | Tensor, room: Any = (None, None)) -> tuple[Tensor, Tensor | None]:
        tokens, codes = super().stored(rows, room)
        if self.is_of_index:
            codes = cast("Tensor", codes).to(torch.int32)  # fast-plaid has int64
        return tokens, codes

    def floats(self, rows: list[slice]) -> Tensor:
        if not self.is_of_index:
            return super().floats(rows)
        tokens, codes = self.stored(rows)
        return _tokens.unit(_tokens.decode(reverse_bits(tokens), codes, self.codec))

    def as_copied(self) -> Shard:
        tokens, codes = self.stored(self.rows(0, self.documents))
        offsets = self.offsets - self.offsets[0]
        return Shard(reverse_bits(tokens), offsets, codes, self.ids, self.codec, self.columns)


# ---- what a folder holds ----


def read(folder: Path) -> dict[str, Any] | None:
    """Describe the index of a folder as metadata describes a corpus, or return None where it has none."""
    inner = folder / _INNER
    root = inner if (inner / METADATA).is_file() else folder
    if not (root / METADATA).is_file() or not any((root / name).exists() for name in _SIGNS):
        return None
    own = _loaded(root / METADATA)
    if not isinstance(own, dict) or "format" in own:  # a corpus says which one it has
        return None
    config = own.get("config") if "config" in own else own
    nbits, chunks = config.get("nbits") if isinstance(config, dict) else None, own.get("num_chunks")
    if nbits not in NBITS or not isinstance(chunks, int) or chunks < 0:
        raise CorpusError(
            f"{root / METADATA} must have num_chunks, and nbits of 1, 2, 4 or 8, got {abbreviate(chunks)} and"
            f" {abbreviate(nbits)}"
        )
    home = root.parent if root.name == _INNER else root
    ids = next((home / name for name in _IDS if (home / name).exists()), None)
    paths = [x for x in sorted(root.iterdir()) if x.suffix in (".pt", ".npy", ".json")]
    states = {x.name: x.stat() for x in [*paths, *([] if ids is None else [ids])]}
    return {
        "format": COLBERT if "config" in own else FAST_PLAID,
        "root": str(root),
        "ids": None if ids is None else str(ids),
        "chunks": chunks,
        "codec": {"nbits": nbits, "files": {name: [x.st_size, x.st_mtime_ns] for name, x in states.items()}},
        "dtype": "residuals",
        "d": None,
        "normalized": True,
        "generation": 0,
        "compacted": 0,
        "shards": [],
        "deleted": [],
    }


def open_index(entries: dict[str, Any]) -> tuple[_tokens.Stored, list[Shard], Tensor]:
    """Map an index: how it stores tokens, a shard for each chunk, and which documents have no id."""
    root = Path(entries["root"])
    lengths = [_lengths(root / f"doclens.{i}.json") for i in range(entries["chunks"])]
    kind = _ColbertFiles if entries["format"] == COLBERT else _FastPlaidFiles
    files = kind(root, [int(x.sum()) for x in lengths])
    codec = files.codec(entries["codec"]["nbits"])
    ends = list(accumulate(map(len, lengths), initial=0))
    ids, dead = None, torch.zeros(ends[-1], dtype=torch.bool, device="cpu")
    if entries["ids"] is not None:
        ids = _ids(Path(entries["ids"]), ends[-1])
        dead = torch.tensor([x is None for x in ids], dtype=torch.bool, device="cpu")
    mirrored, shards = mirror(codec), list[Shard]()
    for i, own in enumerate(lengths):
        codes, residuals = files.chunk("codes", i), files.chunk("residuals", i, codec.width(codec.d))
        names = None if ids is None else [x or "" for x in ids[ends[i] : ends[i + 1]]]
        offsets = torch.nn.functional.pad(own.cumsum(0), (1, 0))
        shards.append(IndexShard(residuals, offsets, codes, names, codec, mirrored=mirrored))
    return _tokens.Stored(codec.d, torch.uint8, codec), shards, dead


def check_codes(folder: Path, shards: list[Shard]) -> None:
    """Require that every token of an index has a centroid. Reads all codes."""
    for i, shard in enumerate(shards):
        codes, n = cast("Tensor", shard.beside), len(cast("Residual", shard.codec).centroids)
        least, most = (int(x) for x in codes.aminmax()) if len(codes) else (0, 0)
        if least < 0 or most >= n:
            raise CorpusError(
                f"{folder} must have codes of its {n} centroids, got {least} to {most} in chunk {i}"
            )


# ---- its files ----

_CHUNKS = {
    "codes": ("integers", (torch.int32, torch.int64)),
    "residuals": ("contiguous uint8", (torch.uint8,)),
}


class _ColbertFiles:
    """The files of an index of ColBERT. rows: how many tokens each chunk has."""

    def __init__(self, root: Path, rows: list[int]) -> None:
        self.root, self.rows = root, rows

    def codec(self, nbits: int) -> Residual:
        buckets = _loaded(self.root / "buckets.pt")
        if not isinstance(buckets, (tuple, list)) or len(buckets) != 2:
            raise CorpusError(
                f"{self.root / 'buckets.pt'} must have cutoffs and weights, got {abbreviate(buckets)}"
            )
        return _codec((_loaded(self.root / "centroids.pt"), *buckets), nbits, self.root)

    def chunk(self, kind: str, i: int, *width: int) -> Tensor:
        path, x = self._found(kind, i)
        if not isinstance(x, Tensor):
            raise CorpusError(f"{path} must be a tensor, got {abbreviate(x)}")
        (wanted, dtypes), shape = _CHUNKS[kind], [self.rows[i], *width]
        if x.dtype not in dtypes or list(x.shape) != shape or not (kind == "codes" or x.is_contiguous()):
            raise CorpusError(
                f"{path} must have {wanted} {shape}, for the {self.rows[i]} tokens of doclens.{i}.json, got"
                f" {x.dtype} {shape_of(x)}"
            )
        return x

    def _found(self, kind: str, i: int) -> tuple[Path, Any]:
        path = self.root / f"{i}.{kind}.pt"
        return path, _loaded(path)


class _FastPlaidFiles(_ColbertFiles):
    """The files of an index of fast-plaid, which loads tables in float16."""

    def codec(self, nbits: int) -> Residual:
        names = ("centroids", "bucket_cutoffs", "bucket_weights")
        return _codec([_loaded(self.root / f"{name}.npy") for name in names], nbits, self.root, torch.float16)

    def _found(self, kind: str, i: int) -> tuple[Path, Any]:
        path, merged = self.root / f"{i}.{kind}.npy", self.root / f"merged_{kind}.npy"
        if path.exists() or not merged.exists():  # what was written last lies in the chunk's own file
            return path, _loaded(path)
        manifest = self.root / f"merged_{kind}.manifest.json"
        entries = _loaded(manifest) if manifest.exists() else {}
        try:
            own = [
                int(entries.get(f"{j}.{kind}.npy", {}).get("rows", rows)) for j, rows in enumerate(self.rows)
            ]
        except (AttributeError, TypeError, ValueError) as error:
            raise CorpusError(f"{manifest} must have the rows of each chunk: {error}") from None
        first = sum(own[:i])
        return merged, _loaded(merged)[first : first + own[i]]


def _codec(tables: Any, nbits: int, root: Path, dtype: torch.dtype | None = None) -> Residual:
    try:
        codec = Residual(*(x if dtype is None else x.to(dtype) for x in tables))
    except (TypeError, ValueError, AttributeError) as error:
        raise CorpusError(
            f"{root} must have centroids, and cutoffs and weights of buckets: {error}"
        ) from None
    if codec.nbits != nbits or codec.d * nbits % 8:
        raise CorpusError(
            f"{root} must have buckets of the {nbits} bits of its {METADATA}, and whole bytes, got {codec}"
        )
    return codec


def _loaded(path: Path) -> Any:
    """Read a file of JSON, or map one of torch.save or NumPy."""
    is_json = path.suffix == ".json"
    try:
        if is_json:
            return json.loads(path.read_text(encoding="utf-8"))
        if path.suffix == ".pt":
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        import numpy as np

        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except FileNotFoundError:
        raise CorpusError(f"{path} is missing, and the index has documents in it") from None
    except (RuntimeError, ValueError, TypeError, EOFError, OSError, pickle.UnpicklingError) as error:
        wanted = "JSON" if is_json else "an array of an index"
        raise CorpusError(f"{path} must be {wanted}: it is cut short or changed ({error})") from None


def _lengths(path: Path) -> Tensor:
    found = _loaded(path)
    if not isinstance(found, list) or not all(type(x) is int and x >= 0 for x in found):
        raise CorpusError(f"{path} must be a list of the lengths of documents, got {abbreviate(found)}")
    return torch.tensor(found, dtype=torch.int64, device="cpu")


# ---- the ids of PyLate ----


class _PlainUnpickler(pickle.Unpickler):
    """Reads strings, numbers and dicts: a pickle may not call anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _ids(path: Path, documents: int) -> list[str | None]:
    """Return the id of each document, None where it was deleted."""
    try:
        found = _mapping(path)
        ids = {int(number): str(x) for number, x in found.items() if isinstance(x, (str, int))}
    except Exception as error:  # a damaged pickle may raise anything
        raise CorpusError(f"{path} must map numbers to ids: it is cut short or changed ({error!r})") from None
    if len(ids) < len(found) or not all(0 <= x < documents for x in ids):
        raise CorpusError(
            f"{path} must map numbers below {documents}, one a document, to ids, got {abbreviate(found)}"
        )
    return [ids.get(i) for i in range(documents)]


def _mapping(path: Path) -> dict[Any, Any]:
    if path.suffix == ".pkl":
        with path.open("rb") as file:
            return dict(_PlainUnpickler(file).load())
    import io
    import sqlite3

    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT key, value FROM unnamed").fetchall()
    return {key: _PlainUnpickler(io.BytesIO(value)).load() for key, value in rows}
