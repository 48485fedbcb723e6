"""vLLM's scoring of pairs, before and after patch("vllm"); and scores of documents where a server has them.

vLLM's wheel is too heavy for each run of the tests. They run on its own modules where `make sentinel` put
them, without what else those import, and always on a stand-in with the same names and signatures that
computes the same: padded float32 copies, a masked maximum, float32 scores without dims.
"""

import contextlib
import importlib
import importlib.metadata
import logging
import sys
import types
from functools import partial
from unittest import mock

import pytest
import torch

import late_interaction as li
from late_interaction.integrations.vllm import compute_maxsim_score_batched, compute_maxsim_score_offsets
from tests.support import side_by_side
from tests.support.side_by_side import called

left_alone = partial(side_by_side.assert_left_alone, "vllm")
MODULE, RUNNER = "vllm.v1.pool.late_interaction", "vllm.v1.pool.late_interaction_runner"
OFFLINE, TRITON = "vllm.entrypoints.pooling.scoring.utils", "vllm.v1.pool.flash_maxsim"
STAND_IN = {
    MODULE: '''
from collections.abc import Sequence

import torch


def compute_maxsim_score_batched(
    q_embs: Sequence[torch.Tensor],
    d_embs: Sequence[torch.Tensor],
    max_batch_size: int = 64,
    max_score_matrix_elements: int = 64_000_000,
) -> list[torch.Tensor]:
    """Its own."""
    if len(q_embs) != len(d_embs):
        raise ValueError("q_embs and d_embs must have the same length")
    if max_batch_size <= 0:
        raise ValueError("max_batch_size must be greater than 0")
    scores = []
    for i in range(0, len(q_embs), max_batch_size):
        q_part, d_part = q_embs[i : i + max_batch_size], d_embs[i : i + max_batch_size]
        if any(q.shape[1] != d.shape[1] for q, d in zip(q_part, d_part)):
            raise ValueError("Query and document embeddings must have same dim")
        Q = torch.nn.utils.rnn.pad_sequence([x.float() for x in q_part], batch_first=True)
        D = torch.nn.utils.rnn.pad_sequence([x.float() for x in d_part], batch_first=True)
        longest = torch.arange(max(Q.shape[1], D.shape[1]), device=Q.device)
        q_mask = longest[: Q.shape[1]] < torch.tensor([[len(x)] for x in q_part], device=Q.device)
        d_mask = longest[: D.shape[1]] < torch.tensor([[len(x)] for x in d_part], device=Q.device)
        similarities = torch.bmm(Q, D.mT).masked_fill(~d_mask.unsqueeze(1), float("-inf"))
        scores.extend(similarities.amax(-1).masked_fill(~q_mask, 0.0).sum(-1).unbind())
    return scores
''',
    RUNNER: '''
from vllm.v1.pool.late_interaction import compute_maxsim_score_batched


class LateInteractionRunner:
    def __init__(self, enable_flash=True):
        self._flash_enabled = enable_flash

    def _score(self, queries, docs):
        """Its own."""
        if self._flash_enabled and docs and queries[0].is_cuda and all(q is queries[0] for q in queries):
            return self._score_flash_shared_query(queries[0], docs)
        return compute_maxsim_score_batched(queries, docs)

    @staticmethod
    def _score_flash_shared_query(query, docs):
        from vllm.v1.pool.flash_maxsim import flash_maxsim_rerank_direct

        return flash_maxsim_rerank_direct()
''',
    OFFLINE: '''
import torch


def compute_maxsim_score(q_emb: torch.Tensor, d_emb: torch.Tensor) -> torch.Tensor:
    """Its own."""
    return torch.matmul(q_emb.float(), d_emb.float().T).amax(dim=-1).sum()
''',
}
# What vLLM's own modules import, and scoring does not need.
IMPORTED = [
    "config",
    "exceptions",
    "inputs",
    "pooling_params",
    "renderers.chat_utils",
    "v1.outputs",
    "entrypoints.pooling.scoring.typing",
]
STANDING_IN = "a stand-in"


def modules_of(folder):
    """What vLLM's modules import, and packages without their own inits that have the folder's modules."""
    made = {}
    for name in (MODULE, RUNNER, OFFLINE):
        for end, character in enumerate(name):
            if character == ".":
                package = types.ModuleType(name[:end])
                package.__path__ = [str(folder.joinpath(*name[:end].split(".")))] if folder else []
                made.setdefault(package.__name__, package)
    for inner in IMPORTED:
        made[f"vllm.{inner}"] = side_by_side.anything(f"vllm.{inner}")
    made["vllm"].PromptType, made["vllm"].TextPrompt = type("PromptType", (), {}), dict
    made["vllm.logger"] = types.ModuleType("vllm.logger")
    made["vllm.logger"].init_logger = logging.getLogger
    made[TRITON] = side_by_side.anything(TRITON)  # a class by its function's name takes no arguments
    return made


