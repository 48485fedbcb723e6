"""The README's Python examples run, in the order in which a reader would paste them."""

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[2] / "README.md"


def examples():
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_examples_run():
    blocks = [
        block for block in examples() if "import pylate" not in block
    ]  # tests/test_pylate.py runs that one
    assert len(blocks) == 8, "score, train, pack, list, retrieve, project, compile, quantize"
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        # Each in a file name of its own: torch.compile wants to find a function's source.
        exec(compile(block, f"{README}:{number}", "exec"), names)
    assert names["documents"].shape == (16, 10)
    assert names["indices"].shape == (4, 10)
    assert names["teacher_scores"].shape == (8, 16)


def test_links_point_at_files():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text()):
        assert (README.parent / target).exists(), target
