"""Sentence Transformers, release by release: its own functions, ours, and its own after the patch."""

import contextlib
import functools
import importlib
import string
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction.integrations import sentence_transformers as ours
from late_interaction.integrations.sentence_transformers import _losses as loss_blocks
from late_interaction.integrations.sentence_transformers import _ranking as ranking
from late_interaction.integrations.sentence_transformers._originals import COLBERT, SIMILARITY
from late_interaction.mining import mine_hard_negatives
from tests.build.test_readme import examples
from tests.support import side_by_side
from tests.support.side_by_side import Encoder, called, loss_and_gradient, measured, ragged, texts

unchanged = functools.partial(side_by_side.assert_unchanged, "sentence-transformers", rtol=1e-5, atol=1e-5)
left_alone = functools.partial(side_by_side.assert_left_alone, "sentence-transformers")


def test_leaves_are_reached(st):
    side_by_side.assert_leaves_are_reached("sentence-transformers")


# ---- scores ----


def random(*shape, device, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=device)


def padded(device, n, L, d=8, empty=()):
    """Tokens whose last ones are rows of zeros, in some sequences all."""
    x = random(n, L, d, device=device)
    for i in range(n):
        x[i, L - i % 3 :] = 0
    for i in empty:
        x[i] = 0
    return x


def masks(device, n, L):
    return {
        "bool": torch.rand(n, L, device=device) < 0.6,
        "all": torch.ones(n, L, dtype=torch.bool, device=device),
        "long": (torch.rand(n, L, device=device) < 0.6).long(),
        "counts": torch.randint(3, (n, L), device=device),
        "weights": torch.randn(n, L, device=device),
        "zeros": torch.zeros(n, L, device=device),
        "shared": torch.rand(1, L, device=device) < 0.6,
    }


def calls(device):
    """Pairs of sides with their masks, as (a, b, options); 3 queries and 3 documents. Weights meet float32:
    of float64 its own gradient of weights is NaN where a document is empty."""
    lists = ragged(device, 5, 1, 3), ragged(device, 4, 0, 7)
    tensors = padded(device, 3, 5), padded(device, 3, 7, empty=[1])
    found = {
        "lists": (*lists, {}),
        "lists in blocks": (*lists, {"chunk_elements": 30}),
        "tensors": (*tensors, {}),
        "tensors in blocks": (*tensors, {"chunk_elements": 30}),
        "tensor and list": (tensors[0], lists[1], {}),
        "list and tensor": (lists[0], tensors[1], {}),
        "full": (random(3, 5, 8, device=device), random(3, 7, 8, device=device), {}),
        "one and one": (lists[0][0], lists[1][2], {}),
        "zero rows in lists": ([*lists[0][:2], tensors[0][2]], [lists[1][0], tensors[1][2], lists[1][2]], {}),
        "lists and masks": (*lists, {"a_mask": torch.rand(3, 5, device=device) < 0.6}),
        "lists and lists of masks": (
            *lists,
            {"b_mask": [torch.ones(len(x), device=device) for x in lists[1]]},
        ),
        "numbers": ((tensors[0] * 9).int(), (tensors[1] * 9).int(), {}),
        "lists of numbers": ([(x * 9).int() for x in lists[0]], [(x * 9).int() for x in lists[1]], {}),
    }
    floats = *(x.float() for x in tensors), [x.float() for x in lists[1]]
    for name, a_mask in masks(device, 3, 5).items():
        a, b, c = floats if name in ("weights", "zeros") else (*tensors, lists[1])
        found[f"{name} queries"] = (a, b, {"a_mask": a_mask})
        found[f"{name} queries and list"] = (a, c, {"a_mask": a_mask})
    for name, b_mask in masks(device, 3, 7).items():
        found[f"{name} documents"] = (*tensors, {"b_mask": b_mask})
    both = {"a_mask": masks(device, 3, 5)["weights"], "b_mask": masks(device, 3, 7)["bool"]}
    both["b_mask"][1] = False
    found["weights and an empty document"] = (*floats[:2], both)
    if device == "cpu":
        found["arrays"] = (*(x.numpy() for x in tensors), {})
        found["lists of arrays"] = (*([x.numpy() for x in side] for side in lists), {})
        found["array and list"] = (tensors[0].numpy(), lists[1], {})
        nested = [x.tolist() for x in (lists[1][0], lists[1][2], lists[1][0])]
        found["nested lists"] = ([x.float() for x in lists[0]], nested, {})
    return found


