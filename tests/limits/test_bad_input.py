"""Every bad argument is a TypeError or ValueError that names it, what came and what is wanted."""

import warnings

import pytest
import torch

import late_interaction as li
from late_interaction.lik.backward import maxsim_backward_lowmem, maxsim_backward_unified
from late_interaction.lik.forward import maxsim_forward
from tests.support.calls import refused
from tests.support.packed import pack_sequences

Q = torch.randn(3, 5, 8)
D = torch.randn(4, 7, 8)
KD = torch.randn(3, 2, 7, 8)
PAIRS = torch.randn(3, 7, 8)
ONES = torch.ones
with warnings.catch_warnings():  # PyTorch says that these are in beta, or on their way out
    warnings.simplefilter("ignore")
    CSR = Q[0].to_sparse_csr()
    NESTED = torch.nested.nested_tensor([Q[0], Q[1, :2]])
    JAGGED = torch.nested.nested_tensor([D[0], D[1, :2]], layout=torch.jagged)
    QUANTIZED = torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8)


def boolean(*shape):
    return torch.ones(*shape, dtype=torch.bool)


# What may come instead of Q and D, the exception, and words that its message must hold.
TOKENS = {
    "Q is a list": ((Q.tolist(), D), TypeError, ["Q", "torch.Tensor", "list", "torch.tensor(Q)"]),
    "D is a numpy array": ((Q, D.numpy()), TypeError, ["D", "torch.Tensor", "torch.from_numpy(D)"]),
    "D is a list of arrays": ((Q, [*D.numpy()]), TypeError, ["D", "list of ndarray", "torch.from_numpy"]),
    "D is None": ((Q, None), TypeError, ["D", "torch.Tensor", "NoneType"]),
    "integers": ((Q.int(), D.int()), TypeError, ["Q", "bfloat16", "torch.int32"]),
    "integers beside a gradient": (
        (Q.long(), D.clone().requires_grad_()), TypeError, ["Q must be bfloat16", "torch.int64"],
    ),
    "complex": ((Q, D.to(torch.complex64)), TypeError, ["D", "bfloat16", "complex64"]),
    "bool": ((Q.bool(), D.bool()), TypeError, ["Q", "torch.bool"]),
    "fp8": ((Q.to(torch.float8_e4m3fn), D), TypeError, ["Q", "float8_e4m3fn"]),
    "fp8 on both sides": (
        (Q.to(torch.float8_e4m3fn), D.to(torch.float8_e4m3fn)), TypeError, ["Q", "float8_e4m3fn"],
    ),
    "dtype mismatch": ((Q, D.bfloat16()), TypeError, ["Q and D", "float32", "bfloat16"]),
    "double and float": ((Q.double(), D), TypeError, ["Q and D", "float64", "float32"]),
    "device mismatch": ((Q, D.to("meta")), ValueError, ["Q and D", "cpu", "meta"]),
    "sparse": ((Q, D.to_sparse()), TypeError, ["D", "dense", "sparse_coo"]),
    "sparse CSR": ((CSR, D), TypeError, ["Q", "dense", "sparse_csr"]),
    "nested": ((NESTED, D), TypeError, ["Q", "nested"]),
    "jagged": ((Q, JAGGED), TypeError, ["D", "nested"]),
    "quantized": ((QUANTIZED, D), TypeError, ["Q", "qint8"]),
    "d mismatch": ((Q, D[..., :7]), ValueError, ["Q and D", "[3, 5, 8]", "[4, 7, 7]"]),
    "d is 0": ((Q[..., :0], D[..., :0]), ValueError, ["at least 1", "[3, 5, 0]"]),
}  # fmt: skip


FUNCTIONS = [li.maxsim, li.maxsim_pairs, li.maxsim_with_winners, li.smooth_maxsim, li.smooth_maxsim_pairs]


