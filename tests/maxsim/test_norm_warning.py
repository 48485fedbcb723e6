"""The one look of each public function at norms, in its first eager call of a process."""

import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import late_interaction as li
from late_interaction import Corpus, codecs, fused_head
from late_interaction._scoring import norm_warning
from late_interaction.lik import plaid
from late_interaction.score_pairs import rerank_direct, score_pairs_packed
from tests.support.calls import Module, in_graph, waiting_for_nothing


@pytest.fixture(autouse=True)
def first_call(monkeypatch):
    monkeypatch.delenv("LIK_SUPPRESS_NORM_WARN", raising=False)
    norm_warning.looked.clear()


def said(*calls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [str(w.message) for w in caught if "the median norm" in str(w.message)]


def said_first(function, *args):
    """What a call says that is the first of its process."""
    norm_warning.looked.clear()
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


def test_the_environment_silences_it(device, monkeypatch):
    monkeypatch.setenv("LIK_SUPPRESS_NORM_WARN", "1")
    assert said(score(device, 7.0)) == []
    monkeypatch.delenv("LIK_SUPPRESS_NORM_WARN")
    assert said(score(device, 7.0)) == []  # that was the first call


@pytest.mark.parametrize("size", [0.5, 0.89, 1.11, 1.5])
def test_norms_somewhat_off_are_told(device, size):
    (words,) = said(score(device, size))
    assert f"is {size:.3f}:" in words
    assert said_first(score(device, 0.91)) == said_first(score(device, 1.09)) == []


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


@pytest.mark.parametrize("shape", [(0, 5, 8), (3, 0, 8), (3, 5, 8)], ids=str)
def test_queries_without_a_token_that_counts_say_nothing(device, shape):
    """Empty, all zeros, or all masked."""
    D, masked = unit(2, 3, 8).to(device), torch.zeros(shape[:2], dtype=torch.bool, device=device)
    assert said_first(li.maxsim, torch.zeros(shape, device=device), D) == []
    assert said_first(li.maxsim, torch.full(shape, 7.0, device=device), D, masked) == []


def test_a_long_query_behind_its_padding_is_looked_at(device):
    Q, _ = queries(7.0, [1000], Lq=5000, front=True)
    assert len(said_first(li.maxsim, Q.to(device), unit(1, 3, 8).to(device))) == 1


@pytest.mark.gpu
def test_no_later_call_waits():
    Q, kept = (x.cuda() for x in queries(1.0, [4, 9, 1, 6]))
    D = unit(2, 3, 8).cuda()
    assert said_first(li.maxsim, Q, D, kept) == []
    with waiting_for_nothing():
        li.maxsim(Q, D, kept)


@pytest.mark.gpu
def test_nothing_waits_where_it_must_not():
    call = score("cuda", 7.0)
    with waiting_for_nothing():
        assert said(call) == []
    graph, captured = in_graph(call)
    graph.replay()
    torch.testing.assert_close(captured, call())


@pytest.mark.parametrize("options", [{}, {"winners": "recompute"}, {"mean": True}])
@pytest.mark.parametrize("autocast", [False, True])
def test_calls_with_other_options_look_once_too(device, options, autocast):
    assert said(score(device, 7.0, normalize=True, **options)) == [] and not norm_warning.looked
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        assert len(said(score(device, 7.0, **options))) == 1
        assert said(score(device, 7.0, **options)) == []


# ---- every function that takes queries as they are ----


def offsets(count, length, device):
    return torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device)


def packed(Q, D):
    return Q.flatten(0, 1), D.flatten(0, 1), *(offsets(*x.shape[:2], x.device) for x in (Q, D))


def one_pair(Q, D):
    first = torch.zeros(1, dtype=torch.int32, device=Q.device)
    return score_pairs_packed(*packed(Q, D), first, first)


def spans(Q, D):
    numbers = torch.tensor([0, 3], dtype=torch.int32, device=Q.device)
    return rerank_direct(Q[0], D.flatten(0, 1), numbers, numbers)


def from_hidden(Q, D):
    return fused_head.maxsim_from_hidden(Q, D, torch.eye(8, device=Q.device), normalize=True)


def added(Q, D):
    best = li.TopK(Q, 2)
    best.add(D)


def mined(Q, D):
    return li.hard_negatives(Q, D, [[0]] * len(Q), num_negatives=1)


def distilled(loss):
    return lambda Q, D: loss(Q, D.expand(len(Q), *D.shape), torch.rand(len(Q), len(D), device=Q.device))


def packed_loss(Q, D):
    return li.losses.contrastive(li.Tokens(Q).pack(), li.Tokens(D))


def of_residuals(Q, packed=False):
    """Documents as two tokens that are their centroids."""
    device = Q.device
    codes, residuals = torch.tensor([[0, 1]], device=device), torch.zeros(1, 2, 1, device=device).byte()
    codebook = torch.eye(2, 8, device=device), torch.zeros(2, device=device), 1
    if packed:
        return codes[0], residuals[0], torch.tensor([0, 2], device=device), *codebook
    return codes, residuals, torch.tensor([2], device=device), *codebook


