"""explain_plan: for any call on any GPU, which kernel, tile and grid, and why."""

import re
import types

import pytest
import torch

import late_interaction as li
from late_interaction import plan
from tests.support.cases import QUANTIZED, walk

DEVICES = [(75, 40), (80, 108), (86, 84), (89, 142), (90, 132), (100, 148), (120, 170)]
CASES = list(walk(150))
TRAIN, FP32 = ((256, 32, 128), (256, 300, 128)), torch.float32


def sections(plan):
    """{"device": line, "forward": {key: text}, "backward": {key: text}}"""
    out, current = {}, None
    for line in plan.splitlines():
        if line.startswith("  "):
            key, _, text = line.strip().partition(" ")
            assert text.strip(), line
            assert key not in current, f"{key} twice"
            current[key] = text.strip()
        elif line.startswith("device"):
            out["device"] = line
        else:
            current = out[line] = {}
    return out


def shapes(case):
    d_shape = (case.N, case.Ld, case.d)
    if case.layout != "in-batch":
        d_shape = (case.Nq, 1 if case.layout == "pairs" else case.N, case.Ld, case.d)
    return (case.Nq, case.Lq, case.d), d_shape


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_call_is_explained_on_every_gpu(case):
    q_shape, d_shape = shapes(case)
    for sm, sm_count in DEVICES:
        for backward in ("auto", "lowmem", "unified"):
            plan = sections(
                li.explain_plan(
                    q_shape, d_shape, dtype=case.dtype, normalize=case.normalize, backward=backward,
                    sm=sm, sm_count=sm_count,
                )
            )  # fmt: skip
            assert f"{sm / 10}" in plan["device"] and f"{sm_count}" in plan["device"]
            if 0 in q_shape or 0 in d_shape:
                assert plan["forward"] == {"no": "kernel: the call is empty"} == plan["backward"]
                continue
            assert plan["forward"]["kernel"].startswith("maxsim_forward")
            assert {"kernel", "tile", "grid", "why"} <= plan["forward"].keys()
            assert int(re.match(r"(\d+) blocks", plan["forward"]["grid"])[1]) >= 1
            assert {"method", "gather", "why"} <= plan["backward"].keys()
            assert ("asked for" in plan["backward"]["why"]) == (backward != "auto")
            assert plan["backward"]["method"] in (
                (backward,) if backward != "auto" else ("lowmem", "unified")
            )


@pytest.mark.parametrize(
    ("q_shape", "d_shape", "options", "kernel", "why"),
    [
        ((1, 32, 128), (1000, 300, 128), {}, "sm90_d", "32 query rows meet each document"),
        ((256, 32, 128), (256, 300, 128), {}, "sm90_q", "8192 query rows meet each document"),
        ((256, 16, 128), (256, 24, 128), {}, "sm90_q_short", "6 documents of up to 24 tokens"),
        ((64, 32, 768), (64, 300, 768), {}, "sm90_q_longd", "embeddings of 12 x 128 bytes"),
        ((256, 32, 128), (256, 300, 128), {"dtype": torch.float32}, "sm90_3xfp16", "2 x 152 tokens"),
        ((256, 32, 128), (256, 180, 128), {}, "sm90_q", "104 + 80 tokens cover 180"),
        ((256, 32, 128), (256, 230, 128), {}, "sm90_q", "128 + 104 tokens cover 230"),
        ((256, 32, 128), (256, 185, 128), {}, "sm90_q", "2 x 104 tokens cover 185"),
        ((256, 32, 128), (256, 180, 128), {"d_mask": True}, "sm90_q", "2 x 104 tokens cover 180"),
        ((256, 32, 128), (256, 180, 128), {"normalize": True}, "sm90_q", "104 + 80 tokens cover 180"),
        ((256, 32, 128), (256, 300, 128), {"sm": 80}, "sm80_q", "512 of them share"),
        ((1, 32, 128), (20000, 60, 128), {"sm": 80, "dtype": torch.int8}, "sm80_d", "a warp a document"),
        ((1, 32, 128), (10000, 300, 128), {"sm": 86}, "sm80_d", "a block a document"),
        ((1, 32, 128), (1000, 300, 128), {"sm": 80}, "sm80_short_docs", "a warp a document"),
        ((300, 20, 768), (300, 500, 5, 768), {"sm": 80}, "sm80,", "16 short documents"),
        ((256, 32, 7), (256, 300, 7), {}, "sm80", "16 bytes"),
        ((256, 32, 128), (256, 300, 128), {"dtype": torch.float64}, "fp64", "float64"),
        ((8, 32, 128), (8, 5, 300, 128), {}, "sm90_", "32 query rows meet each document"),
        ((256, 32, 128), (256, 300, 128), {"dtype": torch.int8}, "sm90_q, products in int8", "2 x 160"),
        ((1, 32, 128), (9, 300, 128), {"dtype": torch.float8_e4m3fn}, "sm90_d, products in e4m3", "32"),
        ((64, 32, 8), (9, 300, 8), {"dtype": torch.float8_e5m2}, "float32 copies", "e5m2 codes of this d"),
        ((1, 32, 128), (9, 300, 128), {"dtype": torch.int8, "sm": 80}, "sm80_d, products in int8", "narrow"),
        ((1, 32, 272), (9, 300, 272), {"dtype": torch.int8, "sm": 80}, "tf32: float32 copies", "device"),
        ((256, 32, 128), (256, 300, 128), {"dtype": FP32, "sm": 80}, "sm80_3xfp16", "256 of them"),
        (
            *TRAIN,
            {"dtype": FP32, "sm": 89, "geforce": True},
            "sm80, products in fp32",
            "FFMA multiplies faster",
        ),
        # Longer documents than it can count the tokens of.
        ((300, 32, 4), (1, 2**27 + 8, 4), {"dtype": FP32, "sm": 80}, "sm80, products in 3xtf32", "9600"),
    ],
)
def test_the_reason_is_the_one_that_counts(q_shape, d_shape, options, kernel, why):
    plan = sections(li.explain_plan(q_shape, d_shape, **{"sm": 90, "sm_count": 132, **options}))["forward"]
    assert kernel in plan["kernel"] and why in plan["why"]
    assert "sm80" not in kernel or "sm90" not in plan["kernel"]


