"""python -m late_interaction.doctor: what it checks, what it says of it, and its exit status."""

import json
import types

import pytest
import torch

import late_interaction as li
from bench.harness import named_shapes
from late_interaction import doctor
from late_interaction._doctor import checks, speed
from late_interaction._doctor.ceilings import Ceilings
from tests import selection

# Plans are no results, and no public function calls the last.
UNCHECKED = {
    "cuda_capability", "cuda_missing", "explain_plan", "explain_packed_plan", "explain_residual_plan",
    "forced_plan", "maxsim_dequantized",
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    """Three checks, one small shape, and ceilings that nobody measured."""
    for part, name in (("_scores", "maxsim_pairs"), ("_others", "search"), ("_codes", "int8 codes")):
        make = getattr(checks, part)
        monkeypatch.setattr(checks, part, lambda x, make=make, name=name: {name: make(x)[name]})
    monkeypatch.setattr(doctor, "measure_ceilings", lambda *_: Ceilings(1.0, 0.5, 0.02, 0.03, 4.0, 9.0))
    for shapes in ("ON_CPU", "ON_GPU"):
        monkeypatch.setattr(speed, shapes, {"tiny": (2, 3, 4, 5)})
    monkeypatch.setattr(speed, "STEPS", {"cpu": ("tiny",), "cuda": ("tiny",)})


def test_every_operator_is_checked_and_agrees(device, monkeypatch):
    for kind in (selection.OpOverload, selection.OpOverloadPacket):
        monkeypatch.setattr(kind, "__call__", kind.__call__)  # restored afterwards
    called = selection.CalledOperators()
    called.watch()
    rows = list(checks.run(torch.device(device)))
    assert [row for row in rows if not row["ok"]] == []
    assert {row["dtype"] for row in rows} == set(checks.LIMITS)
    # The fast path of maxsim is not seen, and a GPU alone has the last.
    seen = called.names | {"maxsim"} | ({"maxsim_residual_normed"} if device == "cpu" else set())
    assert {*li.ops.__all__} - UNCHECKED - seen == set()


def test_a_wrong_operator_and_one_that_raises_are_said(quick, monkeypatch, capsys, tmp_path):
    right, file = li.maxsim_pairs, tmp_path / "doctor.json"
    monkeypatch.setattr(checks, "maxsim_pairs", lambda Q, D: right(Q, D) + 0.5)

    def failing(*args, **options):
        raise RuntimeError("no such kernel in /a/folder/file.cpp")

    monkeypatch.setattr(checks, "search", failing)
    assert doctor.main(["--cpu", "--json", str(file)]) == 1
    text, found = capsys.readouterr().out, json.loads(file.read_text())
    wrong = {row["check"]: row for row in found["operators"] if not row["ok"]}
    assert set(wrong) == {"maxsim_pairs", "search"} and wrong["maxsim_pairs"]["error"] > 1e-2
    assert wrong["search"]["raised"] == "RuntimeError: no such kernel in file.cpp"
    assert "WRONG: over" in text and "4 of " in text and " are WRONG" in text
    assert text.strip() == doctor.report(found)


def test_what_is_found_and_posted(quick, device, pytestconfig):
    found = json.loads(json.dumps(doctor.examine(torch.device(device))))
    assert found["version"] == 1 and found["device"]["type"] == device and found["device"]["name"]
    assert found["installed"]["torch"] == torch.__version__ and "numpy" in found["installed"]
    assert li.ops._library.operators.cpu_isa("") in found["libraries"]["cpu"]
    assert found["libraries"]["cuda"].startswith(
        "none: " if li.ops.cuda_missing else "_cuda, late_interaction"
    )
    native = device == "cuda" and not pytestconfig.option.capability
    assert found["ceilings"]["read_gb_s"] == 20 and bool(found["rates"]) == native
    for row in found["timings"]:
        assert row["us"]["late_interaction"] > 0 and row["us"]["torch einsum"] > 0, row
    assert {row["step"] for row in found["timings"]} == {True, False}
    assert "/" not in json.dumps({**found, "operators": []})
    assert f"All {len(found['operators'])} checks agree." in doctor.report(found)


def test_a_gpu_that_nothing_serves_is_left_to_the_cpu(monkeypatch, capsys):
    on = []
    monkeypatch.setattr(doctor, "examine", lambda device: on.append(device.type) or {"operators": []})
    monkeypatch.setattr(doctor, "report", lambda found: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.ops, "cuda_missing", "/a/folder/_cuda.abi3.so does not load")
    assert doctor._why_no_cuda() == "_cuda.abi3.so does not load" and doctor.main([]) == 0
    monkeypatch.setattr(doctor.ops, "cuda_missing", None)
    for reason in ("no code for this GPU", None):
        monkeypatch.setattr(doctor, "cuda_build", object())
        monkeypatch.setattr(doctor, "why_on_no_gpu", lambda build, reason=reason: reason)
        assert doctor.main([]) == 0
    assert on == ["cpu", "cpu", "cuda"]


def test_a_peer_that_fails_or_is_wrong_is_said(quick, monkeypatch):
    def missing(Q, D):
        raise ImportError("broken peer")

    ways = {"late_interaction": li.maxsim, "wrong": lambda Q, D: 2 * li.maxsim(Q, D), "missing": missing}
    monkeypatch.setattr(speed, "_ways", lambda *_: ways)
    row = next(speed.timings(torch.device("cpu"), {}))
    assert row["us"]["missing"] == "ImportError: broken peer" and "off by 1" in row["us"]["wrong"]
    assert row["us"]["late_interaction"] > 0


def test_rates_beside_the_planner_s(monkeypatch):
    """4,096 operations of an H200's tensor cores, at 1 GHz on 100 multiprocessors."""
    gpu = types.SimpleNamespace(multi_processor_count=100, uuid="x")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(speed, "product_tflops", lambda *_: 25.0)
    monkeypatch.setattr(speed, "said", lambda *command: "1000")
    monkeypatch.setattr(speed.torch, "randn", lambda *shape, **_: torch.zeros(1, 1))
    planned = speed.planned_rates(sm=90, sm_count=132)
    assert planned == {"fp16": 4096, "int8": 8192, "fp8": 8192, "tf32": 2048, "ffma": 256}
    monkeypatch.setattr(speed, "planned_rates", lambda: planned)
    rows = speed.rates(Ceilings(400.0, 150.0), torch.device("cpu"))
    assert [(row["type"], row["measured"], row["differs"]) for row in rows] == [
        ("fp16", 4000.0, False), ("tf32", 1500.0, True), ("ffma", 250.0, False),
    ]  # fmt: skip
    monkeypatch.setattr(speed, "said", lambda *command: None)
    assert speed.rates(Ceilings(400.0, 150.0), torch.device("cpu")) == []


def test_shapes_are_those_of_the_benchmarks():
    known = {
        shape.name: (shape.Nq, shape.Nd, shape.Lq, shape.Ld)
        for shape in (
            *named_shapes.FORWARD,
            *named_shapes.SHORT,
            *named_shapes.CPU,
            *named_shapes.CPU_TRAINING,
        )
    }
    for name, sizes in (speed.ON_GPU | speed.ON_CPU).items():
        assert known[name] == sizes
    assert known["cpu-train"] == (32, 32, 32, 300) and set(speed.STEPS["cuda"]) <= set(speed.ON_GPU)
    assert len(speed.ON_GPU) + len(speed.STEPS["cuda"]) == 2 * (len(speed.ON_CPU) + 1) == 10