@pytest.mark.parametrize("function", [*FUNCTIONS, maxsim_forward, li.search])
@pytest.mark.parametrize("bad", TOKENS)
def test_tokens(bad, function):
    (q, d), error, words = TOKENS[bad]
    refused(error, words, function, q, d)


RANKS = {
    "Q of rank 1": ((Q[0, 0], D), ["Q", "[Nq, Lq, d]", "[8]"]),
    "Q of rank 4": ((Q[None], D), ["Q", "[Nq, Lq, d]", "[1, 3, 5, 8]"]),
    "D of rank 1": ((Q, D[0, 0]), ["D", "[Nq, K, Ld, d]", "[8]"]),
    "D of rank 5": ((Q, KD[None]), ["D", "[Nq, K, Ld, d]", "[1, 3, 2, 7, 8]"]),
    "scalar": ((torch.tensor(1.0), D), ["Q", "[]"]),
    "KD of another batch": ((Q[:2], KD), ["[2, 5, 8]", "[3, 2, 7, 8]"]),
    "KD with one query": ((Q[0], KD), ["[5, 8]", "[3, 2, 7, 8]"]),
}


@pytest.mark.parametrize("bad", RANKS)
def test_ranks(bad):
    tokens, words = RANKS[bad]
    for masks in ((), (boolean(3, 5), boolean(4, 7))):  # which fit no better: the tokens come first
        for function in (li.maxsim, li.smooth_maxsim):
            refused(ValueError, words, function, *tokens, *masks)


@pytest.mark.parametrize("function", [li.maxsim_pairs, li.smooth_maxsim_pairs])
@pytest.mark.parametrize("tokens", [(Q, D), (Q[0], PAIRS[0]), (Q, KD)], ids=["batches", "2-D", "4-D"])
def test_pairs_want_equal_batches(tokens, function):
    with pytest.raises(ValueError, match="maxsim_pairs needs"):
        function(*tokens)


MASKS = {
    "float": ((ONES(3, 5), None), TypeError, ["q_mask", "bool", "float32"]),
    "float d_mask": ((None, ONES(4, 7).half()), TypeError, ["d_mask", "bool", "float16"]),
    "list": ((None, [[True] * 7] * 4), TypeError, ["d_mask", "torch.Tensor", "list"]),
    "too short": ((boolean(3, 4), None), ValueError, ["q_mask", "[3, 5]", "[3, 4]"]),
    "of the other tokens": ((boolean(4, 7), None), ValueError, ["q_mask", "[3, 5]", "[4, 7]"]),
    "needs broadcasting": ((None, boolean(1, 7)), ValueError, ["d_mask", "[4, 7]", "[1, 7]"]),
    "one row for a batch": ((None, boolean(7)), ValueError, ["d_mask", "[4, 7]", "[7]"]),
    "with d": ((None, boolean(4, 7, 8)), ValueError, ["d_mask", "[4, 7]", "[4, 7, 8]"]),
    "KD mask in-batch": ((None, boolean(3, 4, 7)), ValueError, ["d_mask", "[4, 7]", "[3, 4, 7]"]),
    "elsewhere": ((boolean(3, 5).to("meta"), None), ValueError, ["q_mask", "cpu", "meta"]),
    "sparse": ((None, boolean(4, 7).to_sparse()), TypeError, ["d_mask", "dense", "sparse"]),
}


@pytest.mark.parametrize("bad", MASKS)
@pytest.mark.parametrize("function", [li.maxsim, li.smooth_maxsim, li.search])
def test_masks(bad, function):
    (q_mask, d_mask), error, words = MASKS[bad]
    refused(error, words, function, Q, D, q_mask=q_mask, d_mask=d_mask)


def test_masks_of_other_layouts():
    with pytest.raises(ValueError, match=r"d_mask must be \[3, 2, 7\], the shape of D without d"):
        li.maxsim(Q, KD, None, boolean(3, 7))
    with pytest.raises(ValueError, match="d_mask"):
        li.maxsim_pairs(Q, PAIRS, None, boolean(3, 1, 7))


