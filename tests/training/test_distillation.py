"""losses.distill_kl_div and losses.margin_mse against their definitions in float64."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import late_interaction as li
from late_interaction.reference import maxsim_reference
from tests.support.contrastive import assert_close, gradients, own

B, K = 6, 4


def batch(device, dtype=torch.float64, K=K, Lq=5, Ld=7, d=8):
    Q, D = torch.randn(B, Lq, d), torch.randn(B, K, Ld, d)
    leaves = [x.to(device, dtype).requires_grad_() for x in (Q, D)]
    return *leaves, 3 * torch.randn(B, K, dtype=torch.float64, device=device)


def kl(S, teacher, temperature=1.0, teacher_temperature=None, normalize_scores=False, reduction="mean"):
    """What PyLate and Sentence Transformers compute: KLDivLoss of log-softmaxes, by batchmean."""
    if normalize_scores:
        low, high = S.amin(1, keepdim=True), S.amax(1, keepdim=True)
        S = (S - low) / (high - low + 1e-8)
    q, p = (S / temperature).log_softmax(1), (teacher / (teacher_temperature or temperature)).log_softmax(1)
    each = F.kl_div(q, p, reduction="none", log_target=True).sum(1) * temperature**2
    return {"mean": each.mean(), "sum": each.sum(), "none": each}[reduction]


def margins(S, teacher, reduction="mean"):
    each = ((S[:, :1] - S[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])) ** 2
    return {"mean": each.mean(), "sum": each.sum(), "none": each}[reduction]


def of_shorter_lists(kind, S, teacher, kept, reduction="mean", **options):
    """Each query alone, with the documents that it has."""
    each = []
    for scores, wanted, mine in zip(S, teacher, kept, strict=True):
        if kind == "kl":
            shorter = scores[mine][None], wanted[mine][None]
            each.append(kl(*shorter, **options) if mine.sum() > 1 else scores.sum() * 0)
        else:
            row = margins(scores[None], wanted[None], "none").squeeze(0)
            each.append(torch.where(mine[:1] & mine[1:], row, 0.0))
    each = torch.stack(each)
    count = (kept[:, :1] & kept[:, 1:]).sum() if kind == "margins" else len(each)
    return {"mean": each.sum() / count, "sum": each.sum(), "none": each}[reduction]


LOSSES = {"kl": (li.losses.distill_kl_div, kl), "margins": (li.losses.margin_mse, margins)}
every = pytest.mark.parametrize("kind", list(LOSSES))


@every
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_its_definition(kind, device, reduction, normalize):
    ours = LOSSES[kind][0]
    Q, D, teacher = batch(device)
    q_mask, d_mask = torch.rand(B, 5, device=device) < 0.7, torch.rand(B, K, 7, device=device) < 0.6
    d_mask[..., 0] = True
    d_mask[2, 1] = False
    loss = ours(li.Tokens(Q, q_mask), own(D, d_mask), teacher, normalize=normalize, reduction=reduction)
    S = maxsim_reference(Q, D, q_mask, d_mask, normalize=normalize)
    wanted = of_shorter_lists(kind, S, teacher, d_mask.any(-1), reduction)
    assert loss.shape == wanted.shape
    if loss.dim() == 2:
        loss, wanted = loss.flatten(), wanted.flatten()
    assert_close(gradients(loss, (Q, D)), gradients(wanted, (Q, D)))


@pytest.mark.parametrize("options", [
    {"temperature": 0.3},
    {"temperature": 2.0, "teacher_temperature": 0.5},
    {"normalize_scores": True},
    {"normalize_scores": True, "temperature": 0.1},
])  # fmt: skip
def test_options_of_kl(device, options):
    Q, D, teacher = batch(device)
    loss = li.losses.distill_kl_div(Q, D, teacher, **options)
    assert_close(gradients(loss, (Q, D)), gradients(kl(maxsim_reference(Q, D), teacher, **options), (Q, D)))


def test_margins_of_one_query(device):
    Q, D, teacher = batch(device)
    wanted = li.losses.margin_mse(Q, D, teacher, reduction="none")[:1]
    torch.testing.assert_close(li.losses.margin_mse(Q[:1], D[:1], teacher[:1], reduction="none"), wanted)
    with pytest.raises(ValueError, match="at least 1 negative of each query, got 1 documents"):
        li.losses.margin_mse(Q, D[:, :1], teacher[:, :1])


def test_forms_of_the_teacher_of_margins(device):
    Q, D, teacher = batch(device)
    wanted = li.losses.margin_mse(Q, D, teacher)
    torch.testing.assert_close(li.losses.margin_mse(Q, D, teacher[:, :1] - teacher[:, 1:]), wanted)
    Q, D, teacher = batch(device, K=2)
    wanted = li.losses.margin_mse(Q, D, teacher)
    for margin in (teacher[:, :1] - teacher[:, 1:], teacher[:, 0] - teacher[:, 1]):
        torch.testing.assert_close(li.losses.margin_mse(Q, D, margin.float()), wanted, rtol=1e-5, atol=1e-5)


@every
@pytest.mark.parametrize("normalize", [False, True])
def test_packed(kind, device, normalize):
    """Padded to one length, with masks of what there is."""
    ours, _ = LOSSES[kind]
    q_lengths, d_lengths = torch.tensor([3, 0, 5, 1, 4, 2]), torch.randint(0, 8, (B * K,))
    Q, D, teacher = batch(device)
    q_mask = (torch.arange(5) < q_lengths.unsqueeze(1)).to(device)
    d_mask = (torch.arange(7) < d_lengths.unsqueeze(1)).view(B, K, 7).to(device)
    q, d = li.Tokens(Q, q_mask), own(D, d_mask)
    found = [
        gradients(ours(*tokens, teacher, normalize=normalize), (Q, D))
        for tokens in ((q.pack(), d.pack()), (q, d), (list(q), d))
    ]
    assert_close(found[0], found[1])
    assert_close(found[2], found[1])


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(kind, device, dtype):
    ours, definition = LOSSES[kind]
    Q, D, teacher = batch(device, dtype)
    got = gradients(ours(Q, D, teacher.to(dtype)), (Q, D))
    assert got[0].dtype is torch.float32 and got[1][0].dtype is dtype
    wanted = definition(maxsim_reference(Q.double(), D.double()), teacher.to(dtype).double())
    assert_close(got, gradients(wanted, (Q, D)), {torch.float32: 1e-5}.get(dtype, 2e-2))


CANDIDATES = [[1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 1], [0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]


@every
@pytest.mark.parametrize("options", [{}, {"normalize": True}, {"reduction": "sum"}, {"reduction": "none"}])
@pytest.mark.parametrize("form", ["dense", "masked", "packed"])
def test_documents_that_are_left_out(kind, device, form, options):
    """They hold what is not finite, and so do the teacher's scores of them."""
    if kind == "kl" and "normalize" in options:
        options = {**options, "temperature": 0.5, "teacher_temperature": 2.0}
    Q, D, teacher = batch(device)
    candidates = torch.tensor(CANDIDATES, device=device)
    kept = candidates.bool()
    with torch.no_grad():
        D[~kept], teacher[~kept] = float("nan"), float("inf")
    D0 = D.detach().nan_to_num(0.0).requires_grad_()
    S = maxsim_reference(Q, D0, normalize=options.get("normalize", False))
    of_list = {name: x for name, x in options.items() if name != "normalize"}
    wanted = of_shorter_lists(kind, S, torch.where(kept, teacher, 0.0), kept, **of_list)
    of_all = torch.ones(B, K, 7, dtype=torch.bool, device=device)
    tokens = {"dense": (Q, D), "masked": (Q, own(D, of_all)), "packed": (li.Tokens(Q).pack(), D)}[form]
    loss = LOSSES[kind][0](*tokens, teacher, candidate_mask=candidates, **options)
    assert loss.shape == wanted.shape
    got = gradients(loss.flatten(), (Q, D))
    assert_close(got, gradients(wanted.flatten(), (Q, D0)))
    assert not got[1][1][~kept].any()