CALLS = list(calls("cpu"))
ALL_PAIRS, PAIRWISE = ["maxsim", "mean_maxsim"], ["maxsim_pairwise", "mean_maxsim_pairwise"]


def assert_equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL_PAIRS + PAIRWISE)
@pytest.mark.parametrize("case", CALLS)
def test_scores_and_gradients(st, device, case, name):
    given = calls(device)
    if case not in given:
        pytest.skip("arrays are on the CPU")
    a, b, options = given[case]
    score = st.function(name)
    wanted = measured(score, a, b, **options)
    assert wanted[0].shape[0] == (1 if case == "one and one" else 3)
    assert_equal(measured(getattr(ours, name), a, b, **options), wanted)
    li.patch("sentence-transformers")
    its_own = case in ("nested lists", "array and list")
    with contextlib.nullcontext() if its_own else side_by_side.no_einsum():
        assert_equal(measured(score, a, b, **options), wanted)


def test_lists_are_packed(st, device, monkeypatch):
    queries, documents = ragged(device, 5, 1, 3), ragged(device, 4, 2, 7)
    monkeypatch.setattr(st.similarity, "_pad_multi_vector_inputs", None)
    li.patch("sentence-transformers")
    assert called(st.similarity.maxsim, queries, documents) == {"maxsim_varlen": 1}
    assert called(st.similarity.maxsim_pairwise, queries, documents) == {"maxsim_pairs_packed": 1}


def test_an_empty_document_ranks_last(st, device):
    documents = torch.full((2, 3, 4), -1e3, device=device)
    mask = torch.tensor([[True, True, False], [False] * 3], device=device)
    scores = ours.maxsim(torch.ones(1, 2, 4, device=device), documents, b_mask=mask)
    assert scores.tolist() == [[-8e3, -1e9]]
    lists = [documents[0], documents[0, :0]]
    assert ours.maxsim(torch.ones(1, 2, 4, device=device), lists).tolist() == [[-8e3, -1e9]]


def test_a_row_of_zeros_is_padding_in_a_tensor_and_a_token_in_a_list(st, device):
    query = -torch.ones(1, 1, 4, device=device)
    document = torch.ones(2, 4, device=device)
    document[1] = 0
    assert ours.maxsim(query, document.unsqueeze(0)).tolist() == [[-4.0]]
    assert ours.maxsim(query, [document]).tolist() == [[0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["lists", "tensors", "weights"])
def test_dtypes(st, device, dtype, form):
    """Half precision is summed in float32, and its maxima are not rounded."""
    a, b = ragged(device, 8, 8, d=64), ragged(device, 30, 30, 30, d=64)
    if form != "lists":
        a, b = torch.stack(a), torch.stack(b)
    a, b = ([x.to(dtype) for x in side] if form == "lists" else side.to(dtype) for side in (a, b))
    options = {"a_mask": torch.rand(2, 8, device=device)} if form == "weights" else {}
    double = [[x.double() for x in side] if form == "lists" else side.double() for side in (a, b)]
    wanted = st.similarity.maxsim(*double, **options)
    li.patch("sentence-transformers")
    with side_by_side.no_einsum():
        scores = st.similarity.maxsim(a, b, **options)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, wanted.float(), rtol=1e-4, atol=1e-4)


def grouped(device, masked):
    dtype = torch.float32 if masked == "weights" else torch.float64  # as above
    Q, D = (random(*shape, 6, device=device, dtype=dtype) for shape in ((4, 5), (4, 3, 7)))
    Q[1, 3:], D[2, 1, 4:], D[0, 2] = 0, 0, 0
    found = {}
    if masked:
        d_mask = torch.rand(4, 3, 7, device=device) < 0.6
        d_mask[3, 0] = False
        found = {"queries_mask": masks(device, 4, 5)[masked], "documents_mask": d_mask}
    return Q, D, found


