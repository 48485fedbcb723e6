"""Pooling of tokens: clusters as scipy's, results as PyLate's and Sentence Transformers'."""

import importlib
import itertools
import math

import pytest
import torch
from torch.nn.functional import normalize

import late_interaction as li
from late_interaction import pool_tokens
from tests.support import side_by_side
from tests.support.packed import pack_sequences
from tests.support.token_forms import FORMS, with_holes

OPS = torch.ops.late_interaction
F64 = torch.float64
LENGTHS = [0, 1, 2, 3, 5, 7, 13, 31, 64, 97, 131, 257]
FACTORS = [1, 1.01, 1.5, 2, 3, 7, 5000]
KINDS = ["random", "repeated", "zeros", "grid", "equal"]


def document(n, kind, d=16, dtype=torch.float32):
    x = normalize(torch.randn(n, d, dtype=dtype), dim=-1)
    if kind == "repeated" and n:
        return x[torch.randint(0, math.ceil(n / 3), (n,))]
    if kind == "zeros":
        return x * (torch.rand(n, 1) > 0.3)
    if kind == "grid":  # products are exact, and most distances have many equals
        return torch.randint(-1, 2, (n, d), dtype=dtype) / 4
    return x[:1].repeat(n, 1) if kind == "equal" else x


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def scipy_labels(similarities, clusters):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    distance = pytest.importorskip("scipy.spatial.distance")
    distances = (1 - similarities).clamp(0, 2).numpy()
    tree = hierarchy.linkage(distance.squareform(distances, checks=False), method="ward")
    return torch.from_numpy(hierarchy.fcluster(tree, t=clusters, criterion="maxclust") - 1)


def packages_own(x, factor, protected, own_normalize):
    name = "sentence_transformers.multi_vector_encoder.modules.token_pooling"
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    return importlib.import_module(name)._hierarchical_pool_one(x, factor, protected, own_normalize)


# ---- Ward's clusters ----


