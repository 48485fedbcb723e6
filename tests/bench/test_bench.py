"""The benchmark harness: its arithmetic, its inputs, its files, and every code path in tiny shapes."""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.command_line import main, parser
from bench.harness import (
    ceilings,
    inputs,
    interleaved,
    named_shapes,
    parity,
    planned,
    results,
    run_header,
    timing,
)
from bench.harness.ceilings import Ceilings
from bench.harness.library import EINSUM, LIK, OURS
from bench.harness.settings import Settings
from bench.harness.shape import KD, PAIRS, Shape
from bench.harness.text import error_text
from bench.peers.implementations import KEYS, einsum_maxsim, load
from bench.report import pages, plots, tables
from bench.suites import (
    fp32,
    from_hidden,
    heads,
    host,
    quantized,
    side_by_side,
    steps,
    varlen,
)
from bench.suites.cpu import calls as cpu
from bench.suites.cpu import corpus_search, instruction_sets
from bench.suites.cpu import threads as cpu_threads
from tests.side_by_side import anything, release, without_its_init

CPU = torch.device("cpu")
LAYOUTS = [
    Shape("a", 3, 4, 5, 7, d=16),
    Shape("b", 3, 2, 5, 7, d=16, layout=KD),
    Shape("c", 3, 1, 5, 7, d=16, layout=PAIRS),
]


def by_name(name: str) -> Shape:
    return next(s for s in (*named_shapes.FORWARD, *named_shapes.TRAINING) if s.name == name)


def test_a_gpu_planned_as_an_older_one_is_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[int] = []

    def capability(force: int | None = None) -> int:
        forced.extend([] if force is None else [force])
        return forced[-1] if forced else 90

    monkeypatch.setattr(planned.ops, "cuda_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("DISABLE_MMA_V3", "0")
    device = torch.device("cuda")
    planned.plan_as(None)
    assert planned.gpu_name(device) == "NVIDIA H200" and os.environ["DISABLE_MMA_V3"] == "0"
    planned.plan_as(86)
    assert results.slug(planned.gpu_name(device)) == "nvidia-h200-planned-as-8-6"
    assert os.environ["DISABLE_MMA_V3"] == "1"  # Triton's peers, too
    for command in ("run", "sweep", "plans"):
        assert parser().parse_args([command, "--capability", "80"]).capability == 80


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
    training = (*named_shapes.TRAINING, *named_shapes.LONG)
    for suite in (named_shapes.FORWARD, training, named_shapes.CPU, named_shapes.VARLEN, named_shapes.HEADS):
        assert len({s.name for s in suite}) == len(suite)
    assert [s.name for s in named_shapes.select(named_shapes.FORWARD, ["train", "d768"])] == [
        "train-32", "train-128", "train-256", "d768",
    ]  # fmt: skip
    for shape in named_shapes.LONG:
        assert named_shapes.select(named_shapes.FORWARD, [shape.name]) == [shape]
    assert set(named_shapes.COMPILED_STEPS) <= {
        s.name for s in (*named_shapes.TRAINING, *named_shapes.TINY_TRAINING)
    }


@pytest.mark.parametrize("elements", [1, 16, 70, 210])  # similarities of 1 token, 2, 10, all of 2 documents
def test_the_slices_of_the_reference_change_nothing(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in LAYOUTS:
        x = inputs.draw(shape, CPU, torch.float64)
        q_mask, d_mask = torch.rand(x.Q.shape[:-1]) < 0.7, torch.rand(x.D.shape[:-1]) < 0.7
        d_mask[..., 0] = True
        whole = parity.reference_scores(shape, x.Q, x.D, q_mask, d_mask)
        with monkeypatch.context() as patch:
            patch.setattr(parity, "_CHUNK_ELEMENTS", elements)
            scores, winners = parity.reference_scores(shape, x.Q, x.D, q_mask, d_mask)
        torch.testing.assert_close(scores, whole[0])
        assert torch.equal(winners, whole[1])


@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda s: s.layout)
def test_reference_agrees_with_autograd_of_the_einsum(shape: Shape) -> None:
    x = inputs.draw(shape, CPU, torch.float64)
    x.require_grad()
    ref = parity.Reference(*parity.reference_scores(shape, x.Q.detach(), x.D.detach()))
    exact = parity.reference_gradients(shape, x.Q.detach(), x.D.detach(), x.grad_scores, ref.winners)
    scores = torch.einsum(
        {"in-batch": "isd,jtd->ijst", "kd": "isd,ijtd->ijst", "pairs": "isd,itd->ist"}[shape.layout], x.Q, x.D
    ).max(-1).values.sum(-1)  # fmt: skip
    grads = torch.autograd.grad(scores, (x.Q, x.D), x.grad_scores.double())
    assert parity.relative_error(scores, ref.scores) < 1e-12
    assert parity.worst_error(grads, exact) < 1e-12
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
        "run",
        "--dry-run",
        "--suite",
        "forward,training,backward,short,short-steps",
        "--impl",
        "ours,einsum",
        "--out",
        str(out),
    ]
    assert main(arguments) == 0
    headers, rows = results.split(results.read(out))
    assert len(headers) == 1 and {"versions", "gpu", "driver", "commit", "command"} <= headers[0].keys()
    assert {r["suite"] for r in rows} == {"forward", "training", "backward", "short", "short-steps"}
    for row in rows:
        assert tuple(row)[: len(results.KEYS)] == results.KEYS
        assert row.get("error") is None and row["wall_us"] > 0 and row["rel_err"] < 0.1
    assert {r["backward"] for r in rows if r["impl"] == OURS and r["op"] != "fwd"} == {
        "auto",
        "lowmem",
        "unified",
    }
    assert all(r["winners_wrong"] == 0 for r in rows if r["impl"] == OURS and r["op"] == "fwd+bwd")
    drawn = {(r["op"], r["winners"]) for r in rows if r["shape"] == named_shapes.TINY_LONG.name}
    assert drawn == {("fwd", None), ("fwd+bwd", "uniform"), ("bwd", "uniform")}


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
    assert main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_said_and_left_out() -> None:
    found, missing = load(["einsum", "lik"], CPU)
    assert [i.name for i in found] == [KEYS["einsum"].name]
    assert [m.name for m in missing] == [LIK]