COLBERT_NAMES = [
    f"{mean}colbert_{kind}" for mean in ("", "mean_") for kind in ("scores", "kd_scores", "scores_pairwise")
]


@pytest.mark.parametrize("masked", [None, "bool", "weights"])
@pytest.mark.parametrize("name", COLBERT_NAMES)
def test_groups_of_documents(st, device, name, masked):
    Q, D, options = grouped(device, masked)
    if name.endswith("pairwise"):
        D = D[:, 0]
        options = {key: m[:, 0] if m.dim() == 3 else m for key, m in options.items()}
    wanted = unchanged(lambda: measured(st.function(name), Q, D, **options))
    li.unpatch("sentence-transformers")
    assert_equal(measured(getattr(ours, name), Q, D, **options), wanted)


def test_what_it_refuses_it_refuses_in_its_own_words(st):
    Q, D = torch.randn(2, 3, 4), torch.randn(4, 5, 4)
    li.patch("sentence-transformers")
    refused = {
        "`b_mask` covers 4 tokens": lambda: st.similarity.maxsim(Q, D, b_mask=torch.ones(4, 4)),
        "same number of items": lambda: st.similarity.maxsim_pairwise(Q, D),
        "`a_mask` must be a tensor": lambda: st.similarity.maxsim(Q, D, a_mask="all"),
        "subscript h": lambda: st.similarity.maxsim(Q, D[..., :3]),
    }
    for message, call in refused.items():
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            call()
    with pytest.raises(RuntimeError):
        st.similarity.maxsim(Q, D.bfloat16())
    assert st.similarity.maxsim([], D).shape == (0, 4) and st.similarity.maxsim(Q, []).shape == (2, 0)


def test_forward_mode_derivatives_stay_its_own(st):
    Q, D, tangent = (torch.randn(2, 3, 4) for _ in range(3))

    def derivative():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(Q, tangent)
            return torch.autograd.forward_ad.unpack_dual(st.similarity.maxsim(dual, D)).tangent

    left_alone(derivative)


def test_a_batch_of_calls_stays_its_own(st):
    Q, D = torch.randn(6, 2, 3, 4), torch.randn(4, 5, 4)

    def scored():
        pairs = torch.vmap(lambda q: st.similarity.maxsim_pairwise(q, D[:2]))
        return torch.vmap(lambda q: st.similarity.maxsim(q, D))(Q), pairs(Q)

    left_alone(scored)


def test_gradients_of_gradients_are_right_or_an_error(st):
    Q, D = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 5, 4)

    def penalty(documents):
        scores = st.similarity.maxsim(Q, documents)
        (gradient,) = torch.autograd.grad(scores.square().sum(), Q, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), Q)

    unchanged(lambda: penalty(D), rtol=1.3e-6)
    with pytest.raises(RuntimeError, match="double backward of maxsim of packed tokens is not supported"):
        penalty(list(D))


def test_one_graph(st):
    Q, D = torch.randn(2, 3, 4), torch.randn(4, 5, 4)
    mask = torch.rand(4, 5) < 0.5
    wanted = st.similarity.maxsim(Q, D, b_mask=mask)
    li.patch("sentence-transformers")
    compiled = torch.compile(st.similarity.maxsim, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(Q, D, b_mask=mask), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["maxsim", "maxsim_pairwise"])
@pytest.mark.parametrize("form", ["lists", "tensors", "lists and tensors"])
def test_a_corpus_in_the_hosts_memory_is_scored_elsewhere(st, name, form):
    a, b = ragged("cpu", 5, 1, 3), ragged("cpu", 4, 2, 7)
    if form != "lists":
        b = padded("cpu", 3, 7)
        a = padded("cpu", 3, 5) if form == "tensors" else a
    wanted = st.function(name)(a, b)
    li.patch("sentence-transformers")
    for device in ("cuda", "cuda:0"):
        for budget in (None, 30):
            scores = st.function(name)(a, b, device=device, chunk_elements=budget)
            assert scores.device.type == "cpu"
            torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_documents_on_the_cpu_score_on_the_cpu(st):
    a, b = ragged("cpu", 5, 1, 3), ragged("cpu", 4, 2, 7)
    wanted = st.similarity.maxsim(a, b)
    li.patch("sentence-transformers")
    scores = st.similarity.maxsim([x.cuda() for x in a], b)
    assert scores.device.type == "cpu"
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)


