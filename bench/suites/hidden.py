"""MaxSim from hidden states: our fused head beside linear + normalize + our maxsim, and beside
late-interaction-kernels, scores alone and with all gradients."""

from functools import partial

import torch
import torch.nn.functional as F

import late_interaction as li
from bench.harness.inputs import draw
from bench.harness.library import LIK, OURS
from bench.harness.measuring import function
from bench.harness.parity import reference_scores
from bench.harness.planted import gradients, plant_shape
from bench.harness.shape import Shape
from late_interaction._doctor.timing import sets_of_bytes
from late_interaction.fused_head import maxsim_from_hidden

FUSED, UNFUSED = "fused", "unfused"
VARIANTS = (FUSED, UNFUSED)
# The limit is higher than that of other gradients because projected rows, and unfused normalized rows, are
# rounded to bf16 too. On a CPU the error is 3.4e-3 fused, 4.2e-3 unfused, and 5.2e-3 unfused at d = 16.
GRADIENTS = 6e-3


def _project(H, W):
    return F.normalize(F.linear(H, W), dim=-1)


def _unfused(Q, H, W):
    return li.maxsim(Q, _project(H, W))


def _known(shape, W, grad_scores):
    """Q, hidden states that W projects to planted tokens, and W; with their fp64 gradients."""
    planted = plant_shape(shape, W.device, torch.float32)
    planted.Q = planted.Q.to(W.dtype)
    inverse = torch.linalg.pinv(W.float()).T  # [d, d_model]
    H = torch.randn(planted.D.shape[0], shape.d_model, device=W.device)
    H += (shape.d**0.5 * planted.D - H @ W.float().T) @ inverse  # W projects H to the planted tokens alone
    H = H.to(W.dtype)
    W64 = W.double().requires_grad_()
    wanted = gradients(planted, grad_scores, H, lambda rows: _project(rows, W64), (W64,))
    return (planted.Q.view(shape.q_shape), H.view(shape.hidden_shape), W), grad_scores, wanted


def measure(b):
    shape = b.shape
    device, dtype = b.settings.device, b.settings.dtype
    drawn = draw(Shape(shape.name, shape.Nq, shape.Nd, shape.Lq, 1, shape.d), device, dtype)
    W = (torch.randn(shape.d, shape.d_model, device=device) / shape.d_model**0.5).to(dtype)
    count = sets_of_bytes(shape.input_bytes(W.element_size()), b.settings.cache_bytes)
    sets = [(drawn.Q, torch.randn(shape.hidden_shape, device=device, dtype=dtype), W) for _ in range(count)]
    D = torch.cat([_project(part.double(), W.double()) for part in sets[0][1].split(16)])
    wanted = reference_scores(shape, drawn.Q, D)[0]
    known = _known(shape, W, drawn.grad_scores)
    fused = partial(maxsim_from_hidden, normalize=True)
    heads = [(OURS, UNFUSED, lambda: _unfused), (OURS, FUSED, lambda: fused)]
    if b.has(LIK):
        theirs = partial(function, "late_interaction_kernels.fused_head", "maxsim_from_hidden")
        heads.append((LIK, FUSED, theirs))
    more = {"d_model": shape.d_model}
    steps = [(x, drawn.grad_scores) for x in sets]
    rows = b.measure([b.forward(*head, sets, wanted, **more) for head in heads])
    return rows + b.measure([b.step(*head, steps, wanted, known, limit=GRADIENTS, **more) for head in heads])