def test_a_wrong_result_is_recorded_and_not_timed() -> None:
    class Off(KEYS["einsum"]):  # type: ignore[misc]
        def score(self, shape: Shape, backward: str | None, train: bool):  # type: ignore[no-untyped-def]
            return lambda Q, D: einsum_maxsim(Q, D, shape.layout) * 1.1

    settings = Settings(CPU, torch.float32, [Off()], timing.QUICK, Ceilings(), 60)
    (row,) = side_by_side.run_shape(settings, "forward", LAYOUTS[0], "fwd", None)
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
    return run_header.new_header(CPU, Ceilings(700.0, 350.0, 4.0, 3.9), **more)


def test_a_record_names_no_place_on_the_machine_it_was_made_on() -> None:
    words = ["run", "--suite", "forward", "--out", "/some/where/x.json", "--out=/some/where", "--quick"]
    assert header(arguments=words)["command"] == "python -m bench run --suite forward --quick"
    error = RuntimeError("in /home/someone/site-packages/peer/kernel.py: no /tmp/x")
    assert error_text(error) == "RuntimeError: in kernel.py: no x"


def test_summary_puts_ours_beside_the_peer() -> None:
    shape = named_shapes.FORWARD[0]
    text = side_by_side.summary([row(shape, "fwd", OURS, 20.0), row(shape, "fwd", LIK, 40.0)])
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


def test_report_without_markers_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing here\n")
    assert main(["report", "--readme", str(readme), "--results", str(tmp_path)]) == 1
    assert pages.BEGIN in capsys.readouterr().err


def test_roofline_is_drawn_from_the_rows_or_says_why_not(tmp_path: Path) -> None:
    target = tmp_path / "roofline.png"
    assert "no forward" in (plots.roofline([header()], target) or "")
    rows = [header(gpu="Some GPU"), row(named_shapes.FORWARD[0], "fwd", OURS, 20.0)]
    problem = plots.roofline(rows, target)
    assert target.exists() if problem is None else "matplotlib" in problem


