"""Every operator as a citizen of PyTorch: schema, fake kernel and autograd agree (opcheck), and what it lacks
(a gradient, a second one, forward mode, vmap) it says."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad

import late_interaction  # noqa: F401  # registers the operators
from tests.support.operator_calls import CALLS, NATIVE, OF_CUDA, Given

OPS = torch.ops.late_interaction
# They return no tensor, or a word that depends on the device: opcheck has nothing to compare.
WORDS = {"explain_plan", "explain_packed_plan", "explain_residual_plan", "cpu_isa", "cuda_capability",
         "forced_plan", "can_project_rows", "can_softmax_product_rows"}  # fmt: skip
NAMES = [name for name in CALLS if name not in WORDS]
BACKWARDS = [name for name in NAMES if "_backward" in name and not name.endswith(("_into_", "_no_autograd"))]
DIFFERENTIABLE = [
    f"{name}{ending}"
    for name in (
        *("maxsim", "maxsim_weighted", "maxsim_varlen", "maxsim_varlen_weighted", "maxsim_pairs_packed"),
        *("maxsim_pairs_packed_weighted", "maxsim_residual", "maxsim_from_hidden"),
    )
    for ending in ("", "_winners")
] + ["smooth_maxsim", "xtr_winners"]  # fmt: skip
# Without weights, and their backward.
TWICE = {"maxsim", "maxsim_winners", "xtr_winners", "maxsim_backward", "maxsim_backward_recompute"}
SCORES = [*DIFFERENTIABLE, "maxsim_spans", "maxsim_quantized", "maxsim_dequantized", "maxsim_hamming",
          "maxsim_asymmetric", "maxsim_quantized_packed", "maxsim_hamming_packed", "maxsim_asymmetric_packed",
          "plaid_approx_score"]  # fmt: skip


def made(call, device, generator):
    """Return the arguments of a call."""
    return [x.make(x.sizes, device, generator) if isinstance(x, Given) else x for x in call]


def flat(results):
    return list(results) if isinstance(results, tuple | list) else [results]


def on_devices(names, not_on_cpu=frozenset(OF_CUDA | NATIVE)):
    """Run a test of operators on the CPU and on GPUs that have them."""
    marks = {name: [pytest.mark.gpu, *[pytest.mark.native] * (name in NATIVE)] for name in names}
    on_cpu = [(name, "cpu") for name in names if name not in not_on_cpu]
    on_cuda = [pytest.param(name, "cuda", marks=marks[name]) for name in names]
    return pytest.mark.parametrize(("name", "device"), [*on_cpu, *on_cuda])


def is_differentiated(given, value):
    return isinstance(given, Given) and not given.written and value.dtype in (
        torch.float32, torch.float64, torch.bfloat16,
    )  # fmt: skip


def calls(name, device, grad=False):
    """The arguments of each call; grad: those of floating point require a gradient."""
    generator = torch.Generator().manual_seed(3)
    for call in CALLS[name]:
        values = made(call, device, generator)
        for given, value in zip(call, values, strict=True):
            if grad and is_differentiated(given, value):
                value.requires_grad_()
        yield call, values


# tests/training/test_softmax_products.py checks the last one with labels and temperatures that it is for.
@on_devices([name for name in NAMES if name != "softmax_product_rows_"])
def test_opcheck(name, device):
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for _, values in calls(name, device):
        # PyTorch compares tensors before and after a call to test the schema, and cannot compare fp8 ones.
        fp8 = any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in values)
        torch.library.opcheck(getattr(OPS, name).default, tuple(values), test_utils=checks[1 if fp8 else 0 :])


@on_devices(DIFFERENTIABLE)
def test_opcheck_with_gradients(name, device):
    """Scores have a gradient, winners have none, and few gradients are differentiated again."""
    for _, values in calls(name, device, grad=True):
        torch.library.opcheck(getattr(OPS, name).default, tuple(values))
        scores, *winners = flat(getattr(OPS, name)(*values))
        assert scores.requires_grad and not any(x.requires_grad for x in winners)
        leaves = [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]
        grads = torch.autograd.grad(scores.square().sum(), leaves, create_graph=True, allow_unused=True)
        total = sum(x.sum() for x in grads if x is not None)
        if name in TWICE and len(leaves) == 2:
            total.backward()
            assert all(x.grad is not None for x in leaves)
            continue
        with pytest.raises(RuntimeError, match=r"double backward of .* is not supported: differentiate"):
            total.backward()


@on_devices(BACKWARDS)
def test_gradients_that_are_not_needed_have_no_elements(name, device):
    names = [argument.name for argument in getattr(OPS, name).default._schema.arguments]
    needs = [i for i, argument in enumerate(names) if argument.startswith("need_")]
    for _, values in calls(name, device):
        whole = flat(getattr(OPS, name)(*(True if i in needs else x for i, x in enumerate(values))))
        for wanted in itertools.product((True, False), repeat=len(needs)):
            if len(wanted) > 2 and wanted[2] and not wanted[0]:
                continue  # that of the weights comes of grad_Q
            given = dict(zip(needs, wanted, strict=True))
            values = [given.get(i, x) for i, x in enumerate(values)]
            found = flat(getattr(OPS, name)(*values))
            for one, other, need in zip(found, whole, wanted, strict=False):
                assert one.numel() == 0 if not need else torch.allclose(one, other, rtol=1e-5, atol=1e-5)
            torch.library.opcheck(getattr(OPS, name).default, tuple(values), test_utils=["test_faketensor"])


@on_devices([x for x in NAMES if x not in DIFFERENTIABLE and not x.endswith("_no_autograd")])
def test_a_wish_for_gradients_is_an_error(name, device):
    for call, values in calls(name, device, grad=True):
        if not any(is_differentiated(*pair) for pair in zip(call, values, strict=True)):
            continue
        if name in BACKWARDS:
            (grad, *_) = flat(getattr(OPS, name)(*values))
            if name in TWICE:
                grad.sum().backward()
                continue
            with pytest.raises(RuntimeError, match=r"double backward of .* is not supported"):
                grad.sum().backward()
        else:
            with pytest.raises(RuntimeError, match=rf"late_interaction\.{name}\.default has no gradients"):
                getattr(OPS, name)(*values)


@on_devices([name for name in NAMES if name.endswith("_no_autograd")])
def test_operators_without_autograd_record_nothing(name, device):
    other = getattr(OPS, name.removesuffix("_no_autograd"))
    for _, values in calls(name, device, grad=True):
        found = flat(getattr(OPS, name)(*values))
        assert not any(x.requires_grad for x in found)
        with torch.no_grad():
            assert all(map(torch.equal, found, flat(other(*values))))


@on_devices([name for name in NAMES if not name.endswith("_no_autograd")])
def test_forward_mode_is_an_error(name, device):
    for call, values in calls(name, device):
        places = [i for i, pair in enumerate(zip(call, values, strict=True)) if is_differentiated(*pair)]
        for i in places:
            with (
                forward_ad.dual_level(),
                pytest.raises(RuntimeError, match=r"no forward-mode derivative \(jvp\)"),
            ):
                dual = forward_ad.make_dual(values[i], torch.ones_like(values[i]))
                getattr(OPS, name)(*values[:i], dual, *values[i + 1 :])


@on_devices(SCORES)
def test_vmap_of_scores_is_an_error(name, device):
    for _, (first, *rest) in calls(name, device):
        with pytest.raises(RuntimeError, match="does not support vmap: it is batched already"):
            torch.func.vmap(lambda x, rest=rest: getattr(OPS, name)(x, *rest))(first.unsqueeze(0))


@on_devices([name for name in SCORES if name not in DIFFERENTIABLE])
def test_scores_of_codes_are_float32_whatever_autocast_says(name, device):
    for _, values in calls(name, device):
        plain = getattr(OPS, name)(*values)
        with torch.autocast(device, dtype=torch.bfloat16), torch.inference_mode():
            scores = getattr(OPS, name)(*values)
        assert scores.dtype == torch.float32 and scores.is_inference() and torch.equal(scores, plain)
