"""The search of a corpus: its arguments checked, its chunks scored, the best kept."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, no_tensor, shape_of
from late_interaction._checks.options import check_flag, check_positive, check_precision
from late_interaction._checks.tensors import check_embeddings, check_mask
from late_interaction._progress import reporter
from late_interaction._scoring.norm_warning import look
from late_interaction._search import group_search
from late_interaction._search.selection import MOST_SCORES, select_next
from late_interaction._search.stream import to_device
from late_interaction.corpus import _chunks, _queries, _tokens
from late_interaction.corpus._documents import Documents

# A search scores chunks of at most this many bytes of tokens; where a CPU makes a copy of each, of fewer, so
# that the copy stays in its caches and in memory that the process has already.
_BYTES, _BYTES_COPIED = 256 << 20, 4 << 20


def search(
    corpus: Documents, Q: Tensor | Sequence[Tensor], k: int, q_mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """:meth:`Corpus.search`, whose other arguments are the options."""
    group = options["group"]
    if group is None:
        found = _Search(corpus, Q, k, q_mask, options).run()
    else:
        x = Q[0] if isinstance(Q, (list, tuple)) and Q else Q
        device = x.device if isinstance(x, Tensor) else torch.device("cpu")
        own: list[_Search] = []

        def prepared() -> group_search.Query:
            own.append(_Search(corpus, Q, k, q_mask, options))
            return own[0].as_query()

        found = group_search.search("Corpus.search", group, device, prepared, lambda _: own[0].run())
    one = isinstance(Q, Tensor) and Q.dim() == 2
    return (found[0].squeeze(0), found[1].squeeze(0)) if one else found


class _Search:
    """A search whose arguments are checked."""

    def __init__(
        self, corpus: Documents, Q: Tensor | Sequence[Tensor], k: int, q_mask: Tensor | None,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        check_positive("k", k)
        if options["chunk_bytes"] is not None:
            check_positive("chunk_bytes", options["chunk_bytes"])
        check_flag("normalize", options["normalize"])
        check_flag("largest", options["largest"])
        check_flag("keep_empty", options["keep_empty"])
        check_precision(options["precision"])
        self._corpus, self._k, self._options = corpus, k, options
        # Whether documents are normalized in a copy.
        self._unit = options["normalize"] and not corpus.normalized and corpus.codec is None
        if self._unit and corpus.dtype in _tokens.CODES:
            raise ValueError(
                f"normalize must be False for {corpus.dtype} codes of tokens that were not normalized, got"
                " True"
            )
        self._found = _kept_tokens(corpus, Q, q_mask)
        self._device = Q.device if isinstance(Q, Tensor) else Q[0].device
        if self._found:
            _check_device(corpus, self._found)

    def as_query(self) -> group_search.Query:
        lengths = torch.tensor([len(x) for x in self._found], device="cpu")
        return group_search.Query(
            tensors=[lengths, *self._found],
            count=len(self._found),
            k=self._k,
            largest=self._options["largest"],
            normalize=self._options["normalize"],
            precision=self._options["precision"],
            keep_empty=self._options["keep_empty"],
            query_dtype=self._found[0].dtype if self._found else torch.float32,
            dtype=torch.float32,
            documents=len(self._corpus),
        )

    def run(self) -> tuple[Tensor, Tensor]:
        corpus, options = self._corpus, self._options
        if not self._found or not len(corpus):
            shape = len(self._found), min(self._k, len(corpus))
            none = torch.empty(shape, dtype=torch.float32, device=self._device)
            return none, none.to(torch.int64)
        if not options["normalize"]:
            look("Corpus.search", self._found)
        with torch.no_grad():
            queries = _queries.prepare(corpus, self._found, options["normalize"], options["precision"])
            most = max(MOST_SCORES // max(queries.count, 1), 1)
            copied = self._unit and queries.device.type == "cpu"
            size = options["chunk_bytes"] or (_BYTES_COPIED if copied else _BYTES)
            chunks = _chunks.plan(corpus.shards, size, most)
            with reporter(options["progress"], len(corpus)) as report:
                return _best(queries, chunks, self._k, options, report)


def _best(
    queries: _queries.Queries, chunks: list[_chunks.Chunk], k: int, options: dict[str, Any], report: Any
) -> tuple[Tensor, Tensor]:
    device, largest = queries.device, options["largest"]
    scores = torch.empty(queries.count, 0, dtype=torch.float32, device=device)
    indices = torch.empty(queries.count, 0, dtype=torch.int64, device=device)
    for chunk, sources in _chunks.on_device(chunks, device):
        found = queries.scores(chunk, sources)
        end = chunk.place + found.shape[1]
        empty = None if options["keep_empty"] else chunk.empty_documents()
        left_out = None if empty is None else to_device(empty, device)
        scores, indices = select_next(found, chunk.place, (scores, indices), k, largest, left_out)
        report(end)
    return scores, indices


def _kept_tokens(corpus: Documents, Q: Tensor | Sequence[Tensor], q_mask: Tensor | None) -> list[Tensor]:
    """The kept tokens of each query."""
    if isinstance(Q, Tensor):
        check_embeddings("Q", Q)
        if Q.dim() not in (2, 3):
            raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {shape_of(Q)}")
        batch = Q.unsqueeze(0) if Q.dim() == 2 else Q
        mask = check_mask("q_mask", q_mask, "Q", batch)
        found = list(batch if mask is None else (x[kept] for x, kept in zip(batch, mask, strict=True)))
    elif isinstance(Q, (list, tuple)) and Q:
        if q_mask is not None:
            raise ValueError(f"q_mask must be None for a list of queries, got {abbreviate(q_mask)}")
        for i, x in enumerate(Q):
            check_embeddings(f"Q[{i}]", x)
            if x.dim() != 2 or x.device != Q[0].device:
                raise ValueError(
                    f"Q[{i}] must be [L, d] on the device of Q[0], got {shape_of(x)} on {x.device}"
                )
        found = list(Q)
    else:
        raise TypeError(f"Q must be a torch.Tensor or a list of them, got {no_tensor('Q', Q)}")
    for x in found or [Q]:
        if isinstance(x, Tensor) and x.shape[-1] != (corpus.d or x.shape[-1]):
            raise ValueError(f"Q must have the d of the corpus, {corpus.d}, got {shape_of(x)}")
    return found


def _check_device(corpus: Documents, queries: list[Tensor]) -> None:
    for device in {shard.tokens.device for shard in corpus.shards}:
        if device != queries[0].device and not (queries[0].is_cuda and device.type == "cpu"):
            raise ValueError(
                "Q must be on the device of the corpus (or on a GPU where that is on the CPU), got"
                f" {queries[0].device} and {device}"
            )
