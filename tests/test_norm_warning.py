"""The one look at the norms of Q, in the process's first call without normalize."""

import warnings

import pytest
import torch

import late_interaction as li
from late_interaction import autograd


@pytest.fixture(autouse=True)
def first_call(monkeypatch):
    monkeypatch.delenv("LIK_SUPPRESS_NORM_WARN", raising=False)
    monkeypatch.setattr(autograd, "_NORM_CHECKED", False)


def said(*calls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [str(w.message) for w in caught if "normalize=True" in str(w.message)]


def score(device, size=1.0, **options):
    Q, D = (torch.nn.functional.normalize(torch.randn(3, 5, 8, device=device), dim=-1) for _ in "QD")
    return lambda: li.maxsim(Q * size, D, **options)


def test_warns_once_and_points_at_the_caller(device):
    with pytest.warns(UserWarning, match="median norm of Q's tokens is 7.000") as caught:
        li.maxsim(torch.full((1, 2, 1), 7.0, device=device), torch.ones(1, 2, 1, device=device))
    assert caught[0].filename == __file__
    assert said(score(device, 7.0)) == []


def test_unit_queries_are_looked_at_once_and_in_silence(device):
    assert said(score(device), score(device, 7.0)) == []


def test_a_normalizing_call_does_not_count(device):
    assert said(score(device, 7.0, normalize=True)) == []
    assert len(said(score(device, 7.0))) == 1


def test_the_environment_silences_it(device, monkeypatch):
    monkeypatch.setenv("LIK_SUPPRESS_NORM_WARN", "1")
    assert said(score(device, 7.0)) == []


def test_empty_queries_say_nothing(device):
    empty = torch.empty(0, 5, 8, device=device)
    assert said(lambda: li.maxsim(empty, torch.ones(2, 3, 8, device=device))) == []


@pytest.mark.gpu
def test_nothing_waits_where_it_must_not():
    call = score("cuda", 7.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert said(call) == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    torch.testing.assert_close(captured, call())
