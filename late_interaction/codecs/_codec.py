"""What all codecs have: :class:`Codec`."""

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, no_tensor, shape_of
from late_interaction._checks.options import check_positive
from late_interaction._checks.tensors import FLOATS, as_dtype, check_device, check_embeddings
from late_interaction._scoring.codes import check_precision_of_codes
from late_interaction._scoring.sequences import as_tokens
from late_interaction._torch import pytree
from late_interaction.codes import Codes
from late_interaction.tokens import Tokens, TokensLike

Kind = TypeVar("Kind", bound="type[Codec]")


class Codec(ABC):
    """Turns tokens to codes and back.

    Codecs are values: two of the same options are equal, and none changes.
    """

    _dtypes: tuple[torch.dtype, ...] = (torch.uint8,)  # of codes

    # ---- the protocol ----

    def encode(self, tokens: TokensLike) -> Codes:
        """Encode tokens. Outside autograd.

        Args:
            tokens: ``[N, L, d]``, one sequence ``[L, d]``, or ``[Nq, K, L, d]``; bfloat16, float16, float32
                or float64. Or :class:`late_interaction.Tokens`, or a list of ``[L, d]`` tensors.

        Returns:
            :class:`late_interaction.Codes` on the device of the tokens, padded or packed as these are (a list
            is packed), with their mask.

        Raises:
            TypeError, ValueError: tokens of a wrong kind, dtype, shape, device or value.
        """
        given = as_tokens("tokens", tokens)
        if isinstance(given, Tensor):
            if given.dim() not in (2, 3, 4) or given.shape[-1] == 0:
                raise ValueError(
                    "tokens must be [N, L, d], [L, d] or [Nq, K, L, d] with d of at least 1, got"
                    f" {shape_of(given)}"
                )
            given = Tokens._made(given.unsqueeze(0) if given.dim() == 2 else given)
        # Detached, for the graph of an export does not take torch.no_grad().
        values, scales, centroids = self._encoded(given.values.detach(), given.mask)
        return Codes._made(
            self, given.d, values=values, scales=scales, centroids=centroids,
            mask=given.mask, offsets=given.offsets, _room=given._room,
        )  # fmt: skip

    def decode(self, codes: Codes) -> Tokens:
        """Give the tokens that codes stand for.

        Args:
            codes: what this codec, or an equal one, encoded.

        Returns:
            float32 :class:`late_interaction.Tokens`, padded or packed as the codes are, with their mask; of
            codes ``[Nq, K, L, w]`` all ``Nq * K`` sequences.

        Raises:
            TypeError, ValueError: no codes, or those of another codec.
        """
        self._check_own("codes", codes)
        codes = codes._flat()
        return Tokens._made(self._decoded(codes), codes.mask, codes.offsets, codes._room)

    @property
    def stored(self) -> torch.dtype:
        """Return the dtype of codes."""
        return self._dtypes[0]

    @abstractmethod
    def width(self, d: int) -> int:
        """Give the elements of a token's codes, the last dim of ``Codes.values``."""

    def to(self, device: torch.device | str) -> "Codec":
        """Give the codec with its tensors on a device: this one, if it has none, or they are there."""
        return self

    # ---- what codecs differ in ----

    @abstractmethod
    def _encoded(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Values, scales and centroids of tokens ``[..., d]``."""

    @abstractmethod
    def _decoded(self, codes: Codes) -> Tensor:
        """Decode to float32 ``[..., d]``."""

    @abstractmethod
    def _options(self) -> dict[str, Any]:
        """Return what the codec was made with, tensors aside."""

    @abstractmethod
    def _score(self, q: Tokens | Codes, D: Codes, paired: bool, normalize: bool, precision: Any) -> Tensor:
        """Scores ``[Nq, Nd]`` or ``[Nq, K]`` of padded queries that fit; ``[N, 1]`` of pairs."""

    def _encode_queries(self, q: Tokens) -> Codes:
        """Encode queries as codes of documents meet them."""
        return self.encode(q)

    def _met(self, q: Tokens, normalize: bool, precision: Any) -> Tokens:
        """Return the queries that documents meet, as embeddings."""
        check_precision_of_codes(self, normalize, precision)
        return self.decode(self.encode(q))

    def _dims(self, width: int) -> int:
        """Return the dims that so wide codes have, where nobody says it."""
        return width

    # ---- checks ----

    def _checked(self, values: Any, scales: Any, centroids: Any, d: Any) -> tuple[int, Any, Any]:
        """Check what each token has. ``d``, float32 scales and int32 centroids come back."""
        check_embeddings("values", values, self._dtypes)
        if values.dim() < 2 or values.shape[-1] == 0:
            raise ValueError(f"values must be [..., w] with w of at least 1, got {shape_of(values)}")
        if d is not None:
            check_positive("d", d)
        width = values.shape[-1]
        d = self._dims(width) if d is None else d
        if self.width(d) != width:
            raise ValueError(
                f"values must have {self.width(d)} elements a token (their last dim) for {self} and d = {d},"
                f" got {shape_of(values)}"
            )
        return d, self._checked_scales(values, scales), self._checked_centroids(values, centroids)

    def _checked_scales(self, values: Tensor, scales: Any) -> Tensor | None:
        if not isinstance(scales, Tensor):
            raise TypeError(f"scales must be a torch.Tensor for {self}, got {no_tensor('scales', scales)}")
        if scales.dtype not in FLOATS or scales.layout != torch.strided:
            raise TypeError(f"scales must be a dense float32 tensor, got {scales.dtype}, {scales.layout}")
        check_device("scales", scales, "values", values.device)
        if scales.shape != values.shape[:-1]:
            raise ValueError(f"scales must be {list(values.shape[:-1])}, one a token, got {shape_of(scales)}")
        return as_dtype(scales.detach(), torch.float32)

    def _checked_centroids(self, values: Tensor, centroids: Any) -> Tensor | None:
        if centroids is not None:
            raise ValueError(f"centroids must be None for {self}, got {abbreviate(centroids)}")
        return None

    def _check_own(self, name: str, codes: Any) -> None:
        if not isinstance(codes, Codes):
            raise TypeError(f"{name} must be late_interaction.Codes, got {abbreviate(codes)}")
        own, other = (self, self._options()), (codes.codec, codes.codec._options())
        if type(own[0]) is not type(other[0]) or own[1] != other[1]:
            raise ValueError(f"{name} must be of {self}, got those of {codes.codec}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._options() == other._options()

    def __hash__(self) -> int:
        return hash((type(self), *self._options().values()))


def check_dtype(dtype: Any, wanted: tuple[torch.dtype, ...]) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in wanted:
        *others, last = map(str, wanted)
        raise TypeError(f"dtype must be {', '.join(others)} or {last}, got {abbreviate(dtype)}")


def register(kind: Kind) -> Kind:
    """Make a codec without tensors a node of pytrees, as part of Codes, and loadable."""
    pytree.register_pytree_node(
        kind,
        lambda codec: ([], tuple(codec._options().items())),
        lambda _, options: kind(**dict(options)),
        serialized_type_name=f"late_interaction.codecs.{kind.__name__}",
        flatten_with_keys_fn=lambda codec: ([], tuple(codec._options().items())),
        to_dumpable_context=lambda options: {name: _dumped(x) for name, x in options},
        from_dumpable_context=lambda dumped: tuple((name, _loaded(x)) for name, x in dumped.items()),
    )
    torch.serialization.add_safe_globals([kind])
    return kind


def _dumped(option: Any) -> Any:
    return str(option) if isinstance(option, torch.dtype) else option


def _loaded(option: Any) -> Any:
    return getattr(torch, option.removeprefix("torch.")) if isinstance(option, str) else option
