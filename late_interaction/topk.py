"""The best documents of a corpus, chunk by chunk: :func:`maxsim_topk`, and resumable: :class:`TopK`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from late_interaction import _quantized
from late_interaction._checks.options import check_flag, check_positive, check_precision
from late_interaction._checks.search import check_corpus, check_tokens_or_codes
from late_interaction._checks.tensors import CODES, has_values
from late_interaction._maxsim import maxsim
from late_interaction._progress import Progress, reporter
from late_interaction._stream import chunks

__all__ = ["TopK", "maxsim_topk"]

# A chunk's scores stay below this many (16 MiB in float32; choosing among them takes a few times that), ...
_SCORES = 1 << 22
# ... a chunk that travels to the GPU below this many bytes (some milliseconds of copying, beside which what a
# chunk costs the host is little), and of a corpus that does not, a progress bar moves at least this often.
_BYTES = 256 << 20
_STEPS = 50


def maxsim_topk(
    Q: Tensor,
    D: Tensor,
    k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    chunk_size: int | None = None,
    largest: bool = True,
    sorted: bool = True,
    progress: Progress = False,
    precision: str | None = None,
    scale_Q: Tensor | None = None,
    scale_D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` best documents of each query: ``maxsim(Q, D).topk(k)`` without all the scores at once.

    Deterministic: among equal scores the lowest index comes first (and NaN counts as the largest score, as in
    ``torch.topk``). Peak memory beside the inputs grows with ``Nq * (chunk_size + k)``, not with ``Nd``. Two
    chunks of documents are on the GPU where they come from the CPU; and half-precision copies of one, where
    many query tokens are to be normalized or are float32.

    Args:
        Q: ``[Nq, Lq, d]`` or ``[Lq, d]``.
        D: ``[Nd, Ld, d]`` or ``[Ld, d]``, on the device of ``Q``; or on the CPU while ``Q`` is on a GPU:
            then the documents travel in chunks, each while the one before it is scored, by way of 64 MiB
            of pinned memory if they do not lie in such. A mapped file will do.
        k: how many; at most ``Nd`` come back.
        q_mask: ``[Nq, Lq]``, on the device of ``Q``, True = keep.
        d_mask: ``[Nd, Ld]``, on the device of ``D``, True = keep.
        normalize: L2-normalize every token first.
        chunk_size: documents scored at a time. None chooses it so that a chunk takes at most a few hundred
            MiB.
        largest: the highest scores, or else the lowest.
        sorted: accepted as in ``torch.topk``; the results are sorted either way.
        progress: True shows a tqdm bar; a function is called with (documents done, documents in all).
        precision: as in :func:`late_interaction.maxsim`.
        scale_Q, scale_D: where ``Q`` and ``D`` are float8 or int8 codes, their scales, as in
            :func:`late_interaction.fp8.maxsim_inference_fp8`, on the devices of ``Q`` and of ``D``. Codes are
            of tokens that were normalized before.

    Returns:
        ``(scores, indices)``, each ``[Nq, min(k, Nd)]`` (``[min(k, Nd)]`` for a 2-D ``Q``), on the device
        of ``Q``; indices int64. No gradients.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`, and for ``k`` or ``chunk_size`` below 1
            or a ``largest`` that is no bool; for codes without scales or with ``normalize``, and scales
            without codes.
        ImportError: ``progress=True`` without tqdm.

    Example:
        >>> import torch
        >>> from late_interaction.topk import maxsim_topk
        >>> Q = torch.tensor([[[1.0, 0.0]]])
        >>> D = torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]], [[2.0, 0.0]]])
        >>> maxsim_topk(Q, D, 2)
        (tensor([[3., 2.]]), tensor([[1, 2]]))
    """
    check_flag("sorted", sorted)
    options: dict[str, Any] = {"largest": largest, "precision": precision, "scale_Q": scale_Q}
    best = TopK(Q, k, q_mask, normalize=normalize, **options)
    best.add(D, d_mask, chunk_size=chunk_size, progress=progress, scale_D=scale_D)
    return best.scores, best.indices


