"""Arguments at the edge of what is accepted, on both sides of it, and the exact words on what is wrong."""

import re

import pytest
import torch
from torch.autograd import forward_ad

import late_interaction as li
from late_interaction import int8
from late_interaction.score_pairs import score_pairs_packed

TOKENS = torch.ones(9, 4)


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def refused(error, words):
    return pytest.raises(error, match=f"^{re.escape(words)}$")


@pytest.mark.parametrize("d", [3, 5])
def test_a_shorter_and_a_longer_d_are_refused(d):
    Q, D = torch.ones(2, 3, 4), torch.ones(2, 3, d)
    with pytest.raises(ValueError, match="must share the embedding dim d"):
        li.maxsim(Q, D)
    with pytest.raises(ValueError, match="must share the embedding dim d"):
        li.maxsim_pairs(Q, D)
    with pytest.raises(ValueError, match="must share the embedding dim d"):
        li.retrieve(Q, D, 1)
    with pytest.raises(ValueError, match="must share an embedding dim d"):
        li.maxsim_varlen(Q[0], D[0], integers(0, 3), integers(0, 3))


@pytest.mark.parametrize("most", [2**30, 2**30 + 1])
def test_packed_tokens_are_at_most_2_to_the_30(most):
    Q, D = torch.empty(5, 4, device="meta"), torch.empty(most, 4, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    if most == 2**30:
        assert li.maxsim_varlen(Q, D, cu, cu).shape == (2, 2)
    else:
        with refused(ValueError, f"D_packed must have at most 2**30 tokens, got [{most}, 4]"):
            li.maxsim_varlen(Q, D, cu, cu)


def test_offsets_hold_one_entry_at_least():
    none = integers()
    with refused(ValueError, "cu_seqlens_q must be [sequences + 1], got [0]"):
        li.maxsim_varlen(TOKENS, TOKENS, none, integers(0, 9))
    assert li.maxsim_varlen(TOKENS, TOKENS, integers(0), integers(0, 9)).shape == (0, 1)


def test_of_wrong_offsets_the_ones_that_fall_are_named_and_not_those_that_stay():
    wrong = integers(0, 5, 5, 3, 9)
    with refused(
        ValueError,
        "cu_seqlens_d must never fall and lie within [0, 9], got int32 [5] with cu_seqlens_d[3] = 3 after 5",
    ):
        li.maxsim_varlen(TOKENS, TOKENS, integers(0, 9), wrong)


@pytest.mark.parametrize("wrong", [4, 5])
def test_the_first_four_wrong_entries_are_named(wrong):
    indices = integers(*[0] * 3, *[7] * wrong)
    named = ", ".join(f"pair_d_idx[{3 + i}] = 7" for i in range(4))
    more = " and 1 more" if wrong == 5 else ""
    with refused(ValueError, f"pair_d_idx must lie in [0, 2), got int32 [{3 + wrong}] with {named}{more}"):
        score_pairs_packed(
            TOKENS, TOKENS, integers(0, 9), integers(0, 4, 9), torch.zeros_like(indices), indices
        )


def test_quantized_tokens_refuse_tangents():
    codes, scale = int8.quantize_int8_per_token(torch.rand(2, 3, 4))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(scale, torch.ones_like(scale))
        with pytest.raises(ValueError, match="scale_Q wants a gradient"):
            int8.maxsim_inference_int8(codes, codes, scale_Q=dual, scale_D=scale)
