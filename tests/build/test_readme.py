"""The Python examples of README and guide run, in the order in which a reader would paste them."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from late_interaction import _maxsim

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": 5, "docs/guide.md": 15}  # how many examples each has, other libraries' aside


def examples(page="README.md"):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, monkeypatch):
    """Without a warning about the norms of their queries, in whichever order they come."""
    monkeypatch.delenv("LIK_SUPPRESS_NORM_WARN", raising=False)
    # tests/test_pylate.py and tests/test_sentence_transformers.py run those.
    blocks = [b for b in examples(page) if "import pylate" not in b and "sentence_transformers" not in b]
    assert len(blocks) == PAGES[page]
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        # Each in a file name of its own: torch.compile wants to find a function's source.
        monkeypatch.setattr(_maxsim, "_NORM_CHECKED", False)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "maxsim", UserWarning)
            exec(compile(block, f"{page}:{number}", "exec"), names)
    assert names["documents"].shape == (16, 10)
    if page == "README.md":
        assert names["teacher_scores"].shape == (8, 16)
    else:
        assert names["indices"].shape == (4, 10)


@pytest.mark.parametrize("page", [*PAGES, "csrc/README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_links_point_at_files(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), target
