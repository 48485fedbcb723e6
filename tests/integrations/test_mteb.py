"""What mteb computes MaxSim by, release by release, before and after patch("mteb")."""

import importlib
import inspect
import sys
import types

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction.integrations import mteb as mteb_patch
from tests.support import side_by_side

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
    with side_by_side.release("mteb", "mteb", request.param) as folder:
        package = side_by_side.without_its_init("mteb", folder)
        stand_ins = [side_by_side.anything(name) for name in IMPORTED]
        for name in ("mteb.models", "mteb.models.model_implementations"):
            module = types.ModuleType(name)
            module.__path__ = [str(folder.joinpath(*name.split(".")))]
            stand_ins.append(module)
        languages = types.ModuleType("mteb.languages")
        languages.PROGRAMMING_LANGS = []
        with pytest.MonkeyPatch.context() as patch:
            for module in (package, languages, *stand_ins):
                patch.setitem(sys.modules, module.__name__, module)
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


def ragged(device, *lengths, d=8, dtype=torch.float64):
    return [torch.randn(n, d, device=device, dtype=dtype) for n in lengths]


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
def test_max_sim(mteb, device, monkeypatch, what):
    a, b = calls(device)[what]
    try:
        wanted = mteb.max_sim(a, b)
    except RuntimeError:  # of two dtypes, by its einsum
        li.patch("mteb")
        with pytest.raises(RuntimeError):
            mteb.max_sim(a, b)
        return
    li.patch("mteb")
    with side_by_side.no_einsum(monkeypatch):
        scores = mteb.max_sim(a, b)
    torch.testing.assert_close(scores, wanted, rtol=1e-12, atol=1e-12)
    assert scores.device == wanted.device


def test_groups_of_like_lengths_are_padded(mteb, monkeypatch):
    """What mteb pads a document to depends on its group; a small budget of tokens makes many."""
    own = mteb._token_budget_chunks
    monkeypatch.setattr(mteb, "_token_budget_chunks", lambda widths, most=20: own(widths, min(most, 20)))
    queries = [x.abs() for x in ragged("cpu", 2, 40, 3)]
    documents = [-x.abs() for x in ragged("cpu", 3, 9, 5, 9, 4, 90)]
    wanted = mteb.max_sim(queries, documents)
    assert (wanted == 0).any() and (wanted < 0).any()
    li.patch("mteb")
    with side_by_side.Calls() as called:
        torch.testing.assert_close(mteb.max_sim(queries, documents), wanted)
    assert called.of == {"maxsim_varlen": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_scores_float32(mteb, device, dtype):
    for a, b in (
        (ragged(device, 5, 2, dtype=dtype), ragged(device, 4, 9, dtype=dtype)),
        (torch.randn(3, 6, 8, device=device).to(dtype), torch.randn(5, 7, 8, device=device).to(dtype)),
        (ragged(device, 5, 2, dtype=dtype), ragged(device, 4, 9, dtype=torch.float32)),
    ):
        wanted = mteb.max_sim(a, b)
        li.patch("mteb")
        scores = mteb.max_sim(a, b)
        li.unpatch("mteb")
        assert scores.dtype == wanted.dtype == torch.float32
        torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)


def test_arrays(mteb):
    queries = [np.random.default_rng(0).normal(size=(n, 8)).astype("float32") for n in (5, 2)]
    documents = [np.random.default_rng(1).normal(size=(n, 8)).astype("float32") for n in (4, 9, 3)]
    for a, b in ((queries, documents), (np.stack(queries[:1]), np.stack(documents[:1]))):
        wanted = mteb.max_sim(a, b), mteb.pairwise_max_sim(a, b[: len(a)])
        li.patch("mteb")
        with side_by_side.Calls() as called:
            found = mteb.max_sim(a, b), mteb.pairwise_max_sim(a, b[: len(a)])
        li.unpatch("mteb")
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
        assert len(called.of) == 2


@pytest.mark.parametrize("what", ["lists", "lists whose padding wins", "uneven lists", "tensors"])
def test_pairwise_max_sim(mteb, device, monkeypatch, what):
    a, b = calls(device)[what]
    b = b[: len(a)]
    wanted = mteb.pairwise_max_sim(a, b)
    li.patch("mteb")
    with side_by_side.no_einsum(monkeypatch):
        scores = mteb.pairwise_max_sim(a, b)
    torch.testing.assert_close(scores, wanted, rtol=1e-12, atol=1e-12)


def test_documents_go_to_the_device_in_blocks(mteb, monkeypatch):
    documents = ragged("cpu", *range(1, 12))
    queries = ragged("cpu", 5, 4)
    wanted = mteb.max_sim(queries, documents)
    monkeypatch.setitem(mteb_patch.zero_padded.ELEMENTS, "cpu", 8 * 20)
    li.patch("mteb")
    with side_by_side.Calls() as called:
        torch.testing.assert_close(mteb.max_sim(queries, documents), wanted)
    assert called.of["maxsim_varlen"] > 2


