"""The examples that need no model. tests/training/test_contrastive_frameworks.py runs that for torchrun."""

from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("tqdm")
import late_interaction as li
from demo.encode import Tokens, pad
from demo.train import new_head
from examples import large_batch_mrr as example


def tiny(count=40, width=136):
    """Texts of which each document holds noisy tokens of its query."""
    generator = torch.Generator().manual_seed(0)
    queries = [torch.randn(3 + i % 3, width, generator=generator) for i in range(count)]
    documents = [
        torch.cat((q, torch.randn(4 + i % 5, width, generator=generator))) for i, q in enumerate(queries)
    ]
    documents = [d + 0.5 * torch.randn(d.shape, generator=generator) for d in documents]
    found = []
    for texts in (queries, documents):
        embeddings, mask = pad([F.normalize(x, dim=-1) for x in texts])
        found.append(Tokens(embeddings, mask, [["x"] * len(x) for x in texts]))
    return example.Data(*found)


def test_parts_give_the_gradients_of_the_whole_batch_within_their_budget():
    data, pairs = tiny(), torch.arange(16)
    heads = [new_head(136, torch.device("cpu")) for _ in range(2)]
    meters = example.Meter(), example.Meter()
    example.loss_of(*example.encode(heads[0], data, pairs, meters[0])).backward()
    li.cached_contrastive_step(
        lambda part: example.encode(heads[1], data, part, meters[1]), pairs.split(2), example.loss_of
    )
    torch.testing.assert_close(heads[0].weight.grad, heads[1].weight.grad, rtol=1e-4, atol=1e-7)
    tokens = sum(int(side.mask[:16].sum()) for side in (data.queries, data.documents))
    assert meters[0].most == tokens * 136 * 4  # what the head multiplies
    assert 0 < meters[1].most < meters[0].most / 6
    assert meters[0].now == meters[1].now == 0


def test_the_largest_batch_fits_and_twice_as_much_does_not():
    data, pairs = tiny(), torch.arange(40)
    head = new_head(136, torch.device("cpu"))
    longest = 136 * 4 * max(
        int(q.sum() + d.sum()) for q, d in zip(data.queries.mask, data.documents.mask, strict=True)
    )  # fmt: skip
    assert example.largest_batch(head, data, pairs, 8 * longest) == 8
    assert example.largest_batch(head, data, pairs, 1) == 1


def test_every_batch_size_is_trained_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example, "BUDGET", 60_000)
    picture = tmp_path / "a.png" if find_spec("matplotlib") else None
    seeds = []
    monkeypatch.setattr(example, "new_head", lambda *given: (seeds.append(given[2:]), new_head(*given))[1])
    found = example.run(tiny(), 3, 2, picture, seeds=2)
    assert {(0,), (1,)} <= set(seeds)
    batches = [x.batch for x in found["3 steps"]]
    assert len(batches) > 1 and batches == [batches[0] * 2**i for i in range(len(batches))]
    assert [x.steps for x in found["3 steps"]] == [3] * len(batches)
    assert [x.steps for x in found["every pair 2 times"]] == [56 // batch for batch in batches]
    for runs in found.values():
        assert all(x.kept <= 60_000 and len(x.mrrs) == 2 for x in runs)
        assert all(0 < min(x.mrrs) <= x.mrr <= max(x.mrrs) <= 1 for x in runs)
        assert [x.embeddings for x in runs] == sorted(x.embeddings for x in runs)
    assert capsys.readouterr().out.count("batch ") == 2 * len(batches)
    assert picture is None or picture.read_bytes().startswith(b"\x89PNG")
