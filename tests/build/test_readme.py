"""The README's Python examples run, in the order in which a reader would paste them."""

import re
import warnings
from pathlib import Path

import torch

from late_interaction import autograd

README = Path(__file__).resolve().parents[2] / "README.md"


def examples():
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_examples_run(monkeypatch):
    """Without a warning about the norms of their queries, in whichever order they come."""
    monkeypatch.delenv("LIK_SUPPRESS_NORM_WARN", raising=False)
    blocks = [
        block for block in examples() if "import pylate" not in block
    ]  # tests/test_pylate.py runs that one
    assert len(blocks) == 8, "score, train, pack, list, retrieve, project, compile, quantize"
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        # Each in a file name of its own: torch.compile wants to find a function's source.
        monkeypatch.setattr(autograd, "_NORM_CHECKED", False)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "maxsim", UserWarning)
            exec(compile(block, f"{README}:{number}", "exec"), names)
    assert names["documents"].shape == (16, 10)
    assert names["indices"].shape == (4, 10)
    assert names["teacher_scores"].shape == (8, 16)


def test_links_point_at_files():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text()):
        assert (README.parent / target).exists(), target
