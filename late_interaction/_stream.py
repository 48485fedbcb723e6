"""Documents chunk by chunk: as views where they lie, or copied from the CPU to the GPU ahead of their use."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_send_bytes = torch.ops.late_interaction.send_bytes_.default

# The first document's index, the documents, and the rows of what lies beside them.
Chunk = tuple[int, Tensor, list[Tensor | None]]

# Pageable memory travels by way of a ring of so many pinned pieces of so many bytes.
_PIECES, _PIECE = 8, 8 << 20


def chunks(D: Tensor, beside: Sequence[Tensor | None], size: int, device: torch.device) -> Iterator[Chunk]:
    """Yields ``D``, and what has a row a document beside it, in pieces of ``size`` documents on ``device``.

    A piece that was copied is valid until the next one is asked for.
    """
    if D.device == device:
        for start in range(0, D.shape[0], size):
            rows = slice(start, start + size)
            yield start, D[rows], [None if x is None else x[rows] for x in beside]
        return
    sources = [D, *(x for x in beside if x is not None)]
    for start, (documents, *pieces) in _copied(sources, size, device):
        rest = iter(pieces)
        yield start, documents, [None if x is None else next(rest) for x in beside]


class _Slot:
    """One of the two device buffers that take turns."""

    def __init__(self, sources: list[Tensor], size: int, device: torch.device) -> None:
        self.buffers = [torch.empty((size, *x.shape[1:]), dtype=x.dtype, device=device) for x in sources]
        self.copied = torch.cuda.Event()
        self.used = torch.cuda.Event()


class _Ring:
    """The pinned pieces. They may not be freed before what was in them has left."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # The host's memory, whatever torch.set_default_device says.
        self.memory = torch.empty(_PIECES, _PIECE, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.left = [torch.cuda.Event() for _ in range(_PIECES)]
        for event in self.left:
            event.record(stream)  # before that it has no handle
        self.handles = torch.tensor([event.cuda_event for event in self.left], device="cpu")
        self.first = 0  # the piece that left the longest ago

    def send(self, source: Tensor, target: Tensor) -> None:
        """On the current stream; `source` may change right afterwards."""
        data = source.contiguous().flatten().view(torch.uint8)
        _send_bytes(target.flatten().view(torch.uint8), data, self.memory, self.handles, self.first)
        self.first = (self.first - (-data.numel() // _PIECE)) % _PIECES

    def wait(self) -> None:
        for event in self.left:
            event.synchronize()


def _copied(sources: list[Tensor], size: int, device: torch.device) -> Iterator[tuple[int, list[Tensor]]]:
    """Copies on a stream of their own: while one chunk is scored, the next one travels."""
    Nd = sources[0].shape[0]
    size = min(size, Nd)
    with torch.cuda.device(device):
        compute = torch.cuda.current_stream()
        copier = torch.cuda.Stream()
        slots = [_Slot(sources, size, device) for _ in range(2 if size < Nd else 1)]
        straight = [x.is_pinned() and x.is_contiguous() for x in sources]
        ring = None if all(straight) else _Ring(copier)
        copier.wait_stream(compute)  # the buffers' memory may still be in use there

        def send(index: int) -> None:
            slot, start = slots[index % len(slots)], index * size
            stop = min(start + size, Nd)
            copier.wait_event(slot.used)  # the buffer's last reader is done
            with torch.cuda.stream(copier):
                for source, target, pinned in zip(sources, slot.buffers, straight, strict=True):
                    piece, place = source[start:stop], target[: stop - start]
                    if pinned:
                        place.copy_(piece, non_blocking=True)
                    elif ring is not None:
                        ring.send(piece, place)
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