def stored(D):
    with tempfile.TemporaryDirectory() as folder, Corpus.create(folder, d=8) as builder:
        builder.add(list(D))


def with_temperature(loss):
    return lambda Q, D: loss(Q, D, temperature=1.0)


# By the name that the warning begins with: a call of 3 queries [5, 8] with 3 documents.
FUNCTIONS = {
    "maxsim(": lambda Q, D: li.maxsim(Q, D),
    "maxsim_pairs(": lambda Q, D: li.maxsim_pairs(Q, D),
    "maxsim_with_winners(": lambda Q, D: li.maxsim_with_winners(Q, D),
    "score_pairs_packed ": one_pair,
    "rerank_direct ": spans,
    "maxsim_from_hidden ": from_hidden,
    "smooth_maxsim(": lambda Q, D: li.smooth_maxsim(Q, D),
    "smooth_maxsim_pairs(": lambda Q, D: li.smooth_maxsim_pairs(Q, D),
    "xtr_scores ": lambda Q, D: li.xtr_scores(Q, D, 4),
    "losses.contrastive(": with_temperature(li.losses.contrastive),
    "losses.pairwise(": with_temperature(li.losses.pairwise),
    "losses.sigmoid(": with_temperature(li.losses.sigmoid),
    "losses.recall(": with_temperature(li.losses.recall),
    "losses.distill_kl_div(": distilled(li.losses.distill_kl_div),
    "losses.margin_mse(": distilled(li.losses.margin_mse),
    "search(": lambda Q, D: li.search(Q, D, 2),
    "TopK.add(": added,
    "hard_negatives(": mined,
    "explain(": lambda Q, D: li.explain(Q, D),
    "maxsim_residual(": lambda Q, D: plaid.maxsim_residual(Q, *of_residuals(Q), normalize=False),
    "maxsim_residual_varlen(": lambda Q, D: plaid.maxsim_residual_varlen(
        Q, *of_residuals(Q, True), normalize=False
    ),
}
# Likewise, of what looks at documents, and the name that these have.
OF_DOCUMENTS = {
    "maxsim_from_hidden(": ("the projected H_d", lambda D: fused_head.maxsim_from_hidden(
        unit(3, 5, 8).to(D.device), D / 2, 2 * torch.eye(8, device=D.device)
    )),
    "Muvera.encode_corpus(": ("D", lambda D: li.Muvera(8, 2, 2).encode_corpus(D)),
    "Corpus.create(": ("the corpus", stored),
    "codecs.Residual.train(": ("the sample", lambda D: codecs.Residual.train(D.flatten(0, 1), 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_warns_once_whatever_others_saw(device, name):
    """Calls of the others with unit vectors hide nothing, and a function that calls another looks for it."""
    Q, D = unit(3, 5, 8).to(device), unit(3, 6, 8).to(device)
    own = FUNCTIONS[name]
    assert said(*(lambda call=call: call(Q, D) for x, call in FUNCTIONS.items() if x != name)) == []
    assert norm_warning.looked == {x[:-1] for x in FUNCTIONS if x != name}
    (words,) = said(lambda: own(Q * 7, D), lambda: own(Q * 7, D))
    assert words.startswith(name) and "is 7.000:" in words
    assert ("Pass normalize=True" in words) == (name[-1] == "(")
    assert "LIK_SUPPRESS_NORM_WARN=1" in words


@pytest.mark.parametrize("name", OF_DOCUMENTS)
def test_documents_are_looked_at_where_there_are_no_queries(device, name):
    called, own = OF_DOCUMENTS[name]
    D = unit(3, 6, 8).to(device)
    assert said_first(own, D) == []
    (words,) = said_first(own, D * 7) + said(lambda: own(D * 7))
    assert words.startswith(f"{name}normalize=False), but the median norm of {called}'s tokens is 7.000:")


MODULES = [li.losses.Contrastive(), li.losses.Pairwise(), li.losses.Sigmoid()]


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), *MODULES])
def test_a_warm_up_with_zeros_hides_nothing_and_the_warning_points_at_the_caller(function):
    Q, D = unit(3, 5, 8), unit(3, 6, 8)
    assert said(lambda: function(torch.zeros_like(Q), D)) == []
    with pytest.warns(UserWarning, match="the median norm") as caught:
        function(Q * 7, D)
    assert {w.filename for w in caught} == {__file__}


def test_packed_tokens_and_lists_are_looked_at(device):
    """Queries of several lengths: of a loss, a corpus and hard negatives."""
    Q, D = unit(3, 5, 8).to(device), unit(3, 6, 8).to(device)
    assert len(said_first(packed_loss, Q * 7, D)) == 1
    assert len(said_first(mined, Q * 7, D)) == 1
    lists = [x[: i + 1] * 7 for i, x in enumerate(Q)]
    assert len(said_first(mined, lists, D)) == 1


