"""A corpus in other processes and in copies: a folder is opened again, memory travels."""

import copy
import multiprocessing
import pickle
import shutil
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from late_interaction.corpus import Corpus, CorpusError
from tests.support.corpora import CODES, created, in_memory, stored_as

METHODS = ["spawn", "forkserver", "fork"]


def documents(count=60, d=16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(i % 7, d, generator=generator) for i in range(count)]


def ids(count=60):
    return [f"d{i}" for i in range(count)]


def built(path, kind=torch.float32):
    docs = documents()
    return created(path, docs, ids(), shard_bytes=2000, **stored_as(kind, docs))


def of_memory():
    return in_memory(documents(), ids=ids())


def from_numpy():
    return Corpus.from_numpy(torch.cat(documents()).numpy(), of_memory().shards[0].offsets.numpy())


def queries():
    return torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1))


def facts_of(corpus):
    scores, indices = corpus.search(queries(), 9)
    return {
        "scores": scores.tolist(),
        "indices": indices.tolist(),
        "ids": None if corpus.ids is None else list(corpus.ids),
        "documents": [x.tolist() for x in corpus],
        "kind": (corpus.d, corpus.dtype, corpus.normalized, len(corpus.shards), corpus.tokens),
    }


def tell(corpora, connection):
    torch.set_num_threads(1)
    connection.send([facts_of(corpus) for corpus in corpora])
    connection.close()


def told_by(method, corpora):
    context = multiprocessing.get_context(method)
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(corpora, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv()
    finally:
        process.join(60)


class Texts(Dataset):
    def __init__(self, corpus):
        self.corpus = corpus

    def __len__(self):
        return len(self.corpus)

    def __getitem__(self, index):
        return self.corpus.ids[index], self.corpus[index].sum(0)


@pytest.mark.parametrize("method", METHODS)
def test_a_process_searches_what_this_one_opened_or_has_in_memory(method, tmp_path):
    whole = built(tmp_path / "corpus"), of_memory(), from_numpy()
    corpora = [*whole, *(corpus.parts(3)[1] for corpus in whole)]
    wanted = [facts_of(corpus) for corpus in corpora]
    assert told_by(method, corpora) == wanted == [facts_of(corpus) for corpus in corpora]


@pytest.mark.parametrize("method", METHODS)
def test_workers_of_a_data_loader(method, tmp_path):
    dataset = Texts(built(tmp_path / "corpus"))
    loader = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context=method)
    names, sums = zip(*((name, x) for batch in loader for name, x in zip(*batch, strict=True)), strict=True)
    assert list(names) == ids()
    assert torch.equal(torch.stack(sums), torch.stack([dataset[i][1] for i in range(60)]))


@pytest.mark.parametrize("kind", [torch.float16, *CODES, "residuals"], ids=str)
def test_the_pickle_of_a_folder_is_its_path(kind, tmp_path, monkeypatch):
    corpus = built(tmp_path / "corpus", kind)
    for one in (corpus, *corpus.parts(2)[1].parts(3)):
        text = pickle.dumps(one)
        assert len(text) < 1000
        for again in (pickle.loads(text), copy.copy(one), copy.deepcopy(one)):
            assert facts_of(again) == facts_of(one)
    monkeypatch.chdir(tmp_path)
    text = pickle.dumps(Corpus.open("corpus"))
    monkeypatch.chdir("/")  # a process elsewhere finds it, too
    again = pickle.loads(text)
    assert facts_of(again) == facts_of(corpus) and again.path == tmp_path / "corpus"
    again.verify()


@pytest.mark.parametrize("kind", [*CODES, "residuals"], ids=str)
def test_codes_in_memory_travel(kind):
    docs = documents()
    corpus = Corpus.from_codes(stored_as(kind, docs)["codec"].encode(docs), ids=ids())
    corpus.delete(["d0", "d9", "d10"])
    wanted = facts_of(corpus)
    for again in (pickle.loads(pickle.dumps(corpus)), copy.deepcopy(corpus)):
        assert facts_of(again) == wanted
    assert told_by("spawn", [corpus]) == [wanted]


def test_a_folder_that_holds_another_corpus_is_refused(tmp_path):
    text = pickle.dumps(built(tmp_path / "corpus"))
    shutil.rmtree(tmp_path / "corpus")
    with pytest.raises(FileNotFoundError, match="there is no corpus in"):
        pickle.loads(text)
    created(tmp_path / "corpus", documents(3))
    words = f"{tmp_path / 'corpus'} holds another corpus than the one that was pickled"
    with pytest.raises(CorpusError, match=words):
        pickle.loads(text)


def test_a_part_of_memory_travels_without_the_rest():
    tokens = torch.randn(10_000, 16)[5:]
    offsets = torch.arange(0, 9995, 5)
    corpus = Corpus.from_packed(tokens, offsets, ids=[f"d{i}" for i in range(len(offsets) - 1)])
    whole, parts = pickle.dumps(corpus), corpus.parts(100)
    assert len(whole) < 1.2 * tokens.nbytes
    text = pickle.dumps(parts[3])
    assert len(text) < len(whole) / 50
    again = pickle.loads(text)
    assert facts_of(again) == facts_of(parts[3])
    assert facts_of(pickle.loads(pickle.dumps(again))) == facts_of(again)


def test_a_pickled_corpus_does_not_hold_its_documents_twice():
    corpus = of_memory()
    corpus.delete(["d3"])
    wanted, before = facts_of(corpus), weakref.ref(corpus.shards[0])
    assert facts_of(pickle.loads(pickle.dumps(corpus))) == wanted == facts_of(corpus)
    assert before() is None