def test_cpu_rows_carry_gflops_and_take_turns() -> None:
    order: list[str] = []
    calls = {name: (lambda n=name: order.append(n)) for name in ("a", "b")}
    cpu.time_interleaved(calls, rounds=2)  # type: ignore[arg-type]
    assert order == ["a", "b"] * 3
    rows = cpu.run_forward(Shape("t", 1, 4, 5, 7, d=16), torch.float32, rounds=2)
    rows += cpu.run_step(LAYOUTS[0], torch.float32, rounds=2)
    errors = {"fwd": "rel_err", "fwd+bwd": "grad_err"}
    assert all(r["gflops"] > 0 and r[errors[r["op"]]] < 1e-5 for r in rows if r["impl"] == OURS)
    rows += cpu.run_int8(Shape("t", 1, 40, 32, 17, d=16), rounds=2)
    assert rows[-2]["dtype"] == "int8" and rows[-2]["gflops"] > 0 and rows[-2]["rel_err"] < 1e-5
    assert OURS in cpu.summary(rows)


def test_every_instruction_set_takes_its_turn() -> None:
    before = torch.ops.late_interaction.cpu_isa("")
    rows = instruction_sets.measure(Shape("t", 1, 40, 32, 17, d=16), rounds=2)
    names = instruction_sets.available()
    assert "portable" in names and before in names
    assert [(r["variant"], r["dtype"]) for r in rows] == [
        (name, kind) for kind in instruction_sets.KINDS for name in names
    ]
    assert all(r["gflops"] > 0 and r["rel_err"] < 1e-5 and not r.get("error") for r in rows)
    assert torch.ops.late_interaction.cpu_isa("") == before
    shown = tables.instruction_set_table(rows)
    assert shown.count("\n") == len(names) + 1 and "| `portable` |" in shown


def test_threads_take_documents_from_memory_and_from_the_caches() -> None:
    threads = torch.get_num_threads()
    rows = cpu_threads.measure(Shape("t", 1, 40, 32, 17, d=16), rounds=2)
    rows += cpu_threads.measure_small(Shape("s", 1, 3, 32, 17, d=16), rounds=1)
    assert torch.get_num_threads() == threads
    counts = cpu_threads.thread_counts()
    assert counts[0] == 1 and counts[-1] == threads and counts == sorted(set(counts))
    lines = [(r["dtype"], r["variant"]) for r in rows[:: len(counts)]]
    assert lines == [
        *((dtype, where) for dtype in ("float32", "bfloat16", "int8") for where in ("memory", "cache")),
        ("float32", "read"),
        ("bfloat16", "apart"),
    ]
    assert [r["threads"] for r in rows] == counts * len(lines)
    ours = [r for r in rows if r["impl"] == OURS]
    assert all(r["gflops"] > 0 and r["rel_err"] < 1e-5 and not r.get("error") for r in ours)
    assert all(r["gbps"] > 0 for r in rows if r["variant"] in ("memory", "read"))
    shown = tables.threads_table(rows)
    assert shown.count("\n") == 8 and "| GB/s of a plain read |" in shown
    assert tables.small_calls_table(rows).count("\n") == 2


def test_searches_take_turns_and_find_the_best() -> None:
    threads = torch.get_num_threads()
    rows = corpus_search.measure(Shape("t", 1, 60, 8, 17, d=32), rounds=2)
    assert torch.get_num_threads() == threads
    ours = [r for r in rows if r["impl"] == OURS]
    assert [(r["dtype"], r.get("variant")) for r in ours] == [
        (dtype, variant)
        for dtype in ("float32", "bfloat16", "int8", "uint8")
        for variant in (None, "one thread")
    ]
    assert all(r["wall_us"] > 0 and not r.get("error") for r in ours)
    peers = {r["impl"]: r for r in rows if r["impl"] != OURS}
    assert peers.keys() == set(corpus_search.PEERS)
    assert all((r["wall_us"] or 0) > 0 or r["skipped"] == "not installed" for r in peers.values())
    shown = tables.corpus_table(rows)
    assert shown.count("\n") == 8 and "| residuals of 2 bits |" in shown


def test_a_search_that_misses_the_best_is_wrong() -> None:
    wanted = torch.arange(40.0) + 1
    best = wanted.topk(10)
    assert corpus_search._problem((best.values, best.indices), wanted) is None
    assert "relative error" in str(corpus_search._problem((best.values * 1.1, best.indices), wanted))
    others = torch.arange(10)
    assert "10 of the documents" in str(corpus_search._problem((wanted[others], others), wanted))


def test_recorded_runs_are_well_formed() -> None:
    for path in sorted(results.DIRECTORY.glob("*.json")):
        if results.has_own_form(path):
            continue
        headers, rows = results.split(json.loads(path.read_text()))
        runs = {h["run"] for h in headers}
        assert headers and rows and {r["run"] for r in rows} == runs
        assert all(set(results.KEYS) <= r.keys() for r in rows)


