"""The best documents of padded tokens: chunks, ties, progress, and corpora that stay on the CPU."""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import late_interaction as li
from late_interaction import codecs
from late_interaction._progress import reporter
from late_interaction._search import selection, stream
from tests.support.calls import peak
from tests.support.coded import BITS, FP8, INT8


def corpus(device, Nq=5, Nd=37, dtype=torch.float32):
    Q = torch.randn(Nq, 6, 16, device=device, dtype=dtype)
    D = torch.randn(Nd, 11, 16, device=device, dtype=dtype)
    return Q, D, torch.rand(Nq, 6, device=device) < 0.8, torch.rand(Nd, 11, device=device) < 0.8


def bytes_of(documents, D):
    return None if documents is None else documents * D[0].nbytes


def close(got, expected):
    got, expected = tuple(got), tuple(expected)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("chunk", [None, 1, 2, 7, 36, 37, 1000])
@pytest.mark.parametrize("k", [1, 10, 37, 500])
@pytest.mark.parametrize("largest", [True, False])
def test_chunks_do_not_change_the_result(chunk, k, largest, device):
    Q, D, q_mask, d_mask = corpus(device)
    expected = li.maxsim(Q, D, q_mask, d_mask, normalize=True).topk(min(k, 37), largest=largest)
    got = li.search(
        Q, D, k, q_mask=q_mask, d_mask=d_mask, chunk_bytes=bytes_of(chunk, D), largest=largest, normalize=True
    )
    close(got, expected)
    assert got.indices.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype, device):
    Q, D, q_mask, d_mask = corpus(device, dtype=dtype)
    expected = li.maxsim(Q, D, q_mask, d_mask).topk(5)
    got = li.search(Q, D, 5, q_mask=q_mask, d_mask=d_mask, chunk_bytes=bytes_of(10, D))
    assert got.scores.dtype == expected.values.dtype
    close(got, expected)


def test_ranks(device):
    Q, D, *_ = corpus(device)
    scores, indices = li.search(Q[0], D, 3, normalize=True)
    assert scores.shape == indices.shape == (3,)
    close((scores, indices), li.maxsim(Q[0], D, normalize=True).topk(3))
    scores, indices = li.search(Q, D[0], 3, normalize=True)
    assert scores.shape == (5, 1) and not indices.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("chunk", [None, 3, 10])
def test_ties_go_to_the_lowest_index(chunk, largest, dtype, device):
    Q = torch.randint(-1, 2, (4, 3, 4), device=device).to(dtype)
    D = torch.randint(-1, 2, (50, 2, 4), device=device).to(dtype)
    scores = li.maxsim(Q, D)
    order = scores.sort(dim=-1, descending=largest, stable=True).indices[:, :20]
    got, indices = li.search(Q, D, 20, chunk_bytes=bytes_of(chunk, D), largest=largest)
    assert torch.equal(indices, order)
    assert torch.equal(got, scores.gather(1, order))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_scores_order_as_in_torch_topk_but_nan_takes_no_rank(dtype, largest, device):
    special = [
        0.0,
        -0.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        -float("nan"),
        1e-45,
        -1e-45,
        3e38,
        -3e38,
        1.5,
    ]
    scores = torch.tensor([special], device=device, dtype=dtype)
    places = torch.arange(len(special), device=device).unsqueeze(0)
    got, indices = selection.select(scores, places, len(special), largest)
    real = ~scores[0].isnan().cpu()
    expected = scores.cpu()[:, real].sort(descending=largest, stable=True)
    assert torch.equal(got[:, :-2].cpu(), expected.values)
    assert torch.equal(indices[:, :-2].cpu(), places.cpu()[:, real].gather(1, expected.indices))
    assert got[0, -2:].tolist() == [-math.inf if largest else math.inf] * 2
    assert indices[0, -2:].tolist() == [-1, -1]


