"""The roofline of a device and the profile behind it, from recorded rows; nothing without them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench.command_line import main
from bench.harness import results, run_header
from bench.harness.library import LIK, OURS
from bench.harness.named_shapes import FORWARD, TRAINING
from bench.tuning import ncu
from late_interaction._doctor.ceilings import Ceilings

pages = pytest.importorskip("bench.report.pages", reason="pandas is not installed")
performance = pytest.importorskip("bench.report.performance", reason="pandas is not installed")
ROOT = Path(__file__).resolve().parents[2]

SHAPES = {s.name: s for s in (*TRAINING, *FORWARD)}

# As Nsight Compute writes it: its own lines, the program's, names, units, a line a kernel.
_SHARE = "avg.pct_of_peak_sustained"
COLUMNS = {
    "ID": ("", "0", "1"),
    "Kernel Name": ("", "void late_interaction::maxsim_forward_wgmma_rows<A, 1>(Args)", "maxsim_forward_mma"),
    "Grid Size": ("", "(132, 1, 1)", "(264, 1, 1)"),
    "gpu__time_duration.sum": ("nsecond", "1,250,500", "66000"),
    f"gpu__dram_throughput.{_SHARE}_elapsed": ("%", "12.5", "91"),
    f"lts__throughput.{_SHARE}_elapsed": ("%", "40.25", "n/a"),
    f"sm__inst_issued.{_SHARE}_active": ("%", "41", "20"),
    f"sm__pipe_tensor_op_hmma_cycles_active.{_SHARE}_active": ("%", "80.5", "10"),
    f"sm__pipe_tensor_op_imma_cycles_active.{_SHARE}_active": ("%", "0", "0"),
    "launch__registers_per_thread": ("register/thread", "168", "200"),
}
# As Nsight Compute writes it: its own lines, the program's, names, units, a line a kernel.
TABLE = [",".join(f'"{cell}"' for cell in line) for line in (COLUMNS, *zip(*COLUMNS.values(), strict=True))]
CSV = "\n".join(["==PROF== Connected to process 1", "what the program prints", *TABLE, ""])


def test_a_profile_is_read_whatever_else_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = ncu.extract(CSV, ["train-256", "text-long"])
    assert first == {
        "shape": "train-256", "kernel": "maxsim_forward_wgmma_rows", "grid": "(132, 1, 1)",
        "tensor_pct": 80.5, "dram_pct": 12.5, "l2_pct": 40.25, "issue_pct": 41.0, "registers": 168.0,
        "duration_us": 1250.5,
    }  # fmt: skip
    assert second["l2_pct"] is None and second["duration_us"] == 66.0
    source, target = tmp_path / "ncu.csv", tmp_path / "ncu.json"
    source.write_text(CSV)
    options = ["extract", str(source), "--out", str(target), "--shapes"]
    assert main(["ncu", *options, "train-256,text-long"]) == 0
    headers, rows = results.split(results.read(target))
    assert len(headers) == 1 and [r["shape"] for r in rows] == ["train-256", "text-long"]
    assert main(["ncu", *options, "train-256"]) == 1 and "2 profiled kernels for 1" in capsys.readouterr().err
    source.write_text("==ERROR== no permission")
    assert main(["ncu", *options, "train-256"]) == 1


def row(
    suite: str, shape: str, us: float, variant: str | None = None, impl: str = OURS, **more: object
) -> results.Row:
    dtype = torch.float32 if suite == "fp32" else torch.bfloat16
    out = results.new_row(suite, SHAPES[shape], "fwd", dtype, impl, variant=variant)
    return {**out, "gpu_us": us, "wall_us": us + 9, "rel_err": 1e-6, "gpu_spread": 0.0, **more}


def build(directory: Path, device: Sequence[str] | None = None) -> str:
    """The text between the markers, without the padding of tables."""
    return re.sub(" +", " ", performance.build(directory, device))


def test_each_recorded_part_has_its_table_and_no_other_has(tmp_path: Path) -> None:
    """test_the_pages_match_the_recorded_runs takes the tables of all that is recorded."""
    assert build(tmp_path) == "No run on a GPU is recorded yet."
    ceilings = Ceilings(800.0, 400.0, 4.0, 3.0, 14.0, 98.0)
    header = run_header.new_header(torch.device("cpu"), ceilings, gpu="Some GPU", driver="1")
    record = results.Results(tmp_path / "some-gpu.json", header)
    record.add([row("forward", "train-256", 252.0), row("forward", "text-long", 70.0)])
    text = build(tmp_path)
    assert "| train-256 | 256 x 256, 32, 300, d=128 | cuBLAS bf16 | 201 | 252 | 80% |" in text
    assert "| text-long |" in text and "| reads |" in text
    assert re.findall("^## (.*)$", text, re.MULTILINE) == ["Scores alone, bf16"]

    step = {"op": "fwd+bwd", "peak_mib": 26.0}
    record.add([
        row("training", "pylate-256", 410.0, winners="uniform", backward="auto", **step),
        row("training", "pylate-256", 430.0, winners="skewed", backward="auto", **step),
        row("training", "pylate-256", 820.0, impl=LIK, winners="uniform", backward="lowmem", **step),
        row("training", "kd-128x8", 200.0, winners="uniform", backward="auto", **step),  # half of a pair
    ])  # fmt: skip
    text = build(tmp_path)
    line = (
        "| pylate-256 | 256 x 256, 32, 300, d=128 | products | 203 | 1,024 | 410 | 49% | 430 | 419 | 26.0 |"
    )
    assert f"{line} 820 | 2.00x |" in text and "| kd-128x8 | 128 x 8" not in text

    profile = results.Results(tmp_path / "ncu-some-gpu.json", header)
    profile.add(ncu.extract(CSV, ["train-256", "text-long"]))
    sweep = results.Results(tmp_path / "sweep-some-gpu.json", header)
    for name, us in (("train-256", 50.0), ("text-long", 90.0)):
        sweep.add([row("sweep", name, 80.0, plan="sm90_q; 256 x 152"), row("sweep", name, us, impl=LIK)])
    text = build(tmp_path)
    profiled = "| train-256 | maxsim_forward_wgmma_rows | 80% | 12% | 40% | 41% | 168 | 1,250 |"
    assert f"{profiled} tensor cores |" in text
    assert "## Random shapes" in text and "1 of 2" in text and "| 1.60 |" in text
    assert [p.name for p in results.records(tmp_path)] == ["some-gpu.json"]


def test_a_table_taken_again_on_another_gpu_stands_alone(tmp_path: Path) -> None:
    header = run_header.new_header(
        torch.device("cpu"), Ceilings(800.0, 400.0, 4.0, 3.0), gpu="Another GPU", driver="1"
    )
    record = results.Results(tmp_path / "another-gpu.json", header)
    step = {"winners": "uniform", "floor_us": 503.0, "peak_mib": 1032.0}
    record.add([row("training", "kd-256x16", 900.0, impl=LIK, backward="lowmem", **step)])
    record.add([row("training", "kd-256x16", 700.0, backward="auto", **step)])
    assert re.findall("^## (.*)$", build(tmp_path), re.MULTILINE) == ["Sixteen negatives a query"]

    whole = results.Results(tmp_path / "the-gpu.json", header)
    whole.add([row("forward", "train-256", 252.0)])
    assert [p.stem for p in results.records(tmp_path)] == ["the-gpu", "another-gpu"]

    later = {**header, "run": "9999-01-01T00:00:00+00:00", "gpu": "A third GPU"}
    third = results.Results(tmp_path / "third-gpu.json", later)
    third.add([row("forward", "train-256", 200.0)])
    assert [p.stem for p in results.records(tmp_path)] == ["third-gpu", "the-gpu", "another-gpu"]
    assert results.whole_record(tmp_path) == tmp_path / "third-gpu.json"
    assert build(tmp_path).startswith("A third GPU, driver 1;")
    assert "A third GPU" not in build(tmp_path, ["the-gpu"])


def test_report_fills_both_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = f"{pages.BEGIN}\n{pages.END}\n"
    readme, page = tmp_path / "README.md", tmp_path / "docs" / "benchmarks" / "h200_roofline.md"
    page.parent.mkdir(parents=True)
    for path in (readme, page):
        path.write_text(empty)
    options = ["--readme", str(readme), "--results", str(tmp_path)]
    assert main(["report", *options]) == 0 and main(["check", *options]) == 0
    assert "recorded yet" in readme.read_text() and "recorded yet" in page.read_text()
    page.write_text(empty)
    assert main(["check", *options]) == 1 and "h200_roofline.md" in capsys.readouterr().err


def test_the_pages_match_the_recorded_runs() -> None:
    assert main(["check"]) == 0


def test_links_of_the_page_point_at_files() -> None:
    page = ROOT / "docs" / "benchmarks" / "h200_roofline.md"
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
