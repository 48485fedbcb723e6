"""The sweep over random shapes: its draws, compiling ahead, what it records and what it calls a loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.command_line import main
from bench.harness import results, sweep_summary
from bench.harness.library import EINSUM, FLASH, LIK, OURS
from bench.harness.shape import IN_BATCH, KD, PAIRS, Shape
from bench.peers import triton_tuning
from bench.peers.triton_tuning import padded_work
from bench.suites import sweep
from bench.tuning import random_shapes

# ---- shapes ----


def test_the_same_seed_draws_the_same_shapes_within_the_caps() -> None:
    shapes = random_shapes.draw_shapes(300)
    assert shapes == random_shapes.draw_shapes(300) and shapes != random_shapes.draw_shapes(300, seed=1)
    assert shapes[:50] == random_shapes.draw_shapes(50)  # so that a longer sweep goes on from a shorter one
    assert len({s.name for s in shapes}) == 300
    for s in shapes:
        assert 1 <= s.Nq <= 512 and 1 <= s.Nd <= 4096 and 1 <= s.Lq <= 1100 and 1 <= s.Ld <= 4100
        assert 8 <= s.d <= 1024 and s.input_bytes(2) <= random_shapes.MAX_BYTES
        assert s.similarities <= random_shapes.MAX_SIMILARITIES and padded_work(s) <= random_shapes.MAX_WORK
        assert s.layout != PAIRS or s.Nd == 1
        assert s.layout == IN_BATCH or s.Lq <= 512


# ---- compiling ahead ----

SHAPE = Shape("a", 2, 3, 16, 100, 64)


def test_without_processes_all_is_left_to_the_calls() -> None:
    job = triton_tuning.Job("flash", SHAPE, None, {})
    with triton_tuning.Compilers(("flash",), processes=0) as compilers:
        assert compilers.run([job], 1.0) == "left to the calls"


def test_processes_say_what_went_wrong_and_never_hold_up_the_sweep() -> None:
    jobs = [triton_tuning.Job("lik", SHAPE, part, {}) for part in range(3)]
    with triton_tuning.Compilers(("lik",), processes=1) as compilers:
        said = compilers.run(jobs, 0.0)
        assert said.startswith("0 of 3 jobs")
        said = compilers.run(jobs, 60.0)  # in new processes, which lack a GPU or the peer
        assert said.startswith("3 of 3 jobs") and (torch.cuda.is_available() or "3 failed" in said)


# ---- the run ----


def test_dry_run_is_resumed_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    options = ["sweep", "--dry-run", "--out", str(out)]
    assert main([*options, "--count", "5"]) == 0
    first = results.split(results.read(out))[1]
    assert {r["impl"] for r in first} == {OURS, EINSUM} and len({r["shape"] for r in first}) == 5
    for r in first:
        assert tuple(r)[: len(results.KEYS)] == results.KEYS
        assert r["wall_us"] > 0 and r["rel_err"] < 1e-2 and not r.get("error")
        assert r["impl"] != OURS or "maxsim_forward" in r["plan"]
    assert main([*options, "--count", "9", "--merge"]) == 0
    headers, rows = results.split(results.read(out))
    assert rows[: len(first)] == first and len({r["shape"] for r in rows}) == 9
    assert len(headers) == 2 and headers[0]["command"].startswith("python -m bench sweep")
    assert "5 of 9 shapes are there already" in capsys.readouterr().out
    assert main([*options, "--count", "400", "--merge", "--seconds", "3.2"]) == sweep.UNFINISHED
    assert 9 <= len({r["shape"] for r in results.split(results.read(out))[1]}) < 400


def test_a_library_that_fails_or_is_wrong_costs_its_row_alone() -> None:
    def off(shape: Shape, backward: str | None, train: bool) -> Any:
        return lambda Q, D: torch.full(shape.scores_shape, 7.0)

    def fails(shape: Shape, backward: str | None, train: bool) -> Any:
        raise ValueError("not this layout")

    from bench.peers.implementations import Ours

    peers = [SimpleNamespace(name=LIK, score=off), SimpleNamespace(name=FLASH, score=fails)]
    for shape in (Shape("x", 3, 2, 5, 9, 16, layout) for layout in (IN_BATCH, KD)):
        rows = sweep.run_shape(shape, [Ours(), *peers], torch.device("cpu"), 5)  # type: ignore[list-item]
        ours, wrong, failed = rows
        assert ours["rel_err"] < 1e-5 and wrong["mismatch"] and "not this layout" in failed["error"]
        text = sweep_summary.summary(rows)
        assert f"{LIK} is" in text and f"{FLASH} failed on 1" in text


def row(name: str, impl: str, us: float | None, wall: float = 50.0, layout: str = IN_BATCH) -> results.Row:
    shape = Shape(name, 2, 3, 4, 5, 128, layout)
    out = results.new_row("sweep", shape, "fwd", torch.bfloat16, impl)
    return {
        **out,
        "gpu_us": us,
        "wall_us": wall,
        "gpu_spread": 0.01,
        "gpu_method": "graph",
        "plan": "sm90_q; 256 x 152",
    }


def test_a_loss_is_against_the_better_peer_and_names_the_plan() -> None:
    rows = [row("a", OURS, 10.0), row("a", LIK, 20.0), row("a", FLASH, 9.0)]
    rows += [row("b", OURS, 10.0), row("b", LIK, 9.6), row("b", FLASH, None)]
    rows += [row("c", OURS, 10.0), row("c", LIK, 40.0)]
    (loss,) = sweep_summary.losses(rows)
    assert loss[0] == pytest.approx(10 / 9) and loss[2]["impl"] == FLASH
    text = sweep_summary.summary(rows)
    assert "3 shapes" in text and "on 1 of 3" in text and "worst 0.90x" in text and "sm90_q" in text
    figures = sweep_summary.percentiles([0.25, 0.5, 1.0])
    assert figures["worst"] == 1 and figures["p50"] == 2 and figures["geomean"] == pytest.approx(2)
    assert sweep_summary.percentiles([0.5])["p95"] == 2
