"""The public surface: names and docstrings. (pytest --doctest-modules runs the examples.)"""

import importlib
import inspect
import pkgutil
import shutil
from pathlib import Path

import pytest
import torch

import late_interaction as li
from tests.support.programs import python


def modules():
    found = (m.name for m in pkgutil.walk_packages(li.__path__, "late_interaction.") if not m.ispkg)
    return [name for name in found if name.split(".")[-1] not in ("_C", "_cuda")]  # libraries, not modules


@pytest.mark.parametrize("name", modules())
def test_every_public_function_is_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    if any(part.startswith("_") for part in name.split(".")) or ".ops." in name or ".lik." in name:
        return
    for public in module.__all__:
        documentation = inspect.getdoc(getattr(module, public))
        for section in ("Args:", "Returns:", "Example:", ">>> "):
            if section == "Returns:" and inspect.isclass(getattr(module, public)):
                continue
            assert section in documentation, f"{name}.{public} lacks {section}"


@pytest.mark.parametrize("name", ["search", "SearchResult", "TopK"])
def test_what_lies_in_private_modules_is_documented(name):
    documentation = inspect.getdoc(getattr(li, name))
    assert all(section in documentation for section in ("Args:", "Example:", ">>> "))


OPERATORS = [
    name
    for name in li.ops.__all__
    if name.startswith(("maxsim", "smooth", "plaid", "xtr", "ward", "kmeans", "muvera"))
]


@pytest.mark.parametrize("op", OPERATORS)
def test_the_operators_are_documented(op):
    """By one module of them, with all of their arguments."""
    pages = [
        importlib.import_module(info.name).__doc__
        for info in pkgutil.iter_modules(li.ops.__path__, "late_interaction.ops.")
    ]
    (documented,) = [page for page in pages if page and f"``{op}(" in page]
    assert f"``{op}``" in li.ops.__doc__
    arguments = [a.name for a in getattr(torch.ops.late_interaction, op).default._schema.arguments]
    assert all(argument in documented for argument in arguments)


def without(library):
    """Imports the package where one of its libraries was not built."""
    return f"""
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.endswith({library!r}) else found(name, *rest)
import late_interaction, torch
"""


def test_without_the_compiled_library():
    run = python("-c", without("._C"))
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: late_interaction has no compiled library _C: "), run.stderr
    assert "another folder, or build in place with `pip install --no-build-isolation -e .`" in last


def test_a_checkout_that_hides_the_installed_copy_says_so(tmp_path):
    """As after `pip install .`, when Python is started in the checkout."""
    checkout, site = tmp_path / "checkout", tmp_path / "environment" / "site-packages"
    sources = Path(li.__file__).parent
    for folder, left_out in ((checkout, "*.so"), (site, "__pycache__")):
        shutil.copytree(sources, folder / "late_interaction", ignore=shutil.ignore_patterns(left_out))

    def imported(folder):
        code = "import late_interaction; print(late_interaction.__file__)"
        return python("-c", code, cwd=folder, variables={"PYTHONPATH": site})

    last = imported(checkout).stderr.strip().splitlines()[-1]
    hides, hidden = checkout / "late_interaction", site / "late_interaction"
    assert f"_C: the source folder {hides} hides the copy that is installed in {hidden}." in last, last
    assert "Start Python in another folder" in last and "`pip install --no-build-isolation -e .`" in last
    assert imported(tmp_path).stdout.strip() == str(site / "late_interaction" / "__init__.py")


def test_without_the_cuda_library():
    call = "print(late_interaction.maxsim(torch.ones(1, 1, 1), torch.ones(1, 2, 1)).item())"
    assert python("-c", without("._cuda") + call).stdout == "1.0\n"


@pytest.mark.gpu
def test_cuda_tensors_without_the_cuda_library():
    code = without("._cuda") + "x = torch.ones(1, 1, 1, device='cuda'); late_interaction.maxsim(x, x)"
    said = python("-c", code).stderr
    start = "RuntimeError: late_interaction has no CUDA kernels for these CUDA tensors"
    assert said.strip().splitlines()[-1].startswith(start), said
