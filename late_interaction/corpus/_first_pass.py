"""First passes of a search: what ranks the documents of a corpus roughly, and what it keeps for that.

Sign bits of tokens, MUVERA's encodings and lists of the documents of each centroid are made of a whole shard
at the first search that wants them. In memory they lie beside the shard. In a folder they are a file of the
shard, which can be made again at any time: no generation names it. It appears at once, whole, and ends in two
checksums of 16 bytes: that of the files it was made of, and its own. One that is cut short or was made of
other files is made again.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import is_one_of
from late_interaction._search.prepare import Options
from late_interaction.codecs import Bits, Codec, Int8, Residual
from late_interaction.corpus import _files, _queries, _shard_files, _tokens
from late_interaction.corpus._chunks import Chunk
from late_interaction.corpus._documents import Documents
from late_interaction.corpus._shards import Shard
from late_interaction.muvera import Muvera
from late_interaction.tokens import Tokens

_SIGNS, _INT8 = Bits(1, scales=False), Int8()
_PROBES = 16  # centroids of a query token whose documents are looked at
_CHECKSUM = 16
_AT_ONCE = 1 << 16  # tokens that are encoded at a time, as float32


def check_coarse(coarse: Any, codec: Codec | None) -> None:
    """Require a first pass that a corpus of this codec can have."""
    if not is_one_of(coarse, passes_of(codec)):
        error = ValueError if isinstance(coarse, str) else TypeError
        wanted = f"{passes_of(codec)} for a Corpus of {codec or 'floats'}"
        raise error(f"coarse must be one of {wanted}, got {abbreviate(coarse)}")


def passes_of(codec: Codec | None) -> tuple[str, ...]:
    """Name the first passes that a corpus of this codec can have."""
    return ("bits", "muvera", "centroids") if isinstance(codec, Residual) else ("bits", "muvera")


def prepare(corpus: Documents, Q: list[Tensor], options: Options) -> tuple[_queries.Queries, list[Shard]]:
    """Return the queries and the documents as a first pass has them. Documents keep their numbers."""
    normalize, precision = options.normalize, options.precision
    if options.coarse == "bits":
        shards, codec = [_made("bits", x, _of_bits, corpus.d) for x in corpus.shards], _SIGNS
        rough = Documents(shards, {"d": corpus.d, "dtype": torch.uint8, "codec": codec, "normalized": False})
        return _queries.prepare(rough, Q, normalize, precision), shards
    Q = [_tokens.unit(x.to(torch.float32)) for x in Q] if normalize else Q
    if options.coarse == "centroids":
        shards = [_made("numbers", x, _numbers_of) for x in corpus.shards]
        blocks = [x.block or x for x in corpus.shards]
        return _OfCentroids(Q, corpus.codec, options.largest, shards, blocks), shards
    kind = "muvera_unit" if normalize and not corpus.normalized else "muvera"
    muvera = muvera_of(corpus.d)
    shards = [_made(kind, x, _of_encodings, kind, muvera) for x in corpus.shards]
    rough = Documents(shards, {"d": muvera.dim, "dtype": torch.int8, "codec": _INT8, "normalized": False})
    return _queries.prepare(rough, [muvera.encode_queries(x)[None] for x in Q], False, precision), shards


@lru_cache(8)
def muvera_of(d: int) -> Muvera:
    """Make the encoder of a corpus: 1,280 dims, which take 1,284 bytes a document as int8 with a scale."""
    return Muvera(d, k_sim=2, repetitions=20, d_proj=16)


# ---- what is made of a block ----


def _made(kind: str, shard: Shard, make: Callable[..., Shard], *options: Any) -> Shard:
    """Return what stands for the documents of a shard in a first pass: made once, with its offsets."""
    made = shard.stand_ins  # another thread may put a dict in its place
    if kind not in made:
        made[kind] = make(shard, *options)
    return made[kind]


def _of_bits(shard: Shard, d: int) -> Shard:
    """Documents whose tokens are their signs: where the tokens are, as many."""
    block = shard.block or shard
    rows, width = len(block.tokens), _SIGNS.width(d)

    def encode(out: Tensor) -> None:
        bits = out.view(rows, width)
        for first in range(0, rows, _AT_ONCE):
            own = slice(first, min(first + _AT_ONCE, rows))
            bits[own] = _SIGNS.encode(block.floats([own])).values[0]

    kept = _kept(block, "bits", rows * width, encode)
    return replace(shard, tokens=kept.view(rows, width), beside=None, codec=_SIGNS)


def _of_encodings(shard: Shard, kind: str, muvera: Muvera) -> Shard:
    """Documents of one token each, their encoding, one a document of the block."""
    block = shard.block or shard
    count, dim = block.documents, muvera.dim

    def encode(out: Tensor) -> None:
        values, scales = _parts(out, count, dim)
        for first, stop in block.ranges(_AT_ONCE, _AT_ONCE // 16):
            tokens = block.floats(block.rows(first, stop))
            tokens = _tokens.unit(tokens.to(torch.float32)) if kind == "muvera_unit" else tokens
            offsets = (block.offsets[first : stop + 1] - block.offsets[first]).to(tokens.device)
            made = _INT8.encode(muvera.encode_documents(Tokens._made(tokens, None, offsets)))
            assert made.scales is not None
            values[first:stop], scales[first:stop] = made.values[0], made.scales[0]

    values, scales = _parts(_kept(block, kind, count * (dim + 4), encode), count, dim)
    offsets = torch.arange(shard.documents + 1, device="cpu")
    return replace(shard, tokens=values, beside=scales, codec=_INT8, offsets=offsets, starts=shard.places)


def _parts(x: Tensor, count: int, dim: int) -> tuple[Tensor, Tensor]:
    """View bytes as codes ``[count, dim]``, and a scale for each."""
    return x[: count * dim].view(torch.int8).view(count, dim), x[count * dim :].view(torch.float32)


def _numbers_of(shard: Shard) -> Shard:
    """Documents of one token each, which says its place in the block."""
    offsets = torch.arange(shard.documents + 1, device="cpu")
    numbers = offsets[:-1] if shard.places is None else shard.places
    tokens = numbers.unsqueeze(1).to(shard.tokens.device)
    return Shard(tokens, offsets)


class _OfCentroids(_queries.Queries):
    """One query, which looks for each of its tokens through the documents of the best centroids.

    A document's score is ``sum_s max_t max(0, <Q[s], centroid of t> - least[s])``, with the product of the
    last centroid whose documents are looked at: what is not met counts as that one, and 0 stands for it.
    """

    def __init__(
        self, Q: list[Tensor], codec: Any, largest: bool, shards: list[Shard], blocks: list[Shard]
    ) -> None:
        super().__init__(Q)
        self._blocks = {id(shard): block for shard, block in zip(shards, blocks, strict=True)}
        centroids = codec.centroids.to(torch.float32)
        products = Q[0].to(centroids.device, torch.float32) @ centroids.T
        count = len(centroids)
        best, self._best = products.topk(min(_PROBES, count) if largest else count)
        self._gains, self._count = best - best[:, -1:], count
        self._block: Shard | None = None
        self._scores = best

    def scores(self, chunk: Chunk, sources: list[Tensor]) -> Tensor:
        block = self._blocks[id(chunk.shard)]
        if block is not self._block:
            self._block, self._scores = block, self._scored(block).to(self.device)
        return self._scores[sources[0].T]

    def _scored(self, block: Shard) -> Tensor:
        edges, owners = _lists_of(block, self._count)
        best, all_gains = self._best.to(edges.device), self._gains.to(edges.device)
        begins = edges[best].flatten()
        lengths = edges[best + 1].flatten() - begins
        ends = lengths.cumsum(0)
        counts = ends[best.shape[1] - 1 :: best.shape[1]].diff(prepend=ends.new_zeros(1)).tolist()
        rows = (begins - ends + lengths).repeat_interleave(lengths, output_size=sum(counts))
        rows = owners[rows.add_(torch.arange(len(rows), device=rows.device))].to(torch.int64)
        values = all_gains.flatten().repeat_interleave(lengths, output_size=len(rows))
        scores = torch.zeros(block.documents, dtype=torch.float32, device=owners.device)
        for own in zip(rows.split(counts), values.split(counts), strict=True):
            scores += torch.zeros_like(scores).scatter_reduce_(0, *own, "amax")
        return scores


def _lists_of(block: Shard, count: int) -> tuple[Tensor, Tensor]:
    """Return the documents of the tokens of each centroid, end to end, and where each list begins."""
    split = 8 * (count + 1)

    def encode(out: Tensor) -> None:
        lengths = block.offsets.diff().to(out.device)
        owners = torch.arange(block.documents, dtype=torch.int32, device=out.device)
        (tokens,) = block.rows(0, block.documents)
        assert block.beside is not None
        codes, order = block.beside[tokens].sort(stable=True)
        numbers = torch.arange(count + 1, dtype=torch.int32, device=out.device)
        out[:split].view(torch.int64).copy_(torch.searchsorted(codes, numbers))
        out[split:].view(torch.int32).copy_(owners.repeat_interleave(lengths)[order])

    kept = _kept(block, "lists", split + 4 * block.token_count, encode)
    return kept[:split].view(torch.int64), kept[split:].view(torch.int32)


# ---- where it is kept ----


def _kept(block: Shard, kind: str, size: int, encode: Any) -> Tensor:
    """Return so many bytes of a block: from memory, from its file, or made and kept there."""
    kept = block.kept  # another thread may put a dict in its place
    if kind not in kept:
        found = _read(block, kind, size)
        if found is None:
            found = torch.empty(size + 2 * _CHECKSUM, dtype=torch.uint8, device=block.tokens.device)
            encode(found[:size])
            found = _written(block, kind, found)
        kept[kind] = found
    return kept[kind][:size]


def _read(block: Shard, kind: str, size: int) -> Tensor | None:
    """Map the file of a block, if there is one that was made of it, in whole."""
    if block.origin is None:
        return None
    folder, number, checksum = block.origin
    path = folder / _shard_files.name_of(number, kind)
    with suppress(OSError, RuntimeError):  # it may vanish
        if path.stat().st_size == size + 2 * _CHECKSUM:
            found = _files.mapped(path, size + 2 * _CHECKSUM, torch.uint8)
            if _hex(found[size : size + _CHECKSUM]) == checksum:
                return found
    return None


def _written(block: Shard, kind: str, x: Tensor) -> Tensor:
    """Write the file of a block and map it. Where nothing can be written it stays in memory."""
    if block.origin is None:
        return x
    folder, number, checksum = block.origin
    x[-2 * _CHECKSUM : -_CHECKSUM] = _bytes(checksum)
    x[-_CHECKSUM:] = _bytes(_files.entry_of(x[:-_CHECKSUM])["blake2b"])
    path = folder / _shard_files.name_of(number, kind)
    # A name of its own, which the next writer removes after a crash.
    new = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        _files.write_file(new, x)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        return x
    mapped = _read(block, kind, len(x) - 2 * _CHECKSUM)
    return x if mapped is None else mapped


def verify(folder: Path, entries: dict[str, Any]) -> None:
    """Compare the files that first passes have made with their checksums."""
    for number in (shard["number"] for shard in entries["shards"]):
        for path in (folder / _shard_files.name_of(number, kind) for kind in _shard_files.KEPT):
            try:
                found = _files.mapped(path, path.stat().st_size, torch.uint8)
            except (OSError, RuntimeError):  # none was made, or a writer has just removed it
                continue
            own = _files.entry_of(found[:-_CHECKSUM])["blake2b"]
            if own != _hex(found[-_CHECKSUM:]):
                raise _files.CorpusError(
                    f"{path} does not have the checksum that it was written with: delete it, and the next"
                    " search that wants it makes it again"
                )


def _bytes(checksum: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(checksum)), dtype=torch.uint8, device="cpu")


def _hex(x: Tensor) -> str:
    return bytes(x.tolist()).hex()
