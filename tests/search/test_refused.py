"""Arguments that searches, mining, encoders and what looks at their results refuse: each by its name."""

import math
import re

import numpy as np
import pytest
import torch
from torch import ones, tensor

import late_interaction as li
from late_interaction import Corpus, Muvera, codecs
from late_interaction.muvera import Encodings
from tests.search.test_mining import DATASET, Letters
from tests.support.coded import BITS, FOUR, INT8
from tests.support.corpora import in_memory

META, NAN = ones(2, 16, device="meta"), math.nan
DOCUMENTS = [torch.randn(n, 16) for n in (3, 0, 7, 40)]
CORPUS, NAMED = in_memory(DOCUMENTS), in_memory(DOCUMENTS, ids=list("abcd"))
SMALL = Corpus.from_packed(torch.eye(4), tensor([0, 1, 4]))
SIGNS = codecs.Bits(1, scales=False)
X, INF_COLUMN = ones(6, 4), ones(6, 4) / tensor([0.0, 1, 1, 1])
SOME_NAN = ones(5, 4).index_fill(0, tensor([1, 3]), NAN)
TEXTS = {"dataset": DATASET, "model": Letters()}
OF_ANSWERS = {"anchor_column_name": "answer", "positive_column_name": "answer"}
RESIDUALS = codecs.Residual.train(torch.randn(30, 16), 7).encode(DOCUMENTS)
ROWS = tensor([0, 4])
TWO = li.explain(torch.eye(2), torch.eye(2))
MUVERA, THREE = Muvera(8, k_sim=2, repetitions=2), ones(3, 3, 8)
OF_OTHERS = r"coarse must be the codes of D \[30, 5, 16\], .* "


