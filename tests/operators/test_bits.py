"""1-bit and 4-bit codes: the quantizers, their scores against float64 brute force, and the operators."""

import itertools

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction import Codes, codecs
from late_interaction.reference import maxsim_asymmetric_reference, maxsim_hamming_reference
from tests.support import coded, ref
from tests.support.cases import begun, mask
from tests.support.coded import BITS, FOUR, INT8, decoded, encoded, scored

OPS = torch.ops.late_interaction
DIMS = [8, 24, 40, 64, 96, 128, 160, 320, 1, 13]
LENGTHS_Q = [32, 1, 0, 7, 33, 65, 2]
LENGTHS_D = [1, 0, 13, 300, 37, 5, 401, 12, 64]
BATCHES = [(2, 3), (1, 5), (3, 1), (0, 2), (2, 0), (1, 1)]
MASKS = ["none", "holes", "dead"]
LAYOUTS = ["in-batch", "KD"]
FORMS = ["contiguous", "transposed", "sliced", "offset", "expanded"]


def walk(count):
    lists = (LAYOUTS, BATCHES, LENGTHS_Q, LENGTHS_D, DIMS, FORMS, MASKS)
    return list(itertools.islice(zip(*map(itertools.cycle, lists), strict=False), count))


CASES = walk(120)


def laid(x, form):
    """x, in memory as `form` says."""
    if form == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if form == "sliced":
        return torch.nn.functional.pad(x, (3, 2, 1, 1), value=-1 if x.dtype == torch.int8 else 255)[
            ..., 1:-1, 3:-2
        ]
    if form == "offset":
        return begun(x)
    return x[:1].expand(x.shape) if form == "expanded" and x.shape[0] else x


def packed(shape, d, nbits, device, form="contiguous"):
    return laid(coded.packed(shape, d, nbits, device), form)


def values(codes, nbits, d):
    """What codes stand for, by NumPy's own unpacking: apart from the package's."""
    x = np.unpackbits(codes.cpu().numpy(), axis=-1, bitorder="little")
    x = torch.from_numpy(x).double().unflatten(-1, (-1, nbits)) @ (2.0 ** torch.arange(nbits).double())
    x = x[..., :d].to(codes.device)
    return 2 * x - 1 if nbits == 1 else x - 8


def draw(case, device):
    """Shapes of the tokens of a case, d, how they lie in memory, and masks."""
    layout, (Nq, N), Lq, Ld, d, form, masks = case
    documents = (N, Ld) if layout == "in-batch" else (Nq, N, Ld)
    q_mask, d_mask = mask((Nq, Lq), device, masks), mask(documents, device, masks)
    return (Nq, Lq), documents, d, form, q_mask, d_mask


def int8_codes(shape, device):
    codes = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
    return codes.masked_fill(torch.rand(shape, device=device) < 0.2, -128)


def test_hamming(device):
    for case in CASES:
        queries, documents, d, form, q_mask, d_mask = draw(case, device)
        Q, D = packed(queries, d, 1, device, form), packed(documents, d, 1, device, form)
        scores = OPS.maxsim_hamming(Q, D, d, q_mask, d_mask)
        expected = ref.maxsim(values(Q, 1, d), values(D, 1, d), q_mask, d_mask)[0]
        assert torch.equal(scores.double(), expected), case
        assert torch.equal(maxsim_hamming_reference(Q, D, d, q_mask=q_mask, d_mask=d_mask), scores), case


def sums_of_maxima(Q, D, q_mask, d_mask):
    """Scores in float64, of all documents at once."""
    S = torch.einsum("qsd,ntd->qnst", Q, D)
    if d_mask is not None:
        S = S.masked_fill(~d_mask[None, :, None], -torch.inf)
    best = S.amax(-1)
    counts = best > -torch.inf if q_mask is None else (best > -torch.inf) & q_mask[:, None]
    return torch.where(counts, best, 0.0).sum(-1)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [128, 64, 100, 384, 160])