def test_a_device_without_kernels_selects_by_pytorch_s_operators(monkeypatch):
    assert not selection.has_kernels(torch.empty(2, 3, device="meta"), 3)
    scores, places = torch.randn(3, 50).round(), torch.arange(50).expand(3, 50)
    found = scores[:, :4].contiguous(), places[:, :4] + 50
    wanted = selection.select(scores, places, 9, True), selection.select_next(scores, 0, found, 9, False)
    monkeypatch.setattr(selection, "has_kernels", lambda x, k: False)
    monkeypatch.setattr(selection, "_select_best", None)
    got = selection.select(scores, places, 9, True), selection.select_next(scores, 0, found, 9, False)
    assert all(map(torch.equal, wanted[0] + wanted[1], got[0] + got[1]))


def test_the_same_on_every_run(device):
    Q, D, *_ = corpus(device, 3, 500)
    first = li.search(Q, D, 50, chunk_bytes=bytes_of(64, D))
    for _ in range(10):
        assert all(map(torch.equal, first, li.search(Q, D, 50, chunk_bytes=bytes_of(64, D))))


def test_no_gradients(device):
    Q, D, *_ = corpus(device)
    scores, _ = li.search(Q.requires_grad_(), D.requires_grad_(), 3)
    assert not scores.requires_grad


def test_precision_and_autocast(device):
    Q, D, *_ = corpus(device)
    for precision in ("highest", "medium"):
        got = li.search(Q, D, 5, precision=precision)
        close(got, li.maxsim(Q, D, precision=precision).topk(5))
    with torch.autocast(device, dtype=torch.bfloat16):
        got = li.search(Q, D, 5)
    close(got, li.maxsim(Q, D, precision="medium").topk(5))


def test_progress_function(device):
    Q, D, *_ = corpus(device)
    calls = []
    options = {"progress": lambda done, total: calls.append((done, total))}
    li.search(Q, D, 3, chunk_bytes=bytes_of(10, D), **options)
    assert calls == [(10, 37), (20, 37), (30, 37), (37, 37)]
    calls.clear()
    li.search(Q, D, 3, **options)
    assert calls[-1] == (37, 37) and len(calls) > 1


def test_progress_bar(capsys, device, monkeypatch):
    pytest.importorskip("tqdm")
    Q, D, *_ = corpus(device)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    li.search(Q, D, 3, chunk_bytes=bytes_of(10, D), progress=True)
    shown = capsys.readouterr().err.split("\r")
    assert "37.0/37.0" in shown[-1] and len(shown) > 2  # it starts empty and ends full


def test_progress_bar_off_a_terminal_is_one_line(capsys, device):
    pytest.importorskip("tqdm")
    Q, D, *_ = corpus(device)
    li.search(Q, D, 3, chunk_bytes=bytes_of(1, D), progress=True)
    said = capsys.readouterr().err
    assert "37.0/37.0" in said and said.endswith("\n") and len(said.splitlines()) == 1
    with pytest.raises(ValueError, match="chunk's end"), reporter(True, 8) as report:
        report(3)
        raise ValueError("chunk's end")
    said = capsys.readouterr().err
    assert "3.00/8.00" in said and len(said.splitlines()) == 1


def test_progress_bar_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    Q, D, *_ = corpus("cpu")
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        li.search(Q, D, 3, progress=True)


# ---- a corpus in pieces ----


@pytest.mark.parametrize("pieces", [[37], [1, 36], [10, 10, 17], [0, 5, 0, 32], [1] * 37])
@pytest.mark.parametrize("largest", [True, False])
def test_pieces_do_not_change_the_result(pieces, largest, device):
    Q, D, q_mask, d_mask = corpus(device)
    best = li.TopK(Q, 10, q_mask, normalize=True, largest=largest)
    assert best.scores.shape == best.indices.shape == (5, 0)
    for piece, mask in zip(D.split(pieces), d_mask.split(pieces), strict=True):
        best.add(piece, mask)
    assert best.seen == 37
    expected = li.maxsim(Q, D, q_mask, d_mask, normalize=True).topk(10, largest=largest)
    close((best.scores, best.indices), expected)


