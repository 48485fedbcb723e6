"""Transformers' processors that score, before and after patch("transformers")."""

import importlib
import inspect
from functools import partial

import pytest
import torch

import late_interaction as li
from late_interaction.integrations import transformers as transformers_patch
from late_interaction.integrations._shared.places import module_exists
from tests.support import side_by_side
from tests.support.side_by_side import called, ragged

unchanged = partial(side_by_side.assert_unchanged, "transformers")
left_alone = partial(side_by_side.assert_left_alone, "transformers")


@pytest.fixture(params=transformers_patch._PROCESSORS.items(), ids=lambda place: place[1])
def processor(request):
    """A processor that was built before the patch. What one is built from plays no part in its scoring."""
    pytest.importorskip("transformers", reason="make test installs it (requirements/demo.txt)")
    module, name = request.param
    if not module_exists(module):
        pytest.skip("this Transformers has no such processor")
    cls = getattr(importlib.import_module(module), name)
    yield cls.__new__(cls)
    li.unpatch("transformers")


def test_leaves_are_reached(processor):
    side_by_side.assert_leaves_are_reached("transformers")


def calls(device):
    queries, passages = ragged(device, 5, 1, 9, 3), ragged(device, 4, 11, 1, 7, 2)
    # All similarities are negative: wherever a passage is padded, the padding has the maximum.
    apart = [x.abs() for x in queries], [-x.abs() for x in passages]
    padded = torch.randn(3, 6, 8, device=device).double(), torch.randn(5, 7, 8, device=device).double()
    return {
        "lists": (queries, passages),
        "lists whose padding wins": apart,
        "tensors": padded,
        "queries as a tensor": (padded[0], passages),
        "passages as a tensor": (queries, padded[1]),
        "one of each": (queries[:1], passages[:1]),
        "an empty passage": (queries, [passages[0], passages[1][:0], passages[2]]),
        "an empty query": ([queries[0], queries[1][:0]], passages),
    }


@pytest.mark.parametrize("batch_size", [1, 2, 128])
@pytest.mark.parametrize("what", calls("cpu"))
def test_scores(processor, device, what, batch_size):
    queries, passages = calls(device)[what]
    if what == "an empty passage" and batch_size == 1:
        pytest.skip("a maximum over nothing: both refuse it (test_what_it_refuses)")

    def score():
        return processor.score_retrieval(queries, passages, batch_size=batch_size)

    scores = unchanged(score, rtol=1e-12, atol=1e-12)
    assert scores.device == torch.device("cpu")


def test_padding_takes_part_in_the_maximum(processor):
    """What the test above rests on: a score depends on whom a passage shares its batch with."""
    queries, passages = [torch.ones(2, 4)], [-torch.ones(1, 4), -torch.ones(3, 4)]
    li.patch("transformers")
    assert processor.score_retrieval(queries, passages).tolist() == [[0.0, -8.0]]
    assert processor.score_retrieval(queries, passages, batch_size=1).tolist() == [[-8.0, -8.0]]


def test_many_passages_are_packed_in_blocks(processor, monkeypatch):
    queries, passages = ragged("cpu", 5, 2), ragged("cpu", *range(1, 30))
    monkeypatch.setitem(transformers_patch.zero_padded.ELEMENTS, "cpu", 8 * 40)
    unchanged(lambda: processor.score_retrieval(queries, passages, 4))
    operators = called(processor.score_retrieval, queries, passages, 4)
    assert operators.keys() == {"maxsim_varlen"} and operators["maxsim_varlen"] > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("output_dtype", [None, torch.float32])
def test_dtypes(processor, device, dtype, output_dtype):
    queries, passages = ragged(device, 5, 3, dtype=dtype), ragged(device, 4, 9, 2, dtype=dtype)
    exact = processor.score_retrieval([x.double() for x in queries], [x.double() for x in passages])
    li.patch("transformers")
    scores = processor.score_retrieval(queries, passages, output_dtype=output_dtype, output_device=device)
    assert scores.dtype == (output_dtype or dtype) and scores.device.type == device
    rounding = torch.finfo(scores.dtype).eps
    torch.testing.assert_close(scores.double().cpu(), exact, rtol=4 * max(rounding, 1e-6), atol=1e-4)


def test_gradients(processor, device):
    batch = ragged(device, 5, 3), ragged(device, 4, 9, 2, 6)
    leaves = [x.requires_grad_() for side in batch for x in side]

    def gradients():
        return torch.autograd.grad(processor.score_retrieval(*batch, batch_size=3).square().sum(), leaves)

    unchanged(gradients)


ONE = [torch.ones(2, 4)]
REFUSED = {
    "no queries": ([], ONE),
    "no passages": (ONE, []),
    "two devices": (ONE, [torch.ones(2, 4, device="meta")]),
    "two dtypes": (ONE, [torch.ones(2, 4).half()]),
    "two widths": (ONE, [torch.ones(2, 3)]),
    "passages without a token": (ONE, [torch.ones(0, 4)]),
    "an empty batch": (ONE, [torch.ones(2, 4), torch.ones(0, 4)], 1),
    **{f"batches of {size}": (ONE, ONE, size) for size in (0, -1)},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_refuses(processor, what):
    side_by_side.assert_refused_as_before("transformers", lambda: processor.score_retrieval(*REFUSED[what]))


def test_a_batch_size_is_a_number(processor):
    li.patch("transformers")
    with pytest.raises(TypeError):
        processor.score_retrieval(ONE, ONE, batch_size=None)


def test_what_no_kernel_takes_stays_its_own(processor):
    queries, passages = [torch.tensor([[1, 2]])], [torch.tensor([[3, 4]]), torch.tensor([[-5, 6], [7, 8]])]
    left_alone(lambda: processor.score_retrieval(queries, passages))


@pytest.mark.parametrize("said", ["1", "transformers", "mteb, Transformers"])
def test_disabled(processor, monkeypatch, said):
    batch = ragged("cpu", 5, 3), ragged("cpu", 4, 9)
    left_alone(lambda: processor.score_retrieval(*batch), said)
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "mteb")
    assert called(processor.score_retrieval, *batch)


def test_unpatch_restores_everything(processor):
    own = type(processor).score_retrieval
    side_by_side.assert_restored("transformers")
    li.patch("transformers")
    patched = type(processor).score_retrieval
    assert patched is not own and inspect.signature(patched) == inspect.signature(own)
    assert patched.__doc__ == own.__doc__


def test_a_method_of_other_parameters_is_left_alone(processor, monkeypatch):
    def score_retrieval(self, queries):
        return "its own"

    monkeypatch.setattr(type(processor), "score_retrieval", score_retrieval)
    with pytest.warns(RuntimeWarning, match=rf"did not find .*{type(processor).__name__}.*Transformers' own"):
        li.patch("transformers")
    assert processor.score_retrieval(0) == "its own"
