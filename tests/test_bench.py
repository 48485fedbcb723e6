"""The benchmark harness: its arithmetic, its inputs, its files, and every code path in tiny shapes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import cpu, first_call, inputs, parity, plot, report, results, shapes, timing
from bench.__main__ import main
from bench.impls import KEYS, LIK, OURS, einsum_maxsim, load
from bench.shapes import KD, PAIRS, Shape

CPU = torch.device("cpu")
LAYOUTS = [
    Shape("a", 3, 4, 5, 7, d=16),
    Shape("b", 3, 2, 5, 7, d=16, layout=KD),
    Shape("c", 3, 1, 5, 7, d=16, layout=PAIRS),
]


def by_name(name: str) -> Shape:
    return next(s for s in (*shapes.FORWARD, *shapes.TRAINING) if s.name == name)


@pytest.mark.parametrize(
    ("name", "op", "us"),
    [
        ("text-short", "fwd", 17.9),  # reads 76.8 MB
        ("very-long", "fwd", 121.9),
        ("train-128", "fwd", 51.0),  # 40.3 GFLOP
        ("longq-64", "fwd", 1408.0),
        ("kd-128x8", "fwd+bwd", 126.0),  # 270 MB read and written
    ],
)
def test_floor_is_the_larger_of_arithmetic_and_bytes(name: str, op: str, us: float) -> None:
    assert by_name(name).floor_us(op, 2, 790e12, 4.3e12) == pytest.approx(us, rel=0.01)


def test_shapes_have_unique_names_within_a_suite() -> None:
    for suite in (shapes.FORWARD, shapes.TRAINING, shapes.CPU):
        assert len({s.name for s in suite}) == len(suite)
    assert [s.name for s in shapes.select(shapes.FORWARD, ["train", "d768"])] == [
        "train-32", "train-128", "train-256", "d768",
    ]  # fmt: skip


@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda s: s.layout)
def test_reference_agrees_with_autograd_of_the_einsum(shape: Shape) -> None:
    x = inputs.draw(shape, CPU, torch.float64)
    x.require_grad()
    ref = parity.reference(shape, x.Q, x.D, x.grad_scores)
    scores = torch.einsum(
        {"in-batch": "isd,jtd->ijst", "kd": "isd,ijtd->ijst", "pairs": "isd,itd->ist"}[shape.layout], x.Q, x.D
    ).max(-1).values.sum(-1)  # fmt: skip
    grads = torch.autograd.grad(scores, (x.Q, x.D), x.grad_scores.double())
    assert parity.relative_error(scores, ref.scores) < 1e-12
    assert ref.gradients is not None
    assert all(parity.relative_error(g, r) < 1e-12 for g, r in zip(grads, ref.gradients, strict=True))
    assert parity.misplaced_winners(shape, x.Q, x.D, ref.winners, ref) == 0
    other = (ref.winners + 1) % shape.Ld
    assert parity.misplaced_winners(shape, x.Q, x.D, other, ref) == 1


def test_relative_error_never_passes_nan_or_a_wrong_size() -> None:
    ref = torch.ones(4, dtype=torch.float64)
    assert parity.relative_error(torch.full((4,), float("nan")), ref) == float("inf")
    assert parity.relative_error(torch.ones(3), ref) == float("inf")


def test_skewed_inputs_make_the_first_token_win_as_u_to_the_fourth_does() -> None:
    shape = Shape("x", 24, 24, 32, 300)
    x = inputs.draw(shape, CPU, torch.bfloat16, inputs.SKEWED)
    _, winners = parity.reference_scores(shape, x.Q, x.D)
    share = winners.eq(0).double().mean().item()
    assert share == pytest.approx(inputs.hot_token_share(300), rel=0.25)
    drawn = inputs.draw_winners(shape, inputs.SKEWED, CPU)
    assert drawn.eq(0).double().mean().item() == pytest.approx(inputs.hot_token_share(300), rel=0.1)
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < 300


def test_input_sets_outgrow_the_cache() -> None:
    small, large = by_name("train-32"), by_name("corpus-10k")
    assert inputs.sets_to_beat_cache(small, torch.bfloat16, 60 << 20) * small.input_bytes(2) >= 2.5 * (
        60 << 20
    )
    assert inputs.sets_to_beat_cache(large, torch.bfloat16, 60 << 20) == 1
    assert inputs.sets_to_beat_cache(small, torch.bfloat16, 0) == 1


def test_dry_run_takes_every_suite_through_and_records_every_key(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    arguments = [
        "--dry-run",
        "--suite",
        "forward,training,backward",
        "--impl",
        "ours,einsum",
        "--out",
        str(out),
    ]
    assert main(arguments) == 0
    headers, rows = results.split(results.read(out))
    assert len(headers) == 1 and {"versions", "gpu", "driver", "commit", "command"} <= headers[0].keys()
    assert {r["suite"] for r in rows} == {"forward", "training", "backward"}
    for row in rows:
        assert tuple(row)[: len(results.KEYS)] == results.KEYS
        assert row.get("error") is None and row["wall_us"] > 0 and row["rel_err"] < 0.1
    assert {r["backward"] for r in rows if r["impl"] == OURS and r["op"] != "fwd"} == {
        "auto",
        "lowmem",
        "unified",
    }
    assert all(r["winners_wrong"] == 0 for r in rows if r["impl"] == OURS and r["op"] == "fwd+bwd")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "nosuch"], "nosuch"),
        (["--impl", "ours,theirs"], "theirs"),
        (["--device", "cuda"], "no GPU"),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_said_and_left_out() -> None:
    found, missing = load(["einsum", "lik"], CPU)
    assert [i.name for i in found] == [KEYS["einsum"].name]
    assert [m.name for m in missing] == [LIK]


def test_a_wrong_result_is_recorded_and_not_timed() -> None:
    from bench import suites

    class Off(KEYS["einsum"]):  # type: ignore[misc]
        def score(self, shape: Shape, backward: str | None, train: bool):  # type: ignore[no-untyped-def]
            return lambda Q, D: einsum_maxsim(Q, D, shape.layout) * 1.1

    settings = suites.Settings(CPU, torch.float32, [Off()], timing.QUICK, timing.Ceilings(), 60)
    (row,) = suites.run_shape(settings, "forward", LAYOUTS[0], "fwd", None)
    assert "parity" in row["error"] and row["wall_us"] is None


def test_time_limit_interrupts() -> None:
    with pytest.raises(TimeoutError), timing.time_limit(0.05):
        while True:
            pass


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = FakeGraph.calls

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.01 * (other.at - self.at)  # every call takes 10 us


class FakeGraph:
    calls = 0  # made by anyone
    recorded = 0  # in the graph being captured

    def replay(self) -> None:
        FakeGraph.calls += FakeGraph.recorded


@pytest.mark.parametrize("capture_works", [True, False])
def test_gpu_time_is_per_call_over_replays(capture_works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGraph.calls = FakeGraph.recorded = 0

    class Capture(nullcontext[None]):
        def __enter__(self) -> None:
            if not capture_works:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.before = FakeGraph.calls

        def __exit__(self, *_: object) -> None:
            FakeGraph.recorded = FakeGraph.calls - self.before

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Event": FakeEvent, "Stream": lambda: stream, "current_stream": lambda: stream,
        "stream": lambda s: nullcontext(), "synchronize": lambda *a: None, "empty_cache": lambda: None,
        "CUDAGraph": FakeGraph, "graph": lambda g: Capture(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)

    def call() -> None:
        FakeGraph.calls += 1

    measured = timing.gpu_time([call] * 3, timing.QUICK)
    assert measured.us == pytest.approx(10.0)
    assert measured.method == ("graph" if capture_works else "events")
    if capture_works:
        assert FakeGraph.recorded % 3 == 0 and FakeGraph.recorded >= 60


def row(shape: Shape, op: str, impl: str, us: float, suite: str = "forward", **more: object) -> results.Row:
    out = results.new_row(suite, shape, op, torch.bfloat16, impl, **more)
    return {**out, "gpu_us": us, "wall_us": us + 10, "peak_mib": 1.0, "floor_us": 5.0}


def header(**more: object) -> results.Row:
    return results.new_header(CPU, timing.Ceilings(700.0, 4.0, 3.9), **more)


def test_merging_replaces_a_shape_as_a_whole_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    a, b = shapes.FORWARD[:2]
    first = results.Results(path, header(run="one"))
    first.add([row(a, "fwd", OURS, 20.0), row(a, "fwd", LIK, 30.0)])
    first.add([row(b, "fwd", OURS, 40.0)])
    results.Results(path, header(run="two"), merge=True).add([row(a, "fwd", OURS, 10.0)])
    headers, rows = results.split(results.read(path))
    assert [h["run"] for h in headers] == ["one", "two"]
    assert [(r["shape"], r["impl"], r["gpu_us"], r["run"]) for r in rows] == [
        (b.name, OURS, 40.0, "one"), (a.name, OURS, 10.0, "two"),
    ]  # fmt: skip


def test_a_record_names_no_place_on_the_machine_it_was_made_on(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["bench", "--suite", "forward", "--out", "/some/where/x.json", "--out=/some/where", "--quick"]
    monkeypatch.setattr("sys.argv", command)
    assert header()["command"] == "python -m bench --suite forward --quick"
    error = RuntimeError("in /home/someone/site-packages/peer/kernel.py: no /tmp/x")
    assert results.told(error) == "RuntimeError: in kernel.py: no x"


def test_summary_puts_ours_beside_the_peer() -> None:
    shape = shapes.FORWARD[0]
    text = results.summary([row(shape, "fwd", OURS, 20.0), row(shape, "fwd", LIK, 40.0)])
    assert text.splitlines()[-1].split() == [
        shape.name,
        "fwd",
        "20.0",
        "40.0",
        "0.50",
        "-",
        "25%",
        "30.0",
        "50.0",
    ]


def test_report_fills_the_readme_between_its_markers_alone(tmp_path: Path) -> None:
    recorded = tmp_path / "results"
    gpu = results.Results(recorded / "some-gpu.json", header(gpu="Some GPU", driver="1"))
    shape, step = shapes.FORWARD[0], shapes.TRAINING[0]
    gpu.add([row(shape, "fwd", OURS, 20.0), row(shape, "fwd", LIK, 40.0)])
    for winners in ("uniform", "skewed"):
        gpu.add([row(step, "fwd+bwd", OURS, 50.0, "training", winners=winners, backward="lowmem")])
    call = row(shape, "fwd", OURS, 0.0, "first-call")
    gpu.add([{**call, "gpu_us": None}])
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    options = ["--readme", str(readme), "--results", str(recorded)]
    assert report.main([*options, "--check"]) == 1
    assert report.main(options) == 0
    assert report.main([*options, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| text-short | 1 x 1000, 32, 300 | 5.00 | 20.0 / 30.0 | 40.0 / 50.0 |" in text and "2.00x" in text
    assert "Some GPU" in text and "cuBLAS" in text and "train-32" in text


def test_report_without_markers_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing here\n")
    assert report.main(["--readme", str(readme), "--results", str(tmp_path)]) == 1
    assert report.BEGIN in capsys.readouterr().err


def test_roofline_is_drawn_from_the_rows_or_says_why_not(tmp_path: Path) -> None:
    target = tmp_path / "roofline.png"
    assert "no forward" in (plot.roofline([header()], target) or "")
    rows = [header(gpu="Some GPU"), row(shapes.FORWARD[0], "fwd", OURS, 20.0)]
    problem = plot.roofline(rows, target)
    assert target.exists() if problem is None else "matplotlib" in problem


def test_cpu_rows_carry_gflops_and_take_turns() -> None:
    order: list[str] = []
    calls = {name: (lambda n=name: order.append(n)) for name in ("a", "b")}
    cpu.take_turns(calls, rounds=2)  # type: ignore[arg-type]
    assert order == ["a", "b"] * 3
    rows = cpu.run_forward(Shape("t", 1, 4, 5, 7, d=16), torch.float32, rounds=2)
    rows += cpu.run_step(LAYOUTS[0], torch.float32, rounds=2)
    assert all(r["gflops"] > 0 and r["rel_err"] < 1e-5 for r in rows if r["impl"] == OURS)
    assert OURS in cpu.summary(rows)


def test_first_call_child_times_import_forward_and_step() -> None:
    times = first_call.child("ours", CPU, tiny=True)
    assert set(times) == {"import_ms", "fwd", "fwd+bwd"} and all(t >= 0 for t in times.values())


def test_recorded_runs_are_well_formed() -> None:
    for path in sorted(results.DIRECTORY.glob("*.json")):
        headers, rows = results.split(json.loads(path.read_text()))
        runs = {h["run"] for h in headers}
        assert headers and rows and {r["run"] for r in rows} == runs
        assert all(set(results.KEYS) <= r.keys() for r in rows)