def test_resumed_from_a_checkpoint(device, tmp_path):
    Q, D, *_ = corpus(device)
    best = li.TopK(Q[0], 7)
    best.add(D[:20])
    torch.save(best.state_dict(), tmp_path / "state.pt")
    best.add(D[20:])
    again = li.TopK(Q[0], 7)
    again.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu"))
    assert again.seen == 20
    again.add(D[again.seen :], chunk_bytes=bytes_of(4, D))
    assert again.seen == 37 and again.indices.device == Q.device
    close((again.scores, again.indices), (best.scores, best.indices))


def test_a_state_of_other_queries():
    Q, D, *_ = corpus("cpu")
    best = li.TopK(Q, 7)
    best.add(D)
    with pytest.raises(ValueError, match="Q_shape of the state must be"):
        li.TopK(Q[:3], 7).load_state_dict(best.state_dict())
    with pytest.raises(ValueError, match=r"Q must be \[Nq, Lq, d\]"):
        li.TopK(Q[0, 0], 7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("k", {"k": 6}),
        ("k", {"k": 8}),
        ("largest", {"largest": False}),
        ("normalize", {"normalize": True}),
        ("precision", {"precision": "high"}),
        ("Q_dtype", {"dtype": torch.bfloat16}),
        ("Q_shape", {"Lq": 4}),
    ],
)
def test_a_state_of_another_search(name, options):
    Q, D, *_ = corpus("cpu")
    best = li.TopK(Q, 7)
    best.add(D)
    options = dict(options)
    Q = Q[:, : options.pop("Lq", None)].to(options.pop("dtype", Q.dtype))
    other = li.TopK(Q, options.pop("k", 7), **options)
    with pytest.raises(ValueError, match=f"^{name} of the state must be .* as in this search, got "):
        other.load_state_dict(best.state_dict())
    assert other.seen == 0 and other.scores.shape == (5, 0)


def state_after(documents, **options):
    Q, D, *_ = corpus("cpu")
    best = li.TopK(Q, 7, **options)
    best.add(D[:documents])
    return best, best.state_dict()


