"""What each option is where the caller says nothing, as the documentation has it."""

import inspect
from functools import partial
from tempfile import TemporaryDirectory

import pytest
import torch
from torch.utils import _pytree as pytree

import late_interaction as li
from late_interaction import codecs, corpus
from late_interaction.alignment import Alignment
from late_interaction.alignment.plot import plot_alignment
from late_interaction.fused_head import maxsim_from_hidden
from late_interaction.lik.forward import maxsim_forward
from late_interaction.lik.padded import pack_padded
from late_interaction.score_pairs import score_pairs_packed

GENERATOR = torch.Generator().manual_seed(0)
Q, D = torch.randn(3, 4, 8, generator=GENERATOR), torch.randn(20, 5, 8, generator=GENERATOR) * 2
OWN, CU = D.view(5, 4, 5, 8)[:3], torch.tensor([0, 3, 4, 12])
LENGTHS = torch.tensor([4, 1, 2]), torch.randint(1, 6, (3, 4), generator=GENERATOR)
PACKED = Q.flatten(0, 1), D.flatten(0, 1), CU, torch.arange(0, 101, 5)
PAIRS = torch.tensor([0, 2, 1]), torch.tensor([7, 0, 19])
H, W = torch.randn(3, 5, 6, generator=GENERATOR), torch.randn(8, 6, generator=GENERATOR)
TEACHER = torch.randn(3, 4, generator=GENERATOR)
CODES = codecs.Residual.train(D.flatten(0, 1), 4).encode(D)
BITS = codecs.Bits(1).encode(D)
SEARCH = {"largest": True, "progress": False, "keep_empty": False}
LOSS = {"temperature": 1.0, "normalize": False, "reduction": "mean", "scale_by_world": False}
SEVERAL = {"multi_positive": "mean"}
TAUGHT = {"normalize": False, "reduction": "mean"}


def of_codec(**options):
    codec = codecs.Residual.train(D.flatten(0, 1), 4, **options)
    return codec.centroids, codec.bucket_weights


def of_muvera(**options):
    return li.Muvera(8, **options).encode_corpus(D).documents


def of_topk(**options):
    best = li.TopK(Q, **options)
    best.add(D)
    return best.scores, best.indices


def of_corpus(**options):
    with TemporaryDirectory() as folder:
        with corpus.Corpus.create(folder, d=8, **options) as builder:
            builder.add(list(D))
        return tuple(corpus.Corpus.open(folder, verify=True).search(Q, 3))


def searched(**options):
    with TemporaryDirectory() as folder:
        with corpus.Corpus.create(folder, d=8, normalize=False) as builder:
            builder.add(list(D))
        return tuple(corpus.Corpus.open(folder).search(Q, **options))


def mined(**options):
    found = li.hard_negatives(Q, D, [[0], [1], [2]], **options)
    return found.indices, found.scores


class Lengths:
    """Embeds a text as so many tokens of ones, a little different from each other."""

    def encode_query(self, some, batch_size):
        return [torch.ones(len(x), 3) + torch.arange(3) * len(x) / 9 for x in some]

    encode_document = encode_query


def mined_texts(**options):
    pairs = {"query": ["a", "bb"], "answer": ["cc", "ddd"]}
    return li.mine_hard_negatives(pairs, Lengths(), corpus=["eeee", "fffff", "g"], **options)


def of_module(kind, args, **options):
    loss = kind(**options)
    return loss(*args), len(list(loss.parameters()))