@pytest.fixture(params=[STANDING_IN, *(side_by_side.releases("vllm") or ["of any release"])])
def vllm(request, monkeypatch):
    """The module of the batched function, and the function as runners hold it that imported it before."""
    with contextlib.ExitStack() as stack:
        folder = None
        if request.param != STANDING_IN:
            folder = stack.enter_context(side_by_side.release("vllm", "vllm", request.param))
        for name, module in modules_of(folder).items():
            monkeypatch.setitem(sys.modules, name, module)
        for name in (MODULE, RUNNER, OFFLINE):
            if folder is None:
                module = types.ModuleType(name)
                monkeypatch.setitem(sys.modules, name, module)
                exec(STAND_IN[name], vars(module))
        module = importlib.import_module(MODULE)
        module.held = module.compute_maxsim_score_batched
        yield module
        li.unpatch("vllm")


@pytest.fixture
def offline(vllm):
    """The function that ``LLM.score`` calls, imported before the patch."""
    return importlib.import_module(OFFLINE).compute_maxsim_score


@pytest.fixture
def runner(vllm):
    """A worker's runner, made before the patch."""
    return importlib.import_module(RUNNER).LateInteractionRunner()


def test_calls_are_counted(vllm, monkeypatch):
    li.patch("vllm")
    Q, D = torch.rand(3, 8), torch.rand(4, 8)
    vllm.held([Q], [D])
    vllm.held([Q.double()], [D.double()])
    vllm.held([Q.requires_grad_()], [D])
    with pytest.raises(ValueError, match="must be greater than 0"):
        vllm.held([D], [D], max_batch_size=0)
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "vllm")
    vllm.held([D], [D])
    found = li.patched()["vllm"]
    name = "compute_maxsim_score_batched: "
    assert found.served == 1 and found.left == {
        f"{name}embeddings of other kinds, of float64, or empty": 1,
        f"{name}gradients": 1,
        f"{name}limits that are not above 0": 1,
        f"{name}LATE_INTERACTION_DISABLE turns the patch off": 1,
    }


def test_leaves_are_reached(vllm):
    side_by_side.assert_leaves_are_reached("vllm")


def step(device, dtype=torch.float32, d=8):
    """The hidden states of a step: documents among tokens that are none of theirs; and a query for each."""
    hidden = torch.randn(40, d, device=device).to(dtype)
    spans = [(3, 7), (10, 1), (12, 9), (25, 14)]
    queries = [torch.randn(n, d, device=device).to(dtype) for n in (5, 2)]
    return [queries[0], queries[1], queries[0], queries[0]], hidden, spans


def unchanged(measure, product="bmm"):
    """Without the product that vLLM itself computes similarities by."""
    without = partial(mock.patch.object, torch, product, None)
    return side_by_side.assert_unchanged("vllm", measure, without, rtol=1e-5, atol=1e-5)


def and_whether_they_learn(scores):
    return [(score, score.requires_grad) for score in scores]


def views(hidden, spans):
    return [hidden[start : start + length] for start, length in spans]


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """The sizes of what is concatenated or cloned."""

    def __init__(self):
        super().__init__()
        self.tokens = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._opname in ("cat", "clone", "_to_copy", "copy_"):
            self.tokens.append(len(result))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["views of one tensor", "tensors of their own", "one pair"])
