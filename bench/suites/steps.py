"""Times the options of our training step, and the host's share of small calls."""

import statistics
from dataclasses import dataclass, replace
from functools import cache, partial
from types import FunctionType

import torch
import torch.nn.functional as F

import late_interaction as li
from bench.harness.inputs import Inputs, draw
from bench.harness.library import EINSUM, OURS, training_step
from bench.harness.measuring import Function, Tensors, judged
from bench.harness.named_shapes import COMPILED_STEPS
from bench.harness.parity import reference_scores
from bench.harness.planted import every_pair, gradients, known_step, plant_shape
from bench.harness.shape import PAIRS
from late_interaction._doctor.timing import gpu_time, wall_times

# ---- the options of a step ----

PLAIN, RECOMPUTE, HIGH, AUTOCAST = "plain", "winners recomputed", "float32, high", "float32, autocast"
WEIGHTS, LEARNED = "q_weights", "q_weights learned"
ONE_THREAD, COMPILED, GRAPH = "one thread", "torch.compile", "CUDA graph"
STEPS = (PLAIN, WEIGHTS, LEARNED, RECOMPUTE, HIGH, AUTOCAST, ONE_THREAD, COMPILED, GRAPH)


def _maxsim(shape):
    return li.maxsim_pairs if shape.layout == PAIRS else li.maxsim


def _autocast(maxsim):
    def scores(Q, D):
        with torch.autocast(Q.device.type, torch.bfloat16):
            return maxsim(Q, D)

    return scores


def _compiled(maxsim):
    torch.compiler.reset()
    return torch.compile(maxsim, fullgraph=True, dynamic=False)


def _in_one_thread(call):
    """The call without autograd's own thread for the device."""
    with torch.autograd.set_multithreading_enabled(False):
        return call()


def _replayed(call):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def run():
        graph.replay()
        return out

    return run


def _weighted(b, learned):
    """With weights of the query tokens, and with their gradient where they are learned."""
    maxsim, sets, shape = _maxsim(b.shape), b.sets(torch.bfloat16), b.shape
    weights = 0.5 + torch.rand(shape.q_shape[:-1], device=b.settings.device)
    own = (weights,) if learned else ()
    grad, planted = sets[0].grad_scores, plant_shape(shape, b.settings.device, torch.bfloat16)
    tokens, each = planted.Q.double(), weights.double().view(-1, 1)
    of_weighted, of_D = gradients(replace(planted, Q=tokens * each), every_pair(shape, grad))
    exact = [of_weighted * each, of_D, (of_weighted * tokens).sum(-1)][: 2 + len(own)]
    wanted = reference_scores(shape, *sets[0].tokens, weights)[0]
    known = (planted.Q.view(shape.q_shape), planted.D.view(shape.d_shape), *own), grad, exact

    def scores(Q, D, w=weights):
        return maxsim(Q, D, q_weights=w)

    steps = [((*x.tokens, *own), x.grad_scores) for x in sets]
    variant = LEARNED if learned else WEIGHTS
    return b.step(OURS, variant, lambda: scores, steps, wanted, known, dtype=torch.bfloat16)


def measure_steps(b):
    """Weights of query tokens and their gradient, recomputed winners, float32 inputs at "high" and under
    autocast. And what the host adds, in wall time alone: eager, in one thread, compiled, as a CUDA graph."""
    maxsim = _maxsim(b.shape)

    def known(dtype):
        sets = b.sets(dtype)
        wanted = reference_scores(b.shape, *sets[0].tokens)[0]
        return [x.step for x in sets], wanted, known_step(b.shape, sets[0].grad_scores, dtype)

    halves, singles = known(torch.bfloat16), known(torch.float32)

    def step(variant, make, inputs=halves, **options):
        dtype = torch.bfloat16 if inputs is halves else torch.float32
        return b.step(OURS, variant, make, *inputs, dtype=dtype, **options)

    def host(variant, change):
        timed = step(variant, lambda: maxsim, on_gpu=False)
        prepare = timed.prepare
        timed.prepare = lambda: [change(call) for call in prepare()[: 1 if variant == GRAPH else None]]
        return timed

    timed = [
        step(PLAIN, lambda: maxsim), _weighted(b, learned=False), _weighted(b, learned=True),
        step(RECOMPUTE, lambda: partial(maxsim, winners="recompute")),
        step(HIGH, lambda: partial(maxsim, precision="high"), singles),
        step(AUTOCAST, lambda: _autocast(maxsim), singles),
        host(ONE_THREAD, lambda call: partial(_in_one_thread, call)),
    ]  # fmt: skip
    if b.settings.on_gpu:
        timed.append(host(GRAPH, _replayed))
    if b.settings.compiles and b.shape.name in COMPILED_STEPS:
        compiled = _compiled(maxsim)
        timed.append(step(COMPILED, lambda: compiled, on_gpu=False))
    return b.measure(timed)


