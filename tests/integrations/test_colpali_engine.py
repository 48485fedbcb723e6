"""colpali-engine, release by release, before and after patch("colpali-engine")."""

import functools
import importlib
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import late_interaction as li
from tests.support import side_by_side
from tests.support.side_by_side import called

RELEASES = side_by_side.releases("colpali-engine")
NATIVE = RELEASES[RELEASES.index("0.3.17") :]  # those that select a backend
FIRST = "0.3.10"  # with losses of its own kind: other options, no offset
HEADS = ["ColbertLoss", "ColbertPairwiseCELoss", "ColbertSigmoidLoss"]
NEGATIVE_HEADS = ["ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss"]


class Engine:
    def __init__(self, version):
        self.version = version
        self.losses = importlib.import_module("colpali_engine.loss.late_interaction_losses")
        processing = importlib.import_module("colpali_engine.utils.processing_utils")
        self.score_multi_vector = lambda *args, **kwargs: (
            processing.BaseVisualRetrieverProcessor.score_multi_vector(*args, **kwargs)
        )
        # Until 0.3.12 a query has one explicit negative: [B, Ld, d].
        self.negatives = (3,) if version not in (FIRST, "0.3.11", "0.3.12") else ()

    def head(self, name, device="cpu", **options):
        if not hasattr(self.losses, name):
            pytest.skip(f"this colpali-engine has no {name}")
        if self.version == FIRST:
            if "in_batch_term_weight" in options:
                options["in_batch_term"] = options.pop("in_batch_term_weight") > 0
            known = getattr(self.losses, name).__init__.__code__.co_varnames
            options = {key: value for key, value in options.items() if key in known}
        return getattr(self.losses, name)(**options).to(device)


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    # Its __init__ imports every model there is.
    bare = ["colpali_engine"]
    with side_by_side.release("colpali-engine", "colpali_engine", request.param, bare=bare):
        yield Engine(request.param)


@pytest.fixture
def engine(release):
    assert not li.patched()
    yield release
    li.unpatch("colpali-engine")


def test_leaves_are_reached(engine):
    if engine.version != RELEASES[-1]:
        pytest.skip("the table says what is in the newest release")
    side_by_side.assert_leaves_are_reached("colpali-engine")


def test_calls_are_counted(engine, monkeypatch):
    li.patch("colpali-engine")
    loss = engine.head("ColbertLoss")
    Q, D = tokens("cpu", 3, 4, 8), tokens("cpu", 3, 6, 8)
    loss(Q, D)
    found = li.patched()["colpali-engine"]
    assert found.served >= 1 and found.left == {}
    assert any(place.endswith("ColbertLoss.forward") for place in found.places)
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "colpali-engine")
    loss(Q, D)
    after = li.patched()["colpali-engine"]
    assert after.served == found.served and len(after.left) == 1
    assert all("LATE_INTERACTION_DISABLE turns the patch off" in kind for kind in after.left)


def tokens(device, *shape, padded=0, dtype=torch.float64):
    """Unit embeddings; the last of each sequence are padding, which is zero to colpali-engine."""
    x = torch.randn(*shape, device=device, dtype=dtype)
    # All in one orthant: scores normalized by length lie between 0 and 1, as 0.3.10 insists.
    x = torch.nn.functional.normalize(x.abs(), dim=-1)
    if padded:
        x[..., shape[-2] - padded :, :] = 0
    return x.requires_grad_()


def inputs(engine, device, name, gathered=0):
    """Queries, documents (from `gathered` more processes too), and a negative head's negatives."""
    documents = [tokens(device, 5 + gathered, 7, 8, padded=1)]
    if name in NEGATIVE_HEADS:
        documents.append(tokens(device, 5, *engine.negatives, 6, 8, padded=2))
    return [tokens(device, 5, 4, 8, padded=1), *documents]


def measured(head, batch, *args):
    loss = head(*batch, *args)
    gradients = torch.autograd.grad(loss, batch)
    # Padding ties with padding, and who takes a tie's gradient is nobody's promise: models mask it away.
    return [loss.detach(), *(g[x.detach().any(-1)] for g, x in zip(gradients, batch, strict=True))]


unchanged = functools.partial(side_by_side.assert_unchanged, "colpali-engine", rtol=1e-9, atol=1e-12)


def assert_unchanged_by_the_patch(head, batch, *args):
    assert all(x.any() for x in unchanged(lambda: measured(head, batch, *args)))