def test_scores(vllm, device, dtype, kind):
    queries, hidden, spans = step(device, dtype)
    documents = views(hidden, spans)
    if kind == "tensors of their own":
        documents = [x.clone() for x in documents]
    elif kind == "one pair":
        queries, documents = queries[:1], documents[:1]
    scores = unchanged(lambda: vllm.held(queries, documents, max_batch_size=2))
    assert isinstance(scores, list)
    assert all(score.dtype == torch.float32 and score.shape == () for score in scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries_of_a_step", ["one", "several"])
def test_a_runner_scores_its_steps(vllm, runner, device, dtype, queries_of_a_step):
    """Also those that it would send to Triton: one query, on a GPU."""
    queries, hidden, spans = step(device, dtype)
    if queries_of_a_step == "one":
        queries = [queries[0]] * len(queries)
    wanted = vllm.held(queries, views(hidden, spans))
    li.patch("vllm")
    with mock.patch.object(torch, "bmm", None), side_by_side.Calls() as calls:
        scores = runner._score(queries, views(hidden, spans))
    assert calls.of == {"maxsim_pairs_packed": 1} and li.patched()["vllm"].served == 1
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("why", ["float64", "disabled"])
def test_a_runner_scores_by_itself_what_the_kernels_do_not(vllm, runner, why):
    """By vLLM's own functions throughout: a call is left once."""
    queries, hidden, spans = step("cpu", torch.float64 if why == "float64" else torch.float32)
    said = "vllm" if why == "disabled" else "0"
    left_alone(lambda: runner._score(queries, views(hidden, spans)), said)
    ((kind, times),) = li.patched()["vllm"].left.items()
    assert kind.startswith("LateInteractionRunner._score: ") and times == 1


def test_a_runner_whose_release_has_no_copy_of_flash_maxsim(vllm, runner, monkeypatch):
    """It calls the function for steps of many queries, which is patched."""
    monkeypatch.setitem(sys.modules, TRITON, None)
    queries, hidden, spans = step("cpu")
    li.patch("vllm")
    assert not any("Runner" in place for place in li.patched()["vllm"].places)
    assert called(runner._score, queries, views(hidden, spans)) == {"maxsim_pairs_packed": 1}


def test_requests_of_a_step(vllm, runner, monkeypatch):
    """A query's hidden states are kept, and the documents of later steps become scores."""
    if not hasattr(runner, "postprocess_pooler_output"):
        pytest.skip("the stand-in scores, and does not know requests")

    def params(mode, **meta):
        meta = types.SimpleNamespace(mode=mode, query_key="a query", **meta)
        return types.SimpleNamespace(late_interaction_params=meta)

    query, documents = torch.randn(3, 8), [torch.randn(5, 8), torch.randn(2, 8)]
    li.patch("vllm")
    runner.register_request("q", of_query := params(vllm.LATE_INTERACTION_MODE_CACHE_QUERY, query_uses=2))
    runner.postprocess_pooler_output([query], [of_query], ["q"], [True])
    of_documents = [params(vllm.LATE_INTERACTION_MODE_SCORE_DOC, query_uses=None)] * 2
    monkeypatch.setattr(torch, "bmm", None)
    scores = runner.postprocess_pooler_output(documents, of_documents, ["a", "b"], [True, True])
    wanted = [(query @ x.T).amax(-1).sum() for x in documents]
    torch.testing.assert_close(torch.stack(scores), torch.stack(wanted))
    assert li.patched()["vllm"].served == 1 and not runner._query_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pair_offline(offline, device, dtype):
    query, document = torch.randn(5, 8, device=device).to(dtype), torch.randn(9, 8, device=device).to(dtype)
    score = unchanged(lambda: offline(query, document), "matmul")
    assert score.dtype == torch.float32 and score.shape == ()


@pytest.mark.parametrize("what", ["two dtypes", "float64", "integers", "what learns"])
def test_a_pair_that_stays_its_own(offline, what):
    (query, *_), (document, *_) = LEFT[what]
    left_alone(lambda: and_whether_they_learn([offline(query, document)]))
    assert [*li.patched()["vllm"].left.values()] == [1]
    with pytest.raises(IndexError):  # the maximum of nothing
        offline(query, document[:0])


def test_documents_of_one_tensor_are_not_copied(vllm):
    queries, hidden, spans = step("cpu")
    li.patch("vllm")
    with side_by_side.Calls() as calls, Copies() as copies:
        vllm.held(queries, views(hidden, spans))
    assert calls.of == {"maxsim_pairs_packed": 1}
    assert max(copies.tokens, default=0) <= 5 + 2 + 16  # the queries, once each, and the offsets
    with Copies() as copies:
        vllm.held(queries, [x.clone() for x in views(hidden, spans)])
    assert max(copies.tokens) == sum(length for _, length in spans)


def test_views_far_apart_are_packed(vllm):
    """Else the tokens between would be scored with the rest."""
    queries, hidden = step("cpu")[0], torch.randn(500, 8)
    documents = views(hidden, [(0, 5), (480, 6), (490, 7), (20, 3)])
    wanted = vllm.held(queries, documents)
    li.patch("vllm")
    with Copies() as copies:
        found = vllm.held(queries, documents)
    torch.testing.assert_close(found, wanted)
    assert 21 in copies.tokens and 500 not in copies.tokens


@pytest.mark.parametrize(
    ("what", "spans"),
    {
        "disjoint": [(3, 7), (10, 1), (12, 9), (25, 14)],
        "out of order": [(25, 14), (3, 7), (12, 9), (10, 1)],
        "all of it": [(0, 10), (10, 10), (20, 10), (30, 10)],
        "twice the same": [(3, 7), (3, 7), (12, 20), (12, 20)],
        "overlapping": [(3, 17), (10, 1), (12, 9), (25, 14)],
        "far apart": [(0, 1), (39, 1), (20, 1), (10, 2)],
        "empty ones": [(3, 0), (10, 12), (22, 0), (40, 0)],
    }.items(),
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_offsets(device, what, spans, dtype):
    queries, hidden, _ = step(device, dtype)
    scores = compute_maxsim_score_offsets(queries, hidden, *zip(*spans, strict=True))
    for score, query, document in zip(scores, queries, views(hidden, spans), strict=True):
        wanted = (query.double() @ document.double().T).amax(-1).sum() if len(document) else torch.zeros(())
        torch.testing.assert_close(score.double(), wanted.double().to(device), rtol=1e-5, atol=1e-5)


def test_offsets_of_nothing(device):
    assert compute_maxsim_score_offsets([], torch.randn(3, 4, device=device), [], []).shape == (0,)
    assert compute_maxsim_score_batched([], []) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (([torch.ones(1, 2)], torch.ones(3, 2), [0], []), "must be equally long, got 1, 1 and 0"),
        (([torch.ones(1, 2)], torch.ones(3, 2), [2], [2]), "within the 3 tokens .* offset 2 and length 2"),
        (([torch.ones(1, 2)], torch.ones(3, 2), [-1], [2]), "offset -1"),
        (([torch.ones(1, 2)], torch.ones(3, 2), [1], [-1]), "length -1"),
        (([torch.ones(1, 5)], torch.ones(3, 2), [0], [2]), r"queries must be \[Lq, 2\], .* got"),
    ],
)
def test_bad_offsets(args, said):
    with pytest.raises(ValueError, match=said):
        compute_maxsim_score_offsets(*args)


