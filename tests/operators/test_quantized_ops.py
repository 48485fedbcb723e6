"""maxsim_quantized and maxsim_dequantized as citizens of PyTorch."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import late_interaction as li
from late_interaction import codecs
from late_interaction.lik import fp8
from late_interaction.ops import quantized
from tests.cases import QUANTIZED, mask, tokens
from tests.operators.test_quantized import scales, score

OPS = torch.ops.late_interaction
NAMES = ["maxsim_quantized", "maxsim_dequantized"]
CHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]


def arguments(device, dtype=torch.int8, layout="in-batch", masks=True, form="token"):
    Q = tokens((3, 5, 8), dtype, device)
    D = tokens((4, 7, 8) if layout == "in-batch" else (3, 2, 7, 8), dtype, device)
    kind = "holes" if masks else "none"
    return (
        *(Q, D, scales(Q.shape[:-1], device, form), scales(D.shape[:-1], device, form)),
        *(mask(Q.shape[:-1], device, kind), mask(D.shape[:-1], device, kind)),
    )


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("form", ["token", "tensor"])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("layout", ["in-batch", "KD"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, layout, masks, form, dtype, device):
    # PyTorch compares tensors before and after a call to test the schema, and cannot compare fp8 ones.
    tests = CHECKS if dtype == torch.int8 else CHECKS[1:]
    args = arguments(device, dtype, layout, masks, form)
    torch.library.opcheck(getattr(OPS, name).default, args, test_utils=tests)


@pytest.fixture
def compiled_calls():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize("codec", [codecs.Int8(), codecs.Fp8()], ids=str)
def test_compile_from_embeddings_to_scores(codec, compiled_calls, device):
    def scored(Q, D, d_mask):
        return li.maxsim(Q, codec.encode(li.Tokens(D, d_mask))).topk(2).values

    compiled = torch.compile(scored, fullgraph=True, dynamic=True, backend=compiled_calls)
    for Nq, Nd, Lq, Ld, d in [(3, 4, 5, 7, 8), (5, 7, 9, 12, 16), (4, 6, 11, 130, 24)]:
        Q, D = torch.randn(Nq, Lq, d, device=device), torch.randn(Nd, Ld, d, device=device)
        d_mask = torch.rand(Nd, Ld, device=device) < 0.8
        torch.testing.assert_close(compiled(Q, D, d_mask), scored(Q, D, d_mask))
    assert compiled_calls.frame_count == 1


class Scores(torch.nn.Module):
    def forward(self, Q, D, scale_Q, scale_D):
        return fp8.maxsim_inference_fp8(Q, D, scale_Q=scale_Q, scale_D=scale_D)


def test_export(device):
    args = arguments(device, torch.float8_e4m3fn, masks=False)[:4]
    Nd, Ld = torch.export.Dim("Nd"), torch.export.Dim("Ld")
    program = torch.export.export(Scores(), args, dynamic_shapes=({}, {0: Nd, 1: Ld}, {}, {0: Nd, 1: Ld}))
    assert sum("late_interaction.maxsim" in str(node.target) for node in program.graph.nodes) == 1
    D = tokens((6, 33, 8), torch.float8_e4m3fn, device)
    args = args[0], D, args[2], scales((6, 33), device, "token")
    torch.testing.assert_close(program.module()(*args), Scores()(*args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*NAMES, "public"])
def test_autocast_changes_nothing(name, dtype, device):
    function = score if name == "public" else getattr(OPS, name)
    args = arguments(device)
    plain = function(*args)
    with torch.autocast(device, dtype=dtype):
        assert torch.equal(function(*args), plain)


@pytest.mark.parametrize("name", NAMES)
def test_a_wish_for_gradients_is_an_error(name, device):
    Q, D, scale_Q, scale_D, *masks = arguments(device, torch.float8_e4m3fn)
    for s, t in ((scale_Q.requires_grad_(), scale_D), (scale_Q.detach(), scale_D.requires_grad_())):
        with pytest.raises(RuntimeError, match=f"late_interaction.{name}.default has no gradients"):
            getattr(OPS, name)(Q, D, s, t, *masks)
        with pytest.raises(ValueError, match=r"scale_[QD] must not require a gradient"):
            fp8.maxsim_inference_fp8(Q, D, scale_Q=s, scale_D=t)
        with torch.no_grad():
            wanted = fp8.maxsim_inference_fp8(Q, D, scale_Q=s.detach(), scale_D=t.detach())
            assert torch.equal(fp8.maxsim_inference_fp8(Q, D, scale_Q=s, scale_D=t), wanted)
        assert torch.equal(score(Q, D, s, t), wanted)  # Codes are outside autograd


def test_forward_mode_is_an_error(device):
    Q, D, scale_Q, scale_D, *_ = arguments(device, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="scale_D must not require a gradient"):
        torch.func.jvp(
            lambda s: fp8.maxsim_inference_fp8(Q, D, scale_Q=scale_Q, scale_D=s), (scale_D,), (scale_D,)
        )
    Q, codec = torch.randn(2, 3, 8, device=device), codecs.Int8()
    with pytest.raises(RuntimeError, match="maxsim has no forward-mode derivative"):
        torch.func.jvp(lambda q: li.maxsim(q, codec.encode(Q)), (Q,), (Q,))


def test_inference_mode(device):
    args = arguments(device)
    with torch.inference_mode():
        scores = score(*args)
    assert scores.is_inference() and torch.equal(scores, score(*args))


@pytest.mark.parametrize("name", NAMES)
def test_vmap_is_an_error(name, device):
    Q, D, scale_Q, scale_D, *_ = arguments(device)
    with pytest.raises(RuntimeError, match="does not support vmap"):
        torch.func.vmap(lambda q: getattr(OPS, name)(q, D, scale_Q, scale_D, None, None))(
            Q.expand(2, 3, 5, 8)
        )


@pytest.mark.parametrize(
    "bad",
    [
        lambda Q, D, s, t: (Q[0], D, s, t, None, None),
        lambda Q, D, s, t: (Q, D[0], s, t, None, None),
        lambda Q, D, s, t: (Q, D[..., :-1], s, t, None, None),
        lambda Q, D, s, t: (Q, D.to(torch.float8_e5m2), s, t, None, None),
        lambda Q, D, s, t: (Q.float(), D.float(), s, t, None, None),
        lambda Q, D, s, t: (Q, D, s[:, :-1], t, None, None),
        lambda Q, D, s, t: (Q, D, s, t[0, :-1], None, None),
        lambda Q, D, s, t: (Q, D, s.int(), t, None, None),
        lambda Q, D, s, t: (Q, D, s, t.expand(2, 4, 7), None, None),
        lambda Q, D, s, t: (Q, D.expand(5, 4, 7, 8), s, t.expand(5, 4, 7), None, None),
        lambda Q, D, s, t: (Q, D, s, t, None, torch.ones(4, 7, device=Q.device)),
        lambda Q, D, s, t: (Q, D, s, t, torch.ones(3, 4, device=Q.device).bool(), None),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_raw_operators_check_too(name, bad, device):
    args = bad(*arguments(device)[:4])
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        getattr(OPS, name)(*args)


@pytest.mark.parametrize("name", NAMES)
def test_fake_scores_have_the_form_of_real_ones(name):
    args = arguments("cpu", layout="KD")
    fake = getattr(OPS, name)(*(x.to("meta") for x in args))
    assert fake.shape == (3, 2) and fake.dtype == torch.float32 and fake.device.type == "meta"


# ---- CUDA graphs, streams, memory ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("name", [*NAMES, "public"])
def test_cuda_graph_without_synchronization(name, dtype):
    function = score if name == "public" else getattr(OPS, name)
    Q, D = tokens((9, 33, 128), dtype, "cuda"), tokens((7, 300, 128), dtype, "cuda")
    scale_Q, scale_D = scales((9, 33), "cuda", "token"), scales((7, 300), "cuda", "token")
    args = Q, D, scale_Q, scale_D, None, mask((7, 300), "cuda", "holes")
    function(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*args)
    scale_D.mul_(0.5)
    graph.replay()
    assert torch.equal(captured, function(*args))


@pytest.mark.gpu
def test_copies_stay_small():
    # 256 MiB of codes, 1 GiB as float32.
    Q = tokens((2, 32, 128), torch.int8, "cuda")
    D = torch.ones(2**14, 128, 128, dtype=torch.int8, device="cuda")
    one = torch.ones((), device="cuda")
    OPS.maxsim_dequantized(Q, D[:1], one, one, None, None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    OPS.maxsim_dequantized(Q, D, one, one.expand(2**14, 128), None, None)
    assert torch.cuda.max_memory_allocated() - before < 3 * quantized._BYTES


# ---- the way over dequantized tokens ----


def codes_of(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("most", [1, 400, 64 << 20])
def test_dequantized_a_part_at_a_time(monkeypatch, own, per_token, most):
    monkeypatch.setattr(quantized, "_BYTES", most)
    Q, D = codes_of(3, 4, 8), codes_of(3, 5, 6, 8) if own else codes_of(2, 6, 8)
    scale_Q = torch.rand(3, 4) + 0.1
    scale_D = torch.rand(D.shape[:-1]) + 0.1 if per_token else torch.tensor(0.3)
    q_mask, d_mask = torch.rand(3, 4) < 0.7, torch.rand(D.shape[:-1]) < 0.7
    tokens = Q * scale_Q.unsqueeze(-1), D * (scale_D.unsqueeze(-1) if per_token else scale_D)
    for masks in ((None, None), (q_mask, d_mask)):
        got = quantized.maxsim_dequantized(Q, D, scale_Q, scale_D, *masks)
        torch.testing.assert_close(got, li.maxsim(*tokens, *masks, precision="highest"), rtol=2e-3, atol=2.0)


@pytest.mark.parametrize(("each", "slices"), [(3, [3, 3, 1]), (11, [1] * 7), (1, [7]), (0, [7])])
def test_copies_are_no_larger_than_they_may_be(each, slices, monkeypatch):
    monkeypatch.setattr(quantized, "_BYTES", 10 if each else 7)
    assert [len(range(7)[part]) for part in quantized._slices(7, each)] == slices


@pytest.mark.parametrize(
    ("documents", "blocks"),
    [
        ((200,), [(5, 64), (5, 64), (5, 64), (5, 8)]),
        ((5, 20), [(3, 20), (2, 20)]),
        ((5, 65), [(1, 64), (1, 1)] * 5),
        ((5, 64), [(1, 64)] * 5),
    ],
)
def test_a_float32_copy_takes_64_mebibytes(documents, blocks):
    """A document of codes takes 1 MiB as float32. There are 5 queries."""
    D = torch.empty(1, dtype=torch.int8).expand(*documents, 2048, 128)
    found = [(len(range(5)[i]), len(range(documents[-1])[j])) for i, j in quantized._blocks(D)]
    assert found == blocks


def test_a_scale_that_is_no_scale_makes_scores_nan():
    Q, D, scale_D = codes_of(1, 4, 8), codes_of(7, 6, 8), torch.ones(7, 6)
    for bad in (-0.5, -2.0, torch.inf, torch.nan):
        scale_D[2, 3] = bad
        found = quantized.maxsim_dequantized(Q, D, torch.ones(1, 4), scale_D, None, None)
        assert found.isnan().tolist() == [[i == 2 for i in range(7)]]
    zeros = quantized.maxsim_dequantized(Q, D, torch.zeros(1, 4), torch.ones(7, 6), None, None)
    assert torch.equal(zeros, torch.zeros(1, 7))


@pytest.mark.parametrize(("q", "d"), [((4, 8), (7, 6, 8)), ((1, 1, 4, 8), (7, 6, 8)), ((1, 4, 8), (6, 8))])
def test_ranks_that_the_operator_refuses(q, d):
    Q, D = codes_of(*q), codes_of(*d)
    with pytest.raises(ValueError, match=r"late_interaction: Q must be \[Nq, Lq, d\] and D"):
        quantized.maxsim_dequantized(Q, D, torch.ones(q[:-1]), torch.ones(d[:-1]), None, None)