BAD_STATES = {
    "empty": (lambda state: {}, ValueError, "state must have the entries scores, indices, seen, next"),
    "no dict": (lambda state: list(state), TypeError, "state must be a dict from .* got list"),
    "nothing": (lambda state: None, TypeError, "state must be a dict from .* got NoneType"),
    "no scores": (
        lambda state: {k: v for k, v in state.items() if k != "scores"}, ValueError, "scores missing"
    ),
    "an entry more": (lambda state: state | {"epoch": 3}, ValueError, "no entries but .* got epoch"),
    "next is True": (lambda state: state | {"next": True}, TypeError, "next of the state must be an int"),
    "next below 0": (lambda state: state | {"next": -2}, ValueError, "next of the state must not be neg"),
    "ranges of a number": (lambda state: state | {"ranges": 20}, TypeError, "ranges of the state must be a"),
    "ranges of floats": (
        lambda state: state | {"ranges": [[0, 20.0]]}, TypeError, "ranges of the state must be a list"
    ),
    "ranges that fall": (
        lambda state: state | {"ranges": [[10, 20], [0, 10]]}, ValueError, "ranges of the state must rise"
    ),
    "ranges of others": (
        lambda state: state | {"ranges": [[0, 9]]}, ValueError, "must hold the 20 documents .* got 9"
    ),
    "ranges of more": (
        lambda state: state | {"ranges": [[0, 21]]}, ValueError, "must hold the 20 documents .* got 21"
    ),
    "ranges below 0": (
        lambda state: state | {"ranges": [[-1, 19]]}, ValueError, "ranges of the state must rise"
    ),
    "ranges without a gap": (
        lambda state: state | {"ranges": [[0, 10], [10, 20]]}, ValueError, "ranges of the state must rise"
    ),
    "a range of nothing": (
        lambda state: state | {"ranges": [[0, 20], [30, 30]]}, ValueError, "ranges of the state must rise"
    ),
    "documents between": (
        lambda state: state | {"ranges": [[40, 60]]}, ValueError, r"must lie in \[40, 60\), got"
    ),
    "k is a float": (lambda state: state | {"k": 7.0}, ValueError, "k of the state must be 7, .* got 7.0"),
    "seen is a float": (lambda state: state | {"seen": 20.0}, TypeError, "seen of the state must be an int"),
    "seen is True": (lambda state: state | {"seen": True}, TypeError, "seen of the state must be an int"),
    "seen below 0": (lambda state: state | {"seen": -1}, ValueError, "seen of the state must not be neg"),
    "seen too few": (lambda state: state | {"seen": 3}, ValueError, r"scores of the state .* \[5, 3\]"),
    "scores of a list": (
        lambda state: state | {"scores": [1.0]}, TypeError, "scores of the state must be a torch.Tensor"
    ),
    "sparse": (
        lambda state: state | {"scores": state["scores"].to_sparse()}, TypeError, "scores .* dense tensor"
    ),
    "scores without values": (
        lambda state: state | {"scores": state["scores"].to("meta")}, ValueError, "scores of the state must"
    ),
    "scores of float64": (
        lambda state: state | {"scores": state["scores"].double()}, ValueError, "scores .* got torch.float64"
    ),
    "fewer scores": (
        lambda state: state | {"scores": state["scores"][:, :5]}, ValueError, r"scores .* got .* \[5, 5\]"
    ),
    "fewer queries": (
        lambda state: state | {"scores": state["scores"][:3]}, ValueError, r"scores .* got .* \[3, 7\]"
    ),
    "indices of int32": (
        lambda state: state | {"indices": state["indices"].int()}, ValueError, "indices .* torch.int64"
    ),
    "fewer indices": (
        lambda state: state | {"indices": state["indices"][:, 0]}, ValueError, r"indices .* got .* \[5\]"
    ),
    "documents to come": (
        lambda state: state | {"indices": state["indices"] + 20}, ValueError, r"must lie in \[0, 20\)"
    ),
    "documents before all": (
        lambda state: state | {"indices": state["indices"] - 20}, ValueError, r"must lie in \[0, 20\)"
    ),
    "worst first": (
        lambda state: state | {"scores": state["scores"].flip(-1)}, ValueError, "begin with the highest"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STATES)
def test_states_that_no_search_has(name):
    best, state = state_after(20)
    change, error, message = BAD_STATES[name]
    before = best.scores, best.indices
    with pytest.raises(error, match=message):
        best.load_state_dict(change(state))
    assert best.seen == 20 and best.scores is before[0] and best.indices is before[1]


def test_the_last_documents_that_there_can_be():
    Q, D, *_ = corpus("cpu")
    best = li.TopK(Q[:1], 1, first=(1 << 32) - 20)
    best.add(D[:20])
    state = best.state_dict()
    again = li.TopK(Q[:1], 1)
    again.load_state_dict(state)
    assert torch.equal(again.indices, best.indices) and state["ranges"] == [[(1 << 32) - 20, 1 << 32]]
    with pytest.raises(ValueError, match=r"indices of the state must lie in"):  # of the one score
        again.load_state_dict(state | {"indices": state["indices"] - 20})
    li.TopK(Q, 1, first=1 << 32).add(D[:0])
    with pytest.raises(ValueError, match="D must bring the documents to at most"):
        li.TopK(Q, 1, first=1 << 32).add(D[:1])


def test_documents_that_were_seen_are_refused_before_any_is_scored():
    Q, D, *_ = corpus("cpu")
    first, later = li.TopK(Q, 3), li.TopK(Q, 3, first=4)
    later.add(D[4:8])
    first.merge(later)
    with pytest.raises(ValueError, match="documents 4 to 5 were searched twice"):
        first.add(D[:6], chunk_bytes=bytes_of(2, D))
    assert first.seen == 4 and torch.equal(first.indices, later.indices)
    first.add(D[:4], chunk_bytes=bytes_of(2, D))
    assert first.seen == 8


def test_documents_between_those_of_merged_searches_come_in_their_order():
    Q, D = torch.ones(2, 1, 4).double(), torch.ones(30, 3, 4).double()  # all scores tie
    best, last = li.TopK(Q, 25), li.TopK(Q, 25, first=20)
    best.add(D[:10])
    last.add(D[20:])
    best.merge(last)
    best.add(D[10:20])
    assert best.indices.tolist() == [list(range(25))] * 2


def test_a_state_with_nan_and_equal_scores():
    Q, D, *_ = corpus("cpu")
    D[3:9], D[12] = D[2], torch.nan
    for largest in (True, False):
        best = li.TopK(Q, 7, largest=largest)
        best.add(D)
        again = li.TopK(Q, 7, largest=largest)
        again.load_state_dict(best.state_dict())
        assert torch.equal(again.indices, best.indices)


# ---- shards ----


def searched(Q, D, k, bounds, **options):
    """A search of each part of the documents."""
    found = []
    for first, stop in pairwise(bounds):
        part = li.TopK(Q, k, first=first, **options)
        part.add(D[first:stop], chunk_bytes=bytes_of(4, D))
        found.append(part)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 6, 100])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]])
