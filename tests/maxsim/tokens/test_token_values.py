"""li.Tokens itself: what it holds, its parts, its other layouts, and what it refuses."""

import pytest
import torch
from torch.utils import _pytree as pytree

import late_interaction as li
from late_interaction import Tokens
from tests.support.calls import refused
from tests.support.token_forms import D_MODEL, FORMS, nested, sequences, with_holes


def test_lengths_and_what_it_says_of_itself():
    parts = sequences([2, 0, 5], dtype=torch.float32)
    packed, holes = Tokens.from_list(parts), with_holes(parts)
    full = Tokens(torch.ones(2, 3, 4, dtype=torch.bfloat16))
    for tokens in (packed, holes, packed.to_padded(), nested(parts)):
        assert len(tokens) == 3 and tokens.d == D_MODEL and tokens.dtype == torch.float32
        assert tokens.device == torch.device("cpu")
        assert tokens.lengths.tolist() == [2, 0, 5] and tokens.lengths.dtype == torch.int32
    assert full.lengths.tolist() == [3, 3]
    assert (packed.max_length, holes.max_length, full.max_length) == (5, 8, 3)
    assert Tokens.packed(packed.values, packed.offsets, 9).max_length == 9
    assert Tokens.packed(packed.values.to("meta"), packed.offsets.to("meta")).max_length is None
    assert repr(packed) == "Tokens(3 sequences, 7 tokens packed, d=24, float32, cpu, max_length=5)"
    assert repr(holes) == "Tokens(3 sequences, padded to 8 with a mask, d=24, float32, cpu)"
    assert repr(full) == "Tokens(2 sequences, padded to 3, d=4, bfloat16, cpu)"


@pytest.mark.parametrize("form", ["packed", "padded", "holes", "nested"])
def test_indexing(form, device):
    parts = sequences([2, 0, 5, 1, 1], device)
    tokens = FORMS[form](parts)
    assert all(torch.equal(got, want) for got, want in zip(tokens, parts, strict=True))
    for i in range(-5, 5):
        assert torch.equal(tokens[i], parts[i])
    for chosen in (slice(None), slice(1, 3), slice(-2, None), slice(4, 2), slice(3, 99)):
        part = tokens[chosen]
        assert part.is_packed == tokens.is_packed and len(part) == len(parts[chosen])
        assert all(torch.equal(got, want) for got, want in zip(part, parts[chosen], strict=True))
    assert tokens[2:4].values.data_ptr() == tokens.values[2:].data_ptr()
    for bad in (5, -6):
        with pytest.raises(IndexError, match=f"index {bad} is out of range for 5 sequences"):
            tokens[bad]
    with pytest.raises(TypeError, match="by an int or a slice, got 'a'"):
        tokens["a"]
    with pytest.raises(ValueError, match="a step of 1, got 2"):
        tokens[::2]


def test_layouts_turn_into_each_other(device):
    parts = sequences([2, 0, 5], device)
    for form in ("packed", "padded", "holes", "nested"):
        tokens = FORMS[form](parts)
        packed, padded_ = tokens.pack(), tokens.to_padded()
        assert torch.equal(packed.values, torch.cat(parts)) and packed.offsets.tolist() == [0, 2, 2, 7]
        assert all(torch.equal(got, want) for got, want in zip(padded_, parts, strict=True))
        assert all(
            torch.equal(got, want) for got, want in zip(tokens.to_nested().unbind(), parts, strict=True)
        )
        assert (tokens.pack() if tokens.is_packed else tokens.to_padded()) is tokens
    assert not Tokens.from_list(parts).to_padded().values[0, 2:].any()
    full = Tokens(torch.ones(2, 3, 4, device=device)).pack()
    assert full.offsets.tolist() == [0, 3, 6] and full.max_length == 3
    assert Tokens.from_list(sequences([0, 0], device)).to_padded().values.shape == (2, 0, D_MODEL)


