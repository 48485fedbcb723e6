"""Bad arguments of functions on packed, padded and compressed tokens and on hidden states are a TypeError or
ValueError that names the argument, what came and what is wanted.

Whatever is none of its kind replaces every tensor of a call; what is particular to a function follows.
"""

import pytest
import torch

import late_interaction as li
from late_interaction.fused_head import maxsim_from_hidden
from late_interaction.lik.padded import pack_padded
from late_interaction.lik.plaid import maxsim_residual, maxsim_residual_varlen, plaid_approx_score
from late_interaction.lik.varlen import maxsim_varlen
from late_interaction.score_pairs import rerank_direct, score_pairs_packed
from tests.support import packed
from tests.support.calls import refused

# What makes a bad argument of a good one, the exception, and words of its message: {wanted} is how the
# message writes the shape, {like} the shape of the good argument, {most} the largest number in it.
TENSOR = {
    "a list": (lambda x: x.tolist(), TypeError, ["{name} must be a torch.Tensor", "list"]),
    "elsewhere": (lambda x: x.to("meta"), ValueError, ["{name}", "cpu", "meta"]),
}
NO_FLOATS = {"integers": (lambda x: x.int(), TypeError, ["{name} must be bfloat16", "int32"])}
ONE_MORE = {"a dim more": (lambda x: x[None], ValueError, ["{name}", "{wanted}", "{shape}"])}
ONE_LESS = {"a dim less": (lambda x: x[0], ValueError, ["{name}", "{wanted}", "{shape}"])}
FEWER = {"fewer": (lambda x: x[:-1], ValueError, ["{name}", "{like}", "{shape}"])}
CUT = {"cut": (lambda x: x[..., :-1], ValueError, ["{name}", "{wanted}", "{shape}"])}
EMPTY = {"empty": (lambda x: x[:0], ValueError, ["{name}", "{wanted}", "{shape}"])}
ANY_RANK = TENSOR | NO_FLOATS
QUERIES = ANY_RANK | ONE_MORE
TOKENS = QUERIES | ONE_LESS
TABLE = TOKENS | CUT | EMPTY
WEIGHTS = TOKENS | CUT | FEWER | {"bools": (lambda x: x > 0, TypeError, ["{name} must be bfloat16", "bool"])}
FLOATS = {"floats": (lambda x: x.float(), TypeError, ["{name} must be a dense tensor of int", "float32"])}
INTEGERS = TENSOR | FLOATS | ONE_MORE | ONE_LESS
BYTES = INTEGERS | FEWER | {
    "cut": (lambda x: x[..., :-1], ValueError, ["{name}", "{like}", "{shape}"]),
    "wide": (lambda x: x.short(), TypeError, ["{name} must be uint8", "int16"]),
}  # fmt: skip
LIST = INTEGERS | {"fewer": (lambda x: x[:-1], ValueError, ["{name}", "equally long", "{like}", "{shape}"])}
INDICES = LIST | {
    "beyond": (lambda x: x + 1, ValueError, ["{name} must lie in [0, {more})", "] = {more}"]),
    "below": (lambda x: x - 1, ValueError, ["{name} must lie in [0, {more})", "] = -1"]),
}
LENGTHS = INTEGERS | FEWER | {
    "too long": (lambda x: x + 1, ValueError, ["{name} must all be >= 0 and <= {most}", "] = {more}"]),
    "negative": (lambda x: 0 * x - 1, ValueError, ["{name} must all be >= 0 and <= {most}", "0] = -1"]),
}  # fmt: skip
RISE = "{name} must not decrease and lie within [0, {most}]"
OFFSETS = INTEGERS | EMPTY | {
    "fall": (lambda x: x.flip(0), ValueError, [RISE, "[1] = ", " after {most}"]),
    "beyond": (lambda x: x + 1, ValueError, [RISE, "] = {more}"]),
    "below": (lambda x: x - 1, ValueError, [RISE, "{name}[0] = -1"]),
}  # fmt: skip

