"""softmax_product_rows_ against its definition in float64, and scale_rows_."""

import pytest
import torch

import late_interaction  # noqa: F401  (loads the operators)

OPS = torch.ops.late_interaction
IGNORED = -100
# One tile and parts of one; more row tiles than one; widths that end within a group of 8 weights; k chunks of
# 64 dims, whole and not; rows that stay in shared memory (up to 512 dims), and rows that do not.
SHAPES = [(1, 1, 8), (2, 3, 64), (127, 129, 72), (128, 128, 128), (257, 1031, 256), (300, 777, 512)]
SHAPES += [(130, 260, 520), (513, 1000, 1024), (1000, 3000, 192)]


def draw(shape, device, norm=1.0):
    rows, columns, d = shape
    Q, D = (torch.nn.functional.normalize(torch.randn(n, d), dim=1) for n in (rows, columns))
    D[: min(rows, columns)] += Q[: min(rows, columns)]
    Q, D = ((norm * x).bfloat16().to(device) for x in (Q, D))
    if not OPS.can_softmax_product_rows(Q, D):
        pytest.skip("needs a GPU of compute capability 9.0 for this operator")
    return Q, D


def call(Q, D, inverse, labels=None, first=0, factor=None, scaled=True):
    device, rows = Q.device, len(Q)
    factor = torch.rand(rows, device=device) + 0.1 if factor is None else factor
    pitch = -(-len(D) // 8) * 8
    room = torch.full((rows, pitch), 7.0, dtype=torch.bfloat16, device=device)
    weights, scaled_Q = room[:, : len(D)], torch.empty_like(Q) if scaled else None
    sums = OPS.softmax_product_rows_(
        Q, D, torch.tensor(float(inverse), device=device), labels, first, factor, weights, scaled_Q
    )
    assert (room[:, len(D) :] == 7).all()  # nothing is written behind a row
    return factor, weights, scaled_Q, sums


def check(Q, D, inverse, labels=None, first=0, factor=None, tolerance=1e-4):
    """The sums relative to the score that comes with them; and weights times scale, of the softmax."""
    factor, weights, scaled_Q, sums = call(Q, D, inverse, labels, first, factor)
    scores = Q.double() @ D.double().t()
    places = torch.arange(first, first + len(Q), device=Q.device) if labels is None else labels
    inside = (places >= 0) & (places < len(D))
    target = scores.gather(1, places.clamp(0, len(D) - 1).unsqueeze(1)).squeeze(1)
    close(sums[4][inside], target[inside], tolerance * float(scores.abs().max()))
    assert sums[4][~inside].isnan().all()
    counts = factor != 0
    logits = scores * inverse
    found = sums[1].double().log() + sums[0].double() * inverse
    close(found[counts], logits.logsumexp(1)[counts], tolerance * max(1.0, float(logits.abs().max())))
    p = logits.softmax(1)
    mean = (p * scores).sum(1)
    close((sums[0] + sums[2] / sums[1])[counts], mean[counts], tolerance * float(scores.abs().max()))
    wanted = p.clone()
    wanted[inside, places[inside]] -= 1
    wanted = torch.where(counts.unsqueeze(1), factor.double().unsqueeze(1) * wanted, 0.0)
    close(weights.double() * sums[5].double().unsqueeze(1), wanted, 2**-7)
    assert not weights[~counts].any() and not scaled_Q[~counts].any() and not sums[5][~counts].any()
    scaled = Q.double() * sums[5].double().unsqueeze(1)
    torch.testing.assert_close(scaled_Q.double()[counts], scaled[counts], rtol=2**-8, atol=1e-30)


def close(got, want, tolerance):
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("inverse", [1.0, 14.0, 200.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_weights(device, shape, inverse):
    check(*draw(shape, device), inverse)


@pytest.mark.parametrize("first", [0, 5, 250, -3])
def test_labels_by_number_of_the_row(device, first):
    check(*draw((40, 260, 64), device), 10.0, None, first)


def test_labels_and_rows_that_are_left_out(device):
    Q, D = draw((300, 500, 96), device)
    labels = torch.randint(0, 500, (300,), device=device)
    labels[::7] = IGNORED
    factor = torch.rand(300, device=device)
    factor[::5] = 0
    with torch.no_grad():
        Q[10] = torch.nan  # which is left out
    check(torch.where(factor.unsqueeze(1) == 0, 0, Q), D, 20.0, labels, 0, factor)
    _, weights, scaled_Q, _ = call(Q, D, 20.0, labels, 0, factor)
    assert weights.isfinite().all() and scaled_Q.isfinite().all()


@pytest.mark.parametrize("norm", [1e-3, 30.0, 1e3])
@pytest.mark.parametrize("inverse", [1.0, 200.0])
def test_norms(device, norm, inverse):
    check(*draw((300, 300, 128), device, norm), inverse)


@pytest.mark.parametrize("inverse", [20.0, 60.0, 100.0, 1000.0])
def test_labels_far_below_other_scores(device, inverse):
    """From 72 nats on the row's own maximum is what its weights are relative to."""
    Q, D = draw((256, 300, 64), device)
    D[3], D[4], D[100:140] = -Q[3], Q[3], Q[7]
    check(Q, D, inverse)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_in_their_row(device, value):
    Q, D = draw((300, 300, 64), device)
    _, clean, _, _ = call(Q, D, 5.0, None, 0, torch.ones(300, device=device))
    Q[5, 3] = value
    _, weights, _, sums = call(Q, D, 5.0, None, 0, torch.ones(300, device=device))
    others = torch.arange(300, device=device) != 5
    assert weights[5].isnan().any() and sums[1, 5].isnan()
    scale = 1 / weights[others].double().clamp_min(0).sum(1, keepdim=True)
    wanted = clean[others].double() / clean[others].double().clamp_min(0).sum(1, keepdim=True)
    close(weights[others].double() * scale, wanted, 2**-7)


def test_the_same_bits_from_run_to_run(device):
    Q, D = draw((700, 1500, 256), device)
    factor = torch.rand(700, device=device)
    runs = [call(Q, D, 20.0, None, 0, factor) for _ in range(3)]
    for run in runs[1:]:
        assert all(map(torch.equal, runs[0], run))


def test_without_scaled_queries(device):
    Q, D = draw((70, 90, 64), device)
    factor = torch.rand(70, device=device)
    _, weights, _, sums = call(Q, D, 20.0, None, 0, factor)
    found = call(Q, D, 20.0, None, 0, factor, scaled=False)
    assert torch.equal(weights, found[1]) and torch.equal(sums, found[3])


def test_rows_that_lie_apart(device):
    room_Q, room_D = draw((60, 200, 128), device)
    Q, D = room_Q[::2, :64], room_D[:, 64:]
    if OPS.can_softmax_product_rows(Q, D):
        check(Q, D, 10.0)


def test_opcheck(device):
    Q, D = draw((5, 16, 8), device)
    inverse, factor = torch.tensor(3.0, device=device), torch.rand(5, device=device)
    labels, weights = torch.randint(0, 16, (5,), device=device), torch.empty(5, 16, device=device).bfloat16()
    for scaled_Q in (torch.empty_like(Q), None):
        args = (Q, D, inverse, labels, 0, factor, weights, scaled_Q)
        torch.library.opcheck(OPS.softmax_product_rows_.default, args)


@pytest.mark.gpu
def test_the_kernels_refuse_what_they_cannot_read():
    Q, D = draw((5, 16, 8), "cuda")
    inverse, factor = torch.tensor(3.0, device="cuda"), torch.rand(5, device="cuda")
    weights = torch.empty(5, 16, device="cuda").bfloat16()

    def refused(message, Q, D, *rest):
        with pytest.raises(RuntimeError, match=message):
            OPS.softmax_product_rows_(Q, D, *rest)

    refused("can_softmax_product_rows says no", Q.float(), D, inverse, None, 0, factor, weights, None)
    refused("can_softmax_product_rows says no", Q, D[:, :4], inverse, None, 0, factor, weights, None)
    refused("inverse_temperature must be", Q, D, inverse.cpu(), None, 0, factor, weights, None)
    refused("labels must be", Q, D, inverse, factor, 0, factor, weights, None)
    refused("factor must be", Q, D, inverse, None, 0, factor[:3], weights, None)
    refused("weights must be", Q, D, inverse, None, 0, factor, weights[:, :8], None)
    refused("weights must be", Q, D, inverse, None, 0, factor, weights.float(), None)
    refused("scaled_Q must be", Q, D, inverse, None, 0, factor, weights, Q[:3])
    scaled = (Q, factor[:2], Q), (Q, factor, Q[:2]), (Q.t(), factor, Q), (Q, factor.double(), Q)
    for x, scale, out in scaled:
        with pytest.raises(RuntimeError, match=r"late_interaction: (x|scale|out) must be"):
            OPS.scale_rows_(x, scale, out)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (33, 64), (7, 1, 512), (0, 8)])
def test_scaled_rows(device, dtype, to, shape):
    """Rounded once, in vectors of 8 and one by one."""
    x, out = torch.randn(shape, device=device).to(dtype), torch.empty(shape, dtype=to, device=device)
    for scale in (torch.rand(shape[0], device=device), torch.tensor(0.3, device=device)):
        if scale.numel() == 0:
            continue
        OPS.scale_rows_(x, scale, out)
        each = scale.reshape(-1, *[1] * (len(shape) - 1)) if scale.dim() else scale
        assert torch.equal(out, (x.float() * each).to(to))