def test_a_masked_document_takes_no_mass(device):
    torch.manual_seed(0)
    Q, D = F.normalize(torch.randn(1, 5, 16), dim=-1), F.normalize(torch.randn(1, 3, 6, 16), dim=-1)
    Q, D, teacher = Q.to(device), D.to(device), torch.tensor([[1.0, 0.0, -1e9]], device=device)
    d_mask = torch.ones(1, 3, 6, dtype=torch.bool, device=device)
    d_mask[0, 2] = False
    candidates = torch.tensor([[True, True, False]], device=device)
    wanted = li.losses.distill_kl_div(Q, D[:, :2], teacher[:, :2])
    assert float(wanted) == pytest.approx(0.14815, abs=1e-5)
    for documents, given in ((own(D, d_mask), None), (D, candidates)):
        found = li.losses.distill_kl_div(Q, documents, teacher, candidate_mask=given)
        torch.testing.assert_close(found, wanted)


def test_sentence_transformers_gives_a_masked_document_no_mass_either():
    scoring = pytest.importorskip("sentence_transformers.multi_vector_encoder.scoring")
    Q, D, teacher = batch("cpu", torch.float32)
    teacher = teacher.float()
    d_mask = torch.ones(B, K, 7, dtype=torch.bool)
    d_mask[:, 2], teacher[:, 2] = False, -1e9
    S = scoring.colbert_kd_scores(Q, D, queries_mask=None, documents_mask=d_mask)
    wanted = F.kl_div(S.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)
    torch.testing.assert_close(li.losses.distill_kl_div(Q, own(D, d_mask), teacher), wanted)


def test_a_teacher_of_minus_infinity_gives_a_document_nothing(device):
    Q, D, teacher = batch(device)
    teacher[:, 1], teacher[3] = float("-inf"), float("-inf")
    S = maxsim_reference(Q, D)
    p, q = teacher.softmax(1).nan_to_num(0.0), S.log_softmax(1)
    wanted = torch.where(p > 0, p * (p.clamp_min(1e-300).log() - q), 0.0).sum(1).mean()
    assert_close(gradients(li.losses.distill_kl_div(Q, D, teacher), (Q, D)), gradients(wanted, (Q, D)))