def test_shards_merge_to_the_search_of_all(dtype, largest, k, order, device):
    Q, D, *_ = corpus(device, dtype=dtype)
    D[10:20], D[30:] = D[:10].clone(), D[5]  # scores that tie across shards
    D[3, 0], D[33, 0] = torch.nan, torch.nan
    whole = li.search(Q, D, k, largest=largest)
    parts = searched(Q, D, k, [0, 7, 7, 23, 37], largest=largest)
    best = li.TopK(Q, k, largest=largest)
    for i in order[:2]:
        best.merge(parts[i])
    best.merge(*[parts[i] for i in order[2:]])
    best.merge()
    assert best.seen == 37
    torch.testing.assert_close(best.scores, whole.scores, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(best.indices, whole.indices)


def test_a_search_goes_on_after_a_merge(device):
    """Its own documents come before those of the merged search."""
    for dtype in (torch.float32, torch.float64):
        Q, D, *_ = corpus(device, dtype=dtype)
        D[20:] = D[3]
        whole = li.search(Q, D, 9)
        first, last = searched(Q, D, 9, [0, 10, 30])
        first.merge(li.TopK(Q, 9, first=50))  # one that has seen nothing
        last.add(D[30:])
        first.merge(last)
        assert first.seen == 27 + 10 and last.seen == 27
        again = li.TopK(Q, 9)
        state = li.TopK(Q, 9).state_dict()
        again.load_state_dict(state)
        again.merge(last)
        again.add(D[:4])
        saved = again.state_dict()
        restored = li.TopK(Q, 9)
        restored.load_state_dict(saved)
        restored.add(D[4:10])
        for found in (first, restored):
            assert found.seen == 37 and torch.equal(found.indices, whole.indices)
            torch.testing.assert_close(found.scores, whole.scores, rtol=1e-6, atol=1e-6)


def test_documents_are_counted_once():
    Q, D, *_ = corpus("cpu")
    first, second = searched(Q, D, 5, [0, 20, 37])
    first.merge(second)
    before = first.state_dict()
    for other in (second, *searched(Q, D, 5, [0, 1]), *searched(Q, D, 5, [36, 37])):
        with pytest.raises(ValueError, match=r"documents \d+ to \d+ were searched twice"):
            first.merge(other)
    with pytest.raises(ValueError, match="documents 20 to 36 were searched twice"):
        li.TopK(Q, 5).merge(second, *searched(Q, D, 5, [0, 4]), second)
    late = li.TopK(Q, 5, first=15)
    late.merge(second)
    with pytest.raises(ValueError, match="documents 20 to 21 were searched twice"):
        late.add(D[15:22])
    late.add(D[15:20])
    assert late.seen == 22 and first.state_dict()["indices"] is before["indices"]


@pytest.mark.parametrize("option", [{"k": 4}, {"largest": False}, {"normalize": True}, {"precision": "high"}])
def test_other_searches_do_not_merge(option):
    Q, _, *_ = corpus("cpu")
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} of a search to merge must be .*, as in this search, got"):
        li.TopK(Q, 5).merge(li.TopK(Q, **{"k": 5, **option}))
    with pytest.raises(ValueError, match="Q_shape of a search to merge must be"):
        li.TopK(Q, 5).merge(li.TopK(Q[:2], 5))
    with pytest.raises(TypeError, match="others must be TopK, got dict"):
        li.TopK(Q, 5).merge(li.TopK(Q, 5).state_dict())