# ---- losses ----


LOSSES = {
    "MultiVectorMultipleNegativesRankingLoss": [
        {}, {"scale": 7.0}, {"score_mini_batch_size": 2}, {"similarity_fct": "mean_colbert_scores"},
    ],
    "CachedMultiVectorMultipleNegativesRankingLoss": [
        {"mini_batch_size": 2}, {"mini_batch_size": 3, "score_mini_batch_size": 16, "scale": 0.3},
        {"mini_batch_size": 2, "similarity_fct": "mean_colbert_scores"},
    ],
    "MultiVectorDistillKLDivLoss": [{}, {"temperature": 2.0, "similarity_fct": "mean_colbert_kd_scores"}],
    "MultiVectorMarginMSELoss": [{}, {"similarity_fct": "mean_colbert_scores_pairwise"}],
}  # fmt: skip
OVER_ALL_PAIRS = list(LOSSES)[:2]


def built(st, name, encoder, of=None, **options):
    """A loss, whose scoring function is of `of`, or its own default."""
    if "similarity_fct" in options:
        options["similarity_fct"] = getattr(of or st.colbert, options["similarity_fct"])
    elif of is not None:
        defaults = ["colbert_scores", "colbert_scores", "colbert_kd_scores", "colbert_scores_pairwise"]
        options["similarity_fct"] = getattr(of, defaults[list(LOSSES).index(name)])
    return getattr(st.losses, name)(encoder, **options)


def batch_for(name, device, empty=()):
    features = texts(device, (5, 6), (5, 9), (5, 7))
    for i in empty:
        features[1]["attention_mask"][i] = 0
    labels = None if name in OVER_ALL_PAIRS else torch.randn(5, 2, device=device).double()
    return features, labels


