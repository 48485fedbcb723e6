"""li.Codes of every codec: scores in every layout, and the value in compiled code and other processes."""

import multiprocessing
import pickle
import random
from itertools import cycle

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import late_interaction as li
from late_interaction import Codes, Tokens, codecs
from tests.support import ref
from tests.support.calls import waiting_for_nothing
from tests.support.token_forms import D_MODEL, FORMS, LENGTHS, sequences

OPS = torch.ops.late_interaction
TABLES = torch.randn(6, D_MODEL, generator=torch.Generator().manual_seed(1))
CODECS = {
    "int8": codecs.Int8(),
    "e4m3": codecs.Fp8(),
    "e5m2": codecs.Fp8(torch.float8_e5m2),
    "1 bit": codecs.Bits(1),
    "signs": codecs.Bits(1, scales=False),
    "4 bits": codecs.Bits(4),
    "residual": codecs.Residual(TABLES, torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([-2.0, -0.5, 0.5, 2.0])),
}
PAIRED = [name for name in CODECS if name != "residual"]


def codec_on(name, device):
    return CODECS[name].to(device)


def met(codec, Q):
    """What queries become where they meet codes."""
    if isinstance(codec, codecs.Residual):
        return Q
    if isinstance(codec, codecs.Bits) and codec.scales:
        codec = codecs.Int8()
    return codec.decode(codec.encode(Q)).values


# ---- scores ----


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_scores_are_those_of_what_codes_stand_for(lengths, name, device):
    codec = codec_on(name, device)
    queries, documents = (sequences(n, device, torch.float32) for n in LENGTHS[lengths])
    tokens = codec.decode(codec.encode(documents))
    assert not tokens.values.isnan().any() and [len(x) for x in tokens] == LENGTHS[lengths][1]
    wanted = torch.stack(
        [torch.cat([ref.maxsim(met(codec, q[None]), x[None])[0].view(1) for x in tokens]) for q in queries]
    )
    for q_form, d_form in (("list", "list"), ("packed", "padded"), ("holes", "packed"), ("padded", "holes")):
        codes = codec.encode(FORMS[d_form](documents))
        found = li.maxsim(FORMS[q_form](queries), codes)
        ref.assert_close(found, wanted, {"cpu": 1e-5, "cuda": 2e-3}[device])
        for same in (codes.pack(), codes.to_padded(), codes.pack().to_padded(), codes.to_padded().pack()):
            again = li.maxsim(FORMS[q_form](queries), same)
            if device == "cpu":
                assert torch.equal(again, found)
            ref.assert_close(again, wanted, {"cpu": 1e-5, "cuda": 2e-3}[device])
            assert torch.equal(same.lengths, codes.lengths)


@pytest.mark.parametrize("name", CODECS)
def test_scores_have_the_bits_of_the_operator(name, device):
    codec = codec_on(name, device)
    Q, D = torch.randn(3, 5, D_MODEL, device=device), torch.randn(4, 7, D_MODEL, device=device)
    mask = torch.rand(4, 7, device=device) < 0.7
    codes = codec.encode(Tokens(D, mask))
    assert codes.mask is mask and codes.values.shape[:2] == (4, 7) and codes.d == D_MODEL
    own = codecs.Int8() if name in ("1 bit", "4 bits") else codec
    q = None if name == "residual" else own.encode(Q)
    if name == "residual":
        flat = codes.centroids[mask], codes.values[mask]
        offsets = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        codebook = codec.centroids, codec.bucket_weights, codec.nbits
        wanted = OPS.maxsim_residual(Q, *flat, offsets, *codebook, False, "highest")
    elif name == "signs":
        wanted = OPS.maxsim_hamming(q.values, codes.values, D_MODEL, None, mask)
    elif name in ("1 bit", "4 bits"):
        scales = q.scales, codes.scales
        wanted = OPS.maxsim_asymmetric(q.values, codes.values, *scales, None, mask, codec.nbits)
    else:
        wanted = OPS.maxsim_quantized(q.values, codes.values, q.scales, codes.scales, None, mask)
    assert torch.equal(li.maxsim(Q, codes), wanted)
    assert torch.equal(li.maxsim(Q[1], codes), li.maxsim(Q[1:2], codes)[0])
    if q is not None:
        assert torch.equal(li.maxsim(q, codes), wanted)
    per_token = li.maxsim(Tokens(Q, torch.ones(3, 5, device=device, dtype=torch.bool)), codes, mean=True)
    torch.testing.assert_close(per_token, wanted / 5)


