"""The operators that choose the best documents, and those for what processes exchange of them."""

import pytest
import torch

from late_interaction import ops
from late_interaction.ops import topk
from late_interaction.ops.topk import MOST_BEST

OPS = ops.operators
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, 3e38, -3e38, 1.5]


def drawn(kind, rows, columns, device):
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "ties":
        x = x.round()
    elif kind == "equal":
        x = torch.full_like(x, -2.5)
    elif kind == "special":
        x = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), x.shape, generator=generator)]
    elif kind == "rising":
        x = torch.arange(rows * columns).view(rows, columns) - columns / 2
    return x.to(device)


def wanted(scores, indices, k, largest):
    """By a stable sort of the columns in the order of their indices. NaN is no document."""
    missing = scores.isnan().cpu() | (indices.cpu() < 0)
    scores = scores.cpu().masked_fill(missing, -torch.inf if largest else torch.inf)
    by_index = indices.cpu().masked_fill(missing, 1 << 40).argsort(dim=1)
    indices = indices.cpu().masked_fill(missing, -1)
    scores, indices = scores.gather(1, by_index), indices.gather(1, by_index)
    order = scores.double().sort(dim=1, descending=largest, stable=True).indices[:, :k]
    return scores.gather(1, order), indices.gather(1, order)


def same(found, expected):
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=0, atol=0)
    assert torch.equal(found[1].cpu(), expected[1])
    assert found[0].dtype == torch.float32 and found[1].dtype == torch.int64


def places(scores, first):
    rows, columns = scores.shape
    return torch.arange(first, first + columns, device=scores.device).expand(rows, columns)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "special", "rising"])
@pytest.mark.parametrize(
    "rows, columns, k",
    [
        (3, 1, 1), (2, 7, 100), (1, 512, 512), (5, 513, 100), (2, 1025, 1), (3, 1500, 513), (2, 5000, 1024),
        (4, 8191, 100), (2, 8192, 7), (3, 8193, 100), (1, 16385, 1024), (2, 20_000, 33), (1, 150_000, 100),
        (1, 150_000, 1000), (0, 10, 3), (2, 0, 3),
    ],
)  # fmt: skip
def test_the_best(rows, columns, k, kind, largest, device):
    scores, first = drawn(kind, rows, columns, device), 2**32 - columns
    found = OPS.select_best(scores, None, first, None, None, k, largest)
    same(found, wanted(scores, places(scores, first), k, largest))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize(
    "columns, before, k", [(40, 9, 12), (8000, 192, 200), (8192, 100, 100), (50_000, 1024, 1024), (0, 5, 3)]
)
def test_the_best_of_these_and_of_those_before(columns, before, k, kind, largest, device):
    """Documents in any order, of rows that do not lie side by side."""
    rows, every = 3, columns + before
    scores = drawn(kind, rows, every + 5, device)
    indices = torch.stack(
        [torch.randperm(every + 5, generator=torch.Generator().manual_seed(i)) for i in range(rows)]
    )
    indices = indices.to(device) * 3
    found = [x[:, columns:every].contiguous() for x in (scores, indices)]
    best = OPS.select_best(scores[:, :columns], indices[:, :columns], 5, *found, k, largest)
    same(best, wanted(scores[:, :every], indices[:, :every], k, largest))


@pytest.mark.parametrize("largest", [True, False])
def test_what_is_no_document_comes_last(largest, device):
    """Behind scores of -inf and inf, however many there are: in the scores, in those before, in the keys."""
    rows, columns, k = 2, 9000, 6
    worst = -torch.inf if largest else torch.inf
    scores = torch.full((rows, columns), torch.nan, device=device)
    scores[:, 8500], scores[0, 3], scores[0, 4] = worst, 1.0, -worst
    before = torch.tensor([[2.0, 7.0], [5.0, 5.0]], device=device)
    places_before = torch.tensor([[-1, 99_999], [-1, -1]], device=device)
    got = OPS.select_best(scores, None, 10, before, places_before, k, largest)
    best = [-worst, 7.0, 1.0] if largest else [-worst, 1.0, 7.0]
    order = [14, 99_999, 13] if largest else [14, 13, 99_999]
    expected = torch.tensor([[*best, *[worst] * 3], [worst] * 6])
    indices = torch.tensor([[*order, 8510, -1, -1], [8510, *[-1] * 5]])
    same(got, (expected, indices))
    packed = OPS.pack_found(*got, k, rows * k + 1, [100_000], largest).view(1, -1)
    same(OPS.merge_found(packed, rows, k, 1, k, largest)[:2], (expected, indices))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize("room", [0, 5])
