"""The one look at the norms of Q, in the process's first call without normalize."""

import runpy
import warnings

import pytest
import torch

import late_interaction as li
from late_interaction._scoring import norm_warning


@pytest.fixture(autouse=True)
def first_call(monkeypatch):
    monkeypatch.delenv("LIK_SUPPRESS_NORM_WARN", raising=False)
    monkeypatch.setattr(norm_warning, "checked", False)


def said(*calls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [str(w.message) for w in caught if "normalize=True" in str(w.message)]


def said_first(function, *args):
    """What a call says that is the first of its process."""
    norm_warning.checked = False
    return said(lambda: function(*args))


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def queries(size, lengths, Lq=50, front=False):
    """Of `size`, padded with zeros at the end (or in front), and the mask of what is no padding."""
    kept = torch.arange(Lq) < torch.tensor(lengths).unsqueeze(1)
    kept = kept.flip(1) if front else kept
    return unit(len(lengths), Lq, 8) * kept.unsqueeze(-1) * size, kept


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
    monkeypatch.delenv("LIK_SUPPRESS_NORM_WARN")
    assert said(score(device, 7.0)) == []  # that was the first call


def test_a_process_begins_without_a_look():
    assert runpy.run_path(norm_warning.__file__)["checked"] is False


@pytest.mark.parametrize("size", [0.5, 0.89, 1.11, 1.5])
def test_norms_somewhat_off_are_told(device, size):
    (words,) = said(score(device, size))
    assert f"is {size:.3f}:" in words
    assert said_first(score(device, 0.91)) == said_first(score(device, 1.09)) == []


def test_empty_queries_say_nothing(device):
    D = torch.ones(2, 3, 8, device=device)
    for empty in (torch.empty(0, 5, 8, device=device), torch.empty(3, 0, 8, device=device)):
        assert said_first(lambda Q: li.maxsim(Q, D), empty) == []


@pytest.mark.parametrize(("Lq", "parts"), [(1, (1100, 4096)), (2, (600, 2048))])
def test_the_first_tokens_are_looked_at(device, Lq, parts):
    """4096 of them, whatever a query's length: most of these are no unit vectors, but most queries are."""
    Q = unit(9000, Lq, 8)
    Q[slice(*parts)] *= 7
    assert len(said_first(li.maxsim, Q.to(device), unit(1, 3, 8).to(device))) == 1


@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_padding_has_no_norm(device, front, masked):
    D = unit(2, 3, 8).to(device)
    Q, kept = (x.to(device) for x in queries(1.0, [4, 9, 1, 6], front=front))
    mask = kept if masked else None
    assert said_first(li.maxsim, Q, D, mask) == []
    (words,) = said_first(li.maxsim, Q * 7, D, mask)
    assert "is 7.000:" in words


def test_masked_tokens_do_not_count(device):
    """Whatever is in them, and as many as they are."""
    Q, kept = (x.to(device) for x in queries(1.0, [4, 9, 1, 6]))
    D = unit(2, 3, 8).to(device)
    for other in (7.0, torch.inf, torch.nan):
        filled = Q.where(kept.unsqueeze(-1), other)
        for mask in (kept, kept.int()):
            assert said_first(li.maxsim, filled, D, mask) == []
    assert len(said_first(li.maxsim, Q.where(kept.unsqueeze(-1), 7.0), D)) == 1


def test_lengths_say_what_counts(device):
    Q, kept = (x.to(device) for x in queries(1.0, [4, 9, 1, 6]))
    Q = Q.where(kept.unsqueeze(-1), 7.0)
    D = unit(4, 2, 3, 8).to(device)
    lengths = torch.ones(4, 2, dtype=torch.int64, device=device)
    assert said_first(li.maxsim_padded, Q, D, kept.sum(1), lengths) == []
    assert len(said_first(li.maxsim_padded, Q * 7, D, kept.sum(1), lengths)) == 1


@pytest.mark.parametrize("masked", [False, True])
def test_all_zero_or_all_masked_queries_say_nothing(device, masked):
    Q = torch.full((3, 5, 8), 7.0 if masked else 0.0, device=device)
    q_mask = torch.zeros(3, 5, dtype=torch.bool, device=device) if masked else None
    assert said_first(li.maxsim, Q, unit(2, 3, 8).to(device), q_mask) == []


def test_a_long_query_behind_its_padding_is_looked_at(device):
    Q, _ = queries(7.0, [1000], Lq=5000, front=True)
    assert len(said_first(li.maxsim, Q.to(device), unit(1, 3, 8).to(device))) == 1


def test_packed_queries_are_not_looked_at(device):
    """They have no padding, and no option to normalize them; the look is left to the first maxsim."""
    Q, cu = (torch.rand(9, 8, device=device) * 7, torch.tensor([0, 4, 9], device=device))
    assert said_first(li.maxsim_varlen, Q, Q, cu, cu) == []
    assert norm_warning.checked is False


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_when_a_look_must_not_wait(monkeypatch, capturing, mode):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode)
    assert norm_warning._must_not_wait() is (capturing or mode > 0)


@pytest.mark.gpu
def test_the_look_waits_once():
    """And no later call does."""
    Q, kept = (x.cuda() for x in queries(1.0, [4, 9, 1, 6]))
    D = unit(2, 3, 8).cuda()
    assert said_first(li.maxsim, Q, D, kept) == []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            li.maxsim(Q, D, kept)
            assert not any("synchroniz" in str(w.message) for w in caught)
            norm_warning._norms_that_count(Q, kept).median().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchroniz" in str(w.message) for w in caught) == 1


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


@pytest.mark.parametrize("options", [{"winners": "recompute"}, {"mean": True}])
def test_calls_with_other_options_look_once_too(device, options):
    assert said(score(device, 7.0, normalize=True, **options)) == [] and norm_warning.checked is False
    with torch.autocast(device, dtype=torch.bfloat16):
        assert said(score(device, 7.0, **options)) == [] and norm_warning.checked is False
    assert len(said(score(device, 7.0, **options))) == 1
    assert said(score(device, 7.0, **options)) == []
