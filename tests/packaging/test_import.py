"""What `import late_interaction` loads: the operators and the scoring, and the rest when it is asked for."""

import ast
import re
import sys
from pathlib import Path

import pytest

import late_interaction as li
from tests.support.programs import printed


def run(code, *arguments):
    return printed(sys.executable, "-c", code, *arguments).split()


def loaded(code=""):
    listed = "print(*sorted(x for x in sys.modules if x.startswith('late_interaction')))"
    return set(run(f"import sys, late_interaction as li\n{code}\n{listed}"))


def test_little_is_loaded_beside_torch():
    """Each module of the package costs half a millisecond, and some of Python's own cost ten times that."""
    code = "import sys, torch\nbefore = set(sys.modules)\nimport late_interaction\n"
    names = run(code + "print(*(set(sys.modules) - before))")
    assert [name for name in names if name.partition(".")[0] != "late_interaction"] == []
    assert len(names) <= 60


def test_losses_and_patches_are_loaded_when_they_are_asked_for():
    first = loaded()
    later = {"losses", "integrations", "alignment", "reference", "_search.search"}
    assert {"late_interaction.ops.dense", "late_interaction._maxsim"} <= first
    assert not first & {f"late_interaction.{name}" for name in later}
    assert "late_interaction.losses" in loaded("li.cached_contrastive_step")


def test_every_public_name_is_there():
    names = run("import late_interaction as li\nprint(*(n for n in li.__all__ if getattr(li, n) is None))")
    assert names == []
    assert set(li.__all__) <= set(dir(li))
    run("from late_interaction import *\nassert callable(cached_contrastive_step) and callable(search)")


# Modules whose names are functions of their package, with the reason. The list only shrinks.
SHADOWED = {
    "late_interaction.lik.retrieve": "late-interaction-kernels has a module and a function of this name"
}
EVERYTHING = """
import importlib, random, sys
names = sys.argv[2:]
random.Random(sys.argv[1]).shuffle(names)
for name in names:
    importlib.import_module(name)
import late_interaction as li
for name in li.__all__:
    found = getattr(li, name)
    if callable(found):
        assert found is getattr(sys.modules[found.__module__], found.__name__), name
    elif name != "__version__":
        assert found is sys.modules[f"late_interaction.{name}"], name
for name in names:
    package, _, last = name.rpartition(".")
    if getattr(sys.modules[package], last) is not sys.modules[name]:
        print(name)
"""


def every_module():
    folder = Path(li.__file__).parent
    parts = [path.relative_to(folder.parent).with_suffix("").parts for path in folder.rglob("*.py")]
    names = (".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts)
    return sorted(name for name in names if name != "late_interaction")


@pytest.mark.parametrize("seed", "abc")
def test_names_stay_what_they_are_whatever_is_imported_first(seed):
    assert set(run(EVERYTHING, seed, *every_module())) == set(SHADOWED)


def private_names_of_torch(path):
    """What a module imports or reads of PyTorch that is private. `torch._check` is documented."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        for name in names:
            if re.match(r"torch\.(.+\.)?_(?!_|check$)", name):
                yield name


def test_private_names_of_torch_stand_in_one_file():
    folder = Path(li.__file__).parent
    users = {path.name for path in folder.rglob("*.py") if [*private_names_of_torch(path)]}
    assert users == {"_torch.py"}


def test_other_names_are_attribute_errors():
    for name in ("maxsum", "_nothing", "contrastive_los"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(li, name)
    assert not hasattr(li, "maxsum")


def test_a_function_that_is_first_met_by_dynamo():
    code = """
import torch, late_interaction as li
step = torch.compile(lambda Q, D: li.smooth_maxsim(Q, D, tau=0.1).sum(), backend="eager", fullgraph=True)
Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
torch.testing.assert_close(step(Q, D), li.smooth_maxsim(Q, D, tau=0.1).sum())
"""
    run(code)