# ---- variants, float32, 8 bits: our own calls in turns, and the targets ----


@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda s: s.layout)
@pytest.mark.parametrize("normalize", [False, True])
def test_masked_reference_agrees_with_the_package(shape: Shape, normalize: bool) -> None:
    import late_interaction as li

    x = inputs.draw(shape, CPU, torch.float64)
    q_mask, d_mask = torch.rand(x.Q.shape[:-1]) < 0.7, torch.rand(x.D.shape[:-1]) < 0.7
    d_mask[..., 0] = True
    scores, _ = parity.reference_scores(shape, x.Q, x.D, q_mask, d_mask, normalize)
    function = li.maxsim_pairs if shape.layout == PAIRS else li.maxsim
    out = function(x.Q, x.D, q_mask, d_mask, normalize=normalize)
    assert parity.relative_error(out, scores) < 1e-12


def test_dry_run_takes_the_suites_in_turns_through(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    suites = ("variants", "fp32", "quantized", "plaid", "fused-head", "retrieve", "varlen", "pairs-packed")
    assert main(["run", "--dry-run", "--suite", ",".join(suites), "--impl", "ours", "--out", str(out)]) == 0
    _, rows = results.split(results.read(out))
    by_suite = {s: [r for r in rows if r["suite"] == s] for s in suites}
    assert {r["variant"] for r in by_suite["variants"]} == {
        "plain", "winners", "d_mask", "masks", "q_weights", "normalize", "fp16",
    }  # fmt: skip
    for r in [*by_suite["variants"], *by_suite["fp32"], *by_suite["plaid"]]:
        assert r.get("error") is None and r["wall_us"] > 0 and r["rel_err"] < 1e-2
    assert all(r["over_plain"] > 0 for r in by_suite["variants"] if r["variant"] != "plain")
    assert all(r["winners_wrong"] == 0 for r in by_suite["variants"] if r["variant"] == "winners")
    packed, padded = {"forward", "forward + backward"}, {"padded", "padded, forward + backward"}
    for shape, known in (("tiny-batch", packed), ("tiny-rerank", packed | padded), ("tiny-own", padded)):
        assert {r["variant"] for r in by_suite["varlen"] if r["shape"] == shape} == known
    assert {r["variant"] for r in by_suite["pairs-packed"]} == {"forward", "forward + backward", "dense call"}
    for r in [*by_suite["varlen"], *by_suite["pairs-packed"]]:
        assert r.get("error") is None and r["wall_us"] > 0 and r["rel_err"] < 1e-6
        assert r["op"] == "fwd" or r["grad_err"] < parity.GRADIENTS
    for r in by_suite["fused-head"]:
        assert r.get("error") is None and r["wall_us"] > 0 and r["op"] in ("fwd", "fwd+bwd")
        assert r["op"] == "fwd" or r["grad_err"] < from_hidden.GRADIENTS
    assert {r["variant"] for r in by_suite["fused-head"]} == {"fused", "unfused"}
    assert all(r["over_scores"] > 0 for r in by_suite["retrieve"] if "scores alone" not in r["variant"])
    assert {r["Nq"] for r in by_suite["retrieve"] if "fp8" in r["shape"]} == {1, 3}
    for r in by_suite["quantized"]:  # what is not there is said, not failed
        assert r["wall_us"] or "there is no" in r["skipped"]


def test_dry_run_takes_the_steps_through(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    assert main(["run", "--dry-run", "--suite", "steps", "--impl", "ours", "--out", str(out)]) == 0
    _, rows = results.split(results.read(out))
    timed = [
        steps.PLAIN, steps.WEIGHTS, steps.LEARNED, steps.RECOMPUTE, steps.HIGH, steps.AUTOCAST,
        steps.ONE_THREAD,
    ]  # fmt: skip
    assert [r["variant"] for r in rows] == [*3 * timed, steps.COMPILED]
    assert rows[-1]["shape"] in named_shapes.COMPILED_STEPS
    for r in rows:
        assert (
            r.get("error") is None
            and r["wall_us"] > 0
            and r["rel_err"] < 1e-2
            and r["grad_err"] < parity.GRADIENTS
        )
        host = r["variant"] in (steps.PLAIN, steps.ONE_THREAD, steps.COMPILED)
        assert (r.get("over_plain") is None) == host


def test_dry_run_takes_small_calls_through(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    assert main(["run", "--dry-run", "--suite", "host", "--impl", "ours", "--out", str(out)]) == 0
    rows = results.split(results.read(out))[1]
    ways = [("fwd", host.EAGER), *(("fwd+bwd", way) for way in (host.EAGER, host.LOSS, host.COMPILED))]
    assert [(r["op"], r["variant"], r["impl"]) for r in rows] == [
        (*way, impl) for way in ways for impl in (OURS, EINSUM)
    ]
    for r in rows:
        assert r.get("error") is None and r["wall_us"] > 0 and r["rel_err"] < 1e-2
        assert r["op"] == "fwd" or r["grad_err"] < parity.GRADIENTS
        assert (r.get("over_product") is not None) == (r["variant"] == host.EAGER and r["impl"] == OURS)
        assert (r.get("over_eager") is not None) == (r["variant"] == host.COMPILED)


def test_a_quick_run_compiles_nothing(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    options = ["--suite", "steps", "--shapes", "tiny-pairs", "--impl", "ours", "--out", str(out)]
    assert main(["run", "--dry-run", "--quick", *options]) == 0
    assert steps.COMPILED not in {r.get("variant") for r in results.read(out)}


def test_dry_run_takes_the_heads_through(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    assert main(["run", "--dry-run", "--suite", "heads", "--impl", "ours,einsum", "--out", str(out)]) == 0
    _, rows = results.split(results.read(out))
    assert [(r["variant"], r["impl"]) for r in rows] == [
        (variant, impl)
        for variant in (heads.ALONE, heads.WITH_IN_BATCH, heads.PAIRWISE, heads.CHUNKED)
        for impl in (OURS, EINSUM)
    ]
    for r in rows:
        assert r.get("error") is None and r["wall_us"] > 0
        assert r["impl"] != OURS or (r["rel_err"] < 1e-5 and r["grad_err"] < 1e-2)


@pytest.mark.parametrize("in_batch", [0.0, 0.5])
@pytest.mark.parametrize("pairwise", [False, True])
def test_the_head_is_colpali_engines(in_batch: float, pairwise: bool) -> None:
    name = "colpali_engine"
    with release("colpali-engine", name, "0.3.18") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, without_its_init(name, folder))
        losses = importlib.import_module("colpali_engine.loss.late_interaction_losses")
        kind = losses.ColbertPairwiseNegativeCELoss if pairwise else losses.ColbertNegativeCELoss
        head = kind(in_batch_term_weight=in_batch)
        x = inputs.draw(Shape("x", 4, 3, 5, 7, d=16, layout=KD), CPU, torch.float64)
        positives = torch.randn(4, 7, 16, dtype=torch.float64)
        positives[0] = torch.cat([x.Q[0], x.Q[0, :2]])  # which the best of all scores of a query is of
        x.require_grad()
        positives.requires_grad_()
        leaves = (x.Q, positives, x.D)
        einsum = heads._scores(KEYS["einsum"](), Shape("x", 4, 3, 5, 7))
        mine = heads.negative_head(einsum, *leaves, in_batch, pairwise)
        theirs = head(*leaves)
        torch.testing.assert_close(mine, theirs)
        gradients = torch.autograd.grad(mine, leaves), torch.autograd.grad(theirs, leaves)
        torch.testing.assert_close(*gradients)


def test_the_chunked_loss_is_pylates() -> None:
    with release("pylate", "pylate", "1.6.0", [anything("datasets")]):
        cached = importlib.import_module("pylate.losses").CachedContrastive
        model = SimpleNamespace(do_query_expansion=True, skiplist=[])
        x = inputs.draw(Shape("x", 40, 40, 5, 7, d=16), CPU, torch.float64)
        x.require_grad()
        mine = heads.chunked_contrastive(heads._scores(KEYS["einsum"](), Shape("x", 40, 40, 5, 7)), x.Q, x.D)
        theirs = [[y.detach().requires_grad_() for y in side.split(heads.CHUNK)] for side in (x.Q, x.D)]
        masks = [torch.ones(side.shape[:2]) for side in (x.Q, x.D)]
        loss = cached(model, mini_batch_size=heads.CHUNK).calculate_loss(theirs, masks, with_backward=True)
        torch.testing.assert_close(mine, loss.to(mine.dtype))
        for side, parts in zip((x.Q, x.D), theirs, strict=True):
            torch.testing.assert_close(side.grad, torch.cat([y.grad for y in parts]))


def test_the_heads_have_a_table() -> None:
    shape = Shape("negatives-64x4", 64, 4, 32, 1030, layout=KD)

    def row(impl: str, us: float, mib: float) -> dict[str, Any]:
        row = results.new_row("heads", shape, "fwd+bwd", torch.bfloat16, impl, variant=heads.ALONE)
        return row | {"gpu_us": us, "peak_mib": mib}

    table = tables.heads_table([row(EINSUM, 1400.0, 278.0), row(LIK, 1600.0, 242.0), row(OURS, 500.0, 150.0)])
    assert table.splitlines()[-1] == (
        "| explicit negatives | 64 x 4, 32, 1030 (KD) | 1,400 / 278 | 1,600 / 242 | 500 / 150 | 2.80x |"
    )
    assert tables.heads_table([]) == ""


def test_padding_holds_what_was_packed_and_what_never_was() -> None:
    Q, _, cu, _ = inputs.draw_packed(Shape("x", 5, 3, 9, 7, d=16), CPU, torch.float64)
    out, lengths = varlen.padded(Q, cu, 9)
    assert out.shape == (5, 9, 16) and lengths.tolist() == cu.diff().tolist()
    keep = torch.arange(9) < lengths.unsqueeze(1)
    assert torch.equal(out[keep], Q) and bool((out[~keep] > Q.max()).all())


def test_peers_are_called_with_the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own functions stand in under late-interaction-kernels' module paths."""
    for module in ("lik.fp8", "varlen", "padded"):
        own = importlib.import_module(f"late_interaction.{module}")
        module = module.removeprefix("lik.")
        monkeypatch.setitem(sys.modules, f"late_interaction_kernels.{module}", own)
    monkeypatch.setitem(sys.modules, "late_interaction_kernels", importlib.import_module("late_interaction"))
    peers = [SimpleNamespace(name=LIK)]
    settings = Settings(CPU, torch.bfloat16, peers, timing.QUICK, Ceilings(), 60)  # type: ignore[arg-type]
    rows = quantized.measure_shape(settings, named_shapes.TINY_FORWARD[1]) + varlen.measure_shape(
        settings, named_shapes.TINY_VARLEN[0]
    )
    theirs = [r for r in rows if r["impl"] == LIK]
    assert [r["variant"] for r in theirs] == [
        quantized.PER_TOKEN,
        varlen.FORWARD, varlen.STEP, varlen.PADDED, varlen.PADDED_STEP,
    ]  # fmt: skip
    for r in theirs:
        assert r.get("error") is None and r["wall_us"] > 0 and (r.get("over_bf16") or r.get("over_ours")) > 0


def test_chunks_do_not_change_the_einsum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32, "CHUNK_BYTES", 4 * 5 * 7 * 4)
    for shape in LAYOUTS:
        x = inputs.draw(shape, CPU, torch.float32)
        whole = parity.reference_scores(shape, x.Q, x.D)[0]
        assert parity.relative_error(fp32.chunked_einsum(x.Q, x.D, shape.layout), whole) < 1e-6


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(inputs.FP8, 0.03), (inputs.INT8, 0.02)])
def test_quantizing_keeps_what_its_bits_can(dtype: torch.dtype, error: float, per_token: bool) -> None:
    x = torch.randn(3, 5, 64)
    narrow, scale = inputs.quantize(x, dtype, per_token)
    assert narrow.dtype == dtype and scale.shape == (x.shape[:-1] if per_token else ())
    restored = narrow.float() * (scale.unsqueeze(-1) if per_token else scale)
    assert float((restored - x).norm() / x.norm()) < error


RUN = {"run": "now", "cublas_tflops": 800.0, "cublas_tf32_tflops": 400.0, "read_tbps": 4.0}


def timed(name: str, suite: str, us: float, variant: str | None = None, **more: object) -> results.Row:
    dtype = more.pop("dtype", torch.bfloat16)
    assert isinstance(dtype, torch.dtype)
    out = results.new_row(suite, by_name(name), "fwd", dtype, str(more.pop("impl", OURS)), variant=variant)
    return {**out, "gpu_us": us, "wall_us": us + 12, "run": "now", **more}


def test_the_ceiling_is_the_larger_of_products_and_reads() -> None:
    share, bound = ceilings.reached(timed("train-256", "forward", 252.0), RUN) or (0, "")
    assert bound == "C" and share == pytest.approx(161.06 / 252 / 0.8, rel=1e-3)
    share, bound = ceilings.reached(timed("text-long", "forward", 70.0), RUN) or (0, "")
    assert bound == "R" and share == pytest.approx(262.2 / 4 / 70, rel=1e-2)
    narrow = timed("text-long", "quantized", 40.0, "fp8 per token", dtype=torch.float8_e4m3fn)
    share, bound = ceilings.reached(narrow, RUN) or (0, "")
    assert bound == "R" and share == pytest.approx((131.1 + 4.1) / 4 / 40, rel=1e-2)
    assert (ceilings.reached(timed("train-256", "fp32", 900.0, dtype=torch.float32), RUN) or "..")[1] == "T"
    assert ceilings.reached(timed("train-256", "forward", 252.0), {"run": "now"}) is None


def test_one_variant_that_fails_costs_its_row_alone() -> None:

    settings = Settings(CPU, torch.float32, [], timing.QUICK, Ceilings(), 60)
    shape = LAYOUTS[0]
    x = inputs.draw(shape, CPU, torch.float32)
    wanted = parity.reference_scores(shape, x.Q, x.D)[0]

    def fails() -> list[timing.Call]:
        raise RuntimeError("no such kernel")

    def prepared(factor: float) -> Any:
        return lambda: [lambda: einsum_maxsim(x.Q, x.D, shape.layout) * factor]

    def one(variant: str, prepare: Any) -> interleaved.Timed:
        row = results.new_row("variants", shape, "fwd", torch.float32, OURS, variant=variant)
        return interleaved.Timed(row, prepare, wanted)

    good, wrong, failed = interleaved.measure(
        settings, [one("good", prepared(1.0)), one("wrong", prepared(1.1)), one("failed", fails)]
    )
    assert good["wall_us"] > 0 and "parity" in wrong["error"] and "no such kernel" in failed["error"]
    assert wrong["wall_us"] is None and "wrong" in interleaved.line([good, wrong, failed], "over_plain")


def test_tables_of_hidden_states_and_retrieval() -> None:
    def row(suite: str, impl: str, variant: str, us: float) -> results.Row:
        shape = Shape("s", 32, 128, 32, 1024)
        figures = {"gpu_us": us, "wall_us": us + 80, "peak_mib": 32.5}
        return {**results.new_row(suite, shape, "fwd", torch.bfloat16, impl, variant=variant), **figures}

    rows = [
        row("fused-head", OURS, "unfused", 202.0),
        row("fused-head", OURS, "fused", 132.0),
        row("fused-head", LIK, "fused", 1891.0),
        row("retrieve", OURS, "top 100", 2485.0),
        row("retrieve", LIK, "top 100", 12446.0),
    ]
    table = tables.hidden_table(rows)
    assert "202 / 282 / 32.5 | 1,891 / 1,971 / 32.5 | 132 / 212 / 32.5 | 1.53x |" in table
    assert "top 100 | 2,485 / 2,565 | 12,446 / 12,526 | 5.01x |" in tables.beside_peer_table(rows, "retrieve")
    host = row("retrieve", OURS, "pinned", 0.0)
    host |= {"gpu_us": None, "wall_us": 25e3, "over_bus": 1.25, "bus_gbps": 50.0}
    assert "| pinned | 25,000 | 40.0 | 80% |" in tables.host_table([host])
    assert tables.hidden_table([]) == tables.beside_peer_table([], "retrieve") == tables.host_table([]) == ""


def test_what_encodings_of_muvera_find_is_told_and_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = [
        "--documents",
        "60",
        "--Ld",
        "4",
        "--Lq",
        "5",
        "--d",
        "16",
        "--queries",
        "2",
        "--candidates",
        "60",
    ]
    kept = tmp_path / "muvera.txt"
    chosen = ["--configurations", "0", "4", "--speed-documents", "2", "--out", str(kept)]
    assert main(["muvera", *sizes, *chosen]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert kept.read_text().splitlines()[: len(lines)] == lines
    found = [line.split("  ") for line in lines if line.startswith("k_sim") and "1.0000" in line]
    assert len(found) == 2 and all(int(row[-1]) <= 60 for row in found)
    assert sum("a copy of memory" in line for line in lines) == 1
