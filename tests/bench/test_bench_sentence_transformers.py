"""The record of `python -m bench st`, and its long calls."""

import os
import time

import torch

from bench.harness import results
from bench.suites import sentence_transformers as suite

CPU = torch.device("cpu")


def header(run, **values):
    return {
        "kind": "header", "run": run, "gpu": None, "cpu": "a CPU", "threads": 2, "driver": None,
        "commit": "0123456789", "versions": {"torch": "2.13.0"}, "command": "python -m bench st",
        "packages": {"sentence-transformers": "6.2.0"}, "dtype": "torch.float32",
        "query": 32, "document": 300, **values,
    }  # fmt: skip


def row(work, batch, **values):
    return {"work": work, "batch": batch, "with_ms": 2.0, "without_ms": 5.0, "speedup": 2.5, **values}


def test_a_record_keeps_other_work_and_replaces_its_own(tmp_path):
    path = tmp_path / "st-cpu.json"
    first = results.Results(path, header("2026-01-01"), merge=True)
    first.add([row("a", 32)])
    first.add([row("b", 32)])
    second = results.Results(path, header("2026-01-02"), merge=True)
    second.add([row("b", 32, with_ms=1.0)])
    second.add([row("b", 64)])
    headers, rows = results.split(results.read(path))
    assert [h["run"] for h in headers] == ["2026-01-01", "2026-01-02"]
    assert [(x["work"], x["batch"], x["with_ms"], x["run"]) for x in rows] == [
        ("a", 32, 2.0, "2026-01-01"), ("b", 32, 1.0, "2026-01-02"), ("b", 64, 2.0, "2026-01-02"),
    ]  # fmt: skip
    results.Results(path, header("2026-01-03"), merge=True).add([row("a", 32)])
    assert [h["run"] for h in results.split(results.read(path))[0]] == ["2026-01-02", "2026-01-03"]


def by_way(fast, slow):
    """A call that is `fast` with the patch and `slow` without."""
    return lambda: fast() if os.environ["LATE_INTERACTION_DISABLE"] == "0" else slow()


def test_a_call_of_many_seconds_is_made_once(monkeypatch):
    monkeypatch.setattr(suite, "LONG_S", 0.05)
    made = []

    def slow():
        made.append("slow")
        time.sleep(0.1)

    found = suite.interleaved(by_way(lambda: made.append("fast"), slow), CPU, 3)
    assert made.count("slow") == 1 and made.count("fast") == 4
    assert found["without_calls"] == 1 and found["without_ms"] > 50
    assert found["with_calls"] == 3 and found["with_ms"] < 50


def test_what_fails_has_a_reason_for_a_time():
    def no_memory():
        raise torch.OutOfMemoryError("no")

    found = suite.interleaved(by_way(lambda: None, no_memory), CPU, 1)
    assert (
        found["without_error"] == "out of memory" and "without_ms" not in found and found["with_calls"] == 1
    )
    found = suite.interleaved(by_way(lambda: None, lambda: time.sleep(9)), CPU, 1, limit_s=0.05)
    assert found["without_error"] == "over 0.05 s" and found["without_over_ms"] == 50
