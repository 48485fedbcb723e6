"""The suites of a CPU in tiny shapes: libraries, instruction sets, threads and searches; and their tables."""

from pathlib import Path

import pytest
import torch

from bench.command_line import main
from bench.harness import results
from bench.harness.library import OURS
from bench.harness.shape import Shape
from bench.report.tables import Record, frame
from bench.suites import cpu, cpu_corpus
from tests.bench.shared import bench

report = pytest.importorskip("bench.report.cpu", reason="pandas is not installed")


def record(rows):
    return Record(Path("cpu.json"), [], frame(rows))


def test_calls_take_turns():
    order = []
    calls = {name: (lambda n=name: order.append(n)) for name in ("a", "b")}
    cpu.time_interleaved(calls, rounds=2)
    assert order == ["a", "b"] * 3


def test_every_library_has_a_rate_and_ours_is_right():
    rows = cpu.measure(bench("cpu", Shape("t", 1, 40, 32, 17, d=16)))
    rows += cpu.measure(bench("cpu", Shape("s", 3, 4, 5, 7, d=16)))
    ours = [r for r in rows if r["impl"] == OURS]
    assert [(r["op"], r["dtype"]) for r in ours] == [
        *(("fwd", dtype) for dtype in ("float32", "bfloat16", "int8")),
        *(("fwd+bwd", dtype) for dtype in ("float32", "bfloat16")),
    ]
    for r in ours:
        assert r["gflops"] > 0 and not r.get("error")
        assert (r["rel_err"] if r["op"] == "fwd" else r["grad_err"]) < 3e-3
    shown = report.cpu_table(record(rows))
    assert shown.count("\n") == 6 and "training step" in shown


def test_every_instruction_set_takes_its_turn():
    before = torch.ops.late_interaction.cpu_isa("")
    rows = cpu.measure_isa(bench("cpu-isa", Shape("t", 1, 40, 32, 17, d=16)))
    names = cpu.available()
    assert "portable" in names and before in names
    assert [(r["variant"], r["dtype"]) for r in rows] == [(n, kind) for kind in cpu.KINDS for n in names]
    assert all(r["gflops"] > 0 and r["rel_err"] < 1e-5 and not r.get("error") for r in rows)
    assert torch.ops.late_interaction.cpu_isa("") == before
    shown = report.instruction_set_table(record(rows))
    assert shown.count("\n") == len(names) + 1 and "| `portable` " in shown


def test_threads_take_documents_from_memory_and_from_the_caches():
    threads = torch.get_num_threads()
    rows = cpu.measure_threads(bench("cpu-threads", Shape("t", 1, 40, 32, 17, d=16)))
    rows += cpu.measure_threads(bench("cpu-threads", Shape("cpu-small-3", 1, 3, 32, 17, d=16)))
    assert torch.get_num_threads() == threads
    counts = cpu.thread_counts()
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
    shown = report.threads_table(record(rows))
    assert shown.count("\n") == 8 and "| GB/s of a plain read " in shown
    assert report.small_calls_table(record(rows)).count("\n") == 2


def test_searches_take_turns_and_find_the_best():
    threads = torch.get_num_threads()
    rows = cpu_corpus.measure(bench("cpu-corpus", Shape("t", 1, 60, 8, 17, d=32)))
    assert torch.get_num_threads() == threads
    ours = [r for r in rows if r["impl"] == OURS]
    assert [(r["dtype"], r.get("variant")) for r in ours] == [
        (dtype, variant)
        for dtype in ("float32", "bfloat16", "int8", "uint8")
        for variant in (None, "one thread")
    ]
    assert all(r["wall_us"] > 0 and not r.get("error") for r in ours)
    peers = {r["impl"]: r for r in rows if r["impl"] != OURS}
    assert peers.keys() == set(cpu_corpus.PEERS)
    assert all((r["wall_us"] or 0) > 0 or r["skipped"] == "not installed" for r in peers.values())
    shown = report.corpus_table(record(rows))
    assert shown.count("\n") == 8 and "| residuals of 2 bits " in shown


def test_a_search_that_misses_the_best_is_wrong():
    wanted = torch.arange(40.0) + 1
    best = wanted.topk(10)
    assert cpu_corpus.problem((best.values, best.indices), wanted) is None
    assert "relative error" in str(cpu_corpus.problem((best.values * 1.1, best.indices), wanted))
    others = torch.arange(10)
    assert "10 of the documents" in str(cpu_corpus.problem((wanted[others], others), wanted))


def test_a_run_on_a_cpu_is_recorded(tmp_path):
    out = tmp_path / "x.json"
    small = ["run", "--device", "cpu", "--quick", "--suite", "cpu-threads", "--shapes", "cpu-small-10"]
    assert main([*small, "--out", str(out)]) == 0
    rows = results.split(results.read(out))[1]
    assert {row["shape"] for row in rows} == {"cpu-small-10", "cpu-small-100", "cpu-small-1000"}
