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
from tests.support.corpora import best_of


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_chunks_do_not_change_the_result(chunk, k, largest, dtype, device):
    Q, D, q_mask, d_mask = corpus(device, dtype=dtype)
    options = {"q_mask": q_mask, "d_mask": d_mask, "normalize": dtype == torch.float32}
    expected = li.maxsim(Q, D, **options).topk(min(k, 37), largest=largest)
    got = li.search(Q, D, k, chunk_bytes=bytes_of(chunk, D), largest=largest, **options)
    close(got, expected)
    assert (got.scores.dtype, got.indices.dtype) == (expected.values.dtype, torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("chunk", [None, 3, 10])
def test_ties_go_to_the_lowest_index(chunk, largest, dtype, device):
    Q = torch.randint(-1, 2, (4, 3, 4), device=device).to(dtype)
    D = torch.randint(-1, 2, (50, 2, 4), device=device).to(dtype)
    got = li.search(Q, D, 20, chunk_bytes=bytes_of(chunk, D), largest=largest)
    assert all(map(torch.equal, got, best_of(li.maxsim(Q, D), 20, largest)))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_scores_order_as_in_torch_topk_but_nan_takes_no_rank(dtype, largest, device):
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 3e38, -3e38, 1.5]
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


@pytest.mark.parametrize("largest", [True, False])
def test_resumed_from_a_checkpoint(largest, device, tmp_path):
    Q, D, *_ = corpus(device)
    D[3:9], D[12] = D[2], torch.nan
    best = li.TopK(Q[0], 7, largest=largest)
    best.add(D[:20])
    torch.save(best.state_dict(), tmp_path / "state.pt")
    again = li.TopK(Q[0], 7, largest=largest)
    again.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu"))
    assert again.seen == 20 and torch.equal(again.indices, best.indices)
    best.add(D[20:])
    again.add(D[again.seen :], chunk_bytes=bytes_of(4, D))
    assert again.seen == 37 and again.indices.device == Q.device
    close((again.scores, again.indices), (best.scores, best.indices))


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
        ("Q_shape", {"Nq": 3}),
    ],
)
def test_another_search_is_neither_gone_on_with_nor_merged(name, options):
    Q, D, *_ = corpus("cpu")
    best = li.TopK(Q, 7)
    best.add(D)
    options = dict(options)
    Q = Q[: options.pop("Nq", None), : options.pop("Lq", None)].to(options.pop("dtype", Q.dtype))
    other = li.TopK(Q, options.pop("k", 7), **options)
    with pytest.raises(ValueError, match=f"^{name} of the state must be .* as in this search, got "):
        other.load_state_dict(best.state_dict())
    with pytest.raises(ValueError, match=f"^{name} of a search to merge must be .*, as in this search, got"):
        other.merge(best)
    with pytest.raises(TypeError, match="others must be TopK, got dict"):
        other.merge(best.state_dict())
    assert other.seen == 0 and other.scores.shape == (len(Q), 0)