@pytest.mark.parametrize("first", [-1, 2**32 + 1, 1.0, True])
def test_a_first_document_that_there_is_not(first):
    with pytest.raises((TypeError, ValueError), match="first must be"):
        li.TopK(torch.randn(2, 3, 4), 5, first=first)


def test_the_largest_number_of_a_document(device):
    Q, D, *_ = corpus(device)
    part = li.TopK(Q, 40, first=2**32 - 37)
    part.add(D)
    assert torch.equal(part.indices - (2**32 - 37), li.search(Q, D, 40).indices)
    with pytest.raises(ValueError, match=r"at most 2\*\*32, got 4294967296 \+ 1"):
        part.add(D[:1])


def test_memory_mapped_corpus(device, tmp_path):
    Q, D, *_ = corpus(device, dtype=torch.bfloat16)
    path = tmp_path / "corpus.bin"
    D.cpu().view(torch.int16).numpy().tofile(path)
    mapped = torch.from_file(str(path), size=D.numel(), dtype=torch.bfloat16).view(D.shape)
    close(li.search(Q, mapped, 5, chunk_bytes=bytes_of(8, D)), li.search(Q, D, 5))


# ---- codes ----

CODECS = {
    "fp8": FP8,
    "e5m2": codecs.Fp8(torch.float8_e5m2),
    "int8": INT8,
    "bits": BITS,
    "signs": codecs.Bits(1, scales=False),
}


def best_of(Q, codes, k):
    """Scores of bits are few numbers, so that many documents tie."""
    scores, indices = li.maxsim(Q, codes).sort(dim=-1, descending=True, stable=True)
    return scores[..., :k], indices[..., :k]


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("how", CODECS)
def test_streamed_codes(how, pinned):
    Q, D = torch.randn(4, 32, 128, device="cuda"), torch.randn(301, 60, 128)
    codes = CODECS[how].encode(li.Tokens(D, torch.rand(301, 60) < 0.7))
    expected = best_of(Q, codes.to("cuda"), 9)
    codes = codes.pin_memory() if pinned else codes
    for chunk in (None, 1, 37):
        close(li.search(Q, codes, 9, chunk_bytes=bytes_of(chunk, codes.values)), expected)


# ---- a corpus on the CPU, queries on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 7, 500, 5000])
def test_streamed_corpus(chunk, masked, strided, pinned):
    Q = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)
    D = torch.randn(501, 60, 128).bfloat16()
    D = D.transpose(0, 1).contiguous().transpose(0, 1) if strided else D
    D = D.pin_memory() if pinned else D
    d_mask = torch.rand(501, 60) < 0.7 if masked else None
    expected = li.maxsim(Q, D.cuda(), None, None if d_mask is None else d_mask.cuda(), normalize=True).topk(9)
    for _ in range(3):
        got = li.search(Q, D, 9, d_mask=d_mask, chunk_bytes=bytes_of(chunk, D), normalize=True)
        assert got.scores.is_cuda and got.indices.is_cuda
        close(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [1000, 60 * 128 * 2, 100_000])  # bytes, pinned
@pytest.mark.parametrize("strided", [False, True])
def test_streamed_in_small_pieces(piece, strided, monkeypatch):
    monkeypatch.setattr(stream, "_SLOT_BYTES", piece)
    Q = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)
    D = torch.randn(101, 60, 128).bfloat16()
    D = D.transpose(0, 1).contiguous().transpose(0, 1) if strided else D
    d_mask = torch.rand(101, 60) < 0.7
    expected = li.maxsim(Q, D.cuda(), None, d_mask.cuda(), normalize=True).topk(9)
    for chunk in (None, 1, 23):
        close(li.search(Q, D, 9, d_mask=d_mask, chunk_bytes=bytes_of(chunk, D), normalize=True), expected)