# Each option: its values, others, and functions beside maxsim and maxsim_pairs that have it.
OPTIONS = {
    "winners": (("save", "recompute"), ["keep", "none", "", "Save", 1, True], []),
    "backward": (
        ("auto", "unified", "lowmem"), ["atomic", "csr", "fast", "", "AUTO", 1, True],
        [lambda q, d, **option: li.lik.MaxSimScorer(**option)],
    ),
    "precision": (
        ("highest", "high", "medium"), ["exact", "tf32", "HIGH", 32, torch.float32],
        [li.maxsim_with_winners, li.search],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, x) for name, (_, bad, _) in OPTIONS.items() for x in bad])
def test_unknown_options(name, value):
    choices, _, others = OPTIONS[name]
    for function in (li.maxsim, li.maxsim_pairs, *others):
        for q, d in ((Q, PAIRS), (Q.bfloat16(), PAIRS.bfloat16())):
            with pytest.raises(ValueError) as caught:
                function(q, d, **{name: value})
            assert str(caught.value) == f"{name} must be one of {choices} or None, got {value!r}"


@pytest.mark.parametrize("flag", [1, "yes", None, torch.tensor(True), torch.ones(2)])
def test_flags_are_bools(flag):
    for function in (li.maxsim, li.maxsim_pairs, li.search, li.smooth_maxsim, li.smooth_maxsim_pairs):
        with pytest.raises(TypeError, match="normalize must be True or False"):
            function(Q, PAIRS, normalize=flag)
    for function in (li.maxsim, li.maxsim_pairs):
        with pytest.raises(TypeError, match="mean must be True or False"):
            function(Q, PAIRS, mean=flag)


@pytest.mark.parametrize(
    ("k", "error"), [(0, ValueError), (-3, ValueError), (2.0, TypeError), ("2", TypeError)]
)
def test_k(k, error):
    with pytest.raises(error, match=r"^k must be"):
        li.search(Q, D, k)
    with pytest.raises(error, match="chunk_bytes must be"):
        li.search(Q, D, 1, chunk_bytes=k)


def test_retrieval_takes_no_candidates_of_each_querys_own():
    with pytest.raises(ValueError, match=r"D must be \[Nd, Ld, d\]"):
        li.search(Q, KD, 1)


@pytest.mark.parametrize("token", [True, False, 1.0, "[PAD]", torch.tensor(0)])
def test_the_padding_token_is_an_id(token):
    wanted = "mask_pad_token must be the id of the padding token, an int, or None, got"
    with pytest.raises(TypeError, match=wanted):
        li.lik.MaxSimScorer(mask_pad_token=token)


def test_scorer_ids():
    with pytest.raises(ValueError, match="mask_pad_token"):
        li.lik.MaxSimScorer().forward_with_ids(Q, D, ONES(3, 5).long(), ONES(4, 7).long())
    scorer = li.lik.MaxSimScorer(mask_pad_token=0)
    with pytest.raises(TypeError, match="q_ids must be an integer tensor"):
        scorer.forward_with_ids(Q, D, ONES(3, 5), ONES(4, 7).long())
    with pytest.raises(ValueError, match="d_mask"):
        scorer.forward_with_ids(Q, D, ONES(3, 5).long(), ONES(4, 6).long())