class TopK:
    """The ``k`` best documents of each query, of a corpus that comes in pieces; can be saved and resumed.

    ``add`` as many documents as there are at a time; ``scores`` and ``indices`` are those of
    :func:`maxsim_topk` over everything added so far, whatever the pieces. Nothing waits for the GPU.

    Args:
        Q, k, q_mask, normalize, largest, precision, scale_Q: as in :func:`maxsim_topk`.

    Attributes:
        scores, indices: ``[Nq, min(k, seen)]`` (``[min(k, seen)]`` for a 2-D ``Q``), best first. Documents
            are numbered in the order they came.
        seen: how many came.

    Raises:
        TypeError, ValueError: as :func:`maxsim_topk`; and a state to load that is not one of a search like
            this.

    Example:
        >>> import torch
        >>> from late_interaction.topk import TopK
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
        Q: Tensor,
        k: int,
        q_mask: Tensor | None = None,
        *,
        normalize: bool = False,
        largest: bool = True,
        precision: str | None = None,
        scale_Q: Tensor | None = None,
    ) -> None:
        check_positive("k", k)
        check_flag("normalize", normalize)
        check_flag("largest", largest)
        check_precision(precision)
        check_tokens_or_codes("Q", Q, scale_Q)
        if scale_Q is not None and normalize:
            raise ValueError(f"normalize must be False for codes, got True and {Q.dtype}: normalize first")
        if Q.dim() not in (2, 3):
            raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {list(Q.shape)}")
        self.k, self.seen = k, 0
        self._Q, self._q_mask, self._scale_Q = Q, q_mask, scale_Q
        self._largest = largest
        self._options: dict[str, Any] = {"normalize": normalize, "precision": precision}
        Nq = Q.shape[0] if Q.dim() == 3 else 1
        dtype = torch.float64 if Q.dtype == torch.float64 else torch.float32
        self._scores = torch.empty(Nq, 0, dtype=dtype, device=Q.device)
        self._indices = torch.empty(Nq, 0, dtype=torch.int64, device=Q.device)

    @property
    def scores(self) -> Tensor:
        return self._scores.squeeze(0) if self._Q.dim() == 2 else self._scores

    @property
    def indices(self) -> Tensor:
        return self._indices.squeeze(0) if self._Q.dim() == 2 else self._indices

    def add(
        self,
        D: Tensor,
        d_mask: Tensor | None = None,
        *,
        chunk_size: int | None = None,
        progress: Progress = False,
        scale_D: Tensor | None = None,
    ) -> None:
        """The next documents of the corpus. Arguments as in :func:`maxsim_topk`."""
        if chunk_size is not None:
            check_positive("chunk_size", chunk_size)
        Q, D, q_mask, d_mask, scale_Q, scale_D = check_corpus(
            self._Q, D, self._q_mask, d_mask, self._scale_Q, scale_D
        )
        one = None  # for all tokens, which does not travel in chunks
        if scale_D is not None and scale_D.dim() == 0:
            one, scale_D = scale_D.to(Q.device), None
        size = chunk_size or _default_chunk(Q, D, progress is not False)
        with torch.no_grad(), reporter(progress, D.shape[0]) as report:
            for start, documents, (mask, scales) in chunks(D, (d_mask, scale_D), size, Q.device):
                scale = scales if one is None else one
                if scale_Q is None or scale is None:
                    found = maxsim(Q, documents, q_mask, mask, **self._options)
                else:
                    found = _quantized.maxsim(Q, documents, scale_Q, scale, q_mask, mask, CODES)
                first, stop = self.seen, self.seen + documents.shape[0]
                places = torch.arange(first, stop, device=Q.device).expand(found.shape)
                if first:
                    found = torch.cat((self._scores, found), dim=-1)
                    places = torch.cat((self._indices, places), dim=-1)
                self._scores, self._indices = _select(found, places, self.k, self._largest)
                self.seen = stop
                report(start + documents.shape[0])

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to go on after the documents seen so far: tensors, numbers and
        strings. It names the search (``k``, ``largest``, ``normalize``, ``precision``, and of ``Q`` shape and
        dtype), not the values of ``Q``."""
        found = {"scores": self._scores, "indices": self._indices, "seen": self.seen}
        return found | self._search()

    def _search(self) -> dict[str, Any]:
        """The options and shapes that a state must share with this search."""
        shape = self._Q.shape if self._Q.dim() == 3 else (1, *self._Q.shape)
        own = {"k": self.k, "largest": self._largest, **self._options}
        return own | {"Q_shape": list(shape), "Q_dtype": str(self._Q.dtype).removeprefix("torch.")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back, or on, to where :meth:`state_dict` was called, on the device of ``Q``.

        Args:
            state: from :meth:`state_dict` of a search for the same ``k`` with the same options, by queries of
                the same shape and dtype. One of an older version does not say what it was searched with;
                ``{**best.state_dict(), **state}`` says that it was searched as ``best`` is.

        Raises:
            TypeError: ``state`` is no mapping, or an entry is of a wrong type.
            ValueError: ``state`` misses an entry or has another one, was searched otherwise, or holds
                tensors that no such search finds. What was found so far stays as it is then.
        """
        _check_state(state, self._search())
        scores, indices = state["scores"], state["indices"]
        _check_found(scores, indices, state["seen"], self._scores.shape[0], self._scores.dtype, self.k)
        if has_values(scores) and scores.device.type == "cpu":
            _check_order(scores, indices, state["seen"], self.k, self._largest)
        self._scores, self._indices = (x.detach().to(self._Q.device) for x in (scores, indices))
        self.seen = state["seen"]


_FOUND = ("scores", "indices", "seen")


def _check_state(state: Any, search: dict[str, Any]) -> None:
    """The entries of a state, and those of them that name the search."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict from TopK.state_dict(), got {type(state).__name__}")
    wanted = (*_FOUND, *search)
    missing = [name for name in wanted if name not in state]
    if missing == list(search):
        raise ValueError(
            f"state does not say what it was searched with ({', '.join(search)}): it is of an older version."
            " If it was searched as this TopK is, load {**best.state_dict(), **state}; else search again"
        )
    if missing:
        raise ValueError(f"state must have the entries {', '.join(wanted)}: {', '.join(missing)} missing")
    unknown = [str(name) for name in state if name not in wanted]
    if unknown:
        raise ValueError(f"state must have no entries but {', '.join(wanted)}: got {', '.join(unknown)}")
    for name, mine in search.items():
        theirs = state[name]
        if type(theirs) is not type(mine) or theirs != mine:
            raise ValueError(f"{name} of the state must be {mine!r}, as in this search, got {theirs!r}")


