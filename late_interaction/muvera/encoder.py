"""The encoder, :class:`Muvera`, and what it makes of a corpus, :class:`Encodings`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_rows
from torch.nn.functional import pad

from late_interaction import ops
from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag, check_integer, check_positive
from late_interaction._checks.tensors import as_dtype, check_embeddings
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.sequences import all_as_tokens
from late_interaction._torch import _AutoDispatchBelowAutograd
from late_interaction.muvera import _random_bits
from late_interaction.tokens import Tokens, TokensLike

__all__ = ["Encodings", "Muvera"]

_COLUMNS = 16  # of a matrix are a multiple of so many (csrc/common/muvera.h)
_MATRICES = ("hyperplanes", "projection", "buckets", "signs")
# Documents of a corpus that are encoded at a time have about so many bytes as float32.
_BYTES = 64 << 20


class Muvera:
    """Encodes queries and documents of ``d`` dims a token as single vectors.

    In each of ``repetitions``, ``k_sim`` random hyperplanes divide the tokens into ``2**k_sim`` partitions. A
    query's block of a partition is the sum of its tokens there, a document's is their mean. The blocks of all
    partitions and repetitions are the encoding. Queries are divided by ``repetitions``, so that ``<query,
    document>`` approximates the MaxSim score itself.

    Args:
        d: dims of a token.
        k_sim: hyperplanes of a repetition, 0 to 16.
        repetitions: more of them approximate better.
        d_proj: each block is projected to so many dims by a random matrix of ``+1`` and ``-1``, divided by
            ``sqrt(d_proj)``; None keeps its ``d`` dims.
        d_final: the whole encoding is reduced to so many dims by a count sketch: each dim is added, with a
            random sign, to a random one of them. None keeps all.
        fill_empty: a partition without a token of a document takes the one whose partition is nearest in
            Hamming distance, the lowest index of several. Queries are never filled.
        seed: of the random matrices, 0 to ``2**63 - 1``. They are the same, bit for bit, on every device, in
            every version of this package and of PyTorch: SplitMix64 makes their bits, and a coordinate of a
            hyperplane is a sum of twelve uniform 16-bit integers, all in exact arithmetic.

    Raises:
        TypeError, ValueError: an argument of a wrong type, or out of range.

    Tokens should be what MaxSim scores: unit vectors for models that normalize.

    Example:
        >>> import torch
        >>> from late_interaction import Muvera, maxsim
        >>> muvera = Muvera(64, k_sim=5, repetitions=40)
        >>> muvera.dim
        81920
        >>> D = torch.nn.functional.normalize(torch.randn(3, 20, 64), dim=-1)
        >>> encodings = muvera.encode_queries(D[:, :8]) @ muvera.encode_documents(D).T
        >>> torch.equal(encodings.argmax(-1), maxsim(D[:, :8], D).argmax(-1))
        True
    """

    def __init__(
        self,
        d: int,
        k_sim: int = 5,
        repetitions: int = 20,
        d_proj: int | None = None,
        d_final: int | None = None,
        fill_empty: bool = True,
        seed: int = 0,
    ) -> None:
        check_parameters(d, k_sim, repetitions, d_proj, d_final, fill_empty, seed)
        self.d, self.k_sim, self.repetitions = int(d), int(k_sim), int(repetitions)
        self.d_proj = None if d_proj is None else int(d_proj)
        self.d_final = None if d_final is None else int(d_final)
        self.fill_empty, self.seed = fill_empty, int(seed)
        self._matrices = {torch.device("cpu"): self._draw()}

    def __repr__(self) -> str:
        return (
            f"Muvera({self.d}, k_sim={self.k_sim}, repetitions={self.repetitions}, d_proj={self.d_proj},"
            f" d_final={self.d_final}, fill_empty={self.fill_empty}, seed={self.seed})"
        )

    @property
    def dim(self) -> int:
        """Return the length of an encoding."""
        return self._dims_before_sketch if self.d_final is None else self.d_final

    @property
    def _dims_before_sketch(self) -> int:
        return (self.repetitions << self.k_sim) * (self.d if self.d_proj is None else self.d_proj)

    def encode_queries(self, Q: TokensLike) -> Tensor:
        """Sum the tokens of each partition, divided by ``repetitions``.

        Args:
            Q: queries: :class:`~late_interaction.Tokens`, a list of ``[L_i, d]``, ``[Nq, Lq, d]``, or one,
                ``[L, d]``; bfloat16, float16, float32 or float64.

        Returns:
            float32, ``[Nq, dim]`` (``[dim]`` for one query), on the device of ``Q``. Outside autograd. A
            query without tokens becomes zeros; one with NaN or infinity in a token that counts becomes NaN.

        Raises:
            TypeError, ValueError: tensors of a wrong dtype or shape.
        """
        return self._encode(self._tokens("Q", Q), Q, average=False)

    def encode_documents(self, D: TokensLike) -> Tensor:
        """Average the tokens of each partition, with the argument and result of :meth:`encode_queries`."""
        return self._encode(self._tokens("D", D), D, average=True)

    def encode_corpus(self, D: TokensLike, *, normalize: bool = False) -> "Encodings":
        """Make the :class:`Encodings` of a corpus, a part at a time; packed documents are padded.

        They are the ``coarse=`` of :func:`late_interaction.search`. ``normalize``: every token is scaled to
        unit length first; the search is to have the same.
        """
        check_flag("normalize", normalize)
        tokens = self._tokens("D", D, (3,)).to_padded()
        if not normalize:
            look("Muvera.encode_corpus", tokens.values, tokens.mask, called="D")
        documents = torch.empty(len(tokens), self.dim, dtype=torch.float32, device=tokens.device)
        size = max(_BYTES // max(4 * tokens.values.shape[1] * self.d, 1), 1)
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            if normalize:
                unit = unit_rows(part.values.detach().float(), dim=-1, eps=1e-12)
                part = Tokens._made(unit, part.mask)
            documents[start : start + size] = self._encode(part, None, average=True)
        return Encodings(self, documents)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and matrices as plain tensors, for ``torch.save`` or safetensors."""
        numbers = [self.d, self.k_sim, self.repetitions, self.d_proj or 0, self.d_final or 0]
        state = {"parameters": torch.tensor([*numbers, int(self.fill_empty), self.seed], device="cpu")}
        matrices = zip(_MATRICES, self._matrices[torch.device("cpu")], strict=True)
        return state | {name: x.clone() for name, x in matrices if x is not None}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> "Muvera":
        """Make the one that :meth:`state_dict` came from.

        Raises:
            TypeError: a state that is no dict, or without parameters.
            ValueError: a matrix that is not the one of the parameters.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state must be a dict of Muvera.state_dict(), got {type(state).__name__}")
        for name in ("parameters", *_MATRICES):
            x = state.get(name)
            if not isinstance(x, Tensor) and (x is not None or name == "parameters"):
                raise TypeError(f"{name} of the state must be a torch.Tensor, got {type(x).__name__}")
            if x is not None and (x.layout != torch.strided or x.is_meta):
                raise ValueError(f"{name} of the state must be dense and hold values, got {abbreviate(x)}")
        if state["parameters"].shape != (7,):
            raise ValueError(f"state must hold 7 parameters, got {shape_of(state['parameters'])}")
        d, k_sim, repetitions, d_proj, d_final, fill_empty, seed = state["parameters"].tolist()
        made = cls(d, k_sim, repetitions, d_proj or None, d_final or None, bool(fill_empty), seed)
        for name, x in zip(_MATRICES, made._matrices[torch.device("cpu")], strict=True):
            theirs = state.get(name)
            same = (
                x is theirs
                if x is None or theirs is None
                else x.dtype == theirs.dtype and torch.equal(x, theirs.cpu())
            )
            if not same:
                raise ValueError(f"state must hold the {name} of its parameters, {made!r}")
        return made

    def _tokens(self, name: str, x: Any, dims: tuple[int, ...] = (2, 3)) -> Tokens:
        tokens = all_as_tokens(name, x, dims)
        if tokens.d != self.d:
            raise ValueError(
                f"{name} must have the d of this Muvera, {self.d}, got {shape_of(tokens.values)}"
            )
        return tokens

    def _encode(self, tokens: Tokens, given: Any, average: bool) -> Tensor:
        k_sim, repetitions = self.k_sim, self.repetitions
        sizes = k_sim, repetitions, self.d_proj or 0, self.d_final or 0
        scale = 1.0 if average else 1.0 / repetitions
        offsets = None if tokens.offsets is None else as_dtype(tokens.offsets, torch.int32).contiguous()
        matrices = self._matrices_on(tokens.device)
        args: tuple[Any, ...] = tokens.values.detach(), tokens.mask, offsets, *matrices, *sizes
        args = *args, average, average and self.fill_empty, scale
        if torch.compiler.is_compiling():
            encodings: Tensor = ops.muvera_encode(*args)
        else:
            with _AutoDispatchBelowAutograd():  # there is nothing to differentiate
                encodings = ops.muvera_encode(*args)
        return encodings.squeeze(0) if isinstance(given, Tensor) and given.dim() == 2 else encodings

    def _matrices_on(self, device: torch.device) -> tuple[Tensor | None, ...]:
        if device not in self._matrices:
            own = self._matrices[torch.device("cpu")]
            self._matrices[device] = tuple(None if x is None else x.to(device) for x in own)
        return self._matrices[device]

    def _draw(self) -> tuple[Tensor | None, ...]:
        """Matrices as the operator takes them, each from a stream of random bits of its own."""
        d, lines = self.d, self.repetitions * self.k_sim
        hyperplanes = _random_bits.bell(self.seed, 0, lines * d).view(lines, d).t()
        projection = buckets = signs = None
        if self.d_proj is not None:
            projection = _random_bits.signs(self.seed, 1, self.repetitions * d * self.d_proj)
            projection = projection.view(self.repetitions, d, self.d_proj) * (1 / self.d_proj**0.5)
            projection = pad(projection, (0, -self.d_proj % _COLUMNS)).contiguous()
        if self.d_final is not None:
            buckets = _random_bits.below(self.seed, 2, self._dims_before_sketch, self.d_final)
            signs = _random_bits.signs(self.seed, 3, self._dims_before_sketch)
        return pad(hyperplanes, (0, -lines % _COLUMNS)).contiguous(), projection, buckets, signs


@dataclass(frozen=True)
class Encodings:
    """The encodings of a corpus, for the ``coarse=`` of :func:`late_interaction.search`.

    Args:
        muvera: what made them.
        documents: float32, float16 or bfloat16, ``[Nd, muvera.dim]``.

    Raises:
        TypeError, ValueError: an attribute of a wrong type, dtype or shape.

    Example:
        >>> import torch
        >>> from late_interaction import Muvera, search
        >>> D = torch.randn(200, 20, 32)
        >>> encodings = Muvera(32).encode_corpus(D)
        >>> scores, documents = search(D[:3], D, 1, coarse=encodings, candidates=10)
        >>> documents[:, 0]
        tensor([0, 1, 2])
    """

    muvera: Muvera
    documents: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.muvera, Muvera):
            raise TypeError(f"muvera must be a Muvera, got {type(self.muvera).__name__}")
        check_embeddings("documents", self.documents)
        if self.documents.dim() != 2 or self.documents.shape[1] != self.muvera.dim:
            raise ValueError(f"documents must be [Nd, {self.muvera.dim}], got {shape_of(self.documents)}")

    def to(self, device: torch.device | str) -> "Encodings":
        """Copy the encodings to another device."""
        return Encodings(self.muvera, self.documents.to(device))


MOST_BITS = 16
_MOST_DIMS = (1 << 31) - 1


def check_parameters(
    d: Any, k_sim: Any, repetitions: Any, d_proj: Any, d_final: Any, fill_empty: Any, seed: Any
) -> None:
    for name, value in (("d", d), ("d_proj", d_proj), ("d_final", d_final)):
        if value is not None or name == "d":
            check_positive(name, value)
            if value > _MOST_DIMS:
                raise ValueError(f"{name} must be below 2**31, got {abbreviate(value)}")
    check_integer("k_sim", k_sim)
    if not 0 <= k_sim <= MOST_BITS:
        raise ValueError(f"k_sim must lie in [0, {MOST_BITS}], got {abbreviate(k_sim)}")
    check_positive("repetitions", repetitions)
    check_flag("fill_empty", fill_empty)
    check_integer("seed", seed)
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must lie in [0, 2**63), got {abbreviate(seed)}")
    dims = repetitions * 2**k_sim * (d if d_proj is None else d_proj)
    if dims > _MOST_DIMS:
        raise ValueError(
            f"repetitions * 2**k_sim * {'d' if d_proj is None else 'd_proj'} must be below 2**31, got {dims}"
        )