# A function, its options that have a value of their own, and a call with some of them.
DEFAULTS = {
    "maxsim": (li.maxsim, {"normalize": False, "mean": False}, partial(li.maxsim, Q, D)),
    "maxsim_pairs": (
        li.maxsim_pairs, {"normalize": False, "mean": False}, partial(li.maxsim_pairs, Q, D[:3])
    ),
    "maxsim_with_winners": (
        li.maxsim_with_winners, {"normalize": False}, partial(li.maxsim_with_winners, Q, D)
    ),
    "maxsim_forward": (
        maxsim_forward, {"save_argmax": False, "normalize": False}, partial(maxsim_forward, Q, D)
    ),
    "maxsim_padded": (
        li.lik.maxsim_padded, {"validate": False}, partial(li.lik.maxsim_padded, Q, OWN, *LENGTHS)
    ),
    "pack_padded": (
        pack_padded, {"validate": False},
        lambda **options: pack_padded(Q, OWN, *LENGTHS, **options).Q_packed,
    ),
    "score_pairs_packed": (
        score_pairs_packed, {"mean": False}, partial(score_pairs_packed, *PACKED, *PAIRS)
    ),
    "maxsim_from_hidden": (
        maxsim_from_hidden, {"normalize": False, "project_Q": False}, partial(maxsim_from_hidden, Q, H, W)
    ),
    "Fp8": (
        codecs.Fp8.__init__, {"dtype": torch.float8_e4m3fn},
        lambda **options: codecs.Fp8(**options).encode(Q).values.float(),
    ),
    "Bits": (
        codecs.Bits.__init__, {"nbits": 1, "scales": True},
        lambda **options: codecs.Bits(**options).encode(Q).scales,
    ),
    "smooth_maxsim": (li.smooth_maxsim, {"tau": 0.1, "normalize": False}, partial(li.smooth_maxsim, Q, D)),
    "smooth_maxsim_pairs": (
        li.smooth_maxsim_pairs, {"tau": 0.1, "normalize": False}, partial(li.smooth_maxsim_pairs, Q, D[:3])
    ),
    "xtr_scores": (li.xtr_scores, {"rule": "paper"}, partial(li.xtr_scores, Q, D, 7)),
    "maxsim of codes": (li.maxsim, {"normalize": False, "mean": False}, partial(li.maxsim, Q, CODES)),
    "explain": (
        li.explain, {"paired": False, "normalize": False},
        lambda **options: [one.shares for row in li.explain(Q, D, **options) for one in row],
    ),
    "Alignment.top": (Alignment.top, {"n": 5}, li.explain(torch.eye(9), torch.eye(9)).top),
    "explain of codes": (
        li.explain, {"paired": False, "normalize": False},
        lambda **options: li.explain(Q[0], CODES, **options)[0].shares,
    ),
    "search": (
        li.search, {"k": 10, "normalize": False, **SEARCH},
        lambda **options: [tuple(li.search(Q, D, coarse=x, **options)) for x in (None, BITS)],
    ),
    "TopK": (
        li.TopK.__init__,
        {"k": 10, "normalize": False, "largest": True, "first": 0, "keep_empty": False},
        of_topk,
    ),
    "hard_negatives": (
        li.hard_negatives,
        {"num_negatives": 3, "range_min": 0, "sampling_strategy": "top", "seed": 0}
        | {"include_positives": False, "normalize": False, "progress": False, "keep_empty": False},
        mined,
    ),
    "mine_hard_negatives": (
        li.mine_hard_negatives,
        {"num_negatives": 3, "output_format": "triplet", "output_scores": False}
        | {"include_positives": False, "batch_size": 32},
        mined_texts,
    ),
    "evaluate_recall": (
        li.evaluate_recall, {"k": 10, "per_query": False},
        partial(li.evaluate_recall, [[3, 1], [0, 2], [9, 4]], li.search(Q, D, 12))
    ),
    "explain_plan": (
        li.explain_plan, {"winners": True, "d_mask": False, "normalize": False, "packed": False},
        partial(li.explain_plan, (32, 32, 128), (1000, 300, 128), sm=90),
    ),
    "codecs.Residual.train": (
        codecs.Residual.train,
        {"nbits": 2, "normalize": False, "iterations": 10, "seed": 0, "dtype": torch.float32},
        of_codec,
    ),
    "pool_tokens": (
        li.pool_tokens,
        {"pool_factor": 2, "method": "ward", "protected_tokens": 1, "normalize": False, "iterations": 10},
        partial(li.pool_tokens, [D[0], D[1]]),
    ),
    "Muvera": (li.Muvera.__init__, {"k_sim": 5, "repetitions": 20, "fill_empty": True, "seed": 0}, of_muvera),
    "Muvera.encode_corpus": (
        li.Muvera.encode_corpus, {"normalize": False},
        lambda **options: li.Muvera(8, k_sim=1).encode_corpus(D, **options).documents,
    ),
    "Corpus.create": (
        corpus.Corpus.create,
        {"normalize": False, "resume": False, "shard_bytes": 1 << 30, "progress": False},
        of_corpus,
    ),
    "Corpus.open": (corpus.Corpus.open, {"verify": False}, None),
    "Corpus.search": (corpus.Corpus.search, {"k": 10, "normalize": False, **SEARCH}, searched),
    "plot_alignment": (plot_alignment, {"first_patch": 0}, None),
}  # fmt: skip


# Each loss: the function, the module, the arguments, the options, and those of the module alone.
for function, module, args, options, own in [
    (
        li.losses.contrastive, li.losses.Contrastive, (Q, D[:3]),
        {"symmetric": False, "label_smoothing": 0.0, "tail": 0.0, **SEVERAL, **LOSS}, {"learnable": False},
    ),
    (li.losses.pairwise, li.losses.Pairwise, (Q, D[:3]), {**SEVERAL, **LOSS}, {"learnable": False}),
    (li.losses.sigmoid, li.losses.Sigmoid, (Q, D[:3]), {"bias": 0.0, **LOSS}, {"learnable": False}),
    (
        li.losses.recall, li.losses.Recall, (Q, D[:3]),
        {"k": (1, 2, 4, 8, 16), "rank_temperature": 1.0, **LOSS}, {},
    ),
    (
        li.losses.distill_kl_div, li.losses.DistillKLDiv, (Q, OWN, TEACHER),
        {"temperature": 1.0, "normalize_scores": False, **TAUGHT}, {},
    ),
    (li.losses.margin_mse, li.losses.MarginMSE, (Q, OWN, TEACHER), TAUGHT, {}),
]:  # fmt: skip
    DEFAULTS[f"losses.{function.__name__}"] = function, options, partial(function, *args)
    DEFAULTS[f"losses.{module.__name__}"] = module.__init__, options | own, partial(of_module, module, args)


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_call_that_says_nothing(name):
    function, defaults, call = DEFAULTS[name]
    parameters = inspect.signature(function).parameters.values()
    assert {x.name: x.default for x in parameters if x.default not in (None, x.empty)} == defaults
    if call is not None:
        silent, said = pytree.tree_leaves(call()), pytree.tree_leaves(call(**defaults))
        assert len(silent) == len(said) > 0
        for one, same in zip(silent, said, strict=True):
            assert torch.equal(one, same) if isinstance(one, torch.Tensor) else one == same