def test_jagged_tensors_come_and_go_without_a_copy(device):
    parts = sequences([2, 0, 5], device)
    jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    tokens = Tokens.from_nested(jagged)
    assert tokens.values.data_ptr() == jagged.values().data_ptr()
    assert tokens.offsets.data_ptr() == jagged.offsets().data_ptr()
    back = tokens.to_nested()
    assert back.values().data_ptr() == jagged.values().data_ptr()
    assert back.offsets().data_ptr() == jagged.offsets().data_ptr()
    values = torch.cat(parts).requires_grad_()
    again = Tokens.from_nested(torch.nested.nested_tensor_from_jagged(values, tokens.offsets))
    again.to_nested().values().sum().backward()
    assert values.grad.unique().tolist() == [1]


def test_moving_and_converting():
    for tokens in (Tokens.from_list(sequences([2, 3])), with_holes(sequences([2, 3]))):
        half = tokens.to(torch.float16)
        assert half.dtype == torch.float16 and half.max_length == tokens.max_length
        assert half.lengths.tolist() == [2, 3]
        meta = tokens.to("meta", torch.float32)
        assert {x.device.type for x in pytree.tree_leaves(meta)} == {"meta"}
        assert meta.dtype == torch.float32
        with pytest.raises(TypeError, match="values must be bfloat16"):
            tokens.to(torch.int32)


@pytest.mark.gpu
def test_moving_to_a_gpu_from_pinned_memory():
    for tokens in (Tokens.from_list(sequences([2, 3])), with_holes(sequences([2, 3]))):
        pinned = tokens.pin_memory()
        assert pinned.values.is_pinned()
        moved = pinned.to("cuda", non_blocking=True)
        assert {x.device.type for x in pytree.tree_leaves(moved)} == {"cuda"}
        assert moved.lengths.tolist() == [2, 3] and moved.max_length == tokens.max_length


