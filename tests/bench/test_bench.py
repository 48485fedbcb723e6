"""The benchmark harness: its arithmetic, its inputs, its clocks, and every suite in tiny shapes."""

import importlib
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from bench.command_line import main, parser
from bench.harness import ceilings, inputs, named_shapes, parity, results, run_header
from bench.harness.library import EINSUM, LIK, OURS
from bench.harness.measuring import measure
from bench.harness.shape import KD, PAIRS, Shape
from bench.peers.implementations import KEYS, einsum_maxsim, load
from bench.suites import codes, dense, hidden, losses, packed, steps
from late_interaction._doctor import timing
from late_interaction._doctor.text import error_text
from tests.bench.shared import CPU, bench, dry_run
from tests.support.side_by_side import anything, release, without_its_init

LAYOUTS = [
    Shape("a", 3, 4, 5, 7, d=16),
    Shape("b", 3, 2, 5, 7, d=16, layout=KD),
    Shape("c", 3, 1, 5, 7, d=16, layout=PAIRS),
]


def by_name(name):
    return next(s for s in (*named_shapes.FORWARD, *named_shapes.TRAINING) if s.name == name)


# ---- shapes, ceilings and references ----


def test_a_gpu_planned_as_an_older_one_is_a_device_of_its_own(monkeypatch):
    forced = []

    def capability(force=None):
        forced.extend([] if force is None else [force])
        return forced[-1] if forced else 90

    monkeypatch.setattr(run_header.ops, "cuda_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("DISABLE_MMA_V3", "0")
    device = torch.device("cuda")
    run_header.plan_as(None)
    assert run_header.gpu_name(device) == "NVIDIA H200" and os.environ["DISABLE_MMA_V3"] == "0"
    run_header.plan_as(86)
    assert results.slug(run_header.gpu_name(device)) == "nvidia-h200-planned-as-8-6"
    assert os.environ["DISABLE_MMA_V3"] == "1"  # Triton's peers, too
    for command in ("run", "sweep", "plans"):
        assert parser().parse_args([command, "--capability", "80"]).capability == 80


def test_the_ceiling_is_the_larger_of_products_and_reads():
    run = {"run": "now", "cublas_tflops": 800.0, "cublas_tf32_tflops": 400.0, "read_tbps": 4.0}

    def timed(name, us, variant=None, dtype=torch.bfloat16):
        row = results.new_row("x", by_name(name), "fwd", dtype, OURS, variant=variant)
        return ceilings.reached({**row, "gpu_us": us}, run)

    assert timed("train-256", 252.0) == (pytest.approx(161.06 / 252 / 0.8, rel=1e-3), "C")
    assert timed("text-long", 70.0) == (pytest.approx(262.2 / 4 / 70, rel=1e-2), "R")
    narrow = timed("text-long", 40.0, "fp8 per token", torch.float8_e4m3fn)
    assert narrow == (pytest.approx((131.1 + 4.1) / 4 / 40, rel=1e-2), "R")
    assert timed("train-256", 900.0, dtype=torch.float32)[1] == "T"
    run.pop("read_tbps")
    assert timed("train-256", 252.0) is None


@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda s: s.layout)
def test_reference_agrees_with_autograd_of_the_einsum(shape):
    x = inputs.draw(shape, CPU, torch.float64)
    x.require_grad()
    wanted, winners = parity.reference_scores(shape, x.Q.detach(), x.D.detach())
    exact = parity.reference_gradients(shape, x.Q.detach(), x.D.detach(), x.grad_scores, winners)
    equation = {"in-batch": "isd,jtd->ijst", "kd": "isd,ijtd->ijst", "pairs": "isd,itd->ist"}[shape.layout]
    scores = torch.einsum(equation, x.Q, x.D).max(-1).values.sum(-1)
    grads = torch.autograd.grad(scores, (x.Q, x.D), x.grad_scores.double())
    assert parity.relative_error(scores, wanted) < 1e-12
    assert parity.worst_error(grads, exact) < 1e-12
    assert parity.misplaced_winners(shape, x.Q, x.D, winners, winners) == 0
    assert parity.misplaced_winners(shape, x.Q, x.D, (winners + 1) % shape.Ld, winners) == 1