def test_masked_tokens_of_losses_and_searches_do_not_count(device):
    Q, kept = (x.to(device) for x in queries(1.0, [4, 9, 1, 6]))
    Q, D = Q.where(kept.unsqueeze(-1), 7.0), unit(4, 3, 8).to(device)
    corpus = Corpus.from_packed(D.flatten(0, 1), offsets(4, 3, "cpu"))
    calls = [
        lambda mask=None: li.losses.contrastive(li.Tokens(Q, mask), D, temperature=1.0),
        lambda mask=None: li.search(Q, D, 2, q_mask=mask),
        lambda mask=None: corpus.search(Q, 2, q_mask=mask),
        lambda mask=None: li.smooth_maxsim(Q, D, mask),
    ]
    for call in calls:
        assert said_first(call, kept) == []
        assert len(said_first(call)) == 1


def test_normalizing_calls_and_codes_do_not_look(device):
    Q, D = unit(3, 5, 8).to(device) * 7, unit(3, 6, 8).to(device)
    assert said(
        lambda: li.losses.contrastive(Q, D, temperature=1.0, normalize=True),
        lambda: li.search(Q, D, 2, normalize=True),
        lambda: li.search(Q, D, 2, coarse=codecs.Bits(1), normalize=True),
        lambda: li.smooth_maxsim(Q, D, normalize=True),
        lambda: li.maxsim_pairs(Q, D, normalize=True),
        lambda: li.maxsim(codecs.Int8().encode(Q), codecs.Int8().encode(D)),
        lambda: li.explain(Q, D, normalize=True),
        lambda: li.search(codecs.Int8().encode(Q), codecs.Int8().encode(D), 2),
    ) == []  # fmt: skip
    assert not norm_warning.looked


def test_what_has_no_values_is_not_looked_at():
    """Tracing, transforms, fake and meta tensors: nothing is said, and the first plain call looks."""
    Q, D = unit(3, 5, 8) * 7, unit(3, 6, 8)

    def fake():
        with FakeTensorMode() as mode:
            li.smooth_maxsim(mode.from_tensor(Q), mode.from_tensor(D))

    scores = lambda Q: li.maxsim(Q, D).sum()  # noqa: E731
    assert said(
        fake,
        lambda: li.maxsim(Q.to("meta"), D.to("meta")),
        lambda: make_fx(scores)(Q),
        lambda: torch.jit.trace(scores, Q, check_trace=False),
        lambda: torch.func.grad(scores)(Q),
        lambda: torch.compile(scores, backend="eager", fullgraph=True)(Q),
        lambda: torch.export.export(Module(li.maxsim), (Q, D)),
    ) == []  # fmt: skip
    assert not norm_warning.looked
    assert len(said(lambda: scores(Q))) == 1


@pytest.mark.parametrize(
    "name", ["smooth_maxsim(", "xtr_scores ", "maxsim_from_hidden ", "losses.margin_mse("]
)
def test_a_first_eager_call_compiles_nothing_anew(name):
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph.forward

    Q, D = unit(3, 5, 8) * 7, unit(3, 6, 8)
    compiled = torch.compile(FUNCTIONS[name], backend=backend, fullgraph=True)
    assert said(lambda: compiled(Q, D)) == []
    assert len(said(lambda: FUNCTIONS[name](Q, D))) == 1
    assert said(lambda: compiled(Q, D)) == []
    assert len(frames) == 1


def test_a_search_in_one_thread_silences_no_other(device):
    """What a search calls looks at nothing while it runs, in its own thread alone."""
    Q, D = unit(3, 5, 8).to(device), unit(3, 6, 8).to(device)
    found = []

    def within(*_):
        other = threading.Thread(target=lambda: found.append(li.maxsim(Q, D)))
        other.start()
        other.join()

    li.search(Q, D, 2, normalize=False, progress=within)
    assert norm_warning.looked == {"maxsim", "search"} and found


def test_an_error_within_a_search_leaves_the_look_to_maxsim(device):
    Q, D = unit(3, 5, 8).to(device), unit(3, 6, 8).to(device)
    with pytest.raises(ValueError):
        li.search(Q, D[..., :4], 2, normalize=False)
    assert len(said(lambda: li.maxsim(Q * 7, D))) == 1


def test_a_process_says_it_once():
    code = """
        import torch, late_interaction as li
        Q, D = torch.full((2, 3, 8), 7.0), torch.ones(2, 4, 8)
        for _ in range(3):
            li.maxsim(Q, D)
            li.losses.contrastive(Q, D, temperature=1.0)
    """
    environment = dict(os.environ, LIK_SUPPRESS_NORM_WARN="0", PYTHONWARNINGS="always")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the median norm") == 2


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_when_a_look_must_not_wait(monkeypatch, capturing, mode):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode)
    assert norm_warning._must_not_wait() is (capturing or mode > 0)
