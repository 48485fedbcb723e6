"""MUVERA's fixed dimensional encodings: by definition, in every form of tokens, and as a first pass."""

import itertools
import re
import zlib
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

import late_interaction as li
from late_interaction import Muvera
from late_interaction._search.first_pass import scored_by_muvera
from late_interaction.muvera import _random_bits, encoder
from late_interaction.muvera.encoder import check_parameters
from late_interaction.reference import muvera_reference
from tests.support.cases import mask
from tests.support.packed import pack_sequences
from tests.support.token_forms import FORMS, with_holes

OPS = torch.ops.late_interaction
F64 = torch.float64
LENGTHS = [0, 1, 2, 3, 4, 5, 9, 33]
SHAPES = {  # d, k_sim, repetitions, d_proj, d_final
    "no hyperplanes": (7, 0, 2, None, None),
    "one dim": (1, 2, 3, None, None),
    "plain": (128, 4, 3, None, None),
    "odd": (31, 3, 5, None, None),
    "seven bits": (5, 7, 3, None, None),
    "projected": (64, 5, 7, 16, None),
    "projected to odd": (33, 3, 3, 5, None),
    "projected to one": (12, 1, 2, 1, None),
    "sketch": (16, 3, 4, None, 37),
    "both": (48, 4, 5, 20, 64),
    "many columns": (8, 3, 12, 33, 200),
}


def tokens_of(n, d, dtype=torch.float32, device="cpu"):
    return normalize(torch.randn(n, d), dim=-1).to(device, dtype)


def encode(muvera, x, document, kept=None):
    x = x if kept is None else li.Tokens(x, kept)
    return (muvera.encode_documents if document else muvera.encode_queries)(x)


# ---- by definition ----


