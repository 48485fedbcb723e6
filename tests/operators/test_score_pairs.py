"""score_pairs_packed and rerank_direct: listed pairs against float64, pair by pair."""

import pytest
import torch

import late_interaction as li
from late_interaction.score_pairs import rerank_direct, score_pairs_packed
from tests.operators.test_packed_calls import DTYPES, check
from tests.support import packed, ref
from tests.support.calls import in_graph

OPS = torch.ops.late_interaction


def every_pair(queries, documents, device="cpu"):
    grid = torch.cartesian_prod(torch.arange(queries), torch.arange(documents)).reshape(-1, 2).int()
    return grid[:, 0].contiguous().to(device), grid[:, 1].contiguous().to(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_there_is(dtype, device):
    lengths_q, lengths_d = packed.LENGTHS["several short queries"]
    Q, cu_q = packed.pack(lengths_q, 64, dtype, device)
    D, cu_d = packed.pack(lengths_d, 64, dtype, device)
    pairs = every_pair(len(lengths_q), len(lengths_d), device)
    check(pairs, Q, D, cu_q, cu_d)


@pytest.mark.parametrize("count", [1, 131, 133, 700])
def test_many_pairs_of_many_documents(count, device):
    # Several a block, several teams; neighbours of one query, and of one document.
    Q, cu_q = packed.pack([32, 20, 0, 9], 128, torch.bfloat16, device)
    D, cu_d = packed.pack(torch.randint(0, 200, (2000,)).tolist(), 128, torch.bfloat16, device)
    pair_q, pair_d = packed.draw_pairs(4, 2000, count, device)
    pair_q[: count // 3] = 1
    pair_d[count // 2 :] = 77
    check((pair_q, pair_d), Q, D, cu_q, cu_d)


def test_equals_the_call_of_all_pairs(device):
    Q, cu_q = packed.pack([8, 31, 17, 32], 128, torch.bfloat16, device)
    D, cu_d = packed.pack([200, 1, 33, 64, 90] * 30, 128, torch.bfloat16, device)
    grid = li.lik.maxsim_varlen(Q, D, cu_q, cu_d)
    for pairs in (every_pair(4, 150, device), packed.draw_pairs(4, 150, 60, device)):
        out = score_pairs_packed(Q, D, cu_q, cu_d, *pairs)
        ref.assert_close(out, grid[pairs[0].long(), pairs[1].long()], 1e-6)


@pytest.mark.parametrize("count", [300, 3000])
def test_the_same_bits_in_every_run(count, device):
    Q, cu_q = packed.pack([8, 31, 150], 64, torch.bfloat16, device)
    D, cu_d = packed.pack([300, 1, 65, 20] * 50, 64, torch.bfloat16, device)
    pairs = packed.draw_pairs(3, 200, count, device)
    pairs[1][: count // 2] = 0  # a document that many meet,
    D[7] *= 8  # and a token of it that wins often
    Q.requires_grad_(), D.requires_grad_()

    def run():
        scores = score_pairs_packed(Q, D, cu_q, cu_d, *pairs, max_seqlen_q=150)
        return (scores, *torch.autograd.grad(scores.square().sum(), (Q, D)))

    first = run()
    for _ in range(100 if device == "cuda" else 10):
        assert all(map(torch.equal, first, run()))


@pytest.mark.gpu
@pytest.mark.parametrize(("documents", "count"), [(3, 5000), (100, 200_000), (12_000, 2000)])
def test_gradients_of_long_lists_and_of_many_documents(documents, count):
    """Lists that are counted in one chunk or in many, and one with too many names to count."""
    Q, cu_q = packed.pack([5, 0, 17], 8, torch.float32)
    D, cu_d = packed.pack([1 + j % 4 for j in range(documents)], 8, torch.float32)
    inputs = (Q, D, cu_q, cu_d, *packed.draw_pairs(3, documents, count))
    _, winners = OPS.maxsim_pairs_packed_winners(*inputs, 17)
    given = (torch.randn(count), *inputs, winners)
    wanted = OPS.maxsim_pairs_packed_backward(*given)
    out = OPS.maxsim_pairs_packed_backward(*(x.cuda() for x in given))
    for grad, expected in zip(out, wanted, strict=True):
        ref.assert_close(grad.cpu(), expected, 1e-5)


@pytest.mark.parametrize("longest", [1 << 31, 1 << 40, 1 << 70])
def test_a_longest_query_beyond_all_tokens_asks_for_no_room(longest, device):
    Q, cu_q = packed.pack([3, 5], 8, torch.float64, device)
    D, cu_d = packed.pack([4, 6], 8, torch.float64, device)
    pairs = [torch.tensor(index, device=device) for index in ([1, 0, 1], [0, 1, 1])]
    grads = []
    for given in (5, longest):
        leaf = Q.clone().requires_grad_()
        scores = score_pairs_packed(leaf, D, cu_q, cu_d, *pairs, max_seqlen_q=given)
        grads.append(torch.autograd.grad(scores.sum(), leaf)[0])
        assert torch.equal(score_pairs_packed(Q, D, cu_q, cu_d, *pairs, max_seqlen_q=given), scores.detach())
    assert torch.equal(*grads)


@pytest.mark.gpu
def test_captured_in_a_cuda_graph_follows_new_pairs():
    Q, cu_q = packed.pack([20, 12, 200], 64, torch.bfloat16, "cuda")
    D, cu_d = packed.pack([70, 200, 30] * 40, 64, torch.bfloat16, "cuda")
    pairs = packed.draw_pairs(3, 120, 50, "cuda")
    Q.requires_grad_(), D.requires_grad_()
    grad = torch.randn(50, device="cuda")

    def run():
        scores = score_pairs_packed(Q, D, cu_q, cu_d, *pairs, max_seqlen_q=200)
        return (scores, *torch.autograd.grad(scores, (Q, D), grad))

    run()
    graph, out = in_graph(run)
    for _ in range(3):
        for x, y in zip(pairs, packed.draw_pairs(3, 120, 50, "cuda"), strict=True):
            x.copy_(y)
        graph.replay()
        assert all(map(torch.equal, out, run()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [7, 4000])  # listed, and picked from all
def test_pairs_of_none_score_nan_and_have_no_gradient(dtype, count):
    lengths_q, lengths_d = [20, 200, 0, 5], [70, 0, 30] * 30
    Q, cu_q = packed.pack(lengths_q, 64, dtype, "cuda")
    D, cu_d = packed.pack(lengths_d, 64, dtype, "cuda")
    pair_q, pair_d = packed.draw_pairs(4, 90, count, "cuda")
    expected = score_pairs_packed(Q, D, cu_q, cu_d, pair_q, pair_d)
    wrong = torch.zeros(count, dtype=torch.bool, device="cuda")
    wrong[:6] = True
    pair_q[:3] = torch.tensor([-1, 4, 1 << 30])
    pair_d[3:6] = torch.tensor([-7, 90, 1 << 30])
    Q.requires_grad_(), D.requires_grad_()
    out = score_pairs_packed(Q, D, cu_q, cu_d, pair_q, pair_d)
    assert torch.equal(out.isnan(), wrong)
    ref.assert_close(out[~wrong], expected[~wrong], 1e-6)
    grads = torch.autograd.grad(out[~wrong].sum(), (Q, D), retain_graph=True)
    assert all(map(torch.equal, grads, torch.autograd.grad(out.sum(), (Q, D))))
    far = pair_q.long() + (1 << 33)
    assert score_pairs_packed(Q, D, cu_q, cu_d, far, pair_d).isnan().all()

    # A query that winners have no room for is no different.
    short = score_pairs_packed(Q, D, cu_q, cu_d, pair_q, pair_d, max_seqlen_q=50)
    assert torch.equal(short.isnan(), wrong | (pair_q == 1))


# ---- documents that lie anywhere ----


@pytest.mark.parametrize("rows", [1, 20, 32, 100, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scattered_documents(rows, dtype, device):
    d = {1: 128, 20: 8, 32: 7, 100: 64, 300: 200}[rows]
    Q, batch = torch.randn(rows, d, device=device).to(dtype), torch.randn(900, d, device=device).to(dtype)
    # Behind each other, over each other, out of order, empty, all there is, and the last token.
    starts = torch.tensor([700, 0, 3, 3, 899, 0, 900, 450, *range(0, 800, 5)], device=device)
    lengths = torch.tensor([130, 64, 65, 0, 1, 900, 0, 17, *range(160)], device=device)
    lengths = torch.minimum(lengths, 900 - starts)
    wanted = torch.stack(
        [ref.maxsim(Q[None], batch[None, s : s + n])[0][0, 0] for s, n in zip(starts, lengths, strict=True)]
    )
    ref.assert_close(rerank_direct(Q, batch, starts, lengths), wanted, ref.tolerance(dtype))
    out = rerank_direct(Q, batch, starts.int(), lengths.int(), 900)
    ref.assert_close(out, wanted, ref.tolerance(dtype))


def test_scattered_documents_copy_nothing(device):
    batch = torch.randn(50, 16, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    assert rerank_direct(batch[:3], batch, none, none).shape == (0,)
    starts, lengths = torch.tensor([9, 0], device=device), torch.tensor([40, 7], device=device)
    out = rerank_direct(batch[:3], batch, starts, lengths)
    wide = batch.repeat(1, 2)[:, :16]
    ref.assert_close(rerank_direct(wide[:3], wide, starts, lengths), out, 1e-6)
    assert rerank_direct(batch[:0], batch, starts, lengths).tolist() == [0.0, 0.0]
    with pytest.raises(RuntimeError, match=r"maxsim_spans.* has no gradients"):
        OPS.maxsim_spans(batch.clone().requires_grad_(), batch, starts.int(), lengths.int()).sum().backward()
    with torch.no_grad():
        assert torch.equal(rerank_direct(batch[:3].requires_grad_(), batch, starts, lengths), out)


@pytest.mark.gpu
def test_documents_outside_the_batch_score_nan():
    batch = torch.randn(500, 64, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, -1, 499, 500, 501, 1 << 40, 10, 10], device="cuda")
    lengths = torch.tensor([500, 5, 2, 0, 0, 1, -1, 1 << 40], device="cuda")
    out = rerank_direct(batch[:20], batch, starts, lengths)
    assert out.isnan().tolist() == [False, True, True, False, True, True, True, True]
    assert rerank_direct(batch[:20], batch[:0], starts, lengths).isnan().tolist() == [True] * 8