def test_without_vllm_its_function_scores_too(device):
    queries, hidden, spans = step(device, torch.float64)
    scores = compute_maxsim_score_batched(queries, views(hidden, spans))
    wanted = compute_maxsim_score_offsets(queries, hidden, *zip(*spans, strict=True))
    torch.testing.assert_close(torch.stack(scores), wanted)
    with pytest.raises(ValueError, match="equally long, got 1 and 0"):
        compute_maxsim_score_batched(queries[:1], [])


LEFT = {
    "an empty document": ([torch.ones(2, 4)] * 2, [torch.ones(3, 4), torch.ones(0, 4)]),
    "two dtypes": ([torch.ones(2, 4)], [torch.ones(3, 4).half()]),
    "float64": ([torch.ones(2, 4).double()], [torch.ones(3, 4).double()]),
    "integers": ([torch.ones(2, 4).int()], [torch.ones(3, 4).int()]),
    "what learns": ([torch.ones(2, 4, requires_grad=True)], [torch.ones(3, 4)]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_stays_its_own(vllm, what):
    left_alone(lambda: and_whether_they_learn(vllm.held(*LEFT[what])))


@pytest.mark.parametrize("what", ["two lengths", "two widths", "no batch"])
def test_what_it_refuses(vllm, what):
    documents = {"two lengths": [], "two widths": [torch.ones(2, 3)], "no batch": [torch.ones(2, 4)]}[what]
    batch_size = 0 if what == "no batch" else 64
    side_by_side.assert_refused_as_before(
        "vllm", lambda: vllm.held([torch.ones(2, 4)], documents, batch_size)
    )


@pytest.mark.parametrize("said", ["1", "vllm"])
def test_disabled(vllm, said):
    queries, hidden, spans = step("cpu")
    left_alone(lambda: vllm.held(queries, views(hidden, spans)), said)


def test_unpatch_restores_everything(vllm, runner, offline):
    changed = side_by_side.assert_restored("vllm")
    places = (MODULE, "compute_maxsim_score_batched"), (OFFLINE, "compute_maxsim_score")
    assert {*places, (RUNNER, "LateInteractionRunner", "_score")} <= changed


def test_a_function_of_other_parameters_is_left_alone(vllm):
    vllm.compute_maxsim_score_batched = lambda q_embs: "its own"
    with pytest.warns(RuntimeWarning, match="did not find .*compute_maxsim_score_batched"):
        li.patch("vllm")
    assert vllm.compute_maxsim_score_batched(0) == "its own"