@pytest.mark.parametrize("fill_empty", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_encodings_by_definition(shape, fill_empty, device):
    d, *sizes = SHAPES[shape]
    muvera = Muvera(d, *sizes, fill_empty, seed=3)
    documents = [tokens_of(n, d, device=device) for n in LENGTHS]
    for document in (True, False):
        wanted = torch.stack([muvera_reference(muvera, x.cpu(), document=document) for x in documents])
        for isa in ("portable", "avx2", "avx512", ""):
            try:
                OPS.cpu_isa(isa)
                found = encode(muvera, documents, document)
            except RuntimeError as error:
                assert isa in str(error)  # this CPU has no such kernels
                continue
            finally:
                OPS.cpu_isa("")
            assert found.shape == (len(LENGTHS), muvera.dim) and found.dtype == torch.float32
            torch.testing.assert_close(found.cpu().double(), wanted, atol=1e-5, rtol=1e-5)


def grid_plane(muvera):
    """The muvera with hyperplanes that are axes, so that partitions can be read off the tokens."""
    (own,) = muvera._matrices.values()
    planes = torch.zeros_like(own[0])
    for r, k in itertools.product(range(muvera.repetitions), range(muvera.k_sim)):
        planes[k, r * muvera.k_sim + k] = 1
    muvera._matrices = {torch.device("cpu"): (planes, *own[1:])}
    return muvera


def test_partitions_sums_means_and_filled_partitions_by_hand(device):
    muvera = grid_plane(Muvera(3, k_sim=2, repetitions=2))
    x = torch.tensor([[1.0, 1, 8], [1, -1, 2], [2, 0, 3], [1, 0, 4]], device=device)
    # Partitions 3, 1, 1 and 1: 0 is not above 0.
    sums = torch.tensor([[0.0, 0, 0], [4, -1, 9], [0, 0, 0], [1, 1, 8]], device=device)
    assert torch.equal(muvera.encode_queries(x), sums.flatten().repeat(2) / 2)
    # Partition 0 is one bit away from 1, whose first token is 1; 2 is one bit away from 3.
    means = torch.stack((x[1], (x[1] + x[2] + x[3]) * torch.tensor(1 / 3, device=device), x[0], x[0]))
    torch.testing.assert_close(muvera.encode_documents(x), means.flatten().repeat(2), atol=1e-6, rtol=0)
    # Equally near: the lowest token, whatever its partition.
    for order in ([0, 1], [1, 0]):
        a, b = torch.tensor([[1.0, -1, 5], [-1, 1, 6]], device=device)  # partitions 1 and 2
        two = torch.stack((a, b))[order]
        blocks = muvera.encode_documents(two).view(2, 4, 3)
        assert torch.equal(blocks[0, 0], two[0]) and torch.equal(blocks[0, 3], two[0])
        assert torch.equal(blocks[0, 1], a) and torch.equal(blocks[0, 2], b)


def test_one_partition_holds_the_sum_and_the_mean():
    x, y = tokens_of(5, 8), tokens_of(9, 8)
    muvera = Muvera(8, k_sim=0, repetitions=3)
    product = muvera.encode_queries(x) @ muvera.encode_documents(y)
    torch.testing.assert_close(product, (x @ y.t()).mean(1).sum())


@pytest.mark.parametrize("options", [{}, {"d_proj": 24}, {"d_proj": 24, "d_final": 4096}])
def test_products_approximate_maxsim(options):
    """Documents hold a near copy of each query token; the paper's bound is one on normalized Chamfer."""
    torch.manual_seed(5)
    Q = normalize(torch.randn(12, 16, 64), dim=-1)
    D = normalize(torch.randn(12, 40, 64), dim=-1)
    D[:, :16] = normalize(Q + 0.002 * torch.randn(12, 16, 64), dim=-1)
    D = D[:, torch.randperm(40)]
    exact = li.maxsim(Q, D) / 16
    muvera = Muvera(64, k_sim=8, repetitions=30, **options)
    rough = muvera.encode_queries(Q) @ muvera.encode_documents(D).t() / 16
    own, others = exact.diagonal(), ~torch.eye(12, dtype=torch.bool)
    noise = 0.08 if options else 0.03
    assert (rough.diagonal() > 0.8).all() and (rough.diagonal() < own + noise).all()
    assert (rough[others] < exact[others] + noise).all()
    assert torch.equal(rough.argmax(1), torch.arange(12))
    spreads = []
    for repetitions in (2, 32):
        drawn = [Muvera(64, 4, repetitions, seed=seed, **options) for seed in range(6)]
        spreads.append(torch.stack([m.encode_queries(Q) @ m.encode_documents(D).t() for m in drawn]).std(0))
    assert spreads[1].mean() < 0.4 * spreads[0].mean()  # repetitions average their errors


# ---- forms of tokens ----


@pytest.mark.parametrize("document", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F64])
def test_every_form_has_the_same_bits(device, dtype, document):
    for shape in ("odd", "both"):
        d, *sizes = SHAPES[shape]
        muvera = Muvera(d, *sizes, seed=9)
        documents = [tokens_of(n, d, dtype, device) for n in [5, 0, 12, 1, 30]]
        wanted = encode(muvera, documents, document)
        assert torch.equal(encode(muvera, [x.float() for x in documents], document), wanted)
        for x, one in zip(documents, wanted, strict=True):
            own = encode(muvera, x, document)
            assert own.shape == (muvera.dim,) and torch.equal(own, one)
        for form in FORMS.values():
            assert torch.equal(encode(muvera, form(documents), document), wanted)
        packed, holes = li.Tokens.from_list(documents), with_holes(documents)
        columns = li.Tokens.packed(packed.values.t().contiguous().t(), packed.offsets)
        assert torch.equal(encode(muvera, columns, document), wanted)
        assert torch.equal(encode(muvera, holes.values, document, holes.mask.int()), wanted)
        strided = holes.values.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(encode(muvera, strided, document, holes.mask), wanted)
        whole = holes.values[:, :6].nan_to_num()
        assert torch.equal(encode(muvera, whole, document), encode(muvera, list(whole), document))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_are_the_same_on_any_number_of_threads(threads):
    muvera, x = Muvera(32, 4, 10, 8), tokens_of(60 * 30, 32).view(60, 30, 32)
    one_by_one = torch.stack([muvera.encode_documents(document) for document in x])
    torch.set_num_threads(threads)
    assert torch.equal(muvera.encode_documents(x), one_by_one)


def test_sequences_without_tokens(device):
    muvera = Muvera(8, 3, 2)
    assert muvera.encode_queries(torch.empty(0, 5, 8, device=device)).shape == (0, muvera.dim)
    for x, d_mask in (
        (torch.empty(3, 0, 8, device=device), None),
        (tokens_of(15, 8, device=device).view(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool, device=device)),
    ):
        assert torch.equal(encode(muvera, x, True, d_mask), torch.zeros(3, muvera.dim, device=device))
    none = torch.zeros(1, dtype=torch.int32, device=device)
    nothing = li.Tokens.packed(torch.empty(0, 8, device=device), none)
    assert muvera.encode_documents(nothing).shape == (0, muvera.dim)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("document", [True, False])