def array(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def exact(scores=None, indices=None):
    """What two queries found of three documents, or something else."""
    indices = torch.arange(3).expand(2, 3) if indices is None else indices
    return {"exact": li.SearchResult(ones(2, 3) if scores is None else scores, indices)}


def chosen(*rows):
    return {"documents": tensor(rows)}


def plot(**options):
    pytest.importorskip("matplotlib")
    return li.plot_alignment(li.explain(ones(6, 8), ones(15, 8)), **options)


# By its arguments that are taken, a function and what is refused instead of some of them: the error, and how
# its message begins.
REFUSED = [
    (li.search, {"Q": ones(5, 6, 16), "D": ones(37, 11, 16), "k": 3}, [
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"subset": ones(36).bool()}, ValueError, r"subset must be \[37\], a bool a document"),
        ({"subset": [0, 37]}, ValueError, r"subset must lie in \[0, 37\), got 0 to 37"),
        ({"subset": [-1]}, ValueError, r"subset must lie in \[0, 37\), got -1 to -1"),
        ({"subset": ["a"]}, ValueError, "subset must hold indices of documents without ids"),
        ({"subset": [1.0]}, TypeError, "subset must be a list of indices, got float"),
        ({"subset": [True]}, TypeError, "subset must be a list of indices, got True"),
        ({"subset": "a"}, TypeError, "subset must be a tensor, or a list of indices or ids, got 'a'"),
        ({"subset": ones(37)}, TypeError, "subset must be "),
        ({"subset": ones(3, 2).long()}, ValueError, r"subset must be \[n\]"),
        ({"candidates": 20}, ValueError, "candidates must be None without coarse, got 20"),
        ({"coarse": "2bit"}, TypeError, "coarse must be Codes of D or a codec, .* or a Muvera, got '2bit'"),
        ({"coarse": codecs.Bits}, TypeError, "coarse must be Codes of D or a codec, .* got <class"),
    ]),
    (li.search, {"Q": ones(2, 5, 16), "D": ones(30, 5, 16), "k": 3, "coarse": BITS}, [
        ({"candidates": 2}, ValueError, "candidates must be at least k, 3, got 2"),
        ({"candidates": 9.0}, TypeError, "candidates must be an int, got float"),
    ]),
    (li.search, {"Q": ones(5, 6, 16)}, [
        ({"D": other}, TypeError, r"D must be a torch\.Tensor, Tokens, a list of tensors, ")
        for other in (None, 3, "folder", {"a": ones(3, 16)}, array(3, 4, 16))
    ]),
    (li.search, {"Q": ones(5, 6, 16), "D": NAMED}, [
        ({"d_mask": ones(4, 40) > 0}, ValueError, "d_mask must be None for a Corpus, got"),
        ({"subset": ["b", "37", "x"]}, ValueError, r"subset must hold ids of documents, got \['37', 'x'\]"),
    ]),
    *[(li.search, {"Q": ones(5, 6, 16), "D": form(ones(37, 11, 16))}, [
        ({"d_mask": ones(37, 11) > 0}, ValueError, "d_mask must be None where D is Tokens or a list"),
        ({"Q": [ones(6, 16)], "q_mask": ones(1, 6) > 0}, ValueError,
         "q_mask must be None where Q is Tokens or a list"),
        ({"Q": ones(5, 6, 16).double()}, TypeError, "Q and D must share a dtype, got"),
        ({"Q": ones(5, 6, 8)}, ValueError, "(.*share an embedding dim d|Q must have the d of the corpus)"),
    ]) for form in (list, li.Tokens)],
    (li.search, {"Q": ones(2, 5, 16), "D": ones(30, 5, 16), "k": 3}, [
        *[({"coarse": FOUR.encode(ones(shape))}, ValueError, OF_OTHERS + re.escape(str(list(shape))))
          for shape in ((29, 5, 16), (30, 4, 16), (30, 5, 8), (5, 6, 5, 16))],
        ({"coarse": FOUR.encode(list(ones(29, 5, 16)))}, ValueError, OF_OTHERS + r"\[29, 16\]"),
        ({"coarse": FOUR.encode(ones(30, 5, 16)).to("meta")}, ValueError,
         "coarse must be on the device of D, cpu, got meta"),
        ({"Q": ones(2, 5, 16).char(), "D": ones(30, 5, 16).char(), "coarse": BITS}, TypeError,
         r"Q must be bfloat16, .* got torch.int8"),
    ]),
    # Before the first document is scored.
    *[(function, good, [
        ({"largest": "no"}, TypeError, "largest must be True or False, got 'no'"),
        ({"largest": None}, TypeError, "largest must be True or False"),
        ({"normalize": 1}, TypeError, "normalize must be True or False, got 1"),
        ({"precision": "most"}, ValueError, "precision must be one of"),
    ]) for function, good in (
        (li.TopK, {"Q": ones(2, 3, 8)}), (li.search, {"Q": ones(2, 3, 8), "D": ones(0, 5, 8), "k": 4}),
    )],
    (li.TopK, {"Q": ones(2, 3, 8)}, [
        ({"first": -1}, ValueError, "first must be at least 0"),
        ({"first": 2**32 + 1}, ValueError, r"first must be at least 0 and at most 2\*\*32, got 4294967297"),
        ({"first": 1.0}, TypeError, "first must be"),
        ({"first": True}, TypeError, "first must be"),
    ]),
    (CORPUS.search, {"Q": ones(3, 16), "k": 3}, [
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"Q": ones(3, 4, 5)}, ValueError, "Q must have the d of the corpus, 16"),
        ({"Q": [ones(3, 16), ones(16)]}, ValueError, r"Q\[1\] must be \[L, 16\]"),
        ({"Q": [ones(3, 16), ones(1, 3, 16)]}, ValueError, r"Q\[1\] must be \[L, 16\]"),
        ({"Q": []}, TypeError, "Q must be a torch.Tensor, got list"),
        ({"Q": [ones(3, 16)], "q_mask": ones(1, 3)}, ValueError, "q_mask must be None where Q is Tok"),
        ({"Q": ones(3, 16, dtype=torch.int8)}, TypeError, "Q must be bfloat16"),
        ({"Q": ones(2, 3, 4, 16)}, ValueError, r"Q must be \[N, L, d\] or \[L, d\]"),
        ({"Q": [ones(3, 16), ones(2, 16), META]}, ValueError, r"Q\[2\] must be on cpu as Q\[0\], got meta"),
        ({"Q": META}, ValueError, "Q must be on the device of the corpus .* got meta and cpu"),
        ({"Q": [META]}, ValueError, "Q must be on the device of the corpus .* got meta and cpu"),
    ]),
    (li.search, {"Q": ones(3, 16), "D": Corpus.from_codes(INT8.encode(DOCUMENTS)), "k": 5}, [
        ({"coarse": "signs"}, ValueError,
         r"coarse must be one of \('bits', 'muvera'\) for a Corpus of Int8.*, got 'signs'"),
        ({"coarse": "centroids"}, ValueError, "coarse must be one of .* got 'centroids'"),
        ({"coarse": SIGNS}, TypeError, r"coarse must be one of .* got Bits\(1, scales=False\)"),
        ({"candidates": 20}, ValueError, "candidates must be None without coarse, got 20"),
        ({"coarse": "bits", "candidates": 4}, ValueError, "candidates must be at least k, 5, got 4"),
        ({"coarse": "bits", "candidates": "4"}, TypeError, "candidates must be an int, got str"),
    ]),
    (SMALL.tune, {"Q": ones(1, 4)}, [
        ({"recall": "all"}, TypeError, "recall must be a number, got 'all'"),
        ({"recall": True}, TypeError, "recall must be a number, got True"),
        ({"recall": 0}, ValueError, "recall must be above 0 and at most 1, got 0"),
        ({"recall": 1.01}, ValueError, "recall must be above 0 and at most 1, got 1.01"),
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"coarse": "bits"}, ValueError, "coarse must be None for tune, which chooses it, got 'bits'"),
        ({"candidates": 9}, ValueError, "candidates must be None for tune, which chooses it, got 9"),
        ({"Q": ones(0, 3, 4)}, ValueError, "Q must be one query at least, got none"),
        ({"Q": ones(1, 3)}, ValueError, "Q must have the d of the corpus, 4, got 3"),
    ]),
    (Corpus.from_numpy, {"tokens": array(4, 2), "offsets": np.array([0, 4])}, [
        ({"tokens": array(4, 2, dtype=float)}, TypeError, "tokens must be float32 or float16, got float64"),
        ({"tokens": [[1.0]]}, TypeError, "tokens must be a numpy.ndarray, got list"),
        ({"tokens": array(4, 4)[:, :2]}, ValueError, "tokens must be in C order"),
        ({"tokens": array(4)}, ValueError, r"tokens must be \[tokens, d\]"),
        ({"tokens": array(4, 2, 2)}, ValueError, r"tokens must be \[tokens, d\]"),
        ({"offsets": np.array([0, 5])}, ValueError, r"offsets must not decrease and lie within \[0, 4\]"),
        ({"offsets": np.array([0.0])}, TypeError, "offsets must be int32 or int64, got float64"),
    ]),
    (Corpus.from_packed, {"tokens": ones(4, 2), "offsets": ROWS}, [
        ({"tokens": ones(4, 16)[:, :8]}, ValueError, r"tokens must be contiguous, got strides \(16, 1\)"),
        ({"tokens": ones(4, 2).char()}, TypeError, r"tokens must be of one of float32, .*, got torch\.int8"),
        ({"tokens": ones(4, 0)}, ValueError, ".*d of at least 1"),
        ({"offsets": [0, 1, 3]}, TypeError, "offsets must be a"),
    ]),
    (li.hard_negatives, {"Q": ones(2, 3, 8), "D": ones(6, 4, 8), "positives": [[0], [1]]}, [
        ({"num_negatives": 0}, ValueError, "num_negatives must be at least 1"),
        ({"range_min": -1}, ValueError, "range_min must be at least 0, got -1"),
        ({"range_max": 2}, ValueError, "range_max must leave room for 3 negatives from rank 0 on, got 2"),
        ({"range_min": 4, "range_max": 6}, ValueError, "range_max must leave room"),
        ({"max_score": "1"}, TypeError, "max_score must be a number or None, got '1'"),
        ({"sampling_strategy": "best"}, ValueError, "sampling_strategy must be one of"),
        ({"Q": ones(2, 8)}, ValueError, r"Q must be \[N, L, d\], got \[2, 8\]"),
        ({"Q": ones(2, 2, 4, 8)}, ValueError, r"Q must be \[N, L, d\]"),
        ({"D": ones(4, 8)}, ValueError, r"D must be \[N, L, d\]"),
        ({"D": ones(2, 2, 4, 8)}, ValueError, r"D must be \[N, L, d\]"),
        ({"Q": ones(2, 4, 0), "D": ones(6, 4, 0)}, ValueError, ".*d of at least 1"),
        ({"Q": [X, X], "q_mask": ones(2, 3) > 0}, ValueError, "q_mask must be None where Q is Tokens"),
        ({"normalize": 1}, TypeError, "normalize must be True or False"),
        ({"positives": ROWS}, ValueError, r"positives must be \[Nq, positives of each\]"),
        ({"positives": tensor([[[0]], [[1]]])}, ValueError, r"positives must be \[Nq, positives of each\]"),
        ({"positives": tensor([[True], [False]])}, TypeError, "positives must be a dense tensor of integers"),
        ({"positives": [[]] * 3}, ValueError, "positives must have a list for each of 2 queries, got 3"),
        ({"positives": [[0]]}, ValueError, "positives must have a list for each of 2 queries, got 1"),
        ({"positives": [0, 1]}, TypeError, "positives must be a list of documents for each query"),
        ({"positives": [[0], [1.0]]}, TypeError, r"positives\[1\] must hold integers, got 1.0"),
        ({"positives": [[0], [tensor([1])]]}, TypeError, r"positives\[1\] must hold integers"),
        ({"positives": [[0], [6]]}, ValueError, r"positives\[1\] must lie in \[0, 6\), got 6"),
        ({"positives": [[-1], [5]]}, ValueError, r"positives\[0\] must lie in \[0, 6\), got -1"),
    ]),
    (li.mine_hard_negatives, TEXTS, [
        ({"dataset": 3}, TypeError, "dataset must be a datasets.Dataset or a dict of lists, got 3"),
        ({"dataset": {"a": ["x"]}}, ValueError, "dataset must have two columns"),
        ({"dataset": {"a": ["x"], "b": []}}, ValueError, ".*columns of one length, got 1 and 0 rows"),
        ({"dataset": {"a": ["x"], "b": ["y", "z"]}}, ValueError, ".*columns of one length, got 1 and 2 rows"),
        (OF_ANSWERS, ValueError, ".*two columns, anchors and positives, got 'answer' for both"),
        ({"dataset": {"a": ["x"], "b": [1]}}, TypeError, r".*b\[0\] must be a string, got int"),
        ({"anchor_column_name": "text"}, ValueError, "dataset must have a column 'text'"),
        ({"output_format": "pairs"}, ValueError, "output_format must be one of"),
        ({"model": object()}, TypeError, "model must have encode_query, got object"),
        ({"num_negatives": 0}, ValueError, "num_negatives must be at least 1"),
        ({"margin": 1.0}, TypeError, ".*margin"),
        ({"corpus": [2]}, TypeError, r"corpus\[0\] must be a string, got int"),
        ({"corpus": "abc"}, TypeError, "corpus must be a list of strings"),
        ({"corpus": 5}, TypeError, "corpus must be a list of strings"),
    ]),
    (Muvera, {"d": 8}, [
        ({"d": 0}, ValueError, "d must be at least 1, got 0"),
        ({"d": 8.0}, TypeError, "d must be an int, got float"),
        ({"k_sim": 17}, ValueError, r"k_sim must lie in \[0, 16\], got 17"),
        ({"k_sim": -1}, ValueError, r"k_sim must lie in \[0, 16\], got -1"),
        ({"repetitions": 0}, ValueError, "repetitions must be at least 1, got 0"),
        ({"d_proj": 0}, ValueError, "d_proj must be at least 1, got 0"),
        ({"d_final": "a"}, TypeError, "d_final must be an int, got str"),
        ({"d_final": 2**31}, ValueError, r"d_final must be below 2\*\*31"),
        ({"fill_empty": 1}, TypeError, "fill_empty must be True or False, got 1"),
        ({"seed": -1}, ValueError, r"seed must lie in \[0, 2\*\*63\), got -1"),
        ({"seed": 2**63}, ValueError, r"seed must lie in \[0, 2\*\*63\), got 9223372036854775808"),
        ({"seed": True}, TypeError, "seed must be an int, got True"),
        ({"d": 2**30, "k_sim": 1, "repetitions": 1}, ValueError, ".*must be below 2.*31, got 2147483648"),
        ({"k_sim": 16, "repetitions": 10**6}, ValueError, r"repetitions \* 2\*\*k_sim \* d must be below"),
    ]),
    (MUVERA.encode_documents, {"D": ones(2, 3, 8)}, [
        ({"D": ones(2, 3, 8).int()}, TypeError,
         "D must be bfloat16, float16, float32 or float64, got torch.int32"),
        ({"D": None}, TypeError, "D must be a torch.Tensor, got NoneType"),
        ({"D": ones(2, 3, 7)}, ValueError, r"D must have the d of this Muvera, 8, got \[2, 3, 7\]"),
        ({"D": ones(2, 3, 9)}, ValueError, r"D must have the d of this Muvera, 8, got \[2, 3, 9\]"),
        ({"D": ones(1, 2, 3, 8)}, ValueError, r"D must be \[L, d\] or \[N, L, d\], got"),
        ({"D": ones(8)}, ValueError, r"D must be \[L, d\] or \[N, L, d\], got"),
        ({"D": []}, TypeError, "D must be a torch.Tensor, got list"),
        ({"D": [ones(3, 8), ones(2, 3, 8)]}, ValueError, r"D\[1\] must be \[L, 8\]"),
    ]),
    (Muvera.from_state_dict, {"state": [1]}, [({}, TypeError, "state must be a dict")]),
    (MUVERA.encode_corpus, {"D": THREE}, [
        ({"D": THREE[None]}, ValueError, r"D must be \[N, L, d\]"),
        ({"D": THREE[0]}, ValueError, r"D must be \[N, L, d\], got \[3, 8\]"),
        ({"normalize": 1}, TypeError, "normalize must be True or False"),
    ]),
    (Encodings, {"muvera": MUVERA, "documents": ones(3, 64)}, [
        ({"muvera": 8}, TypeError, "muvera must be a Muvera, got int"),
        ({"documents": ones(64)}, ValueError, r"documents must be \[Nd, 64\], got \[64\]"),
        ({"documents": ones(3, 64, 2)}, ValueError, r"documents must be \[Nd, 64\]"),
        ({"documents": ones(3, 65)}, ValueError, r"documents must be \[Nd, 64\]"),
    ]),
    (li.search, {"Q": THREE, "D": THREE, "coarse": MUVERA.encode_corpus(THREE)}, [
        ({"D": ones(2, 3, 8)}, ValueError, ".*of 2 documents, got 3"),
        ({"D": ones(6, 3, 8)}, ValueError, ".*of 6 documents"),
        ({"coarse": Muvera(7)}, ValueError, ".*got one for d = 7"),
        ({"coarse": Muvera(9)}, ValueError, ".*got one for d = 9"),
    ]),
    (li.pool_tokens, {"D": X}, [
        ({"D": None}, TypeError, "D must be a torch.Tensor, got NoneType"),
        ({"D": []}, TypeError, "D must be a torch.Tensor, got list"),
        ({"D": [X, X[:, :2]]}, ValueError, r"D\[1\] must be \[L, 4\]"),
        ({"D": X.int()}, TypeError, "D must be bfloat16"),
        ({"D": X[:, :0]}, ValueError, ".*d of at least 1"),
        ({"D": X.view(1, 2, 3, 4)}, ValueError, r"D must be \[L, d\] or \[N, L, d\]"),
        ({"D": SOME_NAN}, ValueError, ".*got 2 of 5 tokens"),
        ({"D": X * NAN}, ValueError, "D must be finite, got 6 of 6 tokens"),
        ({"D": INF_COLUMN, "method": "kmeans"}, ValueError, "D must be finite"),
        ({"pool_factor": 0.5}, ValueError, "pool_factor must be at least 1"),
        ({"pool_factor": NAN}, ValueError, "pool_factor must be at least 1"),
        ({"pool_factor": math.inf}, ValueError, "pool_factor must be at least 1 and finite"),
        ({"pool_factor": "2"}, TypeError, "pool_factor must be a number, got str"),
        ({"method": "average"}, ValueError, "method must be one of"),
        ({"protected_tokens": -1}, ValueError, ".*must not be negative, got -1"),
        ({"protected_tokens": 1.0}, TypeError, "protected_tokens must be an int"),
        ({"normalize": 1}, TypeError, "normalize must be True or False"),
        ({"iterations": 0}, ValueError, "iterations must be at least 1"),
    ]),
    *[(li.explain, {"Q": ones(3, 5, 16), "D": D}, [
        ({"normalize": 1}, TypeError, "normalize"),
        (chosen([4], [0], [0]), ValueError, "documents"),  # there are 4
        (chosen([0]), ValueError, "documents"),
        ({"Q": "text"}, TypeError, "Q must be"),
    ]) for D in (ones(4, 9, 16), RESIDUALS)],
    (li.explain, {"Q": ones(3, 5, 16), "D": ones(4, 9, 16)}, [
        ({"q_mask": ones(2, 2).bool()}, ValueError, "q_mask"),
        ({"precision": "low"}, ValueError, "precision"),
        (chosen([0], [0], [0], [0]), ValueError, "documents"),
        ({"documents": [[0]] * 3}, TypeError, "documents"),
        (chosen([0.5]), TypeError, "documents"),
        (chosen([0]) | {"paired": True}, ValueError, "paired"),
        (chosen([0], [0], [0]) | {"D": ones(4, 16)}, ValueError, "D must be"),
        (chosen([0], [0], [0]) | {"D": ones(3, 1, 4, 16)}, ValueError, "D must be"),
        ({"D": ones(16), "cu_seqlens_d": tensor([0, 2])}, ValueError, r"D must be \[tokens, d\]"),
        ({"cu_seqlens_d": tensor([0, 2])}, ValueError, "D must be"),
        ({"D": ones(4, 16), "cu_seqlens_d": tensor([0, 9])}, ValueError, "cu_seqlens_d"),
        ({"D": ones(2, 4, 8)}, ValueError, "Q and D"),
    ]),
    (li.explain, {"Q": ones(3, 5, 16), "D": RESIDUALS}, [
        ({"Q": ones(3, 5, 15)}, ValueError, "Q must be"),
        ({"q_mask": ones(3, 5)}, ValueError, "q_mask must be None where D is Codes"),
        ({"cu_seqlens_d": tensor([0, 9])}, ValueError, "cu_seqlens_d must be None where D is Codes"),
        ({"paired": True}, ValueError, "paired must be False where D is Codes"),
    ]),
    (TWO.text, {}, [
        ({"query_tokens": "ab"}, TypeError, "query_tokens must be a sequence of str or None, got str"),
        ({"query_tokens": 7}, TypeError, "query_tokens must be a sequence of str or None, got int"),
        ({"query_tokens": ["a"]}, ValueError, "query_tokens must have 2 entries, one a token, got 1"),
        ({"query_tokens": list("abc")}, ValueError, "query_tokens must have 2 entries, one a token, got 3"),
        ({"query_tokens": ["a", 1]}, TypeError, "query_tokens must hold str, got int"),
    ]),
    (plot, {}, [
        ({"image_grid": (4, 4)}, ValueError, "image_grid"),
        ({"document_tokens": ["a"]}, ValueError, "document_tokens"),
        ({"image_grid": (2, 2), "first_patch": 12}, ValueError, "image_grid"),
        ({"image_grid": (2, 2), "first_patch": -1}, ValueError, "image_grid"),
        ({"image_grid": (2, 0)}, ValueError, "image_grid"),
        ({"image_grid": (2, 2.0)}, TypeError, "image_grid"),
        ({"image_grid": (2, 2, 2)}, TypeError, "image_grid"),
        ({"image_grid": (2,)}, TypeError, "image_grid"),
        ({"image_grid": 4}, TypeError, "image_grid"),
    ]),
    (li.evaluate_recall, {"found": [[0], [1]], "k": 1} | exact(), [
        ({"exact": ones(2, 3)}, TypeError, "exact must be a SearchResult"),
        ({"exact": (ones(2, 3), ones(2, 3).long())}, TypeError, "exact must be a SearchResult"),
        (exact(indices=[0]), TypeError, "indices of exact must be a torch.Tensor"),
        (exact(indices=ones(2, 3)), TypeError, ".*and integer indices, got"),
        (exact(indices=ones(2, 2).long()), ValueError, r".*got \[2, 3\] and \[2, 2\]"),
        (exact(scores=tensor([[1.0, 3.0, 2.0]] * 2)), ValueError, "exact must be ordered best first"),
        ({"found": ones(2, 3)}, TypeError, "found must be integers, got torch.float32"),
        ({"found": ones(2, 3, 4).long()}, ValueError, r"found must be \[Nq, n\]"),
        ({"found": 3}, TypeError, "found must be a tensor or a list for each query, got 3"),
        ({"found": [[1.5], [2]]}, TypeError, "found must be integers, got float"),
        ({"found": [[1]]}, ValueError, "found must have the 2 queries of exact, got 1"),
        ({"found": [[1], [-2]]}, ValueError, "found must hold documents from 0 on, or -1, got -2"),
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"k": [1, 2.0]}, TypeError, "k must be an int, got float"),
        ({"per_query": 1}, TypeError, "per_query must be True or False, got 1"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [(function, good | change, *said) for function, good, own in REFUSED for change, *said in own],
)
def test_what_is_refused(function, arguments, error, message):
    with pytest.raises(error, match=f"^{message}"):
        function(**arguments)
