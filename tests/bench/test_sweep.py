"""The sweep over random shapes: its draws, compiling ahead, what it records and what it calls a loss."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from bench.command_line import main
from bench.harness import results
from bench.harness.library import EINSUM, FLASH, LIK, OURS
from bench.harness.shape import IN_BATCH, KD, PAIRS, Shape
from bench.peers import triton_tuning
from bench.peers.implementations import KEYS
from bench.peers.triton_tuning import padded_work
from bench.suites import sweep
from bench.tuning import random_shapes

# ---- shapes ----


def test_the_same_seed_draws_the_same_shapes_within_the_caps():
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


def test_without_processes_all_is_left_to_the_calls():
    job = triton_tuning.Job("flash", SHAPE, None, {})
    with triton_tuning.Compilers(("flash",), processes=0) as compilers:
        assert compilers.run([job], 1.0) == "left to the calls"


def test_processes_say_what_went_wrong_and_never_hold_up_the_sweep():
    jobs = [triton_tuning.Job("lik", SHAPE, part, {}) for part in range(3)]
    with triton_tuning.Compilers(("lik",), processes=1) as compilers:
        said = compilers.run(jobs, 0.0)
        assert said.startswith("0 of 3 jobs")
        said = compilers.run(jobs, 60.0)  # in new processes, which lack a GPU or the peer
        assert said.startswith("3 of 3 jobs") and (torch.cuda.is_available() or "3 failed" in said)


# ---- the run ----


def test_dry_run_is_resumed_where_it_was_stopped(tmp_path, capsys):
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
    said = capsys.readouterr().out
    assert "5 of 9 shapes are there already" in said
    assert "| wall time" in said or find_spec("pandas") is None
    assert main([*options, "--count", "400", "--merge", "--seconds", "3.2"]) == sweep.UNFINISHED
    assert 9 <= len({r["shape"] for r in results.split(results.read(out))[1]}) < 400


def test_a_library_that_fails_or_is_wrong_costs_its_row_alone(capsys):
    def off(shape, backward, train):
        return lambda Q, D: torch.full(shape.scores_shape, 7.0)

    def fails(shape, backward, train):
        raise ValueError("not this layout")

    peers = [SimpleNamespace(name=LIK, score=off), SimpleNamespace(name=FLASH, score=fails)]
    for shape in (Shape("x", 3, 2, 5, 9, 16, layout) for layout in (IN_BATCH, KD)):
        rows = sweep.run_shape(shape, [KEYS["ours"](), *peers], torch.device("cpu"), 5)
        ours, wrong, failed = rows
        assert ours["rel_err"] < 1e-5 and wrong["mismatch"] and "not this layout" in failed["error"]
        results.print_faults(rows)
        said = capsys.readouterr().out.splitlines()
        assert len(said) == 2 and f"x {LIK}: scores are off" in said[0] and f"x {FLASH}: Value" in said[1]


def row(name, impl, us):
    out = results.new_row("sweep", Shape(name, 2, 3, 4, 5, 128), "fwd", torch.bfloat16, impl)
    return out | {"gpu_us": us, "wall_us": 50.0, "gpu_spread": 0.01, "gpu_method": "graph"}


def test_a_loss_is_against_the_better_peer(tmp_path):
    own_records = pytest.importorskip("bench.report.own_records", reason="pandas is not installed")
    rows = [row("a", OURS, 10.0), row("a", LIK, 20.0), row("a", FLASH, 9.0)]
    rows += [row("b", OURS, 10.0), row("b", LIK, 9.6), row("b", FLASH, None)]
    rows += [row("c", OURS, 10.0), row("c", LIK, 40.0)]
    path = tmp_path / "sweep-some-gpu.json"
    results.write(path, rows)
    _, note, table, losses = own_records.sweep(path)
    assert note.startswith("3 shapes drawn") and note.endswith(f"beside {LIK}, {FLASH}.")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    shares = dict(zip(cells[0], cells[2], strict=True))
    assert (shares["worst"], shares["p50"], shares["geomean"]) == ("0.90x", "0.96x", "1.51x")
    assert cells[2][-1] == "1 of 3" and cells[3] == ["wall time", *7 * ["1.00x"], "0 of 3"]
    (loss,) = losses.splitlines()[2:]
    assert [cell.strip() for cell in loss.split("|")[2:-1]] == ["10.0", "9.00", FLASH, "1.11"]
    results.write(path, [row("c", OURS, 10.0), row("c", LIK, 40.0)])
    _, _, table = own_records.sweep(path)
    assert table.splitlines()[2].count("4.00x") == 7