@pytest.mark.parametrize(
    ("dtype", "options", "rates"),
    [
        (torch.float16, {"sm": 75}, "1024 operations .* in fp16 .*7.5"),
        (torch.bfloat16, {"sm": 86}, "1024 operations a clock and multiprocessor in bf16 (compute"),
        (torch.bfloat16, {"sm": 89, "geforce": True}, "512 operations .* in bf16 .*8.9, GeForce"),
        (torch.float16, {"sm": 80, "packed": True}, "2048 operations .* in fp16 .*8.0"),
        (torch.int8, {"sm": 121}, "2048 operations .* in int8 .*12.1"),
        (torch.float8_e4m3fn, {"sm": 120, "geforce": True}, "1024 operations .* in fp8 .*12.0, GeForce"),
        (torch.float8_e5m2, {"sm": 86, "geforce": True}, "512 operations .* in fp16, to which fp8"),
        (torch.float32, {"sm": 80, "precision": "high"}, "1024 operations .* in tf32"),
        (torch.float32, {"sm": 80}, "2048 operations .* in fp16, 1024 in tf32, 128 by FFMA"),
        (torch.float32, {"sm": 86, "packed": True}, "1024 operations .* in fp16, 512 in tf32, 256 by FFMA"),
    ],
)
def test_the_rates_are_those_of_the_device(dtype, options, rates):
    text = li.explain_plan((4, 32, 128), (64, 300, 128), dtype=dtype, sm_count=84, winners=False, **options)
    assert re.match(rates.replace("(", r"\("), sections(text)["forward"]["rates"])


def test_tensors_and_their_shapes_are_explained_alike():
    Q, D = torch.randn(4, 32, 128), torch.randn(5, 300, 128)
    here = {"sm": 90, "sm_count": 132, "precision": "high"}
    assert li.explain_plan(Q, D, **here) == li.explain_plan(Q.shape, D.shape, dtype=torch.float32, **here)
    assert li.explain_plan(Q.shape, D) == li.explain_plan(Q, D) == li.explain_plan(Q, D.shape)
    assert li.explain_plan(Q[0], D[0], **here) == li.explain_plan(Q[:1], D[:1], **here)
    forward = sections(li.explain_plan(Q, D, winners=False, **here))
    assert "backward" not in forward and "forward" in forward


def test_codes_have_no_backward():
    for dtype in QUANTIZED:
        plan = sections(li.explain_plan((4, 32, 128), (5, 300, 128), dtype=dtype, sm=90, sm_count=132))
        assert plan.keys() == {"device", "forward"}
    with pytest.raises(TypeError, match=r"int8, got torch\.int32"):
        li.explain_plan((4, 32, 128), (5, 300, 128), dtype=torch.int32)


