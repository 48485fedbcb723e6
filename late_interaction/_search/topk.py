"""The best documents of a corpus that comes in pieces: :class:`TopK`."""

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.dense import check_queries
from late_interaction._checks.options import Precision, check_positive
from late_interaction._checks.tensors import has_values, scores_dtype
from late_interaction._progress import Progress, reporter
from late_interaction._scoring.norm_warning import look
from late_interaction._search import topk_state
from late_interaction._search.equal_plans import Alike
from late_interaction._search.pieces import Piece, piece_of
from late_interaction._search.prepare import Options, padded
from late_interaction._search.selection import select, select_next, without_rank
from late_interaction._search.stream import chunks, documents_at_once
from late_interaction.codes import Codes
from late_interaction.tokens import TokensLike


class TopK:
    """Keep the ``k`` best documents of each query, of a corpus in pieces; can be saved and resumed.

    ``add`` as many documents as there are at a time; ``scores`` and ``indices`` are those of
    :func:`late_interaction.search` over everything added so far, whatever the pieces. Nothing waits for the
    GPU but the look at norms of the process's first call (:func:`late_interaction.maxsim` says when). One
    thread at a time may add, merge, save or load; :meth:`merge` joins what threads found, each with its own.

    Args:
        Q, k, q_mask, normalize, largest, precision, keep_empty: as in :func:`late_interaction.search`.
        first: the number of the first document. That of a search of a shard is how many documents the shards
            before have, so that its documents have their numbers of the whole corpus.

    Attributes:
        scores, indices: ``[Nq, min(k, seen)]`` (``[min(k, seen)]`` for a 2-D ``Q``), best first; -inf (inf
            for ``largest=False``) and -1 behind the last document. Documents are numbered in the order they
            came, from ``first`` on.
        seen: how many came, those of merged searches included.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.search`; and a state to load that is not one of a
            search like this.
        RuntimeError: another thread is using it.

    Example:
        >>> import torch
        >>> from late_interaction import TopK
        >>> best = TopK(torch.tensor([[1.0, 0.0]]), k=2)
        >>> best.add(torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]]))
        >>> checkpoint = best.state_dict()
        >>> best.add(torch.tensor([[[2.0, 0.0]]]))
        >>> best.scores, best.indices, best.seen
        (tensor([3., 2.]), tensor([1, 2]), 3)
        >>> best.load_state_dict(checkpoint)
        >>> best.seen
        2
    """

    def __init__(
        self,
        Q: TokensLike | Codes,
        k: int = 10,
        q_mask: Tensor | None = None,
        *,
        normalize: bool = False,
        largest: bool = True,
        precision: Precision | None = None,
        first: int = 0,
        keep_empty: bool = False,
    ) -> None:
        Options(k, normalize=normalize, largest=largest, keep_empty=keep_empty, precision=precision)
        topk_state.check_first(first)
        self._Q, self._q_mask = padded("Q", Q, q_mask)
        tokens: Tensor = self._Q.values if isinstance(self._Q, Codes) else self._Q
        if tokens is self._Q:
            check_queries(tokens)
        self.k, self.seen = int(k), 0
        self._next = int(first)
        self._ranges: topk_state.Ranges = []
        self._values = tokens
        self._one_thread = OneThread()
        self._largest, self._keep_empty = largest, keep_empty
        self._options: dict[str, Any] = {"normalize": normalize, "precision": precision}
        Nq = tokens.shape[0] if tokens.dim() == 3 else 1
        dtype = scores_dtype(tokens)
        self._scores = torch.empty(Nq, 0, dtype=dtype, device=tokens.device)
        self._indices = torch.empty(Nq, 0, dtype=torch.int64, device=tokens.device)

    @property
    def scores(self) -> Tensor:
        return self._scores.squeeze(0) if self._values.dim() == 2 else self._scores

    @property
    def indices(self) -> Tensor:
        return self._indices.squeeze(0) if self._values.dim() == 2 else self._indices

    def add(
        self,
        D: TokensLike | Codes,
        d_mask: Tensor | None = None,
        *,
        chunk_bytes: int | None = None,
        progress: Progress = False,
    ) -> None:
        """Search the next documents of the corpus.

        Arguments as in :func:`late_interaction.search`; packed Tokens and Codes, and lists, are padded.
        """
        if chunk_bytes is not None:
            check_positive("chunk_bytes", chunk_bytes)
        if isinstance(D, (list, tuple)) and not D:
            return
        piece = self._piece(D, d_mask)
        with self._one_thread:
            self._add_checked(piece, chunk_bytes, progress, None)
        if not isinstance(self._Q, Codes) and not self._options["normalize"]:
            look("TopK.add", piece.values, piece.queries[1])

    def _piece(self, D: Any, d_mask: Any) -> Piece:
        return piece_of(self._Q, D, self._q_mask, d_mask, self._options)

    def _add_checked(
        self, piece: Piece, chunk_bytes: int | None, progress: Progress,
        documents: int | None, left_out: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Search the documents of a checked piece.

        Args:
            documents: how many the corpus has of which these are a shard. None: these are all.
            left_out: ``[Nd]``, those that take no rank.
        """
        Q, D = piece.values, piece.documents
        topk_state.joined(self._ranges, topk_state.coming(self._next, D.shape[0]))
        size = documents_at_once(Q, D, chunk_bytes, progress is not False)

        total = D.shape[0] if documents is None else documents
        alike = Alike(Q, D, total, piece.beside[0] is not None, **self._options)
        with torch.no_grad(), reporter(progress, D.shape[0]) as report:
            for start, some, (out, *beside) in chunks(D, (left_out, *piece.beside), size, Q.device):
                found = alike.scores(piece.score, some, *beside).to(self._scores.dtype)
                stop = self._next + some.shape[0]
                before = self._scores, self._indices
                out = without_rank(some, beside[0], self._keep_empty, out)
                best = select_next(found, self._next, before, self.k, self._largest, out)
                self._has(*best, [[self._next, stop]])
                self._next = stop
                report(start + some.shape[0])

    def _has(self, scores: Tensor, indices: Tensor, ranges: topk_state.Ranges) -> None:
        """Store the k best and the ranges that they are the best of, beside those seen before."""
        self._scores, self._indices = scores, indices
        self._ranges = topk_state.joined(self._ranges, ranges)
        self.seen = sum(stop - first for first, stop in self._ranges)

    def merge(self, *others: "TopK") -> None:
        """Take in what other searches found, by the same queries among other documents.

        Those are shards of the corpus that other processes, GPUs or machines have searched. The result is
        that of one search of all documents, whatever the shards and the order in which they are merged.

        Args:
            others: searches with the same options and shapes as this one, on any device, with a ``first`` of
                their own. What they found is copied; they may go on. That their queries have the same values
                is not checked.

        Raises:
            TypeError: one of them is no TopK.
            ValueError: one searched otherwise, or documents that another has seen. Nothing is merged then.

        Example:
            >>> import torch
            >>> from late_interaction import TopK
            >>> Q, D = torch.tensor([[1.0, 0.0]]), torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]], [[2.0, 0.0]]])
            >>> best, rest = TopK(Q, k=2), TopK(Q, k=2, first=2)
            >>> best.add(D[:2])
            >>> rest.add(D[2:])
            >>> best.merge(rest)
            >>> best.scores, best.indices, best.seen
            (tensor([3., 2.]), tensor([1, 2]), 3)
        """
        with ExitStack() as used, torch.no_grad():
            used.enter_context(self._one_thread)
            mine, ranges = self._search(), self._ranges
            for other in others:
                if not isinstance(other, TopK):
                    raise TypeError(f"others must be TopK, got {type(other).__name__}")
                used.enter_context(other._one_thread)
                topk_state.check_alike("a search to merge", other._search(), mine)
                ranges = topk_state.joined(ranges, other._ranges)
            device, every = self._values.device, [x for x in others if x.seen]
            if every:
                scores = torch.cat([self._scores, *(x._scores.to(device) for x in every)], dim=-1)
                indices = torch.cat([self._indices, *(x._indices.to(device) for x in every)], dim=-1)
                best = select(scores, indices, self.k, self._largest)
                self._has(*best, [entry for x in every for entry in x._ranges])

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to go on: tensors, numbers and strings.

        It names the search (``k``, ``largest``, ``keep_empty``, ``normalize``, ``precision``, and of ``Q``
        shape and dtype), not the values of ``Q``.
        """
        with self._one_thread:
            found = {"scores": self._scores, "indices": self._indices, "seen": self.seen}
            return found | {"next": self._next, "ranges": self._ranges} | self._search()

    def _search(self) -> dict[str, Any]:
        """Return the options and shapes that a state must share with this search."""
        shape = self._values.shape if self._values.dim() == 3 else (1, *self._values.shape)
        own = {"k": self.k, "largest": self._largest, "keep_empty": self._keep_empty, **self._options}
        return own | {"Q_shape": list(shape), "Q_dtype": str(self._values.dtype).removeprefix("torch.")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back, or on, to where :meth:`state_dict` was called, on the device of ``Q``.

        Args:
            state: from :meth:`state_dict` of a search for the same ``k`` with the same options, by queries of
                the same shape and dtype.

        Raises:
            TypeError: ``state`` is no mapping, or an entry is of a wrong type.
            ValueError: ``state`` misses an entry or has another one, was searched otherwise, or holds
                tensors that no such search finds. What was found so far stays as it is then.
        """
        state = topk_state.checked_state(state, self._search())
        topk_state.check_found(state, self._scores, self.k)
        scores, indices = state["scores"], state["indices"]
        if has_values(scores) and scores.device.type == "cpu":
            topk_state.check_order(state, self.k, self._largest)
        with self._one_thread:
            self._scores, self._indices = (x.detach().to(self._values.device) for x in (scores, indices))
            self.seen, self._next = state["seen"], state["next"]
            self._ranges = [list(entry) for entry in state["ranges"]]


class OneThread:
    """Refuse a second thread while a first one is in this context, which may enter it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this TopK is in use by another thread: it serves one at a time, as the order of calls"
                " matters to it. Give each thread a TopK of its own"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return OneThread, ()  # a copy is another object, which nobody uses yet