def test_a_token_that_is_not_finite_is_seen_in_its_own_sequence(device, document, bad):
    x, kept = tokens_of(12, 8, device=device).view(3, 4, 8), torch.ones(3, 4, dtype=torch.bool, device=device)
    muvera = Muvera(8, 3, 2)
    clean = encode(muvera, x, document)
    x[1, 2, 5] = bad
    found = encode(muvera, x, document)
    assert found[1].isnan().all() and torch.equal(found[::2], clean[::2])
    kept[1, 2] = False
    assert encode(muvera, x, document, kept).isfinite().all()


def test_encodings_are_outside_of_autograd(device):
    x = tokens_of(5, 8, device=device).requires_grad_()
    assert not Muvera(8).encode_queries(x).requires_grad


def test_encodings_are_traced_whole():
    muvera, x = Muvera(8, 2, 3, 4, 20), tokens_of(10, 8).view(2, 5, 8).requires_grad_()
    kept = torch.tensor([[True] * 5, [True, False, True, False, False]])

    def both(x, kept):
        return muvera.encode_queries(li.Tokens(x, kept)) + muvera.encode_documents(x)

    traced = torch.compile(both, fullgraph=True, backend="eager")
    assert torch.equal(traced(x, kept), both(x, kept))


# ---- a GPU ----


def operator_arguments(muvera, tokens, d_mask, cu_seqlens, average, fill_empty):
    sizes = muvera.k_sim, muvera.repetitions, muvera.d_proj or 0, muvera.d_final or 0
    matrices = muvera._matrices_on(tokens.device)
    return tokens, d_mask, cu_seqlens, *matrices, *sizes, average, fill_empty, 1.0 if average else 1 / 3


def forms(lengths, d, dtype):
    """Packed tokens with others around them, padded ones with holes, views that no vector can be read of."""
    tokens, cu = pack_sequences([tokens_of(n, d, dtype) for n in lengths])
    yield torch.cat((tokens[:2], tokens, tokens[:3])), None, cu + 2
    yield torch.cat((tokens, tokens), 1)[:, 1 : d + 1], None, cu
    L = max(lengths)
    d_mask = mask((3, L), "cpu", "dead")
    padded = torch.where(d_mask[..., None], tokens_of(3 * L, d, dtype).view(3, L, d), torch.nan)
    yield padded, d_mask, None
    yield padded.transpose(0, 1).contiguous().transpose(0, 1), d_mask.t().contiguous().t(), None
    yield tokens_of(2 * 9, 2 * d, dtype).view(2, 9, 2 * d)[..., ::2], None, None
    bad = tokens_of(4 * 6, d, dtype).view(4, 6, d)
    bad[1, 3, -1], bad[3, 0, 0] = torch.inf, torch.nan
    yield bad, None, None


def assert_same_bits_as_the_cpu(muvera, given):
    for average, fill_empty in ((True, True), (True, False), (False, False)):
        args = operator_arguments(muvera, *given, average, fill_empty)
        on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
        if not args[0].is_contiguous():  # .cuda() keeps the strides of dense tensors alone
            x = args[0]
            extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
            memory = torch.empty(extent + 1, dtype=x.dtype, device="cuda")
            on_gpu[0] = memory[1:].as_strided(x.shape, x.stride()).copy_(x)
        wanted, found = OPS.muvera_encode(*args), OPS.muvera_encode(*on_gpu)
        torch.testing.assert_close(found.cpu(), wanted, equal_nan=True, rtol=0, atol=0)
        assert torch.equal(OPS.muvera_encode(*on_gpu).nan_to_num(), found.nan_to_num())


with_fma = pytest.mark.skipif(OPS.cpu_isa() == "portable", reason="this CPU has no fused multiply-adds")
GPU_SHAPES = SHAPES | {
    "several stages": (301, 6, 2, 40, None),
    "two sums": (130, 9, 1, None, None),
    "paper": (128, 5, 20, 16, None),
    "one bucket": (40, 6, 2, None, 1),
    "most bits": (3, 16, 1, 2, None),
}


