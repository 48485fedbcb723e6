"""The softmax operators against their definition in float64: sums of rows and columns, and weights."""

import pytest
import torch

import late_interaction  # noqa: F401  (loads the operators)

OPS = torch.ops.late_interaction
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}  # of a weight of up to 1
# Odd sizes; several tiles of 128 rows and 256 columns; several vectors a thread; a row that is longer than
# the shared memory of a multiprocessor.
SHAPES = [(1, 1), (3, 2), (2, 4), (5, 7), (33, 257), (130, 300), (300, 512), (4, 4099), (2, 70_001)]
IGNORED = -100


def draw(shape, device, layout="dense", scale=1.0):
    """Scores as a contiguous matrix, with rows that begin at 128 bytes, or at no vector at all."""
    rows, columns = shape
    if layout == "dense":
        return (scale * torch.randn(shape)).to(device)
    pitch, first = (-(-columns // 32) * 32, 0) if layout == "padded" else (columns + 3, 1)
    room = torch.full((rows * pitch + first,), torch.nan, device=device)
    scores = room[first:].view(rows, pitch)[:, :columns]
    return scores.copy_(scale * torch.randn(shape))


def number(x, device):
    return torch.tensor(float(x), device=device)


def sums_of(scores, inverse):
    """[4, rows] in float64, by definition."""
    s = scores.double()
    m = s.amax(1)
    e = ((s - m[:, None]) * inverse).exp()
    return torch.stack((m, e.sum(1), (e * (s - m[:, None])).sum(1), s.sum(1)))


def targets_of(scores, labels, first):
    """1 at the labels."""
    n, columns = scores.shape
    places = torch.arange(first, first + n) if labels is None else labels.cpu()
    return (places[:, None] == torch.arange(columns)).double().to(scores.device)


def weights_of(scores, inverse, factor, labels=None, first=0, smoothing=0.0):
    """In float64. A row without a label has no such term, and one of factor 0 nothing at all."""
    p = (scores.double() * inverse).softmax(1)
    found = p - smoothing / scores.shape[1] - (1 - smoothing) * targets_of(scores, labels, first)
    return torch.where(factor[:, None] == 0, 0.0, factor.double()[:, None] * found)


def no_sums(columns, device):
    """Sums of columns before the first panel of rows."""
    return torch.tensor([[-1e30], [0.0], [0.0], [0.0]], device=device).repeat(1, columns)


def close(got, want, tolerance):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def labels_of(shape, device):
    labels = torch.randint(0, shape[1], shape[:1])
    labels[::5] = IGNORED
    return labels.to(device)


@pytest.mark.parametrize("layout", ["dense", "padded", "unaligned"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_rows(device, shape, layout):
    scores = draw(shape, device, layout)
    found = OPS.softmax_row_sums(scores, number(20, device))
    close(found, sums_of(scores, 20), 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "padded", "unaligned"])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_of_rows(device, shape, layout, dtype):
    scores = draw(shape, device, layout)
    labels, factor = labels_of(shape, device), torch.rand(shape[0], device=device) + 0.1
    weights = torch.full(shape, torch.nan, dtype=dtype, device=device)
    sums = OPS.softmax_rows_(scores, number(3, device), labels, 0, factor, 0.0, weights)
    close(sums, sums_of(scores, 3), 1e-4)
    close(weights, weights_of(scores, 3, factor, labels), STEP[dtype])


@pytest.mark.parametrize("first", [0, 2, 296, -4])  # of 7 rows, some without a column
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_labels_by_number_of_the_row_and_smoothing(device, smoothing, first):
    scores, factor = draw((7, 300), device), torch.rand(7, device=device)
    factor[3] = 0
    weights = torch.empty_like(scores)
    OPS.softmax_rows_(scores, number(2, device), None, first, factor, smoothing, weights)
    close(weights, weights_of(scores, 2, factor, None, first, smoothing), 2e-6)
    assert not weights[3].any()


@pytest.mark.parametrize("layout", ["dense", "padded", "unaligned"])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_from_known_sums(device, shape, layout):
    scores, labels, inverse = draw(shape, device, layout), labels_of(shape, device), number(3, device)
    factor = torch.rand(shape[0], device=device)
    factor[1::3] = 0
    for dtype in DTYPES:
        # Beside the scores' layouts those of weights: rows that begin anywhere, and nothing written between.
        room = torch.full((shape[0], shape[1] + 5), 7.0, dtype=dtype, device=device)
        weights = room[:, 4:-1]
        terms = known_terms(scores, inverse, factor)
        OPS.softmax_weights_(scores, inverse, terms, None, labels, 0, 0.1, weights)
        close(weights, weights_of(scores, 3, factor, labels, 0, 0.1), STEP[dtype])
        assert (room[:, :4] == 7).all() and (room[:, -1] == 7).all()


def known_terms(scores, inverse, factor):
    sums = OPS.softmax_row_sums(scores, inverse)
    return torch.stack((sums[0], torch.where(factor == 0, 0.0, factor / sums[1]), factor))


def terms_of_both(scores, inverse, factors):
    """Terms of rows, and of columns."""
    return [
        known_terms(x.contiguous(), inverse, f) for x, f in zip((scores, scores.t()), factors, strict=True)
    ]


@pytest.mark.parametrize("layout", ["dense", "padded", "unaligned"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_rows_and_columns(device, shape, layout):
    """Columns add up over panels of rows."""
    scores, inverse = draw(shape, device, layout), number(20, device)
    columns = no_sums(shape[1], device)
    at = (shape[0] + 1) // 2
    parts = [part for part in (scores[:at], scores[at:]) if len(part)]
    rows = torch.cat([OPS.softmax_sums_(part, inverse, columns) for part in parts], 1)
    close(rows, sums_of(scores, 20), 1e-4)
    close(columns, sums_of(scores.t(), 20), 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (130, 130), (261, 261)])
def test_weights_of_both_directions(device, shape, smoothing, dtype):
    n, inverse = shape[0], number(3, device)
    scores, factors = draw(shape, device), torch.rand(2, n, device=device)
    labels = torch.randperm(n, device=device)
    left_out = labels[0].item()
    labels[0] = IGNORED
    factors[0, 0] = factors[1, left_out] = 0
    back = torch.full((n,), IGNORED, device=device)
    back[labels[1:]] = torch.arange(1, n, device=device)
    weights = torch.empty(shape, dtype=dtype, device=device)
    terms = terms_of_both(scores, inverse, factors)
    OPS.softmax_weights_(scores, inverse, *terms, labels, 0, smoothing, weights)
    wanted = weights_of(scores, 3, factors[0], labels, 0, smoothing)
    wanted += weights_of(scores.t(), 3, factors[1], back, 0, smoothing).t()
    close(weights, wanted, 2 * STEP[dtype])


def test_weights_of_a_panel_of_both_directions(device):
    """Labels of a later panel's rows, by number."""
    n, inverse = 12, number(3, device)
    scores, factors = draw((n, n), device), torch.rand(2, n, device=device)
    terms = terms_of_both(scores, inverse, factors)
    wanted = weights_of(scores, 3, factors[0]) + weights_of(scores.t(), 3, factors[1]).t()
    weights = torch.empty(7, n, device=device)
    OPS.softmax_weights_(scores[5:], inverse, terms[0][:, 5:].contiguous(), terms[1], None, 5, 0.0, weights)
    close(weights, wanted[5:], 4e-6)


@pytest.mark.parametrize("scale, inverse", [(1e4, 1e3), (1e-4, 1e-3), (1e4, 1e-3), (1.0, 1e4), (300.0, 1.0)])
def test_scales(device, scale, inverse):
    """Differences from the maximum are exact, however large the scores are."""
    scores = draw((9, 301), device, scale=scale)
    scores[:, 17] = scores.amax(1)  # a tie
    factor, weights = torch.ones(9, device=device), torch.empty(9, 301, device=device)
    sums = OPS.softmax_rows_(scores, number(inverse, device), None, 0, factor, 0.0, weights)
    close(weights, weights_of(scores, inverse, factor), 1e-4)
    columns = no_sums(301, device)
    OPS.softmax_sums_(scores, number(inverse, device), columns)
    for found, wanted in ((sums, sums_of(scores, inverse)), (columns, sums_of(scores.t(), inverse))):
        for got, want in zip(found.double(), wanted, strict=True):
            largest = float(want.abs().max())
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * largest + 1e-30)


def test_nan_and_infinity_stay_in_their_row(device):
    scores = draw((6, 300), device)
    clean = scores.clone()
    scores[1, 7], scores[2, 299], scores[3, 40], scores[4, 0] = torch.nan, torch.inf, -torch.inf, torch.nan
    factor = torch.tensor([1.0, 1, 1, 1, 0, 1], device=device)
    weights = torch.empty_like(scores)
    sums = OPS.softmax_rows_(scores, number(2, device), None, 0, factor, 0.0, weights)
    assert sums[1, [1, 2, 4]].isnan().all() and weights[1:3].isnan().all()
    assert not weights[4].any()
    close(sums[:2, [0, 3, 5]], sums_of(scores, 2)[:2, [0, 3, 5]], 1e-4)
    others = [0, 3, 5]
    close(weights[others], weights_of(scores, 2, factor)[others], 2e-6)
    close(sums[:, [0, 5]], sums_of(clean, 2)[:, [0, 5]], 1e-4)


def test_nan_and_infinity_of_columns(device):
    scores, inverse = draw((300, 6), device), number(2, device)
    scores[7, 1], scores[299, 2], scores[40, 3] = torch.nan, torch.inf, -torch.inf
    columns = no_sums(6, device)
    rows = OPS.softmax_sums_(scores, inverse, columns)
    assert columns[1, 1:3].isnan().all() and rows[1, [7, 299]].isnan().all()
    close(columns[:2, [0, 3, 4, 5]], sums_of(scores.t(), 2)[:2, [0, 3, 4, 5]], 1e-4)
    terms = torch.stack((columns[0], 1 / columns[1], torch.ones(6, device=device)))
    terms[1:, 1:3] = 0  # left out
    weights = torch.empty_like(scores)
    OPS.softmax_weights_(scores, inverse, rows.new_zeros(3, 300), terms, None, 900, 0.0, weights)
    assert weights[:, 1:3].count_nonzero() == 0 and weights.isfinite().all()


def test_the_same_bits_from_run_to_run(device):
    scores, inverse, factor = draw((200, 1000), device), number(20, device), torch.rand(200, device=device)
    runs = []
    for _ in range(3):
        weights, columns = torch.empty_like(scores), no_sums(1000, device)
        sums = OPS.softmax_rows_(scores, inverse, None, 0, factor, 0.1, weights)
        rows = OPS.softmax_sums_(scores, inverse, columns)
        runs.append((weights, sums, rows, columns))
    for run in runs[1:]:
        assert all(map(torch.equal, runs[0], run))


def test_float64_on_the_cpu():
    scores, factor = torch.randn(7, 11, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    weights = torch.empty_like(scores)
    sums = OPS.softmax_rows_(scores, torch.tensor(3.0).double(), None, 1, factor, 0.1, weights)
    close(sums, sums_of(scores, 3), 1e-12)
    close(weights, weights_of(scores, 3, factor, None, 1, 0.1), 1e-12)


def test_no_rows(device):
    scores, inverse = torch.empty(0, 5, device=device), number(1, device)
    columns = torch.zeros(4, 5, device=device)
    assert OPS.softmax_row_sums(scores, inverse).shape == (4, 0)
    assert OPS.softmax_sums_(scores, inverse, columns).shape == (4, 0) and not columns.any()
    OPS.softmax_rows_(scores, inverse, None, 0, torch.empty(0, device=device), 0.0, torch.empty_like(scores))
    OPS.softmax_weights_(
        scores, inverse, columns[:3, :0].contiguous(), None, None, 0, 0.0, torch.empty_like(scores)
    )


@pytest.mark.gpu
def test_the_kernels_refuse_what_they_cannot_read():
    scores, inverse, factor = draw((5, 9), "cuda"), number(3, "cuda"), torch.rand(5, device="cuda")
    weights = torch.empty(5, 9, device="cuda")

    def refused(message, op, *args):
        with pytest.raises(RuntimeError, match=message):
            op(*args)

    refused("scores must be float32", OPS.softmax_row_sums, scores.double(), inverse)
    refused("scores must be float32", OPS.softmax_row_sums, scores.t(), inverse)
    refused("must not overlap", OPS.softmax_row_sums, scores[:1].expand(5, 9), inverse)
    refused("inverse_temperature must be", OPS.softmax_row_sums, scores, inverse.cpu())
    rows = (OPS.softmax_rows_, scores, inverse)
    refused("factor must be", *rows, None, 0, factor[:3], 0.0, weights)
    refused(
        "labels must be", *rows, torch.zeros(5, dtype=torch.int32, device="cuda"), 0, factor, 0.0, weights
    )
    refused("weights must have the shape", *rows, None, 0, factor, 0.0, weights[:, :8])
    refused("weights must be bfloat16", *rows, None, 0, factor, 0.0, weights.double())
    refused("column_sums must be", OPS.softmax_sums_, scores, inverse, weights)
    refused("row_terms must be", OPS.softmax_weights_, scores, inverse, factor, None, None, 0, 0.0, weights)
