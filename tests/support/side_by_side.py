"""One release after another of a package of which an environment can hold one (requirements/compat.txt).

With them the newest, where `make sentinel` has been."""

import contextlib
import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import late_interaction as li
from late_interaction.integrations._shared.compat import installed_release
from tools.maxsim_leaves import LEAVES, PATCHED

FOLDER = Path(sys.prefix) / "compat"
PINS = Path(__file__).resolve().parents[2] / "requirements" / "compat.txt"


def releases(package):
    pinned = [line for line in PINS.read_text().splitlines() if line.startswith(f"{package}==")]
    there = sorted(path.name for path in FOLDER.glob(f"{package}==*"))
    installed = f"{package}=={installed_release(package)}"  # which has tests of its own
    others = [name for name in there if name not in (*pinned, installed)]
    return [name.split("==")[1] for name in pinned + others]


def assert_leaves_are_reached(package):
    """What the patch replaces is what tools/maxsim_leaves.py says that it must."""
    module = package.replace("-", "_")
    reasons = LEAVES[package].items()
    reached = {name: reason[len(PATCHED) :] for name, reason in reasons if reason.startswith(PATCHED)}
    wanted = {place or f"{module}.{name}" for name, place in reached.items()}
    li.patch(package)
    assert wanted and wanted <= set(li.patched()[package].places)


@contextlib.contextmanager
def release(package, module, version, stand_ins=()):
    """This release is the one to import; `stand_ins` are modules that it imports and no test uses."""
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    folder = FOLDER / f"{package}=={version}"
    if not folder.is_dir():
        pytest.skip(f"{package} {version} is not in {FOLDER}: make ci or make sentinel puts it there")
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == module}
    sys.path.insert(0, str(folder))
    for stand_in in stand_ins:
        sys.modules[stand_in.__name__] = stand_in
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))
        for name in list(sys.modules):
            if name.split(".")[0] == module or name in [s.__name__ for s in stand_ins]:
                del sys.modules[name]
        sys.modules.update(loaded)


@contextlib.contextmanager
def sentence_transformers(version=None):
    """This release of Sentence Transformers, or the one that requirements/demo.txt names."""
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    with contextlib.ExitStack() as stack:
        if version is not None:
            stack.enter_context(release("sentence-transformers", "sentence_transformers", version))
        yield


def loss_and_gradient(loss, *batch):
    """A loss of a model with one table of embeddings, and the table's gradient."""
    loss.model.table.weight.grad = None
    value = loss(*batch)
    value.backward()
    return [value.detach(), loss.model.table.weight.grad]


class AnyClass(type):
    """The type of a class that has every attribute one asks for, which is its name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def anything(name):
    """A module that has every class one asks for."""

    def some_class(attribute):
        if attribute.startswith("__"):  # what modules are asked for by others than their importers
            raise AttributeError(attribute)
        return AnyClass(attribute, (), {"__init__": lambda self, *args, **named: None})

    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__getattr__ = some_class
    return module


def without_its_init(name, folder):
    """A package whose modules import, but not what its __init__ would import."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder / name)]
    return package


@contextlib.contextmanager
def no_einsum(monkeypatch):
    """Whoever computes similarities in here fails."""

    def einsum(equation, *operands):
        raise AssertionError(f"einsum of {equation}, {[list(x.shape) for x in operands]}")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "einsum", einsum)
        yield


class Calls(TorchDispatchMode):
    """How often each of this package's operators was called."""

    def __init__(self):
        super().__init__()
        self.of = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "late_interaction":
            name = func._opname.removesuffix("_no_autograd")
            self.of[name] = self.of.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def attributes(module):
    """Everything that a package's loaded modules hold, their classes' attributes and defaults included."""
    found = {}
    for name, loaded in sys.modules.items():
        if name.split(".")[0] != module:
            continue
        found |= {(name, key): value for key, value in vars(loaded).items() if not key.startswith("__")}
        for cls in [value for value in vars(loaded).values() if isinstance(value, type)]:
            if cls.__module__ == name:
                found |= {(name, cls.__name__, key): value for key, value in vars(cls).items()}
                found[name, cls.__name__, "defaults"] = getattr(cls.__init__, "__defaults__", None)
    return found
