"""Winners as the operators keep them, 16 bits without a sign, and as users see them: int32 with -1."""

import pytest
import torch

import late_interaction as li
from late_interaction.ops.winners import MAX_NARROW_LD, narrow, widen, winner_dtype

LENGTHS = [1, 2, 32767, 32768, 32769, 40000, 65533, 65534, 65535, 70000]


@pytest.mark.parametrize("Ld", LENGTHS)
def test_every_index_and_the_sentinel_come_back(Ld):
    around = {0, 1, 32766, 32767, 32768, 65533, 65534, Ld - 2, Ld - 1}
    winners = torch.tensor([-1, *sorted(i for i in around if 0 <= i < Ld)], dtype=torch.int32)
    kept = narrow(winners, Ld)
    assert kept.dtype == winner_dtype(Ld) == (torch.int16 if Ld <= 65534 else torch.int32)
    assert torch.equal(widen(kept, Ld), winners)


def test_no_index_is_the_sentinel():
    """65,534 tokens have the indices up to 65,533: neither of the two that are left is one of them."""
    every = torch.arange(MAX_NARROW_LD)
    kept = narrow(every, MAX_NARROW_LD)
    assert kept.dtype == torch.int16 and (kept != -1).all()
    assert torch.equal(widen(kept, MAX_NARROW_LD), every.int())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("Ld", [5, 40000, 70000])
def test_what_is_no_token_of_the_document_becomes_the_sentinel(Ld, dtype):
    argmax = torch.tensor([-3, -1, 0, Ld - 1, Ld, Ld + 70000], dtype=dtype)
    assert widen(narrow(argmax, Ld), Ld).tolist() == [-1, -1, 0, Ld - 1, -1, -1]


@pytest.mark.parametrize("Ld", [32769, 65534, 65535])
def test_masked_tokens_of_long_documents_have_no_winner(device, Ld):
    """The first document's last token wins; the second query token and document are masked."""
    Q = torch.ones(1, 2, 1, device=device)
    D = torch.zeros(2, Ld, 1, device=device)
    D[:, -1] = 1
    q_mask = torch.tensor([[True, False]], device=device)
    d_mask = torch.tensor([True, False], device=device).unsqueeze(1).expand(2, Ld)
    _, winners = li.maxsim_with_winners(Q, D, q_mask, d_mask)
    assert winners.tolist() == [[[Ld - 1, -1], [-1, -1]]]
