"""Calls of a search that a GPU plans alike: how many documents each of them has."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from late_interaction._search import equal_plans


def wanted_calls(monkeypatch, kinds, documents, count, size=1 << 40):
    """The numbers of documents of the calls that score `count` of a corpus's. kinds: the first number of
    documents of each kind of plan."""
    monkeypatch.setattr(equal_plans, "_plan", lambda N, *_: str(sum(x <= N for x in kinds)))
    monkeypatch.setattr(equal_plans, "_BYTES", size)
    Q, D = torch.ones(2, 3, 4), torch.arange(count).float().view(-1, 1, 1).expand(count, 3, 4)
    alike = equal_plans.Alike(Q, D, documents, False, False, None)
    alike._call = ()
    sizes = []

    def score(D, mask, scale):
        assert len(mask) == len(D) and scale is None
        sizes.append(len(D))
        return D[:, 0, 0].expand(2, -1)

    found = alike.scores(score, D, torch.ones(count, 3, dtype=torch.bool), None)
    assert torch.equal(found, torch.arange(count).float().expand(2, -1))
    return sizes


@pytest.mark.parametrize(
    "kinds, documents, count, size, wanted",
    [
        ([], 500, 70, 1 << 40, [70]),  # one kind of plan
        ([40], 500, 70, 1 << 40, [70]),
        ([100], 500, 70, 1 << 40, [140]),  # documents of zeros behind them
        ([450], 500, 70, 1 << 40, [500]),
        ([450], 500, 500, 1 << 40, [500]),
        ([100], 90, 70, 1 << 40, [70]),  # all of the corpus are few
        ([5, 100], 80, 1, 1 << 40, [8]),
        ([100], 500, 170, 48 * 50, [50, 50, 50, 20]),  # parts of the size whose plan counts
        ([30, 100], 500, 170, 48 * 50, [50, 50, 50, 40]),
        ([100], 500, 0, 1 << 40, [0]),
        ([2], 500, 3, 1, [1, 1, 1]),  # a document is more than the memory that the planner looks at
    ],
)
def test_calls_of_a_search_are_planned_alike(kinds, documents, count, size, wanted, monkeypatch):
    assert wanted_calls(monkeypatch, kinds, documents, count, size) == wanted


def test_documents_that_are_added_are_zeros():
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn):
        x = torch.ones(2, 3).to(dtype)
        padded = equal_plans._padded(x, 5)
        assert padded.dtype == x.dtype and torch.equal(padded[:2].float(), x.float())
        assert padded.shape == (5, 3) and not bool(padded[2:].float().any())
    one = torch.tensor(2.0)  # a scale for all tokens
    assert equal_plans._padded(one, 5) is one and equal_plans._padded(None, 5) is None


def test_plans_of_many_documents_are_alike():
    """With the shapes of a search the plan changes between few documents alone."""
    for dtype in ("bf16", "e4m3", "fp32"):
        options = (dtype, "high", False, False, "forward", "auto")
        plans = [
            equal_plans._plan(N, 16, (32, 128, 128), options, (90, 132)) for N in (20, 600, 7281, 1 << 18)
        ]
        assert plans[1] == plans[2] == plans[3] and "grid" not in plans[0]
        assert (plans[0] == plans[1]) == (dtype == "fp32")


@pytest.mark.parametrize(
    ("dtype", "precision", "wanted"),
    [
        (torch.float32, None, ("fp32", "high")),
        (torch.float32, "medium", ("fp32", "medium")),
        (torch.bfloat16, None, ("bf16", "highest")),
        (torch.int8, None, ("int8", "highest")),
        (torch.float64, "highest", ("fp64", "highest")),
    ],
)
@pytest.mark.parametrize("masked, normalize, current", [(True, False, 0), (False, True, 0), (True, True, 1)])
def test_what_a_gpu_s_plan_depends_on(dtype, precision, wanted, masked, normalize, current, monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda x: entered.append(x) or nullcontext())
    monkeypatch.setattr(equal_plans.ops, "cuda_missing", None)
    monkeypatch.setattr(equal_plans.ops, "cuda_capability", lambda: 89)
    properties = SimpleNamespace(multi_processor_count=128, name="NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: {1: properties}[device.index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    equal_plans._multiprocessors.cache_clear()
    monkeypatch.setattr(equal_plans, "float32_precision", lambda device: {"cuda": "high"}[device])
    queries = SimpleNamespace(is_cuda=True, shape=(3, 4, 8), device=torch.device("cuda", 1))
    queries.dtype = torch.float32 if dtype == torch.int8 else dtype  # which int8 documents meet as int8
    documents = torch.ones(5, 7, 8, dtype=dtype)
    alike = equal_plans.Alike(queries, documents, 5, masked, normalize, precision)
    assert alike._call == (3, (4, 7, 8), (*wanted, masked, normalize, "forward", "auto"), (89, 128, True))
    assert entered == ([] if current == 1 else [torch.device("cuda", 1)])
    equal_plans._multiprocessors.cache_clear()


@pytest.mark.parametrize("count, wanted", [(0, False), (49, False), (50, True), (170, True)])
def test_documents_beside_which_others_change_no_plan(count, wanted, monkeypatch):
    monkeypatch.setattr(equal_plans, "_BYTES", 48 * 50)  # 50 documents
    D = torch.ones(count, 3, 4)
    assert equal_plans.enough(D) == wanted
    if wanted:
        sizes = {equal_plans.Alike(D[:2], D, more, *[None] * 3)._size for more in (count, 500, 1 << 40)}
        assert sizes == {50}