# ---- small calls beside PyTorch's own product of two matrices, on which the GPU spends next to nothing ----

EAGER, LOSS, LOSS_COMPILED, REDUCED = "eager", "loss", "loss, compiled", "loss, reduce-overhead"
HOST = (EAGER, LOSS, LOSS_COMPILED, REDUCED)
HOST_PEERS = (EINSUM,)  # PyTorch's own operators
EDGE = 128  # rows and columns of the matrices


def _product(Q, D):
    return Q @ D


def _loss(score):
    def loss(Q, D):
        scores = score(Q, D)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return F.cross_entropy(scores / 0.5, torch.arange(len(Q), device=Q.device))

    return loss


def _compiled_loss(score, mode=None):
    """A loss compiled on code of its own: a call would check the guards of all that share its code."""
    found = _loss(score)
    own = FunctionType(
        found.__code__.replace(), found.__globals__, found.__name__, found.__defaults__, found.__closure__
    )
    compiled = torch.compile(own, fullgraph=True, dynamic=False, mode=mode)

    def run(Q, D):
        torch.compiler.cudagraph_mark_step_begin()  # nobody reads what the step before returned
        return compiled(Q, D)

    return run if mode else compiled


def _losses(settings):
    ways = {LOSS: _loss}
    if settings.compiles:
        ways[LOSS_COMPILED] = _compiled_loss
    if settings.compiles and settings.on_gpu:
        ways[REDUCED] = partial(_compiled_loss, mode="reduce-overhead")
    return ways


@dataclass
class _Side:
    """A function of two tensors, inputs to time with their exact scores, and others with known gradients."""

    impl: str
    score: Function
    timed: Inputs
    wanted: torch.Tensor
    known: Inputs
    exact: Tensors  # gradients of a step
    exact_loss: Tensors  # gradients of a loss


def _ours(b):
    timed = draw(b.shape, b.settings.device, b.settings.dtype)
    planted = plant_shape(b.shape, b.settings.device, b.settings.dtype)
    known = Inputs(planted.Q.view(b.shape.q_shape), planted.D.view(b.shape.d_shape), timed.grad_scores)
    scores = reference_scores(b.shape, *known.tokens)[0].requires_grad_()
    (of_scores,) = torch.autograd.grad(_loss(lambda Q, D: scores)(*known.tokens), scores)
    exact, exact_loss = gradients(planted, known.grad_scores), gradients(planted, of_scores)
    wanted = reference_scores(b.shape, *timed.tokens)[0]
    return _Side(OURS, li.maxsim, timed, wanted, known, exact, exact_loss)


def _theirs(settings):
    a, b, grad = (torch.randn(EDGE, EDGE, device=settings.device).to(settings.dtype) for _ in range(3))
    inputs = Inputs(a / EDGE**0.5, b / EDGE**0.5, grad)
    leaves = tuple(x.double().requires_grad_() for x in inputs.tokens)
    wanted, *exact = training_step(_product, leaves, grad.double())()
    exact_loss = torch.autograd.grad(_loss(_product)(*leaves), leaves)
    return _Side(EINSUM, _product, inputs, wanted, inputs, exact, exact_loss)


def _calls(b, side):
    """A forward, a step, and the step of each loss, whose gradient is 1."""
    yield b.forward(side.impl, EAGER, lambda: side.score, [side.timed.tokens], side.wanted)
    x, known = side.timed, side.known
    yield b.step(side.impl, EAGER, lambda: side.score, [x.step], side.wanted, (*known.step, side.exact))
    wanted = _loss(lambda Q, D: side.wanted)(*x.tokens)
    for variant, way in _losses(b.settings).items():
        make = cache(partial(way, side.score))
        of_known = known.tokens, None, side.exact_loss
        yield b.step(side.impl, variant, make, [(x.tokens, None)], wanted, of_known)


def measure_host(b):
    """Our forward and step, and a loss around maxsim, eager and compiled, beside the same of the product.
    Wall time of calls that take turns in short rounds; the GPU time of eager calls, which is taken before
    anything is compiled, says how much is the host's."""
    torch.compiler.reset()
    settings, rows, ready = b.settings, [], []
    for pair in zip(_calls(b, _ours(b)), _calls(b, _theirs(settings)), strict=True):
        for timed in pair:
            rows.append(timed.row)
            if (calls := judged(settings, timed)) is None:
                continue
            ready.append((timed.row, calls))
            if timed.row["variant"] == EAGER and settings.on_gpu:
                timed.row.update(gpu_time(calls, settings.effort).row())
    times = wall_times([calls for _, calls in ready], settings.effort, settings.device)
    for (row, _), mine in zip(ready, times, strict=True):
        row["wall_us"], row["wall_least_us"] = statistics.median(mine), min(mine)
    return rows
