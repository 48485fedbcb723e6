"""The sweep of plans: what is forced, timed and made of it."""

from importlib.util import find_spec

import pytest
import torch

from bench.command_line import main
from bench.harness import results
from bench.harness.shape import IN_BATCH, Shape
from bench.tuning import kernel_fingerprint, plan_regret


def test_dry_run_is_resumed_where_it_was_stopped(tmp_path, capsys):
    out = tmp_path / "plans.json"
    options = ["plans", "--dry-run", "--out", str(out), "--masked", "1", "--others", "1"]
    assert main([*options, "--count", "1"]) == 0
    assert main([*options, "--count", "2", "--merge"]) == 0
    headers, rows = results.split(results.read(out))
    assert len(headers) == 2 and {r["variant"] for r in rows} == set(plan_regret.VARIANTS)
    said = capsys.readouterr().out
    assert len(rows) == 3 + len(plan_regret.OTHERS) and f"{len(rows)} shapes" in said
    assert find_spec("pandas") is None or all(f"| {name} " in said for name in plan_regret.VARIANTS)
    for row in rows:
        assert not row.get("error") and row["plan"] in row["times"] and row["best"] in row["times"]
        wanted = row["times"][row["plan"]] / row["times"][row["best"]] - 1
        assert row["regret"] == pytest.approx(wanted, abs=1e-2)


def test_figures_and_what_was_missed(tmp_path):
    own_records = pytest.importorskip("bench.report.own_records", reason="pandas is not installed")
    shape = Shape("x", 32, 32, 32, 300, 128, IN_BATCH)
    plain, masked = (plan_regret.names(shape, v, *plan_regret.H200) for v in plan_regret.JUDGED.values())

    def row(regret, plans=plain, variant=plan_regret.PLAIN):
        """The planner's choice takes so much longer than another plan."""
        times = {plans[0]: 10.0 * (1 + regret), plans[1]: 10.0}
        more = {"best": plans[1], "times": times, "variant": variant}
        return results.new_row(plan_regret.SUITE, shape, "fwd", torch.bfloat16, "x", **more)

    rows = [row(0.0), row(0.02), row(0.3), row(0.06, masked, plan_regret.MASKED)]
    rows.append(row(0.5) | {"times": {plain[1]: 10.0}})  # the choice was not timed
    path = tmp_path / "plans-some-gpu.json"
    results.write(path, [*rows, row(0.9, variant="int8")])
    _, _, table, missed = own_records.plans(path, plan_regret.JUDGED)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert lines == [["plain", "2.0%", "30.0%", "30.0%", "1 of 3"], ["d_mask", *3 * ["6.0%"], "1 of 1"]]
    lines = [[cell.strip() for cell in line.split("|")[3:-1]] for line in missed.splitlines()[2:]]
    assert lines == [
        [plain[0], "13.0", plain[1], "10.0", "30%"],
        [masked[0], "10.6", masked[1], "10.0", "6%"],
    ]


def test_the_planner_chooses_by_what_was_measured():
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
