"""How float32 multiplies: PyTorch's switches, our keyword, and the error that each may have."""

import contextlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction._scoring import precision as switches
from late_interaction._scoring.precision import float32_precision, float32_products, without_autocast
from tests import ref

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
    assert highest < high / 10 and high < medium
    einsum = torch.einsum("isd,jtd->ijst", Q, D).amax(-1).sum(-1)
    assert highest <= 2 * ref.relative_error(einsum, exact)


# ---- by fp16 copies: one number an element at "high", two at "highest" ----


LIMITS = {"high": 1e-3, "highest": 3e-6}
by_copies = pytest.mark.parametrize("precision", LIMITS)


def enough():
    """Work enough that a GPU makes copies for it."""
    return problem("cuda", queries=70, documents=30)


def score(precision, Q, D, d_mask=None, normalize=False):
    return li.maxsim_with_winners(Q, D, None, d_mask, normalize=normalize, precision=precision)


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("d", [8, 9, 63, 64, 65, 100, 128, 129, 200, 640, 768, 1030])
@pytest.mark.parametrize("normalize", [False, True])
def test_two_numbers_are_as_exact_as_float32(d, normalize):
    Q, D = problem("cuda", d, queries=70, documents=5000 // d)
    unit = {"normalize": normalize}
    plan = li.explain_plan(Q, D, precision="highest", winners=False)
    assert "sm90_3xfp16" in plan
    scores, winners = ref.maxsim(Q, D, **unit)
    out, found = score("highest", Q, D, **unit)
    ref.assert_close(out, scores, 3e-6)
    ref.assert_winners_close(found, winners, Q, D, 3e-6, **unit)
    assert torch.equal(li.maxsim(Q, D, precision="highest", **unit), out)
    if not normalize:
        einsum = torch.einsum("isd,jtd->ijst", Q, D).amax(-1).sum(-1)
        assert ref.relative_error(out, scores) <= 2 * ref.relative_error(einsum, scores)


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("Ld", [1, 7, 79, 80, 81, 151, 152, 153, 305, 1031])
@pytest.mark.parametrize("d", [64, 130, 768])
def test_two_numbers_at_the_edges_of_tiles(Ld, d):
    Q, D = torch.randn(131, 20, d, device="cuda"), torch.randn(2 + 500_000 // (Ld * d), Ld, d, device="cuda")
    d_mask = torch.rand(D.shape[:-1], device="cuda") < 0.7
    d_mask[0] = False
    assert "sm90_3xfp16" in li.explain_plan(Q, D, precision="highest", winners=False)
    for mask in (None, d_mask):
        scores, winners = ref.maxsim(Q, D, d_mask=mask)
        out, found = score("highest", Q, D, mask)
        ref.assert_close(out, scores, 3e-6)
        ref.assert_winners_close(found, winners, Q, D, 3e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("exponents", [(0, 0), (-18, 18), (18, -18), (-12, -12), (10, 10)])
@by_copies
def test_copies_have_the_range_of_float32(exponents, precision):
    # Rows of Q over sixteen orders of magnitude, tokens of D over four, around these.
    Q, D = enough()
    Q = Q * 10.0 ** (exponents[0] + torch.linspace(-8, 8, 33, device="cuda")).view(1, -1, 1)
    D = D * 10.0 ** (exponents[1] + torch.linspace(-2, 2, 130, device="cuda")).view(1, -1, 1)
    scores, winners = ref.maxsim(Q, D)
    out, found = score(precision, Q, D)
    ref.assert_close(out, scores, LIMITS[precision])
    ref.assert_winners_close(found, winners, Q, D, LIMITS[precision])
    # Row by row: the large ones of a query hide nothing here.
    lone = Q.flatten(0, 1).unsqueeze(1)
    out, exact = score(precision, lone, D)[0].double(), ref.maxsim(lone, D)[0]
    errors = (out - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.max() < LIMITS[precision]


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [1e-4, 1e-9, 1e-15])
@pytest.mark.parametrize("Ld", [1, 2, 5, 8, 130])
def test_two_numbers_hide_no_document_behind_a_larger_one(Ld, ratio):
    Q, D = torch.randn(131, 20, 128, device="cuda"), torch.randn(5000 // Ld, Ld, 128, device="cuda")
    D[1:] *= ratio
    D[2::3, ::2] *= ratio  # nor a token behind one of its own document
    assert "sm90_3xfp16" in li.explain_plan(Q, D, precision="highest", winners=False)
    scores, winners = ref.maxsim(Q, D)
    out, found = score("highest", Q, D)
    ref.assert_winners_close(found, winners, Q, D, 3e-6)
    einsum = torch.einsum("isd,jtd->ijst", Q, D).amax(-1).sum(-1)

    def worst(x):
        return ((x.double() - scores).norm(dim=0) / scores.norm(dim=0)).max()

    assert worst(out) <= 2 * worst(einsum)


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
@by_copies
def test_masked_tokens_have_no_say_in_a_scale(garbage, normalize, precision):
    Q, D = enough()
    d_mask = torch.rand(D.shape[:-1], device="cuda") < 0.7
    d_mask[3] = False
    clean = score(precision, Q, D, d_mask, normalize)
    dirty = score(precision, Q, D.masked_fill(~d_mask.unsqueeze(-1), garbage), d_mask, normalize)
    assert all(map(torch.equal, clean, dirty))


@pytest.mark.gpu
@by_copies
def test_copies_of_what_is_zero_or_not_finite(precision):
    Q, D = enough()
    Q[0, 0], D[0], D[1, 2] = 0, 0, 0
    Q[1, 1, 0], D[2, 5, 3], D[4, 9, 1] = float("inf"), -float("inf"), float("nan")
    exact = ref.maxsim(Q, D)[0]
    out = score(precision, Q, D)[0]
    ref.assert_close(out, exact, LIMITS[precision])
    assert torch.equal(
        score(precision, Q, torch.zeros_like(D))[0].isnan(), ref.maxsim(Q, torch.zeros_like(D))[0].isnan()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("form", ref.LAID)
@by_copies
def test_copies_of_inputs_that_lie_otherwise(form, precision):
    laid, plain = ref.laid(form, *enough())
    assert all(map(torch.equal, score(precision, *laid), score(precision, *plain)))


@pytest.mark.gpu
@by_copies
def test_copies_of_documents_of_each_query(precision):
    Q, D = torch.randn(2, 2100, 64, device="cuda"), torch.randn(2, 45, 90, 64, device="cuda")
    scores, winners = ref.maxsim(Q, D)
    out, found = score(precision, Q, D)
    ref.assert_close(out, scores, LIMITS[precision])
    ref.assert_winners_close(found, winners, Q, D, LIMITS[precision])


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
    grad = torch.randn_like(scores)
    scores.backward(grad)
    for name, x, expected in zip("QD", (Q, D), ref.gradients(grad, Q, D, winners), strict=True):
        assert x.grad.dtype == torch.float32
        ref.assert_close(x.grad, expected, 1e-6, f"grad_{name}")


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


@pytest.mark.parametrize(("new", "old"), [("ieee", "highest"), ("tf32", "high")])
def test_the_newer_switches(new, old):
    # In a process of its own: PyTorch does not go back from the newer switches to the older ones.
    code = f"""
import torch
if not hasattr(torch.backends, "fp32_precision"):
    raise SystemExit
import late_interaction as li
Q, D = torch.randn(3, 5, 64), torch.randn(4, 7, 64)
expected = li.maxsim(Q, D, precision={old!r})
torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = {new!r}
assert torch.equal(li.maxsim(Q, D), expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the switches of PyTorch ----

NAMES = ["highest", "high", "medium"]


@pytest.fixture
def as_before():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("held", NAMES)
@pytest.mark.parametrize("before", NAMES)
def test_products_multiply_as_they_are_told_for_a_while(as_before, before, held):
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


def test_a_switch_that_is_thrown_while_it_is_read(as_before, monkeypatch):
    torch.set_float32_matmul_precision("highest")
    read = torch.get_float32_matmul_precision
    with contextlib.ExitStack() as stack:

        def thrown():
            monkeypatch.setattr(torch, "get_float32_matmul_precision", read)
            stack.enter_context(float32_products("cpu", "medium"))
            return read()

        monkeypatch.setattr(torch, "get_float32_matmul_precision", thrown)
        assert float32_precision("cpu") == "highest"


@pytest.mark.parametrize("names", [("ieee", "tf32"), ("bf16", "ieee"), ("tf32", "bf16"), ("none", "none")])
def test_the_newer_switches_when_the_older_cannot_be_read(monkeypatch, names):
    """PyTorch refuses to read the older one once they were set."""

    def refuses():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    cuda, mkldnn = (SimpleNamespace(matmul=SimpleNamespace(fp32_precision=name)) for name in names)
    monkeypatch.setattr(
        switches,
        "torch",
        SimpleNamespace(
            get_float32_matmul_precision=refuses, backends=SimpleNamespace(cuda=cuda, mkldnn=mkldnn)
        ),
    )
    meant = {"ieee": "highest", "tf32": "high", "bf16": "medium", "none": "highest"}
    assert float32_precision("cuda") == meant[names[0]] and float32_precision("cpu") == meant[names[1]]


def test_autocast_is_left_on_devices_that_have_it():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with without_autocast("cpu"):
            assert not torch.is_autocast_enabled("cpu")
        with without_autocast("meta"):
            assert torch.is_autocast_enabled("cpu")


def test_threads_share_a_precision_and_wait_for_another(as_before):
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


def test_a_switch_that_nobody_holds_is_left_alone(as_before):
    torch.set_float32_matmul_precision("high")
    switches._Switch().release()
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_the_switch_as_it_was_before(as_before):
    torch.set_float32_matmul_precision("highest")
    with float32_products("cpu", "medium"):
        child = os.fork()
        if child == 0:
            free = torch.get_float32_matmul_precision() == float32_precision("cpu") == "highest"
            os._exit(0 if free else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("options", [{"winners": "recompute"}, {"mean": True}, {"winners": "save"}])
def test_calls_with_other_options_multiply_as_they_are_told(as_before, options):
    Q, D = torch.randn(2, 3, 64), torch.randn(4, 5, 64)
    exact, rough = (li.maxsim(Q, D, precision=name, **options) for name in ("highest", "medium"))
    assert not torch.equal(exact, rough)
    torch.set_float32_matmul_precision("medium")
    assert torch.equal(li.maxsim(Q, D, **options), rough)
    assert li.maxsim(Q.double(), D.double(), **options).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(li.maxsim(Q, D, precision="highest", **options), exact)
