"""late_interaction.ray on a local Ray cluster of several processes, of which some are killed.

make ray makes an environment that has ray, and runs all of them there. tests/search/test_environments.py runs
some of them over there, and all of them nightly: each starts processes that import PyTorch.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction import Corpus
from late_interaction._ray import search
from tests.build.test_readme import examples
from tests.lancedb_environment import here, pa

ray = pytest.importorskip("ray") if here("ray", "pyarrow") else None
pytestmark = pytest.mark.skipif(ray is None, reason="needs ray: make ray runs these")
ROOT = Path(__file__).resolve().parents[2]
SIZES = (9, 4, 0, 7, 12, 1, 8, 11)  # of the blocks


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Ray with processes that find this checkout; and the folder where tests.support.ray_worker writes."""
    folder = tmp_path_factory.mktemp("ray")
    variables = {"LATE_INTERACTION_RAY_TEST": str(folder), "PYTHONPATH": str(ROOT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default: for minutes where a machine is busy
        ray.init(
            address="local",
            num_cpus=3,
            object_store_memory=200 << 20,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": variables},
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield folder
        ray.shutdown()


@pytest.fixture(autouse=True)
def clean(request):
    yield
    if "cluster" in request.fixturenames:
        for path in request.getfixturevalue("cluster").iterdir():
            path.unlink()


def documents(d=8):
    """Documents of whole numbers, so that scores are equal over the borders of blocks, and one of NaN."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 6, (sum(SIZES),), generator=generator).tolist()
    docs = [torch.randint(-1, 2, (n, d), generator=generator).float() for n in lengths]
    docs[20][:] = torch.nan
    docs[9] = docs[3][:0]
    return torch.randint(-1, 2, (3, 4, d), generator=generator).float(), docs


def column_of(docs):
    return pa.array([x.tolist() for x in docs], pa.list_(pa.list_(pa.float32(), 8)))


def tables_of(docs):
    """A table for each block."""
    parts = np.split(np.arange(len(docs)), np.cumsum(SIZES)[:-1])
    return [pa.table({"vector": column_of([docs[i] for i in part])}) for part in parts]


def one_process(Q, docs, k, q_mask=None, **options):
    return Corpus.from_arrow(column_of(docs)).search(Q, k, q_mask=q_mask, **options)


def same(got, expected):
    bits = [x.scores.contiguous().view(torch.int32) for x in (got, expected)]
    assert torch.equal(*bits) and torch.equal(got.indices, expected.indices)


def test_equals_one_process(cluster):
    Q, docs = documents()
    dataset = ray.data.from_arrow(tables_of(docs))
    same(li.search(Q, li.ray.Documents(dataset, workers=2), 9), one_process(Q, docs, 9))
    mask = torch.tensor([[True] * 4, [True, False] * 2, [False] * 3 + [True]])
    options = {"normalize": False, "largest": False}
    got = li.search(Q, li.ray.Documents(dataset, workers=1), 100, q_mask=mask, **options)
    same(got, one_process(Q, docs, 100, mask, **options))
    ranked = [i for i in range(len(docs)) if i not in (9, 20)]  # what is empty or NaN takes no rank
    assert got.indices.sort().values.tolist() == [[-1, -1, *ranked]] * 3
    options["keep_empty"] = True
    got = li.search(Q, li.ray.Documents(dataset, workers=1), 100, q_mask=mask, **options)
    same(got, one_process(Q, docs, 100, mask, **options))
    assert got.indices.sort().values.tolist() == [[-1, *sorted([9, *ranked])]] * 3


def test_blocks_that_are_read_out_of_order(cluster):
    """And a limit, which cuts rows off a block."""
    from tests.support.ray_worker import first_block_last

    Q, docs = documents()
    dataset = ray.data.from_arrow(tables_of(docs)).map_batches(
        first_block_last, batch_size=None, batch_format="pyarrow"
    )
    before = dataset.context.execution_options.preserve_order
    same(li.search(Q[0], li.ray.Documents(dataset, workers=1), 9), one_process(Q[0], docs, 9))
    assert dataset.context.execution_options.preserve_order == before
    limited = ray.data.from_arrow(tables_of(docs)).limit(23)
    same(li.search(Q, limited, 9), one_process(Q, docs[:23], 9))


def test_arrays_of_numpy_and_no_documents(cluster):
    Q, docs = documents()
    ragged = ray.data.from_items([{"tokens": x.numpy()} for x in docs], override_num_blocks=3)
    same(li.search(Q, li.ray.Documents(ragged, column="tokens", workers=1), 9), one_process(Q, docs, 9))
    long = [x for x in docs if len(x) == 5]
    alike = ray.data.from_numpy([torch.stack(long[:3]).numpy(), torch.stack(long[3:]).numpy()])
    same(li.search(Q, li.ray.Documents(alike, column="data", workers=1), 9), one_process(Q, long, 9))
    none = ray.data.from_arrow(tables_of(docs)[2])
    assert [x.shape for x in li.search(Q, li.ray.Documents(none, workers=1), 9)] == [(3, 0)] * 2
    lists = pa.list_(pa.list_(pa.float32()))
    tables = [pa.table({"vector": pa.array(rows, lists)}) for rows in ([[], []], [[[1.0] * 8]])]
    given = li.ray.Documents(ray.data.from_arrow(tables), workers=1)  # a block without a token
    got = li.search(Q, given, 9)
    assert got.indices.tolist() == [[2, -1, -1]] * 3


def test_the_guide_s_example(cluster):
    (example,) = [x for x in examples("docs/guide/search.md") if "import ray" in x]
    names = {}
    exec(example, names)
    assert names["rows"].shape == (16, 2) and int(names["rows"].max()) < 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed(workers, cluster, monkeypatch):
    """Halfway through the blocks, with a block that it has scored and one that waits for it."""
    from tests.support.ray_worker import KilledOnce

    monkeypatch.setattr(search, "Scorer", KilledOnce)
    Q, docs = documents()
    dataset = ray.data.from_arrow(tables_of(docs))
    got = li.search(Q, li.ray.Documents(dataset, workers=workers, retries=1), len(docs))
    same(got, one_process(Q, docs, len(docs)))
    ranked = [i for i in range(len(docs)) if i not in (9, 20)]
    assert got.indices.sort().values.tolist() == [[-1, -1, *ranked]] * 3
    done = [path.name.split(".")[1] for path in cluster.glob("done.*")]
    assert (
        (cluster / "killed").exists() and done.count("7") == 2 and set(done) == set(map(str, SIZES)) - {"0"}
    )
    assert len({path.name.split(".")[2] for path in cluster.glob("done.*")}) >= 2


def test_workers_that_are_killed_too_often(cluster, monkeypatch):
    from tests.support.ray_worker import KilledAlways

    monkeypatch.setattr(search, "Scorer", KilledAlways)
    Q, docs = documents()
    dataset = ray.data.from_arrow(tables_of(docs))
    with pytest.raises(
        RuntimeError, match="2 workers were lost, the last one with documents 13 to 19, and retri"
    ):
        li.search(Q, li.ray.Documents(dataset, workers=1, retries=1), 9)
    assert len(list(cluster.glob("begun.*"))) > 0


def test_documents_that_no_corpus_can_be_made_of(cluster):
    Q, docs = documents()
    dataset = ray.data.from_arrow(tables_of(docs))
    with pytest.raises(ValueError, match="column must be one of the dataset's, 'vector', got 'text'"):
        li.search(Q, li.ray.Documents(dataset, column="text", workers=1), 9)
    doubles = ray.data.from_arrow(pa.table({"vector": [[[1.0, 2.0]]]}))
    with pytest.raises(TypeError, match="documents must be list<fixed_size_list<float>>"):
        li.search(Q, li.ray.Documents(doubles, workers=1), 9)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"column": 3}, TypeError), ({"retries": -1}, ValueError), ({"retries": 1.5}, TypeError),
        ({"workers": 0}, ValueError), ({"dataset": []}, TypeError),
        ({"k": 0}, ValueError), ({"normalize": 1}, TypeError), ({"largest": "no"}, TypeError),
        ({"precision": "most"}, ValueError), ({"Q": [1.0]}, TypeError),
        ({"q_mask": torch.ones(2, 4)}, TypeError), ({"d_mask": torch.ones(2, 4)}, ValueError),
        ({"subset": [1]}, ValueError), ({"chunk_bytes": 9}, ValueError), ({"progress": True}, ValueError),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments(option, error, cluster):
    (name,) = option
    of_documents = name in ("column", "retries", "workers", "dataset")
    given = {"dataset": ray.data.range(3)} | (option if of_documents else {})
    with pytest.raises(error, match=rf"^{name} must"):
        D = li.ray.Documents(**given)
        li.search(**{"Q": torch.ones(3, 4, 8), "D": D, "k": 9} | ({} if of_documents else option))
