"""Which operator a call runs and how much room it takes, and small choices that scores alone do not show."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import late_interaction as li
from late_interaction import TopK
from late_interaction.lik.varlen import maxsim_varlen
from late_interaction.score_pairs import rerank_direct, score_pairs_packed
from tests.support.calls import Called

OPS = torch.ops.late_interaction
D = torch.arange(28.0).view(7, 4).sin()


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def tokens(n):
    return torch.arange(4.0 * n).view(n, 4).cos()


PAIRS = integers(0, 1), integers(0, 0)


@pytest.mark.parametrize("function", ["listed", "varlen"])
@pytest.mark.parametrize("learns", ["", "Q", "D", "Q D"])
@pytest.mark.parametrize("enabled", [True, False])
def test_winners_are_kept_where_a_gradient_is_wanted(function, learns, enabled):
    Q, documents = (x.clone().requires_grad_(n in learns) for n, x in (("Q", tokens(9)), ("D", D)))
    cu = integers(0, 2, 9), integers(0, 7)
    with Called() as called, torch.set_grad_enabled(enabled):
        if function == "listed":
            scores = score_pairs_packed(Q, documents, *cu, *PAIRS)
        else:
            scores = maxsim_varlen(Q, documents, *cu)
    name = "maxsim_pairs_packed" if function == "listed" else "maxsim_varlen"
    wanted = bool(learns) and enabled
    assert called.names == [name + "_winners" * wanted] and scores.requires_grad == wanted


@pytest.mark.parametrize(
    "offsets, longest, room",
    [
        ((0, 2, 9), None, 7),
        ((0, 0, 0), None, 0),
        ((3, 5), None, 9),  # of one query nobody looks how long it is
        ((0, 2, 9), 8, 8),
        ((0, 2, 9), 12, 9),  # no query is longer than all tokens
    ],
)
def test_room_for_winners(offsets, longest, room):
    kept = []
    Q = tokens(9).requires_grad_()
    pairs = integers(0, 0, 0), integers(0, 0, 0)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        scores = score_pairs_packed(Q, D, integers(*offsets), integers(0, 7), *pairs, max_seqlen_q=longest)
    assert [list(x.shape) for x in kept if x.dtype == torch.int16] == [[3, room]]
    scores.sum().backward()
    assert Q.grad.shape == Q.shape


def test_the_backward_of_listed_pairs_finds_winners_of_any_length():
    """The operator that keeps none, without max_seqlen_q: more query tokens than d, documents or pairs."""
    Q = tokens(9).requires_grad_()
    inputs = D[:2], integers(0, 9), integers(0, 2), integers(0), integers(0)
    OPS.maxsim_pairs_packed(Q, *inputs).sum().backward()
    (want,) = torch.autograd.grad(score_pairs_packed(Q, *inputs).sum(), Q)
    assert torch.equal(Q.grad, want) and (want != 0).any(-1).all()


# ---- retrieval ----


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_a_padding_id_is_masked_and_ids_on_both_sides_of_it_are_not(dtype):
    Q = documents = torch.eye(4)[None]  # each query token has a document token of its own
    q_ids, d_ids = torch.tensor([[4, 5, 6, 9]], dtype=dtype), torch.tensor([[6, 9, 4, 5]], dtype=dtype)
    scorer = li.lik.MaxSimScorer(mask_pad_token=5)
    assert scorer.forward_with_ids(Q, documents, q_ids, d_ids).item() == 2.0
    with pytest.raises(TypeError, match="q_ids must be an integer tensor"):
        scorer.forward_with_ids(Q, documents, q_ids > 5, d_ids)


@pytest.mark.parametrize("documents, steps", [(100, 50), (101, 34), (7, 7)])
def test_progress_is_reported_fifty_times_at_most(documents, steps):
    seen = []
    li.search(
        tokens(2), tokens(documents)[:, None], 3, progress=lambda done, total: seen.append((done, total))
    )
    assert len(seen) in (steps, steps + 1)  # a report of nothing may come first
    assert seen[-1] == (documents, documents)


def test_a_state_names_one_query_as_a_batch_of_one():
    one, batch = TopK(tokens(2), 2), TopK(tokens(2)[None], 2)
    one.add(D[:, None])
    assert one.state_dict()["Q_shape"] == [1, 2, 4]
    batch.load_state_dict(one.state_dict())
    assert torch.equal(batch.scores[0], one.scores) and torch.equal(batch.indices[0], one.indices)


@pytest.mark.parametrize("index", [-1, 7])
def test_a_state_of_documents_that_were_not_seen_is_refused(index):
    best = TopK(tokens(2), 2)
    best.add(D[:, None])
    state = best.state_dict()
    wrong = state["indices"].clone()
    wrong[0, 1] = index
    with pytest.raises(ValueError, match=r"indices of the state must lie in \[0, 7\)"):
        best.load_state_dict(state | {"indices": wrong})


def test_without_progress_a_small_corpus_is_one_chunk():
    with Called() as called:
        li.search(tokens(2), tokens(100)[:, None], 3)
    assert called.names == ["maxsim_no_autograd", "select_best"]


def test_negative_scores_that_differ_in_their_last_bit_keep_their_order():
    Q, near = torch.ones(1, 1), torch.nextafter(torch.tensor(-1.0), torch.tensor(-2.0))
    documents = torch.stack((near, torch.tensor(-1.0))).view(2, 1, 1)
    scores, indices = li.search(Q, documents, 2)
    assert indices.tolist() == [1, 0] and torch.equal(scores, documents.flatten()[indices])


def test_a_fake_state_is_loaded_without_looking_at_it():
    with FakeTensorMode():
        best = TopK(torch.empty(2, 4), 2)
        best.add(torch.empty(7, 1, 4))
        best.load_state_dict(best.state_dict())
    assert best.scores.shape == (2,)


class DropsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize(
    "score",
    [
        lambda Q: score_pairs_packed(Q, D, integers(0, 2, 9), integers(0, 7), *PAIRS),
        lambda Q: li.maxsim_with_winners(Q[None], D[None])[0],
        lambda Q: OPS.maxsim_weighted_winners(Q[None], D[None], torch.ones(1, 9), None, None)[0],
    ],
)
def test_scores_without_a_gradient_give_none(score):
    Q = tokens(9).requires_grad_()
    DropsGradient.apply(score(Q)).sum().backward()
    assert Q.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_multiplies_as_pytorch_is_told_to(dtype):
    Q, documents, cu = tokens(9).to(dtype), D.to(dtype), (integers(0, 2, 9), integers(0, 7))
    torch.set_float32_matmul_precision("medium")
    with Called() as called:
        score_pairs_packed(Q, documents, *cu, *PAIRS)
        rerank_direct(Q, documents, *PAIRS)
        maxsim_varlen(Q, documents, *cu)
    said = [arguments["precision"] for arguments in called.arguments]
    assert said == ["medium" if dtype == torch.float32 else "highest"] * 3


@pytest.mark.gpu
def test_short_documents_whose_tokens_lie_far_apart(planned_as):
    """What lies between the tokens is not read ahead, and spans of over 2^31 bytes are no matter."""
    D = torch.zeros(16, 100_000, 768, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    D[::9] = torch.randn(len(D[::9]), 16, 768, device="cuda").bfloat16()
    Q = torch.randn(1, 32, 768, device="cuda").bfloat16()
    near = D[::9].contiguous()
    planned_as(80)
    torch.testing.assert_close(li.maxsim(Q, D)[:, ::9], li.maxsim(Q, near), rtol=1e-5, atol=1e-4)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    li.maxsim(Q, D)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 100  # some 3 ms; 281,000 prefetches a document take seconds
