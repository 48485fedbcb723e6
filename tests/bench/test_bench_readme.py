"""What `make docs` writes into README.md: rows by what they are, whole steps, and when all of it helps."""

import json
import re
from pathlib import Path

import pytest

from bench.harness.library import LIK, OURS
from bench.harness.results import DIRECTORY, read, split
from tests.bench.test_bench_end_to_end import RECORD

readme = pytest.importorskip("bench.report.readme", reason="pandas is not installed")
H200 = split(read(DIRECTORY / "nvidia-h200.json"))[1]
WHOLE = split(read(DIRECTORY / "end-to-end-nvidia-h200.json"))[1]


@pytest.fixture(scope="module")
def text() -> str:
    return readme.build(DIRECTORY)


def test_no_row_of_scores_and_gradients_is_called_a_step(text: str) -> None:
    scores, steps = text.split("Whole training steps")
    assert "step" not in scores
    assert scores.count("| scores and gradients, ") == 3
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in steps.splitlines()]
    wanted = ["GTE-ModernColBERT", "1,024, GradCache", "H200", "2.36", "2.41", "2.68", "2.81", "2.8%"]
    assert wanted in lines


def test_figures_of_the_lists_are_those_of_the_record(text: str) -> None:
    (first,) = [r for r in H200 if r["suite"] == "first-call" and r["impl"] == OURS and r["op"] == "fwd+bwd"]
    (cold,) = [
        r for r in H200
        if (r["suite"], r["impl"], r["op"], r.get("jit_cache")) == ("first-call", LIK, "fwd+bwd", "cold")
    ]  # fmt: skip
    wanted = f"take {first['wall_us'] / 1e3:.0f} ms, and {cold['wall_us'] / 1e6:.1f} s where {LIK} compiles"
    assert wanted in text
    (alone,) = [r for r in WHOLE if r["work"] == "modernbert, loss alone" and r["batch"] == 1024]
    for name in ("vanilla", "contrastive_loss"):
        values = alone["variants"][name]
        assert f"{values['peak_mib']:,.0f} MiB" in text and f"{1e3 * values['s']:.3g} ms" in text
    (step,) = [r for r in WHOLE if r["work"] == "modernbert, step" and r["batch"] == 32]
    vanilla = step["variants"]["vanilla"]
    assert f"({100 * vanilla['loss_s'] / vanilla['s']:.1f}% at 32, " in text


def test_a_record_of_steps_alone(tmp_path: Path) -> None:
    (tmp_path / "end-to-end-a-gpu.json").write_text(json.dumps(RECORD))
    text = re.sub(" +", " ", readme.build(tmp_path))
    assert "GPU microseconds" not in text and "first scores" not in text
    assert "\n| GTE-ModernColBERT | 32 | a | 0.199 ± 3% | - | - | 0.2 | 1.0% |\n" in text
    assert "| 2,048, GradCache | a | 4.5 | not run | - | no memory (loss) | - |" in text
    assert "up to a batch of 512 PyTorch's own loss is less than 5%" in text
