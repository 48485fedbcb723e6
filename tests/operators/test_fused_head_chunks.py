"""How many documents of hidden states a chunk has, and how many splits the gradient of the weights."""

import pytest
import torch

from late_interaction.ops.from_hidden import chunking
from late_interaction.ops.from_hidden.chunking import Gpu, Sizes
from late_interaction.ops.from_hidden.dtypes import product_dtype
from tests.cases import DTYPES

GPU = Gpu(l2_bytes=50 << 20, sm_count=132)
# A document's projected tokens are 512 KiB in half precision, its hidden states 3 MiB.
HALF = Sizes(1000, 2048, 128, 768, 2, 1024)
FLOAT = HALF._replace(itemsize=4)


@pytest.mark.parametrize(
    ("in_place", "wgrad_kernel", "itemsize", "backward", "wanted"),
    [
        (True, True, 2, False, 0),
        (True, False, 2, False, 0),
        (True, True, 2, True, 0),
        (True, False, 2, True, 4),  # wgrad_splitk multiplies in the dtype of the sums
        (True, False, 4, True, 4),
        (True, False, 8, True, 8),
        (False, True, 2, False, 2),
        (False, False, 4, False, 4),
        (False, True, 2, True, 4),
        (False, False, 8, True, 8),
    ],
)
def test_bytes_of_converted_hidden_states(in_place, wgrad_kernel, itemsize, backward, wanted):
    assert chunking.converted_bytes(in_place, wgrad_kernel, itemsize, backward) == wanted


@pytest.mark.parametrize(
    ("sizes", "converted", "gpu", "backward", "wanted"),
    [
        (HALF, 0, GPU, False, 66),  # 0.9 of L2, 45 MiB, hold 90: whole waves of tiles
        (HALF, 0, GPU, True, 67),  # 0.7 of L2 holds 70: 15 chunks of equal size
        (FLOAT, 0, GPU, False, 44),  # 45 MiB hold 45: 23 chunks
        (FLOAT, 0, GPU, True, 35),
        (HALF, 2, GPU, False, 8),  # converted hidden states: 24 MiB
        (HALF._replace(d_model=256), 2, GPU, False, 24),
        (HALF, 4, GPU, True, 4),
        (HALF._replace(d_model=8), 2, GPU, False, 84),  # 90 fit: 12 chunks
        (FLOAT._replace(Nd=56), 0, Gpu(1 << 30, 132), False, 56),  # at most 56 MiB, however large L2 is
        (FLOAT._replace(Nd=57), 0, Gpu(1 << 30, 132), False, 29),
        (FLOAT._replace(Nd=57), 0, Gpu(1 << 30, 132), True, 29),
        (HALF, 0, None, False, 14),  # the cache of a CPU is taken for 8 MiB
        (HALF, 0, None, True, 11),
        (FLOAT, 0, None, False, 7),
        (HALF._replace(Nd=0), 0, GPU, False, 1),
        (HALF._replace(Nd=3), 0, GPU, False, 3),
        (HALF._replace(Nd=3), 0, GPU, True, 3),
    ],
)
def test_documents_of_a_chunk(sizes, converted, gpu, backward, wanted):
    assert chunking.chunk_size(sizes, converted, gpu, backward) == wanted


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((1000, 2048, 384, 4096, 31, 108), 20),
        ((512, 512, 64, 1024, 300, 132), 296),
        ((1000, 17, 1024, 4096, 129, 108), 127),
        ((4096, 512, 128, 4096, 500, 132), 486),  # 297, if launches cost nothing
    ],
)
def test_documents_in_whole_waves(arguments, wanted):
    """No other chunk of those tried has less work for the multiprocessor that has most."""
    Nd, Ld, d_model, query_tokens, most, sms = arguments

    def work(documents):
        projected = 384 * -(-documents * Ld // (384 * sms))
        scored = min(query_tokens, 256) * -(-documents * -(-query_tokens // 256) // sms)
        return projected * d_model + scored * Ld + 2**18 if documents else 0

    assert chunking.documents_in_waves(*arguments) == wanted
    total = {n: Nd // n * work(n) + work(Nd % n) for n in range(most, most // 2, -max(1, most // 64))}
    assert total[wanted] == min(total.values())


@pytest.mark.parametrize(
    ("sizes", "forward", "backward"),
    [
        # Backward chunks lie in the memory of later documents' gradients: 6 of 7, and at most 7 MiB beside.
        (HALF, 66, 512),
        (HALF._replace(Nd=200), 90, 171),
        (HALF._replace(Nd=60), 60, 60),
        (HALF._replace(Ld=65536, query_tokens=1 << 20), 2, 2),
        # No kernel for the weight gradient: hidden states are converted to float32, 4 documents in 24 MiB.
        (HALF._replace(d_model=764), 66, 4),
        (FLOAT, 44, 4),
    ],
)
def test_largest_chunks_of_a_call(sizes, forward, backward):
    assert chunking.planned_chunks(sizes, GPU) == {"forward": forward, "backward": backward}


def test_documents_without_tokens_alias_any_gradients():
    assert chunking.documents_that_alias(5, 0, 8, 8, 0) == 2
    assert chunking.documents_that_alias(1 << 23, 0, 8, 8, 0) == 1 << 22


@pytest.mark.parametrize(
    ("d", "d_model", "tokens", "wanted"),
    [
        (128, 768, 1 << 20, 44),  # 3 tiles of 128 x 256
        (129, 769, 1 << 20, 16),  # 2 x 4
        (1, 1, 1 << 20, 132),
        (128, 768, 1024, 4),  # 256 tokens each
        (128, 768, 1279, 4),
        (128, 768, 255, 1),
        (4096, 4096, 1 << 20, 1),  # more tiles than multiprocessors
    ],
)
def test_splits_of_the_gradient_of_the_weights(d, d_model, tokens, wanted):
    assert chunking.weight_grad_splits(d, d_model, tokens, 132) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_is_of_float32_products_alone(dtype):
    halves = {"medium": torch.bfloat16, "fp16": torch.float16}
    for precision in ("highest", "high", "medium", "fp16"):
        wanted = halves.get(precision, dtype) if dtype is torch.float32 else dtype
        assert product_dtype(precision, dtype) == wanted
