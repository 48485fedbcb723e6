"""li.Tokens in compiled and exported code, and in other processes."""

import multiprocessing
import pickle
import random

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import late_interaction as li
from late_interaction import Tokens
from tests.support.calls import Module
from tests.support.token_forms import D_MODEL, FORMS, sequences


def batches(count, kind):
    """Batches of different counts and lengths. No two sizes of the first are equal, since Dynamo takes equal
    sizes to stay equal."""
    draw = random.Random(0)
    for i in range(count):
        n, m = (3, 3 if kind == "pairs" else 5) if i == 0 else (draw.randint(2, 9), draw.randint(2, 9))
        m = n if kind == "pairs" else m
        q = [draw.randint(0, 10) for _ in range(n - 1)] + [11]
        d = [draw.randint(0, 30) for _ in range(m - 1)] + [31 + (i > 0)]
        q, d = (Tokens.from_list(sequences(x, dtype=torch.float32)) for x in (q, d))
        yield q.to_padded() if kind in ("padded", "mixed") else q, d.to_padded() if kind == "padded" else d


CALLS = {
    "maxsim": li.maxsim,
    "options": lambda q, d: li.maxsim(q, d, normalize=True, mean=True),
    "winners": lambda q, d: li.maxsim_with_winners(q, d)[0],
    "smooth": li.smooth_maxsim,
    "made inside": lambda q, d: li.maxsim(Tokens(q.values, q.mask), d) if q.mask is not None
    else li.maxsim(Tokens.packed(q.values * 2, q.offsets, q.max_length), d.to(torch.float32)),
    "pairs": li.maxsim_pairs,
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["packed", "padded", "mixed"])
def test_batches_of_any_length_compile_at_most_twice(kind, call, nothing_compiled):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[call], fullgraph=True, dynamic=True, backend=counter)
    for q, d in batches(40, "pairs" if call == "pairs" and kind == "packed" else kind):
        d = d[: len(q)] if call == "pairs" else d
        q = q[: len(d)] if call == "pairs" else q
        q.values.requires_grad_()
        want = CALLS[call](q, d)
        (want_grad,) = torch.autograd.grad(want.square().sum(), q.values)
        got = compiled(q, d)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got.square().sum(), q.values)[0], want_grad)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("kind", ["packed", "padded", "mixed"])
def test_an_exported_program_takes_other_lengths(kind, tmp_path):
    first, *others = batches(4, kind)
    auto = torch.export.Dim.AUTO
    shapes = [[[None if n in (0, D_MODEL) else auto for n in x.shape] for x in pytree.tree_leaves(tokens)]
              for tokens in first]  # fmt: skip
    program = torch.export.export(Module(li.maxsim), first, dynamic_shapes=tuple(shapes))
    torch.export.save(program, tmp_path / "scores.pt2")
    loaded = torch.export.load(tmp_path / "scores.pt2").module()
    for q, d in others:
        torch.testing.assert_close(loaded(q, d), li.maxsim(q, d))


def test_leaves_are_tensors_alone():
    for tokens in (*next(batches(1, "packed")), *next(batches(1, "padded")), Tokens(torch.ones(2, 3, 4))):
        flat, spec = pytree.tree_flatten(tokens)
        assert flat and all(isinstance(x, torch.Tensor) for x in flat)
        back = pytree.tree_unflatten(flat, spec)
        assert repr(back) == repr(tokens) and back.values is tokens.values
        doubled = pytree.tree_map(lambda x: x * 2 if x.is_floating_point() else x, tokens)
        assert torch.equal(doubled.values, tokens.values * 2) and doubled.lengths.equal(tokens.lengths)
    (longer, _), (other, _) = batches(2, "packed")
    assert pytree.tree_structure(longer) == pytree.tree_structure(other)
    keyed, _ = pytree.tree_flatten_with_path(longer)
    assert pytree.keystr(keyed[0][0]) == ".values"


def assert_same(got, want):
    assert repr(got) == repr(want)
    for x, y in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", ["packed", "holes", "nested"])
def test_pickles(form, tmp_path):
    tokens = FORMS[form](sequences([2, 0, 5]))
    assert_same(pickle.loads(pickle.dumps(tokens)), tokens)
    torch.save({"tokens": tokens}, tmp_path / "tokens.pt")
    assert_same(torch.load(tmp_path / "tokens.pt", weights_only=False)["tokens"], tokens)


class Documents(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((i, 4), float(i))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loaders(method):
    context = multiprocessing.get_context(method)
    pin = torch.cuda.is_available()
    loader = DataLoader(Documents(), batch_size=3, num_workers=2, collate_fn=Tokens.from_list,
                        multiprocessing_context=context, pin_memory=pin)  # fmt: skip
    found = list(loader)
    data = Documents()
    for batch, first in zip(found, (0, 3), strict=True):
        assert_same(batch, Tokens.from_list([data[i] for i in range(first, first + 3)]))
        assert batch.values.is_pinned() == pin


def gather(rank, store, queue):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    own = Tokens.from_list([torch.full((n + rank, 4), float(rank)) for n in (1, 2)])
    found = [None, None]
    torch.distributed.all_gather_object(found, own)
    queue.put((rank, repr(found), [x.values.sum().item() for x in found]))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_processes_exchange_them(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=gather, args=(rank, tmp_path / "store", queue)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    found = [queue.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    for _, shown, sums in found:
        assert "(2 sequences, 3 tokens packed" in shown and "(2 sequences, 5 tokens packed" in shown
        assert sums == [0.0, 20.0]
