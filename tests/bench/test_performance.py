"""Profiles that are read, and the pages that are made of records."""

import pytest

from bench.command_line import main
from bench.harness import results
from bench.tuning import ncu

pages = pytest.importorskip("bench.report.pages", reason="pandas is not installed")
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


def test_a_profile_is_read_whatever_else_is_printed(tmp_path, capsys):
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


def test_report_fills_both_pages(tmp_path, capsys):
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


def test_the_pages_match_the_recorded_runs():
    assert main(["check"]) == 0