@pytest.mark.parametrize("empty", [(), (1, 3)], ids=["", "empty documents"])
@pytest.mark.parametrize("kept_bytes", [1 << 30, 0], ids=["kept", "by blocks"])
@pytest.mark.parametrize(("name", "options"), [(n, o) for n, all_ in LOSSES.items() for o in all_])
def test_losses(st, device, monkeypatch, name, options, kept_bytes, empty):
    monkeypatch.setattr(loss_blocks, "_KEPT_BYTES", kept_bytes)
    encoder, batch = Encoder(device), batch_for(name, device, empty)
    built_before = built(st, name, encoder, **options)
    wanted = loss_and_gradient(built_before, *batch)
    assert wanted[1].any()
    assert_equal(loss_and_gradient(built(st, name, encoder, ours, **options), *batch), wanted)
    li.patch("sentence-transformers")
    with side_by_side.no_einsum():
        assert_equal(loss_and_gradient(built_before, *batch), wanted)
        assert_equal(loss_and_gradient(built(st, name, encoder, **options), *batch), wanted)
        with torch.no_grad():
            torch.testing.assert_close(built_before(*batch), wanted[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OVER_ALL_PAIRS)
def test_a_large_batch_has_no_matrix_of_scores(st, monkeypatch, name):
    """One losses.contrastive, however few queries the loss scores at a time; not with an empty document."""
    monkeypatch.setattr(loss_blocks, "_KEPT_BYTES", 0)
    taken = []

    def recorded(*args, **kwargs):
        taken.append(kwargs["reduction"])
        return li.losses.contrastive(*args, **kwargs)

    monkeypatch.setattr(loss_blocks, "contrastive", recorded)
    loss = built(st, name, Encoder(), score_mini_batch_size=2)
    li.patch("sentence-transformers")
    loss(*batch_for(name, "cpu"))
    assert taken == ["mean" if name == OVER_ALL_PAIRS[0] else "sum"]
    loss(*batch_for(name, "cpu", empty=(0,)))
    monkeypatch.setattr(loss_blocks, "_KEPT_BYTES", 1 << 30)
    loss(*batch_for(name, "cpu"))
    assert len(taken) == 1


@pytest.mark.parametrize("kept_bytes", [1 << 30, 0], ids=["kept", "by blocks"])
@pytest.mark.parametrize("name", OVER_ALL_PAIRS)
def test_documents_of_two_processes(st, monkeypatch, name, kept_bytes):
    """This one is the second. The function that gathers may be exchanged after the patch, as here."""
    monkeypatch.setattr(loss_blocks, "_KEPT_BYTES", kept_bytes)
    module = importlib.import_module(getattr(st.losses, name).__module__)

    def gathered(tokens, mask, with_grad=False):
        return torch.cat([tokens.flip(0), tokens]), torch.cat([mask.flip(0), mask])

    loss, batch = built(st, name, Encoder(), gather_across_devices=True), batch_for(name, "cpu")
    li.patch("sentence-transformers")
    monkeypatch.setattr(module, "all_gather_padded", gathered)
    monkeypatch.setattr(module, "get_rank", lambda: 1)
    found = loss_and_gradient(loss, *batch)
    li.unpatch("sentence-transformers")
    assert_equal(found, loss_and_gradient(loss, *batch))


def test_a_loss_that_was_subclassed(st, monkeypatch):
    class Mine(getattr(st.losses, OVER_ALL_PAIRS[0])):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    monkeypatch.setattr(loss_blocks, "_KEPT_BYTES", 0)
    loss, batch = Mine(Encoder()), batch_for(OVER_ALL_PAIRS[0], "cpu")
    unchanged(lambda: loss_and_gradient(loss, *batch))


def test_whoever_asks_for_scores_gets_them():
    """What a release's own code might do with scores beside the cross entropy."""

    class Loss:
        score_mini_batch_size = None
        similarity_fct = staticmethod(ours.colbert_scores)

    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    Q, D = torch.randn(3, 2, 4), torch.randn(3, 1, 5, 4)
    kept = [torch.ones(x.shape[:-1], dtype=torch.bool) for x in (Q, D)]
    lazy = loss_blocks.Scores(Loss, (Q, D, *kept))
    scores, labels = ours.colbert_scores(Q, D, *kept), torch.arange(3)
    torch.testing.assert_close((lazy * 2.0).float(), scores * 2)
    smooth = loss_blocks._cross_entropy(lazy * 2.0, labels, label_smoothing=0.1)
    wanted = torch.nn.functional.cross_entropy(scores * 2, labels, label_smoothing=0.1)
    torch.testing.assert_close(smooth, wanted)
    torch.testing.assert_close(
        loss_blocks._cross_entropy(lazy * 2.0, labels), torch.nn.functional.cross_entropy(scores * 2, labels)
    )


# ---- a whole model, and evaluators ----


@pytest.fixture(scope="module")
def encoder(st_release, tmp_path_factory):
    """A MultiVectorEncoder around a tiny random BERT."""
    assert not li.patched()
    folder = str(tmp_path_factory.mktemp("bert"))
    with mock.patch.object(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "examples")]):
        tiny_bert = importlib.import_module("tiny_bert")
    with mock.patch.object(tiny_bert, "texts", lambda: [sentences(30, 9, 0), string.punctuation]):
        tiny_bert.save_tiny_bert(folder, hidden=32)
    return st_release.root.MultiVectorEncoder(folder, device="cpu")


def sentences(count, words, seed):
    draw = np.random.default_rng(seed)
    letters = list(string.ascii_lowercase)
    return [
        " ".join("".join(draw.choice(letters, 3)) for _ in range(draw.integers(1, words + 1)))
        for _ in range(count)
    ]


def test_a_model_built_before(st, encoder):
    queries, documents = encoder.encode_query(sentences(4, 3, 0)), encoder.encode_document(sentences(6, 9, 1))
    arrays = [x.numpy() for x in documents]
    assert isinstance(documents, list) and len({len(x) for x in documents}) > 1

    def scored():
        yield encoder.similarity(queries, documents)
        yield encoder.similarity(queries, arrays)
        yield encoder.similarity_pairwise(queries, documents[:4])
        encoder.similarity_fn_name = "meanmaxsim"
        yield encoder.similarity(queries, documents)
        encoder.similarity_fn_name = "maxsim"

    unchanged(lambda: list(scored()))
    assert called(lambda: list(scored())) == {"maxsim_varlen": 3, "maxsim_pairs_packed": 1}


