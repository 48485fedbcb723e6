"""Lengths far past a tile, in one launch: long queries, long documents, long embeddings."""

import pytest
import torch

import late_interaction as li
from tests.support import ref
from tests.support.calls import peak

# Nq, Nd, Lq, Ld, d
SMALL = [(1, 2, 2111, 301, 16), (2, 1, 17, 66_001, 8), (1, 2, 9, 70, 4096), (1, 1, 1025, 1031, 72)]
LARGE = [
    (1, 2, 32_768, 300, 128),
    (1, 3, 32, 1_000_003, 64),
    (2, 3, 33, 130, 4096),
    (1, 2, 8_192, 8_191, 128),
    (3, 2, 300, 100_003, 48),
    (1, 1, 32_767, 32_769, 16),
]


def check(shape, dtype, device, layout, normalize=False, precision="highest"):
    Nq, Nd, Lq, Ld, d = shape
    Q = torch.randn(Nq, Lq, d, device=device).to(dtype).requires_grad_()
    documents = (Nq, Nd) if layout == "KD" else (Nd,)
    D = torch.randn(*documents, Ld, d, device=device).to(dtype).requires_grad_()
    d_mask = torch.rand(*documents, Ld, device=device) < 0.7
    options = {"normalize": normalize, "precision": precision}
    limit = ref.tolerance(dtype, precision)
    scores, winners = li.maxsim_with_winners(Q, D, None, d_mask, **options)
    exact, best = ref.maxsim(Q, D, None, d_mask, normalize)
    ref.assert_close(scores, exact, limit)
    with torch.no_grad():
        ref.assert_close(li.maxsim(Q, D, None, d_mask, **options), exact, limit)
    ref.assert_winners_close(winners, best, Q, D, 4 * limit, normalize)
    ref.assert_gradients(scores, Q, D, winners, 2 * ref.GRAD_TOLERANCE[dtype], normalize)


@pytest.mark.parametrize("layout", ["in-batch", "KD"])
@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long(dtype, shape, layout, device):
    check(shape, dtype, device, layout, normalize=shape[-1] == 72)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["in-batch", "KD"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", LARGE)
def test_very_long(shape, dtype, layout):
    check(shape, dtype, "cuda", layout, normalize=shape[-1] == 48)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE[:3])
def test_very_long_tf32(shape):
    check(shape, torch.float32, "cuda", "in-batch", precision="high")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LARGE[0], LARGE[1], LARGE[3]])
def test_no_memory_beside_the_results(shape):
    Nq, Nd, Lq, Ld, d = shape
    Q = torch.randn(Nq, Lq, d, device="cuda", dtype=torch.bfloat16)
    D = torch.randn(Nd, Ld, d, device="cuda", dtype=torch.bfloat16)
    li.maxsim(Q, D)
    assert peak(lambda: li.maxsim(Q, D)) < 4 << 20