Q, CU_Q = packed.pack([3, 5], 8, torch.float32)
D, CU_D = packed.pack([7, 4], 8, torch.float32)
INDEX = torch.tensor([0, 1, 1])
PACKED = {
    "Q_packed": (Q, TOKENS, "[tokens, d]"), "D_packed": (D, TOKENS, "[tokens, d]"),
    "cu_seqlens_q": (CU_Q, OFFSETS, "[sequences + 1]"), "cu_seqlens_d": (CU_D, OFFSETS, "[sequences + 1]"),
}  # fmt: skip
OWN, LQ, LD = torch.randn(2, 3, 5, 8), torch.tensor([4, 2]), torch.tensor([[5, 0, 1]] * 2)
PADDED = {
    "queries": (torch.randn(2, 4, 8), TOKENS, "[B, Lq, d]"), "documents": (OWN, TOKENS, "[B, C, Ld, d]"),
    "query_lengths": (LQ, LENGTHS, "[B]"), "doc_lengths": (LD, LENGTHS, "[B, C]"),
}  # fmt: skip
CODES, BYTE = torch.randint(9, (3, 7)), torch.randint(256, (3, 7, 4)).to(torch.uint8)
CENTROIDS, STATES = torch.randn(9, 16), torch.randn(4, 5, 6)
CODEBOOK = {
    "centroids": (CENTROIDS, TABLE, "[n, 16]"), "bucket_weights": (torch.randn(4), TABLE, "[4]"), "nbits": 2,
}  # fmt: skip
QUERY = {"Q": (torch.randn(2, 5, 16), QUERIES, "[Nq, Lq, d]")}
# Functions and their good arguments: tensors with the kind that they are of and {wanted}.
GOOD = {
    maxsim_varlen: PACKED,
    score_pairs_packed: PACKED | dict.fromkeys(("pair_q_idx", "pair_d_idx"), (INDEX, INDICES, "[pairs]")),
    rerank_direct: {
        "Q": (Q, TOKENS, "[tokens, d]"), "batch_tensor": (D, TOKENS, "[tokens, d]"),
        "doc_offsets": (INDEX, LIST, "[documents]"), "doc_lengths": (INDEX, LIST, "[documents]"),
    },
    li.lik.maxsim_padded: PADDED,
    pack_padded: PADDED,
    maxsim_residual: QUERY | CODEBOOK | {
        "codes": (CODES, INTEGERS, "[Nd, Ld]"), "residuals": (BYTE, BYTES, "[Nd, Ld, bytes]"),
        "doc_lengths": (torch.tensor([7, 0, 3]), LENGTHS, "[Nd]"),
    },
    maxsim_residual_varlen: QUERY | CODEBOOK | {
        "codes_flat": (CODES.flatten(), INTEGERS, "[tokens]"),
        "residuals_flat": (BYTE.flatten(0, 1), BYTES, "[tokens, bytes]"),
        "cu_seqlens_d": (torch.tensor([0, 7, 7, 21]), OFFSETS, "[Nd + 1]"),
    },
    plaid_approx_score: {
        "query_centroid_scores": (torch.randn(9, 5), TOKENS | EMPTY, "[n_centroids, Lq]"),
        "codes": (CODES, INTEGERS, "[B, Ld]"), "doc_lengths": (torch.tensor([7, 0, 3]), LENGTHS, "[B]"),
    },
    maxsim_from_hidden: {
        "Q": (torch.randn(2, 3, 8), QUERIES, "[Nq, Lq, d]"), "H_d": (STATES, TOKENS, "[Nd, Ld, d_model]"),
        "W": (torch.randn(8, 6), TABLE, "[d, d_model] with d_model = 6"),
        "b": (torch.randn(8), TABLE, "[d] with d = 8"),
    },
    li.xtr_scores: {
        "Q": (torch.randn(2, 3, 8), QUERIES, "[Nq, Lq, d]"), "D": (torch.randn(4, 5, 8), ANY_RANK, ""),
        "k": 3, "q_weights": (torch.rand(2, 3), WEIGHTS, "[2, 3]"),
    },
}  # fmt: skip


def tensor_of(argument):
    return argument[0] if isinstance(argument, tuple) else argument


def good(function):
    return {name: tensor_of(argument) for name, argument in GOOD[function].items()}