def test_a_gpu_walks_over_many_documents(d):
    """More documents than it has warps, so that copies run ahead from one to the next; row tiles that share a
    warp, and one alone."""
    for (Nq, Lq), Ld, masks in (
        ((1, 32), 40, "none"),
        ((3, 20), 33, "holes"),
        ((5, 7), 31, "none"),
        ((1, 70), 1, "dead"),
    ):
        q_mask, d_mask = mask((Nq, Lq), "cuda", masks), mask((7000, Ld), "cuda", masks)
        Q, D = packed((Nq, Lq), d, 1, "cuda"), packed((7000, Ld), d, 1, "cuda")
        signs = values(D, 1, d)
        expected = sums_of_maxima(values(Q, 1, d), signs, q_mask, d_mask)
        assert torch.equal(OPS.maxsim_hamming(Q, D, d, q_mask, d_mask).double(), expected)
        codes, one = int8_codes((Nq, Lq, d), "cuda"), torch.ones((), device="cuda")
        scale = torch.randint(1, 9, (7000, Ld), device="cuda") / 8
        found = OPS.maxsim_asymmetric(codes, D, one, scale, q_mask, d_mask, 1)
        wanted = sums_of_maxima(codes.double(), signs * scale[..., None], q_mask, d_mask)
        assert torch.equal(found.double(), wanted)


@pytest.mark.parametrize("nbits", [1, 4])
def test_asymmetric(nbits, device):
    for case in CASES:
        queries, documents, d, form, q_mask, d_mask = draw(case, device)
        Q, D = laid(int8_codes((*queries, d), device), form), packed(documents, d, nbits, device, form)
        s, t = torch.rand(queries, device=device), torch.rand(documents, device=device)
        scores = OPS.maxsim_asymmetric(Q, D, s, t, q_mask, d_mask, nbits)
        q, x = Q.double() * s.double()[..., None], values(D, nbits, d) * t.double()[..., None]
        expected = ref.maxsim(q, x, q_mask, d_mask)[0]
        ref.assert_close(scores, expected, {"cpu": 5e-6, "cuda": 2e-3}[device])
        reference = maxsim_asymmetric_reference(Q, D, s, t, nbits=nbits, q_mask=q_mask, d_mask=d_mask)
        ref.assert_close(reference, expected, 1e-6)


# 1000 bits and more overflow what a byte counts.
@pytest.mark.parametrize(
    "d, form", list(zip([*DIMS, 1000, 2056, 128, 128, 64], itertools.cycle(FORMS), strict=False))
)
def test_every_instruction_set_gives_the_same_bits(isa, d, form):
    """Integers below 2^24, which have no order of summation to differ by. Tiles are 384 tokens."""
    one, shapes = torch.ones(()), [(5, 385), (16, 1), (17, 11), (33, 24)]
    for Lq, Ld in shapes if d < 1000 else shapes[2:3]:
        Q, D = packed((3, Lq), d, 1, "cpu", form), packed((4, Ld), d, 1, "cpu", form)
        codes = laid(int8_codes((3, Lq, d), "cpu"), form)
        nibbles = packed((4, Ld), d, 4, "cpu", form)
        masks = (mask((3, Lq), "cpu", "holes"), None if Ld == 24 else mask((4, Ld), "cpu", "holes"))
        for scores, q, x in (
            (OPS.maxsim_hamming(Q, D, d, *masks), values(Q, 1, d), values(D, 1, d)),
            (OPS.maxsim_asymmetric(codes, D, one, one, *masks, 1), codes, values(D, 1, d)),
            (OPS.maxsim_asymmetric(codes, nibbles, one, one, *masks, 4), codes, values(nibbles, 4, d)),
        ):
            assert torch.equal(scores.double(), ref.maxsim(q, x, *masks)[0])


