"""maxsim_padded and pack_padded against the definition, query by query."""

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode

import late_interaction as li
from late_interaction.lik.padded import PackedBatch, pack_padded
from late_interaction.reference import maxsim_padded_reference
from tests.support import ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def inputs(B, C, Lq, Ld, d, dtype, device, least=0):
    queries = torch.randn(B, Lq, d, device=device).to(dtype)
    documents = torch.randn(B, C, Ld, d, device=device).to(dtype)
    query_lengths = torch.randint(least, Lq + 1, (B,), device=device)
    return queries, documents, query_lengths, torch.randint(least, Ld + 1, (B, C), device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(3, 4, 9, 40, 16), (1, 1, 1, 1, 8), (2, 5, 33, 300, 128), (0, 3, 4, 5, 8), (2, 0, 4, 5, 8)]
)
def test_scores_and_gradients(sizes, dtype, device):
    queries, documents, *lengths = inputs(*sizes, dtype, device)
    q, d = queries.double().requires_grad_(), documents.double().requires_grad_()
    expected = maxsim_padded_reference(q, d, *lengths)
    queries.requires_grad_(), documents.requires_grad_()
    out = li.lik.maxsim_padded(queries, documents, *lengths)
    ref.assert_close(out, expected.detach(), ref.tolerance(dtype))
    if not out.numel():
        return
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (queries, documents), grad)
    wanted = torch.autograd.grad(expected, (q, d), grad.double())
    if dtype == torch.float64:  # elsewhere another token may win by rounding
        for x, y in zip(got, wanted, strict=True):
            ref.assert_close(x, y, 1e-12, "gradient")


def test_packing_drops_the_padding_and_nothing_else(device):
    queries, documents, query_lengths, doc_lengths = inputs(3, 4, 9, 40, 16, torch.float32, device)
    batch = pack_padded(queries, documents, query_lengths, doc_lengths)
    assert isinstance(batch, PackedBatch) and len(list(batch)) == 8
    assert batch.cu_seqlens_q.diff().tolist() == query_lengths.tolist()
    assert batch.cu_seqlens_d.diff().tolist() == doc_lengths.flatten().tolist()
    assert batch.pair_q_idx.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert batch.pair_d_idx.tolist() == list(range(12))
    assert (batch.max_seqlen_q, batch.max_seqlen_d) == (int(query_lengths.max()), int(doc_lengths.max()))
    for i, begin in enumerate(batch.cu_seqlens_d[:-1].tolist()):
        length = doc_lengths.flatten()[i]
        kept = batch.D_packed[begin : begin + length]
        assert torch.equal(kept, documents.flatten(0, 1)[i, :length])
    scores = li.lik.maxsim_varlen(batch.Q_packed, batch.D_packed, batch.cu_seqlens_q, batch.cu_seqlens_d)
    own = scores[batch.pair_q_idx.long(), batch.pair_d_idx.long()].view(3, 4)
    ref.assert_close(own, li.lik.maxsim_padded(queries, documents, query_lengths, doc_lengths), 1e-5)


def test_packing_one_candidate_each_of_few_dims(device):
    """Sequences are longer than d here, and no query has a second document."""
    queries, documents = torch.randn(3, 9, 2, device=device), torch.randn(3, 1, 40, 2, device=device)
    lengths = torch.tensor([9, 3, 4], device=device), torch.tensor([[40], [0], [7]], device=device)
    batch = pack_padded(queries, documents, *lengths)
    assert batch.pair_q_idx.tolist() == batch.pair_d_idx.tolist() == [0, 1, 2]
    assert (batch.max_seqlen_q, batch.max_seqlen_d) == (9, 40)
    with pytest.raises(AttributeError):
        batch.max_seqlen_q = 1


def test_packing_is_differentiable():
    queries, documents, *lengths = inputs(2, 3, 4, 5, 8, torch.float32, "cpu")
    queries.requires_grad_(), documents.requires_grad_()
    batch = pack_padded(queries, documents, *lengths)
    (batch.Q_packed.sum() + batch.D_packed.sum()).backward()
    kept = torch.arange(5) < lengths[1][..., None]
    assert torch.equal(documents.grad[..., 0] == 1, kept)


@pytest.mark.gpu
def test_lengths_on_a_gpu_are_looked_at_only_when_asked():
    queries, documents, query_lengths, doc_lengths = inputs(2, 3, 4, 5, 8, torch.float32, "cuda", 1)
    whole = torch.full_like(doc_lengths, 5)
    assert torch.equal(
        li.lik.maxsim_padded(queries, documents, query_lengths, whole + 9),
        li.lik.maxsim_padded(queries, documents, query_lengths, whole),
    )
    with pytest.raises(ValueError, match="doc_lengths"):
        li.lik.maxsim_padded(queries, documents, query_lengths, whole + 9, validate=True)


Q, D = torch.randn(2, 4, 8), torch.randn(2, 3, 5, 8)
LQ, LD = torch.tensor([4, 2]), torch.tensor([[5, 0, 1]] * 2)


def compiled_pack(*given):
    """pack_padded in one graph, without a break where it reads lengths."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        pack = torch.compile(lambda *x: tuple(pack_padded(*x)), fullgraph=True, backend="aot_eager")
        return pack(*given)


@pytest.mark.parametrize("lengths", [(LQ, LD), (LQ - 2, LD), (LQ, LD * 0)])
def test_a_compiled_graph_packs_what_lengths_say(lengths):
    for got, expected in zip(compiled_pack(Q, D, *lengths), pack_padded(Q, D, *lengths), strict=True):
        assert torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected


@pytest.mark.parametrize(
    "lengths", [(LQ + 1, LD), (LQ - 3, LD), (LQ, LD + 1), (LQ, LD - 1), (LQ, LD * 0 - 1)]
)
def test_a_compiled_graph_asserts_that_lengths_lie_in_range(lengths):
    with pytest.raises(RuntimeError, match="Runtime assertion failed for expression u"):
        compiled_pack(Q, D, *lengths)


def test_a_compiled_call_looks_at_lengths_only_when_asked():
    compiled = torch.compile(li.lik.maxsim_padded, backend="eager")
    whole = torch.full_like(LD, 5)
    assert torch.equal(compiled(Q, D, LQ, whole + 9), li.lik.maxsim_padded(Q, D, LQ, whole))
    with pytest.raises(ValueError, match="doc_lengths must all be > 0 and <= 5, got"):
        compiled(Q, D, LQ, whole + 9, validate=True)


def test_fake_lengths_are_not_looked_at():
    too_long = LQ + 9
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x) for x in (Q, D, too_long, LD)]
        assert li.lik.maxsim_padded(*given, validate=True).shape == (2, 3)


def test_lengths_without_values_cannot_be_packed():
    with pytest.raises(ValueError, match="query_lengths must hold values, for they decide"):
        pack_padded(*(x.to("meta") for x in (Q, D, LQ, LD)))
