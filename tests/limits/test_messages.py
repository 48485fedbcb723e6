"""What a message says of a wrong argument stays short, however large the argument is."""

import inspect

import pytest
import torch

import late_interaction as li
from late_interaction import Codes, codecs, reference, score_pairs
from late_interaction.lik import fp8
from late_interaction.lik.padded import pack_padded
from tests.support import public_calls
from tests.support.packed import pack_sequences

LONGEST = 600  # characters: some messages name three arguments with their shapes
MANY = 20_000


class Wordy:
    def __repr__(self):
        return "wordy" * MANY


HUGE = {
    "list": list(range(MANY)),
    "nested list": [[[[list(range(9))] * 9] * 9] * 9] * 9,
    "string": "x" * MANY,
    "object": Wordy(),
    "indices": torch.arange(MANY),
    "falling indices": torch.arange(MANY, 0, -1, dtype=torch.int32),
    "negative indices": -torch.arange(MANY),
    "many lengths": torch.full((3, MANY), 99),
    "floats": torch.rand(MANY),
    "tokens": torch.rand(MANY, 8),
}

Q, D, KD = torch.rand(3, 5, 8), torch.rand(3, 7, 8), torch.rand(3, 2, 7, 8)
TOKENS, CU = torch.rand(20, 8), torch.tensor([0, 5, 9, 20])
OFFSETS, CODES = {"cu_seqlens_q": CU, "cu_seqlens_d": CU}, codecs.Int8().encode(Q)
FP8, FP8_SCALE = fp8.quantize_fp8_per_token(Q)


def calls():
    """{function: its arguments by name}."""
    found = {}
    for function, args in public_calls.CALLS.values():
        named = inspect.signature(function).bind(*args).arguments | getattr(function, "keywords", {})
        function = getattr(function, "func", function)
        if function.__module__.startswith("late_interaction"):
            found.setdefault(function, named)
    return found | {
        pack_padded: found[li.lik.maxsim_padded],
        pack_sequences: {"sequences": [Q[0], D[0]]},
        li.search: {"Q": Q, "D": D, "k": 2},
        li.TopK: {"Q": Q, "k": 2},
        li.lik.MaxSimScorer: {},
        li.explain_plan: {"Q": (3, 5, 8), "D": (3, 7, 8)},
        Codes: {"codec": CODES.codec, "values": CODES.values, "scales": CODES.scales},
        fp8.maxsim_inference_fp8: {"Q": FP8, "D": FP8, "scale_Q": FP8_SCALE, "scale_D": FP8_SCALE},
        CODES.codec.encode: {"tokens": Q},
        CODES.codec.decode: {"codes": CODES},
        reference.maxsim_reference_varlen: {"Q": TOKENS, "D": TOKENS, **OFFSETS},
        reference.maxsim_reference_scatter: found[score_pairs.score_pairs_packed],
    }


CALLS = calls()


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_no_message_grows_with_the_argument(function):
    function(**CALLS[function])
    refused = 0
    for name in inspect.signature(function).parameters:
        for kind, huge in HUGE.items():
            try:
                function(**{**CALLS[function], name: huge})
            except Exception as error:
                refused += 1
                assert len(str(error)) < LONGEST, f"{name} = {kind}: {str(error)[: 2 * LONGEST]}"
    assert refused


def offsets(total, *changes):
    cu = torch.arange(total + 1)
    for place, value in changes:
        cu[place] = value
    return cu


BAD_OFFSETS = {
    "beyond": (
        [(-1, MANY + 5)],
        f"int64 [{MANY + 1}] with cu_seqlens_q[{MANY}] = {MANY + 5} after {MANY - 1}",
    ),
    "below": ([(0, -7)], "cu_seqlens_q[0] = -7"),
    "falls": ([(9, 3)], "cu_seqlens_q[9] = 3 after 8"),
    "many": ([(slice(2, 12), -1)], " and 6 more"),
    # Subtracted, as int64, these would not seem to fall.
    "wraps": (
        [(3, 2**63 - 1), (4, -(2**63)), (5, -1)],
        f"cu_seqlens_q[3] = {2**63 - 1} after 2, cu_seqlens_q[4] = {-(2**63)} after {2**63 - 1},",
    ),
}


@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets_are_named_with_their_places(what):
    changes, words = BAD_OFFSETS[what]
    Q = torch.rand(MANY, 2)
    cu = offsets(MANY, *changes)
    for function in (li.lik.maxsim_varlen, reference.maxsim_reference_varlen):
        with pytest.raises(ValueError) as caught:
            function(Q, Q, cu, torch.tensor([0, MANY]))
        said = str(caught.value)
        assert said.startswith(
            f"cu_seqlens_q must not decrease and lie within [0, {MANY}], got int64 [{MANY + 1}]"
        )
        assert words in said and len(said) < 300


def test_bad_indices_are_named_as_they_came():
    index = torch.zeros(MANY, dtype=torch.int64)
    index[4], index[5], index[70] = -(2**40), 2, 3
    with pytest.raises(ValueError) as caught:
        score_pairs.score_pairs_packed(TOKENS, TOKENS, CU, CU, index, torch.zeros_like(index))
    assert str(caught.value) == (
        f"pair_q_idx must lie in [0, 3), got int64 [{MANY}]"
        f" with pair_q_idx[4] = {-(2**40)}, pair_q_idx[70] = 3"
    )


def test_bad_lengths_are_named_with_both_indices():
    lengths = torch.ones(3, 2, dtype=torch.int64)
    lengths[1, 0], lengths[2, 1] = 8, -1
    arguments = (Q, KD, torch.tensor([5, 1, 2]), lengths)
    for function in (li.lik.maxsim_padded, pack_padded):
        with pytest.raises(ValueError) as caught:
            function(*arguments)
        assert str(caught.value) == (
            "doc_lengths must all be >= 0 and <= 7,"
            " got int64 [3, 2] with doc_lengths[1, 0] = 8, doc_lengths[2, 1] = -1"
        )
    lengths[1, 0], lengths[2, 1] = 7, 0
    li.lik.maxsim_padded(*arguments)
    with pytest.raises(ValueError, match=r"> 0 and <= 7, got int64 \[3, 2\] with doc_lengths\[2, 1\] = 0$"):
        li.lik.maxsim_padded(*arguments, validate=True)


@pytest.mark.gpu
def test_lengths_that_had_to_be_waited_for_are_named_too():
    lengths = torch.full((3, 2), 8, device="cuda")
    query_lengths = torch.tensor([5, 1, 2], device="cuda")
    with pytest.raises(ValueError, match=r"doc_lengths\[0, 0\] = 8, .* and 2 more$"):
        pack_padded(Q.cuda(), KD.cuda(), query_lengths, lengths)
