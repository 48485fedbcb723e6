"""Laws that MaxSim obeys for every input, on inputs that hypothesis makes up."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import late_interaction as li
from tests import selection
from tests.support import ref
from tests.support.cases import QUANTIZED

law = settings(
    deadline=None,
    max_examples=selection.examples(25),
    derandomize=not selection.NIGHTLY,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def problems(draw, min_Ld=0, masks=True):
    """(Q, D, q_mask, d_mask) of whole numbers, which every dtype multiplies and adds without rounding."""
    size = st.integers(0, 5)
    Nq, Nd, Lq, Ld, d = (
        draw(size),
        draw(size),
        draw(st.integers(0, 40)),
        draw(st.integers(min_Ld, 70)),
        draw(st.integers(1, 20)),
    )
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    Q, D = (torch.randint(-4, 5, shape, generator=make).to(dtype) for shape in [(Nq, Lq, d), (Nd, Ld, d)])
    if not masks:
        return Q, D, None, None
    keep = draw(st.sampled_from([0.0, 0.3, 0.9]))
    return Q, D, *(torch.rand(x.shape[:-1], generator=make) < keep for x in (Q, D))


def on(device, *tensors):
    return tuple(x if x is None else x.to(device) for x in tensors)


@law
@given(problems())
def test_permuting_documents_permutes_scores(device, problem):
    Q, D, q_mask, d_mask = on(device, *problem)
    order = torch.randperm(D.shape[0], device=device)
    permuted = li.maxsim(Q, D[order], q_mask, d_mask[order])
    assert torch.equal(li.maxsim(Q, D, q_mask, d_mask)[:, order], permuted)


@law
@given(problems())
def test_the_order_of_tokens_does_not_matter_to_scores(device, problem):
    Q, D, q_mask, d_mask = on(device, *problem)
    s, t = torch.randperm(Q.shape[1], device=device), torch.randperm(D.shape[1], device=device)
    shuffled = li.maxsim(Q[:, s], D[:, t], q_mask[:, s], d_mask[:, t])
    assert torch.equal(li.maxsim(Q, D, q_mask, d_mask), shuffled)


@law
@given(problems(), st.sampled_from([0.5, 2.0, 4.0]))
def test_scaling_queries_scales_scores_and_keeps_winners(device, problem, factor):
    Q, D, q_mask, d_mask = on(device, *problem)
    scores, winners = li.maxsim_with_winners(Q, D, q_mask, d_mask)
    scaled, same = li.maxsim_with_winners(Q * factor, D, q_mask, d_mask)
    assert torch.equal(scaled, scores * factor) and torch.equal(winners, same)


@law
@given(problems(), st.integers(0, 40))
def test_scores_add_over_query_tokens(device, problem, cut):
    Q, D, q_mask, d_mask = on(device, *problem)
    parts = [li.maxsim(Q[:, part], D, q_mask[:, part], d_mask) for part in (slice(cut), slice(cut, None))]
    assert torch.equal(li.maxsim(Q, D, q_mask, d_mask), sum(parts))


@law
@given(problems(min_Ld=2), st.integers(1, 70))
def test_a_document_is_as_good_as_its_better_part(device, problem, cut):
    Q, D, q_mask, _ = on(device, *problem)
    cut = min(cut, D.shape[1] - 1)
    if not Q.shape[1]:
        return
    token = Q[:, :1], None if q_mask is None else q_mask[:, :1]
    parts = [li.maxsim(token[0], D[:, part], token[1]) for part in (slice(cut), slice(cut, None))]
    assert torch.equal(li.maxsim(token[0], D, token[1]), torch.maximum(*parts))


@law
@given(problems())
def test_a_mask_is_a_slice(device, problem):
    Q, D, q_mask, d_mask = on(device, *problem)
    scores = li.maxsim(Q, D, q_mask, d_mask)
    for i in range(Q.shape[0]):
        for j in range(D.shape[0]):
            assert scores[i, j] == li.maxsim(Q[i, q_mask[i]], D[j, d_mask[j]])


@law
@given(problems(), st.integers(1, 9))
def test_padding_under_a_mask_changes_nothing(device, problem, padding):
    Q, D, q_mask, d_mask = on(device, *problem)

    def pad(x, mask):
        longer = torch.nn.functional.pad(x, (0, 0, 0, padding), value=9)
        return longer, torch.nn.functional.pad(mask, (0, padding))

    (longer_Q, longer_q), (longer_D, longer_d) = pad(Q, q_mask), pad(D, d_mask)
    scores, winners = li.maxsim_with_winners(Q, D, q_mask, d_mask)
    padded, found = li.maxsim_with_winners(longer_Q, longer_D, longer_q, longer_d)
    assert torch.equal(scores, padded) and torch.equal(winners, found[..., : Q.shape[1]])
    assert (found[..., Q.shape[1] :] == -1).all()


@law
@given(problems())
def test_layouts_agree(device, problem):
    Q, D, q_mask, d_mask = on(device, *problem)
    scores, winners = li.maxsim_with_winners(Q, D, q_mask, d_mask)
    each = D.expand(Q.shape[0], *D.shape), q_mask, d_mask.expand(Q.shape[0], *d_mask.shape)
    assert all(map(torch.equal, (scores, winners), li.maxsim_with_winners(Q, *each)))
    n = min(Q.shape[0], D.shape[0])
    pairs = li.maxsim_pairs(Q[:n], D[:n], q_mask[:n], d_mask[:n])
    assert torch.equal(pairs, scores[:n, :n].diagonal())


@law
@given(problems(min_Ld=1))
def test_winners_attain_the_score(device, problem):
    Q, D, q_mask, d_mask = on(device, *problem)
    scores, winners = li.maxsim_with_winners(Q, D, q_mask, d_mask)
    matched = D.double()[torch.arange(D.shape[0], device=device).view(1, -1, 1), winners.long().clamp_min(0)]
    products = (Q.double().unsqueeze(1) * matched).sum(-1)
    assert torch.equal(torch.where(winners >= 0, products, 0).sum(-1), scores.double())


@law
@given(problems())
def test_gradients_agree_between_layouts_and_strategies(device, problem):
    Q, D, q_mask, d_mask = on(device, *problem)
    Q, D = Q.double().requires_grad_(), D.double().requires_grad_()
    grad = torch.randint(-3, 4, (Q.shape[0], D.shape[0]), device=device).double()
    results = []
    for backward in ("lowmem", "unified"):
        for layout in (D, D.expand(Q.shape[0], *D.shape)):
            mask = d_mask if layout is D else d_mask.expand(Q.shape[0], *d_mask.shape)
            scores = li.maxsim(Q, layout, q_mask, mask, backward=backward)
            results.append(torch.autograd.grad(scores, (Q, D), grad))
    for other in results[1:]:  # whole numbers: equal, not close
        assert all(map(torch.equal, results[0], other))


@law
@given(problems(masks=False))
def test_normalizing_twice_is_normalizing_once(device, problem):
    Q, D, *_ = on(device, *problem)
    Q, D = Q.double(), D.double()
    unit = torch.nn.functional.normalize(Q, dim=-1), torch.nn.functional.normalize(D, dim=-1)
    torch.testing.assert_close(li.maxsim(Q, D, normalize=True), li.maxsim(*unit, normalize=True))
    torch.testing.assert_close(li.maxsim(Q, D, normalize=True), li.maxsim(*unit))


@law
@given(problems(), st.integers(1, 6), st.integers(1, 7))
def test_retrieval_is_topk_of_scores(device, problem, k, chunk):
    Q, D, q_mask, d_mask = on(device, *problem)
    scores = li.maxsim(Q, D, q_mask, d_mask)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    options = {"normalize": False, "chunk_bytes": chunk * max(D[:1].nbytes, 1), "keep_empty": True}
    best, documents = li.search(Q, D, k, q_mask=q_mask, d_mask=d_mask, **options)
    assert torch.equal(documents, order) and torch.equal(best, scores.gather(1, order))


@st.composite
def quantized_problems(draw):
    """(Q, D, scale_Q, scale_D, q_mask, d_mask) of whole numbers and powers of two, which score exactly."""
    Q, D, q_mask, d_mask = draw(problems())
    dtype = draw(st.sampled_from(QUANTIZED))
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def scale(tokens):
        shape = tokens.shape[:-1] if draw(st.booleans()) else ()
        return 2.0 ** torch.randint(-2, 3, shape, generator=make)

    return Q.to(dtype), D.to(dtype), scale(Q), scale(D), q_mask, d_mask


@law
@given(quantized_problems())
def test_quantized_scores_are_those_of_the_dequantized_tokens(device, problem):
    Q, D, scale_Q, scale_D, q_mask, d_mask = on(device, *problem)
    tokens = ref.dequantized(Q, scale_Q), ref.dequantized(D, scale_D)
    for op in (li.ops.maxsim_quantized, li.ops.maxsim_dequantized):
        scores = op(Q, D, scale_Q, scale_D, q_mask, d_mask)
        assert torch.equal(scores.double(), li.maxsim(*tokens, q_mask, d_mask))
        each = scale_Q.expand(Q.shape[:-1]), scale_D.expand(D.shape[:-1])
        assert torch.equal(scores, op(Q, D, *each, q_mask, d_mask))
        assert torch.equal(2 * scores, op(Q, D, 2 * scale_Q, scale_D, q_mask, d_mask))
