"""Searches by process groups of gloo and NCCL, against one process that has all documents."""

import pytest
import torch
import torch.distributed as dist

import late_interaction as li
from tests.support import search_worker
from tests.support.corpora import created, in_memory
from tests.support.groups import on_ranks
from tests.support.search_worker import COUNTS, documents, queries

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def same(found, expected):
    """The scores of each process, as float64, have the bits of one process."""
    for scores, indices in found:
        scores = torch.tensor(scores, dtype=torch.float64)
        torch.testing.assert_close(scores, expected.scores.double().cpu(), rtol=0, atol=0, equal_nan=True)
        assert indices == expected.indices.tolist()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_every_process_has_the_best_of_all(world):
    """All kinds in one group: each is a search of its own."""
    found = on_ranks(world, "tests.support.search_worker.searches")
    assert all(isinstance(x, dict) for x in found), found
    for name, (kind, k, options) in search_worker.SEARCHES.items():
        Q, D, more = search_worker.inputs(kind)
        if kind == "corpus":
            wanted = in_memory(documents()).search(Q, k, **options)
        else:
            stop = sum(COUNTS[:world])
            more = {x: y[:stop] if x in search_worker.OF_DOCUMENTS else y for x, y in more.items()}
            wanted = li.search(Q, D[:stop], k, **more, **options)
        same([x[name] for x in found], wanted)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"k": 4}, "every rank of the group must have the same k, got 3 on rank 0, 4 on rank 1"),
        ({"dtype": "bfloat16"}, "the same dtype, got float32 on rank 0, bfloat16 on rank 1"),
        ({"masked": True}, "the same queries, got checksum"),
        ({"scale": 2.0}, "the same queries, got checksum"),
    ],
)
def test_processes_that_differ_all_say_so(change, words):
    found = on_ranks(2, "tests.support.search_worker.differing", change=change)
    for text in found:
        assert text.startswith("ValueError: search: ") and words in text, text


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_no_process_waits_for_one_that_raised(when):
    found = on_ranks(3, "tests.support.search_worker.raising", when=when)
    what = "refused its arguments" if when == "before" else "failed"
    error = "ValueError: k must be at least 1, got 0" if when == "before" else "MemoryError: no room"
    assert found[1].startswith(error), found[1]
    for text in (found[0], found[2]):
        assert text.startswith(f"RuntimeError: search: rank 1 of the group {what}"), text


def test_a_process_outside_the_group():
    found = on_ranks(2, "tests.support.search_worker.outside")
    assert found[0] == [0] and found[1].startswith("ValueError: group must hold this process, rank 1"), found


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus():
    found = on_ranks(2, "tests.support.search_worker.on_gpus", backend="nccl")
    Q, D, _ = search_worker.inputs("padded")
    wanted = li.search(Q.cuda(), D[: sum(COUNTS[:2])].cuda(), 7)
    same(found, wanted)


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus_have_the_bits_of_one():
    found = on_ranks(2, "tests.support.search_worker.shards_on_gpus", backend="nccl")
    assert all(isinstance(x, list) for x in found), found
    place = 0
    for sizes in search_worker.GPU_SHARDS:
        Q, D, more = search_worker.gpu_inputs(sizes)
        wanted = li.search(Q, D, 20, **more)
        for _ in range(6):
            same([x[place] for x in found], wanted)
            place += 1


# ---- parts of a corpus ----


@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
def test_parts_of_a_corpus(count, tmp_path):
    docs, Q = documents(dtype=torch.float16), queries()
    ids = [f"d{i}" for i in range(len(docs))]
    corpus = created(tmp_path / "corpus", docs, ids, shard_bytes=900)
    parts = corpus.parts(count)
    assert len(parts) == count and sum(map(len, parts)) == len(docs)
    assert [x for part in parts for x in (part.ids or [])] == ids
    pieces = [x for part in parts for x in part]
    assert all(torch.equal(x, y) for x, y in zip(pieces, corpus, strict=True))
    scores, indices = corpus.search(Q, len(docs))
    first = 0
    for part in parts:
        if len(part):
            own, places = part.search(Q, len(part))
            for query in range(len(Q)):
                mine = (indices[query] >= first) & (indices[query] < first + len(part))
                assert torch.equal(indices[query][mine], places[query] + first)
                torch.testing.assert_close(scores[query][mine], own[query], rtol=1e-5, atol=1e-5)
        first += len(part)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        corpus.parts(0)
