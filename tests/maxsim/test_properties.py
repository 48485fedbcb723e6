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
def problems(draw):
    """(Q, D, q_mask, d_mask) of whole numbers, which every dtype multiplies and adds without rounding.

    They are parts of larger tensors, and what lies beside them and behind masks would win.
    """
    Nq, Nd = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    Lq, Ld, d = draw(st.integers(0, 40)), draw(st.integers(0, 70)), draw(st.integers(1, 20))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    scale = draw(st.sampled_from([0.5, 1.0, 4.0]))
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def part(*shape):
        before, behind = draw(st.integers(0, 3)), draw(st.integers(0, 9))
        whole = torch.full((shape[0], before + shape[1] + behind, d), 9.0)
        whole[:, before : before + shape[1]] = torch.randint(-4, 5, shape, generator=make) * scale
        return whole.to(dtype)[:, before : before + shape[1]]

    Q, D = part(Nq, Lq, d), part(Nd, Ld, d)
    keep = draw(st.sampled_from([None, 0.0, 0.3, 0.9]))
    if keep is None:
        return Q, D, None, None
    q_mask, d_mask = (torch.rand(x.shape[:-1], generator=make) < keep for x in (Q, D))
    return Q, D.where(d_mask.unsqueeze(-1), 9.0) if draw(st.booleans()) else D, q_mask, d_mask


def on(device, *tensors):
    return tuple(x if x is None else x.to(device) for x in tensors)


def of_own(D, d_mask, Nq):
    """The documents as each query's own."""
    return D.expand(Nq, *D.shape), None if d_mask is None else d_mask.expand(Nq, *d_mask.shape)


@settings(law, max_examples=4 * law.max_examples)
@given(problems())
def test_scores_and_winners_are_those_of_the_definition(device, problem):
    Q, D, q_mask, d_mask = on(device, *problem)
    scores, winners = ref.maxsim(Q, D, q_mask, d_mask)
    own, own_mask = of_own(D, d_mask, len(Q))
    for documents, mask in ((D, d_mask), (own, own_mask)):
        found, won = li.maxsim_with_winners(Q, documents, q_mask, mask)
        assert torch.equal(found.double(), scores) and torch.equal(won.long(), winners)
        assert torch.equal(li.maxsim(Q, documents, q_mask, mask).double(), scores)
    n = min(len(Q), len(D))
    pairs = li.maxsim_pairs(Q[:n], D[:n], *(None if x is None else x[:n] for x in (q_mask, d_mask)))
    assert torch.equal(pairs.double(), scores[:n, :n].diagonal())


@law
@given(problems())
def test_gradients_are_those_of_the_definition(device, problem):
    Q, D, q_mask, d_mask = on(device, *problem)
    Q, D = Q.double().requires_grad_(), D.double().requires_grad_()
    grad = torch.randint(-3, 4, (len(Q), len(D)), device=device).double()
    wanted = ref.gradients(grad, Q, D, ref.maxsim(Q, D, q_mask, d_mask)[1])
    for backward in ("lowmem", "unified"):
        for documents, mask in ((D, d_mask), of_own(D, d_mask, len(Q))):
            scores = li.maxsim(Q, documents, q_mask, mask, backward=backward)
            found = torch.autograd.grad(scores, (Q, D), grad)
            assert all(map(torch.equal, found, wanted))  # whole numbers: equal, not close


@law
@given(problems())
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
