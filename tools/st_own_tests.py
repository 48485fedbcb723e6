"""st_own_tests.py [CHECKOUT]: Sentence Transformers' own tests of its multi-vector modules, without the patch
and with it. `make st-tests` runs it.

CHECKOUT is a clone of its repository, since no package carries its tests; without one, the tag of the
installed release is cloned from GitHub. A small BERT with random weights takes the place of the model that
most tests load from the hub; those that load others fail either way. A test that passes without the patch
alone is listed, and ends the program with 1, but for those of EXPECTED.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/huggingface/sentence-transformers"
MODELS = ("sentence-transformers-testing/stsb-bert-tiny-safetensors",)
TESTS = ("tests/multi_vector_encoder", "tests/util/test_similarity.py")
# They look at the padded chunks that it works in, which do not exist with the patch.
EXPECTED = {
    "test_maxsim_budget_bounds_the_live_chunk_elements",
    "test_maxsim_pairwise_budget_counts_the_padded_queries",
    "test_maxsim_pairwise_never_pads_the_batch_to_the_global_width",
}
PLUGIN = 'import late_interaction\nlate_interaction.patch("sentence-transformers")\n'


def fetched(folder: Path) -> Path:
    release = importlib.metadata.version("sentence-transformers")
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", f"v{release}", REPOSITORY, str(folder)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"cannot clone {REPOSITORY} at v{release}: name a checkout")
    return folder


def prepare(checkout: Path, folder: Path) -> None:
    """Its tests, with a model on the disk."""
    sys.path.insert(0, str(ROOT / "examples"))
    from tiny_bert import save_tiny_bert

    save_tiny_bert(str(folder / "tiny-bert"), hidden=128, longest=512)
    shutil.copytree(checkout / "tests", folder / "tests")
    for path in (folder / "tests").rglob("*.py"):
        text = path.read_text()
        for model in MODELS:
            text = text.replace(model, str(folder / "tiny-bert"))
        path.write_text(text)
    (folder / "with_the_patch.py").write_text(PLUGIN)


def outcomes(folder: Path, patched: bool) -> dict[str, str]:
    """{test: passed, failed or skipped}."""
    report = folder / f"patched-{patched}.xml"
    plugin = ["-p", "with_the_patch"] if patched else []
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors"]
    command += ["-c", os.devnull, "--rootdir", str(folder)]
    environment = {
        **os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1",
        "LIK_SUPPRESS_NORM_WARN": "1",
    }  # fmt: skip
    subprocess.run(
        [*command, *plugin, f"--junitxml={report}", *TESTS], cwd=folder, env=environment, check=False,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    if not report.exists():
        sys.exit("pytest made no report: is its environment complete?")
    return read(report)


def read(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def broken(without: dict[str, str], patched: dict[str, str]) -> list[str]:
    """Tests that pass without the patch alone, and are not expected to."""
    return [
        test for test, outcome in without.items()
        if outcome == "passed" and patched.get(test) != "passed"
        and test.rpartition("::")[2].partition("[")[0] not in EXPECTED
    ]  # fmt: skip


def count(found: dict[str, str]) -> str:
    return ", ".join(f"{list(found.values()).count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))


def main(*given: str) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(Path(*given) if given else fetched(folder / "checkout"), folder)
        without, patched = outcomes(folder, False), outcomes(folder, True)
    print(f"without the patch: {count(without)}\nwith it: {count(patched)}")
    lost = broken(without, patched)
    for test in lost:
        print(f"passes without the patch alone: {test}")
    return 1 if lost or not any(outcome == "passed" for outcome in without.values()) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
