"""Claims of the pages that no example of theirs shows."""

import re

import torch

import late_interaction as li
from tests.build.test_readme import examples
from tests.support.programs import ROOT

# What flash-maxsim 0.3.0 exports, without its references in PyTorch; and a module that it does not import.
FLASH_MAXSIM = [
    "flash_maxsim", "flash_maxsim_batched", "flash_maxsim_batched_train", "flash_maxsim_int8",
    "flash_maxsim_int8_batched_train", "flash_maxsim_int8_symmetric", "flash_maxsim_int8x8",
    "flash_maxsim_packed", "flash_maxsim_pairs", "flash_maxsim_pairs_dense", "flash_maxsim_persistent",
    "flash_maxsim_qreuse", "flash_maxsim_rerank", "flash_maxsim_rerank_direct",
    "flash_maxsim_rerank_padded", "flash_maxsim_splitk", "flash_maxsim_topk", "flash_maxsim_train",
    "flash_maxsim_varlen", "pack_docs", "pack_pairs", "quantize_int8", "dequantize_int8",
    "quantize_int8_symmetric", "quantize_query_int8", "warmup", "flash_maxsim_sparse",
]  # fmt: skip
# By what stands in a program: how docs/examples.md calls what it needs.
NEEDS = {
    "from sentence_transformers import": "Sentence Transformers",
    "from pylate import": "PyLate",
    "from colpali_engine.": "colpali-engine",
    "from matplotlib.": "matplotlib",
    "from demo.encode import": "make demo",
    ".numpy()": "NumPy",
    "torch.distributed": "torchrun",
    "cpp_extension": "a C++ compiler",
}


def page(name):
    return (ROOT / name).read_text()


def test_the_page_of_moving_names_every_function():
    words = set(re.findall(r"\w+", page("docs/guide/moving.md")))
    assert [name for name in FLASH_MAXSIM if name not in words] == []


def test_what_takes_the_place_of_calls_of_flash_maxsim():
    text = page("docs/guide/moving.md")
    Q, D = torch.randn(6, 8), torch.randn(4, 5, 8)
    indices = torch.tensor([[0, 1], [2, 5], [3, 3], [4, 0]])
    wanted = torch.einsum("bkd,bld->bkl", Q[indices], D).amax(2).sum(1)  # maxsim_sparse_naive
    torch.testing.assert_close(li.maxsim_pairs(Q[indices], D), wanted)
    assert "`li.maxsim_pairs(Q[indices], D)`" in text
    queries, documents = torch.randn(2, 3, 8), torch.randn(2, 4, 5, 8)
    full = li.maxsim(queries, documents, torch.ones(2, 3, dtype=torch.bool))
    torch.testing.assert_close(li.maxsim(queries, documents), full)


def test_the_page_of_examples_says_what_each_needs():
    row = re.compile(r"^\| \[.+?\]\(examples/(\w+)\.md\) \| .+? \| (.*?) ?\|$", re.MULTILINE)
    rows = dict(row.findall(page("docs/examples.md")))
    assert len(rows) == len(list((ROOT / "docs" / "examples").glob("*.md")))
    for name, needs in rows.items():
        text = page(f"examples/{name}.py")
        found = {said for key, said in NEEDS.items() if key in text}
        if "PyLate" in found:
            found.discard("Sentence Transformers")  # which it brings
        if needs:
            assert found and all(said in needs for said in found), name
        else:
            assert not found, name


def test_the_page_of_trainers_shows_lines_of_its_programs():
    """In their order: tests/docs/test_example_programs.py runs the programs."""
    blocks = examples("docs/guide/trainers.md")
    names = ("train_sentence_transformers", "train_pylate", "train_colpali")
    for name, block in zip(names, blocks, strict=True):
        program = map(str.strip, page(f"examples/{name}.py").splitlines())
        missing = [line for line in block.splitlines() if line.strip() and line.strip() not in program]
        assert not missing, name


def test_pylate_and_sentence_transformers_exclude_each_other():
    extras = page("pyproject.toml")
    assert '"sentence-transformers>=6' in extras
    assert re.search(r"^sentence-transformers==5\.", page("requirements/pylate.txt"), re.M)
    assert "PyLate pins a release 5 of Sentence Transformers" in " ".join(page("README.md").split())


def test_the_gpus_of_the_readme_are_those_that_a_wheel_is_built_for():
    (archs,) = re.findall(r'^ALL_ARCHS = "(.+)"$', page("setup.py"), re.M)
    assert archs.split(";") == ["7.5", "8.0", "8.9", "9.0a", "10.0", "12.0", "9.0+PTX"]
    text = page("README.md")
    table = text[text.index("## GPUs") : text.index("## Figures")]
    assert all(code in table for code in ("7.5", "8.0", "8.9", "9.0a", "10.0", "12.0"))
    gpus = ("T4", "RTX 20", "H100", "H200", "A100", "RTX 3090", "RTX 4090", "L4", "L40S", "RTX 5090", "B200")
    for gpu in gpus:
        assert gpu in table
