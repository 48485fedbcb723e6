"""vLLM's scoring of pairs, before and after patch("vllm"); and scores of documents where a server has them.

vLLM itself is too heavy to install for a test. A stand-in has its module's path, its function's signature and
what that computes: padded float32 copies, a masked maximum, float32 scores without dims.
"""

import importlib.metadata
import sys
import types

import pytest
import torch

import late_interaction as li
from late_interaction.integrations import vllm as vllm_patch
from late_interaction.integrations.vllm import compute_maxsim_score_batched, compute_maxsim_score_offsets
from tests import side_by_side

STAND_IN = '''
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
'''


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in's module, and the function as a runner holds it that imported it before the patch."""
    for name in ("vllm", "vllm.v1", "vllm.v1.pool"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    module = types.ModuleType("vllm.v1.pool.late_interaction")
    exec(STAND_IN, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.held = module.compute_maxsim_score_batched
    yield module
    li.unpatch("vllm")


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
    assert found.places == ("vllm.v1.pool.late_interaction.compute_maxsim_score_batched",)
    name = "compute_maxsim_score_batched: "
    assert found.served == 1 and found.left == {
        f"{name}embeddings of other kinds, or of float64": 1,
        f"{name}gradients": 1,
        f"{name}limits that are not above 0": 1,
        f"{name}LATE_INTERACTION_DISABLE turns the patch off": 1,
    }


def step(device, dtype=torch.float32, d=8):
    """The hidden states of a step: documents among tokens that are none of theirs; and a query for each."""
    hidden = torch.randn(40, d, device=device).to(dtype)
    spans = [(3, 7), (10, 1), (12, 9), (25, 14)]
    queries = [torch.randn(n, d, device=device).to(dtype) for n in (5, 2)]
    return [queries[0], queries[1], queries[0], queries[0]], hidden, spans


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
def test_scores(vllm, device, monkeypatch, dtype, kind):
    queries, hidden, spans = step(device, dtype)
    documents = views(hidden, spans)
    if kind == "tensors of their own":
        documents = [x.clone() for x in documents]
    elif kind == "one pair":
        queries, documents = queries[:1], documents[:1]
    wanted = vllm.held(queries, documents)
    li.patch("vllm")
    monkeypatch.setattr(torch, "bmm", None)
    scores = vllm.held(queries, documents, max_batch_size=2)
    assert isinstance(scores, list) and len(scores) == len(wanted)
    for one, other in zip(scores, wanted, strict=True):
        assert one.dtype == torch.float32 and one.shape == () and one.device == other.device
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_documents_of_one_tensor_are_not_copied(vllm):
    queries, hidden, spans = step("cpu")
    li.patch("vllm")
    with side_by_side.Calls() as called, Copies() as copies:
        vllm.held(queries, views(hidden, spans))
    assert called.of == {"maxsim_pairs_packed": 1}
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
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted))
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
    wanted = vllm.held(*LEFT[what])
    li.patch("vllm")
    with side_by_side.Calls() as called:
        found = vllm.held(*LEFT[what])
    assert found == wanted and not called.of
    assert [x.requires_grad for x in found] == [x.requires_grad for x in wanted]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (([torch.ones(2, 4)], []), "the same length"),
        (([torch.ones(2, 4)], [torch.ones(2, 3)]), "must have same dim"),
        (([torch.ones(2, 4)], [torch.ones(2, 4)], 0), "max_batch_size must be greater than 0"),
    ],
)
def test_what_it_refuses(vllm, args, said):
    li.patch("vllm")
    with pytest.raises(ValueError, match=said):
        vllm.held(*args)


@pytest.mark.parametrize("said", ["1", "vllm"])
def test_disabled(vllm, monkeypatch, said):
    queries, hidden, spans = step("cpu")
    li.patch("vllm")
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", said)
    with side_by_side.Calls() as called:
        vllm.held(queries, views(hidden, spans))
    assert not called.of


def test_unpatch_restores_everything(vllm):
    own = vllm.held.__code__
    li.patch("vllm")
    li.patch("vllm")
    assert vllm.held.__code__ is not own and vllm.held.__doc__ == "Its own."
    li.unpatch("vllm")
    li.unpatch("vllm")
    assert vllm.held.__code__ is own


def test_a_vllm_without_the_function_is_named(vllm, monkeypatch):
    monkeypatch.delattr(vllm, vllm_patch._NAME)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1")
    with pytest.raises(
        ImportError,
        match=r"found vllm 0\.9\.1, which has none of what is patched",
    ):
        li.patch("vllm")


def test_a_function_of_other_parameters_is_left_alone(vllm):
    vllm.compute_maxsim_score_batched = lambda q_embs: "its own"
    with pytest.raises(ImportError):
        li.patch("vllm")
    assert vllm.compute_maxsim_score_batched(0) == "its own"