def step(encoder, loss, rows, labels=None):
    """A loss, and the gradients of all parameters. Dropout is off: all steps are to see the same."""
    encoder.eval()
    columns = [sentences(rows, 3, 0), sentences(rows, 9, 1), sentences(rows, 7, 2)]
    preprocess = getattr(encoder, "preprocess", None) or encoder.tokenize
    encoder.zero_grad()
    value = loss([dict(preprocess(column)) for column in columns], labels)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in encoder.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_of_a_model(st, encoder, name):
    labels = None if name in OVER_ALL_PAIRS else torch.randn(4, 2)
    loss = getattr(st.losses, name)(encoder)
    assert len(unchanged(lambda: step(encoder, loss, 4, labels))) > 5


@pytest.mark.parametrize("kept_bytes", [0, loss_blocks._KEPT_BYTES])
@pytest.mark.parametrize("built", ["before", "after"])
def test_matryoshka(st, encoder, monkeypatch, built, kept_bytes):
    """Its own decorator cuts and normalizes the embeddings of the cached loss, whose scores are ours. (Around
    the other loss it fails without the patch, too: it takes no task.)"""
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    monkeypatch.setattr(loss_blocks, "_KEPT_BYTES", kept_bytes)

    def made():
        inner = st.losses.CachedMultiVectorMultipleNegativesRankingLoss(encoder, mini_batch_size=4)
        return MatryoshkaLoss(encoder, inner, [128, 64, 8], [1.0, 0.5, 2.0])

    before = made()
    assert len(unchanged(lambda: step(encoder, before if built == "before" else made(), 6))) > 5
    assert called(step, encoder, before, 6)


def retrieval(st, **options):
    """Queries of a corpus in which some documents are the same: their scores tie."""
    corpus = sentences(30, 9, 1)
    corpus[20:26] = corpus[5:11]
    queries = {f"q{i}": text for i, text in enumerate(sentences(7, 3, 0))}
    documents = {f"d{(i * 7) % 30}": text for i, text in enumerate(corpus)}
    relevant = {f"q{i}": {f"d{i}", f"d{2 * i + 3}"} for i in range(7)}
    return st.evaluation.MultiVectorInformationRetrievalEvaluator(
        queries, documents, relevant, write_csv=False, map_at_k=[8], **options
    )


@pytest.mark.parametrize("step", [ranking.MOST_SCORES, 28])
@pytest.mark.parametrize("chunk", [5000, 11])
def test_retrieval_evaluation(st, encoder, monkeypatch, chunk, step):
    monkeypatch.setattr(ranking, "MOST_SCORES", step)
    made = functools.partial(retrieval, st, corpus_chunk_size=chunk)
    evaluator, both = made(), made(score_functions={"maxsim": ours.maxsim, "meanmaxsim": ours.mean_maxsim})
    wanted = evaluator(encoder)
    assert 0 < wanted["maxsim_ndcg@10"] < 1

    def assert_like_both():
        metrics = both(encoder)
        assert {key: metrics[key] for key in wanted} == pytest.approx(wanted)

    with side_by_side.no_einsum():
        assert_like_both()
        li.patch("sentence-transformers")
        assert_like_both()
        assert evaluator(encoder) == pytest.approx(wanted)
        assert made(chunk_elements=500)(encoder) == pytest.approx(wanted)


def hits(evaluator, encoder):
    """What the evaluator computes its metrics from."""
    found = []
    evaluator.compute_metrics = lambda ranked: (
        found.append(ranked) or type(evaluator).compute_metrics(evaluator, ranked)
    )
    evaluator(encoder)
    return found


def test_hits_and_their_order(st, encoder):
    wanted = hits(retrieval(st), encoder)
    li.patch("sentence-transformers")
    found = hits(retrieval(st), encoder)
    assert len(found) == len(wanted) == 1
    for one, other in zip(found[0], wanted[0], strict=True):
        assert [hit["score"] for hit in one] == pytest.approx([hit["score"] for hit in other], rel=1e-5)
        # Rounding may part the scores of two documents, but not those of one text: their ids decide.
        places = {hit["corpus_id"]: i for i, hit in enumerate(one)}
        assert places.keys() == {hit["corpus_id"] for hit in other}
    ids = [[hit["corpus_id"] for hit in ranked] for ranked in found[0]]
    same = [(f"d{(i * 7) % 30}", f"d{((i + 15) * 7) % 30}") for i in range(5, 11)]
    for ranked in ids:
        for pair in same:
            present = [name for name in ranked if name in pair]
            assert present == sorted(present)