def of_kinds():
    for function, arguments in GOOD.items():
        for name, argument in arguments.items():
            if not isinstance(argument, tuple):
                continue
            x, kind, wanted = argument
            most = int(x.max())
            said = {"name": name, "wanted": wanted, "like": [*x.shape], "most": most, "more": most + 1}
            for what, (change, error, words) in kind.items():
                bad = change(x)
                words = [word.format(**said, shape=[*getattr(bad, "shape", ())]) for word in words]
                yield pytest.param(
                    function, {name: bad}, error, words, id=f"{function.__name__}-{name}-{what}"
                )


@pytest.mark.parametrize(("function", "bad", "error", "words"), list(of_kinds()))
def test_what_is_none_of_a_kind(function, bad, error, words):
    function(**good(function))
    refused(error, words, function, **good(function) | bad)


@pytest.mark.parametrize(("function", "first", "second"), [
    (maxsim_varlen, "Q_packed", "D_packed"), (score_pairs_packed, "Q_packed", "D_packed"),
    (rerank_direct, "Q", "batch_tensor"), (li.lik.maxsim_padded, "queries", "documents"),
    (pack_padded, "queries", "documents"), (li.xtr_scores, "Q", "D"),
])  # fmt: skip
def test_tokens_that_do_not_meet(function, first, second):
    given = good(function)
    x, y, both = given[first], given[second], f"{first} and {second} must "
    shapes = [str([*x.shape]), str([*y.shape[:-1], 7])]
    for bad, error, words in (
        ({second: y.half()}, TypeError, ["share a dtype", "float32", "float16"]),
        ({second: y.to("meta")}, ValueError, ["cpu", "meta"]),
        ({second: y[..., :7]}, ValueError, ["embedding dim d", *shapes]),
        ({first: x[..., :0], second: y[..., :0]}, ValueError, ["at least 1", str([*x.shape[:-1], 0])]),
    ):
        refused(error, [both, *words], function, **given | bad)