@pytest.mark.gpu
@with_fma
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F64])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_a_gpu_has_the_bits_of_the_cpu(shape, dtype):
    d, *sizes = GPU_SHAPES[shape]
    muvera = Muvera(d, *sizes, seed=3)
    for given in forms([0, 1, 2, 33, 5, 0, 70], d, dtype):
        assert_same_bits_as_the_cpu(muvera, given)


@pytest.mark.gpu
@with_fma
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[600, 1, 0, 513, 512], [4000, *[2] * 300, 1500], [3, 20_000]])
def test_a_gpu_has_the_bits_of_the_cpu_of_long_sequences(lengths, dtype):
    """Longer than a list; than shared memory, beside shorter ones and by themselves."""
    for d, *sizes in ((128, 5, 4, 16, None), (97, 7, 2, None, 50)):
        tokens, cu = pack_sequences([tokens_of(n, d, dtype) for n in lengths])
        assert_same_bits_as_the_cpu(Muvera(d, *sizes), (tokens, None, cu))


@pytest.mark.gpu
def test_a_gpu_stays_inside_of_its_tensors():
    """Offsets are clamped, and buckets that are none take part in nothing."""
    x, _, _, *rest = arguments("cuda")
    cu = torch.tensor([-7, 4, 2, 99], dtype=torch.int32, device="cuda")
    wanted = [OPS.muvera_encode(part.unsqueeze(0), None, None, *rest)[0] for part in (x[:4], x[:0], x[2:])]
    assert torch.equal(OPS.muvera_encode(x, None, cu, *rest), torch.stack(wanted))
    hyperplanes, projection, buckets, signs, *numbers = rest
    outside = torch.arange(len(buckets), device="cuda") % 3 == 0
    far = buckets.where(~outside, torch.where(buckets % 2 == 0, -1, 30).int())
    cu = torch.tensor([0, 4, 10], dtype=torch.int32, device="cuda")
    found = OPS.muvera_encode(x, None, cu, hyperplanes, projection, far, signs, *numbers)
    silent = signs.where(~outside, 0)
    assert torch.equal(
        found, OPS.muvera_encode(x, None, cu, hyperplanes, projection, buckets, silent, *numbers)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4, 5, None, None), (5, 20, 16, None), (5, 20, 16, 2048)])
def test_a_gpu_encodes_on_the_current_stream_and_in_a_graph(sizes):
    muvera = Muvera(64, *sizes)
    first, second = tokens_of(2 * 40 * 30, 64, device="cuda").view(2, 40, 30, 64)
    wanted = [muvera.encode_documents(x) for x in (first, second)]
    x, graph = first.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which refuses whatever waits for the device
        found = muvera.encode_documents(x)
    for tokens, encodings in zip((second, first), reversed(wanted), strict=True):
        x.copy_(tokens)
        graph.replay()
        assert torch.equal(found, encodings)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            results.append(muvera.encode_documents(second + 0))
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted[1]) for result in results)