def test_predictions_are_written(st, encoder, tmp_path):
    evaluator = retrieval(st, write_predictions=True)
    wanted = evaluator(encoder, str(tmp_path / "own"))
    li.patch("sentence-transformers")
    assert evaluator(encoder, str(tmp_path / "patched")) == pytest.approx(wanted)
    files = [next((tmp_path / name).glob("*.jsonl")).read_text().splitlines() for name in ("own", "patched")]
    assert len(files[0]) == len(files[1]) == 7


def evaluators(st, maxsim=None, pairwise=None):
    """With their own functions for scores, or with these."""
    grid, pairs = ({"similarity_fct": score} if score else {} for score in (maxsim, pairwise))
    anchors, positives, negatives = sentences(8, 3, 0), sentences(8, 9, 1), sentences(8, 7, 2)
    samples = [
        {"query": q, "positive": [p], "negative": negatives[i % 4 : i % 4 + 3]}
        for i, (q, p) in enumerate(zip(anchors, positives, strict=True))
    ]
    teacher = np.random.default_rng(0).standard_normal((8, 2)).tolist()
    listed = [list(pair) for pair in zip(positives, negatives, strict=True)]
    module = st.evaluation
    yield module.MultiVectorTripletEvaluator(anchors, positives, negatives, write_csv=False)
    yield module.MultiVectorRerankingEvaluator(samples, write_csv=False, **grid)
    yield module.MultiVectorRerankingEvaluator(samples, write_csv=False, use_batched_encoding=False, **grid)
    yield module.MultiVectorDistillationEvaluator(anchors, listed, teacher, write_csv=False, **pairs)
    first = [row[0] for row in teacher]
    yield module.MultiVectorDistillationEvaluator(anchors, positives, first, write_csv=False, **pairs)


@pytest.mark.parametrize("index", range(5))
def test_other_evaluators(st, encoder, index):
    evaluator = list(evaluators(st))[index]
    wanted = unchanged(lambda: evaluator(encoder), rtol=5e-5, atol=5e-6)
    assert called(evaluator, encoder)
    li.unpatch("sentence-transformers")
    if index > 0:  # the first one has its functions of the model
        by_ours = list(evaluators(st, ours.maxsim, ours.maxsim_pairwise))[index]
        assert called(lambda: by_ours(encoder)) and by_ours(encoder) == pytest.approx(wanted, 1e-4, 1e-5)


# ---- the patch ----


def test_unpatch_restores_everything(st):
    changed = side_by_side.assert_restored("sentence-transformers")
    names = ("maxsim", "colbert_scores", "colbert_kd_scores")
    places = {(SIMILARITY, "maxsim"), (SIMILARITY, "maxsim_pairwise"), *((COLBERT, name) for name in names)}
    assert places <= changed


def test_whatever_holds_a_function_is_reached(st):
    lists = ragged("cpu", 2, 3), ragged("cpu", 4, 5)
    held = [
        st.similarity.maxsim,
        functools.partial(st.similarity.maxsim, chunk_elements=1000),
        st.similarity.SimilarityFunction.to_similarity_fn("maxsim"),
        lambda *args, maxsim=st.similarity.maxsim: maxsim(*args),
    ]
    li.patch("sentence-transformers")
    for patched in (True, False):
        for function in held:
            assert bool(called(function, *lists)) == patched
        li.unpatch("sentence-transformers")


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_built_under_the_patch_ends_with_it(st, name):
    li.patch("sentence-transformers")
    loss, batch = built(st, name, Encoder()), batch_for(name, "cpu")
    for patched in (True, False):
        assert bool(called(loss, *batch)) == patched
        li.unpatch("sentence-transformers")


