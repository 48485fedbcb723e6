"""The kernels for older GPUs, run on a newer one: cuda_capability plans every call as for an older device."""

import threading

import pytest
import torch

import late_interaction as li
from late_interaction import ops
from tests.support import ref
from tests.support.cases import Case, call, inputs, walk
from tests.support.judge import Judge

CASES = [
    *(case for case in list(walk(150))[1::5] if case.dtype in (torch.bfloat16, torch.float16)),
    *(
        Case(layout, 9, 9, Lq, 300, 128, dtype, masks, normalize=normalize)
        for layout, Lq, dtype, masks, normalize in (
            ("in-batch", 32, torch.bfloat16, "none", False),
            ("in-batch", 32, torch.float16, "holes", False),
            ("in-batch", 130, torch.bfloat16, "dead", True),
            ("KD", 32, torch.bfloat16, "none", True),
            ("KD", 130, torch.float16, "holes", False),
            ("pairs", 32, torch.float16, "dead", False),
            ("pairs", 300, torch.bfloat16, "none", True),
        )
    ),
    Case("in-batch", 1, 40, 32, 300, 128, torch.bfloat16, "holes"),
    Case("in-batch", 1, 40, 128, 300, 768, torch.bfloat16, "none"),
    Case("in-batch", 5, 5, 33, 70, 128, torch.float32, "holes"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("sm", [75, 80, 86, 120])  # 64, 164 and 100 KiB of shared memory; 12.0 has 100 too
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_and_gradients_agree_with_float64_and_with_the_native_kernels(case, sm, planned_as):
    planned_as(0)
    judge = Judge(*inputs(case, "cuda"), normalize=case.normalize, case=case)
    native, _ = judge.check()
    planned_as(sm)
    judge.check()
    Q, D, *masks = judge.inputs
    leaves = Q.detach().requires_grad_(), D.detach().requires_grad_()
    for backward in ("lowmem", "unified"):
        scores, winners = call(li.maxsim_with_winners, case, *leaves, *masks, backward=backward)
        ref.assert_close(scores, native.double(), ref.tolerance(case.dtype), "scores of the native kernels")
        limit = (2 if case.d == 8 else 1) * ref.GRAD_TOLERANCE[case.dtype]
        ref.assert_gradients(scores, *leaves, winners, limit, case.normalize)


def kernels(function):
    """Names of the CUDA kernels that `function` launches."""
    from torch.profiler import ProfilerActivity, profile

    function()  # loads them
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    return " ".join(event.key for event in found.key_averages())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 32), (9, 130)], ids=["one short query", "many rows"])
def test_the_forced_kernel_is_the_one_that_runs_and_the_one_that_is_explained(shape, planned_as):
    Nq, Lq = shape
    planned_as(0)
    own = ops.cuda_capability()
    Q = torch.randn(Nq, Lq, 128, device="cuda", dtype=torch.bfloat16)
    D = torch.randn(40, 300, 128, device="cuda", dtype=torch.bfloat16)
    native = li.explain_plan(Q, D)
    gpu = torch.cuda.get_device_properties()
    here = {"sm_count": gpu.multi_processor_count, "geforce": "GeForce" in gpu.name}
    planned_as(80)
    assert ops.cuda_capability() == 80
    assert li.explain_plan(Q, D) == li.explain_plan(Q, D, sm=80, **here)
    assert "maxsim_forward_sm80" in li.explain_plan(Q, D)
    ran = kernels(lambda: li.maxsim(Q, D))
    if "maxsim" not in ran:
        pytest.skip("the profiler sees no kernels here")
    assert "maxsim_forward_sm80" in ran and "sm90" not in ran
    planned_as(0)
    assert ops.cuda_capability() == own and li.explain_plan(Q, D) == native
    assert ("sm90" in native) == ("sm90" in kernels(lambda: li.maxsim(Q, D)))


@pytest.mark.gpu
def test_forcing_in_one_thread_leaves_the_results_of_others_right(planned_as):
    planned_as(80)
    Q = torch.randn(9, 33, 128, device="cuda", dtype=torch.bfloat16)
    D = torch.randn(7, 130, 128, device="cuda", dtype=torch.bfloat16)
    expected = ref.maxsim(Q, D)[0]
    stop = threading.Event()

    def flip():
        while not stop.is_set():
            ops.cuda_capability(80)
            ops.cuda_capability(0)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for _ in range(300):
            ref.assert_close(li.maxsim(Q, D), expected, ref.tolerance(Q.dtype))
    finally:
        stop.set()
        thread.join()


@pytest.mark.gpu
@pytest.mark.parametrize("value", [-80, 1, 70, 79, 88, 1000, 2**40])
def test_what_cannot_be_forced(value, planned_as):
    planned_as(0)
    with pytest.raises(ValueError, match=f"cuda_capability takes 0, or a known .* got {value}"):
        ops.cuda_capability(value)
    assert ops.cuda_capability() == ops.cuda_capability(0)
