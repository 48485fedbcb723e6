"""Documents chunk by chunk: views on the device, or copies made while others are scored."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from late_interaction.ops._library import operators

_send_bytes = operators.send_bytes_.default

# The first document's index, the documents, and their rows of the other tensors.
Chunk = tuple[int, Tensor, list[Tensor | None]]

# Pageable memory is copied through a ring of pinned staging slots.
_SLOTS, _SLOT_BYTES = 8, 8 << 20


def chunks(D: Tensor, beside: Sequence[Tensor | None], size: int, device: torch.device) -> Iterator[Chunk]:
    """Yields ``D``, and the tensors ``beside`` it that have a row a document, ``size`` documents at a time on
    ``device``. A chunk that was copied is valid until the next one is asked for."""
    if D.device == device:
        for start in range(0, D.shape[0], size):
            rows = slice(start, start + size)
            yield start, D[rows], [None if x is None else x[rows] for x in beside]
        return
    sources = [D, *(x for x in beside if x is not None)]
    for start, (documents, *others) in _copied(sources, size, device):
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
        """Copies on the current stream; `source` may change right after the call."""
        data = source.contiguous().flatten().view(torch.uint8)
        _send_bytes(target.flatten().view(torch.uint8), data, self.memory, self.handles, self.first)
        self.first = (self.first - (-data.numel() // _SLOT_BYTES)) % _SLOTS

    def wait(self) -> None:
        for event in self.left:
            event.synchronize()


def _copied(sources: list[Tensor], size: int, device: torch.device) -> Iterator[tuple[int, list[Tensor]]]:
    """Copies on a second stream: while one chunk is scored, the next one is copied."""
    Nd = sources[0].shape[0]
    size = min(size, Nd)
    with torch.cuda.device(device):
        compute = torch.cuda.current_stream()
        copier = torch.cuda.Stream()
        slots = [_Buffers(sources, size, device) for _ in range(2 if size < Nd else 1)]
        pinned = [x.is_pinned() and x.is_contiguous() for x in sources]
        ring = None if all(pinned) else _Ring(copier)
        copier.wait_stream(compute)  # the buffers' memory may still be in use there

        def send(index: int) -> None:
            slot, start = slots[index % len(slots)], index * size
            stop = min(start + size, Nd)
            copier.wait_event(slot.used)  # the buffer's last reader is done
            with torch.cuda.stream(copier):
                for source, buffer, direct in zip(sources, slot.buffers, pinned, strict=True):
                    rows, target = source[start:stop], buffer[: stop - start]
                    if direct:
                        target.copy_(rows, non_blocking=True)
                    elif ring is not None:
                        ring.send(rows, target)
            slot.copied.record(copier)

        count = -(-Nd // size) if size else 0
        try:
            if count:
                send(0)
            for index in range(count):
                slot, start = slots[index % len(slots)], index * size
                compute.wait_event(slot.copied)
                rows = min(size, Nd - start)
                yield start, [x[:rows] for x in slot.buffers]
                slot.used.record(compute)
                if index + 1 < count:
                    send(index + 1)
        finally:
            compute.wait_stream(copier)  # the buffers go back to this stream's memory pool
            if ring is not None:
                ring.wait()