@pytest.mark.parametrize("name", PAIRED)
def test_packed_documents_are_not_padded(name, device):
    """To the longest they would take terabytes."""
    codec, lengths = codec_on(name, device), torch.ones(1_000_001, dtype=torch.int32, device=device)
    lengths[7] = 4_000_000
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    one = codec.encode(torch.tensor([[-1.0, 1.0]], device=device))
    values = one.values[0].view(torch.uint8).expand(int(offsets[-1]), -1).contiguous().view(one.values.dtype)
    scales = None if one.scales is None else torch.ones(len(values), device=device)
    if scales is not None:
        scales[5_000] = 4.0  # of document 7
    codes = Codes.packed(codec, values, offsets, scales, d=2)
    Q = torch.tensor([[-2.0, 2.0]], device=device)
    scores, found = li.maxsim(Q, codes), li.search(Q, codes, 2)
    assert torch.equal(scores[found.indices], found.scores)
    assert found.indices.tolist() == ([0, 1] if scales is None else [7, 0])


@pytest.mark.parametrize("name", PAIRED)
def test_documents_of_each_query_and_pairs(name, device):
    codec = codec_on(name, device)
    Q, D = torch.randn(3, 5, D_MODEL, device=device), torch.randn(3, 2, 7, D_MODEL, device=device)
    q_mask, mask = torch.rand(3, 5, device=device) < 0.7, torch.rand(3, 2, 7, device=device) < 0.7
    codes = codec.encode(D)
    codes = Codes(codec, codes.values, codes.scales, mask=mask, d=D_MODEL)
    wanted = torch.stack(
        [li.maxsim(Q[i : i + 1], codec.encode(Tokens(D[i], mask[i])), q_mask[i : i + 1])[0] for i in range(3)]
    )
    limit = {"cpu": 1e-6, "cuda": 2e-3}[device]
    torch.testing.assert_close(li.maxsim(Q, codes, q_mask), wanted, rtol=limit, atol=limit)
    pairs = Codes(codec, *(x if x is None else x[:, 1] for x in (codes.values, codes.scales)),
                  mask=mask[:, 1], d=D_MODEL)  # fmt: skip
    for same in (pairs, pairs.pack()):
        found = li.maxsim_pairs(Q, same, q_mask)
        torch.testing.assert_close(found, wanted[:, 1], rtol=limit, atol=limit)
    assert len(codes) == 3 and len(codes.pack()) == 6 and codes[1].values.shape[:3] == (1, 2, 7)
    assert len(codec.decode(codes)) == 6 and codes.lengths.shape == (3, 2)
    assert torch.equal(li.maxsim(Q[1:2], codes[1], q_mask[1:2])[0], li.maxsim(Q, codes, q_mask)[1])
    for bad in (lambda: li.maxsim(Q[:2], codes), lambda: li.maxsim_pairs(Q[:2], pairs),
                lambda: li.maxsim_pairs(Q, codes)):  # fmt: skip
        with pytest.raises(ValueError, match="D must "):
            bad()