OPTIONS = [
    {"normalize_scores": normalize, "pos_aware_negative_filtering": filtering, "temperature": temperature}
    for normalize, filtering, temperature in itertools.product([False, True], [False, True], [0.02, 1.0])
]


def each(options):
    return pytest.mark.parametrize("options", options, ids=lambda o: "-".join(map(str, o.values())))


@each(OPTIONS)
@pytest.mark.parametrize("name", HEADS)
def test_heads(engine, device, name, options):
    batch = inputs(engine, device, name)
    assert_unchanged_by_the_patch(engine.head(name, device, **options), batch)


@pytest.mark.parametrize("in_batch", [0.0, 0.5, 1.0])
@each(OPTIONS[::3])
@pytest.mark.parametrize("name", NEGATIVE_HEADS)
def test_negative_heads(engine, device, name, options, in_batch):
    head = engine.head(name, device, **options, in_batch_term_weight=in_batch)
    batch = inputs(engine, device, name)
    if in_batch == 1.0:  # then the negatives have no gradient to compare
        batch[2] = batch[2].detach()
        unchanged(lambda: head(*batch).detach())
        return
    assert_unchanged_by_the_patch(head, batch)


@pytest.mark.parametrize("name", ["ColbertLoss", *NEGATIVE_HEADS])
def test_offset(engine, name):
    """Documents of other processes: a query's own lies `offset` further on."""
    if engine.version == FIRST or (name in NEGATIVE_HEADS and not engine.negatives):
        pytest.skip("this colpali-engine knows no offset here")
    # Off the pairwise heads' diagonal by an offset lie fewer scores than queries, but for the in-batch term.
    options = {"in_batch_term_weight": 0.0} if name == "ColbertPairwiseNegativeCELoss" else {}
    batch = inputs(engine, "cpu", name, gathered=4)
    assert_unchanged_by_the_patch(engine.head(name, **options), batch, 2)


TERMS = [("ColbertLoss", None, 1)] + [
    (name, in_batch, 3 if in_batch else 2) for name in NEGATIVE_HEADS for in_batch in (0.0, 0.5)
]


def smooth_head(engine, name, device="cpu", **options):
    if engine.version == FIRST:
        pytest.skip("this colpali-engine has no smooth maximum")
    return engine.head(name, device, use_smooth_max=True, **options)


OPERATORS = {
    Engine.head: ("maxsim_winners", "maxsim_backward"),
    smooth_head: ("smooth_maxsim", "smooth_maxsim_backward"),
}
MADE = pytest.mark.parametrize("made", OPERATORS, ids=["maximum", "smooth maximum"])


@MADE
@pytest.mark.parametrize(("name", "in_batch", "scored"), TERMS)
def test_each_term_is_scored_once(engine, made, name, in_batch, scored):
    options = {} if in_batch is None else {"in_batch_term_weight": in_batch}
    head, batch = made(engine, name, **options), inputs(engine, "cpu", name)
    li.patch("colpali-engine")
    assert called(lambda: head(*batch).backward()) == dict.fromkeys(OPERATORS[made], scored)


# ---- the smooth maximum ----


@pytest.mark.parametrize("tau", [0.1, 1])
@each([options for options in OPTIONS if options["temperature"] == 1.0])
@pytest.mark.parametrize("name", HEADS + NEGATIVE_HEADS)
def test_a_smooth_maximum(engine, device, name, options, tau):
    batch = inputs(engine, device, name)
    assert_unchanged_by_the_patch(smooth_head(engine, name, device, tau=tau, **options), batch)


def assert_left_alone(head, batch, said="0"):
    side_by_side.assert_left_alone("colpali-engine", lambda: measured(head, batch), said)


@MADE
@pytest.mark.parametrize("name", HEADS + NEGATIVE_HEADS)
def test_heads_that_are_turned_off(engine, made, name):
    said = "colpali-engine" if made is smooth_head else "1"
    assert_left_alone(made(engine, name), inputs(engine, "cpu", name), said)


