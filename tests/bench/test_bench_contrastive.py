"""The suite of contrastive losses: exact results, rows, and the page with the model of time and memory."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench.harness import batches, named_shapes, results, run_header
from bench.harness.library import EINSUM, LIK, OURS
from bench.harness.shape import BatchShape
from bench.peers import losses
from bench.peers.implementations import KEYS
from bench.suites import losses as suite
from late_interaction._doctor.ceilings import Ceilings
from late_interaction.reference import maxsim_reference
from tests.bench.shared import CPU, bench, dry_run

large_batches = pytest.importorskip("bench.report.large_batches", reason="pandas is not installed")
tables = pytest.importorskip("bench.report.tables")
SHAPES = named_shapes.TINY_BATCHES
MANY_TOKENS = BatchShape("many-tokens", 4, 4, 7, 9, d=16)  # more of a query than there are directions


def sequences(x, offsets):
    if offsets is None:
        return [*x]
    return [x[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def plain_loss(batch):
    """By definition, a pair at a time."""
    queries, documents = sequences(batch.Q, batch.cu_q), sequences(batch.D, batch.cu_d)
    scores = [torch.cat([maxsim_reference(q[None], d[None])[0] for d in documents]) for q in queries]
    return F.cross_entropy(torch.stack(scores) / batches.TEMPERATURE, torch.arange(len(queries)))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_exact_losses_are_by_definition(shape, monkeypatch):
    batch = batches.draw_batch(shape, CPU, torch.float64)
    torch.testing.assert_close(batches.exact_loss(batch), plain_loss(batch))
    monkeypatch.setattr(batches, "_SLICE", 700)  # several slices of both sides
    torch.testing.assert_close(batches.exact_loss(batch), plain_loss(batch))


@pytest.mark.parametrize("shape", [*SHAPES, MANY_TOKENS], ids=lambda s: s.name)
def test_the_gradients_of_planted_batches_are_exact(shape, monkeypatch):
    monkeypatch.setattr(batches, "_SLICE", 50)
    known = batches.plant_batch(shape, batches.draw_batch(shape, CPU, torch.float64))
    loss, *gradients = batches.step(plain_loss, known.batch)
    torch.testing.assert_close(known.loss, loss)
    for got, want in zip(known.gradients, gradients, strict=True):
        torch.testing.assert_close(got.view(want.shape), want)


def test_positives_stand_out_as_the_page_says():
    batch = batches.draw_batch(BatchShape("x", 512, 512, 32, 180), CPU, torch.float32)
    D = batch.D.flatten(0, 1)
    scores = torch.stack([(q @ D.T).view(32, -1, 180).amax(-1).sum(0) for q in batch.Q[:24]])
    weights = (scores / batches.TEMPERATURE).softmax(1)
    share = (weights > 2**-12).float().mean().item()
    assert 1 / 512 < share < 0.02  # a few pairs of each query
    assert 1e-3 < -weights.diagonal().log().mean().item() < 5


def test_a_dry_run_takes_every_way_to_the_loss_through(tmp_path):
    rows = dry_run(tmp_path, "contrastive")
    done = {(r["shape"], r["impl"], r["variant"]) for r in rows if r["wall_us"] and not r.get("error")}
    padded = {(OURS, losses.EXACT), (OURS, losses.LEAST), (OURS, losses.WITH_TAIL), (OURS, losses.SAVED)}
    more = {(OURS, losses.RECOMPUTED), (EINSUM, losses.SCORED)}
    single = {(OURS, losses.EXACT), (OURS, losses.SAVED), (EINSUM, losses.MATMUL)}
    for name, ways in (("tiny-batch-12", padded | more), ("tiny-packed", padded), ("tiny-single", single)):
        assert {(impl, variant) for shape, impl, variant in done if shape == name} == ways
    for r in rows:
        if r["wall_us"]:
            assert r["rel_err"] < 1e-2 and r["grad_err"] < (6e-3 if r["impl"] == OURS else 0.1)
            assert r["gradients_mib"] > 0
        else:
            assert r["skipped"] in ("maxsim_varlen always saves its winners", "no einsum of packed tokens")


def ours():
    return bench("contrastive", SHAPES[0], KEYS["ours"]())


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    def loss(x):
        return plain_loss(batches.Batch(x.Q.detach(), x.D)) + 0 * x.Q.sum()

    wrong = losses.Method(OURS, losses.EXACT, lambda shape: loss, lambda shape: 0.0)
    monkeypatch.setattr(losses, "methods", lambda shape: (wrong,))
    (row,) = suite.measure_contrastive(ours())
    assert "a gradient is off" in row["error"] and row["wall_us"] is None


def test_steps_of_large_batches_are_timed_few_times_and_not_at_all_over_the_limit(monkeypatch):
    monkeypatch.setattr(suite, "FEW", 12)
    asked = ours()
    rows = suite.measure_contrastive(asked)
    assert all(r["wall_us"] > 0 and r["grad_err"] < 6e-3 for r in rows)
    monkeypatch.setattr(suite, "STEP_LIMIT_S", 0.0)
    found = {r["variant"]: r for r in suite.measure_contrastive(asked)}
    assert found[losses.EXACT]["wall_us"] and found[losses.WITH_TAIL]["wall_us"]
    for variant in (losses.SAVED, losses.RECOMPUTED):
        row = found[variant]
        assert row["over_limit_s"] == 0.0 and row["wall_us"] is None and "at a batch of 12" in row["error"]


def test_what_cannot_be_done_is_skipped_with_its_reason():
    by_impl = {(m.impl, m.variant): m for m in losses.methods(named_shapes.BATCHES[0])}
    large = next(s for s in named_shapes.BATCHES if s.name == "batch-8192")
    with pytest.raises(losses.UnsupportedError, match="32 bits"):
        by_impl[LIK, losses.SCORED].make(large)
    with pytest.raises(losses.UnsupportedError, match="773 GB"):
        by_impl[EINSUM, losses.SCORED].kept_bytes(large)
    with pytest.raises(losses.UnsupportedError, match="keeps nothing of this batch"):
        by_impl[OURS, losses.LEAST].make(large)
    on_gpu = SimpleNamespace(device=torch.device("cuda"), on_gpu=True)
    batch = SimpleNamespace(Q=torch.empty(0), D=torch.empty(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(total_memory=4e9))
        with pytest.raises(losses.UnsupportedError, match="takes 4 GB"):
            suite.check_fits(on_gpu, by_impl[OURS, losses.SAVED], large, batch)
        suite.check_fits(on_gpu, by_impl[OURS, losses.EXACT], large, batch)


# ---- the page ----

DEVICE = large_batches.Device("Some GPU", 800e12, 8e12)


def record(gpu="Some GPU", large=True):
    """A run of the suite whose steps follow the model of a device with rows at 8 TB/s."""
    words = ["run", "--suite", "contrastive", *(["--large"] if large else [])]
    header = run_header.new_header(CPU, Ceilings(800.0, 400.0, 4.0, 3.9), words)
    rows = []
    for shape in (*named_shapes.BATCHES, *(named_shapes.LARGE_BATCHES if large else ())):
        size = large_batches.Sizes(shape.Nq, shape.Lq, shape.Ld, shape.d)
        for method in losses.methods(shape):
            row = results.new_row(
                "contrastive", shape, "fwd+bwd", torch.bfloat16, method.impl, variant=method.variant,
                grad_err=1e-3, run=header["run"], gpu_method="events",
            )  # fmt: skip
            if method.variant == losses.EXACT:
                us = 1e6 * large_batches.seconds(size, DEVICE)
                row |= {"gpu_us": us, "wall_us": us, "gradients_mib": 10.0}
                row["peak_mib"] = 10 + large_batches.beside_bytes(size) / 2**20
            elif method.variant == losses.RECOMPUTED and shape.Nq > 8192:
                row |= {"over_limit_s": 10.0, "error": "TimeoutError: a step takes 2.8 s at a batch of 8192"}
            elif method.impl == EINSUM and method.variant == losses.SCORED:
                row["skipped"] = "the similarity tensor alone takes 48 GB"
            rows.append(row)
    return [header | {"gpu": gpu}, *rows]


def of(rows):
    headers, measured = results.split(rows)
    return tables.Record(Path("some-gpu.json"), headers, tables.frame(measured))


def test_the_model_finds_the_rate_that_the_steps_follow():
    header, *rows = record()
    device = large_batches.fitted(of(record()))
    assert device is not None and device.cache == pytest.approx(8e12, rel=1e-9)
    table = large_batches.model_table(of(record()), device)
    body = [re.findall(r"[^|\s]+", line) for line in table.splitlines()[2:]]
    assert [line[0] for line in body] == ["2,048", "8,192", "16,384", "65,536"]
    assert all(float(line[3]) == 1.0 and line[4] == line[5] for line in body)
    fast = [{**r, "gpu_us": 1.0} for r in rows if r["variant"] == losses.EXACT]
    assert large_batches.fitted(of([header, *fast])) is None  # less than its products take