@pytest.mark.gpu
def test_streamed_corpus_where_the_default_device_is_the_gpu():
    Q = torch.randn(2, 32, 128, device="cuda")
    D = torch.randn(200, 60, 128)  # pageable: pinned memory of our own carries it
    expected = li.search(Q, D, 9, chunk_bytes=bytes_of(50, D))
    torch.set_default_device("cuda")
    try:
        got = li.search(Q, D, 9, chunk_bytes=bytes_of(50, D))
    finally:
        torch.set_default_device(None)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    "option, error",
    [({"largest": "no"}, TypeError), ({"largest": None}, TypeError), ({"normalize": 1}, TypeError),
     ({"precision": "most"}, ValueError)],
)  # fmt: skip
def test_a_wrong_option_is_refused_before_the_first_document(option, error):
    (name,) = option
    with pytest.raises(error, match=f"^{name} must be"):
        li.TopK(torch.randn(2, 3, 8), 4, **option)
    with pytest.raises(error, match=f"^{name} must be"):
        li.search(torch.randn(2, 3, 8), torch.randn(0, 5, 8), 4, **option)


def pinned_slots(pieces, size):
    events = [torch.cuda.Event() for _ in range(pieces)]
    for event in events:
        event.record()
    left = torch.tensor([event.cuda_event for event in events])
    return events, torch.empty(pieces, size, dtype=torch.uint8, pin_memory=True), left


