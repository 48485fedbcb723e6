"""Documents chunk by chunk: views on the device, or copies made while others are scored."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from late_interaction._search.selection import MOST_SCORES
from late_interaction.ops._library import operators

_send_bytes = operators.send_bytes_.default

# The first document's index, the documents, and their rows of the other tensors.
Chunk = tuple[int, Tensor, list[Tensor | None]]

# A chunk that travels to the GPU stays below this many bytes (some milliseconds of copying, beside which what
# a chunk costs the host is little), and of a corpus that does not, a progress bar moves at least this often.
_BYTES = 256 << 20
_STEPS = 50
# Pageable memory is copied through a ring of pinned staging slots.
_SLOTS, _SLOT_BYTES = 8, 8 << 20


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to the device. The host waits for nothing."""
    if x.is_cpu and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def documents_at_once(Q: Tensor, D: Tensor, chunk_bytes: int | None, progress: bool) -> int:
    """Return how many documents a search scores at a time; chunk_bytes of None chooses."""
    size = MOST_SCORES // max(Q.shape[0], 1)
    if chunk_bytes is not None or D.device != Q.device:
        size = min(size, (chunk_bytes or _BYTES) // max(D.shape[1] * D.shape[2] * D.element_size(), 1))
    elif progress:
        size = min(size, -(-D.shape[0] // _STEPS))
    return max(size, 1)


def chunks(D: Tensor, beside: Sequence[Tensor | None], size: int, device: torch.device) -> Iterator[Chunk]:
    """Yield ``D``, and the tensors ``beside`` it that have a row a document, by chunks on ``device``.

    A chunk has ``size`` documents; one that was copied is valid until the next is asked for.
    """
    if D.device == device:
        for start in range(0, D.shape[0], size):
            rows = slice(start, start + size)
            yield start, D[rows], [None if x is None else x[rows] for x in beside]
        return
    sources = [D, *(x for x in beside if x is not None)]
    size = min(size, D.shape[0])
    starts = range(0, D.shape[0], max(size, 1))
    pieces = copied(lambda i: [x[starts[i] : starts[i] + size] for x in sources], len(starts), size, device)
    for start, (documents, *others) in zip(starts, pieces, strict=True):
        rest = iter(others)
        yield start, documents, [None if x is None else next(rest) for x in beside]


class _Buffers:
    """Memory on the device for a chunk. Two take turns: one is scored while the other is filled."""

    def __init__(self, sources: list[Tensor], size: int, device: torch.device) -> None:
        self.buffers = [torch.empty((size, *x.shape[1:]), dtype=x.dtype, device=device) for x in sources]
        self.copied = torch.cuda.Event()
        self.used = torch.cuda.Event()


class _Ring:
    """The pinned staging slots. They may not be freed before they were copied from."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # On the host, whatever torch.set_default_device says.
        self.memory = torch.empty(_SLOTS, _SLOT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.left = [torch.cuda.Event() for _ in range(_SLOTS)]
        for event in self.left:
            event.record(stream)  # before that it has no handle
        self.handles = torch.tensor([event.cuda_event for event in self.left], device="cpu")
        self.first = 0  # the slot that was copied from the longest ago

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy on the current stream; ``source`` may change right after the call."""
        data = source.contiguous().flatten().view(torch.uint8)
        _send_bytes(target.flatten().view(torch.uint8), data, self.memory, self.handles, self.first)
        self.first = (self.first - (-data.numel() // _SLOT_BYTES)) % _SLOTS

    def wait(self) -> None:
        for event in self.left:
            event.synchronize()


def copied(
    piece: Callable[[int], list[Tensor]], count: int, rows: int, device: torch.device
) -> Iterator[list[Tensor]]:
    """Yield copies of the CPU tensors ``piece(0)`` up to ``piece(count - 1)``, made on a second stream.

    While one piece, of at most so many rows, is scored, the next one is copied. A copy is valid until the
    next is asked for.

    The tensors of all pieces are alike: in dtype, in all dims but the first, and in whether they are pinned.
    """
    if count == 0:
        return
    with torch.cuda.device(device):
        compute = torch.cuda.current_stream()
        copier = torch.cuda.Stream()
        like = piece(0)
        slots = [_Buffers(like, rows, device) for _ in range(min(count, 2))]
        pinned = [x.is_pinned() and x.is_contiguous() for x in like]
        ring = None if all(pinned) else _Ring(copier)
        copier.wait_stream(compute)  # the buffers' memory may still be in use there

        def send(index: int) -> list[Tensor]:
            slot, sources = slots[index % len(slots)], piece(index)
            copies = [buffer[: x.shape[0]] for x, buffer in zip(sources, slot.buffers, strict=True)]
            copier.wait_event(slot.used)  # the buffer's last reader is done
            with torch.cuda.stream(copier):
                for source, target, direct in zip(sources, copies, pinned, strict=True):
                    if direct:
                        target.copy_(source, non_blocking=True)
                    elif ring is not None:
                        ring.send(source, target)
            slot.copied.record(copier)
            return copies

        try:
            coming = send(0)
            for index in range(count):
                slot, copies = slots[index % len(slots)], coming
                compute.wait_event(slot.copied)
                yield copies
                slot.used.record(compute)
                if index + 1 < count:
                    coming = send(index + 1)
        finally:
            compute.wait_stream(copier)  # the buffers go back to this stream's memory pool
            if ring is not None:
                ring.wait()
