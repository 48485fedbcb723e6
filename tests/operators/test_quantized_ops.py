"""maxsim_quantized and maxsim_dequantized as citizens of PyTorch."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import late_interaction as li
from late_interaction import codecs
from late_interaction.lik import fp8
from late_interaction.ops import _blocks
from tests.cases import QUANTIZED, mask, tokens
from tests.operators.test_quantized import scales, score

OPS = torch.ops.late_interaction
NAMES = ["maxsim_quantized", "maxsim_dequantized"]


def arguments(device, dtype=torch.int8, layout="in-batch", masks=True, form="token"):
    Q = tokens((3, 5, 8), dtype, device)
    D = tokens((4, 7, 8) if layout == "in-batch" else (3, 2, 7, 8), dtype, device)
    kind = "holes" if masks else "none"
    return (
        *(Q, D, scales(Q.shape[:-1], device, form), scales(D.shape[:-1], device, form)),
        *(mask(Q.shape[:-1], device, kind), mask(D.shape[:-1], device, kind)),
    )


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
    assert torch.cuda.max_memory_allocated() - before < 3 * _blocks._BYTES


# ---- the way over dequantized tokens ----
