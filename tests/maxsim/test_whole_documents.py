"""Documents of one length, without a mask, that sm90_q reads where they lie: tiles of one width, two tiles of
two widths, and similarities of every sign."""

import pytest
import torch

import late_interaction as li
from tests import ref

pytestmark = pytest.mark.gpu
SECOND = {152: 152, 128: 104, 104: 80, 80: 80}  # of each width, that of the second of two tiles


def lengths(width):
    """Lengths at which the tiles of a document change in number or in width."""
    near = (width + SECOND[width], 2 * width, 3 * width)
    return sorted({width, width + 1, *(n + k for n in near for k in (-1, 0, 1))})


def whole_numbers(low, high, *size):
    return torch.randint(low, high + 1, size, device="cuda").float()


def signed(kind, Ld, d):
    """Small whole numbers, whose products are exact and tie: (Q, D)."""
    Q, D = whole_numbers(-2, 2, 19, 31, d), whole_numbers(-1, 1, 13, Ld, d)
    if kind == "negative":  # all similarities
        Q, D = whole_numbers(1, 2, 19, 31, d), whole_numbers(-2, -1, 13, Ld, d)
    elif kind == "one positive":  # among negative ones, at some token of a document
        Q, D = whole_numbers(1, 2, 19, 31, d), whole_numbers(-2, -1, 13, Ld, d)
        D[torch.arange(12), torch.randint(Ld, (12,), device="cuda")] = 1.0
    elif kind == "zeros":  # of either sign, among negative ones
        Q[:, ::2], Q[3], D[:, ::3], D[2] = 0.0, 2.0, 0.0, -1.0
    return Q, D


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mixed", "negative", "one positive", "zeros"])
@pytest.mark.parametrize(
    ("width", "d"), [(152, 128), (128, 64), (128, 120), (104, 40), (104, 128), (80, 128)]
)
def test_the_first_of_equal_similarities_wins(width, d, kind, dtype, force):
    for Ld in lengths(width):
        Q, D = (x.to(dtype) for x in signed(kind, Ld, d))
        D[:, Ld // 2 :] = D[:, : Ld - Ld // 2].clone()
        scores, winners = ref.maxsim(Q, D)
        assert force(f"rows {width}") == f"rows {width}"
        found, won = li.maxsim_with_winners(Q, D)
        assert torch.equal(found.double(), scores) and torch.equal(won.long(), winners), Ld
        assert torch.equal(li.maxsim(Q, D), found), Ld


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "Ld"), [(152, 170), (128, 230), (104, 180), (80, 150)])
def test_what_is_no_number_wins_or_spoils_its_row(width, Ld, dtype, force):
    Q = torch.randn(17, 33, 128, device="cuda").to(dtype)
    D = torch.randn(11, Ld, 128, device="cuda").to(dtype)
    D[1, Ld - 1, 5], D[2, 3], D[3, Ld // 2, 0] = float("nan"), float("-inf"), float("inf")
    D[4], D[5], Q[6, 7, 9] = float("-inf"), float("nan"), float("nan")
    D[7] = -D[7].abs()
    scores, winners = ref.maxsim(Q, D)
    force(f"rows {width}")
    found, won = li.maxsim_with_winners(Q, D)
    assert torch.equal(found.isnan(), scores.isnan()) and torch.equal(found.isinf(), scores.isinf())
    finite = scores.isfinite()
    ref.assert_close(found[finite], scores[finite], ref.tolerance(dtype))
    settled = ~scores.isfinite().unsqueeze(-1).expand_as(winners)
    assert torch.equal(won[settled].long(), winners[settled])
    assert torch.equal(li.maxsim(Q, D)[finite], found[finite])


def test_many_documents_and_query_rows_have_the_bits_of_few():
    """Persistent blocks, whose rings go round many times: as many calls of a few documents."""
    Q = torch.nn.functional.normalize(torch.randn(700, 32, 128, device="cuda"), dim=-1).bfloat16()
    D = torch.nn.functional.normalize(torch.randn(300, 180, 128, device="cuda"), dim=-1).bfloat16()
    scores, winners = li.maxsim_with_winners(Q, D)
    assert torch.equal(li.maxsim(Q, D), scores)
    for first in range(0, 300, 60):
        part = slice(first, first + 60)
        found, won = li.maxsim_with_winners(Q, D[part])
        assert torch.equal(found, scores[:, part]) and torch.equal(won, winners[:, part])
