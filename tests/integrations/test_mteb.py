"""What mteb computes MaxSim by, release by release, before and after patch("mteb")."""

import importlib
import types
from functools import partial

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction.integrations import mteb as mteb_patch
from tests.support import side_by_side
from tests.support.side_by_side import called, ragged

unchanged = partial(side_by_side.assert_unchanged, "mteb")
left_alone = partial(side_by_side.assert_left_alone, "mteb")
refused_as_before = partial(side_by_side.assert_refused_as_before, "mteb")
# What the modules that score import, and scoring does not need.
IMPORTED = [
    "mteb._create_dataloaders",
    "mteb.models.abs_encoder",
    "mteb.models.model_meta",
    "mteb.models.sentence_transformer_wrapper",
    "mteb.types",
    "requests",
]


@pytest.fixture(params=side_by_side.releases("mteb"))
def mteb(request):
    """The module of a release. What else mteb's packages import on their way is left out."""
    languages = types.ModuleType("mteb.languages")
    languages.PROGRAMMING_LANGS = []
    stand_ins = [languages, *map(side_by_side.anything, IMPORTED)]
    bare = ["mteb", "mteb.models", "mteb.models.model_implementations"]
    with side_by_side.release("mteb", "mteb", request.param, stand_ins, bare):
        yield importlib.import_module("mteb.similarity_functions")
        li.unpatch("mteb")


@pytest.fixture
def jina(mteb):
    """A wrapper that was made before the patch. Its model plays no part in its scoring but for its device."""
    cls = importlib.import_module("mteb.models.model_implementations.jina_models").JinaV4Wrapper
    wrapper = cls.__new__(cls)
    wrapper.model = types.SimpleNamespace(device=torch.device("cpu"))
    return wrapper


@pytest.fixture
def of_arrays(mteb):
    """The function that searches of ``OpenAIAPITokenEmbedWrapper`` call."""
    return importlib.import_module("mteb.models.openai_wrappers")._max_sim_scores


def test_leaves_are_reached(mteb):
    side_by_side.assert_leaves_are_reached("mteb")


def test_calls_are_counted(mteb, monkeypatch):
    li.patch("mteb")
    Q, D = torch.rand(2, 3, 8), torch.rand(2, 5, 8)
    mteb.max_sim(Q, D)
    mteb.pairwise_max_sim(Q, D)
    mteb.max_sim([*Q], [D[0], D[1][:0]])
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "mteb")
    mteb.pairwise_max_sim(Q, D)
    found = li.patched()["mteb"]
    assert found.served + sum(found.left.values()) == 4 and found.served >= 2
    assert found.left["pairwise_max_sim: LATE_INTERACTION_DISABLE turns the patch off"] == 1


def calls(device):
    queries, documents = ragged(device, 5, 4, 6, 5), ragged(device, 4, 6, 5, 7, 6)
    # Padding all would compare over twice the real pairs, so mteb pads groups of like lengths.
    uneven = ragged(device, 2, 40, 3), ragged(device, 1, 2, 3, 90, 2)
    padded = torch.randn(3, 6, 8, device=device).double(), torch.randn(5, 7, 8, device=device).double()
    return {
        "lists": (queries, documents),
        "lists whose padding wins": ([x.abs() for x in queries], [-x.abs() for x in documents]),
        "uneven lists": uneven,
        "uneven lists whose padding wins": ([x.abs() for x in uneven[0]], [-x.abs() for x in uneven[1]]),
        "tuples": (tuple(queries), tuple(documents)),
        "tensors": padded,
        "a query": (padded[0][0], padded[1]),
        "a document": (queries, padded[1][0]),
        "queries as a tensor": (padded[0], documents),
        "documents as a tensor": (queries, padded[1]),
        "an empty document": (queries, [*documents, documents[0][:0]]),
        "float32 with float64": (queries, [x.float() for x in documents]),
    }


@pytest.mark.parametrize("what", calls("cpu"))
def test_max_sim(mteb, device, what):
    a, b = calls(device)[what]
    try:
        unchanged(lambda: mteb.max_sim(a, b), rtol=1e-12, atol=1e-12)
    except RuntimeError:
        assert what == "float32 with float64"  # which the einsum of old releases refuses
        li.patch("mteb")
        with pytest.raises(RuntimeError):
            mteb.max_sim(a, b)


