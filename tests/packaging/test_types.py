"""What type checkers see of the package: the names that exist, and which calls are right."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import late_interaction as li

api = pytest.importorskip("mypy.api")

ROOT = Path(__file__).resolve().parents[2]


def modules():
    """The public modules, which are attributes of the package without an import."""
    return {info.name for info in pkgutil.iter_modules(li.__path__) if not info.name.startswith("_")}


def stated():
    """What the package imports by name, for type checkers too: a module or an object by its name here."""
    found = {}
    for node in ast.walk(ast.parse(Path(li.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "late_interaction":
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    return found


def test_type_checkers_see_the_names_that_exist():
    assert set(stated()) == {*li.__all__, *modules()}


@pytest.mark.parametrize("name", stated())
def test_a_name_is_what_type_checkers_take_it_for(name):
    module, attribute = stated()[name]
    if module == "late_interaction":
        assert getattr(li, name) is importlib.import_module(f"{module}.{attribute}")
    else:
        assert getattr(li, name) is getattr(importlib.import_module(module), attribute)


# ---- mypy --strict ----

# With the code of the error, where there is to be one.
CALLS = """
import torch

import late_interaction as li
from late_interaction.alignment import Alignment

Q, D = torch.rand(2, 3, 8), torch.rand(4, 5, 8)
mask, offsets = torch.ones(4, 5, dtype=torch.bool), torch.tensor([0, 5])

li.nonsense(3)  # attr-defined
li._MODULES  # attr-defined
from late_interaction import nonsense  # attr-defined
from late_interaction.integrations import late_interaction_kernels  # attr-defined

scores: torch.Tensor = li.maxsim(Q, D, precision="high", backward="lowmem", winners="save")
li.maxsim(Q, D, precision="hgih")  # arg-type
li.maxsim(Q, D, backward="fast")  # arg-type
li.maxsim(Q, D, winners="keep")  # arg-type
li.maxsim(Q, D, normalise=True)  # call-arg
li.maxsim_pairs(Q, Q, precision="full")  # arg-type
li.maxsim(li.Tokens.packed(D[0], offsets), [D[1]], precision=None)
li.maxsim(li.Tokens.packed(D[0], offsets), [D[1]], precision="full")  # arg-type
li.losses.contrastive(Q, D, reduction="none", precision="medium")
li.losses.contrastive(Q, D, reduction="average")  # arg-type
li.losses.distill_kl_div(Q, D, D[0], reduction="average")  # arg-type
li.losses.Contrastive(reduction="average")  # arg-type
best, documents = li.search(Q, [D[0]], 2, subset=[0])
ids: list[object] | None = li.Corpus.open("folder").search(li.Tokens(Q), 3).ids
corpus = li.Corpus.open("folder")
corpus.add([D[0]], ["a"], {"year": [2020]})
document: torch.Tensor = corpus["a"]
several: list[torch.Tensor] = corpus[["a", "b"]]
several = corpus[0]  # assignment
corpus.update([D[0]])  # call-arg
corpus.refresh().bit_length()
li.search(Q, D, top_k=3)  # call-arg
li.search(Q, D, precision="full")  # arg-type
recall: dict[int, object] = li.evaluate_recall([[0]], li.search(Q, D))
li.evaluate_recall([[0]], (Q, D))  # arg-type
li.TopK(li.Tokens(Q)).add([D[0]])
li.xtr_scores(Q, D, 2, rule="pylate")
li.xtr_scores(Q, D, 2, rule="colbert")  # arg-type
li.search(Q, D, coarse="4bit")  # arg-type
li.hard_negatives(Q, D, [], sampling_strategy="best")  # arg-type
codes: li.Codes = li.codecs.Bits(4).encode([D[0]])
li.maxsim(Q, codes)
li.search(Q, codes)
li.search(Q, D, coarse=codes.codec)
li.codecs.Bits(2)  # arg-type
li.codecs.Int8().quantize(D)  # attr-defined

li.patch("pylate", "vllm", quiet=True)["pylate"].upper()
li.patch("colpali")  # arg-type
li.patch(["pylate"])  # arg-type
li.unpatch("colpali")  # arg-type
li.patched()["pylate"].served.bit_length()

paired: Alignment | list[Alignment] = li.explain(Q, Q, paired=True)
found: list[Alignment] | list[list[Alignment]] = li.explain(Q, D, documents=offsets)
found = li.explain(Q, D[0], cu_seqlens_d=offsets, documents=offsets)
found = li.explain(Q, D)  # assignment
li.explain(Q, D).matches  # union-attr
li.explain(Q, Q, paired=True, documents=offsets)  # call-overload
li.explain(Q, D, precision="hgih")  # call-overload
li.explain(Q, D[0], None, mask, cu_seqlens_d=offsets)  # call-overload

pooled: list[torch.Tensor] = li.pool_tokens([D[0]], method="kmeans")
of_tokens: li.Tokens = li.pool_tokens(li.Tokens(D, mask), 3)
of_tokens = li.pool_tokens(D)  # assignment
li.pool_tokens(D, method="single")  # call-overload
"""


@pytest.fixture(scope="module")
def checked(request, tmp_path_factory):
    """The lines of the calls and of each name, {line: codes of its errors}, and what mypy said."""
    path = tmp_path_factory.mktemp("types") / "calls.py"
    path.write_text(CALLS + "".join(f"li.{name}\n" for name in sorted({*stated(), "__version__"})))
    cache = request.config.cache.mkdir("mypy")
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(cache), "--no-error-summary"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(ROOT))
        said, failed, _ = api.run([*options, str(path)])
    assert not failed, failed
    errors: dict[int, set[str]] = {}  # by any path: mypy's cache repeats those of a file of this content
    for line, code in re.findall(r"^\S*\bcalls\.py:(\d+): error: .*\[([\w-]+)\]$", said, re.MULTILINE):
        errors.setdefault(int(line), set()).add(code)
    return path.read_text().splitlines(), errors, said


def test_mypy_accepts_what_is_right_and_nothing_else(checked):
    lines, errors, said = checked
    wanted = {i: {line.partition("  # ")[2]} for i, line in enumerate(lines, 1) if "  # " in line}
    assert errors == wanted, said
    assert len(wanted) >= 25
