"""`python -m tests.support.large_corpus DEVICE DOCUMENTS FOLDER`: the best of a corpus in a file of FOLDER.

On a GPU this process may use less memory than the corpus takes, which is why it is a process of its own. The
best documents are those of all scores, however the corpus lies on the host; a search that was stopped goes
on; and what is on the GPU beside the queries stays below the documented bound.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import late_interaction as li
from late_interaction._search import stream

Ld, d, k = 128, 128, 100
CAP = 896 << 20
SLACK = 64 << 20  # for scores, masks and choosing the best


def write(path: Path, documents: int, device: torch.device) -> None:
    with path.open("wb") as file:
        for start in range(0, documents, 1000):
            piece = torch.randn(min(1000, documents - start), Ld, d, device=device).bfloat16()
            file.write(piece.cpu().view(torch.int16).numpy().tobytes())


def kinds(path: Path, documents: int, device: torch.device) -> dict[str, Tensor]:
    """The corpus in all ways that it may lie on the host."""
    shape = (documents, Ld, d)
    mapped = torch.from_file(str(path), size=documents * Ld * d, dtype=torch.bfloat16).view(shape)
    of_numpy = torch.from_numpy(np.memmap(path, np.int16, "c", shape=shape)).view(torch.bfloat16)
    found = {"mapped": mapped, "numpy": of_numpy, "pageable": mapped.clone()}
    return found | {"pinned": mapped.pin_memory()} if device.type == "cuda" else found


def all_scores(Q: Tensor, D: Tensor, d_mask: Tensor | None, normalize: bool) -> Tensor:
    masks = [None] * D.shape[0] if d_mask is None else d_mask.to(Q.device).split(1000)
    pieces = [
        li.maxsim(Q, documents.to(Q.device), None, mask, normalize=normalize)
        for documents, mask in zip(D.split(1000), masks, strict=False)
    ]
    return torch.cat(pieces, dim=1)


def check(
    D: Tensor, Q: Tensor, d_mask: Tensor | None, normalize: bool, expected: Tensor, chunks: int = 2
) -> None:
    """Twice: in one go, and stopped in the middle. Never more than so many chunks on the GPU."""
    on_gpu = Q.is_cuda
    half = D.shape[0] // 2 + 1
    masks = (None, None) if d_mask is None else (d_mask[:half], d_mask[half:])
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    got = li.search(Q, D, k, d_mask=d_mask, normalize=normalize)
    stopped = li.TopK(Q, k, normalize=normalize)
    stopped.add(D[:half], masks[0])
    again = li.TopK(Q, k, normalize=normalize)
    again.load_state_dict(stopped.state_dict())
    again.add(D[again.seen :], masks[1])
    if on_gpu:
        taken = torch.cuda.max_memory_allocated() - before
        assert taken <= chunks * stream._BYTES + SLACK, f"{taken >> 20} MiB"
        assert torch.cuda.max_memory_reserved() <= CAP < D.numel() * D.element_size()
    best = expected.sort(dim=1, descending=True).values
    for scores, indices in (got, (again.scores, again.indices)):
        torch.testing.assert_close(scores, best[:, :k], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scores, expected.gather(1, indices), rtol=1e-5, atol=1e-5)
        assert bool((indices.sort(dim=1).values.diff(dim=1) > 0).all())  # none comes twice
    assert again.seen == D.shape[0]


def main(device: torch.device, documents: int, folder: Path) -> None:
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(CAP / torch.cuda.mem_get_info()[1])
    torch.manual_seed(0)
    write(folder / "corpus.bin", documents, device)
    few, many = (torch.randn(n, 32, d, device=device).bfloat16() for n in (4, 64))
    some = torch.rand(documents, Ld) < 0.8
    corpora = kinds(folder / "corpus.bin", documents, device)
    masked = all_scores(few, corpora["mapped"], some, False)
    normalized = all_scores(few, corpora["mapped"], None, True)
    for D in corpora.values():
        check(D, few, some, False, masked)
        check(D, few, None, True, normalized)
    # Many query tokens multiply copies of unit rows: of one chunk at a time.
    check(D, many, None, True, all_scores(many, D, None, True), chunks=3)
    print(f"{documents} documents, {', '.join(corpora)}")


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