def test_groups_of_like_lengths_are_padded(mteb, monkeypatch):
    """What mteb pads a document to depends on its group; a small budget of tokens makes many."""
    own = mteb._token_budget_chunks
    monkeypatch.setattr(mteb, "_token_budget_chunks", lambda widths, most=20: own(widths, min(most, 20)))
    queries = [x.abs() for x in ragged("cpu", 2, 40, 3)]
    documents = [-x.abs() for x in ragged("cpu", 3, 9, 5, 9, 4, 90)]
    wanted = unchanged(lambda: mteb.max_sim(queries, documents))
    assert (wanted == 0).any() and (wanted < 0).any()
    assert called(mteb.max_sim, queries, documents) == {"maxsim_varlen": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_scores_float32(mteb, device, dtype):
    for a, b in (
        (ragged(device, 5, 2, dtype=dtype), ragged(device, 4, 9, dtype=dtype)),
        (torch.randn(3, 6, 8, device=device).to(dtype), torch.randn(5, 7, 8, device=device).to(dtype)),
        (ragged(device, 5, 2, dtype=dtype), ragged(device, 4, 9, dtype=torch.float32)),
    ):
        assert unchanged(partial(mteb.max_sim, a, b), rtol=1e-5, atol=1e-5).dtype == torch.float32
        li.unpatch("mteb")


def test_arrays(mteb):
    queries = [np.random.default_rng(0).normal(size=(n, 8)).astype("float32") for n in (5, 2)]
    documents = [np.random.default_rng(1).normal(size=(n, 8)).astype("float32") for n in (4, 9, 3)]
    for a, b in ((queries, documents), (np.stack(queries[:1]), np.stack(documents[:1]))):
        for function, given in ((mteb.max_sim, b), (mteb.pairwise_max_sim, b[: len(a)])):
            unchanged(partial(function, a, given))
            assert called(function, a, given)
            li.unpatch("mteb")


@pytest.mark.parametrize("what", ["lists", "lists whose padding wins", "uneven lists", "tensors"])
def test_pairwise_max_sim(mteb, device, what):
    a, b = calls(device)[what]
    unchanged(lambda: mteb.pairwise_max_sim(a, b[: len(a)]), rtol=1e-12, atol=1e-12)


def test_documents_go_to_the_device_in_blocks(mteb, monkeypatch):
    documents = ragged("cpu", *range(1, 12))
    queries = ragged("cpu", 5, 4)
    monkeypatch.setitem(mteb_patch.zero_padded.ELEMENTS, "cpu", 8 * 20)
    unchanged(lambda: mteb.max_sim(queries, documents))
    assert called(mteb.max_sim, queries, documents)["maxsim_varlen"] > 2


@pytest.mark.gpu
def test_embeddings_of_the_host_are_scored_on_the_gpu(mteb):
    """mteb moves them there, and the scores back."""
    queries, documents = ragged("cpu", 5, 2, dtype=torch.float32), ragged("cpu", 4, 9, dtype=torch.float32)
    tensors = torch.randn(3, 6, 8), torch.randn(5, 7, 8)
    for a, b in ((queries, documents), tensors):
        unchanged(partial(mteb.max_sim, a, b), rtol=1e-3, atol=1e-3)
        li.unpatch("mteb")


@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("what", ["lists", "lists whose padding wins", "uneven lists", "tensors"])
def test_multi_vectors_of_jina(jina, device, what, batch_size):
    queries, passages = calls(device)[what]
    jina.model.device = torch.device(device)
    scores = unchanged(lambda: jina.score_multi_vector(queries, passages, batch_size=batch_size))
    assert scores.device == torch.device("cpu") and scores.dtype == torch.float32
    li.unpatch("mteb")
    assert not called(jina.score_multi_vector, queries, passages)


def test_jina_refuses_what_it_refuses(jina):
    li.patch("mteb")
    with pytest.raises(ValueError, match="No passages"):
        jina.score_multi_vector(ragged("cpu", 3), [])
    with pytest.raises(RuntimeError):
        jina.score_multi_vector(ragged("cpu", 3), ragged("cpu", 4, d=5))
    assert [*li.patched()["mteb"].left] == [
        "JinaV4Wrapper.score_multi_vector: arguments of another form",
        "JinaV4Wrapper.score_multi_vector: queries and documents differ in d",
    ]


def arrays(*lengths, dtype="float32", d=8):
    return [np.random.default_rng(n).normal(size=(n, d)).astype(dtype) for n in lengths]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("elements", [1, 100, 10**9])
def test_arrays_of_a_search(of_arrays, monkeypatch, dtype, elements):
    (query,), documents = arrays(5, dtype=dtype), arrays(4, 9, 1, 30, 2, dtype=dtype)
    wanted = of_arrays(query.astype("float64"), [x.astype("float64") for x in documents])
    monkeypatch.setitem(mteb_patch.zero_padded.ELEMENTS, "cpu", elements)
    li.patch("mteb")
    with side_by_side.Calls() as calls:
        scores = of_arrays(query, documents)
    assert sum(calls.of.values()) == {1: 5, 100: 4, 10**9: 1}[elements]
    assert all(type(score) is float for score in scores)
    np.testing.assert_allclose(scores, wanted, rtol=1e-5)


OWN_ARRAYS = {
    "integers": (arrays(3, dtype="int64"), arrays(4, dtype="int64")),
    "two dtypes": (arrays(3), arrays(4, dtype="float64")),
    "a transposed document": (arrays(8), [arrays(8)[0].T]),
    "no documents": (arrays(3), []),
}


@pytest.mark.parametrize("what", OWN_ARRAYS)
def test_arrays_that_stay_mtebs(of_arrays, what):
    (query,), documents = OWN_ARRAYS[what]
    left_alone(lambda: of_arrays(query, documents))
    assert sum(li.patched()["mteb"].left.values()) == 1


def test_arrays_of_one_length_may_be_one_array(of_arrays):
    (query,), documents = arrays(5), np.stack(arrays(4, 4))
    unchanged(lambda: of_arrays(query, documents), rtol=1e-5, atol=0)
    assert li.patched()["mteb"].served == 1


# mteb goes through the first dim of pairs: embeddings of one text are no text each.
REFUSED = {
    "pairs of rows": ("pairwise_max_sim", torch.randn(3, 8), torch.randn(3, 8)),
    "pairs of rows of arrays": ("pairwise_max_sim", np.ones((3, 8), np.float32), np.ones((3, 8), np.float32)),
    "a pair of rows": ("pairwise_max_sim", torch.randn(8), torch.randn(8)),
    "a pair of numbers": ("pairwise_max_sim", torch.tensor(3.0), torch.tensor(3.0)),
    "pairs of two lengths": ("pairwise_max_sim", ragged("cpu", 3, 2), ragged("cpu", 3)),
    "an empty document of a pair": ("pairwise_max_sim", ragged("cpu", 3, 2), ragged("cpu", 3, 0)),
    "two widths": ("max_sim", ragged("cpu", 3, 2), ragged("cpu", 3, d=5)),
    "documents without a token": ("max_sim", ragged("cpu", 3, 2), ragged("cpu", 0, 0)),
    "no documents": ("max_sim", ragged("cpu", 3, 2), []),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_refuses(mteb, what):
    name, a, b = REFUSED[what]
    refused_as_before(lambda: getattr(mteb, name)(a, b))


def test_an_empty_array_is_refused_as_before(of_arrays):
    refused_as_before(lambda: of_arrays(*arrays(3), arrays(4, 0)))


def test_pairwise_max_sim_of_what_is_gone_through_once(mteb):
    a, b = calls("cpu")["lists"]
    left_alone(lambda: mteb.pairwise_max_sim(iter(a), iter(b[:4])))


@pytest.mark.parametrize("said", ["1", "mteb", "pylate,mteb"])
def test_disabled(mteb, said):
    a, b = calls("cpu")["lists"]
    left_alone(lambda: (mteb.max_sim(a, b), mteb.pairwise_max_sim(a, b[:4])), said)


def test_names_that_were_imported_before_are_reached(mteb):
    from mteb.similarity_functions import max_sim  # as mteb.models.abs_encoder does

    li.patch("mteb")
    assert called(max_sim, *calls("cpu")["lists"]) == {"maxsim_varlen": 1}
    li.unpatch("mteb")
    assert not called(max_sim, *calls("cpu")["lists"])


def test_unpatch_restores_everything(mteb):
    side_by_side.assert_restored("mteb")


def test_a_release_without_what_the_patch_builds_on_is_named(mteb, monkeypatch):
    """The leaves beside it are patched."""
    monkeypatch.delattr(mteb, "_select_device")
    with pytest.warns(
        RuntimeWarning, match=r"did not find mteb.similarity_functions.max_sim, .*2\.23 to 2\.26"
    ):
        li.patch("mteb")
