"""Hard negatives, against a choice by definition over all scores in float64."""

import collections
import math
import random
import sys
import types
import zlib

import pytest
import torch

from late_interaction import Corpus
from late_interaction.mining import hard_negatives, mine_hard_negatives
from late_interaction.mining.negatives import Choice
from tests.support.corpora import in_memory

unit = torch.nn.functional.normalize


def texts(lengths, d=8):
    return [torch.randn(n, d) for n in lengths]


def scores_of(Q, D, normalize=True):
    """[Nq, Nd] in float64; NaN for a document without tokens, which takes no rank."""
    rows = []
    for q in Q:
        q = unit(q.double(), dim=-1) if normalize else q.double()
        docs = [unit(x.double(), dim=-1) if normalize else x.double() for x in D]
        rows.append([float((q @ x.T).amax(1).sum()) if len(x) else math.nan for x in docs])
    return rows


def by_definition(scores, positives, options):
    """Documents of each query in the order of their scores, those that the options leave."""
    found = []
    for row, own in zip(scores, positives, strict=True):
        ranked = [i for i in range(len(row)) if not math.isnan(row[i])]
        own = [i for i in own if i in ranked]
        order = sorted((i for i in ranked if i not in own), key=lambda i: (-row[i], i))
        first = options.get("range_min", 0)
        order = order[: options.get("range_max")]
        lowest = min((row[i] for i in own), default=math.inf)
        limit = options.get("max_score", math.inf)
        if own and "absolute_margin" in options:
            limit = min(limit, lowest - options["absolute_margin"])
        if own and "relative_margin" in options:
            limit = min(limit, lowest - options["relative_margin"] * abs(lowest))
        found.append([i for i in order if options.get("min_score", -math.inf) <= row[i] <= limit][first:])
    return found


@pytest.mark.parametrize("options", [{"absolute_margin": 1.0}, {"relative_margin": 0.25}, {"max_score": 3.0}])
def test_a_score_at_a_limit_is_a_negative(options):
    scores, positive = torch.tensor([[5.0, 4.0, 3.5, 3.0, 2.0]]), torch.tensor([4.0])
    is_positive = torch.tensor([[False, True, False, False, False]])
    assert Choice(num_negatives=2, **options).columns(scores, is_positive, positive).tolist() == [[3, 4]]
    at_least = Choice(num_negatives=4, min_score=3.0)
    assert at_least.columns(scores, is_positive, positive).tolist() == [[0, 2, 3, 5]]  # no more


@pytest.mark.parametrize("contiguous", [True, False])
def test_documents_of_one_length_are_those_of_a_list(contiguous):
    D, Q = torch.randn(9, 4, 8), texts([3, 2])
    D = D if contiguous else D.transpose(0, 1).contiguous().transpose(0, 1)
    found, wanted = (hard_negatives(Q, x, [[0], [5]], num_negatives=3) for x in (D, list(D)))
    assert torch.equal(found.indices, wanted.indices)
    torch.testing.assert_close(found.scores, wanted.scores)


LENGTHS = [5, 1, 9, 0, 30, 2, 7, 13, 1, 4, 6, 3, 17, 8, 2, 5, 11, 1, 3, 6]


