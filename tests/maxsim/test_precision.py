"""How float32 multiplies: PyTorch's switches, our keyword, and the error that each may have."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest
import torch

import late_interaction as li
from late_interaction import ops
from late_interaction._scoring.precision import float32_precision, float32_products, without_autocast
from tests.support import ref

OPS = torch.ops.late_interaction


def problem(device, d=128, dtype=torch.float32, queries=9, documents=7):
    Q, D = torch.randn(queries, 33, d, device=device), torch.randn(documents, 130, d, device=device)
    return tuple(torch.nn.functional.normalize(x, dim=-1).to(dtype) for x in (Q, D))


@pytest.mark.parametrize("queries", [9, 70])  # 70: rows enough that a GPU multiplies half-precision copies
@pytest.mark.parametrize("d", [20, 24, 128, 768])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("precision", ["highest", "high", "medium", "fp16"])
def test_error_level(precision, normalize, d, queries, device):
    if device == "cpu" and queries == 70 and precision != "high":
        pytest.skip("more queries are the same to the CPU's levels")
    Q, D = problem(device, d, queries=queries)
    scores, winners = ref.maxsim(Q, D, normalize=normalize)
    out, kept = OPS.maxsim_winners(Q, D, None, None, normalize, precision)
    limit = ref.tolerance(torch.float32, precision)
    ref.assert_close(out, scores, limit)
    ref.assert_winners_close(kept, winners, Q, D, limit)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_keyword_and_the_switch_say_the_same(precision, device):
    Q, D = problem(device)
    explicit = li.maxsim(Q, D, precision=precision)
    torch.set_float32_matmul_precision(precision)
    assert torch.equal(li.maxsim(Q, D), explicit)
    torch.set_float32_matmul_precision("medium" if precision == "highest" else "highest")
    assert torch.equal(li.maxsim(Q, D, precision=precision), explicit)


@pytest.mark.gpu
def test_each_level_is_worth_its_name():
    Q, D = problem("cuda", 768, queries=70)
    exact = ref.maxsim(Q, D)[0]
    highest, high, medium = (
        ref.relative_error(li.maxsim(Q, D, precision=p), exact) for p in ("highest", "high", "medium")
    )
    if ops.cuda_capability() >= 80:  # before, TF32 is multiplied as float32
        assert highest < high / 10
    assert highest <= high < medium
    einsum = torch.einsum("isd,jtd->ijst", Q, D).amax(-1).sum(-1)
    assert highest <= 2 * ref.relative_error(einsum, exact)


@pytest.mark.gpu
def test_few_rows_multiply_in_tf32():
    Q, D = problem("cuda")
    assert torch.equal(li.maxsim(Q, D, precision="medium"), li.maxsim(Q, D, precision="high"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_other_dtypes_multiply_as_they_are(dtype, precision, device):
    Q, D = problem(device, dtype=dtype)
    assert torch.equal(li.maxsim(Q, D, precision=precision), li.maxsim(Q, D))
    ref.assert_close(li.maxsim(Q, D, precision=precision), ref.maxsim(Q, D)[0], ref.tolerance(dtype))


@pytest.mark.parametrize("backward", ["lowmem", "unified"])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_gradients_are_float32_whatever_the_precision(precision, backward, device):
    Q, D = (x.requires_grad_() for x in problem(device))
    scores, winners = li.maxsim_with_winners(Q, D, precision=precision, backward=backward)
    ref.assert_gradients(scores, Q, D, winners, 1e-6)


@pytest.mark.parametrize("scale", [1e-18, 1e-3, 1e3, 1e18])
def test_float32_keeps_its_range(scale, device):
    # Narrowing float32 to float16 would overflow or vanish here.
    Q, D = problem(device)
    scores, _ = ref.maxsim(Q * scale, D)
    for precision in ("highest", "high", "medium"):
        ref.assert_close(
            li.maxsim(Q * scale, D, precision=precision), scores, ref.tolerance(torch.float32, precision)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_normalize_survives_any_length(dtype, device):
    Q, D = problem(device, dtype=dtype)
    scale = torch.logspace(-8, 8, 33, device=device).view(1, -1, 1).to(dtype)
    Q = Q * scale
    scores, winners = ref.maxsim(Q, D, normalize=True)
    out, found = li.maxsim_with_winners(Q, D, normalize=True)
    ref.assert_close(out, scores, ref.tolerance(dtype))
    ref.assert_winners_close(found, winners, Q, D, ref.tolerance(dtype), normalize=True)


def test_the_newer_switches():
    # In a process of its own: PyTorch does not go back from the newer switches to the older ones.
    code = """
