"""evaluate_recall against a count by definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import late_interaction as li
from late_interaction import Corpus, evaluate_recall


def by_definition(found, scores, k):
    """found: a list of a query; scores: of all documents."""
    ranked = sorted(scores, reverse=True)
    wanted = min(k, len(scores))
    if not wanted:
        return 1.0
    best = {i for i, x in enumerate(scores) if x >= ranked[wanted - 1]}
    return min(len(best & {i for i in found[:k] if i >= 0}), wanted) / wanted


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=9, max_size=9), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(-1, 8), max_size=12), min_size=4, max_size=4),
    st.integers(1, 12),
)
def test_by_definition(all_scores, lists, k):
    """Few different scores, so that most of them tie."""
    scores = torch.tensor(all_scores, dtype=torch.float32)
    exact = scores.sort(dim=-1, descending=True, stable=True)
    lists = lists[: len(scores)]
    got = evaluate_recall(lists, li.SearchResult(*exact), k, per_query=True)[k]
    wanted = [by_definition(own, row, k) for own, row in zip(lists, all_scores, strict=True)]
    assert got.tolist() == pytest.approx(wanted)
    assert evaluate_recall(lists, li.SearchResult(*exact), [k])[k] == pytest.approx(sum(wanted) / len(wanted))


def test_lists_of_many_queries(monkeypatch):
    torch.manual_seed(0)
    exact = torch.randn(50, 30).sort(dim=-1, descending=True, stable=True)
    found = torch.randint(-1, 30, (50, 20))
    whole = evaluate_recall(found, li.SearchResult(*exact), (1, 5, 40))
    monkeypatch.setattr(li.evaluation, "_COMPARED", 3 * 20 * 30)
    assert evaluate_recall(found, li.SearchResult(*exact), (1, 5, 40)) == whole and list(whole) == [1, 5, 40]


def test_searches_of_all_kinds(device):
    torch.manual_seed(0)
    Q, D = torch.randn(5, 4, 8, device=device), torch.randn(60, 6, 8, device=device)
    exact = li.search(Q, D, 20)
    assert evaluate_recall(exact, exact, (1, 7, 20)) == {1: 1.0, 7: 1.0, 20: 1.0}
    worst = li.search(Q, D, 20, largest=False)
    assert evaluate_recall(worst.indices, worst, 20) == {20: 1.0}
    assert evaluate_recall(worst.indices, exact, 20) == {20: 0.0}
    corpus = Corpus.from_packed(D.flatten(0, 1).cpu(), torch.arange(0, 361, 6))
    of_corpus = corpus.search(Q, 20)
    assert evaluate_recall(of_corpus, exact, 10)[10] > 0.9
    one = li.search(Q[0], D, 20)
    assert evaluate_recall(one.indices.flip(0), one, 5, per_query=True)[5].tolist() == [0.0]


def test_no_document_and_nan_take_no_rank_and_nothing_is_found_of_nothing():
    scores = torch.tensor([[math.nan, 3.0, 1.0], [2.0, -math.inf, -math.inf], [-math.inf] * 3])
    exact = li.SearchResult(scores, torch.tensor([[2, 0, 1], [7, -1, -1], [-1, -1, -1]]))
    found = torch.tensor([[2, 1, 0], [7, -1, -1], [3, -1, 4]])
    recall = evaluate_recall(found, exact, (1, 2, 3), per_query=True)
    assert {k: x.tolist() for k, x in recall.items()} == {
        1: [0.0, 1.0, 1.0], 2: [0.5, 1.0, 1.0], 3: [1.0, 1.0, 1.0],
    }  # fmt: skip
    worst_first = li.SearchResult(torch.tensor([[0.5, 2.0, math.inf]]), torch.tensor([[4, 3, -1]]))
    assert evaluate_recall([[3]], worst_first, (1, 3)) == {1: 0.0, 3: 0.5}
    assert evaluate_recall([[7]], li.SearchResult(torch.empty(1, 0), torch.empty(1, 0).long()), 3) == {3: 1.0}
    none = torch.empty(0, 4)
    assert math.isnan(evaluate_recall(none.long(), li.SearchResult(none, none.long()), 3)[3])


def test_scores_that_tie_in_a_rising_order():
    exact = li.SearchResult(torch.tensor([[1.0, 1.0, 2.0, math.nan]]), torch.tensor([[0, 1, 2, 3]]))
    assert [evaluate_recall([[i]], exact, k=1)[1] for i in range(4)] == [1.0, 1.0, 0.0, 0.0]


def test_no_document_is_never_the_best():
    exact = li.SearchResult(torch.tensor([[2.0, 1.0]]), torch.tensor([[5, -1]]))
    assert evaluate_recall(torch.tensor([[-1, 7]]), exact, k=2) == {2: 0.0}
    assert evaluate_recall(
        torch.tensor([[-1]]), li.SearchResult(exact.scores, torch.tensor([[1 << 40, 2]])), k=1
    ) == {1: 0.0}