@pytest.mark.parametrize(
    "counts, k", [((5,), 3), ((3, 0, 7), 4), ((0, 0), 4), ((9000, 100, 4000), 1000), ((1,) * 12, 100)]
)
def test_what_processes_packed_is_merged(counts, k, room, kind, largest, device):
    """room: more keys than there are documents."""
    scores = drawn(kind, 3, sum(counts), device)
    indices, width, packed, first = places(scores, 0), max(min(k, n) for n in counts) + room, [], 0
    size = 3 * width + 2 + room
    for rank, count in enumerate(counts):
        own = slice(first, first + count)
        n = min(k, count)
        best = [
            x.to(device).contiguous() for x in wanted(scores[:, own], indices[:, own] - first, n, largest)
        ]
        packed.append(OPS.pack_found(*best, width, size, [count, rank], largest))
        assert packed[-1].shape == (size,) and packed[-1][-2:].tolist() == [count, rank]
        assert not packed[-1][3 * width : size - 2].any()
        first += count
    more = min(width * len(counts), MOST_BEST, k + room)
    *best, notes = OPS.merge_found(torch.stack(packed), 3, width, 2, more, largest)
    assert best[0].shape == best[1].shape == (3, more)
    packed_documents = sum(min(k, n) for n in counts)
    k = min(k, sum(counts))
    same([x[:, :k] for x in best], wanted(scores, indices, k, largest))
    behind = [x[:, packed_documents:] for x in best]
    assert (behind[0] == (-torch.inf if largest else torch.inf)).all() and (behind[1] == -1).all()
    assert notes.tolist() == [[count, rank] for rank, count in enumerate(counts)]


def test_the_last_index_of_all(device):
    scores = torch.tensor([[2.0, 1.0]], device=device)
    packed = [
        OPS.pack_found(scores, places(scores, first).contiguous(), 2, 5, [count], True)
        for first, count in ((0, 1 << 31), ((1 << 31) - 2, 1 << 31))
    ]
    _, indices, _ = OPS.merge_found(torch.stack(packed), 1, 2, 1, 4, True)
    assert indices.tolist() == [[0, 2**32 - 2, 1, 2**32 - 1]]


def test_keys_are_the_same_on_every_device(device):
    scores = torch.tensor([SPECIAL + [2.0**i for i in range(-20, 20)]], device=device)
    indices = places(scores, 0) * 2**26
    for largest in (True, False):
        keys = OPS.pack_found(scores, indices.contiguous(), scores.shape[1], scores.shape[1], [], largest)
        assert torch.equal(keys.cpu(), topk.keys_of(scores.cpu(), indices.cpu(), largest)[0])


@pytest.mark.parametrize("count", [1, 15, 16, 17, 8191, 8192, 100_003])
@pytest.mark.parametrize("offset", [0, 3])
def test_the_checksum(count, offset, device):
    data = torch.randint(
        256, (offset + count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )
    total = int((data[offset:].long() * (torch.arange(count) % 8191 + 1)).sum())
    found = torch.tensor([0, 5], device=device)
    OPS.add_checksum_(found, 1, data.to(device)[offset:], -3)
    assert found.tolist() == [0, 5 - 3 * total]
    OPS.add_checksum_(found, 1, data.to(device)[offset:], 1 << 62)
    assert (found[1].item() - (5 - 3 * total + (total << 62))) % (1 << 64) == 0


def test_the_checksum_of_other_dtypes(device):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(device)
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool):
        one, other = torch.zeros(2, 1, dtype=torch.int64, device=device)
        OPS.add_checksum_(one, 0, x.to(dtype), 1)
        OPS.add_checksum_(other, 0, x.to(dtype).view(torch.uint8), 1)
        assert torch.equal(one, other) and one.item() > 0
    OPS.add_checksum_(one, 0, x[:0], 1)
    assert torch.equal(one, other)


@pytest.mark.parametrize("columns", [300, 1024, 1025, 4096, 30_000])
@pytest.mark.parametrize("k", [1, 10, 600])
def test_documents_that_are_given_many_times(columns, k, device):
    """Equal keys are no more than the k best, however many reach the threshold."""
    k = min(k, columns)
    scores = torch.zeros(2, columns, device=device)
    indices = torch.full((2, columns), 7, device=device)
    scores[1, ::5], indices[1, ::5] = 1.0, 3  # the best of the second row, a fifth of it
    found = OPS.select_best(scores, indices, 0, None, None, k, True)
    best = min(len(range(0, columns, 5)), k)
    assert found[0][0].tolist() == [0.0] * k and found[1][0].tolist() == [7] * k
    assert found[0][1].tolist() == [1.0] * best + [0.0] * (k - best)
    assert found[1][1].tolist() == [3] * best + [7] * (k - best)