@pytest.fixture(params=["portable", ""])
def isa(request):
    yield OPS.cpu_isa(request.param)
    OPS.cpu_isa("")


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", KINDS)
def test_clusters_and_their_numbers_are_scipys(isa, kind, dtype):
    documents = [document(n, kind, dtype=dtype) for n in LENGTHS if n > 1]
    for divisor in (1.1, 2, 3.7, 1e9):
        clusters = [max(int(len(x) // divisor), 1) for x in documents]
        tokens, cu = pack_sequences(documents)
        labels, found = OPS.ward_labels(tokens, cu, torch.tensor(clusters, dtype=torch.int32))
        parts = labels.split([len(x) for x in documents])
        for x, count, own, number in zip(documents, clusters, parts, found.tolist(), strict=True):
            wanted = torch.arange(len(x)) if count >= len(x) else scipy_labels(x @ x.t(), count)
            assert torch.equal(own.long(), wanted.long())
            assert number == len(own.unique()) <= count


def test_any_distances_are_clustered_as_scipy_does(isa):
    """Matrices that are no Gram matrices, of few values: chains, ties and cuts that tokens seldom show."""
    for seed, n in enumerate([2, 3, 4, 6, 9, 20, 50, 66, 150, 200]):
        torch.manual_seed(seed)
        for values in (2, 5, 1000):
            similarities = torch.randint(0, values, (n, n), dtype=F64) / values
            similarities = similarities.triu(1) + similarities.triu(1).t()
            for clusters in {1, 2, n // 3 + 1, n - 1}:
                labels, found = torch.empty(n, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
                wanted = torch.tensor([clusters], dtype=torch.int32)
                below = torch.ones(n, n, dtype=torch.bool).tril()  # nobody reads it
                given = similarities.masked_fill(below, torch.nan)
                OPS.ward_cut_(given.flatten(), offsets([n]), wanted, n, labels, found)
                assert torch.equal(labels.long(), scipy_labels(similarities, clusters).long())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_gpu_cuts_as_the_cpu_does(dtype):
    """The same similarities: few values and many, more documents than blocks, and one that is NaN."""
    lengths = [1, 2, 3, 31, 32, 33, 65, 150, 400, 0, 1030] + [20] * 3000
    for values in (2, 5, 10**6):
        matrices = [torch.randint(0, values, (n * n,)).to(dtype) / values * 2.5 - 0.7 for n in lengths]
        clusters = torch.tensor([max(n // 2, 1) for n in lengths], dtype=torch.int32)
        args = torch.cat(matrices), offsets(lengths), clusters, max(lengths)
        out = torch.empty(sum(lengths), dtype=torch.int32), torch.empty(len(lengths), dtype=torch.int32)
        OPS.ward_cut_(*args, *out)
        there = [x.cuda() for x in out]
        OPS.ward_cut_(*(x if isinstance(x, int) else x.cuda() for x in args), *there)
        for mine, its in zip(out, there, strict=True):
            assert torch.equal(mine, its.cpu())
    nan = torch.full((9,), torch.nan, dtype=dtype)
    tokens = torch.tensor([[3e38], [-3e38], [1.0]], dtype=torch.float32)
    OPS.ward_cut_(nan.cuda(), offsets([3]).cuda(), clusters[1:2].cuda(), 3, there[0][:3], there[1][:1])
    assert there[1][0] == -1
    with pytest.raises(RuntimeError, match="must not be NaN"):
        OPS.ward_labels((tokens * torch.nan).cuda(), offsets([3]).cuda(), clusters[1:2].cuda())


@pytest.mark.gpu
def test_a_gpu_pools_exact_products_as_the_cpu_does():
    for lengths in ([130] * 5, [130, 7, 1, 0, 257, 64], [7300]):  # the last does not fit into shared memory
        documents = [document(n, "grid") for n in lengths]
        for x, own in zip(documents, pool_tokens(documents, 3), strict=True):
            assert torch.equal(pool_tokens(x.cuda(), 3).cpu(), own)
        pooled = pool_tokens([x.cuda() for x in documents], 3)
        for a, b in zip(pooled, pool_tokens(documents, 3), strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_clusters_are_the_same_on_any_number_of_threads(threads):
    documents = [document(n, "grid") for n in [200, 3, 150, 90, 1, 170]]
    tokens, cu = pack_sequences(documents)
    wanted = torch.tensor([50, 1, 60, 89, 1, 2], dtype=torch.int32)
    one_by_one = [
        OPS.ward_labels(x, offsets([len(x)]), w.view(1))[0] for x, w in zip(documents, wanted, strict=True)
    ]
    torch.set_num_threads(threads)
    labels, _ = OPS.ward_labels(tokens, cu, wanted)
    assert torch.equal(labels, torch.cat(one_by_one))


@pytest.mark.parametrize("threads", [1, 2])
def test_groups_of_documents_are_clustered_as_all_at_once(threads, monkeypatch):
    from late_interaction.ops import pooling

    documents = [document(n, "grid") for n in [40, 3, 50, 9, 1, 30, 0, 2]]
    results = [pool_tokens(documents, 3, method=method) for method in ("ward", "kmeans")]
    monkeypatch.setattr(pooling, "_WARD_BYTES_A_THREAD", 4000 // threads)
    monkeypatch.setattr(pooling, "_KMEANS_BYTES_OF_A_CPU", 4000)
    torch.set_num_threads(threads)
    for method, whole in zip(("ward", "kmeans"), results, strict=True):
        for a, b in zip(pool_tokens(documents, 3, method=method), whole, strict=True):
            torch.testing.assert_close(a, b)


# ---- other packages' results ----


@pytest.mark.parametrize("protected", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_sentence_transformers(kind, protected):
    for n, factor, own_normalize in itertools.product(LENGTHS, FACTORS, (False, True)):
        x = document(n, kind)
        pooled = pool_tokens(x, factor, protected_tokens=protected, normalize=own_normalize)
        assert torch.equal(pooled, packages_own(x, factor, protected, own_normalize))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_by_rounding_alone(dtype):
    for n, factor in itertools.product(LENGTHS, FACTORS):
        x = document(n, "random").to(dtype)
        pooled, own = pool_tokens(x, factor, normalize=True), packages_own(x, factor, 1, True)
        assert pooled.dtype == dtype
        torch.testing.assert_close(pooled, own, atol=4 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("version", ["1.5.0", "1.6.0"])
def test_results_are_those_of_pylate(version):
    documents = [document(n, "random", dtype=t) for n in LENGTHS for t in (torch.float32, F64)]
    with side_by_side.release("pylate", "pylate", version, [side_by_side.anything("datasets")]):
        pool = importlib.import_module("pylate.models.colbert").ColBERT.pool_embeddings_hierarchical
        for factor, protected in itertools.product((2, 3, 50), (0, 1, 2)):
            for x, wanted in zip(documents, pool(None, documents, factor, protected), strict=True):
                assert torch.equal(pool_tokens(x, factor, protected_tokens=protected), wanted)


# ---- k-means ----


def lloyd(x, clusters, iterations):
    """Labels in plain Python, in float64."""
    x = x.double()
    centers = [x[i * len(x) // clusters] for i in range(clusters)]
    labels = None
    for _ in range(iterations):
        distances = torch.stack([(x - c).square().sum(-1) for c in centers])
        labels = distances.argmin(0)
        centers = [x[labels == k].mean(0) if (labels == k).any() else c for k, c in enumerate(centers)]
    return labels.unique(return_inverse=True)[1]


@pytest.mark.parametrize("iterations", [1, 2, 10])
def test_kmeans_by_definition(device, iterations):
    documents = [document(n, "random", dtype=F64) for n in [2, 3, 7, 31, 64, 97]]
    documents.append(torch.eye(16, dtype=F64)[torch.arange(40) % 7])  # half of the centers are equal
    # A cluster is left with one token, which is not the one that its center started from.
    documents.append(torch.tensor([8.0, 18, 7, 14, 18, 13], dtype=F64).unsqueeze(1) * torch.eye(16)[:1])
    clusters = [1, 2, 3, 10, 63, 20, 13, 3]
    tokens, cu = pack_sequences([x.to(device) for x in documents])
    wanted = torch.tensor(clusters, dtype=torch.int32, device=device)
    labels, found = OPS.kmeans_labels(tokens, cu, wanted, iterations)
    parts = labels.cpu().split([len(x) for x in documents])
    for x, count, own, number in zip(documents, clusters, parts, found.tolist(), strict=True):
        assert torch.equal(own.long(), lloyd(x, count, iterations))
        assert number == int(own.max()) + 1


@pytest.mark.parametrize(("dtype", "step"), [
    (torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 2**-10), (F64, 2**-20),
])  # fmt: skip
def test_kmeans_tells_tokens_apart_that_are_close(device, dtype, step):
    """Half precision is clustered in float32, and float64 in float64."""
    x = torch.tensor([1, 1, 1 + step, 1 + step, 1], dtype=F64, device=device).to(dtype).unsqueeze(1)
    assert in_two(x) == [0, 0, 1, 1, 0]


def in_two(x):
    """The labels of a document that k-means cuts into two clusters."""
    wanted = torch.tensor([2], dtype=torch.int32, device=x.device)
    labels, found = OPS.kmeans_labels(x, offsets([len(x)]).to(x.device), wanted)
    assert found.tolist() == [2]
    return labels.tolist()


def test_kmeans_goes_on_where_all_tokens_are_first_in_one_cluster(device):
    """Two centers start from equal tokens. The first moves to the mean, and leaves tokens to the second."""
    x = torch.tensor([0, 1, 0, 1], dtype=F64, device=device).unsqueeze(1)
    assert in_two(x) == lloyd(x, 2, 10).tolist() == [1, 0, 1, 0]


def test_kmeans_pools_like_tokens_and_drops_empty_clusters(device):
    a, b = torch.eye(4, device=device)[:2]
    x = torch.stack([a, a, b, a, b, b, a])
    for _ in range(2):
        pooled = pool_tokens(x, 2, method="kmeans", protected_tokens=0)
        assert torch.equal(pooled, torch.stack([a, b]))  # of three centers two are equal


# ---- the forms of documents ----


@pytest.mark.parametrize("method", ["ward", "kmeans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F64])
def test_every_form_gives_the_same_documents(device, dtype, method):
    options = {"pool_factor": 2, "method": method}
    documents = [document(n, "grid").to(device, dtype) for n in [5, 0, 12, 1, 30]]
    pooled = pool_tokens(documents, **options)
    assert [len(x) for x in pooled][1::2] == [0, 1] and all(x.dtype == dtype for x in pooled)
    for x, own in zip(documents, pooled, strict=True):
        assert torch.equal(pool_tokens(x, **options), own)
    for name in FORMS.keys() - {"list"}:
        result = pool_tokens(FORMS[name](documents), **options)
        assert torch.equal(result.pack().values, torch.cat(pooled))
        assert result.lengths.tolist() == [len(x) for x in pooled]
        assert result.max_length == result.lengths.max()
        assert result.mask is None or not result.values[~result.mask].any()
    whole = with_holes(documents).values.nan_to_num()
    assert torch.equal(pool_tokens(whole, **options)[2], pool_tokens(whole[2], **options))


def test_what_comes_out_is_scored(device):
    documents = [document(n, "random").to(device) for n in (9, 4, 20)]
    Q = normalize(torch.randn(2, 5, 16, device=device), dim=-1)
    pooled = pool_tokens(documents, 3, normalize=True)
    wanted = torch.stack([(Q @ x.t()).amax(-1).sum(-1) for x in pooled], 1)
    for form in (li.Tokens.from_list(documents), li.Tokens.from_list(documents).to_padded()):
        D = pool_tokens(form, 3, normalize=True)
        torch.testing.assert_close(li.maxsim(Q, D), wanted)
        _, found = li.search(Q, D, 3)
        assert torch.equal(found, wanted.argsort(1, descending=True))


@pytest.mark.parametrize("method", ["ward", "kmeans"])
def test_gradients_go_through_the_means(device, method):
    x = document(20, "random", dtype=F64).to(device).requires_grad_()
    pooled = pool_tokens(x, 3, method=method)
    weights = torch.randn_like(pooled)
    (grad,) = torch.autograd.grad((pooled * weights).sum(), x)
    again = pool_tokens(x, 3, method=method)
    columns = [torch.autograd.grad(row[0], x, retain_graph=True)[0][:, 0] for row in again]
    one_hot = torch.stack(columns)
    torch.testing.assert_close(one_hot.sum(1), torch.ones(len(pooled), dtype=F64, device=device))
    torch.testing.assert_close(one_hot @ x, pooled)
    torch.testing.assert_close(grad, one_hot.t() @ weights)


def test_empty_batches(device):
    assert pool_tokens(torch.empty(0, 8, device=device)).shape == (0, 8)
    for shape in ((0, 5, 8), (3, 0, 8)):
        pooled = pool_tokens(torch.empty(shape, device=device))
        assert pooled.values.shape == (shape[0], 0, 8) and pooled.mask.shape == (shape[0], 0)
    nothing = li.Tokens.packed(torch.empty(0, 8, device=device), offsets([]).to(device))
    assert len(pool_tokens(nothing)) == 0


# ---- operators ----


@pytest.mark.parametrize("op", ["ward_labels", "kmeans_labels"])
def test_opcheck(device, op):
    args = document(12, "random").to(device), offsets([5, 0, 7]).to(device)
    args = *args, torch.tensor([2, 1, 3], dtype=torch.int32, device=device)
    torch.library.opcheck(getattr(OPS, op).default, args)
    with pytest.raises(RuntimeError, match="has no gradients"):
        getattr(OPS, op)(args[0].requires_grad_(), *args[1:])


def cut_arguments(n=6, clusters=2):
    x = document(n, "random")
    empty = torch.empty(n, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    return (x @ x.t()).flatten(), offsets([n]), torch.tensor([clusters], dtype=torch.int32), n, *empty


BAD_CUTS = {
    "similarities must be float32": lambda a: (a[0].half(), *a[1:]),
    "the squares": lambda a: (a[0][:-1], *a[1:]),
    "clusters must be at least 1": lambda a: (*a[:2], a[2] * 0, *a[3:]),
    "cu_seqlens must be a contiguous int32": lambda a: (a[0], a[1].long(), *a[2:]),
    "longest must be at least 6": lambda a: (*a[:3], 5, *a[4:]),
    "longest must lie in": lambda a: (*a[:3], -1, *a[4:]),
    "must not decrease": lambda a: (a[0], a[1] * 2, *a[2:]),
    "found must be": lambda a: (*a[:5], a[5].repeat(2)),
    "must not be NaN": lambda a: (a[0] * torch.nan, *a[1:]),
}


@pytest.mark.parametrize("message", BAD_CUTS)
def test_a_cut_that_cannot_be(message):
    with pytest.raises(RuntimeError, match=message):
        OPS.ward_cut_(*BAD_CUTS[message](cut_arguments()))


BAD_LABELS = [
    ("tokens must be floating point", lambda x, cu, k: (x.int(), cu, k)),
    ("tokens must be floating point .* of rank 3", lambda x, cu, k: (x.unsqueeze(0), cu, k)),
    ("tokens must be floating point .* of rank 1", lambda x, cu, k: (x[:, 0], cu, k)),
    ("must be int32", lambda x, cu, k: (x, cu.long(), k)),
    ("must be int32, one-dimensional$", lambda x, cu, k: (x, cu, k[0])),
    ("must be int32, one-dimensional", lambda x, cu, k: (x, cu, k.view(1, 1))),
    (r"cu_seqlens must be \[3\], got \[2\]", lambda x, cu, k: (x, cu, k.repeat(2))),
    (r"cu_seqlens must be \[2\], got \[3\]", lambda x, cu, k: (x, offsets([3, 3]), k)),
    ("clusters must be at least 1", lambda x, cu, k: (x, cu, k * 0)),
    *[
        ("must rise from 0 to 6", lambda x, _, k, own=own: (x, cu_seqlens(own), k.repeat(len(own) - 1)))
        for own in ([0, 5], [0, 7], [1, 6], [-1, 6], [0, 4, 2, 6])
    ],
]


def cu_seqlens(own):
    return torch.tensor(own, dtype=torch.int32)


@pytest.mark.parametrize("op", ["ward_labels", "kmeans_labels"])
@pytest.mark.parametrize(("message", "change"), BAD_LABELS)
def test_labels_that_cannot_be(message, change, op):
    args = document(6, "random"), offsets([6]), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        getattr(OPS, op)(*change(*args))


def test_iterations_of_kmeans():
    """One at least, and ten if none are named: the labels of this document still change in the eleventh."""
    x = torch.rand(200, 1, generator=torch.Generator().manual_seed(1)).sort(0, descending=True).values
    args = torch.cat((x, x.square()), 1), offsets([200]), torch.tensor([3], dtype=torch.int32)
    for iterations in (0, -1):
        with pytest.raises(RuntimeError, match=f"iterations must be at least 1, got {iterations}"):
            OPS.kmeans_labels(*args, iterations)
    assert OPS.kmeans_labels(*args, 1)[1].tolist() == [3]
    labels = OPS.kmeans_labels(*args)[0]
    assert torch.equal(labels, OPS.kmeans_labels(*args, 10)[0])
    for other in (9, 11):
        assert not torch.equal(labels, OPS.kmeans_labels(*args, other)[0])


@pytest.mark.parametrize("op", ["ward_labels", "kmeans_labels"])
def test_a_document_without_tokens_may_have_no_clusters(op):
    wanted = torch.tensor([0, 2, 0], dtype=torch.int32)
    labels, found = getattr(OPS, op)(document(6, "random"), offsets([0, 6, 0]), wanted)
    assert found.tolist() == [0, 2, 0] and labels.unique().tolist() == [0, 1]


def test_similarities_beyond_any_number_are_clamped():
    x = torch.tensor([[3e38, 3e38], [3e38, 3e38], [-3e38, -3e38], [1.0, 0.0]])
    labels, found = OPS.ward_labels(x, offsets([4]), torch.tensor([2], dtype=torch.int32))
    assert labels[0] == labels[1] != labels[2] and found.tolist() == [2]
