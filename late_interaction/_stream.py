"""Documents chunk by chunk: as views where they lie, or copied from the CPU to the GPU ahead of their use."""

from collections.abc import Iterator

import torch
from torch import Tensor

_copy_past_cache = torch.ops.late_interaction.copy_past_cache_.default

Chunk = tuple[int, Tensor, Tensor | None]  # the first document's index, the documents, their mask


def chunks(D: Tensor, d_mask: Tensor | None, size: int, device: torch.device) -> Iterator[Chunk]:
    """Yields ``D`` and ``d_mask`` in pieces of ``size`` documents on ``device``.

    A piece that was copied is valid until the next one is asked for.
    """
    if D.device == device:
        for start in range(0, D.shape[0], size):
            stop = start + size
            yield start, D[start:stop], None if d_mask is None else d_mask[start:stop]
        return
    yield from _copied(D, d_mask, size, device)


class _Slot:
    """One of the two buffers that take turns: pinned memory on the host, its copy on the device."""

    def __init__(self, sources: list[Tensor], size: int, device: torch.device) -> None:
        shapes = [(size, *x.shape[1:]) for x in sources]
        self.host = [
            None
            if x.is_pinned() and x.is_contiguous()
            else torch.empty(shape, dtype=x.dtype, pin_memory=True)
            for x, shape in zip(sources, shapes, strict=True)
        ]
        self.device = [
            torch.empty(shape, dtype=x.dtype, device=device) for x, shape in zip(sources, shapes, strict=True)
        ]
        self.copied = torch.cuda.Event()
        self.used = torch.cuda.Event()


def _fill(host: Tensor, piece: Tensor) -> Tensor:
    if piece.is_contiguous():
        _copy_past_cache(host.flatten().view(torch.uint8), piece.flatten().view(torch.uint8))
        return host
    return host.copy_(piece)


def _copied(D: Tensor, d_mask: Tensor | None, size: int, device: torch.device) -> Iterator[Chunk]:
    """Copies on a stream of their own: while one chunk is scored, the next one travels."""
    sources = [D] if d_mask is None else [D, d_mask]
    Nd = D.shape[0]
    size = min(size, Nd)
    with torch.cuda.device(device):
        compute = torch.cuda.current_stream()
        copier = torch.cuda.Stream()
        slots = [_Slot(sources, size, device) for _ in range(2 if size < Nd else 1)]
        copier.wait_stream(compute)  # the buffers' memory may still be in use there

        def send(index: int) -> None:
            slot, start = slots[index % len(slots)], index * size
            stop = min(start + size, Nd)
            slot.copied.synchronize()  # the pinned buffer's last copy has left
            copier.wait_event(slot.used)  # and the device buffer's last reader is done
            for source, host, target in zip(sources, slot.host, slot.device, strict=True):
                piece = source[start:stop]
                if host is not None:
                    piece = _fill(host[: stop - start], piece)
                with torch.cuda.stream(copier):
                    target[: stop - start].copy_(piece, non_blocking=True)
            slot.copied.record(copier)

        count = -(-Nd // size) if size else 0
        try:
            if count:
                send(0)
            for index in range(count):
                slot, start = slots[index % len(slots)], index * size
                compute.wait_event(slot.copied)
                rows = min(size, Nd - start)
                pieces = [x[:rows] for x in slot.device]
                yield start, pieces[0], pieces[1] if len(pieces) > 1 else None
                slot.used.record(compute)
                if index + 1 < count:
                    send(index + 1)
        finally:
            compute.wait_stream(copier)  # the buffers go back to this stream's memory pool