def test_precision_decides_what_is_multiplied():
    def kernel(**options):
        call = {"dtype": FP32, "sm": 90, "sm_count": 132}
        return sections(li.explain_plan((64, 32, 128), (64, 300, 128), **call | options))["forward"]

    assert "sm90_3xfp16, products in 3xfp16" in kernel(precision="highest")["kernel"]
    assert "two fp16 numbers" in kernel(precision="highest")["copies"]
    # Rows of powers of two far apart; where they are normalized they have one and the same.
    assert "scales" in kernel(precision="highest")["scaled"]
    assert "scaled" not in kernel(precision="highest", normalize=True)
    assert "in fp16" in kernel(precision="high")["kernel"]
    assert "scaled" in kernel(precision="high")["copies"]
    assert "normalized" in kernel(precision="high", normalize=True)["copies"]
    assert "in bf16" in kernel(precision="medium")["kernel"]
    assert "bf16" in kernel(precision="medium")["copies"]
    torch.set_float32_matmul_precision("high")
    assert kernel() == kernel(precision="high")


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize(
    "shapes",
    [((8, 32, 128), (64, 300, 128)), ((64, 32, 128), (64, 8, 300, 128)), ((64, 32, 127), (64, 300, 127))],
)
def test_few_rows_multiply_as_they_are(shapes, precision):
    text = li.explain_plan(*shapes, dtype=torch.float32, precision=precision, sm=90, sm_count=132)
    forward = sections(text)["forward"]
    if precision == "medium" and shapes[0][-1] == 127:
        assert "in bf16" in forward["kernel"]
    else:
        assert "in tf32" in forward["kernel"] and "copies" not in forward


def test_few_rows_multiply_in_three_tf32_products():
    shapes = (4, 32, 128), (64, 300, 128)
    text = li.explain_plan(*shapes, dtype=torch.float32, precision="highest", sm=90, sm_count=132)
    assert "sm90_3xtf32, products in 3xtf32" in text and "copies  " not in text
    text = li.explain_plan(*shapes, dtype=torch.float32, precision="highest", sm=80, sm_count=108)
    assert "maxsim_forward_sm80, products in 3xtf32" in text


def test_deterministic_algorithms_decide_for_lowmem_and_say_so():
    shapes = (128, 700, 128), (128, 300, 128)
    assert sections(li.explain_plan(*shapes))["backward"]["method"] == "unified"
    torch.use_deterministic_algorithms(True)
    plan = sections(li.explain_plan(*shapes))["backward"]
    assert plan["method"] == "lowmem" and "deterministic" in plan["why"]
    assert sections(li.explain_plan(*shapes, backward="unified"))["backward"]["why"] == "asked for"


def test_a_mask_is_planned_for():
    plain, masked, few_rows, small = (
        li.explain_plan(q, d, d_mask=mask, winners=False, sm=90, sm_count=132)
        for q, d, mask in (
            ((256, 32, 128), (256, 300, 128), False),
            ((256, 32, 128), (256, 300, 128), True),
            ((8, 32, 128), (8192, 300, 128), True),
            ((8, 32, 128), (100, 300, 128), True),
        )
    )
    assert "masked" not in plain and "compacted" not in plain
    assert "compacted" in masked and "masked" not in masked  # where many rows read what is copied once
    assert "is 104 tokens wide where" in masked and "tail" not in plain + few_rows
    assert "a kernel before finds" in few_rows  # padding is skipped where that pays for a kernel of its own
    assert "masked" in small and "a kernel before" not in small


