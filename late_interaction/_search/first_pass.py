"""A first pass over codes or MUVERA's encodings, and the exact scores of the best documents."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_rows

from late_interaction._checks.dense import check_corpus
from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_positive
from late_interaction._checks.tensors import scores_dtype
from late_interaction._maxsim import maxsim
from late_interaction._progress import Progress, reporter
from late_interaction._scoring.norm_warning import unwatched
from late_interaction._scoring.precision import without_autocast
from late_interaction._search.pieces import codes_of
from late_interaction._search.prepare import Options, Search, left_out, padded
from late_interaction._search.selection import MOST_SCORES, Found, select, select_next, without_rank
from late_interaction._search.stream import chunks, to_device
from late_interaction.codecs import Codec
from late_interaction.codes import Codes
from late_interaction.muvera import Encodings, Muvera
from late_interaction.score_pairs import rerank_direct
from late_interaction.tokens import Tokens

# Copies of candidates take at most so many bytes at a time; on a CPU as many as the process has memory for
# already.
_EXACT_BYTES, _GATHERED_BYTES = 256 << 20, 8 << 20


def fitting(bytes_each: int, most: int) -> int:
    """Return how many take at most so many bytes together; at least one."""
    return max(most // max(bytes_each, 1), 1)


def exact_scores(
    Q: Tensor, D: Tensor, found: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Scores of each query with its documents ``found`` [Nq, K].

    A CPU scores documents where they lie if their kept tokens come first; others are copied, some at a time.
    """
    Nq, K = found.shape
    scores = torch.empty(Nq, K, dtype=scores_dtype(Q), device=Q.device)
    on_cpu = D.is_cpu and Q.is_cpu
    spans = spans_of(D, d_mask) if on_cpu and not options["normalize"] else None
    if spans is not None:
        starts, lengths = spans
        for i, own in enumerate(found):
            query = Q[i] if q_mask is None else Q[i][q_mask[i]]
            where = starts[own], lengths[own]
            tokens, precision = D.flatten(0, 1), options["precision"]
            scores[i] = unwatched(rerank_direct, query, tokens, *where, precision=precision)
        return scores
    at_once = fitting(D.shape[1] * D.shape[2] * D.element_size(), _GATHERED_BYTES if on_cpu else _EXACT_BYTES)
    queries, documents = max(at_once // max(K, 1), 1), min(at_once, max(K, 1))
    for i in range(0, Nq, queries):
        for j in range(0, K, documents):
            part = slice(i, i + queries), slice(j, j + documents)
            index = found[part].to(D.device)
            mask = None if d_mask is None else d_mask[index]
            tokens = D if mask is None or not on_cpu else D[:, : longest(mask)]
            scores[part] = unwatched(
                maxsim,
                Q[part[0]],
                tokens[index].to(Q.device),
                None if q_mask is None else q_mask[part[0]],
                None if mask is None else mask[..., : tokens.shape[1]].to(Q.device),
                **options,
            )
    return scores


def spans_of(D: Tensor, d_mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return where the kept tokens of each document begin and how many they are, if they lie together."""
    Nd, Ld = D.shape[:2]
    if not D.is_contiguous():
        return None
    starts = torch.arange(Nd, device="cpu") * Ld
    if d_mask is None:
        return starts, torch.full_like(starts, Ld)
    lengths = d_mask.sum(1)
    leading = torch.arange(Ld, device="cpu") < lengths.unsqueeze(1)
    return (starts, lengths) if torch.equal(d_mask, leading) else None


def longest(d_mask: Tensor) -> int:
    """Count the tokens of these documents up to the last one that is kept."""
    kept = d_mask.flatten(0, -2).any(0).nonzero()
    return int(kept[-1]) + 1 if len(kept) else 1


# Documents that are scored or encoded at a time have at most so many bytes of codes, encodings or embeddings.
_BYTES = 256 << 20


class CoarseSearch(Search):
    """A search of documents ``[Nd, Ld, d]`` by way of ``coarse``."""

    def __init__(self, D: Any, Q: Any, options: Options) -> None:
        options.refuse("but for a Corpus with columns", "filter")
        if options.coarse is None:
            options.refuse("without coarse", "candidates")
        options.refuse("with coarse", "group")
        self._options, self.one_query = options, isinstance(Q, Tensor) and Q.dim() == 2
        Q, q_mask = padded("Q", Q, options.q_mask)
        D, d_mask = padded("D", D, options.d_mask)
        Q, D, q_mask, d_mask = check_corpus(Q, D, q_mask, d_mask)
        self._tensors, self.queries = (Q, q_mask, D, d_mask), (Q, q_mask)
        _check_corpus_of(options.coarse, D)
        self._candidates = check_candidates(options.candidates, options.k)
        self._left_out = left_out(options.subset, len(D), None, D.device)

    def run(self, documents: int | None) -> Found:
        Q, q_mask, D, d_mask = self._tensors
        options = self._options
        coarse, largest = options.coarse, options.largest
        with torch.no_grad():
            by: Any = scored_by_muvera if isinstance(coarse, (Muvera, Encodings)) else scored_by_codes
            scored = by(coarse, Q, q_mask, D, d_mask, options.normalize, options.chunk_bytes)
            out = without_rank(D, d_mask, options.keep_empty, self._left_out)
            found = _best(scored, Q, D, self._candidates, largest, options.progress, out)
            exact = {"normalize": options.normalize, "precision": options.precision}
            # Scores of any document stand where a query has fewer candidates, and are not looked at.
            scores = exact_scores(Q, D, found.clamp_min(0), q_mask, d_mask, exact)
            return select(scores, found, options.k, largest)


# What scores documents roughly yields the first document's index of each chunk, and scores, on the device of
# the queries.
Scored = Iterator[tuple[int, Tensor]]


def _unit(x: Tensor, normalize: bool) -> Tensor:
    return unit_rows(x.float(), dim=-1, eps=1e-12) if normalize else x


def _size(Q: Tensor, bytes_each: int, chunk_bytes: int | None) -> int:
    """Return how many documents are scored at a time."""
    return min(fitting(len(Q), MOST_SCORES), fitting(bytes_each, chunk_bytes or _BYTES))


def scored_by_codes(
    coarse: Codec | Codes, Q: Tensor, q_mask: Tensor | None, D: Tensor, d_mask: Tensor | None,
    normalize: bool, chunk_bytes: int | None,
) -> Scored:  # fmt: skip
    device, queries = Q.device, _unit(Q, normalize)
    if isinstance(coarse, Codec):
        codec, size = coarse.to(device), _size(Q, 4 * D.shape[1] * D.shape[2], chunk_bytes)
        for start, some, (mask,) in chunks(D, (d_mask,), size, device):
            made = codec.encode(Tokens._made(_unit(some, normalize), mask))
            yield start, unwatched(maxsim, queries, made, q_mask)
        return
    codes, codec = coarse.to_padded(), coarse.codec.to(device)
    values, mask = codes.values, d_mask if codes.mask is None else codes.mask
    if values.device == device and chunk_bytes is None:  # what travels goes in small chunks
        size = fitting(len(Q), MOST_SCORES)
    else:
        size = _size(Q, values.shape[1] * values.shape[2] * values.itemsize, chunk_bytes)
    for start, some, beside in chunks(values, (mask, codes.scales, codes.centroids), size, device):
        yield start, unwatched(maxsim, queries, codes_of(codec, codes.d, some, *beside), q_mask)


def scored_by_muvera(
    coarse: Muvera | Encodings, Q: Tensor, q_mask: Tensor | None, D: Tensor, d_mask: Tensor | None,
    normalize: bool, chunk_bytes: int | None,
) -> Scored:  # fmt: skip
    muvera, made = (coarse, None) if isinstance(coarse, Muvera) else (coarse.muvera, coarse.documents)
    queries = muvera.encode_queries(Tokens._made(_unit(Q, normalize), q_mask))
    bytes_each = 4 * (muvera.dim if made is not None else max(muvera.dim, D.shape[1] * D.shape[2]))

    def scores(documents: Tensor) -> Tensor:
        with without_autocast(Q.device.type):
            return torch.mm(queries, documents.float().t())

    source, beside = (D, (d_mask,)) if made is None else (made, (None,))
    for start, some, (mask,) in chunks(source, beside, _size(Q, bytes_each, chunk_bytes), Q.device):
        if made is None:
            yield start, scores(muvera.encode_documents(Tokens._made(_unit(some, normalize), mask)))
        else:
            yield start, scores(some)


def _best(
    scored: Scored, Q: Tensor, D: Tensor, count: int, largest: bool,
    progress: Progress, out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Find the indices of the best documents of each query, rising: first -1 for no document.

    out: ``[Nd]``, the documents to leave out.
    """
    out = None if out is None else to_device(out, Q.device)
    best = Q.new_empty((Q.shape[0], 0), dtype=torch.float32)
    places = torch.empty(best.shape, dtype=torch.int64, device=best.device)
    with reporter(progress, D.shape[0]) as report:
        for start, found in scored:
            stop = start + found.shape[1]
            some = None if out is None else out[start:stop]
            best, places = select_next(found, start, (best, places), count, largest, some)
            report(stop)
    return places.sort(dim=-1).values


def _check_corpus_of(coarse: Any, D: Tensor) -> None:
    if isinstance(coarse, (Muvera, Encodings)):
        muvera, made = (coarse, None) if isinstance(coarse, Muvera) else (coarse.muvera, coarse.documents)
        if muvera.d != D.shape[2]:
            raise ValueError(f"coarse must be for tokens of D {shape_of(D)}, got one for d = {muvera.d}")
        if made is not None and len(made) != len(D):
            raise ValueError(f"coarse must hold the encodings of {len(D)} documents, got {len(made)}")
        device = D.device if made is None else made.device
    elif isinstance(coarse, Codes):
        tokens = coarse.mask is None and not coarse.is_packed  # those of D, one by one
        got = [*coarse.values.shape[:-1], coarse.d] if tokens else [len(coarse), coarse.d]
        if got != ([*D.shape] if tokens else [D.shape[0], D.shape[2]]) or coarse.values.dim() == 4:
            raise ValueError(f"coarse must be the codes of D {shape_of(D)}, got those of {got}")
        device = coarse.device
    elif isinstance(coarse, Codec):
        device = D.device
    else:
        raise TypeError(
            f"coarse must be Codes of D or a codec, or Encodings of D or a Muvera, got {abbreviate(coarse)}"
        )
    if device != D.device:
        raise ValueError(f"coarse must be on the device of D, {D.device}, got {device}")


def check_candidates(candidates: int | None, k: int) -> int:
    """Return how many candidates a search for the k best takes."""
    if candidates is None:
        return max(10 * k, 100)
    check_positive("candidates", candidates)
    if candidates < k:
        raise ValueError(f"candidates must be at least k, {k}, got {abbreviate(candidates)}")
    return candidates
