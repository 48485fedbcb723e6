"""Results are the same whatever torch.set_default_dtype says."""

import pytest
import torch

import late_interaction as li
from late_interaction import Corpus, Muvera, codecs, search


def of_muvera(Q, D):
    muvera = Muvera(8, k_sim=3, repetitions=4, d_proj=5, d_final=30)
    encodings = muvera.encode_corpus(D)
    return encodings.documents, muvera.encode_queries(Q), *search(Q, D, 3, coarse=encodings, candidates=5)


def of_codes(Q, D):
    codes = codecs.Bits(4).encode(D)
    found = *search(Q, D, 3, coarse=codes, candidates=5), *search(Q, codes, 3)
    return codes.values, codes.scales, *found


def of_bits(Q, D):
    codec = codecs.Bits(1)
    return (li.maxsim(codec.encode(Q), codec.encode(D)),)


def of_corpus(Q, D):
    corpus = Corpus.from_packed(D.flatten(0, 1), torch.arange(0, 121, 6))
    return *corpus.search(Q, 7), *corpus.search(Q[:0], 7)


def of_folder(dtype, codec=None):
    def results(Q, D, folder):
        with Corpus.create(folder, d=8, dtype=dtype, codec=codec and codec(D)) as builder:
            builder.add(list(D.cpu()))
        return Corpus.open(folder).search(Q.cpu(), 7)

    return results


def trained(D):
    return codecs.Residual.train(D.flatten(0, 1).cpu(), nbits=2, n_centroids=8)


def of_codec(Q, D):
    codec = codecs.Residual.train(D.flatten(0, 1), nbits=2, n_centroids=8)
    return codec.centroids, codec.bucket_weights, codec.decode(codec.encode(D)).values


def of_mining(Q, D):
    found = li.hard_negatives(Q, D, [[0], [], [2, 3]], num_negatives=4, relative_margin=0.001)
    none = li.hard_negatives([], list(D), [])
    return found.indices, found.scores, *found.positive_scores, none.scores


RESULTS = {
    "muvera": of_muvera,
    "codes": of_codes,
    "bits": of_bits,
    "corpus": of_corpus,
    "float16 folder": of_folder(torch.float16),
    "int8 folder": of_folder(None, lambda _: codecs.Int8()),
    "residual folder": of_folder(None, trained),
    "codec": of_codec,
    "mining": of_mining,
}


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RESULTS)
def test_the_default_dtype_changes_no_result(name, default, device, tmp_path):
    Q, D = torch.randn(3, 5, 8, device=device), torch.randn(20, 6, 8, device=device)
    folders = [(tmp_path / part,) if "folder" in name else () for part in ("wanted", "found")]
    wanted = RESULTS[name](Q, D, *folders[0])
    torch.set_default_dtype(default)
    try:
        found = RESULTS[name](Q, D, *folders[1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]
    assert all(map(torch.equal, found, wanted))