@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda s: s.layout)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("elements", [1 << 27, 1, 70])  # all similarities at a time, those of a token, of 10
def test_masked_reference_agrees_with_the_package(shape, normalize, elements, monkeypatch):
    x = inputs.draw(shape, CPU, torch.float64)
    q_mask, d_mask = torch.rand(x.Q.shape[:-1]) < 0.7, torch.rand(x.D.shape[:-1]) < 0.7
    d_mask[..., 0] = True
    monkeypatch.setattr(parity, "_CHUNK_ELEMENTS", elements)
    scores, winners = parity.reference_scores(shape, x.Q, x.D, q_mask, d_mask, normalize)
    D, of_D = (y.unsqueeze(1) if shape.layout == PAIRS else y for y in (x.D, d_mask))
    out = li.maxsim_with_winners(x.Q, D, q_mask, of_D, normalize=normalize)
    assert parity.relative_error(out[0], scores) < 1e-12
    kept = q_mask.unsqueeze(1).expand_as(winners)  # the winners of other query tokens are not marked
    assert torch.equal(out[1].long()[kept], winners[kept])


def test_relative_error_never_passes_nan_or_a_wrong_size():
    ref = torch.ones(4, dtype=torch.float64)
    assert parity.relative_error(torch.full((4,), float("nan")), ref) == float("inf")
    assert parity.relative_error(torch.ones(3), ref) == float("inf")


def test_chunks_do_not_change_the_einsum(monkeypatch):
    monkeypatch.setattr(dense, "CHUNK_BYTES", 4 * 5 * 7 * 4)
    for shape in LAYOUTS:
        x = inputs.draw(shape, CPU, torch.float32)
        whole = parity.reference_scores(shape, x.Q, x.D)[0]
        assert parity.relative_error(dense.chunked_einsum(x.Q, x.D, shape.layout), whole) < 1e-6


# ---- inputs ----


def test_skewed_inputs_make_the_first_token_win_as_u_to_the_fourth_does():
    shape = Shape("x", 24, 24, 32, 300)
    x = inputs.draw(shape, CPU, torch.bfloat16, inputs.SKEWED)
    _, winners = parity.reference_scores(shape, x.Q, x.D)
    assert winners.eq(0).double().mean().item() == pytest.approx(inputs.hot_token_share(300), rel=0.25)
    drawn = inputs.draw_winners(shape, inputs.SKEWED, CPU)
    assert drawn.eq(0).double().mean().item() == pytest.approx(inputs.hot_token_share(300), rel=0.1)
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < 300


def test_input_sets_outgrow_the_cache():
    small, large, cache = by_name("train-32"), by_name("corpus-10k"), 60 << 20
    assert timing.sets_of_bytes(small.input_bytes(2), cache) * small.input_bytes(2) >= 2.5 * cache
    assert timing.sets_of_bytes(large.input_bytes(2), cache) == 1
    assert timing.sets_of_bytes(small.input_bytes(2), 0) == 1


# ---- the suites, in tiny shapes ----


def test_dry_run_takes_every_library_through_and_records_every_key(tmp_path):
    suites = ("forward", "training", "backward", "short", "short-steps")
    rows = dry_run(tmp_path, ",".join(suites))
    assert {r["suite"] for r in rows} == set(suites)
    for row in rows:
        assert tuple(row)[: len(results.KEYS)] == results.KEYS
        assert row.get("error") is None and row["wall_us"] > 0 and row["rel_err"] < 0.1
    ours = [r for r in rows if r["impl"] == OURS]
    assert {r["backward"] for r in ours if r["op"] != "fwd"} == {"auto", "lowmem", "unified"}
    assert all(r["winners_wrong"] == 0 for r in ours if r["op"] == "fwd+bwd")
    drawn = {(r["op"], r["winners"]) for r in rows if r["shape"] == named_shapes.TINY_LONG.name}
    assert drawn == {("fwd", None), ("fwd+bwd", "uniform"), ("bwd", "uniform")}