OF_PACKED, OF_PADDED = (maxsim_varlen, score_pairs_packed), (li.lik.maxsim_padded, pack_padded)
OF_RESIDUAL, OF_PAIRS = (maxsim_residual, maxsim_residual_varlen), (score_pairs_packed, rerank_direct)
HIDDEN, XTR = [maxsim_from_hidden], [li.xtr_scores]
BAD = [
    (OF_PACKED, {"max_seqlen_q": 4}, ValueError, ["max_seqlen_q must be at least 5", "got 4"]),
    (OF_PACKED, {"max_seqlen_d": 6}, ValueError, ["max_seqlen_d must be at least 7", "got 6"]),
    (OF_PACKED, {"max_seqlen_d": 9.5}, TypeError, ["max_seqlen_d must be an int", "float"]),
    (OF_PACKED, {"max_seqlen_q": INDEX[0]}, TypeError, ["max_seqlen_q must be an int", "Tensor"]),
    (OF_PAIRS, {"precision": "exact"}, ValueError, ["precision", "highest", "exact"]),
    (OF_PAIRS[1:], {"doc_offsets": INDEX + 10}, ValueError, ["doc_offsets and doc_lengths", "11 tokens"]),
    (OF_PAIRS[1:], {"doc_offsets": INDEX - 1}, ValueError, ["doc_offsets", "11 tokens", "-1"]),
    (OF_PAIRS[1:], {"doc_lengths": INDEX - 1}, ValueError, ["doc_lengths", "-1"]),
    (OF_PAIRS[1:], {"max_seqlen_d": 0}, ValueError, ["max_seqlen_d must be at least 1", "got 0"]),
    (OF_PAIRS[1:], {"Q": Q.clone().requires_grad_()}, ValueError, ["no gradients", "score_pairs_packed"]),
    (OF_PADDED, {"queries": OWN}, ValueError, ["[B, Lq, d]", "[2, 3, 5, 8]"]),
    (OF_PADDED, {"documents": OWN[:1]}, ValueError, ["[B, Lq, d]", "[1, 3, 5, 8]"]),
    (OF_PADDED, {"queries": OWN[:1, 0], "query_lengths": LQ[:1]}, ValueError, ["[1, 5, 8]", "[2, 3, 5, 8]"]),
    (OF_PADDED, {"validate": True}, ValueError, ["doc_lengths", "> 0 and <= 5", "0"]),
    (OF_PADDED, {"validate": 1}, TypeError, ["validate", "True or False"]),
    (OF_RESIDUAL, {"Q": torch.ones(2, 5, 0)}, ValueError, ["Q must be [..., d]", "[2, 5, 0]"]),
    (OF_RESIDUAL, {"nbits": 3}, ValueError, ["nbits must be 1, 2, 4 or 8", "3"]),
    (OF_RESIDUAL, {"nbits": 2.0}, TypeError, ["nbits must be an int", "float"]),
    (OF_RESIDUAL, {"nbits": True}, TypeError, ["nbits must be an int", "bool"]),
    (OF_RESIDUAL, {"nbits": 4}, ValueError, ["residuals", "nbits = 4", "8]", "4]"]),
    (OF_RESIDUAL, {"bucket_weights": torch.ones(8)}, ValueError, ["bucket_weights must be [4]", "[8]"]),
    (OF_RESIDUAL, {"normalize": 1}, TypeError, ["normalize must be True or False"]),
    (OF_RESIDUAL[1:], {"max_seqlen_d": 2.5}, TypeError, ["max_seqlen_d must be an int or None", "float"]),
    (HIDDEN, {"Q": torch.ones(2, 3, 7)}, ValueError, ["Q and W must be of the same d, got Q ["]),
    (HIDDEN, {"W": torch.ones(6, 8)}, ValueError, ["W must be [d, d_model] with d_model = 6"]),
    (HIDDEN, {"d_mask": torch.ones(4, 3).bool()}, ValueError, ["d_mask must be [4, 5], the shape of H_d"]),
    (HIDDEN, {"q_mask": torch.ones(2, 4)}, TypeError, ["q_mask must be a dense bool"]),
    (HIDDEN, {"Q": torch.ones(2, 3, 8).double()}, TypeError,
     ["share a dtype, or mix float32 with one half precision, got"]),
    (HIDDEN, {"Q": torch.ones(2, 3, 8).half(), "H_d": STATES.bfloat16()}, TypeError,
     ["got torch.bfloat16, torch.float16, torch.float32"]),
    (HIDDEN, {"normalize": 1}, TypeError, ["normalize must be True or False"]),
    (HIDDEN, {"project_Q": None}, TypeError, ["project_Q must be True or False"]),
    (HIDDEN, {"project_Q": True}, ValueError, ["the same d_model"]),
    (HIDDEN + XTR, {"precision": "tf32"}, ValueError, ["precision must be one of"]),
    (XTR, {"k": 0}, ValueError, ["k must be at least 1"]),
    (XTR, {"k": True}, TypeError, ["k must be an int"]),
    (XTR, {"k": 2.0}, TypeError, ["k must be an int"]),
    (XTR, {"rule": "colbert"}, ValueError, ["rule must be one of"]),
    (XTR, {"d_mask": torch.ones(4, 6).bool()}, ValueError, ["d_mask must be"]),
    (XTR, {"q_mask": torch.ones(2, 3)}, TypeError, ["q_mask must be a dense bool"]),
    (XTR, {"q_weights": torch.ones(2, 4)}, ValueError, ["q_weights must be"]),
    (XTR, {"backward": "fast"}, ValueError, ["backward must be one of"]),
]  # fmt: skip


@pytest.mark.parametrize(("functions", "bad", "error", "words"), BAD)
def test_what_is_particular_to_a_function(functions, bad, error, words):
    for function in functions:
        refused(error, words, function, **good(function) | bad)


SEQUENCES = [
    (Q, TypeError, ["sequences", "list", "Tensor"]),
    ([], TypeError, ["sequences", "at least one"]),
    ([Q, Q[None]], ValueError, ["sequences[1]", "[L, 8]", "[1, 8, 8]"]),
    ([Q, Q[:, :7]], ValueError, ["sequences[1]", "[L, 8]", "[8, 7]"]),
    ([Q, Q.half()], TypeError, ["sequences[1]", "float32", "float16"]),
    ([Q, Q.to("meta")], ValueError, ["sequences[1]", "cpu", "meta"]),
]


@pytest.mark.parametrize(("sequences", "error", "words"), SEQUENCES)
def test_sequences(sequences, error, words):
    refused(error, words, packed.pack_sequences, sequences)