GRAD, ARGMAX = ONES(3, 4), torch.zeros(12, 5, dtype=torch.int32)
BACKWARD = {
    "grad_scores of a wrong shape": ((ONES(4, 3), Q, D, ARGMAX), ValueError, "grad_scores must be"),
    "grad_scores of integers": ((ONES(3, 4).int(), Q, D, ARGMAX), TypeError, "grad_scores must be"),
    "argmax of a wrong shape": ((GRAD, Q, D, ARGMAX.view(3, 4, 5)), ValueError, "argmax must be"),
    "argmax of floats": ((GRAD, Q, D, ARGMAX.float()), TypeError, "argmax must be"),
    "argmax missing": ((GRAD, Q, D, None), TypeError, "argmax must be"),
    "argmax elsewhere": ((GRAD, Q, D, ARGMAX.to("meta")), ValueError, "on the device of Q"),
    "2-D Q": ((GRAD, Q[0], D, ARGMAX), ValueError, "Q and D must be"),
    "q_mask": ((GRAD, Q, D, ARGMAX, boolean(3, 4)), ValueError, "q_mask must be"),
    "dtypes": ((GRAD, Q, D.half(), ARGMAX), TypeError, "share a dtype"),
}


@pytest.mark.parametrize("function", [maxsim_backward_lowmem, maxsim_backward_unified])
@pytest.mark.parametrize("bad", BACKWARD)
def test_backward_functions(bad, function):
    args, error, words = BACKWARD[bad]
    with pytest.raises(error, match=words):
        function(*args)


@pytest.mark.gpu
def test_mixed_devices():
    q, d = Q.cuda(), D.cuda()
    for call in (lambda: li.maxsim(q, D), lambda: li.maxsim(Q, d), lambda: li.search(Q, d, 1)):
        with pytest.raises(ValueError, match="on the same device"):
            call()
    with pytest.raises(ValueError, match="q_mask must be on the device of Q, cuda:0, got cpu"):
        li.maxsim(q, d, boolean(3, 5))
    with pytest.raises(ValueError, match="d_mask must be on the device of D"):
        li.search(q, D, 1, d_mask=boolean(4, 7).cuda())


def test_arrays_and_lists_are_told_the_way_in():
    """Whichever argument is one, and whichever function it is given to."""
    q, d, cu = Q.flatten(0, 1), D.flatten(0, 1), torch.tensor([0, 5, 10, 15])
    calls = {
        r"Q_packed .* torch.from_numpy\(Q_packed\)": lambda: li.lik.maxsim_varlen(q.numpy(), d, cu, cu),
        r"Q_packed .*Tokens.from_list": lambda: li.lik.maxsim_varlen([*Q], d, cu, cu),
        r"cu_seqlens_q .* torch.tensor\(cu_seqlens_q\)": lambda: li.lik.maxsim_varlen(q, d, cu.tolist(), cu),
        r"q_mask .* torch.from_numpy\(q_mask\)": lambda: li.maxsim(Q, D, q_mask=boolean(3, 5).numpy()),
        r"q_weights .* torch.from_numpy\(q_weights\)": lambda: li.xtr_scores(
            Q, D, 2, q_weights=Q[..., 0].numpy()
        ),
        r"documents .* torch.nn.utils.rnn.pad_sequence": lambda: li.lik.maxsim_padded(
            Q, [*KD], cu[1:], cu[1:]
        ),
        r"sequences\[0\] .* torch.from_numpy": lambda: pack_sequences([Q[0].numpy()]),
        r"D .* torch.from_numpy\(D\)": lambda: li.losses.contrastive(Q, D.numpy(), temperature=1.0),
        r"labels .* torch.tensor\(labels\)": lambda: li.losses.contrastive(
            Q, D, temperature=1.0, labels=[0, 1, 2]
        ),
        r"teacher .* torch.from_numpy": lambda: li.losses.margin_mse(Q, KD, ONES(3, 2).numpy()),
        r"Q .* torch.from_numpy\(Q\)": lambda: li.smooth_maxsim(Q.numpy(), D),
    }
    for words, call in calls.items():
        with pytest.raises(TypeError, match=words):
            call()


def test_after_an_error_the_next_call_works():
    expected = li.maxsim(Q, D)
    with pytest.raises(ValueError):
        li.maxsim(Q, D[..., :3])
    assert torch.equal(li.maxsim(Q, D), expected)