def test_dry_run_takes_the_suites_in_turns_through(tmp_path):
    suites = ("variants", "fp32", "quantized", "ragged-codes", "plaid", "fused-head", "retrieve", "varlen",
              "pairs-packed")  # fmt: skip
    rows = dry_run(tmp_path, ",".join(suites), "ours")
    by_suite = {s: [r for r in rows if r["suite"] == s] for s in suites}
    limits = {"fused-head": hidden.GRADIENTS}
    for r in rows:
        assert r.get("error") is None and r["wall_us"] > 0 and r["rel_err"] < 1e-2
        assert r["op"] == "fwd" or r["grad_err"] < limits.get(r["suite"], parity.GRADIENTS)
    assert {r["variant"] for r in by_suite["variants"]} == set(dense.VARIANTS)
    assert all(r["winners_wrong"] == 0 for r in by_suite["variants"] if r["variant"] == "winners")
    exact, padded = {"forward", "forward + backward"}, {"padded", "padded, forward + backward"}
    for shape, known in (("tiny-batch", exact), ("tiny-rerank", exact | padded), ("tiny-own", padded)):
        assert {r["variant"] for r in by_suite["varlen"] if r["shape"] == shape} == known
    assert {r["variant"] for r in by_suite["pairs-packed"]} == set(packed.PAIRS)
    assert {r["variant"] for r in by_suite["fused-head"]} == set(hidden.VARIANTS)
    assert {r["Nq"] for r in by_suite["retrieve"] if "fp8" in r["shape"]} == {1, 3}


def test_dry_run_takes_steps_small_calls_and_heads_through(tmp_path):
    rows = dry_run(tmp_path, "steps,host,heads", "ours,einsum")
    told = {
        s: [(r["op"], r["variant"], r["impl"]) for r in rows if r["suite"] == s]
        for s in ("steps", "host", "heads")
    }
    timed = [name for name in steps.STEPS if name not in (steps.COMPILED, steps.GRAPH)]
    assert [variant for _, variant, _ in told["steps"]] == [*3 * timed, steps.COMPILED]
    ways = [("fwd", steps.EAGER), *(("fwd+bwd", way) for way in steps.HOST[:3])]
    assert told["host"] == [(*way, impl) for way in ways for impl in (OURS, EINSUM)]
    assert told["heads"] == [("fwd+bwd", v, i) for v in losses.HEADS for i in (OURS, EINSUM)]
    for r in rows:
        assert r.get("error") is None and r["wall_us"] >= r.get("wall_least_us", 0) and r["wall_us"] > 0
        if r["impl"] == OURS:
            assert r["rel_err"] < 1e-2 and (r["op"] == "fwd" or r["grad_err"] < 1e-2)


def test_a_first_call_has_the_times_of_its_import_and_of_itself(tmp_path):
    rows = dry_run(tmp_path, "first-call", "ours", "--limit", "100")
    assert [(r["op"], r["impl"], r["samples"]) for r in rows] == [("fwd", OURS, 1), ("fwd+bwd", OURS, 1)]
    assert all(r["import_ms"] > 5 and r["wall_us"] > 0 and not r.get("error") for r in rows)


