"""Corpora of tests, in a folder and in memory, whose tokens are stored in any way; and the best scores."""

import torch

from late_interaction import Corpus, codecs
from tests.support.coded import codec_of
from tests.support.packed import pack_sequences

CODES = (torch.float8_e4m3fn, torch.int8)


def stored_as(kind, docs=()):
    """The option of a corpus that stores tokens in a dtype, or as "residuals" by a codec of its own."""
    if kind == "residuals":
        return {"codec": codecs.Residual.train(torch.cat(docs).float(), 8)}
    return {"codec": codec_of(kind)} if kind in CODES else {"dtype": kind}


def created(path, docs, ids=None, columns=None, **options):
    """A corpus in a folder."""
    options = options if "d" in options else {"d": docs[0].shape[1]} | options
    with Corpus.create(path, **options) as builder:
        builder.add(docs, ids, columns)
    return Corpus.open(path)


def in_memory(docs, device="cpu", **options):
    tokens, offsets = pack_sequences(docs)
    return Corpus.from_packed(tokens.to(device), offsets, **options)


def best_of(scores, k, largest=True):
    """The best scores and their documents, of equal ones the first."""
    found = scores.sort(dim=-1, descending=largest, stable=True)
    return found.values[..., :k], found.indices[..., :k]