@pytest.mark.gpu
def test_embeddings_of_the_host_are_scored_on_the_gpu(mteb):
    """mteb moves them there, and the scores back."""
    queries, documents = ragged("cpu", 5, 2, dtype=torch.float32), ragged("cpu", 4, 9, dtype=torch.float32)
    tensors = torch.randn(3, 6, 8), torch.randn(5, 7, 8)
    for a, b in ((queries, documents), tensors):
        wanted = mteb.max_sim(a, b)
        li.patch("mteb")
        scores = mteb.max_sim(a, b)
        li.unpatch("mteb")
        assert scores.device == wanted.device
        torch.testing.assert_close(scores, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("what", ["lists", "lists whose padding wins", "uneven lists", "tensors"])
def test_multi_vectors_of_jina(jina, device, monkeypatch, what, batch_size):
    queries, passages = calls(device)[what]
    jina.model.device = torch.device(device)
    wanted = jina.score_multi_vector(queries, passages, batch_size)
    li.patch("mteb")
    with side_by_side.no_einsum(monkeypatch):
        scores = jina.score_multi_vector(queries, passages, batch_size=batch_size)
    torch.testing.assert_close(scores, wanted)
    assert scores.device == torch.device("cpu") and scores.dtype == torch.float32
    li.unpatch("mteb")
    with side_by_side.Calls() as called:
        jina.score_multi_vector(queries, passages)
    assert not called.of


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
    with side_by_side.Calls() as called:
        scores = of_arrays(query, documents)
    assert sum(called.of.values()) == {1: 5, 100: 4, 10**9: 1}[elements]
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
    wanted = of_arrays(query, documents)
    li.patch("mteb")
    assert of_arrays(query, documents) == pytest.approx(wanted)
    assert sum(li.patched()["mteb"].left.values()) == 1


def test_arrays_of_one_length_may_be_one_array(of_arrays):
    (query,), documents = arrays(5), np.stack(arrays(4, 4))
    wanted = of_arrays(query, documents)
    li.patch("mteb")
    np.testing.assert_allclose(of_arrays(query, documents), wanted, rtol=1e-5)
    assert li.patched()["mteb"].served == 1


def test_an_empty_array_is_refused_as_before(of_arrays):
    li.patch("mteb")
    with pytest.raises(ValueError, match="zero-size array"):
        of_arrays(*arrays(3), arrays(4, 0))


ITERATED = {
    "rows": torch.randn(3, 8),
    "rows of arrays": np.ones((3, 8), np.float32),
    "one row": torch.randn(8),
    "a number": torch.tensor(3.0),
}


@pytest.mark.parametrize("what", ITERATED)
def test_pairwise_max_sim_refuses_what_has_no_pairs(mteb, what):
    """mteb goes through the first dim: embeddings of one text are no text each."""
    with pytest.raises(Exception) as own:  # of whatever kind
        mteb.pairwise_max_sim(ITERATED[what], ITERATED[what])
    li.patch("mteb")
    with pytest.raises(type(own.value)) as patched:
        mteb.pairwise_max_sim(ITERATED[what], ITERATED[what])
    assert str(patched.value) == str(own.value)


def test_pairwise_max_sim_of_what_is_gone_through_once(mteb):
    a, b = calls("cpu")["lists"]
    wanted = mteb.pairwise_max_sim(a, b[:4])
    li.patch("mteb")
    torch.testing.assert_close(mteb.pairwise_max_sim(iter(a), iter(b[:4])), wanted)


REFUSED = {
    "pairs of two lengths": ("pairwise_max_sim", ragged("cpu", 3, 2), ragged("cpu", 3)),
    "an empty document of a pair": ("pairwise_max_sim", ragged("cpu", 3, 2), ragged("cpu", 3, 0)),
    "two widths": ("max_sim", ragged("cpu", 3, 2), ragged("cpu", 3, d=5)),
    "documents without a token": ("max_sim", ragged("cpu", 3, 2), ragged("cpu", 0, 0)),
    "no documents": ("max_sim", ragged("cpu", 3, 2), []),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_refuses(mteb, what):
    name, a, b = REFUSED[what]
    function = getattr(mteb, name)
    with pytest.raises(Exception) as own:  # of whatever kind
        function(a, b)
    li.patch("mteb")
    with pytest.raises(type(own.value)) as patched:
        function(a, b)
    assert str(patched.value) == str(own.value)


@pytest.mark.parametrize("said", ["1", "mteb", "pylate,mteb"])
def test_disabled(mteb, monkeypatch, said):
    a, b = calls("cpu")["lists"]
    wanted = mteb.max_sim(a, b), mteb.pairwise_max_sim(a, b[:4])
    li.patch("mteb")
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", said)
    with side_by_side.Calls() as called:
        assert torch.equal(mteb.max_sim(a, b), wanted[0])
        assert torch.equal(mteb.pairwise_max_sim(a, b[:4]), wanted[1])
    assert not called.of


def test_names_that_were_imported_before_are_reached(mteb):
    from mteb.similarity_functions import max_sim  # as mteb.models.abs_encoder does

    signature = inspect.signature(max_sim)
    li.patch("mteb")
    li.patch("mteb")
    with side_by_side.Calls() as called:
        max_sim(*calls("cpu")["lists"])
    assert called.of == {"maxsim_varlen": 1} and inspect.signature(max_sim) == signature
    assert max_sim.__name__ == max_sim.__code__.co_name == "max_sim"
    li.unpatch("mteb")
    li.unpatch("mteb")
    with side_by_side.Calls() as called:
        max_sim(*calls("cpu")["lists"])
    assert not called.of


def test_a_release_without_what_the_patch_builds_on_is_named(mteb, monkeypatch):
    """The leaves beside it are patched."""
    monkeypatch.delattr(mteb, "_select_device")
    with pytest.warns(
        RuntimeWarning, match=r"did not find mteb.similarity_functions.max_sim, .*2\.23 to 2\.26"
    ):
        li.patch("mteb")