@pytest.mark.parametrize("tau", [-0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["negative", "tensor"])
@pytest.mark.parametrize("name", ["ColbertLoss", "ColbertNegativeCELoss"])
def test_a_tau_that_is_no_number_above_0_is_left_alone(engine, name, tau):
    assert_left_alone(smooth_head(engine, name, tau=tau), inputs(engine, "cpu", name))


@pytest.mark.parametrize("own", [
    lambda self, scores, dim: torch.logsumexp(scores / self.tau, dim=dim),
    lambda self, scores, dim: 2 * self.tau * torch.logsumexp(scores / self.tau, dim=dim),
    lambda self, scores, dim: self.tau * torch.logsumexp(scores / self.tau, dim, True).squeeze(dim),
    lambda self, scores, dim: (scores * 7).logsumexp(dim),
    lambda self, scores, dim: torch.logsumexp(3 * scores, dim),
    lambda self, scores, dim: (scores / self.tau).softmax(dim).mul(scores).sum(dim),
])  # fmt: skip
def test_a_smooth_maximum_of_a_subclass_is_its_own(engine, own):
    if engine.version == FIRST:
        pytest.skip("this colpali-engine has no smooth maximum")
    mine = type("Mine", (engine.losses.ColbertLoss,), {"_smooth_max": own})
    assert_left_alone(mine(use_smooth_max=True), inputs(engine, "cpu", "ColbertLoss"))


def test_a_compiled_head_with_a_smooth_maximum(engine, device):
    if engine.version != NATIVE[-1]:
        pytest.skip("compiled once is enough")
    head = smooth_head(engine, "ColbertNegativeCELoss", device, normalize_scores=False, temperature=1.0)
    batch = inputs(engine, device, "ColbertNegativeCELoss")
    li.patch("colpali-engine")
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    mine = measured(torch.compile(head, fullgraph=True, backend=graphs), batch)
    (graph,) = graphs.graphs
    assert graph.code.count("late_interaction.smooth_maxsim") == 3 and "einsum" not in graph.code
    torch.testing.assert_close(mine, measured(head, batch))
    torch._dynamo.reset()


@MADE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(engine, device, dtype, made):
    head = made(engine, "ColbertNegativeCELoss", device, temperature=1.0)
    batch = [x.detach().to(dtype) for x in inputs(engine, device, "ColbertNegativeCELoss")]
    wanted = head(*(x.double() for x in batch))
    li.patch("colpali-engine")
    with side_by_side.no_einsum():
        loss = head(*batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [2, 128])
def test_score_multi_vector(engine, device, batch_size):
    queries = [torch.randn(n, 8, dtype=torch.float64) for n in (5, 1, 9)]
    pages = [torch.randn(n, 8, dtype=torch.float64) for n in (4, 11, 1, 7, 2)]

    def scored(*lists):
        return engine.score_multi_vector(*lists, batch_size=batch_size, device=device)

    batches = torch.stack([torch.randn(6, 8).double()] * 3), torch.randn(4, 5, 8).double()
    unchanged(lambda: (scored(queries, pages), scored(*batches)))
    with pytest.raises(ValueError, match="No queries"):
        scored([], pages)


def test_subclasses_are_patched_too(engine):
    class Mine(engine.losses.ColbertLoss):
        def forward(self, *args):
            return 2 * super().forward(*args)

    assert_unchanged_by_the_patch(Mine(), inputs(engine, "cpu", "ColbertLoss"))


def test_what_does_not_fit_stays_with_colpali_engine(engine):
    li.patch("colpali-engine")
    head, batch = engine.head("ColbertNegativeCELoss"), inputs(engine, "cpu", "ColbertNegativeCELoss")
    with pytest.raises(RuntimeError):  # as einsum does
        head(batch[0], batch[1][..., :5], batch[2])
    with pytest.raises(RuntimeError):
        head(batch[0], batch[1], batch[2][:3])


def test_unpatch_restores_everything(engine):
    side_by_side.assert_restored("colpali-engine")


def test_a_head_that_is_gone_is_named(engine, monkeypatch):
    monkeypatch.delattr(engine.losses, "ColbertPairwiseCELoss")
    with pytest.warns(RuntimeWarning, match="ColbertPairwiseCELoss.forward.*refactored"):
        li.patch("colpali-engine")
    assert_unchanged_by_the_patch(engine.head("ColbertLoss"), inputs(engine, "cpu", "ColbertLoss"))


@MADE
@pytest.mark.parametrize("backend", ["auto", "lik", "torch"])
def test_backends(engine, device, monkeypatch, backend, made):
    if engine.version not in NATIVE:
        pytest.skip("this colpali-engine selects no backend")
    li.patch("colpali-engine")
    monkeypatch.setenv("COLPALI_SCORES_BACKEND", backend)
    head, batch = (
        made(engine, "ColbertNegativeCELoss", device),
        inputs(engine, device, "ColbertNegativeCELoss"),
    )
    assert called(head, *batch) == ({} if backend == "torch" else {OPERATORS[made][0]: 3})
