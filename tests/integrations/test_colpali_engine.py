"""colpali-engine, release by release, before and after patch("colpali-engine")."""

import importlib
import itertools
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import late_interaction as li
from late_interaction.integrations import colpali_engine as colpali_patch
from tests.support import side_by_side

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
    with side_by_side.release("colpali-engine", "colpali_engine", request.param) as folder:
        # Its __init__ imports every model there is.
        package = side_by_side.without_its_init("colpali_engine", folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "colpali_engine", package)
            yield Engine(request.param)


@pytest.fixture
def engine(release):
    assert not colpali_patch._EXCHANGES
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


def assert_unchanged_by_the_patch(monkeypatch, head, batch, *args):
    wanted = measured(head, batch, *args)
    li.patch("colpali-engine")
    with side_by_side.no_einsum(monkeypatch):
        for one, other in zip(measured(head, batch, *args), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert all(x.any() for x in wanted)


OPTIONS = [
    {"normalize_scores": normalize, "pos_aware_negative_filtering": filtering, "temperature": temperature}
    for normalize, filtering, temperature in itertools.product([False, True], [False, True], [0.02, 1.0])
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("name", HEADS)
def test_heads(engine, device, monkeypatch, name, options):
    batch = inputs(engine, device, name)
    assert_unchanged_by_the_patch(monkeypatch, engine.head(name, device, **options), batch)


@pytest.mark.parametrize("in_batch", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("options", OPTIONS[::3], ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("name", NEGATIVE_HEADS)
def test_negative_heads(engine, device, monkeypatch, name, options, in_batch):
    head = engine.head(name, device, **options, in_batch_term_weight=in_batch)
    batch = inputs(engine, device, name)
    if in_batch == 1.0:  # then the negatives have no gradient to compare
        batch[2] = batch[2].detach()
        wanted = head(*batch).detach()
        li.patch("colpali-engine")
        with side_by_side.no_einsum(monkeypatch):
            torch.testing.assert_close(head(*batch).detach(), wanted)
        return
    assert_unchanged_by_the_patch(monkeypatch, head, batch)


@pytest.mark.parametrize("name", ["ColbertLoss", *NEGATIVE_HEADS])
def test_offset(engine, monkeypatch, name):
    """Documents of other processes: a query's own lies `offset` further on."""
    if engine.version == FIRST or (name in NEGATIVE_HEADS and not engine.negatives):
        pytest.skip("this colpali-engine knows no offset here")
    # Off the pairwise heads' diagonal by an offset lie fewer scores than queries, but for the in-batch term.
    options = {"in_batch_term_weight": 0.0} if name == "ColbertPairwiseNegativeCELoss" else {}
    batch = inputs(engine, "cpu", name, gathered=4)
    assert_unchanged_by_the_patch(monkeypatch, engine.head(name, **options), batch, 2)


TERMS = [("ColbertLoss", None, 1)] + [
    (name, in_batch, 3 if in_batch else 2) for name in NEGATIVE_HEADS for in_batch in (0.0, 0.5)
]


@pytest.mark.parametrize(("name", "in_batch", "scored"), TERMS)
def test_each_term_is_scored_once(engine, name, in_batch, scored):
    options = {} if in_batch is None else {"in_batch_term_weight": in_batch}
    head, batch = engine.head(name, **options), inputs(engine, "cpu", name)
    li.patch("colpali-engine")
    with side_by_side.Calls() as calls:
        head(*batch).backward()
    assert calls.of == {"maxsim_winners": scored, "maxsim_backward": scored}


# ---- the smooth maximum ----


def smooth_head(engine, name, device="cpu", **options):
    if engine.version == FIRST:
        pytest.skip("this colpali-engine has no smooth maximum")
    return engine.head(name, device, use_smooth_max=True, **options)


@pytest.mark.parametrize("tau", [0.1, 1])
@pytest.mark.parametrize(
    "options", [o for o in OPTIONS if o["temperature"] == 1.0], ids=lambda o: "-".join(map(str, o.values()))
)
@pytest.mark.parametrize("name", HEADS + NEGATIVE_HEADS)
def test_a_smooth_maximum(engine, device, monkeypatch, name, options, tau):
    batch = inputs(engine, device, name)
    assert_unchanged_by_the_patch(monkeypatch, smooth_head(engine, name, device, tau=tau, **options), batch)


@pytest.mark.parametrize(("name", "in_batch", "scored"), TERMS)
def test_each_term_of_a_smooth_maximum_is_scored_once(engine, name, in_batch, scored):
    options = {} if in_batch is None else {"in_batch_term_weight": in_batch}
    head, batch = smooth_head(engine, name, **options), inputs(engine, "cpu", name)
    li.patch("colpali-engine")
    with side_by_side.Calls() as calls:
        head(*batch).backward()
    assert calls.of == {"smooth_maxsim": scored, "smooth_maxsim_backward": scored}


def assert_left_alone(head, batch):
    wanted = measured(head, batch)
    li.patch("colpali-engine")
    with side_by_side.Calls() as calls:
        for one, other in zip(measured(head, batch), wanted, strict=True):
            assert torch.equal(one, other)
    assert not calls.of


@pytest.mark.parametrize("name", HEADS + NEGATIVE_HEADS)
def test_a_smooth_maximum_that_is_turned_off(engine, monkeypatch, name):
    head, batch = smooth_head(engine, name), inputs(engine, "cpu", name)
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "mteb")  # patched, and then turned off
    li.patch("colpali-engine")
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "colpali-engine")
    with side_by_side.Calls() as calls:
        found = measured(head, batch)
    assert not calls.of
    li.unpatch("colpali-engine")
    for one, other in zip(found, measured(head, batch), strict=True):
        assert torch.equal(one, other)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_a_smooth_maximum(engine, device, monkeypatch, dtype):
    head = smooth_head(engine, "ColbertNegativeCELoss", device, temperature=1.0)
    batch = [x.detach().to(dtype) for x in inputs(engine, device, "ColbertNegativeCELoss")]
    wanted = head(*(x.double() for x in batch))
    li.patch("colpali-engine")
    with side_by_side.no_einsum(monkeypatch):
        loss = head(*batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(engine, device, monkeypatch, dtype):
    head = engine.head("ColbertNegativeCELoss", device, temperature=1.0)
    batch = [x.detach() for x in inputs(engine, device, "ColbertNegativeCELoss")]
    batch = [x.to(dtype) for x in batch]
    wanted = head(*(x.double() for x in batch))
    li.patch("colpali-engine")
    with side_by_side.no_einsum(monkeypatch):
        loss = head(*batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [2, 128])
def test_score_multi_vector(engine, device, monkeypatch, batch_size):
    queries = [torch.randn(n, 8, dtype=torch.float64) for n in (5, 1, 9)]
    pages = [torch.randn(n, 8, dtype=torch.float64) for n in (4, 11, 1, 7, 2)]

    def scored(*lists):
        return engine.score_multi_vector(*lists, batch_size=batch_size, device=device)

    batches = torch.stack([torch.randn(6, 8).double()] * 3), torch.randn(4, 5, 8).double()
    wanted = scored(queries, pages), scored(*batches)
    li.patch("colpali-engine")
    with side_by_side.no_einsum(monkeypatch):
        for one, other in zip((scored(queries, pages), scored(*batches)), wanted, strict=True):
            torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="No queries"):
        scored([], pages)


def test_disabled(engine, monkeypatch):
    head, batch = engine.head("ColbertNegativeCELoss"), inputs(engine, "cpu", "ColbertNegativeCELoss")
    wanted = measured(head, batch)
    li.patch("colpali-engine")
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    with side_by_side.Calls() as calls:
        for one, other in zip(measured(head, batch), wanted, strict=True):
            assert torch.equal(one, other)
    assert not calls.of


def test_subclasses_are_patched_too(engine, monkeypatch):
    class Mine(engine.losses.ColbertLoss):
        def forward(self, *args):
            return 2 * super().forward(*args)

    assert_unchanged_by_the_patch(monkeypatch, Mine(), inputs(engine, "cpu", "ColbertLoss"))


def test_what_does_not_fit_stays_with_colpali_engine(engine):
    li.patch("colpali-engine")
    head, batch = engine.head("ColbertNegativeCELoss"), inputs(engine, "cpu", "ColbertNegativeCELoss")
    with pytest.raises(RuntimeError):  # as einsum does
        head(batch[0], batch[1][..., :5], batch[2])
    with pytest.raises(RuntimeError):
        head(batch[0], batch[1], batch[2][:3])


def test_unpatch_restores_everything(engine):
    before = side_by_side.attributes("colpali_engine")
    li.patch("colpali-engine")
    li.patch("colpali-engine")
    during = side_by_side.attributes("colpali_engine")
    assert any(during[key] is not value for key, value in before.items())
    li.unpatch("colpali-engine")
    li.unpatch("colpali-engine")
    after = side_by_side.attributes("colpali_engine")
    assert [key for key, value in before.items() if after[key] is not value and after[key] != value] == []


def test_a_head_that_is_gone_is_named(engine, monkeypatch):
    monkeypatch.delattr(engine.losses, "ColbertPairwiseCELoss")
    with pytest.warns(RuntimeWarning, match="ColbertPairwiseCELoss.forward.*refactored"):
        li.patch("colpali-engine")
    assert_unchanged_by_the_patch(
        monkeypatch, engine.head("ColbertLoss"), inputs(engine, "cpu", "ColbertLoss")
    )


@pytest.mark.parametrize("backend", ["auto", "lik", "torch"])
def test_backends(engine, device, monkeypatch, backend):
    if engine.version not in NATIVE:
        pytest.skip("this colpali-engine selects no backend")
    li.patch("colpali-engine")
    monkeypatch.setenv("COLPALI_SCORES_BACKEND", backend)
    head = engine.head("ColbertNegativeCELoss", device)
    with side_by_side.Calls() as calls:
        head(*inputs(engine, device, "ColbertNegativeCELoss"))
    assert calls.of == ({} if backend == "torch" else {"maxsim_winners": 3})
    head = smooth_head(engine, "ColbertNegativeCELoss", device)
    with side_by_side.Calls() as calls:
        head(*inputs(engine, device, "ColbertNegativeCELoss"))
    assert calls.of == ({} if backend == "torch" else {"smooth_maxsim": 3})


def test_without_colpali_engine(monkeypatch):
    for name in ("_LOSSES", "_BACKEND"):
        monkeypatch.setattr(colpali_patch, name, "no_such_engine")
    monkeypatch.setattr(colpali_patch, "_SCORE_MULTI_VECTOR", ("no_such_engine", "x.y"))
    with pytest.raises(ImportError, match=r"colpali-engine 0\.3\.10 to 0\.3\.18"):
        li.patch("colpali-engine")
    assert not colpali_patch._EXCHANGES
