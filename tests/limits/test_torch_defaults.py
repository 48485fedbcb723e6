"""Results are the same, and lie where the inputs do, whatever PyTorch's default dtype and device are.

"meta" stands for another device: a tensor that is made without a device has no values there, so that what it
meets fails or has none either.
"""

import contextlib

import pytest
import torch
from torch.utils import _pytree as pytree

import late_interaction as li
from late_interaction import Corpus, Muvera, codecs, losses, search
from tests.support import public_calls


def of_muvera(Q, D, folder):
    muvera = Muvera(8, k_sim=3, repetitions=4, d_proj=5, d_final=30)
    encodings = muvera.encode_corpus(D)
    return encodings.documents, muvera.encode_queries(Q), *search(Q, D, 3, coarse=encodings, candidates=5)


def of_codes(Q, D, folder):
    codes = codecs.Bits(4).encode(D)
    found = *search(Q, D, 3, coarse=codes, candidates=5), *search(Q, codes, 3)
    return codes.values, codes.scales, *found


def of_bits(Q, D, folder):
    codec = codecs.Bits(1)
    return li.maxsim(codec.encode(Q), codec.encode(D))


def of_corpus(Q, D, folder):
    corpus = Corpus.from_packed(D.flatten(0, 1), torch.arange(0, 121, 6, device="cpu"))
    return *corpus.search(Q, 7), *corpus.search(Q[:0], 7)


def of_folder(codec=lambda D: None, **options):
    def results(Q, D, folder):
        with Corpus.create(folder, d=8, codec=codec(D), **options) as builder:
            builder.add(list(D.cpu()), ids=[f"d{i}" for i in range(20)])
        return tuple(Corpus.open(folder).search(Q.cpu(), 7))

    return results


def trained(D):
    return codecs.Residual.train(D.flatten(0, 1).cpu(), nbits=2, n_centroids=8)


def of_codec(Q, D, folder):
    codec = codecs.Residual.train(D.flatten(0, 1), nbits=2, n_centroids=8)
    return codec.centroids, codec.bucket_weights, codec.decode(codec.encode(D)).values


def of_mining(Q, D, folder):
    found = li.hard_negatives(Q, D, [[0], [], [2, 3]], num_negatives=4, relative_margin=0.001)
    none = li.hard_negatives([], list(D), [])
    return found.indices, found.scores, *found.positive_scores, none.scores


RESULTS = {
    "muvera": of_muvera,
    "codes": of_codes,
    "bits": of_bits,
    "corpus": of_corpus,
    "folder": of_folder(),
    "float16 folder": of_folder(dtype=torch.float16),
    "int8 folder": of_folder(lambda _: codecs.Int8()),
    "residual folder": of_folder(trained),
    "codec": of_codec,
    "mining": of_mining,
}


def public(name):
    return lambda Q, D, folder: public_calls.with_gradients(*public_calls.CALLS[name])


def loss(cut=lambda x: x, **options):
    def results(Q, D, folder):
        leaves = [cut(x).clone().requires_grad_() for x in (Q, D)]
        value = losses.contrastive(*leaves, temperature=0.3, **options)
        return value, *torch.autograd.grad(value, leaves)

    return results


def pooled(**options):
    return lambda Q, D, folder: li.pool_tokens(li.Tokens(D, D[..., 0] < 0.5), 2, **options)


# On the CPU alone, where sums are always in one order.
MORE = {name: public(name) for name in public_calls.CALLS} | {
    "mean": lambda Q, D, folder: li.maxsim(Q, D, None, D[..., 0] < 0.5, mean=True),
    "ward": pooled(),
    "k-means": pooled(method="kmeans"),
    "explain": lambda Q, D, folder: [vars(one) for row in li.explain(Q, D) for one in row],
    "loss": loss(),
    "loss, symmetric": loss(lambda x: x[:3], symmetric=True),
    "loss, tail": loss(tail=2**-10, kept_bytes=0),
    "loss, blocks": loss(kept_bytes=0),
    "loss, one token": loss(lambda x: x[:, :1]),
}
DTYPES = [torch.float64, torch.bfloat16]


@contextlib.contextmanager
def torch_default(value):
    if value == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(value)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("name", "default", "device"),
    [
        *((name, default, "cpu") for name in RESULTS | MORE for default in (*DTYPES, "meta")),
        *(pytest.param(name, x, "cuda", marks=pytest.mark.gpu) for name in RESULTS for x in DTYPES),
    ],
)
def test_no_default_changes_a_result(name, default, device, tmp_path):
    Q, D = torch.randn(3, 5, 8, device=device), torch.randn(20, 6, 8, device=device)
    results = (RESULTS | MORE)[name]
    wanted = results(Q, D, tmp_path / "wanted")
    with torch_default(default):
        found = results(Q, D, tmp_path / "found")
    found, wanted = (
        [x for x in pytree.tree_leaves(y) if isinstance(x, torch.Tensor)] for y in (found, wanted)
    )
    assert wanted
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