@pytest.mark.parametrize("form", ["list", "corpus", "padded"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_negatives": 1},
        {"num_negatives": 50, "range_max": 60},
        {"range_min": 2, "num_negatives": 4},
        {"normalize": True, "range_min": 1, "range_max": 9, "max_score": 2.5},
        {"normalize": True, "min_score": 2.0, "range_max": 20},
        {"normalize": True, "absolute_margin": 0.4, "range_max": 20, "num_negatives": 5},
        {"normalize": True, "relative_margin": 0.1, "range_max": 20, "num_negatives": 5},
        {"normalize": True, "relative_margin": 0.3, "absolute_margin": 0.2, "range_max": 8},
        {"absolute_margin": -1.0, "range_max": 20},
        {"keep_empty": True, "num_negatives": 50, "range_max": 60},
        {"normalize": True, "keep_empty": True, "absolute_margin": 0.4, "range_max": 20, "num_negatives": 5},
    ],
)
def test_by_definition(options, form, device):
    torch.manual_seed(3)
    D, Q = texts(LENGTHS), texts([4, 2, 7, 1, 5])
    positives = [[0], [4, 7], [], [2, 3, 12], [19]]
    normalize = options.get("normalize", False)
    scores = scores_of(Q, D, normalize)
    with_empty = torch.tensor(scores).nan_to_num().tolist()
    wanted = by_definition(with_empty if options.get("keep_empty") else scores, positives, options)
    scores = with_empty
    given, more = [x.to(device) for x in D], {}
    if form == "corpus":
        given = in_memory(D)
    elif form == "padded":
        lengths = torch.tensor(LENGTHS)
        given = torch.nn.utils.rnn.pad_sequence(D, batch_first=True, padding_value=9.0).to(device)
        more["d_mask"] = (torch.arange(30) < lengths.unsqueeze(1)).to(device)
    found = hard_negatives([x.to(device) for x in Q], given, positives, **options, **more)
    n = options.get("num_negatives", 3)
    assert found.indices.shape == found.scores.shape == (5, n) and found.indices.device.type == device
    for i, order in enumerate(wanted):
        kept = order[:n]
        assert found.indices[i].tolist() == kept + [-1] * (n - len(kept))
        expected = torch.tensor([scores[i][x] for x in kept] + [-math.inf] * (n - len(kept)))
        torch.testing.assert_close(found.scores[i].cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        own = torch.tensor([scores[i][x] for x in positives[i]])
        torch.testing.assert_close(found.positive_scores[i].cpu(), own, rtol=1e-5, atol=1e-5)


def test_random_choice(device):
    torch.manual_seed(4)
    D, Q = [x.to(device) for x in texts([6] * 200)], [x.to(device) for x in texts([4] * 30)]
    positives = [[i] for i in range(30)]
    options = {
        "num_negatives": 5,
        "range_min": 3,
        "range_max": 60,
        "sampling_strategy": "random",
        "normalize": True,
    }
    found = hard_negatives(Q, D, positives, seed=1, **options)
    again = hard_negatives(Q, D, positives, seed=1, **options)
    assert torch.equal(found.indices, again.indices)
    assert not torch.equal(found.indices, hard_negatives(Q, D, positives, seed=2, **options).indices)
    ranks = []
    for i, order in enumerate(by_definition(scores_of(Q, D), positives, {"range_max": 60})):
        mine = [order.index(x) for x in found.indices[i].tolist()]
        assert mine == sorted(mine) and len(set(mine)) == 5 and min(mine) >= 3
        ranks += mine
    assert len(set(ranks)) > 35 and max(ranks) > 50  # from the whole range


@pytest.mark.parametrize("include_positives", [False, True])
def test_queries_without_any_positive(include_positives):
    D = torch.eye(4).unsqueeze(1)
    options = {"num_negatives": 2, "absolute_margin": 0.5, "include_positives": include_positives}
    found = hard_negatives(D[:2] + 0.1 * D[2], D, [[], []], **options)
    assert found.indices.tolist() == [[0, 2], [1, 2]]
    assert [x.shape for x in found.positive_scores] == [(0,), (0,)]


def test_ties_go_to_the_lowest_index_and_nan_is_no_negative(device):
    D = [torch.eye(4)[:1].to(device)] * 6 + [torch.full((1, 4), torch.nan, device=device)]
    found = hard_negatives([torch.eye(4)[:1].to(device)], D, [[1]], num_negatives=7, range_max=7)
    assert found.indices.tolist() == [[0, 2, 3, 4, 5, -1, -1]]


def test_no_queries():
    found = hard_negatives([], texts([3]), [], num_negatives=2)
    assert found.indices.shape == (0, 2) and found.positive_scores == []


# ---- texts ----


class Letters:
    """A model whose tokens are letters: a text matches another by the letters that it has."""

    def __init__(self):
        self.encoded = []

    def encode(self, texts, batch_size):
        self.encoded += texts
        return [torch.eye(26)[[ord(x) - ord("a") for x in text]] for text in texts]

    encode_query = encode_document = encode


DATASET = {"question": ["abc", "abd", "abc", "xyz"], "answer": ["abcq", "abdq", "abcr", "xyzq"]}


def test_triplets():
    model = Letters()
    found = mine_hard_negatives(DATASET, model, corpus=["abce", "abq", "abcq"], num_negatives=2)
    assert list(found) == ["question", "answer", "negative"]
    rows = list(zip(*found.values(), strict=True))
    assert rows[:4] == [
        ("abc", "abcq", "abce"), ("abc", "abcq", "abdq"), ("abc", "abcr", "abce"), ("abc", "abcr", "abdq"),
    ]  # fmt: skip
    assert rows[4:6] == [("abd", "abdq", "abcq"), ("abd", "abdq", "abcr")]
    assert sorted(model.encoded) == sorted(["abc", "abd", "xyz", *DATASET["answer"], "abce", "abq"])


def test_positives_in_a_ranking():
    found = mine_hard_negatives(DATASET, Letters(), include_positives=True, num_negatives=4)
    assert list(found) == ["question", "answer", *(f"negative_{i}" for i in range(1, 5))]
    rows = list(zip(*found.values(), strict=True))
    assert rows[0] == ("abc", "abcq", "abcq", "abcr", "abdq", "xyzq") and len(rows) == 4


def test_a_text_without_tokens_is_a_negative_where_it_is_kept():
    options = {"corpus": [""], "num_negatives": 4}
    for keep_empty in (False, True):
        found = mine_hard_negatives(DATASET, Letters(), keep_empty=keep_empty, **options)
        assert ("" in found["negative"]) == keep_empty


def test_prompts_go_to_the_model():
    class Prompted(Letters):
        def encode_query(self, texts, batch_size, prompt=None):
            assert prompt == "query: "
            return self.encode(texts, batch_size)

        def encode_document(self, texts, batch_size, prompt_name=None):
            assert prompt_name == "document"
            return self.encode(texts, batch_size)

    given = {"query_prompt": "query: ", "corpus_prompt_name": "document"}
    assert mine_hard_negatives(DATASET, Prompted(), **given) == mine_hard_negatives(DATASET, Letters())


class OneVector:
    """A model of one vector a text, as Sentence Transformers' function calls it, and as ours does."""

    device = torch.device("cpu")

    def __init__(self, tokens):
        self.tokens = tokens

    def encode(self, texts, **options):
        generator, known = torch.Generator(), []
        for text in texts:
            generator.manual_seed(zlib.crc32(text[:2].encode()))  # texts of one beginning resemble each other
            topic = torch.randn(16, generator=generator)
            generator.manual_seed(zlib.crc32(text.encode()))
            known.append(unit(topic + 0.7 * torch.randn(16, generator=generator), dim=0))
        return [x.unsqueeze(0) for x in known] if self.tokens else torch.stack(known).numpy()

    encode_query = encode_document = encode

    @staticmethod
    def similarity(a, b):
        return torch.as_tensor(a) @ torch.as_tensor(b).T

    @staticmethod
    def similarity_pairwise(a, b):
        return (torch.as_tensor(a) * torch.as_tensor(b)).sum(-1)


class Rows:
    """As much of a datasets.Dataset as Sentence Transformers' function looks at."""

    def __init__(self, columns):
        self.columns, self.column_names = columns, list(columns)

    def __len__(self):
        return len(self.columns[self.column_names[0]])

    def __getitem__(self, name):
        return self.columns[name]

    def to_pandas(self):
        return self

    def groupby(self, name):
        return self

    def count(self):
        return self

    def to_dict(self):
        first, second = self.column_names
        return {second: collections.Counter(self.columns[first])}


@pytest.mark.parametrize("output_scores", [False, True])
@pytest.mark.parametrize("output_format", ["triplet", "n-tuple", "labeled-pair", "labeled-list"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_negatives": 1, "range_min": 2},
        {"num_negatives": 4, "range_max": 6, "min_score": 0.1},
        {"num_negatives": 2, "range_max": 30, "min_score": 0.7},  # which leave some one negative, or none
        {"max_score": 0.4, "range_max": 30},
        {"absolute_margin": 0.05, "range_max": 20},
        {"relative_margin": 0.3, "range_min": 3, "range_max": 25},
        {"relative_margin": 0.1, "absolute_margin": 0.2, "max_score": 0.5, "range_max": 25},
        {"include_positives": True, "num_negatives": 5},
    ],
)
def test_rows_are_those_of_sentence_transformers(options, output_format, output_scores, monkeypatch):
    """With models of one vector a text, whose inner product is MaxSim of one token."""
    theirs = pytest.importorskip("sentence_transformers.util.hard_negatives")
    made = types.SimpleNamespace(from_dict=lambda columns: Rows(columns))
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(Dataset=made))
    monkeypatch.setattr(theirs, "is_datasets_available", lambda: True)
    rng = random.Random(1)
    words = ["".join(rng.choices("abc", k=2)) + "".join(rng.choices("xyz", k=5)) for _ in range(60)]
    anchors = [word[:3] for word in words[:25]]  # some have several positives
    dataset = {"question": anchors, "answer": words[:25]}
    options = {**options, "corpus": words, "output_format": output_format, "output_scores": output_scores}
    wanted = theirs.mine_hard_negatives(Rows(dataset), OneVector(False), verbose=False, **options).columns
    found = mine_hard_negatives(dataset, OneVector(True), **options)
    assert list(found) == list(wanted) and len(found["question"]) > 0
    for name in found:
        if name.startswith("score"):
            torch.testing.assert_close(flat(found[name]), flat(wanted[name]), rtol=1e-5, atol=1e-6)
        else:
            assert found[name] == wanted[name], name


