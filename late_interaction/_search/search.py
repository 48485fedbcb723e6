"""The best documents, of whatever holds them: :func:`search`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.options import Precision
from late_interaction._progress import Progress
from late_interaction._scoring.codes import check_precision_of_codes
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.sequences import is_sequences
from late_interaction._search import group_search
from late_interaction._search.equal_plans import enough
from late_interaction._search.first_pass import CoarseSearch
from late_interaction._search.prepare import FirstPass, Options, Search, left_out, prepare
from late_interaction._search.result import SearchResult, ids_at
from late_interaction._search.selection import Found
from late_interaction._search.topk import TopK
from late_interaction.codecs import Codec, Residual
from late_interaction.codes import Codes
from late_interaction.muvera import Encodings, Muvera
from late_interaction.tokens import Tokens, TokensLike


def search(
    Q: TokensLike | Codes,
    D: Any,
    k: int = 10,
    *,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    subset: Any = None,
    filter: Any = None,
    normalize: bool = False,
    largest: bool = True,
    keep_empty: bool = False,
    precision: Precision | None = None,
    coarse: Codec | Codes | Muvera | Encodings | FirstPass | None = None,
    candidates: int | None = None,
    chunk_bytes: int | None = None,
    progress: Progress = False,
    group: Any = None,
) -> SearchResult:
    """Find the ``k`` best documents of each query: ``maxsim(Q, D).topk(k)`` without all the scores at once.

    Deterministic: among equal scores the lowest index comes first. A document takes no rank by a query with
    which its score is NaN, nor does one without tokens, unless it is kept.

    Args:
        Q: ``[Nq, Lq, d]`` or ``[Lq, d]``, :class:`late_interaction.Tokens`, or a list of ``[L, d]``. With
            Codes as ``D`` also the Codes that :func:`late_interaction.maxsim` takes with them.
        D: documents, on the device of ``Q``, or on the CPU while ``Q`` is on a GPU: they travel in chunks
            then, each while the one before it is scored, by way of 64 MiB of pinned memory if they do not lie
            in such. A mapped file will do.

            - ``[N, Ld, d]`` or ``[Ld, d]``, Tokens or a list of ``[L, d]``, of the dtype of ``Q``;
            - :class:`late_interaction.Codes`, which ``Q`` meets as in :func:`late_interaction.maxsim`;
            - a :class:`late_interaction.Corpus`, to whose dtype queries are rounded, or quantized;
            - a ``ray.data.Dataset``, or :class:`late_interaction.ray.Documents`, which has options for it.
        k: how many; at most ``N`` come back.
        q_mask, d_mask: ``[Nq, Lq]`` and ``[N, Ld]``, True = keep, for padded tensors; Tokens and
            Codes hold their own.
        subset: the documents that may be found: bool ``[N]``, or a tensor or list of indices, or a list of
            ids of a corpus that has ids. All are scored. None: every document.
        filter: for a corpus with columns: a ``pyarrow.compute.Expression``, as ``pc.field("year") > 2020``.
            Documents that do not meet it, or where it is null, are left out as by ``subset``.
        normalize: L2-normalize every token first. Those of a corpus that is known to be ``normalized`` are
            taken as they are; codes cannot be normalized; decompressed tokens are where they are multiplied.
        largest: the highest scores, or else the lowest.
        keep_empty: rank documents without a kept token too, by their score of 0.
        precision: how float32 tokens multiply, as in :func:`late_interaction.maxsim`.
        coarse: a first pass over codes, the :class:`late_interaction.Codes` of ``D`` or a codec
            (``codecs.Bits(1)``), or over single vectors, the :class:`late_interaction.muvera.Encodings` of
            ``D`` or a :class:`late_interaction.Muvera`. What is not encoded before is encoded on the way and
            forgotten, which can take longer than an exact search. Documents that the first pass ranks lower
            are missed. For tensors, lists and Tokens. A Corpus keeps its own, and takes a name: see
            :meth:`late_interaction.Corpus.search`.
        candidates: how many documents of each query are scored exactly after the first pass; at least ``k``.
            None: ``max(10 * k, 100)``.
        chunk_bytes: how many bytes of documents are scored at a time; a longer document is a chunk by itself.
            None: all that 4 M scores allow, 256 MiB of them where they travel or are packed.
        progress: True shows a tqdm bar; a function is called with (documents done, documents in all).
        group: a ``torch.distributed`` process group whose processes have a shard of the documents each, all
            of one kind, and search for the same queries. All of them call this and have the best of all
            documents, numbered in the order of ranks. Of tensors these are the bits of one process that has
            all of them and the same kind of device, where a mask comes with all shards or with none. The
            ``k`` best of each process travel, by a backend for the device of ``Q``. None: this process alone.

    Returns:
        A :class:`SearchResult`, which unpacks as ``scores, indices``, each ``[Nq, min(k, N)]`` (``[min(k,
        N)]`` for a 2-D ``Q``), on the device of ``Q``. No gradients. Where fewer documents take a rank, the
        last entries are -inf (inf for ``largest=False``) and -1: all entries of a query with NaN in a token
        that counts. ``ids`` are those of a corpus that has some, without a ``group``.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value; ``k`` below 1; a
            ``subset`` of another length, or with a document or id that there is not; an option that the kind
            of ``D`` does not have; on all processes of a group for queries or options in which they differ.
        RuntimeError: another process of the group has raised an error or has ended; too many of Ray's workers
            were lost.
        ImportError: ``progress=True`` without tqdm.

    Complexity: ``2 * tokens of Q * tokens of D * d`` operations and one read of the documents. Memory beside
        the inputs grows with ``Nq * (documents of a chunk + k)``, not with ``N``; two chunks are on the GPU
        where documents come from the CPU, and a copy of a chunk where its tokens are normalized.

    Example:
        >>> import torch
        >>> import late_interaction as li
        >>> Q = torch.tensor([[[1.0, 0.0]]])
        >>> D = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]], [[0.6, 0.8]]])
        >>> scores, indices = li.search(Q, D, k=2)
        >>> scores, indices
        (tensor([[1.0000, 0.6000]]), tensor([[1, 2]]))
        >>> li.search(Q, [D[0], torch.cat([D[1], D[2]])], k=2, subset=[0]).indices
        tensor([[ 0, -1]])
    """
    made: list[Search] = []

    def prepared() -> Search:
        options = Options(
            k, q_mask, d_mask, subset, filter, normalize, largest, keep_empty, precision, coarse,
            candidates, chunk_bytes, progress, group,
        )  # fmt: skip
        made.append(prepare(D, Q, options))
        return made[0]

    if group is None:
        scores, indices = prepared().run(None)
    else:  # the others must learn what this process refuses
        first = Q[0] if isinstance(Q, (list, tuple)) and Q else Q
        device = first.device if isinstance(first, (Tensor, Tokens, Codes)) else torch.device("cpu")
        scores, indices = group_search.search(
            group, device, lambda: prepared().as_query(), lambda total: made[0].run(total)
        )
    own = made[0]
    if own.queries is not None and not normalize:
        look("search", *own.queries)
    if own.one_query:
        scores, indices = scores.squeeze(0), indices.squeeze(0)
    found = None if own.ids is None or group is not None else ids_at(own.ids, indices.tolist())
    return SearchResult(scores, indices, found)


@prepare.register
def _of_tensor(D: Tensor, Q: Any, options: Options) -> Search:
    rough = options.coarse is not None or options.candidates is not None
    return (CoarseSearch if rough else DenseSearch)(D, Q, options)


@prepare.register
def _of_tokens(D: Tokens, Q: Any, options: Options) -> Search:
    beside = options.d_mask, options.coarse, options.candidates
    if not D.is_packed or D.dtype == torch.float64 or any(x is not None for x in beside):
        return _of_tensor(D, Q, options)  # type: ignore[arg-type]
    return _packed_search(D, Q, options)


@prepare.register
def _of_codes(D: Codes, Q: Any, options: Options) -> Search:
    options.refuse("for Codes", "coarse", "candidates")
    if not isinstance(D.codec, Residual):
        check_precision_of_codes(D.codec, options.normalize, options.precision)
    if not D.is_packed or options.d_mask is not None or isinstance(Q, Codes):
        return DenseSearch(D, Q, options)
    return _packed_search(D, Q, options)


@prepare.register(list)
@prepare.register(tuple)
def _of_list(D: Any, Q: Any, options: Options) -> Search:
    if D and not is_sequences(D):
        return prepare.dispatch(object)(D, Q, options)
    if D:
        return _of_tokens(Tokens._from_list("D", D), Q, options)
    return _packed_search(None, Q, replace(options, coarse=None, candidates=None))  # nothing to choose from


def _packed_search(D: Tokens | Codes | None, Q: Any, options: Options) -> Search:
    from late_interaction.corpus._search import PackedSearch

    return PackedSearch(D, Q, options)


class DenseSearch(Search):
    """A search of documents ``[Nd, Ld, d]``, or of codes of them."""

    def __init__(self, D: Any, Q: Any, options: Options) -> None:
        options.refuse("but for a Corpus with columns", "filter")
        self._options, self.one_query = options, isinstance(Q, Tensor) and Q.dim() == 2
        self._given = Q, options.k, options.q_mask
        self._best = self._made()
        self._piece = self._best._piece(D, options.d_mask)
        documents = self._piece.documents
        self._left_out = left_out(options.subset, len(documents), None, documents.device)
        self.queries = None if isinstance(Q, Codes) else (self._piece.values, self._piece.queries[1])

    def _made(self) -> TopK:
        return TopK(*self._given, **self._options.shared())

    def run(self, documents: int | None) -> Found:
        if self._best.seen:  # a group searches again, knowing the number of all documents
            self._best = self._made()
        best, options = self._best, self._options
        best._add_checked(self._piece, options.chunk_bytes, options.progress, documents, self._left_out)
        return best._scores, best._indices

    def as_query(self) -> group_search.Query:
        piece, options = self._piece, self._options
        Q, D = piece.values, piece.documents
        return group_search.Query(
            tensors=piece.queries,
            count=Q.shape[0],
            k=options.k,
            **options.shared(),
            query_dtype=Q.dtype,
            dtype=self._best._scores.dtype,
            documents=D.shape[0],
            runs_ahead=Q.is_cuda and D.is_cuda and options.progress is False,
            needs_total=not enough(D),
        )
