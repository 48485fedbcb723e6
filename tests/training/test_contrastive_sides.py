"""One side of the contrastive loss's batch by itself: packed sequences, parts and blocks of them."""

from itertools import accumulate

import pytest
import torch

from late_interaction._contrastive.tokens import Tokens, even_blocks, pack_kept


def packed(lengths, first=0):
    bounds = tuple(accumulate(lengths, initial=first))
    return Tokens(torch.arange(2.0 * bounds[-1]).view(-1, 2), None, torch.tensor(bounds).int(), bounds)


@pytest.mark.parametrize("lengths, longest", [([], 0), ([0], 0), ([2, 0, 3, 1], 3)])
def test_the_longest_of_packed_sequences(lengths, longest):
    assert packed(lengths).longest == longest


@pytest.mark.parametrize(
    "x", [packed([2, 1, 3]), Tokens(torch.randn(3, 2, 2), None)], ids=["packed", "padded"]
)
def test_the_part_that_is_all_of_it(x):
    assert x.part((0, 3)) is x
    for block in ((1, 3), (0, 2)):
        assert len(x.part(block)) == 2 and x.part(block) is not x


def test_a_part_of_packed_sequences_begins_at_0_again():
    x = packed([2, 1, 3, 4], first=5)
    part = x.part((1, 3))
    assert part.bounds == (0, 1, 4) and part.offsets.tolist() == [0, 1, 4]
    assert torch.equal(part.values, x.values[7:11]) and part.longest == 3


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("lengths", [[0, 1, 1, 0, 1, 0, 0, 0, 1], [0, 0, 1], [1], []])
def test_blocks_of_packed_sequences_with_less_than_a_token_each(lengths, most):
    """A block has a token, and up to four times as many sequences as one of mean length."""
    found = packed(lengths).blocks(most)
    assert [i for a, b in found for i in range(a, b)] == list(range(len(lengths)))
    assert all(a < b for a, b in found)
    limit = max(1, most * sum(lengths) / max(len(lengths), 1))
    for a, b in found:
        assert sum(lengths[a:b]) <= limit and b - a <= 4 * most
        assert b == len(lengths) or b - a == 4 * most or sum(lengths[a : b + 1]) > limit


@pytest.mark.parametrize(("n", "most", "size"), [(126, 100, 63), (130, 100, 96), (190, 120, 96)])
def test_blocks_of_about_equal_size_are_whole_tiles(n, most, size):
    found = even_blocks(n, most)
    assert found == [(0, size), (size, n)]


def test_tokens_that_nothing_masks_are_packed_already():
    x = packed([2, 1])
    assert pack_kept(x) is x
    x = Tokens(torch.randn(3, 2, 2), None)
    assert pack_kept(x) is x