@pytest.mark.parametrize("patched", [True, False])
def test_disabled(st, encoder, monkeypatch, patched):
    """Patched or by our own functions: the numbers are Sentence Transformers' own, to the bit."""
    monkeypatch.setattr(loss_blocks, "_KEPT_BYTES", 0)
    model, batches, given = Encoder(), {name: batch_for(name, "cpu") for name in LOSSES}, calls("cpu")

    def measurement(of, maxsim):
        losses = {name: built(st, name, model, of) for name in LOSSES}
        return lambda: (
            [loss_and_gradient(loss, *batches[name]) for name, loss in losses.items()],
            [maxsim(a, b, **options) for a, b, options in given.values()],
            retrieval(st)(encoder),
        )

    theirs = measurement(None, st.similarity.maxsim)
    if patched:
        left_alone(theirs, "1")
        return
    wanted, mine = theirs(), measurement(ours, ours.maxsim)
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    assert not called(lambda: torch.testing.assert_close(mine(), wanted, rtol=0, atol=0))


@pytest.mark.parametrize(
    ("place", "named"),
    [
        (f"{COLBERT}.colbert_kd_scores", "colbert_kd_scores"),
        (
            "sentence_transformers.multi_vector_encoder.losses.MultiVectorMultipleNegativesRankingLoss",
            "Ranking",
        ),
        ("sentence_transformers.sentence_transformer.evaluation.information_retrieval.trange", "Evaluator"),
        (f"{SIMILARITY}._maxsim_score_pairs", "_maxsim_score_pairs"),
    ],
)
def test_what_went_elsewhere_is_named(st, monkeypatch, place, named):
    monkeypatch.delattr(place)
    with pytest.warns(RuntimeWarning, match=f"did not find .*{named}.*refactored"):
        li.patch("sentence-transformers")


def test_a_function_of_another_signature_is_left_alone(st, monkeypatch):
    def colbert_scores(queries, documents):
        return "its own"

    monkeypatch.setattr(st.colbert, "colbert_scores", colbert_scores)
    with pytest.warns(RuntimeWarning, match="did not find .*colbert_scores"):
        li.patch("sentence-transformers")
    assert colbert_scores(0, 0) == "its own"
    # The leaves reach whatever calls them.
    assert called(st.similarity.maxsim, torch.randn(2, 3, 4), torch.randn(2, 3, 4), a_mask=torch.rand(2, 3))


def test_the_examples_of_the_guide(st):
    blocks = [block for block in examples("docs/guide/libraries.md") if "sentence_transformers" in block]
    names = {"torch": torch, "li": li}
    shapes = []
    with side_by_side.Calls() as calls:
        for block in blocks:
            exec(block, names)
            shapes.append(tuple(names["scores"].shape))
    assert shapes == [(2, 3), (2, 8)] and calls.of == {"maxsim_varlen": 2, "maxsim": 1}
    assert not li.patched()


def test_the_measurement_runs(st_release):
    if st_release.version is not None:
        pytest.skip("it measures the installed release")
    from bench import command_line
    from bench.suites import sentence_transformers as measurement

    arguments = ["st", "--dry-run", "--device", "cpu"]
    rows = measurement.measure(command_line.parser().parse_args(arguments))
    assert len(rows) == 5 and not any("error" in key for row in rows for key in row)
    assert all(row["with_ms"] > 0 and row["disagreement"] < measurement.SAME for row in rows)


def test_hard_negatives_by_an_encoder(encoder):
    questions, answers = sentences(6, 5, 0), sentences(6, 9, 1)
    found = mine_hard_negatives({"q": questions, "a": answers}, encoder, num_negatives=2, output_scores=True)
    scores = encoder.similarity(encoder.encode_query(questions), encoder.encode_document(answers))
    rows = zip(found["q"], found["a"], found["negative"], found["scores"], strict=True)
    for n, (question, answer, negative, pair) in enumerate(rows):
        i, place = n // 2, n % 2
        assert (question, answer) == (questions[i], answers[i])
        others = [j for j in scores[i].argsort(descending=True).tolist() if j != i]
        assert pair == pytest.approx([float(scores[i][i]), float(scores[i][others[place]])], abs=1e-4)
        assert negative == answers[others[place]]
    assert n == 11