@pytest.mark.gpu
def test_more_than_2_31_elements_of_tokens_and_of_encodings():
    N, L, d = (1 << 18) + 3, 64, 128
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    muvera = Muvera(d, 5, 20, 16)
    D = torch.empty(N, L, d, dtype=torch.bfloat16, device="cuda").normal_()
    assert D.numel() > 1 << 31 and N * muvera.dim > 1 << 31
    encodings = muvera.encode_documents(D)
    for at in (slice(0, 3), slice(N // 2, N // 2 + 5), slice(N - 2, N)):
        assert torch.equal(encodings[at], muvera.encode_documents(D[at].clone()))
    del encodings
    cu = torch.arange(N + 1, dtype=torch.int32, device="cuda") * L
    packed = muvera.encode_documents(li.Tokens.packed(D.view(-1, d), cu))
    assert torch.equal(packed[-2:], muvera.encode_documents(D[-2:].clone()))


@pytest.mark.gpu
def test_blocks_before_a_sketch_take_bounded_memory():
    muvera = Muvera(32, 6, 40, None, 64)  # 320 KiB a document before its sketch
    D = tokens_of(3000 * 4, 32, torch.bfloat16, "cuda").view(3000, 4, 32)
    one_by_one = torch.stack([muvera.encode_documents(x) for x in D[::500]])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    encodings = muvera.encode_documents(D)
    assert torch.cuda.max_memory_allocated() - before < 300 << 20
    assert torch.equal(encodings[::500], one_by_one)


# ---- the random matrices ----


def splitmix(seed, count):
    """The published generator, in Python's integers."""
    state, most = seed, 2**64 - 1
    for _ in range(count):
        state = state + 0x9E3779B97F4A7C15 & most
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & most
        z = (z ^ z >> 27) * 0x94D049BB133111EB & most
        yield z ^ z >> 31


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_words_are_those_of_splitmix64(seed):
    for stream in (0, 3):
        *_, start = splitmix(seed, stream + 1)
        wanted = [x - 2**64 if x >> 63 else x for x in splitmix(start, 50)]
        assert _random_bits.words(seed, stream, 50).tolist() == wanted


def test_the_first_words_of_splitmix64_are_the_published_ones():
    assert list(splitmix(1234567, 2)) == [6457827717110365317, 3203168211198807973]


def test_numbers_are_distributed_as_they_should_be():
    bell = _random_bits.bell(3, 0, 100_000)
    assert abs(bell.mean()) < 0.02 and abs(bell.std() - 1) < 0.02 and abs((bell**4).mean() - 2.9) < 0.15
    assert abs((bell.abs() < 0.6745).float().mean() - 0.5) < 0.01
    counts = torch.bincount(_random_bits.below(3, 2, 100_000, 7).long(), minlength=7)
    assert len(counts) == 7 and (counts - 100_000 / 7).abs().max() < 600
    signs = _random_bits.signs(3, 1, 100_000)
    assert set(signs.tolist()) == {-1.0, 1.0} and abs(signs.mean()) < 0.02


def test_matrices_never_change():
    """Encodings in an index are compared with queries of later releases."""
    state = Muvera(24, 3, 4, 5, 100, seed=42).state_dict()
    sums = {name: zlib.crc32(x.contiguous().numpy().tobytes()) for name, x in state.items()}
    assert sums == CHECKSUMS


CHECKSUMS = {
    "parameters": 1553013860,
    "hyperplanes": 2129653801,
    "projection": 3863011605,
    "buckets": 181714638,
    "signs": 4174014962,
}


def test_state_is_saved_and_loaded(tmp_path):
    x = tokens_of(9, 24)
    for sizes in ((3, 4, 5, 100), (2, 3, None, None)):
        muvera = Muvera(24, *sizes, fill_empty=False, seed=7)
        torch.save(muvera.state_dict(), tmp_path / "muvera.pt")
        loaded = Muvera.from_state_dict(torch.load(tmp_path / "muvera.pt", weights_only=True))
        assert repr(loaded) == repr(muvera) and loaded.dim == muvera.dim
        assert torch.equal(loaded.encode_documents(x), muvera.encode_documents(x))


def test_seeds_differ():
    a, b = (Muvera(8, 3, 4, 5, 100, seed=seed).state_dict() for seed in (0, 1))
    assert all(not torch.equal(a[name], b[name]) for name in a)


# ---- a first pass ----


def test_small_and_empty_tokens_are_normalized_too():
    muvera, D = Muvera(8, 2, 3), torch.randn(6, 3, 8)
    D[2, 1] = 0
    small = D * 2**-10
    wanted = muvera.encode_corpus(D, normalize=True).documents
    assert wanted.isfinite().all()
    torch.testing.assert_close(muvera.encode_corpus(small, normalize=True).documents, wanted)
    ((_, scores),) = scored_by_muvera(muvera, small, None, small, None, True, None)
    torch.testing.assert_close(scores, muvera.encode_queries(normalize(D, dim=-1)) @ wanted.t())
    empty = torch.ones(3, 0, 8)
    assert torch.equal(muvera.encode_corpus(empty, normalize=True).documents, muvera.encode_documents(empty))


def test_documents_are_encoded_in_any_pieces(device, monkeypatch):
    muvera, D = Muvera(40, 3, 4), torch.randn(120, 17, 40, device=device)
    d_mask = mask((120, 17), device, "dead")
    wanted = muvera.encode_documents(li.Tokens(normalize(D, dim=-1), d_mask))
    monkeypatch.setattr(encoder, "_BYTES", 20000)
    encodings = muvera.encode_corpus(li.Tokens(D, d_mask), normalize=True)
    torch.testing.assert_close(encodings.documents, wanted)


def test_the_guides_example_with_faiss_finds_what_an_exact_search_finds():
    pytest.importorskip("faiss", reason="Faiss is not installed: make lancedb runs this")
    page = (Path(__file__).resolve().parents[2] / "docs/guide/search.md").read_text()
    (example,) = re.findall(r"^```python\n(import faiss\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    D = tokens_of(300 * 10, 128).view(300, 10, 128)
    Q = D[:4, :6] + 0.02 * torch.randn(4, 6, 128)
    muvera = Muvera(128, k_sim=3, repetitions=10, d_proj=16)
    names = {"torch": torch, "li": li, "corpus": D, "Q": Q, "muvera": muvera}
    exec(compile(example, "docs/guide/search.md", "exec"), names)
    assert torch.equal(names["best"][:, 0], torch.arange(4)) and names["best"].shape == (4, 10)
    torch.testing.assert_close(names["exact"].amax(1), li.search(Q, D, 1).scores[:, 0])


# ---- the operator, and errors ----


def arguments(device="cpu", average=True):
    muvera = Muvera(12, 2, 3, 5, 30)
    x = tokens_of(10, 12, device=device)
    cu = torch.tensor([0, 4, 4, 10], dtype=torch.int32, device=device)
    matrices = muvera._matrices_on(x.device)
    return x, None, cu, *matrices, 2, 3, 5, 30, average, True, 1.0


BAD_CALLS = {
    "tokens must be": {0: lambda x: x.unsqueeze(0)},
    "bfloat16, float16, float32 or float64": {0: lambda x: x.int()},
    "mask must be None": {1: lambda _: torch.ones(10, dtype=torch.bool)},
    "cu_seqlens must be a contiguous int32": {2: lambda cu: cu.long()},
    "cu_seqlens must not decrease": {2: lambda cu: cu * 2},
    "hyperplanes must be a contiguous float32": {3: lambda x: x[:, :6]},
    "projection must be a contiguous float32": {4: lambda x: x.double()},
    "buckets must be a contiguous int32": {5: lambda x: x[1:]},
    "buckets must lie in": {5: lambda x: x + 25},
    "must come together": {6: lambda _: None},
    "k_sim must lie in": {7: lambda _: 17},
    "repetitions must be at least 1": {8: lambda _: 0},
    "d_proj must be at least 1": {9: lambda _: 0},
    "d_final must be at least 1": {10: lambda _: 0},
}


NOT_READ_ON_A_GPU = {"cu_seqlens must not decrease", "buckets must lie in"}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_calls_that_cannot_be(message, device):
    if device == "cuda" and message in NOT_READ_ON_A_GPU:
        return  # see test_a_gpu_stays_inside_of_its_tensors
    ((at, change),) = BAD_CALLS[message].items()
    args = list(arguments(device))
    args[at] = change(args[at])
    with pytest.raises(RuntimeError, match=message):
        OPS.muvera_encode(*args)


def test_parameters_at_their_limits():
    check_parameters(2**31 - 1, 0, 1, None, 2**31 - 1, True, 2**63 - 1)
    check_parameters(2**14, 16, 1, None, None, True, 0)
    assert Muvera(8).dim == 20 * 32 * 8


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"projection": torch.Tensor.neg}, ValueError, "must hold the projection of its parameters, Muvera"),
        ({"hyperplanes": None}, ValueError, "must hold the hyperplanes"),
        ({"parameters": lambda x: x[:3]}, ValueError, "must hold 7 parameters"),
        ({"parameters": lambda x: x.repeat(2)}, ValueError, "must hold 7 parameters"),
        ({"parameters": [8]}, TypeError, "parameters of the state must be a torch.Tensor, got list"),
        ({"hyperplanes": 5}, TypeError, "hyperplanes of the state must be a torch.Tensor, got int"),
        ({"hyperplanes": torch.Tensor.to_sparse}, ValueError, "hyperplanes of the state must be dense"),
        (
            {"hyperplanes": lambda x: x.to("meta")}, ValueError,
            "hyperplanes of the state must be dense and hold",
        ),
    ],
)  # fmt: skip
def test_states_that_are_refused(change, error, message):
    state = Muvera(8, k_sim=2, repetitions=2, d_proj=5).state_dict()
    ((name, new),) = change.items()
    state[name] = new(state[name]) if callable(new) else new
    if new is None:
        del state[name]
    with pytest.raises(error, match=message):
        Muvera.from_state_dict(state)
