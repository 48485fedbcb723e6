"""What a record must keep to: the rules, merging by whole groups, and the fingerprint of the kernels."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import command_line, recorded_commands
from bench.command_line import main
from bench.harness import named_shapes, recorder, results, run_header, timing
from bench.harness.ceilings import Ceilings
from bench.harness.library import EINSUM, FLASH, LIK, OURS
from bench.harness.settings import Settings
from bench.harness.shape import Shape
from bench.harness.text import number
from bench.report import pages, tables
from bench.suites import run, side_by_side
from bench.tuning import kernel_fingerprint

CPU = torch.device("cpu")
FORWARD, STEP, PACKED = named_shapes.FORWARD[0], named_shapes.TRAINING[0], named_shapes.VARLEN[0]


def header(run: str = "one", command: str = "python -m bench run --suite forward") -> results.Row:
    made = run_header.new_header(CPU, Ceilings(700.0, 350.0, 4.0, 3.9), run=run, gpu="Some GPU", driver="1")
    return {**made, "command": command}


def row(
    impl: str, us: float, run: str = "one", shape: Shape = FORWARD, suite: str = "forward", op: str = "fwd",
    **more: Any,
) -> results.Row:  # fmt: skip
    out = results.new_row(suite, shape, op, torch.bfloat16, impl)
    return {**out, "gpu_us": us, "wall_us": us + 10, "gpu_method": "graph", "run": run, **more}


def whole() -> list[results.Row]:
    return [header(), row(OURS, 20.0), row(LIK, 30.0), row(EINSUM, 25.0)]


def broken(rows: list[results.Row]) -> list[str]:
    return recorded_commands.broken_rules(rows)


def test_a_record_of_one_run_by_one_clock_is_in_order() -> None:
    assert broken(whole()) == []


def test_a_group_of_two_runs_breaks_the_rules() -> None:
    (told,) = broken([header(), header("two"), row(OURS, 20.0), row(LIK, 30.0, run="two")])
    assert told == "forward text-short fwd: rows of 2 runs: one, two"


def test_implementations_of_two_clocks_break_the_rules() -> None:
    rows = whole()
    rows[2]["gpu_method"] = "events"
    assert "timed by graphs and by events" in broken(rows)[0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"variant": "sideways"}, "no variant 'sideways'"),
        ({"shape": "no-such"}, "does not measure this shape"),
        ({"Ld": 301}, "does not measure this shape"),
        ({"suite": "plaid"}, "does not measure this suite"),
        ({"impl": "fast-plaid"}, "does not measure fast-plaid"),
        ({"run": "three"}, "no header of run three"),
    ],
)
def test_what_no_command_gives_breaks_the_rules(changed: dict[str, Any], said: str) -> None:
    rows = [header(), {**row(OURS, 20.0), **changed}]
    assert said in broken(rows)[0]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python -m bench run --suite nosuch", "nosuch"),
        ("python -m bench run --onwards", "--onwards"),
        ("python -m bench sweep --again", "--again"),
        ("python -m bench run --merge --impl ours", "whole groups"),
        ("python -m bench run --suite forward --shapes colpali", "does not measure this shape"),
        ("python -m bench --suite forward --impl lik", f"does not measure {OURS}"),
        ("python -m bench report", "records nothing"),
        ("vi record.json", "records nothing"),
    ],
)
def test_a_command_that_cannot_be_run_again_breaks_the_rules(command: str, said: str) -> None:
    assert any(said in line for line in broken([header(command=command), row(OURS, 20.0)]))


def test_a_step_whose_gradients_were_not_compared_breaks_the_rules() -> None:
    step = row(OURS, 90.0, shape=PACKED, suite="varlen", op="fwd+bwd", variant="forward + backward")
    own = header(command="python -m bench run --suite varlen")
    assert "gradients were not compared" in broken([own, step])[0]
    assert broken([own, {**step, "grad_err": 2e-3}]) == []


def test_the_recorded_runs_keep_to_the_rules() -> None:
    for path in sorted(results.DIRECTORY.glob("*.json")):
        if not results.has_own_form(path):
            assert broken(results.read(path)) == [], path.name


def test_a_check_of_a_folder_names_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [header(), header("two"), row(OURS, 20.0), row(LIK, 30.0, run="two")]
    results.write(tmp_path / "some-gpu.json", rows)
    readme = tmp_path / "README.md"
    readme.write_text(f"{pages.BEGIN}\n{pages.END}\n")
    options = ["--readme", str(readme), "--results", str(tmp_path)]
    assert main(["report", *options]) == 0 and main(["check", *options]) == 1
    assert "some-gpu.json: forward text-short fwd: rows of 2 runs" in capsys.readouterr().err


# ---- merging ----


def test_a_group_is_replaced_as_a_whole_and_the_others_are_kept() -> None:
    other = named_shapes.FORWARD[1]
    earlier = [*whole(), row(OURS, 40.0, shape=other)]
    later = [header("two"), *(row(impl, 10.0, run="two") for impl in (OURS, LIK, EINSUM, FLASH))]
    rows = results.replaced(earlier, later)
    headers, measured = results.split(rows)
    assert [h["run"] for h in headers] == ["one", "two"]
    assert [(r["shape"], r["impl"], r["run"]) for r in measured] == [
        (other.name, OURS, "one"), *((FORWARD.name, impl, "two") for impl in (OURS, LIK, EINSUM, FLASH)),
    ]  # fmt: skip
    assert broken(rows) == []


def test_one_implementation_is_not_put_beside_those_of_another_run(tmp_path: Path) -> None:
    with pytest.raises(results.IncompleteError, match=rf"{LIK}.*another run"):
        results.replaced(whole(), [header("two"), row(OURS, 10.0, run="two"), row(EINSUM, 9.0, run="two")])
    path = tmp_path / "some-gpu.json"
    results.write(path, whole())
    before = path.read_text()
    with pytest.raises(results.IncompleteError):
        results.Results(path, header("two"), merge=True).add([row(OURS, 10.0)])
    assert path.read_text() == before


def test_variants_of_other_dtypes_belong_to_their_group() -> None:
    plain = row(OURS, 20.0, suite="variants", variant="plain")
    halves = {**row(OURS, 21.0, suite="variants", variant="fp16"), "dtype": "float16"}
    later = {**plain, "run": "two"}
    rows = results.replaced([header(), plain, halves], [header("two"), later])
    assert [r for r in rows if r.get("kind") != "header"] == [later]


@pytest.mark.parametrize("more", [["--impl", "ours"], ["--dtype", "fp16"]])
def test_a_run_of_a_part_is_not_merged(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dry-run", "--merge", *more]) == 2 and "whole groups" in capsys.readouterr().err


def test_parts_become_records_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, out = tmp_path / "one.json", tmp_path / "two.json", tmp_path / "records"
    results.write(one, whole())
    step = row(
        OURS, 90.0, run="b", shape=STEP, suite="training", op="fwd+bwd", winners="uniform", grad_err=2e-3
    )
    results.write(two, [header("b", "python -m bench run --suite training"), step])
    assert main(["merge", str(one), str(two), "--out", str(out)]) == 0
    assert {r["suite"] for r in results.split(results.read(out / "some-gpu.json"))[1]} == {
        "forward",
        "training",
    }
    mixed = copy.deepcopy(whole())
    mixed[2]["gpu_method"] = "events"
    results.write(one, mixed)
    before = (out / "some-gpu.json").read_text()
    assert main(["merge", str(one), "--out", str(out)]) == 1 and "by events" in capsys.readouterr().err
    assert (out / "some-gpu.json").read_text() == before


# ---- one clock, limits, ratios ----


def test_where_one_cannot_be_captured_all_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def repetition(calls: Any, capture: bool = True) -> timing.Repetition:
        return timing.Repetition(
            calls[0], 1, "graph" if capture and calls[0] is not calls_that_wait[0] else "events"
        )

    calls_that_wait = [lambda: None]
    monkeypatch.setattr(timing, "repetition", repetition)
    ours = [lambda: 1]
    assert [r.method for r in timing.by_one_clock([ours, ours], True)] == ["graph", "graph"]
    assert [r.method for r in timing.by_one_clock([ours, calls_that_wait], True)] == ["events", "events"]

    timed: list[tuple[Any, bool]] = []

    def gpu_time(calls: Any, effort: Any, capture: bool) -> timing.GpuTime:
        timed.append((calls, capture))
        return timing.GpuTime(9.0, 0.0, "events")

    monkeypatch.setattr(side_by_side, "gpu_time", gpu_time)
    settings = Settings(CPU, torch.bfloat16, [], timing.QUICK, Ceilings(), 60)
    rows = [row(OURS, 5.0), {**row(LIK, 7.0), "gpu_method": "events"}]
    side_by_side._by_one_clock(settings, [(rows[0], ours), (rows[1], calls_that_wait)])  # type: ignore[list-item]
    assert timed == [(ours, False)]
    assert [(r["gpu_us"], r["gpu_method"]) for r in rows] == [(9.0, "events"), (7.0, "events")]


def test_a_limit_is_told_even_where_a_compiler_hides_it() -> None:
    with pytest.raises(TimeoutError), timing.time_limit(0.05):
        try:
            while True:
                pass
        except TimeoutError as error:
            raise RuntimeError("it did not compile") from error


def test_who_ran_out_of_time_says_so_and_is_not_asked_again() -> None:
    from bench.peers.implementations import KEYS

    class Slow(KEYS["einsum"]):  # type: ignore[misc]
        calls = 0

        def score(self, shape: Shape, backward: str | None, train: bool):  # type: ignore[no-untyped-def]
            def run(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
                Slow.calls += 1
                while True:
                    pass

            return run

    settings = Settings(CPU, torch.float32, [Slow()], timing.QUICK, Ceilings(), 0.05)
    tiny = Shape("t", 3, 4, 5, 7, d=16)
    rows = [
        side_by_side.run_shape(settings, "training", tiny, "fwd+bwd", kind)[0]
        for kind in side_by_side.WINNER_KINDS
    ]
    assert [r["over_limit_s"] for r in rows] == [0.05, 0.05] and Slow.calls == 1
    assert tables.cell(rows) == "over 0.05 s"


def test_a_cell_says_why_it_has_no_time() -> None:
    empty = results.new_row("forward", FORWARD, "fwd", torch.bfloat16, LIK)
    assert tables.cell([{**empty, "over_limit_s": 20.0, "error": "TimeoutError"}]) == "over 20 s"
    assert tables.cell([{**empty, "error": "ValueError: parity: off by 1"}]) == "wrong"
    assert tables.cell([{**empty, "error": "OutOfResources"}]) == "fails"
    assert tables.cell([]) == tables.cell([{**empty, "skipped": "no such call"}]) == "-"


def test_the_best_other_counts_pytorch_and_one_clock_alone() -> None:
    ours, lik, einsum = row(OURS, 20.0), row(LIK, 90.0), row(EINSUM, 30.0)
    assert tables.over_best_other(ours, [lik, einsum]) == "1.50x"
    assert tables.over_best_other(ours, [lik, {**einsum, "gpu_method": "events"}]) == "4.50x"
    assert tables.over_best_other(ours, []) == tables.over_best_other(None, [lik]) == "-"
    text = tables.forward_table([header(), ours, lik, einsum])
    assert "| 20.0 / 30.0 | 90.0 / 100 | - | 30.0 / 40.0 | 1.50x |" in text


def test_the_floor_is_of_the_ceilings_of_the_run() -> None:
    ceilings = Ceilings(400.0, 200.0, 2.0, 2.0)
    settings = Settings(CPU, torch.bfloat16, [], timing.QUICK, ceilings, 60)
    large = next(s for s in named_shapes.FORWARD if s.name == "train-256")
    assert settings.floor_us(large, "fwd") == pytest.approx(161.06e9 / 400e12 * 1e6, rel=1e-3)
    assert settings.floor_us(FORWARD, "fwd") == pytest.approx(FORWARD.bytes_moved("fwd", 2) / 2e12 * 1e6)
    table = tables.forward_table([header(), row(OURS, 300.0, shape=large)])
    assert f"| {number(161.06e9 / 700e12 * 1e6)} | 300 / 310 |" in table


# ---- the kernels that a time belongs to ----


def test_a_fingerprint_is_of_code_alone() -> None:
    code = 'int f(int a) { return a; }  // sums\n/* more */ const char* s = "a // b";'
    assert kernel_fingerprint.bare(code) == kernel_fingerprint.bare(
        'int f(int a)\n{ return a; }\nconst char* s = "a // b";'
    )
    assert kernel_fingerprint.bare(code) != kernel_fingerprint.bare(code.replace("return a", "return b"))
    assert kernel_fingerprint.bare(code) != kernel_fingerprint.bare(code.replace("// b", "// c"))


def test_times_without_a_fingerprint_are_older(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kernel_fingerprint.are_older({"run": "one"})
    assert not kernel_fingerprint.are_older({"run": "one", "kernels": kernel_fingerprint.fingerprint()})
    folder = tmp_path / kernel_fingerprint.FOLDER
    folder.mkdir(parents=True)
    source, header, host = folder / "k.cu", tmp_path / "csrc" / "shared.cuh", folder / "run.cpp"
    source.write_text('#include "../../shared.cuh"\nint a = 1; // one')
    header.write_text("int b = 1;")
    monkeypatch.setattr(kernel_fingerprint, "ROOT", tmp_path)
    assert kernel_fingerprint.sources() == {source.resolve(), header.resolve()}
    first = {"kernels": kernel_fingerprint.fingerprint()}
    source.write_text('#include "../../shared.cuh"\nint a = 1;  // the first')
    host.write_text("int c = 1;")
    assert not kernel_fingerprint.are_older(first)
    header.write_text("int b = 2;")
    assert kernel_fingerprint.are_older(first)
    header.write_text("int b = 1;")
    assert not kernel_fingerprint.are_older(first)
    source.write_text("int a = 2;")
    assert kernel_fingerprint.are_older(first)


def test_the_forward_includes_more_than_its_own_folder() -> None:
    names = {path.name for path in kernel_fingerprint.sources()}
    assert {"kernel_limits.h", "argmax.cuh", "wgmma.cuh"} <= names and "entry.cpp" not in names


# ---- recording ----


def test_every_suite_is_in_one_job_and_its_command_exists() -> None:
    from bench.suites.catalog import SUITES

    taken: list[str] = []
    for job in recorder.JOBS:
        args = command_line.parser().parse_args(job.arguments)
        if args.command == "run":
            assert run.problem(args) is None
            taken += args.suite
    assert sorted(taken) == sorted(SUITES)
    for part in {job.part for job in recorder.JOBS}:  # two GPUs, one call
        jobs = [job.seconds for job in recorder.JOBS if job.part == part]
        assert sum(jobs) <= 2 * 590 and max(jobs) < 590


def test_suites_are_measured_where_they_belong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "x.json")
    assert main(["run", "--device", "cpu", "--suite", "forward", "--out", out]) == 2
    assert main(["run", "--dry-run", "--suite", "cpu-threads", "--out", out]) == 2
    said = capsys.readouterr().err
    assert "--suite forward is for a GPU" in said and "--suite cpu-threads is for a CPU" in said
    small = ["run", "--device", "cpu", "--quick", "--suite", "cpu-threads", "--shapes", "cpu-small-10"]
    assert main([*small, "--out", out]) == 0
    rows = [row for row in json.loads(Path(out).read_text()) if row.get("kind") != "header"]
    assert {row["shape"] for row in rows} == {"cpu-small-10", "cpu-small-100", "cpu-small-1000"}


def test_a_dry_run_records_in_order_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["record", "--dry-run", "--out", str(tmp_path), "--jobs", "backward,plans"]
    assert main([*words, "--seconds", "0"]) == 1 and "to go on" in capsys.readouterr().out
    for path in tmp_path.iterdir():
        path.unlink()
    assert main([*words, "--gpus", "0,1"]) == 0
    told = capsys.readouterr().out
    assert "backward on GPU 0" in told and "plans on GPU 1" in told and told.count("done after") == 2
    rows = json.loads((tmp_path / "backward.json").read_text())
    assert rows[0]["command"].startswith("python -m bench run --suite backward") and len(rows) > 10
    assert main(words) == 0 and "on GPU" not in capsys.readouterr().out
