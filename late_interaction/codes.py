"""Codes of sequences of tokens, padded with a mask or packed with offsets: :class:`Codes`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import is_integer
from late_interaction._checks.packed import check_extents
from late_interaction._checks.tensors import check_mask
from late_interaction._torch import pytree
from late_interaction.tokens import Tokens, _room

__all__ = ["Codes"]

_OF_TOKENS = ("values", "scales", "centroids")
_LEAVES = (*_OF_TOKENS, "mask", "offsets", "_room")


class Codes:
    """Sequences of tokens as a codec of :mod:`late_interaction.codecs` stores them, and that codec.

    ``codec.encode`` makes them; this makes padded ones of tensors that are there, and :meth:`packed` packed
    ones. They are the ``D`` of :func:`late_interaction.maxsim`, :func:`late_interaction.maxsim_pairs` and
    :func:`late_interaction.search`. All is checked here, once. The values of tensors on a GPU are not read
    for it.

    Args:
        codec: what encodes such codes.
        values: ``[N, L, w]``, or ``[Nq, K, L, w]`` for documents of each query's own: int8 (``Int8``), float8
            (``Fp8``), or uint8 with ``ceil(d * nbits / 8)`` bytes a token (``Bits``, ``Residual``).
        scales: float32, the shape of ``values`` without ``w``; finite and not negative, else the scores that
            one reaches are NaN. None for ``Residual`` and for signs alone (``Bits(1, scales=False)``).
        centroids: of ``Residual`` the index of each token's centroid, integers, likewise; else None. On a GPU
            one that is out of range counts as 0.
        mask: the shape of ``values`` without ``w``, bool (or integer, nonzero = True), True = keep. What a
            token that is left out holds has no effect. None keeps all.
        d: dims of a token. Only ``Bits`` cannot tell them: None is as many as the bytes hold.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value.

    Indexed by an int or a slice they are the codes of that sequence, or of these. They are a pytree, whose
    leaves are tensors alone: those that are not None of ``values``, ``scales``, ``centroids``, ``mask``,
    ``offsets``, an empty one of ``max_length`` rows, and those of the codec. So ``torch.compile`` and
    ``torch.export`` take batches of any lengths by one graph. They pickle, and DataLoaders pin them.

    Example:
        >>> import torch
        >>> import late_interaction as li
        >>> codes = li.codecs.Int8().encode([torch.eye(2), torch.ones(1, 2), torch.ones(0, 2)])
        >>> codes
        Codes(3 sequences of Int8(), 3 tokens packed, d=2, cpu, max_length=2)
        >>> li.maxsim(torch.tensor([[0.6, 0.8]]), codes).round(decimals=2)
        tensor([0.8000, 1.4000, 0.0000])
        >>> li.Codes(codes.codec, torch.tensor([[[127, 0]]], dtype=torch.int8), torch.tensor([[0.5]]))
        Codes(1 sequences of Int8(), padded to 1, d=2, cpu)
    """

    codec: Any
    """The :class:`late_interaction.codecs.Codec` that made them."""
    values: Tensor
    """``[N, L, w]`` (or ``[Nq, K, L, w]``), or packed ``[tokens, w]``."""
    scales: Tensor | None
    """float32, the shape of ``values`` without ``w``, or None."""
    centroids: Tensor | None
    """int32, the shape of ``values`` without ``w``, or None."""
    mask: Tensor | None
    """bool, True = keep; None where all count, and of packed sequences."""
    offsets: Tensor | None
    """``[N + 1]``, int32 or int64: packed sequence ``i`` is ``values[offsets[i] : offsets[i + 1]]``."""
    _room: Tensor | None  # as that of Tokens
    d: int
    """The dims of a token."""

    def __init__(
        self,
        codec: Any,
        values: Tensor,
        scales: Tensor | None = None,
        centroids: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        d: int | None = None,
    ) -> None:
        self._set(codec, values, scales, centroids, d)
        if values.dim() not in (3, 4):
            raise ValueError(
                "values must be [N, L, w] or [Nq, K, L, w] (packed [tokens, w] go to Codes.packed), got"
                f" {shape_of(values)}"
            )
        self.mask, self.offsets, self._room = check_mask("mask", mask, "values", values), None, None

    @classmethod
    def packed(
        cls,
        codec: Any,
        values: Tensor,
        offsets: Tensor,
        scales: Tensor | None = None,
        centroids: Tensor | None = None,
        *,
        max_length: int | None = None,
        d: int | None = None,
    ) -> "Codes":
        """Take sequences that lie end to end, without a copy.

        Args:
            codec, scales, centroids, d: as in the class.
            values: ``[tokens, w]``.
            offsets, max_length: as in :meth:`late_interaction.Tokens.packed`.

        Raises:
            TypeError, ValueError: as the class.

        Example:
            >>> import torch
            >>> import late_interaction as li
            >>> signs = torch.tensor([[3], [1], [2]], dtype=torch.uint8)
            >>> codec = li.codecs.Bits(1, scales=False)
            >>> li.Codes.packed(codec, signs, torch.tensor([0, 2, 3]), d=2).lengths
            tensor([2, 1], dtype=torch.int32)
        """
        made = cls.__new__(cls)
        made._set(codec, values, scales, centroids, d)
        if values.dim() != 2:
            raise ValueError(
                f"values must be [tokens, w] (padded [N, L, w] go to Codes), got {shape_of(values)}"
            )
        made.mask, made.offsets = None, offsets
        made._room = _room(values.view(torch.uint8), check_extents(values, offsets, max_length))
        return made

    def _set(self, codec: Any, values: Any, scales: Any, centroids: Any, d: Any) -> None:
        check: Any = getattr(codec, "_checked", None)
        if check is None or isinstance(codec, type):
            raise TypeError(f"codec must be one of late_interaction.codecs, got {abbreviate(codec)}")
        self.codec, self.values = codec, values
        self.d, self.scales, self.centroids = check(values, scales, centroids, d)

    @classmethod
    def _made(cls, codec: Any, d: int, **tensors: Any) -> "Codes":
        """Make one of checked tensors (or of what a pytree has in their place)."""
        made = cls.__new__(cls)
        made.codec, made.d = codec, d
        for name in _LEAVES:
            setattr(made, name, tensors.get(name))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"values": self.values.view(torch.uint8)}  # pickle takes no float8

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.values = self.values.view(self.codec.stored)

    # ---- what they are ----

    @property
    def is_packed(self) -> bool:
        """Tell packed sequences from padded ones."""
        return self.offsets is not None

    @property
    def max_length(self) -> int | None:
        """Give the longest length, padding included, or a bound on it. None: it is not known on the host."""
        if self.offsets is None:
            return self.values.shape[-2]
        return None if self._room is None else self._room.shape[0]

    @property
    def lengths(self) -> Tensor:
        """Count the tokens of each sequence that the mask keeps: int32 ``[N]`` (or ``[Nq, K]``)."""
        if self.offsets is not None:
            return self.offsets.to(torch.int32).diff()
        if self.mask is not None:
            return self.mask.sum(-1, dtype=torch.int32)
        shape = self.values.shape
        return torch.full(shape[:-2], shape[-2], dtype=torch.int32, device=self.values.device)

    @property
    def device(self) -> torch.device:
        """Return the device of the codes."""
        return self.values.device

    @property
    def _count(self) -> int:
        return self.values.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> "Codes":
        """Give the codes of one sequence, or of a slice, without a copy. Packed ones wait for a GPU."""
        if not isinstance(index, slice):
            if not is_integer(index):
                raise TypeError(f"Codes are indexed by an int or a slice, got {abbreviate(index)}")
            i = index + len(self) if index < 0 else index
            if not 0 <= i < len(self):
                raise IndexError(f"index {index} is out of range for {len(self)} sequences")
            index = slice(i, i + 1)
        return self._laid(lambda tokens: tokens[index])

    def __repr__(self) -> str:
        if self.is_packed:
            layout = f"{self.values.shape[0]} tokens packed"
        else:
            layout = f"padded to {self.values.shape[-2]}{' with a mask' if self.mask is not None else ''}"
        known = f", max_length={self.max_length}" if self._room is not None else ""
        return f"Codes({len(self)} sequences of {self.codec}, {layout}, d={self.d}, {self.device}{known})"

    # ---- other layouts, elsewhere ----

    def _laid(self, change: Callable[[Tokens], Tokens]) -> "Codes":
        """Lay what each token has as a function lays Tokens."""
        made: dict[str, Any] = {}
        laid: Any = None
        for name in _OF_TOKENS:
            x = getattr(self, name)
            if x is not None:
                # Bytes, for float8 tensors lack operators.
                rows = x.unsqueeze(-1) if name != "values" else x.view(torch.uint8)
                laid = change(Tokens._made(rows, self.mask, self.offsets, self._room))
                made[name] = laid.values.squeeze(-1) if name != "values" else laid.values.view(x.dtype)
        return Codes._made(self.codec, self.d, **made, mask=laid.mask, offsets=laid.offsets, _room=laid._room)

    def _shaped(self, change: Callable[[Tensor], Tensor]) -> "Codes":
        """Change the shape of what padded tokens have."""
        held = {name: change(x) for name, x in self._tensors()}
        return Codes._made(self.codec, self.d, **held)

    def _flat(self) -> "Codes":
        """Documents of each query's own as documents."""
        return self._shaped(lambda x: x.flatten(0, 1)) if self.values.dim() == 4 else self

    def _as_documents(self, paired: bool) -> "tuple[Codes, str, Tensor | None]":
        """Lay documents as operators take them: packed, or padded, of pairs one of each query's own.

        Returns the codes, the ending of these operators' names, and the offsets or the mask.
        """
        if self.offsets is not None and not paired:
            return self, "_packed", self.offsets.to(torch.int32).contiguous()
        padded = self.to_padded()
        padded = padded._shaped(lambda x: x.unsqueeze(1)) if paired else padded
        return padded, "", padded.mask

    def pack(self) -> "Codes":
        """Pack padded sequences, without the tokens that the mask leaves out; packed ones as they are.

        With a mask the host waits for a GPU.
        """
        return self if self.is_packed else self._flat()._laid(Tokens.pack)

    def to_padded(self) -> "Codes":
        """Pad packed sequences, to ``max_length`` where it is known; padded ones as they are.

        One copy. Without ``max_length`` the host waits for a GPU.
        """
        return self._laid(Tokens.to_padded) if self.is_packed else self

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Codes":
        """Move the tensors, and those of the codec, to a device."""
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in self._tensors()}
        return Codes._made(self.codec.to(device), self.d, **moved)

    def pin_memory(self) -> "Codes":
        """Copy the tensors to pinned memory. DataLoaders with ``pin_memory=True`` call it."""
        return Codes._made(self.codec, self.d, **{name: x.pin_memory() for name, x in self._tensors()})

    def _tensors(self) -> list[tuple[str, Any]]:
        return [(name, x) for name in _LEAVES if (x := getattr(self, name)) is not None]


# ---- the pytree ----


def _flatten_with_keys(codes: Codes) -> tuple[list[tuple[Any, Any]], tuple[int, tuple[str, ...]]]:
    held = codes._tensors()
    keyed = [(pytree.GetAttrKey(name), x) for name, x in (*held, ("codec", codes.codec))]
    return keyed, (codes.d, tuple(name for name, _ in held))


def _flatten(codes: Codes) -> tuple[list[Any], tuple[int, tuple[str, ...]]]:
    keyed, context = _flatten_with_keys(codes)
    return [x for _, x in keyed], context


def _unflatten(leaves: Any, context: Any) -> Codes:
    *held, codec = leaves
    return Codes._made(codec, context[0], **dict(zip(context[1], held, strict=True)))


def _from_dumped(context: Any) -> tuple[int, tuple[str, ...]]:
    import_module(f"{__package__}.codecs")  # registers the codec, which is read next
    return context[0], tuple(context[1])


pytree.register_pytree_node(
    Codes,
    _flatten,
    _unflatten,
    serialized_type_name="late_interaction.Codes",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=lambda context: [context[0], list(context[1])],
    from_dumpable_context=_from_dumped,
)
torch.serialization.add_safe_globals([Codes])  # torch.export.load, and torch.load of what holds them