TOO_FEW = torch.tensor([0, 2, 4])
V2, V3 = torch.ones(5, 4), torch.ones(2, 3, 4)
BAD = {
    "values is a list": (lambda: Tokens([1.0]), TypeError, ["values", "torch.Tensor", "list"]),
    "values are integers": (lambda: Tokens(V3.int()), TypeError, ["values", "bfloat16", "int32"]),
    "values of rank 2": (lambda: Tokens(V2), ValueError, ["values", "[N, L, d]", "[5, 4]", "packed"]),
    "values of rank 4": (lambda: Tokens(V3[None]), ValueError, ["values", "[N, L, d]", "[1, 2, 3, 4]"]),
    "values without dims": (lambda: Tokens(V3[..., :0]), ValueError, ["values", "at least 1", "[2, 3, 0]"]),
    "mask of another shape": (lambda: Tokens(V3, V3[..., 0, 0] > 0), ValueError, ["mask", "[2, 3]", "[2]"]),
    "mask of floats": (lambda: Tokens(V3, V3[..., 0]), TypeError, ["mask", "bool", "torch.float32"]),
    "mask elsewhere": (
        lambda: Tokens(V3, (V3[..., 0] > 0).to("meta")), ValueError, ["mask", "values", "cpu", "meta"],
    ),
    "packed of rank 3": (lambda: Tokens.packed(V3, TOO_FEW), ValueError, ["values", "[tokens, d]"]),
    "offsets of floats": (
        lambda: Tokens.packed(V2, torch.tensor([0.0, 5.0])), TypeError, ["offsets", "int32", "float32"],
    ),
    "no offsets": (lambda: Tokens.packed(V2, TOO_FEW[:0]), ValueError, ["offsets", "[N + 1]", "[0]"]),
    "offsets of rank 2": (lambda: Tokens.packed(V2, TOO_FEW[None]), ValueError, ["offsets", "[N + 1]"]),
    "offsets that end early": (
        lambda: Tokens.packed(V2, TOO_FEW), ValueError, ["offsets", "end with", "5", "got 0 and 4"],
    ),
    "offsets that begin late": (
        lambda: Tokens.packed(V2, torch.tensor([1, 5])), ValueError, ["begin with 0", "got 1 and 5"],
    ),
    "offsets that fall": (
        lambda: Tokens.packed(V2, torch.tensor([0, 4, 3, 5])), ValueError, ["offsets[2] = 3 after 4"],
    ),
    "offsets elsewhere": (
        lambda: Tokens.packed(V2, TOO_FEW.to("meta")), ValueError, ["offsets", "values", "cpu", "meta"],
    ),
    "max_length too small": (
        lambda: Tokens.packed(V2, torch.tensor([0, 4, 5]), 3), ValueError, ["max_length", "at least 4", "3"],
    ),
    "max_length no int": (
        lambda: Tokens.packed(V2, torch.tensor([0, 5]), 5.0), TypeError, ["max_length", "int", "float"],
    ),
    "no sequence": (lambda: Tokens.from_list([]), TypeError, ["sequences", "at least one"]),
    "sequences without dims": (
        lambda: Tokens.from_list([V2[:, :0]]), ValueError, ["sequences[0]", "d of at least 1", "[5, 0]"],
    ),
    "sequences of several dims": (
        lambda: Tokens.from_list([V2, V2[:, :3]]), ValueError, ["sequences[1]", "[L, 4]", "[5, 3]"],
    ),
    "sequences of several dtypes": (
        lambda: Tokens.from_list([V2, V2.double()]), TypeError, ["sequences[1]", "float32", "float64"],
    ),
    "nested that is dense": (lambda: Tokens.from_nested(V3), TypeError, ["nested", "jagged", "[2, 3, 4]"]),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_is_said(bad):
    make, error, words = BAD[bad]
    refused(error, words, make)


def test_sequences_that_are_jagged_elsewhere_are_refused():
    jagged = torch.nested.as_nested_tensor(sequences([2, 3]), layout=torch.jagged)
    with pytest.raises(ValueError, match="with j the jagged dim"):
        Tokens.from_nested(jagged.transpose(1, 2))
    with pytest.raises(ValueError, match="contiguous"):
        Tokens.from_nested(
            torch.nested.narrow(V3, 1, torch.tensor([1, 0]), torch.tensor([1, 2]), torch.jagged)
        )


@pytest.mark.parametrize("function", [li.maxsim, li.maxsim_pairs, li.maxsim_with_winners, li.smooth_maxsim])
def test_calls_that_do_not_fit(function):
    q = Tokens.from_list(sequences([2, 3], dtype=torch.float32))
    mask = torch.ones(2, 3, dtype=torch.bool)
    cases = [
        (ValueError, r"q_mask must be None where Q is Tokens or a list, .* got a torch.bool tensor \[2, 3\]",
         lambda: function(q, q, mask)),
        (ValueError, "d_mask must be None where D is Tokens", lambda: function(V3, [*q], None, mask)),
        (TypeError, "Q and D must share a dtype", lambda: function(q, q.to(torch.float64))),
        (ValueError, "embedding dim d", lambda: function(q, V3)),
        (TypeError, r"D\[1\] must be torch.float32", lambda: function(q, [q[0], q[1].double()])),
        (TypeError, "D must be a torch.Tensor, got NoneType", lambda: function(q, None)),
        (ValueError, r"must be .*\[24\]", lambda: function(q, q.values[0])),
        (TypeError, "normalize must be True or False", lambda: function(q, q, normalize=1)),
    ]  # fmt: skip
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()


def test_pairs_need_as_many_of_both():
    q, d = sequences([2, 3]), sequences([2, 3, 4])
    with pytest.raises(ValueError, match="as many documents as queries, got 3 and 2"):
        li.maxsim_pairs(q, d)
    with pytest.raises(ValueError, match="D must hold 3 documents for each of the 2 queries, got 12"):
        li.maxsim(q, torch.ones(4, 3, 5, D_MODEL, dtype=torch.float64))