@pytest.mark.parametrize("sm, sm_count", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normalize", [False, True])
def test_hidden_states_are_explained(normalize, dtype, sm, sm_count):
    options = {"dtype": dtype, "sm": sm, "sm_count": sm_count}
    text = li.explain_plan((32, 32, 128), (512, 2048, 128), d_model=768, normalize=normalize, **options)
    plan, cache = sections(text), int(re.search(r"stay in (\d+) MiB of L2", text)[1]) << 20
    assert list(plan) == ["device", "hidden states", "forward", "backward"]
    forward, backward = map(int, re.findall(r"(\d+) of 512 documents", plan["hidden states"]["chunk"]))
    assert 0 < forward < 512 and 0 < backward < 512
    assert 0.25 * cache < forward * 2048 * 128 * dtype.itemsize <= cache
    assert (backward > forward) == (dtype == torch.bfloat16)  # where gradients to come lend their room
    of_a_chunk = sections(li.explain_plan((32, 32, 128), (forward, 2048, 128), **options))
    assert plan["forward"] == of_a_chunk["forward"]
    kernel = sm == 90 and dtype == torch.bfloat16
    how = plan["hidden states"]["projection"]
    assert how.startswith("project_rows" if kernel else "PyTorch's product")
    assert ("l2_normalize_rows" in how) == (normalize and not kernel)
    assert how.endswith("of the tokens that won" if kernel else "of all tokens")
    assert "scores" not in plan["hidden states"]
    one = sections(li.explain_plan((1, 64, 128), (512, 2048, 128), d_model=768, **options))["hidden states"]
    assert ("project_scores" in one.get("scores", "")) == kernel


@pytest.mark.parametrize("sm, sm_count", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
@pytest.mark.parametrize("winners", [False, True])
def test_compressed_documents_are_explained(winners, nbits, dtype, sm, sm_count):
    for Nq, Lq, Nd, Ld, d in ((1, 32, 10000, 300, 128), (5, 40, 1, 100_000, 96), (2, 9, 3, 40, 37)):
        plan = sections(
            li.explain_plan(
                (Nq, Lq, d), (Nd, Ld, d), nbits=nbits, dtype=dtype, winners=winners, sm=sm, sm_count=sm_count
            )
        )
        assert list(plan) == ["device", "forward", *(["backward"] if winners else [])]
        forward = plan["forward"]
        assert {"kernel", "tile", "grid", "why"} <= set(forward)
        tile = dtype is not torch.float64
        assert forward["kernel"].startswith("maxsim_residual_" + ("tile" if tile else "by_warp"))
        assert ("splits" in forward) == (tile and Ld == 100_000)
        small = sm < 80  # 64 KiB of shared memory
        any_rows = winners or d == 37 or dtype == torch.float32 or small
        assert ("specialized" in forward["why"]) == (tile and any_rows)
        if winners:
            assert plan["backward"]["gather"].startswith(f"{Nq * Lq} blocks")
    empty = li.explain_plan((1, 32, 128), (0, 300, 128), nbits=nbits, dtype=dtype)
    assert "no kernel: the call is empty" in empty


OWN = (4, 5, 8), (4, 3, 7, 8)  # of documents of each query


@pytest.mark.parametrize(
    ("error", "message", "shapes", "options"),
    [
        (ValueError, "sm_count must be below 10000, got 10000", None, {"sm_count": 10_000}),
        (TypeError, "sm must be an int, got float", None, {"sm": 9.0}),
        (TypeError, "sm_count must be an int, got True", None, {"sm_count": True}),
        (ValueError, r"embedding dim d of at least 1, got \[4, 5, 0\]", ((4, 5, 0), (3, 7, 0)), {}),
        (ValueError, r"from 0 up to 2\*\*31", ((4, 5, 8), (2**31, 7, 8)), {}),
        (ValueError, r"from 0 up to 2\*\*31", ((4, 5, 8), (2**70, 7, 8)), {}),
        (ValueError, "from 0 up to", ((4, -5, 8), (3, 7, 8)), {}),
        (TypeError, "a size of Q must be an int, got True", ((True, 5, 8), (3, 7, 8)), {}),
        (TypeError, "a size of D must be an int, got float", ((4, 5, 8), (3, 7.0, 8)), {}),
        (TypeError, "Q must be a tensor or a shape of 2 or 3 sizes, got int", (8, (3, 7, 8)), {}),
        (TypeError, "D must be a tensor or a shape .* got NoneType", ((4, 5, 8), None), {}),
        (ValueError, "D must be a tensor or a shape of 2 or 3 or 4 sizes", ((4, 5, 8), (8,)), {}),
        (ValueError, r"Q and D must share d, .* got Q \[5, 8\] and D", ((5, 8), (5, 3, 7, 8)), {}),
        (ValueError, "Q and D must share d, and Nq", ((5, 8), (0, 3, 7, 8)), {}),
        (ValueError, "Q and D must share d, and Nq", ((4, 5, 8), (3, 2, 7, 8)), {}),
        (ValueError, "Q and D must share d, and Nq", ((4, 5, 8), (5, 2, 7, 8)), {}),
        (ValueError, "Q and D must share d, and Nq", ((4, 5, 8), (3, 7, 4)), {}),
        (ValueError, "Q and D must share d, and Nq", ((4, 5, 4), (3, 7, 8)), {}),
        (TypeError, "dtype must be bfloat16", None, {"dtype": "bf16"}),
        (TypeError, "dtype must be bfloat16", None, {"dtype": []}),
        (ValueError, "normalize must be False for codes", None, {"dtype": torch.int8, "normalize": True}),
        (ValueError, r"d_model must be below 2\*\*31", None, {"d_model": 2**31}),
        (ValueError, "d_model must be at least 1", None, {"d_model": 0}),
        (ValueError, "d_model=24 wants documents", OWN, {"d_model": 24}),
        (ValueError, "d_model=24 wants documents", None, {"d_model": 24, "dtype": torch.int8}),
        (ValueError, "nbits must be 1, 2, 4 or 8, got 3", None, {"nbits": 3}),
        (TypeError, "nbits must be an int, got float", None, {"nbits": 2.0}),
        (ValueError, "nbits=2 wants documents", OWN, {"nbits": 2}),
        (ValueError, "nbits=2 wants documents", None, {"nbits": 2, "d_mask": True}),
        (ValueError, "nbits=2 wants documents", None, {"nbits": 2, "d_model": 24}),
        (ValueError, "nbits=2 wants documents", None, {"nbits": 2, "dtype": torch.int8}),
        (ValueError, "packed=True wants documents", OWN, {"packed": True}),
        (ValueError, "packed=True wants documents", None, {"packed": True, "dtype": torch.int8}),
        (ValueError, "packed=True wants documents", None, {"packed": True, "d_mask": True}),
        (ValueError, "packed=True wants documents", None, {"packed": True, "normalize": True}),
        (ValueError, "packed=True wants documents", None, {"packed": True, "d_model": 64}),
        (
            TypeError, r"Q and D must share a dtype, got torch\.float32 and torch\.float64",
            (torch.randn(4, 5, 8), torch.randn(3, 7, 8, dtype=torch.float64)), {},
        ),
    ],
)  # fmt: skip
def test_calls_that_there_are_not(error, message, shapes, options):
    with pytest.raises(error, match=message):
        li.explain_plan(*(shapes or ((4, 5, 8), (3, 7, 8))), **options)


def test_shapes_that_go_together():
    for own in (((3, 32, 128), (3, 4, 60, 128)), ((32, 128), (1, 4, 60, 128))):
        assert "forward" in li.explain_plan(*own, sm=90, sm_count=132)


# ---- sizes and devices at their bounds ----


def test_the_device_that_is_asked_for():
    def first(**options):
        return li.explain_plan((3, 32, 128), (4, 60, 128), **options).splitlines()[0]

    assert first(sm=999, sm_count=9_999) == "device       compute capability 99.9, 9999 multiprocessors"
    for options in ({"sm": 1000}, {"sm": 74}, {"sm_count": 10_000}):
        with pytest.raises(ValueError, match=next(iter(options))):
            first(**options)
    if not torch.cuda.is_available():  # the numbers of an H200
        assert first() == "device       compute capability 9.0, 132 multiprocessors"
        assert first(sm=80) == "device       compute capability 8.0, 132 multiprocessors"
        assert first(sm_count=20) == "device       compute capability 9.0, 20 multiprocessors"


@pytest.mark.parametrize(("missing", "capability"), [("no CUDA", "8.6"), (None, "8.0")])
def test_the_device_of_this_machine(monkeypatch, missing, capability):
    found = types.SimpleNamespace(
        major=8, minor=6, multi_processor_count=84, name="NVIDIA GeForce RTX 3080 Ti"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: found)
    monkeypatch.setattr(plan.ops, "cuda_missing", missing)
    monkeypatch.setattr(plan.ops, "cuda_capability", lambda: 80)  # a forced one
    text = li.explain_plan((3, 32, 128), (4, 60, 128))
    assert text.splitlines()[0] == f"device       compute capability {capability}, 84 multiprocessors"
    rate = f"512 operations a clock and multiprocessor in bf16 (compute capability {capability}, GeForce)"
    assert rate in text
    for options in ({"sm": 86}, {"geforce": False}):
        assert "GeForce" not in li.explain_plan((3, 32, 128), (4, 60, 128), **options)


WORDS_OF_9_0A = ("sm90", " 8 documents at a time ", ", in clusters of ")


@pytest.mark.parametrize(("sm", "sm_count"), [(80, 108), (89, 142), (100, 148), (120, 170)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("Ld", [24, 180])
def test_no_other_gpu_is_given_kernels_of_9_0a(sm, sm_count, dtype, Ld):
    """Their code is compiled for 9.0a alone. Elsewhere the launch would write nothing."""
    shapes = (4096, 32, 128), (4096, Ld, 128)
    hopper = li.explain_plan(*shapes, dtype=dtype, backward="lowmem", sm=90, sm_count=132)
    other = li.explain_plan(*shapes, dtype=dtype, backward="lowmem", sm=sm, sm_count=sm_count)
    assert any(words in hopper for words in WORDS_OF_9_0A)
    assert not any(words in other for words in WORDS_OF_9_0A)