def test_gradients_of_residual_codes(device):
    codec = codec_on("residual", device)
    queries, documents = (sequences(n, device, torch.float32) for n in LENGTHS["nasty"])
    tokens = codec.decode(codec.encode(documents))
    for q_form, d_form in (("padded", "packed"), ("holes", "holes"), ("packed", "padded")):
        own, theirs = ([x.clone().requires_grad_() for x in queries] for _ in range(2))
        weight = torch.randn(len(queries), len(documents), device=device)
        codes = codec.encode(FORMS[d_form](documents))
        (li.maxsim(FORMS[q_form](own), codes, normalize=True) * weight).sum().backward()
        (li.maxsim(theirs, tokens, normalize=True) * weight).sum().backward()
        for x, y in zip(own, theirs, strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def test_precision_of_residual_codes():
    codec, Q = CODECS["residual"], torch.randn(3, 5, D_MODEL)
    codes = codec.encode(torch.randn(4, 7, D_MODEL))
    highest, medium = (li.maxsim(Q, codes, precision=name) for name in ("highest", "medium"))
    assert not torch.equal(highest, medium)
    torch.testing.assert_close(highest, medium, rtol=0.02, atol=0.5)


def test_pairs_of_residual_codes_have_no_kernel():
    codes = CODECS["residual"].encode(torch.ones(2, 3, D_MODEL))
    with pytest.raises(ValueError, match="maxsim_pairs has no kernel for D of Residual"):
        li.maxsim_pairs(torch.ones(2, 3, D_MODEL), codes)
    with pytest.raises(TypeError, match="Q must be embeddings for D of Residual"):
        li.maxsim(codes, codes)


# ---- the value ----


def assert_same(got, want):
    assert repr(got) == repr(want) and got.codec == want.codec
    for x, y in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("name", CODECS)
def test_documents_are_taken_out(name):
    codec, documents = CODECS[name], sequences([3, 0, 1, 5], dtype=torch.float32)
    packed = codec.encode(documents)
    padded = packed.to_padded()
    assert len(packed) == len(padded) == 4 and packed.max_length == padded.max_length == 5
    for codes in (packed, padded):
        for index in (slice(1, 3), slice(None), slice(2, 2), slice(-1, None)):
            part = codes[index]
            assert [len(x) for x in codec.decode(part)] == [len(x) for x in documents[index]]
            assert part.is_packed == codes.is_packed and part.codec is codec
        alone = [codec.decode(x) for x in codes]
        assert all(len(x) == 1 for x in alone) and torch.equal(alone[3][0], codec.decode(packed)[3])
        with pytest.raises(IndexError, match="index 4 is out of range for 4 sequences"):
            codes[4]
        with pytest.raises(TypeError, match="indexed by an int or a slice"):
            codes["a"]
        with pytest.raises(ValueError, match="a step of 1"):
            codes[::2]


@pytest.mark.parametrize("name", CODECS)
def test_pickles_and_moves(name, tmp_path):
    packed = CODECS[name].encode(sequences([2, 0, 5], dtype=torch.float32))
    for codes in (packed, packed.to_padded()):
        assert_same(pickle.loads(pickle.dumps(codes)), codes)
        torch.save({"codes": codes}, tmp_path / "codes.pt")
        assert_same(torch.load(tmp_path / "codes.pt", weights_only=False)["codes"], codes)
        assert_same(codes.to("cpu"), codes)
        elsewhere = codes.to("meta")
        assert elsewhere.device.type == "meta" and all(x.is_meta for x in pytree.tree_leaves(elsewhere))
        flat, spec = pytree.tree_flatten(codes)
        assert flat and all(isinstance(x, torch.Tensor) for x in flat)
        assert_same(pytree.tree_unflatten(flat, spec), codes)
    other = CODECS[name].encode(sequences([1, 1, 4, 6], dtype=torch.float32))
    assert pytree.tree_structure(other) == pytree.tree_structure(packed)  # lengths are leaves
    keyed, _ = pytree.tree_flatten_with_path(packed)
    assert pytree.keystr(keyed[0][0]) == ".values"


def collate(documents):
    return codecs.Int8().encode(documents)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loaders(method):
    pin = torch.cuda.is_available()
    data = [torch.arange(4.0 * n).view(n, 4) + 1 for n in range(6)]
    loader = DataLoader(data, batch_size=3, num_workers=2, collate_fn=collate, pin_memory=pin,
                        multiprocessing_context=multiprocessing.get_context(method))  # fmt: skip
    for batch, first in zip(loader, (0, 3), strict=True):
        assert_same(batch, collate(data[first : first + 3]))
        assert batch.values.is_pinned() == pin


def test_codecs_are_values():
    assert codecs.Int8() == codecs.Int8() != codecs.Fp8() and codecs.Bits(1) != codecs.Bits(4)
    assert codecs.Bits(1) != codecs.Bits(1, scales=False) and codecs.Fp8() != codecs.Fp8(torch.float8_e5m2)
    assert len({*CODECS.values(), codecs.Int8(), codecs.Bits(4)}) == len(CODECS)
    with pytest.raises(ValueError, match=r"codes must be of Bits\(1\), got those of Bits\(4\)"):
        codecs.Bits(1).decode(codecs.Bits(4).encode(torch.ones(2, 4)))
    with pytest.raises(
        TypeError, match=r"codes must be late_interaction\.Codes, got a torch\.float32 tensor"
    ):
        codecs.Int8().decode(torch.ones(2, 4))


@pytest.mark.gpu
def test_nothing_waits_for_a_gpu():
    """Making codes of tensors, and scoring any layout of them but packed ones of unknown length."""
    Q, D = torch.randn(3, 5, D_MODEL, device="cuda"), torch.randn(4, 7, D_MODEL, device="cuda")
    mask = torch.rand(4, 7, device="cuda") < 0.7
    for name in CODECS:
        codec = codec_on(name, "cuda")
        padded = codec.encode(Tokens(D, mask))
        packed = padded.pack()
        li.maxsim(Q, padded)
        with waiting_for_nothing():
            beside = padded.scales, padded.centroids
            codes = Codes(codec, padded.values, *beside, mask, d=D_MODEL)
            beside = packed.offsets, packed.scales, packed.centroids
            again = Codes.packed(codec, packed.values, *beside, max_length=7, d=D_MODEL)
            found = li.maxsim(Q, codes), li.maxsim(Q, again)
        # Padded rows of no whole 16 bytes multiply in TF32, packed ones as they are.
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


# ---- in compiled and exported code ----


def batches(count, name, kind):
    """Queries and codes of different counts and lengths. No two sizes of the first are equal."""
    draw = random.Random(0)
    for i in range(count):
        n, m = (3, 5) if i == 0 else (draw.randint(2, 9), draw.randint(2, 9))
        lengths = [draw.randint(0, 30) for _ in range(m - 1)] + [31 + (i > 0)]
        codes = CODECS[name].encode(sequences(lengths, dtype=torch.float32))
        if kind == "no mask":
            codes = CODECS[name].encode(torch.randn(m, lengths[0] + 2, D_MODEL))
        elif kind == "padded":
            codes = codes.to_padded()
        yield torch.randn(n, 11 + i, D_MODEL), codes


@pytest.mark.parametrize(
    ("kind", "name"),
    [*zip(cycle(["packed", "padded", "no mask"]), CODECS), ("padded", "int8"), ("no mask", "int8")],
)
def test_batches_of_any_length_compile_at_most_twice(kind, name):
    from torch._dynamo.testing import CompileCounterWithBackend

    def call(Q, codes):
        again = codes.codec.encode(codes.codec.decode(codes)) if name != "residual" else codes
        return li.maxsim(Q, codes) + li.maxsim(Q, again)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for Q, codes in batches(40, name, kind):
        torch.testing.assert_close(compiled(Q, codes), call(Q, codes), rtol=1e-4, atol=1e-3)
    assert counter.frame_count <= 2


class Scores(torch.nn.Module):
    def forward(self, Q, codes):
        return li.maxsim(Q, codes)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_an_exported_program_takes_other_lengths(kind, name, tmp_path):
    first, *others = batches(4, name, kind)
    auto, codes = torch.export.Dim.AUTO, first[1]
    own = [[None if n in (0, D_MODEL) else auto for n in x.shape] for x in pytree.tree_leaves(codes)]
    own[0][-1] = None  # the elements of a token
    tables = [[None] * x.dim() for x in pytree.tree_leaves(codes.codec)]
    shapes = {0: auto, 1: auto}, [*own[: len(own) - len(tables)], tables]
    program = torch.export.export(Scores(), first, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "scores.pt2")
    loaded = torch.export.load(tmp_path / "scores.pt2").module()
    for Q, codes in others:
        torch.testing.assert_close(loaded(Q, codes), li.maxsim(Q, codes))
