"""Parts of the engine of the losses that no result shows on a CPU: how large blocks of a GPU are, and what is
said of its offsets."""

from types import SimpleNamespace

import pytest
import torch

from late_interaction._checks.packed import check_cover
from late_interaction._contrastive import blocks
from late_interaction._contrastive.kernels import Kernels
from late_interaction._contrastive.sequences import even_blocks
from late_interaction._contrastive.softmax import RunningSoftmax


@pytest.mark.parametrize("n", [0, 1, 5, 63, 64, 65, 126, 130, 190, 1000])
def test_blocks_of_about_equal_size_are_whole_tiles(n):
    for most in (1, 3, 64, 100, 120, 5000):
        found = even_blocks(n, most)
        assert [i for a, b in found for i in range(a, b)] == list(range(n))
        assert all(b - a <= most for a, b in found)
        assert len(found) < 2 or found[0][1] < 64 or found[0][1] % 32 == 0 or found[0][1] == most


def test_offsets_of_a_gpu_are_looked_at_on_the_host():
    for offsets in ((0, 4, 2), (0, 2, 7), (0, 2, 5), (-1, 2, 6), (1, 2, 6)):
        with pytest.raises(ValueError, match=r"Q\.offsets must"):
            check_cover("Q.offsets", torch.tensor(offsets, dtype=torch.int32), 6)


class Sequences:
    """What the size of a block follows from: padded sequences of 4 bytes each on a GPU."""

    is_packed, offsets = False, None

    def __init__(self, count, longest=1):
        self.count = count
        self.values = SimpleNamespace(
            is_cuda=True, device="cuda:0", itemsize=1, numel=lambda: count * 4, shape=(count, longest)
        )

    def __len__(self):
        return self.count


@pytest.mark.parametrize(("documents", "longest", "wanted", "processors"), [
    (263, 180, 263, 132),  # less than a wave
    (264, 180, 256, 132), (300, 180, 256, 132), (528, 1, 512, 132), (131, 181, 131, 132),
    (163, 181, 128, 132), (300, 300, 256, 132), (230, 180, 224, 114),
])  # fmt: skip
def test_documents_of_a_block_fill_whole_waves(documents, longest, wanted, processors, monkeypatch):
    """Each multiprocessor has two documents or a long one; in whole tiles of 32."""
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(blocks.torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(blocks, "_CUDA_SHARES", (4, 4 * documents, 1 << 30))
    monkeypatch.setattr(blocks, "_LEAST", 1)
    found = blocks.block_sizes(Kernels("padded", False, "highest"), Sequences(1), Sequences(10**6, longest))
    assert found == (1, wanted)


def test_a_row_without_logits_has_a_low_sum():
    sums = RunningSoftmax.empty(2, torch.ones(()), torch.float64, moment=True, total=True)
    sums.add(0, torch.empty(2, 0, dtype=torch.float64))
    assert (sums.log_sum() < -1e29).all()
    sums.add(0, torch.zeros(2, 1, dtype=torch.float64))
    assert not sums.log_sum().any()