@pytest.mark.parametrize("d", [248, 256, 992, 1000, 1024, 2056])
def test_codes_that_differ_in_every_bit(isa, d):
    """A byte counts at most 255 of them."""
    Q, D = torch.full((2, 17, d // 8), 255, dtype=torch.uint8), torch.zeros(3, 5, d // 8, dtype=torch.uint8)
    assert (OPS.maxsim_hamming(Q, D, d, None, None) == -17 * d).all()


def test_a_pair_cut_among_threads():
    """One query with one long document: each thread has a part of the tokens."""
    Q, D = packed((1, 300), 128, 1, "cpu"), packed((1, 9000), 128, 1, "cpu")
    d_mask = mask((1, 9000), "cpu", "holes")
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(OPS.maxsim_hamming(Q, D, 128, None, d_mask))
    expected = ref.maxsim(values(Q, 1, 128), values(D, 1, 128), None, d_mask)[0]
    assert all(torch.equal(x.double(), expected) for x in found)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("nbits", [1, 4])
def test_bad_scales_make_nan(nbits, scale, device):
    Q, D = torch.randn(2, 3, 24, device=device), packed((4, 5), 24, nbits, device)
    t = torch.rand(4, 5, device=device)
    t[1, 2] = scale
    d_mask = torch.ones(4, 5, dtype=torch.bool, device=device)
    codec = codecs.Bits(nbits)
    scores = scored(codec, Q, D, t)
    assert scores[:, 1].isnan().all() and not scores[:, [0, 2, 3]].isnan().any()
    d_mask[1, 2] = False
    assert not scored(codec, Q, D, t, None, d_mask).isnan().any()


# ---- the quantizers ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 7, 8, 40, 130])
def test_codes_are_numpys(d, dtype, device):
    X = torch.randn(3, 5, d, device=device).to(dtype)
    X[0, 1] = 0
    codes, scale = encoded(BITS, X)
    assert np.array_equal(codes.cpu(), np.packbits((X > 0).cpu().numpy(), axis=-1, bitorder="little"))
    norms = decoded(BITS, codes, scale, d).norm(dim=-1)
    torch.testing.assert_close(norms.double(), X.double().norm(dim=-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(decoded(BITS, codes, scale, d) > 0, X > 0)

    codes, scale = encoded(FOUR, X)
    back = decoded(FOUR, codes, scale, d)
    assert torch.equal(back, (values(codes, 4, d) * scale[..., None]).float())
    assert ((back - X.float()).abs() <= 0.501 * scale[..., None]).all()
    assert not back[0, 1].any() and codes.shape == (3, 5, -(-d // 2))
    assert not d % 2 or (codes[..., -1] < 16).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite(bad, device):
    X = torch.randn(3, 24, device=device)
    X[1, 5] = bad
    for codec, zero in ((BITS, 0), (FOUR, 0x88)):
        codes, scale = encoded(codec, X)
        assert scale.isnan().tolist() == [False, True, False]
        assert (codes[1] == zero).all() and (codes[0] != zero).any()


def test_sizes_at_the_ends_of_float32(device):
    X = torch.tensor([[3e38, -1e38, 1.0], [1e-38, -1e-38, 1e-38]], device=device)
    codes, scale = encoded(BITS, X)
    assert codes.tolist() == [[5], [5]] and scale.isfinite().all() and (scale > 0).all()


def test_empty(device):
    for codec in (BITS, FOUR):
        codes, scale = encoded(codec, torch.empty(0, 4, 16, device=device))
        assert codes.shape[:2] == scale.shape == (0, 4)


def test_a_dim_less_for_one_query(device):
    Q, D = torch.randn(3, 5, 24, device=device), torch.randn(4, 7, 24, device=device)
    for codec in (BITS, FOUR, codecs.Bits(scales=False)):
        codes = codec.encode(D)
        assert torch.equal(li.maxsim(Q[0], codes), li.maxsim(Q, codes)[0])
        assert torch.equal(li.maxsim(Q, codec.encode(D[0])), li.maxsim(Q, codes)[:, :1])


def test_queries_of_bits(device):
    Q = torch.randn(3, 5, 24, device=device)
    signs = BITS.encode(torch.randn(4, 7, 24, device=device))
    alone = Codes(codecs.Bits(scales=False), signs.values)
    rough = OPS.maxsim_hamming(BITS.encode(Q).values, signs.values, 24, None, None)
    bits = BITS.encode(Q)
    for q, d in ((bits, signs), (bits, alone), (Q, alone), (alone.codec.encode(Q), signs)):
        assert torch.equal(li.maxsim(q, d), rough)


# ---- what is refused ----


Q1, D1 = torch.zeros(3, 5, 3, dtype=torch.uint8), torch.zeros(4, 7, 3, dtype=torch.uint8)
OWN1, Q8 = torch.zeros(3, 2, 7, 3, dtype=torch.uint8), torch.ones(3, 5, 24, dtype=torch.int8)
OF_BITS = [
    ({"Q": Q1.float()}, TypeError, "Q must be uint8, got torch.float32"),
    ({"D": None}, TypeError, "D must be a torch.Tensor, got NoneType"),
    ({"d": 25}, ValueError, r"Q must have 4 bytes a token \(its last dim\) for 25 codes of 1 bit, got"),
    ({"D": D1[..., :2]}, ValueError, r"D must have 3 bytes a token .* got \[4, 7, 2\]"),
    ({"d": 0}, ValueError, "d must be at least 1, got 0"),
    ({"d": 24.0}, TypeError, "d must be an int, got float"),
    ({"Q": Q1[None]}, ValueError, r"Q must be \[Nq, Lq, bytes\] or \[Lq, bytes\]"),
    ({"D": OWN1[None]}, ValueError, r"D must be \[Nd, Ld, bytes\]"),
    ({"D": OWN1[:2]}, ValueError, r"D\.shape\[0\] == Q\.shape\[0\]"),
    ({"d_mask": torch.ones(4, 6, dtype=torch.bool)}, ValueError, r"d_mask must be \[4, 7\]"),
]
OF_INT8 = [
    ({"Q": [1]}, TypeError, "Q must be a torch.Tensor, got list"),
    ({"Q": Q8.int()}, TypeError, "Q must be int8, got torch.int32"),
    ({"Q": Q8.to_sparse()}, TypeError, "Q must be a dense"),
    ({"D": D1.to_sparse()}, TypeError, "D must be a dense"),
    ({"Q": Q8[..., :0], "D": D1[..., :0]}, ValueError, "Q must be .* with d of at least 1"),
    ({"Q": Q8[0, 0]}, ValueError, r"Q must be \[Nq, Lq, d\] or"),
    ({"Q": Q8[0], "D": OWN1[:1]}, ValueError, r"needs Q to be 3-D with D\.shape\[0\] == Q\.shape\[0\]"),
    ({"nbits": 3}, ValueError, "nbits must be 1 or 4, got 3"),
    ({"nbits": 4}, ValueError, "D must have 12 bytes a token .* for 24 codes of 4 bits"),
    ({"scale_D": torch.ones(4, 6)}, ValueError, r"scale_D must be 0-dim or have the shape of D"),
]


@pytest.mark.parametrize("bad, error, words", OF_BITS)
def test_bits_that_are_refused(bad, error, words):
    arguments = {"Q": Q1, "D": D1, "d": 24, "q_mask": None, "d_mask": None} | bad
    with pytest.raises(error, match=words):
        maxsim_hamming_reference(**arguments)
    with pytest.raises((error, RuntimeError)):
        OPS.maxsim_hamming(*arguments.values())


@pytest.mark.parametrize("bad, error, words", OF_INT8)
def test_int8_codes_that_are_refused(bad, error, words):
    one = torch.ones(())
    arguments = {"Q": Q8, "D": D1, "scale_Q": one, "scale_D": one, "nbits": 1} | bad
    with pytest.raises(error, match=words):
        maxsim_asymmetric_reference(**arguments)
    *tensors, nbits = arguments.values()
    with pytest.raises((error, RuntimeError)):
        OPS.maxsim_asymmetric(*tensors, None, None, nbits)


# ---- as citizens of PyTorch ----


def test_a_wish_for_gradients_is_an_error(device):
    for codec in (BITS, codecs.Bits(scales=False), INT8, codecs.Fp8()):
        Q = torch.randn(3, 5, 24, device=device, requires_grad=True)
        codes = codec.encode(torch.randn(2, 7, 24))
        with pytest.raises(ValueError, match="Q must not require a gradient"):
            li.maxsim(Q, codes.to(device))
        with torch.no_grad():
            assert not li.maxsim(Q, codes.to(device)).requires_grad


def test_codes_of_4_bits_are_these():
    """From -7 to 7 where the largest is 7; each half of a byte is a code + 8, the even dim in the low one."""
    codes, scale = encoded(FOUR, torch.tensor([[7.0, -3.0, 0.0, -7.0, 6.4, 1.6, -0.4]]))
    assert codes.tolist() == [[15 | 5 << 4, 8 | 1 << 4, 14 | 10 << 4, 8]] and scale.tolist() == [1.0]