def flat(rows):
    return torch.tensor([x for row in rows for x in (row if isinstance(row, list) else [row])])


def test_equal_texts_are_one_document_and_never_a_negative():
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef", k=4)) for _ in range(30)]
    dataset = {"a": [x[:2] for x in words], "b": words}
    found = mine_hard_negatives(dataset, Letters(), corpus=words * 2, num_negatives=4)
    own = {a: {b for x, b in zip(*dataset.values(), strict=True) if x == a} for a in dataset["a"]}
    assert len(found["negative"]) > 60
    seen = set()
    for anchor, positive, negative in zip(*found.values(), strict=True):
        assert negative not in own[anchor] and positive in own[anchor]
        seen.add((anchor, positive, negative))
    assert len(seen) == len({(a, b) for a, b in zip(*dataset.values(), strict=True)}) * 4


def test_a_dataset_of_the_datasets_library(monkeypatch):
    """A stand-in: the library is not a dependency."""

    class Dataset:
        column_names = ("question", "answer")
        from_dict = staticmethod(lambda columns: ("made", columns))

        def __getitem__(self, name):
            return DATASET[name]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(Dataset=Dataset))
    made, columns = mine_hard_negatives(Dataset(), Letters(), "question", "answer")
    assert made == "made" and columns == mine_hard_negatives(DATASET, Letters())