@pytest.mark.gpu
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (1 << 20) + 1])
@pytest.mark.parametrize("pieces", [1, 2, 7, 40])
@pytest.mark.parametrize("offset", [0, 3])
def test_send_bytes(offset, pieces, size):
    source = torch.randint(256, (size + offset,), dtype=torch.uint8)[offset:]
    room = torch.full((size + 200,), 7, dtype=torch.uint8, device="cuda")
    _events, staging, left = pinned_slots(pieces, 4096)
    for first in (0, pieces // 2, pieces - 1):
        room[100 : 100 + size] = 0
        torch.ops.late_interaction.send_bytes_(room[100 : 100 + size], source, staging, left, first)
        assert torch.equal(room[100 : 100 + size].cpu(), source)
        assert bool((room[:100] == 7).all()) and bool((room[100 + size :] == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [4096, 512 << 10, (1 << 20) + 100])  # bytes
@pytest.mark.parametrize("threads", [1, 3, None])
def test_one_ring_serves_one_call_after_another(threads, piece):
    # A thread fills 512 KiB at a time: pieces of less, of just that, and of two and a bit.
    sizes = [3 * piece, 1, piece - 1, 7 * piece + 5, 0, piece, 20 * piece + 1] * 3
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        events, staging, left = pinned_slots(5, piece)
        first, sent = 0, []
        for size in sizes:
            source = torch.randint(256, (size,), dtype=torch.uint8)
            target = torch.zeros(size, dtype=torch.uint8, device="cuda")
            torch.ops.late_interaction.send_bytes_(target, source, staging, left, first)
            sent.append((target, source.clone()))
            source.fill_(7)  # it has been read
            first = (first + -(-size // piece)) % 5
        for event in events:
            event.synchronize()
        assert all(torch.equal(target.cpu(), source) for target, source in sent)
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
def test_send_bytes_as_an_operator():
    op = torch.ops.late_interaction.send_bytes_
    to, source = torch.zeros(100, dtype=torch.uint8, device="cuda"), torch.arange(100, dtype=torch.uint8)
    _events, staging, left = pinned_slots(2, 64)
    torch.library.opcheck(op.default, (to, source, staging, left, 1))
    for bad in (source[:99], source.float(), source.view(10, 10), source.repeat(2)[::2], source.cuda()):
        with pytest.raises(RuntimeError, match="contiguous uint8"):
            op(to, bad, staging, left, 0)
    with pytest.raises(RuntimeError, match="staging must be"):
        op(to, source, staging[:0], left[:0], 0)
    with pytest.raises(RuntimeError, match="events must be"):
        op(to, source, staging, left.int(), 0)
    for bad in (-1, 2):
        with pytest.raises(RuntimeError, match="first must be one of the 2 slots"):
            op(to, source, staging, left, bad)


@pytest.mark.gpu
def test_streaming_in_bounded_memory():
    Q = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)
    D = torch.randn(100, 128, 128).bfloat16().repeat(200, 1, 1)  # 655 MB
    li.search(Q, D[:100], 9, normalize=True)
    assert peak(lambda: li.search(Q, D, 9, normalize=True)) < 2 * stream._BYTES + (32 << 20)


def test_a_corpus_larger_than_the_memory_of_the_gpu(device, tmp_path):
    documents = 32_000 if device == "cuda" else 300  # 1000 MiB of them, where 896 may be taken
    command = [sys.executable, "-m", "tests.support.large_corpus", device, str(documents), str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{documents} documents, mapped, numpy, pageable")


@pytest.mark.gpu
def test_streaming_on_a_side_stream():
    Q = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)
    D = torch.randn(300, 60, 128).bfloat16()
    expected = li.search(Q, D.cuda(), 5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = li.search(Q, D, 5, chunk_bytes=bytes_of(37, D))
    side.synchronize()
    close(got, expected)


@pytest.mark.gpu
def test_streaming_that_fails_leaves_nothing_behind():
    Q, D = torch.randn(4, 32, 128, device="cuda"), torch.randn(300, 60, 128)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        li.search(Q, D, 5, chunk_bytes=bytes_of(37, D), progress=stop)
    close(li.search(Q, D, 5, chunk_bytes=bytes_of(37, D)), li.search(Q, D.cuda(), 5))


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_a_stream_that_is_left_early(masked, monkeypatch):
    monkeypatch.setattr(stream, "_SLOT_BYTES", 10_000)
    D = torch.randn(300, 60, 128)
    d_mask = torch.rand(300, 60) < 0.7 if masked else None
    device = torch.device("cuda", torch.cuda.current_device())
    for taken in range(4):
        running = stream.chunks(D, [d_mask], 37, device)
        for index, (start, documents, _) in zip(range(taken), running, strict=False):
            assert start == 37 * index and torch.equal(documents.cpu(), D[start : start + 37])
        running.close()
    whole = [documents.cpu() for _, documents, _ in stream.chunks(D, [d_mask], 37, device)]
    assert torch.equal(torch.cat(whole), D)


@pytest.mark.gpu
def test_streaming_resumed_from_a_checkpoint():
    Q = torch.randn(4, 32, 128, device="cuda")
    D, d_mask = torch.randn(300, 60, 128), torch.rand(300, 60) < 0.7
    best = li.TopK(Q, 7)
    best.add(D[:130], d_mask[:130], chunk_bytes=bytes_of(37, D))
    again = li.TopK(Q, 7)
    again.load_state_dict(best.state_dict())
    again.add(D[again.seen :], d_mask[again.seen :])
    assert again.seen == 300
    close((again.scores, again.indices), li.search(Q, D.cuda(), 7, d_mask=d_mask.cuda()))


@pytest.mark.gpu
def test_streaming_in_several_threads():
    def search(seed):
        generator = torch.Generator().manual_seed(seed)
        D = torch.randn(300, 60, 128, generator=generator)
        Q = torch.randn(4, 32, 128, generator=generator).cuda()
        with torch.cuda.stream(torch.cuda.Stream()):
            got = [li.search(Q, D, 5, chunk_bytes=bytes_of(23 + seed, D)) for _ in range(5)]
            expected = li.search(Q, D.cuda(), 5)
        torch.cuda.synchronize()
        return got, expected

    with ThreadPoolExecutor(6) as pool:
        for got, expected in pool.map(search, range(12)):
            for each in got:
                close(each, expected)
