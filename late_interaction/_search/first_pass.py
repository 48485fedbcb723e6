"""A first pass over codes or MUVERA's encodings, and the exact scores of the best documents."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_rows

from late_interaction._checks.dense import check_corpus
from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_positive
from late_interaction._maxsim import maxsim
from late_interaction._progress import Progress, reporter
from late_interaction._scoring.norm_warning import unwatched
from late_interaction._search.pieces import codes_of
from late_interaction._search.prepare import Options, Search, left_out, padded
from late_interaction._search.rescore import exact_scores, fitting
from late_interaction._search.selection import MOST_SCORES, Found, select, select_next, without_rank
from late_interaction._search.stream import chunks, to_device
from late_interaction.codecs import Codec
from late_interaction.codes import Codes
from late_interaction.muvera import Encodings, Muvera
from late_interaction.muvera._first_pass import MuveraPass, check_encodings
from late_interaction.tokens import Tokens

# Documents that are scored or encoded at a time have at most so many bytes of codes or embeddings.
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
            makes: Any = MuveraPass if isinstance(coarse, (Muvera, Encodings)) else CodesPass
            scored = makes(Q, q_mask, coarse, options.normalize).scored(D, d_mask, options.chunk_bytes)
            out = without_rank(D, d_mask, options.keep_empty, self._left_out)
            found = _best(scored, Q, D, self._candidates, largest, options.progress, out)
            exact = {"normalize": options.normalize, "precision": options.precision}
            # Scores of any document stand where a query has fewer candidates, and are not looked at.
            scores = exact_scores(Q, D, found.clamp_min(0), q_mask, d_mask, exact)
            return select(scores, found, options.k, largest)


class CodesPass:
    """Queries, and their scores with chunks of documents in codes."""

    def __init__(self, Q: Tensor, q_mask: Tensor | None, coarse: Codec | Codes, normalize: bool) -> None:
        self.codes = coarse.to_padded() if isinstance(coarse, Codes) else None
        self.codec = (coarse.codec if isinstance(coarse, Codes) else coarse).to(Q.device)
        self.normalize = normalize
        self.Q, self.q_mask = self._tokens(Q), q_mask

    def _tokens(self, x: Tensor) -> Tensor:
        return unit_rows(x.float(), dim=-1, eps=1e-12) if self.normalize else x

    def chunks(
        self, D: Tensor, d_mask: Tensor | None, chunk_bytes: int | None
    ) -> Iterator[tuple[int, Codes]]:
        """Yield the first document's index and codes, on the device of the queries."""
        device, most = self.Q.device, max(MOST_SCORES // max(self.Q.shape[0], 1), 1)
        codes = self.codes
        if codes is not None:
            values, mask = codes.values, d_mask if codes.mask is None else codes.mask
            if values.device != device:  # what travels goes in small chunks
                chunk_bytes = chunk_bytes or _BYTES
            size = most
            if chunk_bytes is not None:
                size = min(most, fitting(values.shape[1] * values.shape[2] * values.itemsize, chunk_bytes))
            for start, some, beside in chunks(values, (mask, codes.scales, codes.centroids), size, device):
                yield start, codes_of(self.codec, codes.d, some, *beside)
            return
        size = min(most, fitting(4 * D.shape[1] * D.shape[2], chunk_bytes or _BYTES))
        for start, some, (mask,) in chunks(D, (d_mask,), size, device):
            yield start, self.codec.encode(Tokens._made(self._tokens(some), mask))

    def scored(
        self, D: Tensor, d_mask: Tensor | None, chunk_bytes: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the first document's index of each chunk, and scores."""
        for start, codes in self.chunks(D, d_mask, chunk_bytes):
            yield start, unwatched(maxsim, self.Q, codes, self.q_mask)


def _best(
    scored: Iterator[tuple[int, Tensor]], Q: Tensor, D: Tensor, count: int, largest: bool,
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
        check_encodings(coarse, D)
        return
    if isinstance(coarse, Codec):
        return
    if not isinstance(coarse, Codes):
        raise TypeError(
            f"coarse must be Codes of D or a codec, or Encodings of D or a Muvera, got {abbreviate(coarse)}"
        )
    tokens = coarse.mask is None and not coarse.is_packed  # those of D, one by one
    got = [*coarse.values.shape[:-1], coarse.d] if tokens else [len(coarse), coarse.d]
    if got != ([*D.shape] if tokens else [D.shape[0], D.shape[2]]) or coarse.values.dim() == 4:
        raise ValueError(f"coarse must be the codes of D {shape_of(D)}, got those of {got}")
    if coarse.device != D.device:
        raise ValueError(f"coarse must be on the device of D, {D.device}, got {coarse.device}")


def check_candidates(candidates: int | None, k: int) -> int:
    """Return how many candidates a search for the k best takes."""
    if candidates is None:
        return max(10 * k, 100)
    check_positive("candidates", candidates)
    if candidates < k:
        raise ValueError(f"candidates must be at least k, {k}, got {abbreviate(candidates)}")
    return candidates