def test_min_max_of_the_documents_that_are_left(device):
    Q, D, teacher = batch(device)
    kept = torch.tensor(CANDIDATES, device=device).bool()
    kept[1:3] = kept[0]
    loss = li.losses.distill_kl_div(Q, D, teacher, candidate_mask=kept, normalize_scores=True)
    wanted = of_shorter_lists("kl", maxsim_reference(Q, D), teacher, kept, normalize_scores=True)
    assert_close(gradients(loss, (Q, D)), gradients(wanted, (Q, D)))


@every
def test_the_teacher_gets_no_gradient(kind, device):
    Q, D, teacher = batch(device)
    LOSSES[kind][0](Q, D, teacher.requires_grad_()).backward()
    assert teacher.grad is None and Q.grad is not None


def test_equal_scores_have_no_divergence_and_no_nan(device):
    Q, D, teacher = batch(device)
    D = D.detach()[:, :1].expand(B, K, 7, 8)
    loss = li.losses.distill_kl_div(Q, D, torch.zeros_like(teacher), normalize_scores=True)
    (grad,) = torch.autograd.grad(loss, Q)
    assert loss.abs() < 1e-12 and not grad.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_rounding_tells_apart_get_no_gradient_of_their_spread(device, dtype):
    """Min-max would multiply it by 1e8; beside them a query whose scores differ is as before."""
    Q, D, teacher = batch(device, dtype)
    with torch.no_grad():
        D[0] = D[0, :1]
        D[1] = (
            D[1, :1]
            * (1 + torch.linspace(0, 3, K, device=device).to(dtype) * torch.finfo(dtype).eps)[:, None, None]
        )
    loss = li.losses.distill_kl_div(Q, D, teacher, normalize_scores=True, reduction="none")
    grads = torch.autograd.grad(loss.sum(), (Q, D))
    assert all(not grad[:2].any() and grad[2:].any() for grad in grads)
    wanted = kl(maxsim_reference(Q, D), teacher, normalize_scores=True, reduction="none")
    torch.testing.assert_close(loss[2:], wanted[2:].to(dtype), rtol=1e-4, atol=1e-5)
    flat = kl(torch.zeros_like(teacher), teacher, reduction="none")
    torch.testing.assert_close(loss[:2], flat[:2].to(dtype))


@every
def test_compiled_with_dynamic_shapes_and_temperatures(kind, device):
    ours = LOSSES[kind][0]
    step = torch.compile(ours, backend="eager", fullgraph=True, dynamic=True)
    for documents, tokens, temperature in ((3, 5, 0.5), (4, 9, 0.7), (6, 2, 2)):
        Q, D, teacher = batch(device, torch.float32, K=documents, Ld=tokens)
        teacher = torch.randn(B, documents, device=device)
        options = {"temperature": temperature} if kind == "kl" else {}
        wanted, found = (f(Q, D, teacher, **options) for f in (ours, step))
        assert_close(gradients(found, (Q, D)), gradients(wanted, (Q, D)))


@pytest.mark.parametrize(("function", "module"), [
    (li.losses.distill_kl_div, li.losses.DistillKLDiv),
    (li.losses.margin_mse, li.losses.MarginMSE),
])  # fmt: skip
def test_modules(device, function, module):
    Q, D, teacher = batch(device)
    q, candidates = li.Tokens(Q, torch.rand(B, 5, device=device) < 0.7), torch.rand(B, K, device=device) < 0.7
    loss_fn = module(normalize=True)
    assert torch.equal(
        loss_fn(q, D, teacher, candidate_mask=candidates),
        function(q, D, teacher, candidate_mask=candidates, normalize=True),
    )
    assert "normalize=True" in repr(loss_fn)
    ours, theirs = (inspect.signature(x).parameters for x in (module, function))
    assert set(ours) == set(theirs) - {"Q", "D", "teacher", "candidate_mask"}
    assert all(ours[name].default == theirs[name].default for name in ours)


# ---- packed tokens ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("B", [1, 3])
def test_packed_tokens_are_normalized_as_padded_ones(dtype, B):
    """Also where they are much shorter or longer than 1, or zeros."""
    Q, D = torch.randn(B, 5, 8).to(dtype), torch.randn(B, 2, 7, 8).to(dtype)
    Q[:, 1], D[:, :, 2] = 0.0, 0.0
    teacher = torch.randn(B, 2)
    Q[:, 0], D[:, 0] = Q[:, 0] * 1e-3, D[:, 0] * 30
    for loss in (li.losses.distill_kl_div, li.losses.margin_mse):
        padded = loss(Q, D, teacher, normalize=True)
        packed = loss(list(Q), D, teacher, normalize=True)
        torch.testing.assert_close(packed, padded, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_no_query_has_too_few_documents():
    none = li.Tokens.packed(torch.ones(0, 8), torch.tensor([0]))
    with pytest.raises(ValueError, match="at least 2 documents"):
        li.losses.distill_kl_div(none, none, torch.ones(0, 0))