import torch
if not hasattr(torch.backends, "fp32_precision"):
    raise SystemExit
import late_interaction as li
from late_interaction._scoring.precision import float32_precision
Q, D = torch.randn(3, 5, 64), torch.randn(4, 7, 64)
meant = {"ieee": "highest", "tf32": "high", "bf16": "medium", "none": "highest"}
for cuda, cpu in (("ieee", "tf32"), ("tf32", "bf16"), ("tf32", "ieee"), ("none", "bf16"), ("tf32", "none")):
    torch.backends.cuda.matmul.fp32_precision = cuda
    torch.backends.mkldnn.matmul.fp32_precision = cpu
    assert float32_precision("cuda") == meant[cuda] and float32_precision("cpu") == meant[cpu]
    assert torch.equal(li.maxsim(Q, D), li.maxsim(Q, D, precision=meant[cpu]))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the switches of PyTorch ----

NAMES = ["highest", "high", "medium"]


@pytest.mark.parametrize("held", NAMES)
@pytest.mark.parametrize("before", NAMES)
def test_products_multiply_as_they_are_told_for_a_while(before, held):
    """Also those within others, and whoever asks meanwhile is told what was before."""
    torch.set_float32_matmul_precision(before)
    for _ in range(2):
        with float32_products("cpu", held):
            assert torch.get_float32_matmul_precision() == held
            for inner in NAMES:
                with float32_products("cpu", inner):
                    assert torch.get_float32_matmul_precision() == inner
                    assert float32_precision("cpu") == before
                assert torch.get_float32_matmul_precision() == held
        assert torch.get_float32_matmul_precision() == float32_precision("cpu") == before


def test_threads_share_a_precision_and_wait_for_another():
    torch.set_float32_matmul_precision("highest")
    seen, inside = [], threading.Event()

    def multiply(precision):
        with float32_products("cpu", precision):
            seen.append((precision, torch.get_float32_matmul_precision()))
            inside.set()

    with float32_products("cpu", "medium"):
        same, other = (threading.Thread(target=multiply, args=(x,)) for x in ("medium", "high"))
        other.start()
        assert not inside.wait(0.2)
        same.start()
        assert inside.wait(20) and seen == [("medium", "medium")]
    for thread in (same, other):
        thread.join(20)
    assert seen[1:] == [("high", "high")] and torch.get_float32_matmul_precision() == "highest"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_the_switch_as_it_was_before():
    torch.set_float32_matmul_precision("highest")
    with float32_products("cpu", "medium"):
        child = os.fork()
        if child == 0:
            free = torch.get_float32_matmul_precision() == float32_precision("cpu") == "highest"
            os._exit(0 if free else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("options", [{"winners": "recompute"}, {"mean": True}, {"winners": "save"}])
def test_calls_with_other_options_multiply_as_they_are_told(options):
    Q, D = torch.randn(2, 3, 64), torch.randn(4, 5, 64)
    exact, rough = (li.maxsim(Q, D, precision=name, **options) for name in ("highest", "medium"))
    assert not torch.equal(exact, rough)
    torch.set_float32_matmul_precision("medium")
    assert torch.equal(li.maxsim(Q, D, **options), rough)
    assert li.maxsim(Q.double(), D.double(), **options).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(li.maxsim(Q, D, precision="highest", **options), exact)


def test_a_switch_that_is_thrown_while_it_is_read(monkeypatch):
    torch.set_float32_matmul_precision("highest")
    read = torch.get_float32_matmul_precision
    with contextlib.ExitStack() as stack:

        def thrown():
            monkeypatch.setattr(torch, "get_float32_matmul_precision", read)
            stack.enter_context(float32_products("cpu", "medium"))
            return read()

        monkeypatch.setattr(torch, "get_float32_matmul_precision", thrown)
        assert float32_precision("cpu") == "highest"


def test_autocast_is_left_on_devices_that_have_it():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with without_autocast("cpu"):
            assert not torch.is_autocast_enabled("cpu")
        with without_autocast("meta"):
            assert torch.is_autocast_enabled("cpu")
