"""Sequences of token embeddings, padded with a mask or packed with offsets: :class:`Tokens`."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import is_integer
from late_interaction._checks.packed import (
    check_extents,
    check_packed_tokens,
    check_padded_tokens,
    check_sequences,
    read_longest,
)
from late_interaction._checks.tensors import as_dtype, check_rows
from late_interaction._torch import pytree

__all__ = ["Tokens"]

_LEAVES = ("values", "mask", "offsets", "_room")


class Tokens:
    """Sequences of token embeddings, padded to one length with a mask, or packed end to end with offsets.

    This makes padded ones; :meth:`packed`, :meth:`from_list` and :meth:`from_nested` make packed ones. Either
    kind goes into the functions that score, and sends gradients to ``values``. All is checked here, once. The
    values of tensors on a GPU are not read for it: offsets there that do not fit give scores without meaning,
    though never another tensor's memory.

    Args:
        values: ``[N, L, d]``; bfloat16, float16, float32 or float64.
        mask: ``[N, L]``, bool (or integer, nonzero = True), True = keep, on the device of ``values``. A token
            that is left out has no effect, whatever it holds. None keeps all.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value.

    It is a pytree whose leaves are tensors alone, those that are not None of ``values``, ``mask``,
    ``offsets`` and an empty one of ``max_length`` rows, so that ``torch.compile`` and ``torch.export`` take
    batches of any lengths by one graph (``dynamic_shapes`` of an export lists the leaves). It pickles, and
    DataLoaders pin it.

    Example:
        >>> import torch
        >>> import late_interaction as li
        >>> Q = li.Tokens(torch.ones(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]]))
        >>> D = li.Tokens.from_list([torch.ones(5, 4), torch.ones(0, 4), torch.ones(2, 4)])
        >>> D
        Tokens(3 sequences, 7 tokens packed, d=4, float32, cpu, max_length=5)
        >>> li.maxsim(Q, D)
        tensor([[8., 0., 8.],
                [4., 0., 4.]])
    """

    values: Tensor
    """``[N, L, d]``, or packed ``[tokens, d]``."""
    mask: Tensor | None
    """bool ``[N, L]``, True = keep; None where all count, and of packed sequences."""
    offsets: Tensor | None
    """``[N + 1]``, int32 or int64: packed sequence ``i`` is ``values[offsets[i] : offsets[i + 1]]``. None of
    padded ones."""
    _room: Tensor | None  # [max_length, 0]: a shape is not guarded as a number would be
    _bounds: Any = None  # the offsets on the host, of packed sequences that are cut into blocks

    def __init__(self, values: Tensor, mask: Tensor | None = None) -> None:
        self.values, self.mask = values, check_padded_tokens(values, mask)
        self.offsets = self._room = None

    @classmethod
    def _made(
        cls,
        values: Any,
        mask: Tensor | None = None,
        offsets: Tensor | None = None,
        room: Tensor | None = None,
        bounds: Any = None,
    ) -> "Tokens":
        """Make one of checked tensors (or of what a pytree has in their place)."""
        made = cls.__new__(cls)
        made.values, made.mask, made.offsets, made._room = values, mask, offsets, room
        if bounds is not None:
            made._bounds = bounds
        return made

    # ---- packed ones ----

    @classmethod
    def packed(cls, values: Tensor, offsets: Tensor, max_length: int | None = None) -> "Tokens":
        """Take sequences that lie end to end, without a copy.

        Args:
            values: ``[tokens, d]``.
            offsets: ``[N + 1]``, int32 or int64, on the device of ``values``: where each sequence begins, and
                the last one ends. They begin with 0, are non-decreasing and end with the number of tokens;
                on a CPU that is checked.
            max_length: at least the longest length. None: it is read on a CPU. Of tensors on a GPU it stays
                unknown, and the host waits for them where it is needed (:meth:`to_padded`; gradients of
                :func:`late_interaction.maxsim_pairs`).

        Example:
            >>> import torch
            >>> from late_interaction import Tokens
            >>> Tokens.packed(torch.ones(5, 4), torch.tensor([0, 2, 5])).lengths
            tensor([2, 3], dtype=torch.int32)
        """
        max_length = check_packed_tokens(values, offsets, max_length)
        return cls._made(values, None, offsets, _room(values, max_length))

    @classmethod
    def from_list(cls, sequences: Sequence[Tensor]) -> "Tokens":
        """Pack sequences of different lengths, without padding. One copy; differentiable.

        Args:
            sequences: at least one ``[L_i, d]``, all of one dtype, device and ``d``.

        Example:
            >>> import torch
            >>> from late_interaction import Tokens
            >>> Tokens.from_list([torch.ones(2, 4), torch.ones(3, 4)]).offsets
            tensor([0, 2, 5], dtype=torch.int32)
        """
        return cls._from_list("sequences", sequences)

    @classmethod
    def _from_list(cls, name: str, sequences: Sequence[Tensor]) -> "Tokens":
        check_sequences(name, sequences)
        check_rows(f"{name}[0]", sequences[0])
        lengths = [x.shape[0] for x in sequences]
        values = torch.cat(tuple(sequences))
        offsets = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=values.device)
        return cls._made(values, None, offsets, _room(values, max(lengths)))

    @classmethod
    def from_nested(cls, nested: Tensor) -> "Tokens":
        """Take the sequences of a jagged ``torch.nested`` tensor ``[N, j, d]``, without a copy.

        Example:
            >>> import torch
            >>> from late_interaction import Tokens
            >>> parts = [torch.ones(2, 4), torch.ones(3, 4)]
            >>> len(Tokens.from_nested(torch.nested.nested_tensor(parts, layout=torch.jagged)))
            2
        """
        if not isinstance(nested, Tensor) or not nested.is_nested or nested.layout != torch.jagged:
            raise TypeError(f"nested must be a jagged torch.nested tensor, got {abbreviate(nested)}")
        if nested.dim() != 3 or not isinstance(nested.shape[2], int):
            raise ValueError(f"nested must be [N, j, d] with j the jagged dim, got {tuple(nested.shape)}")
        if nested.lengths() is not None:  # type: ignore[attr-defined]
            raise ValueError(
                "nested must lie end to end, got one with lengths beside its offsets: call contiguous() first"
            )
        return cls.packed(nested.values(), nested.offsets())  # type: ignore[attr-defined]

    # ---- what they are ----

    @property
    def is_packed(self) -> bool:
        """Tell packed sequences from padded ones."""
        return self.offsets is not None

    @property
    def max_length(self) -> int | None:
        """Give the longest length, padding included, or a bound on it. None: it is not known on the host."""
        if self.offsets is None:
            return self.values.shape[1]
        return None if self._room is None else self._room.shape[0]

    @property
    def lengths(self) -> Tensor:
        """Count the tokens of each sequence that the mask keeps: int32 ``[N]``."""
        if self.offsets is not None:
            return as_dtype(self.offsets, torch.int32).diff()
        if self.mask is not None:
            return self.mask.sum(1, dtype=torch.int32)
        n, longest, _ = self.values.shape
        return torch.full((n,), longest, dtype=torch.int32, device=self.values.device)

    @property
    def device(self) -> torch.device:
        """Return the device of ``values``."""
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of ``values``."""
        return self.values.dtype

    @property
    def d(self) -> int:
        """Return the embedding dim."""
        return self.values.shape[-1]

    @property
    def _count(self) -> int:
        """Return the number of sequences, a symbol while a graph is traced, where ``len`` gives an int."""
        return self.values.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """Give the tokens ``[L_i, d]`` of sequence ``i`` that the mask keeps, or the sequences of a slice.

        Nothing is copied but masked tokens; packed sequences and masked ones wait for a GPU.
        """
        if isinstance(index, slice):
            return self._slice(index)
        if not is_integer(index):
            raise TypeError(f"Tokens are indexed by an int or a slice, got {abbreviate(index)}")
        i = index + len(self) if index < 0 else index
        if not 0 <= i < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} sequences")
        if self.offsets is None:
            return self.values[i] if self.mask is None else self.values[i][self.mask[i]]
        begin, end = self.offsets[i : i + 2].tolist()
        return self.values[begin:end]

    def __iter__(self) -> Iterator[Tensor]:
        bounds = None if self.offsets is None else self.offsets.tolist()
        for i in range(len(self)):
            yield self[i] if bounds is None else self.values[bounds[i] : bounds[i + 1]]

    def _slice(self, index: slice) -> "Tokens":
        begin, end, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of Tokens must have a step of 1, got {step}")
        end = max(begin, end)
        if self.offsets is None:
            return Tokens._made(self.values[begin:end], None if self.mask is None else self.mask[begin:end])
        first, last = self.offsets[[begin, end]].tolist()
        offsets, room = self.offsets[begin : end + 1] - first, None if self.values.is_cpu else self.max_length
        values = self.values[first:last]
        return Tokens._made(values, None, offsets, _room(values, check_extents(values, offsets, room)))

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.is_packed:
            layout = f"{self.values.shape[0]} tokens packed"
        else:
            layout = f"padded to {self.values.shape[1]}{' with a mask' if self.mask is not None else ''}"
        known = f", max_length={self.max_length}" if self._room is not None else ""
        return f"Tokens({len(self)} sequences, {layout}, d={self.d}, {dtype}, {self.device}{known})"

    # ---- other layouts ----

    def pack(self) -> "Tokens":
        """Pack padded sequences, without the tokens that the mask leaves out; packed ones as they are.

        Differentiable. Without a mask nothing is copied (of contiguous values); with one the host waits for a
        GPU.
        """
        if self.offsets is not None:
            return self
        flat = self.values.flatten(0, 1)
        if self.mask is not None:
            flat = flat.index_select(0, self.mask.flatten().nonzero().squeeze(1))
        offsets = pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return Tokens._made(flat, None, offsets, _room(flat, self.values.shape[1]))

    def to_padded(self) -> "Tokens":
        """Pad packed sequences with zeros, to ``max_length`` where it is known; padded ones as they are.

        Differentiable; one copy. Without ``max_length`` the host waits for a GPU.
        """
        if self.offsets is None:
            return self
        n = self._count
        longest, total = self.max_length, self.values.shape[0]
        offsets, lengths = self.offsets.long(), self.lengths
        if longest is None:
            longest = read_longest("lengths", lengths, total)
        token = torch.arange(total, device=self.device)
        sequence = torch.bucketize(token, offsets, right=True) - 1
        place = token - offsets[sequence.clamp(0, n)]
        inside = (sequence >= 0) & (sequence < n) & (place < longest)
        # Tokens that a GPU's offsets or max_length leave out go to a row behind the last.
        row = torch.where(inside, sequence * longest + place, n * longest)
        padded = self.values.new_zeros((n * longest + 1, self.d)).index_copy(0, row, self.values)
        mask = torch.arange(longest, device=self.device) < lengths.unsqueeze(1)
        return Tokens._made(padded[:-1].view(n, longest, self.d), mask)

    def to_nested(self) -> Tensor:
        """Give a jagged ``torch.nested`` tensor ``[N, j, d]``; of packed sequences without a copy."""
        packed = self.pack()
        assert packed.offsets is not None
        return torch.nested.nested_tensor_from_jagged(
            packed.values, packed.offsets, max_seqlen=packed.max_length
        )

    # ---- elsewhere ----

    def to(self, *args: Any, **kwargs: Any) -> "Tokens":
        """Move the tensors as ``torch.Tensor.to`` does. A dtype is that of ``values`` alone."""
        values: Tensor = self.values.to(*args, **kwargs)
        check_rows("values", values)
        others, quick = (self.mask, self.offsets, self._room), kwargs.get("non_blocking", False)
        moved = (None if x is None else x.to(values.device, non_blocking=quick) for x in others)
        return Tokens._made(values, *moved)

    def pin_memory(self) -> "Tokens":
        """Copy the tensors to pinned memory. DataLoaders with ``pin_memory=True`` call it."""
        return Tokens._made(*(None if x is None else x.pin_memory() for x in map(self.__dict__.get, _LEAVES)))


TokensLike = Tensor | Sequence[Tensor] | Tokens  # what functions take


def _room(values: Tensor, max_length: int | None) -> Tensor | None:
    return None if max_length is None else values.detach().new_empty((max_length, 0))


# ---- the pytree ----


def _flatten_with_keys(tokens: Tokens) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    held = {name: x for name in _LEAVES if (x := getattr(tokens, name)) is not None}
    return [(pytree.GetAttrKey(name), x) for name, x in held.items()], tuple(held)


def _flatten(tokens: Tokens) -> tuple[list[Any], tuple[str, ...]]:
    keyed, names = _flatten_with_keys(tokens)
    return [x for _, x in keyed], names


def _unflatten(leaves: Any, names: Any) -> Tokens:
    held = dict(zip(names, leaves, strict=True))
    return Tokens._made(*(held.get(name) for name in _LEAVES))


pytree.register_pytree_node(
    Tokens,
    _flatten,
    _unflatten,
    serialized_type_name="late_interaction.Tokens",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)
torch.serialization.add_safe_globals([Tokens])  # torch.export.load, and torch.load of what holds them
