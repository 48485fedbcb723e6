"""The planner asked about any shape and any GPU, through its pybind11 module (make ctest builds it)."""

import importlib.util
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.selection import examples
from tests.support.programs import ROOT

FOLDERS = (Path(sys.prefix) / "build" / "cmake", ROOT / "build" / "cmake")


def load():
    for folder in FOLDERS:
        for path in folder.glob("late_interaction_plan.*.so"):
            spec = importlib.util.spec_from_file_location("late_interaction_plan", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    pytest.skip("late_interaction_plan is not built: make ctest", allow_module_level=True)


plan = load()
H200 = plan.device_of_capability(90, 132)
A100 = plan.device_of_capability(80, 108)

OWN = plan.Layout.per_query


def forward(Nq, N, Lq, Ld, d=128, layout=plan.Layout.in_batch, device=H200, **traits):
    return plan.plan_forward(plan.Sizes(layout, Nq, N, Lq, Ld, d), plan.ForwardTraits(**traits), device)


def lowmem(Nq, N, Lq, Ld, layout=plan.Layout.in_batch, dtype=plan.Dtype.bf16):
    size = plan.Sizes(layout, Nq, N, Lq, Ld, 128)
    return plan.plan_backward(size, dtype, True, False, plan.Backward.lowmem, H200)


def sizes_of(Lq, Ld, d):
    layouts = st.sampled_from(list(plan.Layout))
    return st.builds(plan.Sizes, layouts, st.integers(1, 4096), st.integers(1, 100_000), Lq, Ld, d)


sizes = sizes_of(st.integers(1, 32_768), st.integers(1, 1_000_000), st.integers(1, 4096))
devices = st.builds(
    plan.device_of_capability,
    st.sampled_from([75, 80, 86, 89, 90, 100, 120, 121]),
    st.integers(1, 200),
    st.booleans(),
)
dtypes = st.sampled_from(list(plan.Dtype))
precisions = st.sampled_from(list(plan.Precision))
traits = st.builds(plan.ForwardTraits, dtypes, precisions, st.booleans(), st.booleans(), st.booleans())


@settings(max_examples=examples(300), deadline=None)
@given(sizes, traits, devices)
def test_a_forward_fits_the_device(size, traits, device):
    forward = plan.plan_forward(size, traits, device)
    assert forward.grid >= 1 or forward.kernel == "dequantized"
    assert forward.partials >= 1
    assert 0 <= forward.smem_bytes <= device.smem_per_block
    assert forward.blocks_per_sm * forward.smem_bytes <= device.smem_per_sm
    assert "forward" in plan.explain(size, forward)


@pytest.mark.parametrize(
    ("device", "gigahertz", "fp16", "int8", "fp8", "tf32", "fp32"),
    [
        (A100, 1.41, 312, 624, 0, 156, 19.5),
        (H200, 1.83, 989, 1979, 1979, 494, 66.9),
        # T4, where FFMA stands in for TF32 at half its rate, and RTX 2080 Ti
        (plan.device_of_capability(75, 40), 1.59, 65, 130, 0, 4.05, 8.1),
        (plan.device_of_capability(75, 68, True), 1.635, 56.9, 227.7, 0, 7.1, 14.2),
        (plan.device_of_capability(86, 72), 1.695, 125, 250, 0, 62.5, 31.2),  # A10
        (plan.device_of_capability(89, 58), 2.04, 121, 242, 242, 60, 30.3),  # L4
        (plan.device_of_capability(89, 142), 2.52, 362, 733, 733, 183, 91.6),  # L40S
        (plan.device_of_capability(120, 188), 2.617, 504, 1008, 1008, 252, 126),  # RTX PRO 6000
        (plan.device_of_capability(86, 82, True), 1.695, 71, 284, 0, 35.6, 35.6),  # RTX 3090
        (plan.device_of_capability(89, 128, True), 2.52, 165, 661, 330, 82.6, 82.6),  # RTX 4090
        (plan.device_of_capability(120, 170, True), 2.407, 209.5, 838, 419, 104.8, 104.8),  # RTX 5090
    ],
)
def test_rates_are_those_of_the_data_sheets(device, gigahertz, fp16, int8, fp8, tf32, fp32):
    """Dense TFLOP/s at boost clock, with float32 sums."""
    rates = plan.rates_of(device)
    found = (rates.fp16, rates.int8, rates.fp8, rates.tf32, rates.ffma)
    teraflops = [rate * device.sm_count * gigahertz / 1000 for rate in found]
    assert teraflops == pytest.approx([fp16, int8, fp8, tf32, fp32], rel=0.1)


@settings(max_examples=examples(300), deadline=None)
@given(sizes, dtypes, st.booleans(), st.booleans(), st.sampled_from(list(plan.Backward)), devices)
def test_a_backward_fits_the_device_and_obeys(size, dtype, vectors, normalize, method, device):
    backward = plan.plan_backward(size, dtype, vectors, normalize, method, device)
    assert backward.method in {plan.Backward.lowmem, plan.Backward.unified}
    assert method in {backward.method, plan.Backward.automatic}
    assert backward.gather_grid >= 1
    assert 0 < backward.lowmem_smem_bytes <= device.smem_per_block
    assert 0 < backward.gather_smem_bytes <= device.smem_per_block
    assert backward.tiles >= 1 and backward.tile_tokens >= 1
    assert backward.tiles * backward.tile_tokens >= size.Ld
    assert backward.chunk >= 1 and (backward.single_query or backward.list_capacity >= 1)
    assert backward.method.name in plan.explain(size, backward)


@settings(max_examples=examples(300), deadline=None)
@given(
    sizes_of(st.integers(1, 1200), st.integers(1, 70), st.integers(1, 80).map(lambda vectors: 8 * vectors)),
    st.sampled_from([plan.Dtype.bf16, plan.Dtype.fp16, plan.Dtype.fp32]),
    devices,
)
def test_the_backward_of_short_documents_fits_the_device(size, dtype, device):
    plans = plan.plan_short_docs(size, dtype, True, False, plan.Backward.automatic, device)
    chosen = [made for made in (plans.lone, plans.grad_q, plans.grad_d) if made]
    if dtype == plan.Dtype.fp32:
        assert chosen == []
    for made in chosen:
        assert 0 < made.smem_bytes <= device.smem_per_block
        assert made.grid >= 1 and made.slice_dims * made.slices >= size.d
    assert not (plans.lone and (plans.grad_q or plans.grad_d))
    hopper = device.capability == 90
    if hopper:
        assert bool(plans.grad_q) == bool(plans.grad_d)
    for made, length in ((plans.grad_q, size.Ld), (plans.grad_d, size.Lq)):
        if not made:
            continue
        assert made.tma == hopper
        assert made.gathers == (made is plans.grad_q and dtype == plan.Dtype.bf16)
        if made.gathers:
            assert made.slice_dims in (48, 64) and made.units == 1
        else:
            assert made.slice_dims in ((64, 96, 128) if hopper and made.steps < 4 else (64,))
            assert hopper or (made is plans.grad_d and made.cluster == 1)
        assert size.Lq >= 15  # of fewer tokens, a block of grad_Q would have rows of too many queries
        assert 16 * made.steps * (made.units - 1) < length <= 16 * made.steps * made.units
        assert (
            made.stages >= (4 if not made.gathers else 3 if hopper else 2)
            and made.cluster <= 8
            and made.grid % (made.cluster * made.slices) == 0
        )
        tiles = made.grid // (made.cluster * made.slices)
        assert made.block_rows <= 192 and (tiles - 1) * made.block_rows < made.rows <= tiles * made.block_rows
    if made := plans.grad_d:
        assert made.steps <= 2 and made.block_rows == made.block_docs * size.Ld and made.block_docs <= 32
    for other in (plan.Backward.unified, plan.Backward.lowmem):
        normalized = other == plan.Backward.lowmem
        none = plan.plan_short_docs(size, dtype, True, normalized, other, device)
        assert not (none.lone or none.grad_q or none.grad_d)


@pytest.mark.parametrize("Nq, N, Lq, Ld", [(256, 256, 32, 300), (512, 512, 32, 300), (128, 128, 128, 1024)])
def test_owned_documents_leave_l1_to_the_rows_in_flight(Nq, N, Lq, Ld):
    backward = lowmem(Nq, N, Lq, Ld)
    assert 3 * (backward.lowmem_smem_bytes + 1024) <= (228 - 64) * 1024
    # And an even spread of winners is put in order in one round.
    assert backward.list_capacity * backward.tiles >= Nq * Lq


def test_documents_of_one_query_have_a_kernel_of_their_own():
    kd = lowmem(128, 8, 32, 1030, OWN)
    assert kd.single_query and kd.tiles == 8 and kd.chunk == 32
    assert lowmem(128, 8, 32, 1030, OWN, plan.Dtype.fp32).tiles == 16
    assert lowmem(8, 1, 32, 1030, OWN).tiles == 33  # else most multiprocessors would idle
    assert lowmem(128, 8, 256, 1030, OWN).single_query
    assert not lowmem(128, 8, 257, 1030, OWN).single_query
    assert not lowmem(1, 8, 32, 1030).single_query


def test_tiles_leave_out_the_winners_of_others_where_those_of_their_own_find_room():
    shapes = (32, 32, 32, 300), (256, 256, 32, 300), (64, 64, 1030, 1030), (1, 1000, 32, 300)
    small, whole, long, single = plans = [lowmem(*shape) for shape in shapes]
    for made in plans:
        assert made.segments & (made.segments - 1) == 0 and made.chunk % (32 * made.segments) == 0
    assert small.compact and small.tiles == 8 and small.chunk >= 32 * 32 / 8
    assert not whole.compact and whole.tiles == 1 and whole.chunk >= 256 * 32
    # More tiles than an order in several rounds would need, but each reads the document's winners once.
    assert long.compact and long.chunk * long.tiles >= 64 * 1030
    assert not single.compact


@pytest.mark.parametrize(
    "device", [A100, plan.device_of_capability(86, 84), plan.device_of_capability(120, 170)]
)
def test_older_gpus_share_documents_among_as_many_rows_as_keep_them_busy(device):
    here = partial(forward, device=device)
    assert here(256, 256, 32, 300).many_rows and here(64, 64, 1030, 1030).many_rows
    if device.sm_count > 100:  # else most multiprocessors idle
        assert not here(32, 32, 32, 300).many_rows
    assert not here(1, 1000, 128, 1024).many_rows
    assert here(256, 256, 32, 300, d=256).rows == 256 and here(256, 256, 32, 300, d=64).rows == 512
    split = here(1, 50, 32, 4096)
    # Fifty blocks do not fill a GPU; a second kernel takes longer than 999 tokens that are not split.
    assert split.num_splits > 1 and split.work_tiles == 50 * split.num_splits
    assert here(7, 9, 32, 999, 64, OWN).num_splits == 1


def test_short_documents_share_a_tile_where_many_query_rows_meet_them():
    for Ld in range(1, 65):
        for d in (8, 64, 72, 96, 128):
            made = forward(256, 1024, 32, Ld, d)
            assert made.kernel == "sm90_q_short"
            assert made.doc_columns == next(span for span in (8, 16, 24, 32, 48, 64) if span >= Ld)
            assert made.tokens == made.docs * made.doc_columns in (128, 144) and made.stages >= 3
            assert made.work_tiles == made.row_tiles * -(-1024 // made.docs) and not made.masked
    assert forward(256, 1024, 32, 24, masked=True).masked
    # Longer documents, few rows of a query's own, and what no such kernel reads.
    several = "sm90_q_short"
    others = [((256, 1024, 32, 65), {}), ((1, 20000, 32, 24), {}), ((256, 1024, 32, 24), {"device": A100}),
              ((300, 1, 300, 24), {"layout": OWN})]  # fmt: skip
    for shape, options in others:
        assert forward(*shape, **options).kernel != several
    for traits in ({"scaled": True}, {"tma_compatible": False}, {"dtype": plan.Dtype.int8}):
        assert forward(256, 1024, 32, 24, **traits).kernel != several
    # Packed documents of a mean length: most are less than half as long again.
    packed = forward(1, 1024, 8192, 16, packed=True)
    assert packed.kernel == several and packed.doc_columns == 24 and packed.masked
    assert forward(1, 1024, 8192, 48, packed=True).doc_columns == 64


def test_one_query_and_more_short_documents_than_l2_holds_are_a_stream():
    stream = "sm90_stream"
    for Ld in range(1, 81):
        made = forward(1, 600_000 // Ld, 32, Ld)
        assert made.kernel == stream and made.tokens in (8, 16, 24, 32)
        assert -(-Ld // made.tokens) == -(-Ld // 32) and made.smem_bytes <= 227 * 1024
    # Few documents, many rows, long documents and other GPUs have no stream.
    for shape in ((3000, 32, 24), (20_000, 33, 24), (20_000, 32, 81), (20_000, 32, 24, 136)):
        assert forward(1, *shape).kernel != stream
    for traits in ({"scaled": True}, {"tma_compatible": False}, {"dtype": plan.Dtype.fp32}, {"device": A100}):
        assert forward(1, 20_000, 32, 24, **traits).kernel != stream


@pytest.mark.parametrize("dtype", [plan.Dtype.e4m3, plan.Dtype.e5m2, plan.Dtype.int8])
def test_few_rows_and_many_packed_documents_of_codes_are_a_stream(dtype):
    def kernel(rows, documents, Ld=128, d=128, packed=True, **options):
        options = {"dtype": dtype, "scaled": True, "packed": packed} | options
        return forward(1, documents, rows, Ld, d, **options).kernel

    for device in (H200, A100):
        for rows in (1, 31, 32):
            assert kernel(rows, 60_000, device=device) == "sm80_stream"
            assert kernel(rows, 60_000, 24, device=device) == "sm80_stream"
        assert kernel(33, 60_000, device=device) != "sm80_stream"
        for options in ({"d": 64}, {"packed": False}, {"dtype": plan.Dtype.bf16}, {"tma_compatible": False}):
            assert kernel(32, 60_000, device=device, **options) != "sm80_stream"
    assert kernel(32, 6000) != "sm80_stream"  # too few for Hopper's warps


def test_a_tile_is_narrow_where_a_block_has_one_document_and_copies_are_of_what_a_mask_leaves():
    assert forward(32, 32, 32, 300).tokens == 80 and forward(256, 256, 32, 300).tokens == 152
    assert forward(256, 256, 32, 300, masked=True).compacted and not forward(256, 256, 32, 70).compacted


def test_long_embeddings_go_by_in_chunks_and_share_what_would_not_fit():
    def of_dims(d, dtype=plan.Dtype.bf16, precision=plan.Precision.high, N=64):
        return forward(64, N, 32, 300, d, dtype=dtype, precision=precision)

    resident, streamed = of_dims(256), of_dims(768)
    assert resident.kernel == streamed.kernel == "sm90_q_longd"
    assert not resident.stream_q and resident.cluster == 1 and resident.stages >= 4
    assert streamed.stream_q and streamed.cluster == 2 and streamed.stages >= 4
    assert streamed.grid % 2 == 0 and streamed.work_tiles == streamed.row_tiles * 32
    assert of_dims(768, N=3).cluster == 1  # else every fourth block would idle
    assert of_dims(128, plan.Dtype.fp32).rows == 256 and not of_dims(128, plan.Dtype.fp32).stream_q
    exact = of_dims(128, plan.Dtype.fp32, plan.Precision.highest)
    assert exact.kernel == "sm90_3xtf32" and exact.rows == 128 and exact.partials == 2


def test_warpgroups_part_ways_where_there_are_documents_for_them():
    def shared(*shape, **options):
        made = forward(*shape, **options)
        assert made.kernel == "sm90_d" and made.partials == 1
        teams, members = made.teams, made.members
        assert made.stages % (teams * members) == 0
        return teams, members

    assert shared(1, 1000, 32, 300, 128) == (4, 1)  # a document each
    assert shared(1, 1000, 128, 1024, 128) == (3, 1)  # registers for three
    assert shared(1, 200, 32, 4096, 128) == (2, 2)  # two documents a block
    assert shared(1, 200, 32, 128, 64, scaled=True) == (2, 1)  # of a tile each
    assert shared(1, 650, 32, 4096, 128) == (2, 2)  # five, which four teams would take in two turns
    assert shared(1, 800, 32, 4096, 128) == (4, 1)
    assert shared(1, 100, 32, 300, 128) == (1, 3)  # one: its tiles in turn
    assert shared(1, 100, 32, 200, 128) == (1, 2)
    assert shared(1, 100, 32, 300, 768) == (1, 2)  # a tile is many stages
    assert shared(1, 100, 64, 300, 1024) == (1, 1)  # and fills the ring alone
    # Queries that share a tile without dividing it; one tile each.
    assert shared(5, 3, 20, 40, 128, scaled=True) == (1, 1)
    assert shared(256, 16, 32, 1030, 512, OWN) == (2, 1)  # each team holds a Q of 32 KB


@pytest.mark.parametrize("dtype", [plan.Dtype.e4m3, plan.Dtype.e5m2, plan.Dtype.int8])
def test_codes_multiply_as_they_are_where_a_kernel_can(dtype):
    def of(Nq, d, **options):
        return forward(Nq, 100, 32, 300, d, dtype=dtype, **options)

    for Nq, kernel in ((1, "sm90_d"), (64, "sm90_q")):
        for d, chunks in ((16, 1), (128, 1), (256, 2)):
            made = of(Nq, d)
            assert (made.compute.name, made.kernel, made.k_chunks) == (dtype.name, kernel, chunks)
        assert of(Nq, 128, tma_compatible=False).kernel == "dequantized"
        older = "sm80_d" if Nq == 1 else "sm80_q"
        assert of(Nq, 128, device=A100).kernel == of(Nq, 256, device=A100).kernel == older
        assert of(Nq, 272, device=A100).kernel == "dequantized"
    split = of(64, 512)
    assert (split.compute.name, split.kernel, split.k_chunks) == (dtype.name, "sm90_q_longd", 4)


def test_int8_tiles_are_whole_sixteens():
    for Ld in range(1, 1200, 7):
        assert forward(64, 64, 32, Ld, dtype=plan.Dtype.int8).tokens % 16 == 0


def test_float32_multiplies_as_its_precision_says():
    names = {"highest": "tf32x3", "high": "tf32", "medium": "bf16", "fp16": "fp16"}
    assert {precision.name for precision in plan.Precision} == names.keys()
    for precision in plan.Precision:
        made = forward(8, 8, 32, 300, dtype=plan.Dtype.fp32, precision=precision)
        assert made.compute.name == names[precision.name]


@pytest.mark.parametrize("geforce", [False, True])
@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120, 121])
def test_float32_at_full_accuracy_takes_the_fastest_products(capability, geforce):
    device = plan.device_of_capability(capability, 100, geforce)
    rates = plan.rates_of(device)
    ffma = 0.53 * rates.ffma > 0.39 * rates.tf32 / 3  # what kernels reach of it
    assert ffma == (geforce or capability != 80)
    for Nq, many_rows in ((1, False), (64, True)):
        for traits, d in (({}, 256), ({"masked": True}, 768), ({"tma_compatible": False}, 67)):
            made = forward(Nq, 300, 32, 300, d, device=device, dtype=plan.Dtype.fp32, **traits)
            assert made.kernel == "sm80" and made.many_rows == many_rows
            assert made.compute == (plan.Compute.fp32 if ffma else plan.Compute.tf32x3)
            assert made.stages >= 2 and (made.rows, made.tokens) == ((256, 64) if Nq > 1 else (32, 128))
    for precision, compute in ((plan.Precision.high, "tf32"), (plan.Precision.medium, "bf16")):
        made = forward(64, 300, 32, 300, device=device, dtype=plan.Dtype.fp32, precision=precision)
        assert made.compute.name == compute


def test_packed_documents_are_dealt_to_the_blocks_of_a_row_tile():
    def packed(rows, documents, Ld, d=128):
        return forward(1, documents, rows, Ld, d, packed=True)

    few = packed(2560, 128, 300)
    assert few.kernel == "sm90_q" and few.lpt and few.grid == 13 * 10
    for plain in (few, packed(200, 128, 300)):
        assert not plain.masked and not plain.compacted  # read where they lie, all columns alike
    assert not packed(20000, 128, 300).lpt  # a row tile has a block or two
    rerank = packed(32, 700, 300)
    assert rerank.kernel == "sm90_d" and rerank.lpt and rerank.grid == 132
    assert not packed(32, 10000, 300).lpt
    assert packed(2560, 128, 300, d=200).kernel == "sm80_q"


def test_9_0_holds_packed_rows_of_129_to_256_dims_alone_in_registers():
    """A wheel has no other code of the kernels that do for 9.0a (tools/code_for.py)."""
    taken = set()
    lengths, dims = ((1, 40, 256), (8, 32, 300), (9, 40, 300, 2000)), (48, 64, 128, 136, 256, 264, 512)
    for layout, dtype, Nq, Lq, Ld, d in product(plan.Layout, plan.Dtype, *lengths, dims):
        size = plan.Sizes(layout, Nq, 1000, Lq, Ld, d)
        for precision, masked, scaled, packed in product(plan.Precision, *3 * [(False, True)]):
            traits = plan.ForwardTraits(dtype, precision, masked, scaled, True, packed)
            made = plan.plan_forward(size, traits, H200)
            if made.kernel in ("sm80_q", "sm80_d"):
                assert packed and 128 < d <= 256 and made.compute in (plan.Compute.bf16, plan.Compute.fp16)
                taken.add(made.kernel)
    assert taken == {"sm80_q", "sm80_d"}