def test_float64_documents_are_scored_as_float32():
    Q, D = torch.randn(3, 4, 8), torch.randn(9, 5, 8)
    wanted = hard_negatives(Q, D, [[0], [1], []])
    for documents in (D.double(), list(D.double())):
        found = hard_negatives(Q.double(), documents, [[0], [1], []])
        assert torch.equal(found.indices, wanted.indices) and torch.equal(found.scores, wanted.scores)
        assert found.scores.dtype == torch.float32


# ---- sizes at their bounds ----


def test_one_dim_and_documents_without_tokens():
    assert hard_negatives(
        torch.ones(1, 2, 1), torch.ones(3, 2, 1), [[0]], num_negatives=2
    ).indices.tolist() == [[1, 2]]
    found = hard_negatives(torch.ones(1, 2, 8), torch.empty(3, 0, 8), [[0]], num_negatives=2)
    assert found.indices.tolist() == [[-1, -1]] and (found.scores == -math.inf).all()
    Q, D = torch.ones(1, 2, 8), torch.empty(3, 0, 8)
    found = hard_negatives(Q, D, [[0]], num_negatives=2, keep_empty=True)
    assert found.indices.tolist() == [[1, 2]] and found.scores.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_positives_as_a_tensor(dtype):
    Q, D = torch.randn(2, 3, 8), torch.randn(6, 4, 8)
    rows = [[0, 3], [5, 1]]
    found, same = (hard_negatives(Q, D, x) for x in (torch.tensor(rows, dtype=dtype), rows))
    assert torch.equal(found.indices, same.indices)
    scalars = [[torch.tensor(x) for x in row] for row in rows]
    assert torch.equal(hard_negatives(Q, D, scalars).indices, same.indices)


