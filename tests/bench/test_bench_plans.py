"""The sweep of plans: what is forced, timed and made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.command_line import main
from bench.harness import results
from bench.harness.shape import IN_BATCH, Shape
from bench.tuning import kernel_fingerprint, plan_regret


def test_dry_run_is_resumed_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plans.json"
    options = ["plans", "--dry-run", "--out", str(out), "--masked", "1", "--others", "1"]
    assert main([*options, "--count", "1"]) == 0
    assert main([*options, "--count", "2", "--merge"]) == 0
    headers, rows = results.split(results.read(out))
    assert len(headers) == 2 and {r["variant"] for r in rows} == set(plan_regret.VARIANTS)
    assert len(rows) == 3 + len(plan_regret.OTHERS) and f"{len(rows)} shapes" in capsys.readouterr().out
    for row in rows:
        assert not row.get("error") and row["plan"] in row["times"] and row["best"] in row["times"]
        wanted = row["times"][row["plan"]] / row["times"][row["best"]] - 1
        assert row["regret"] == pytest.approx(wanted, abs=1e-2)


def test_figures_and_what_was_missed() -> None:
    def row(regret: float, variant: str = plan_regret.PLAIN) -> results.Row:
        shape = Shape("x", 32, 32, 32, 300, 128, IN_BATCH)
        times = {"rows 80": 10.0 * (1 + regret), "wide": 10.0}
        more = {"plan": "rows 80", "best": "wide", "times": times, "regret": regret, "variant": variant}
        return results.new_row(plan_regret.SUITE, shape, "fwd", torch.bfloat16, "x", **more)

    rows = [row(0.0), row(0.02), row(0.3), row(0.06, plan_regret.MASKED), {**row(0.0), "regret": None}]
    assert plan_regret.figures(rows[:3]) == ["2.0%", "30.0%", "30.0%", "1 of 3"]
    assert {k: len(v) for k, v in plan_regret.by_variant(rows).items()} == {
        plan_regret.PLAIN: 3,
        plan_regret.MASKED: 1,
    }
    assert [line[-1] for line in plan_regret.missed(rows)] == ["30%", "6%"]
    text = plan_regret.summary([*rows, {**row(0.0), "mismatch": ["wide"]}])
    assert "wide differ from rows 80" in text and "1 of 4" in text


def test_the_planner_chooses_by_what_was_measured() -> None:
    records = [results.split(results.read(path)) for path in results.DIRECTORY.glob("plans-*.json")]
    recent = [rows for headers, rows in records if not any(map(kernel_fingerprint.are_older, headers))]
    if not recent:
        pytest.skip("all recorded times are older than the kernels")
    for found in recent:
        rows = [plan_regret.judged(row) for row in found if row["variant"] in plan_regret.JUDGED]
        assert not [row["error"] for row in rows if row.get("error") or row.get("mismatch")]
        regrets = sorted(row["regret"] for row in rows)
        assert regrets[len(regrets) // 2] < 0.001 and sum(regrets) / len(regrets) < 0.015
        assert sum(regret > plan_regret.REGRET for regret in regrets) <= 0.06 * len(regrets)