def _check_found(scores: Any, indices: Any, seen: Any, Nq: int, dtype: torch.dtype, k: int) -> None:
    """What a search for k documents has found once it has seen so many."""
    if isinstance(seen, bool) or not isinstance(seen, int):
        raise TypeError(f"seen of the state must be an int, got {type(seen).__name__}")
    if seen < 0:
        raise ValueError(f"seen of the state must not be negative, got {seen}")
    shape = [Nq, min(k, seen)]
    for name, x, wanted in (("scores", scores, dtype), ("indices", indices, torch.int64)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} of the state must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{name} of the state must be a dense tensor, got {x.layout}")
        if list(x.shape) != shape or x.dtype != wanted:
            raise ValueError(
                f"{name} of the state must be {wanted} {shape} after {seen} documents,"
                f" got {x.dtype} {list(x.shape)}"
            )


def _check_order(scores: Tensor, indices: Tensor, seen: int, k: int, largest: bool) -> None:
    """Documents that were seen, best first."""
    if scores.numel() == 0:
        return
    low, high = (int(x) for x in indices.aminmax())
    if low < 0 or high >= seen:
        raise ValueError(f"indices of the state must lie in [0, {seen}), got {low} to {high}")
    _, ordered = _select(scores, indices.to(scores.device), k, largest)
    if not torch.equal(ordered, indices.to(scores.device)):
        order = "highest" if largest else "lowest"
        raise ValueError(f"scores of the state must begin with the {order}, as largest={largest} orders them")


def _default_chunk(Q: Tensor, D: Tensor, progress: bool) -> int:
    size = _SCORES // max(Q.shape[0], 1)
    if D.device != Q.device:
        size = min(size, _BYTES // max(D.shape[1] * D.shape[2] * D.element_size(), 1))
    elif progress:
        size = min(size, -(-D.shape[0] // _STEPS))
    return max(size, 1)


def _select(scores: Tensor, indices: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The k best columns, best first, equal scores by ascending index.

    A float32 score and its index make one integer that sorts as the pair does, which torch.topk then has no
    choice about. (A float64 score fills the integer by itself; a stable sort serves.)
    """
    k = min(k, scores.shape[-1])
    if scores.dtype == torch.float64:
        order = scores.sort(dim=-1, descending=largest, stable=True).indices[..., :k]
        return scores.gather(-1, order), indices.gather(-1, order)
    bits = torch.where(scores.isnan(), torch.nan, scores + 0.0).view(torch.int32)  # one NaN, one zero
    tie = _LOW - indices if largest else indices
    keys = (_by_magnitude(bits).to(torch.int64) << 32) | tie
    best = keys.topk(k, dim=-1, largest=largest).values
    scores = _by_magnitude((best >> 32).to(torch.int32)).view(torch.float32)
    tie = best & _LOW
    return scores, _LOW - tie if largest else tie


_LOW = (1 << 32) - 1


def _by_magnitude(bits: Tensor) -> Tensor:
    """The bits of a float32 as an integer that compares as the float does; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