def test_suites_are_measured_where_they_belong(tmp_path, capsys):
    out = str(tmp_path / "x.json")
    assert main(["run", "--device", "cpu", "--suite", "forward", "--out", out]) == 2
    assert main(["run", "--dry-run", "--suite", "cpu-threads", "--out", out]) == 2
    said = capsys.readouterr().err
    assert "--suite forward is for a GPU" in said and "--suite cpu-threads is for a CPU" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "nosuch"], "nosuch"),
        (["--impl", "ours,theirs"], "theirs"),
        (["--device", "cuda"], "no GPU"),
        (["--dry-run", "--merge", "--impl", "ours"], "whole groups"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err


# ---- what is wrong is not timed ----


def test_a_peer_that_is_not_installed_is_said_and_left_out():
    found, missing = load(["einsum", "lik"], CPU)
    assert [i.name for i in found] == [EINSUM] and list(missing) == [LIK]


class Other(KEYS["einsum"]):
    """PyTorch's einsum, with something done to Q and to the scores."""

    def __init__(self, of_Q=lambda Q: Q, of_scores=lambda scores: scores):
        self.of_Q, self.of_scores = of_Q, of_scores

    def score(self, shape, backward, train):
        return lambda Q, D: self.of_scores(einsum_maxsim(self.of_Q(Q), D, shape.layout))


def test_a_wrong_score_and_a_wrong_gradient_are_recorded_and_not_timed():
    off = Other(of_scores=lambda scores: scores * 1.1)
    (row,) = dense.measure(bench("forward", LAYOUTS[0], off, dtype=torch.float32), "fwd")
    assert "relative error" in row["error"] and row["wall_us"] is None
    halved = Other(of_Q=lambda Q: 0.5 * Q + 0.5 * Q.detach())  # the scores are right
    b = bench("training", LAYOUTS[0], halved, dtype=torch.float32)
    (row,) = dense.measure(b, "fwd+bwd", (inputs.UNIFORM,))
    assert "a gradient is off by 0.5" in row["error"] and row["wall_us"] is None and row["rel_err"] < 1e-6


def test_one_variant_that_fails_costs_its_row_alone():
    b = bench("variants", LAYOUTS[0], dtype=torch.float32)
    x = inputs.draw(b.shape, CPU, torch.float32)
    wanted = parity.reference_scores(b.shape, x.Q, x.D)[0]

    def fails():
        raise RuntimeError("no such kernel")

    def one(variant, make):
        return b.forward(OURS, variant, make, [x.tokens], wanted)

    good, wrong, failed = measure(b.settings, [
        one("good", lambda: lambda Q, D: einsum_maxsim(Q, D, b.shape.layout)),
        one("wrong", lambda: lambda Q, D: einsum_maxsim(Q, D, b.shape.layout) * 1.1),
        one("failed", fails),
    ])  # fmt: skip
    assert good["wall_us"] > 0 and "parity" in wrong["error"] and "no such kernel" in failed["error"]
    assert wrong["wall_us"] is None


def test_who_ran_out_of_time_says_so_and_is_not_asked_again():
    calls = []

    def forever(Q):
        calls.append(Q)
        while True:
            pass

    slow = bench("forward", LAYOUTS[0], Other(of_Q=forever), dtype=torch.float32, limit_s=0.05)
    rows = [dense.measure(slow, "fwd")[0] for _ in range(2)]
    assert [r["over_limit_s"] for r in rows] == [0.05, 0.05] and len(calls) == 1


def test_peers_are_called_with_the_same_inputs(monkeypatch):
    """Our own functions stand in under late-interaction-kernels' module paths."""
    for module in ("lik.fp8", "lik.varlen", "lik.padded"):
        own = importlib.import_module(f"late_interaction.{module}")
        monkeypatch.setitem(sys.modules, f"late_interaction_kernels.{module.removeprefix('lik.')}", own)
    monkeypatch.setitem(sys.modules, "late_interaction_kernels", importlib.import_module("late_interaction"))
    peer = SimpleNamespace(name=LIK)
    rows = codes.measure_quantized(bench("quantized", named_shapes.TINY_FORWARD[1], peer))
    rows += packed.measure_varlen(bench("varlen", named_shapes.TINY_VARLEN[0], peer))
    theirs = [r for r in rows if r["impl"] == LIK]
    assert [r["variant"] for r in theirs] == [codes.PER_TOKEN, *packed.VARLEN]
    assert all(r.get("error") is None and r["wall_us"] > 0 for r in theirs)


def test_a_record_names_no_place_on_the_machine_it_was_made_on():
    words = ["run", "--suite", "forward", "--out", "/some/where/x.json", "--out=/some/where", "--quick"]
    header = run_header.new_header(CPU, arguments=words)
    assert header["command"] == "python -m bench run --suite forward --quick"
    error = RuntimeError("in /home/someone/site-packages/peer/kernel.py: no /tmp/x")
    assert error_text(error) == "RuntimeError: in kernel.py: no x"


# ---- clocks ----


@pytest.mark.parametrize("hidden", [False, True])
def test_time_limit_interrupts_even_where_a_compiler_hides_it(hidden):
    with pytest.raises(TimeoutError), timing.time_limit(0.05):
        try:
            while True:
                pass
        except TimeoutError as error:
            raise (RuntimeError("it did not compile") if hidden else error) from error


class FakeEvent:
    def __init__(self, enable_timing=False):
        self.at = 0

    def record(self):
        self.at = FakeGraph.calls

    def elapsed_time(self, other):
        return 0.01 * (other.at - self.at)  # every call takes 10 us


class FakeGraph:
    calls = 0  # made by anyone
    recorded = 0  # in the graph being captured

    def replay(self):
        FakeGraph.calls += FakeGraph.recorded


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU on which a call takes 10 us; what is in `refused` cannot be captured."""
    FakeGraph.calls = FakeGraph.recorded = 0
    gpu = SimpleNamespace(refused=False, capturing=False)

    class Capture(nullcontext[None]):
        def __enter__(self):
            self.before, gpu.capturing = FakeGraph.calls, True

        def __exit__(self, *_):
            FakeGraph.recorded, gpu.capturing = FakeGraph.calls - self.before, False

    def call():
        FakeGraph.calls += 1

    def call_that_waits():
        if gpu.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        call()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    generator = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)
    for name, value in {
        "Event": FakeEvent, "Stream": lambda: stream, "current_stream": lambda: stream,
        "stream": lambda s: nullcontext(), "synchronize": lambda *a: None, "empty_cache": lambda: None,
        "CUDAGraph": FakeGraph, "graph": lambda g: Capture(),
        "default_generators": [generator], "current_device": lambda: 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    gpu.call, gpu.call_that_waits = call, call_that_waits
    return gpu


def test_gpu_time_is_per_call_over_replays_of_all_input_sets(fake_gpu):
    measured = timing.gpu_time([fake_gpu.call] * 3, timing.QUICK)
    assert measured.us == pytest.approx(10.0) and measured.method == "graph"
    assert measured.row() == {"gpu_us": measured.us, "gpu_spread": measured.spread, "gpu_method": "graph"}
    assert FakeGraph.recorded % 3 == 0 and FakeGraph.recorded >= 60


def test_where_one_cannot_be_captured_all_are_timed_by_events(fake_gpu):
    measured = timing.gpu_time([fake_gpu.call_that_waits], timing.QUICK)
    assert measured.us == pytest.approx(10.0) and measured.method == "events"
    captured, waits = [fake_gpu.call], [fake_gpu.call_that_waits]
    assert [r.method for r in timing.by_one_clock([captured, captured], True)] == ["graph", "graph"]
    assert [r.method for r in timing.by_one_clock([captured, waits], True)] == ["events", "events"]


@pytest.mark.gpu
def test_random_numbers_are_drawn_after_a_capture_that_failed():
    x = torch.ones(8, device="cuda")
    measured = timing.gpu_time([lambda: (x + torch.randn_like(x)).sum().item()], timing.QUICK)
    assert measured.method == "events" and torch.randn_like(x).isfinite().all()


# ---- losses that are written out ----


@pytest.mark.parametrize("in_batch", [0.0, 0.5])
@pytest.mark.parametrize("pairwise", [False, True])
def test_the_head_is_colpali_engines(in_batch, pairwise):
    name = "colpali_engine"
    with release("colpali-engine", name, "0.3.18") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, without_its_init(name, folder))
        theirs = importlib.import_module("colpali_engine.loss.late_interaction_losses")
        kind = theirs.ColbertPairwiseNegativeCELoss if pairwise else theirs.ColbertNegativeCELoss
        head = kind(in_batch_term_weight=in_batch)
        x = inputs.draw(Shape("x", 4, 3, 5, 7, d=16, layout=KD), CPU, torch.float64)
        positives = torch.randn(4, 7, 16, dtype=torch.float64)
        positives[0] = torch.cat([x.Q[0], x.Q[0, :2]])  # which the best of all scores of a query is of
        x.require_grad()
        leaves = (x.Q, positives.requires_grad_(), x.D)
        einsum = losses.scores_of(KEYS["einsum"](), Shape("x", 4, 3, 5, 7))
        mine, wanted = losses.negative_head(einsum, *leaves, in_batch, pairwise), head(*leaves)
        torch.testing.assert_close(mine, wanted)
        torch.testing.assert_close(torch.autograd.grad(mine, leaves), torch.autograd.grad(wanted, leaves))


def test_the_chunked_loss_is_pylates():
    with release("pylate", "pylate", "1.6.0", [anything("datasets")]):
        cached = importlib.import_module("pylate.losses").CachedContrastive
        model = SimpleNamespace(do_query_expansion=True, skiplist=[])
        x = inputs.draw(Shape("x", 40, 40, 5, 7, d=16), CPU, torch.float64)
        x.require_grad()
        einsum = losses.scores_of(KEYS["einsum"](), Shape("x", 40, 40, 5, 7))
        mine = losses.chunked_contrastive(einsum, x.Q, x.D)
        theirs = [[y.detach().requires_grad_() for y in side.split(losses.CHUNK)] for side in x.tokens]
        masks = [torch.ones(side.shape[:2]) for side in x.tokens]
        loss = cached(model, mini_batch_size=losses.CHUNK).calculate_loss(theirs, masks, with_backward=True)
        torch.testing.assert_close(mine, loss.to(mine.dtype))
        for side, parts in zip(x.tokens, theirs, strict=True):
            torch.testing.assert_close(side.grad, torch.cat([y.grad for y in parts]))