# Entries of a state after 20 documents that are exchanged: by others, or by what a function makes of them.
BAD_STATES = [
    ({"epoch": 3}, ValueError, "no entries but .* got epoch"),
    ({"next": True}, TypeError, "next of the state must be an int"),
    ({"next": -2}, ValueError, "next of the state must not be neg"),
    ({"ranges": 20}, TypeError, "ranges of the state must be a"),
    ({"ranges": [[0, 20.0]]}, TypeError, "ranges of the state must be a list"),
    ({"ranges": [[10, 20], [0, 10]]}, ValueError, "ranges of the state must rise"),
    ({"ranges": [[0, 9]]}, ValueError, "must hold the 20 documents .* got 9"),
    ({"ranges": [[0, 21]]}, ValueError, "must hold the 20 documents .* got 21"),
    ({"ranges": [[-1, 19]]}, ValueError, "ranges of the state must rise"),
    ({"ranges": [[0, 10], [10, 20]]}, ValueError, "ranges of the state must rise"),
    ({"ranges": [[0, 20], [30, 30]]}, ValueError, "ranges of the state must rise"),
    ({"ranges": [[40, 60]]}, ValueError, r"must lie in \[40, 60\), got"),
    ({"k": 7.0}, ValueError, "k of the state must be 7, .* got 7.0"),
    ({"seen": 20.0}, TypeError, "seen of the state must be an int"),
    ({"seen": True}, TypeError, "seen of the state must be an int"),
    ({"seen": -1}, ValueError, "seen of the state must not be neg"),
    ({"seen": 3}, ValueError, r"scores of the state .* \[5, 3\]"),
    ({"scores": [1.0]}, TypeError, "scores of the state must be a torch.Tensor"),
    ({"scores": torch.Tensor.to_sparse}, TypeError, "scores .* dense tensor"),
    ({"scores": lambda x: x.to("meta")}, ValueError, "scores of the state must"),
    ({"scores": torch.Tensor.double}, ValueError, "scores .* got torch.float64"),
    ({"scores": lambda x: x[:, :5]}, ValueError, r"scores .* got .* \[5, 5\]"),
    ({"scores": lambda x: x[:3]}, ValueError, r"scores .* got .* \[3, 7\]"),
    ({"scores": lambda x: x.flip(-1)}, ValueError, "begin with the highest"),
    ({"indices": torch.Tensor.int}, ValueError, "indices .* torch.int64"),
    ({"indices": lambda x: x[:, 0]}, ValueError, r"indices .* got .* \[5\]"),
    ({"indices": lambda x: x + 20}, ValueError, r"must lie in \[0, 20\)"),
    ({"indices": lambda x: x - 20}, ValueError, r"must lie in \[0, 20\)"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_STATES)
def test_states_that_no_search_has(changes, error, message):
    Q, D, *_ = corpus("cpu")
    best = li.TopK(Q, 7)
    best.add(D[:20])
    before, state = (best.scores, best.indices), best.state_dict()
    changed = {name: x(state[name]) if callable(x) else x for name, x in changes.items()}
    with pytest.raises(error, match=message):
        best.load_state_dict(state | changed)
    assert best.seen == 20 and best.scores is before[0] and best.indices is before[1]


def test_what_is_no_state():
    best = li.TopK(torch.ones(2, 3, 4), 7)
    state = best.state_dict()
    del state["scores"]
    for bad, error, message in (
        (state, ValueError, "scores missing"),
        ({}, ValueError, "state must have the entries scores, indices, seen, next"),
        (list(state), TypeError, "state must be a dict from .* got list"),
        (None, TypeError, "state must be a dict from .* got NoneType"),
    ):
        with pytest.raises(error, match=message):
            best.load_state_dict(bad)
    with pytest.raises(ValueError, match=r"Q must be \[Nq, Lq, d\]"):
        li.TopK(torch.ones(4), 7)


def test_the_last_documents_that_there_can_be(device):
    Q, D, *_ = corpus(device)
    first = 2**32 - 37
    best = li.TopK(Q, 40, first=first)
    best.add(D)
    assert torch.equal(best.indices - first, li.search(Q, D, 40).indices)
    with pytest.raises(
        ValueError, match=r"D must bring the documents to at most 2\*\*32, got 4294967296 \+ 1"
    ):
        best.add(D[:1])
    state = best.state_dict()
    again = li.TopK(Q, 40)
    again.load_state_dict(state)
    assert torch.equal(again.indices, best.indices) and state["ranges"] == [[first, 2**32]]
    li.TopK(Q, 1, first=2**32).add(D[:0])


def test_the_only_document_of_a_state_was_seen():
    Q, D, *_ = corpus("cpu")
    best = li.TopK(Q[:1], 1, first=2**32 - 20)
    best.add(D[:20])
    state = best.state_dict()
    with pytest.raises(ValueError, match=r"indices of the state must lie in"):
        best.load_state_dict(state | {"indices": state["indices"] - 20})


def test_documents_between_those_of_merged_searches_come_in_their_order():
    Q, D = torch.ones(2, 1, 4).double(), torch.ones(30, 3, 4).double()  # all scores tie
    best, last = li.TopK(Q, 25), li.TopK(Q, 25, first=20)
    best.add(D[:10])
    last.add(D[20:])
    best.merge(last)
    best.add(D[10:20])
    assert best.indices.tolist() == [list(range(25))] * 2


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
        late.add(D[15:22], chunk_bytes=bytes_of(2, D))
    late.add(D[15:20], chunk_bytes=bytes_of(2, D))  # none of which was scored
    assert late.seen == 22 and first.state_dict()["indices"] is before["indices"]


# ---- codes ----

CODECS = {
    "Fp8": FP8,
    "e5m2": codecs.Fp8(torch.float8_e5m2),
    "Int8": INT8,
    "Bits(1)": BITS,
    "signs": codecs.Bits(1, scales=False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("how", CODECS)
def test_streamed_codes(how, pinned):
    Q, D = torch.randn(4, 32, 128, device="cuda"), torch.randn(301, 60, 128)
    codes = CODECS[how].encode(li.Tokens(D, torch.rand(301, 60) < 0.7))
    expected = best_of(li.maxsim(Q, codes.to("cuda")), 9)  # scores of bits are few numbers: many tie
    codes = codes.pin_memory() if pinned else codes
    for chunk in (None, 1, 37):
        close(li.search(Q, codes, 9, chunk_bytes=bytes_of(chunk, codes.values)), expected)


# ---- a corpus on the CPU, queries on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [None, 1000, 60 * 128 * 2, 100_000])  # bytes, pinned
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 7, 500, 5000])
def test_streamed_corpus(chunk, masked, strided, pinned, piece, monkeypatch):
    if piece:
        monkeypatch.setattr(stream, "_SLOT_BYTES", piece)
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
