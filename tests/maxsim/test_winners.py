"""Winners as the operators keep them, 16 bits without a sign, and as users see them: int32 with -1."""

import pytest
import torch

import late_interaction as li
from late_interaction.ops.winners import narrow, packed_winner_dtype, widen, winner_dtype

OPS = torch.ops.late_interaction


@pytest.mark.parametrize("Ld", [1, 2, 32767, 32768, 32769, 40000, 65533, 65534, 65535, 70000])
def test_every_index_and_the_sentinel_come_back(Ld):
    """65,534 tokens have the indices up to 65,533: neither of the two that are left is one of them."""
    winners = torch.arange(-1, Ld, dtype=torch.int32)
    kept = narrow(winners, Ld)
    assert kept.dtype == winner_dtype(Ld) == (torch.int16 if Ld <= 65534 else torch.int32)
    assert torch.equal(widen(kept, Ld), winners) and (kept[1:] != -1).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("Ld", [5, 40000, 70000])
def test_what_is_no_token_of_the_document_becomes_the_sentinel(Ld, dtype):
    argmax = torch.tensor([-3, -1, 0, Ld - 1, Ld, Ld + 70000], dtype=dtype)
    assert widen(narrow(argmax, Ld), Ld).tolist() == [-1, -1, 0, Ld - 1, -1, -1]


@pytest.mark.parametrize("Ld", [32769, 65534, 65535])
def test_masked_tokens_of_long_documents_have_no_winner(device, Ld):
    """The first document's last token wins; the second query token and document are masked."""
    Q = torch.ones(1, 2, 1, device=device)
    D = torch.zeros(2, Ld, 1, device=device)
    D[:, -1] = 1
    q_mask = torch.tensor([[True, False]], device=device)
    d_mask = torch.tensor([True, False], device=device).unsqueeze(1).expand(2, Ld)
    _, winners = li.maxsim_with_winners(Q, D, q_mask, d_mask)
    assert winners.tolist() == [[[Ld - 1, -1], [-1, -1]]]


def of_documents(Ld):
    """{operator: its arguments} without values, with documents of ``Ld`` tokens."""

    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    Q, D, (cu_q, cu_d) = meta(2, 3, 8), meta(4, Ld, 8), (meta(n, dtype=torch.int32) for n in (3, 5))
    flat, pairs = (meta(6, 8), D[0], cu_q, cu_d), (meta(7, dtype=torch.int32),) * 2
    residuals = meta(4, Ld, dtype=torch.int32), meta(4, Ld, 2, dtype=torch.uint8), meta(4, dtype=torch.int32)
    return {
        "maxsim": (Q, D, None, None),
        "maxsim_weighted": (Q, D, Q[..., 0], None, None),
        "maxsim_varlen": (*flat, "highest"),
        "maxsim_varlen_weighted": (*flat[:2], meta(6), *flat[2:], "highest"),
        "maxsim_pairs_packed": (*flat, *pairs, 5),
        "maxsim_from_hidden": (Q, meta(4, Ld, 16), meta(8, 16), None, None, None),
        "maxsim_residual": (Q, *residuals, meta(7, 8), meta(4), 2, True, "highest"),
    }


@pytest.mark.parametrize("name", of_documents(1))
@pytest.mark.parametrize("Ld", [7, 65_534, 65_535])
def test_winners_of_fake_tensors_hold_every_index(Ld, name):
    args = of_documents(Ld)[name]
    scores, winners = getattr(OPS, f"{name}_winners")(*args)
    assert winners.dtype == winner_dtype(Ld) and scores.shape == getattr(OPS, name)(*args).shape
    rooms = {"varlen": 4 * 6, "pairs": 7 * 5}
    assert winners.numel() == next((n for word, n in rooms.items() if word in name), 2 * 4 * 3)


# ---- lengths that are symbols of a traced graph ----


@pytest.fixture
def shapes():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv()


def asserted(shapes):
    return {str(it.expr) for every in shapes.deferred_runtime_asserts.values() for it in every}


def test_a_length_that_depends_on_data_is_asserted_to_be_narrow(shapes):
    for least in (0, 65534):
        length = shapes.create_unbacked_symint()
        wanted = f"{length} <= 65534"
        torch._check(length >= least)
        assert winner_dtype(length) == torch.int16 and wanted in asserted(shapes)


@pytest.mark.parametrize(("least", "dtype"), [(1, torch.int16), (65535, torch.int32), (70000, torch.int32)])
def test_bounds_of_a_length_that_depends_on_data_count(shapes, least, dtype):
    length = shapes.create_unbacked_symint()
    torch._check(length >= least)
    torch._check(length <= max(least, 65534) + (least > 65534))
    before = asserted(shapes)
    assert winner_dtype(length) == packed_winner_dtype(length) == dtype
    assert asserted(shapes) == before


def test_packed_tokens_that_depend_on_data_have_wide_winners(shapes):
    assert packed_winner_dtype(shapes.create_unbacked_symint()) == torch.int32 and not asserted(shapes)


@pytest.mark.parametrize("kind", [winner_dtype, packed_winner_dtype])
@pytest.mark.parametrize(("length", "dtype"), [(5, torch.int16), (65534, torch.int16), (65535, torch.int32)])
def test_a_graph_of_other_lengths_is_traced_again_at_the_limit_alone(shapes, kind, length, dtype):
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource("Ld")
    symbol = shapes.create_symbol(length, source, DimDynamic.DYNAMIC)
    assert kind(shapes.create_symintnode(symbol, hint=length, source=source)) == dtype
    wanted = f"{symbol} <= 65534" if dtype == torch.int16 else f"{symbol} > 65534"
    assert [str(guard.expr) for guard in shapes.guards] == [wanted]


# ---- winners that a backward finds again ----


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("precision", "winner"), [("highest", 1), ("medium", 0)])
def test_gradients_go_to_the_winners_of_the_forwards_precision(precision, winner, weighted):
    """bfloat16 holds no number between 1 and 1.0078: the first of equal tokens wins."""
    Q, D = torch.ones(1, 1), torch.tensor([[1.0], [1.001]], requires_grad=True)
    cu_q, cu_d = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    if weighted:
        scores = OPS.maxsim_varlen_weighted(Q, D, torch.ones(1), cu_q, cu_d, precision)
    else:
        scores = OPS.maxsim_varlen(Q, D, cu_q, cu_d, precision)
    scores.sum().backward()
    assert D.grad.flatten().tolist() == [float(i == winner) for i in range(2)]