def test_positives_of_short_embeddings_and_of_zeros():
    """A token of any length counts as a unit vector, one of zeros as zeros."""
    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    D[0, 3:], Q[0, 1] = 0.0, 0.0
    found = hard_negatives(Q * 1e-3, D * 1e-3, [[0, 1], [2]], normalize=True).positive_scores
    wanted = scores_of(Q, D)
    assert found[0].tolist() == pytest.approx(wanted[0][:2], abs=1e-5)
    assert found[1].tolist() == pytest.approx([wanted[1][2]], abs=1e-5)


@pytest.mark.parametrize("name", ["max_score", "min_score", "absolute_margin", "relative_margin"])
def test_the_largest_numbers_of_scores(name):
    for value in (1 << 62, -(1 << 62)):
        Choice(**{name: value})
        for beyond in (value * 2, value + (1 if value > 0 else -1)):
            with pytest.raises(ValueError, match=name):
                Choice(**{name: beyond})


def test_the_most_negatives():
    assert Choice(num_negatives=1 << 32).num_negatives == 1 << 32
    assert (Choice().num_negatives, Choice().seed) == (3, 0)
    with pytest.raises(ValueError, match="num_negatives must be at most"):
        Choice(num_negatives=(1 << 32) + 1)


@pytest.mark.parametrize(
    ("anchor", "positive", "options", "words"),
    [
        ("negative", "p", {}, "its column 'negative': the output has negative"),
        ("a", "scores", {"output_scores": True}, "its column 'scores': the output has negative, scores"),
        ("label", "p", {"output_format": "labeled-pair"}, "its column 'label': the output has label"),
        ("a", "score", {"output_format": "labeled-pair", "output_scores": True}, "its column 'score'"),
        ("a", "labels", {"output_format": "labeled-list"}, "its column 'labels'"),
        ("scores", "p", {"output_format": "labeled-list", "output_scores": True}, "its column 'scores'"),
        ("negative_1", "p", {"output_format": "n-tuple"}, "its column 'negative_1'"),
        ("a", "negative_3", {"output_format": "n-tuple"}, "its column 'negative_3'"),
        ("a", "negative_2", {"include_positives": True}, "its column 'negative_2'"),
    ],
)
def test_a_column_of_a_name_that_the_output_has(anchor, positive, options, words):
    dataset = {anchor: DATASET["question"], positive: DATASET["answer"]}
    model = Letters()
    with pytest.raises(ValueError, match="dataset must have another name for " + words):
        mine_hard_negatives(dataset, model, **options)
    assert not model.encoded
    other = {"n-tuple": "triplet", "labeled-pair": "labeled-list"}.get(
        options.get("output_format"), "labeled-pair"
    )
    mined = mine_hard_negatives(dataset, model, output_format=other)
    assert set(mined[anchor]) <= set(DATASET["question"]) and mined[anchor]


@pytest.mark.parametrize("output_scores", [True, False])
@pytest.mark.parametrize("output_format", ["triplet", "n-tuple", "labeled-pair", "labeled-list"])
def test_a_dataset_without_rows_is_mined_to_none(output_format, output_scores):
    options = {"output_format": output_format, "output_scores": output_scores, "num_negatives": 2}
    some = mine_hard_negatives(DATASET, Letters(), **options)
    none = {name: [] for name in DATASET}
    found = mine_hard_negatives(none, Letters(), **options)
    assert list(found) == list(some) and not any(found.values())


def test_no_documents():
    for D in ([], torch.empty(0, 4, 8), Corpus.from_packed(torch.empty(0, 8), torch.tensor([0]))):
        found = hard_negatives(torch.ones(2, 3, 8), D, [[], []], num_negatives=2)
        assert found.indices.tolist() == [[-1, -1]] * 2 and (found.scores == -math.inf).all()
        assert [len(x) for x in found.positive_scores] == [0, 0]
    with pytest.raises(ValueError, match=r"positives\[0\] must lie in \[0, 0\), got 0"):
        hard_negatives(torch.ones(1, 3, 8), [], [[0]])


@pytest.mark.parametrize(("shape", "more"), [((2, 4), -1), ((2, 4), 1), ((4,), 0), ((1, 2, 4), 0)])
def test_a_model_that_returns_something_else(shape, more):
    def encode(texts, batch_size):
        return [torch.ones(shape)] * (len(texts) + more)

    model = types.SimpleNamespace(encode_query=encode, encode_document=encode)
    with pytest.raises(ValueError, match=r"model.encode_query must return \[L, d\] embeddings"):
        mine_hard_negatives(DATASET, model)
