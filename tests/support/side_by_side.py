"""One release after another of a package of which an environment can hold one (requirements/compat.txt).

With them the newest, where `make sentinel` has been."""

import contextlib
import functools
import importlib
import importlib.machinery
import inspect
import os
import sys
import types
from pathlib import Path
from unittest import mock

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


@contextlib.contextmanager
def release(package, module, version, stand_ins=(), bare=()):
    """This release is the one to import. stand_ins: modules that it imports and no test uses; bare: packages
    of it that do without what their __init__ imports."""
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    folder = FOLDER / f"{package}=={version}"
    if not folder.is_dir():
        pytest.skip(f"{package} {version} is not in {FOLDER}: make ci or make sentinel puts it there")
    put = {made.__name__: made for made in (*stand_ins, *(without_its_init(name, folder) for name in bare))}

    def taken_out():
        own = [name for name in sys.modules if name in put or name.split(".")[0] == module]
        return {name: sys.modules.pop(name) for name in own}

    before = taken_out()
    sys.path.insert(0, str(folder))
    sys.modules.update(put)
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))
        taken_out()
        sys.modules.update(before)


@contextlib.contextmanager
def sentence_transformers(version=None):
    """This release of Sentence Transformers, or the one that requirements/demo.txt names."""
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    with contextlib.ExitStack() as stack:
        if version is not None:
            stack.enter_context(release("sentence-transformers", "sentence_transformers", version))
        yield


@contextlib.contextmanager
def pylate(version):
    """This release of PyLate."""
    with release("pylate", "pylate", version, [anything("datasets")]):  # which loads data
        module = importlib.import_module("pylate")
        for name in ("losses", "rank", "scores"):
            importlib.import_module(f"pylate.{name}")
        yield module


class Encoder(torch.nn.Module):
    """What losses need of a model: tokens' embeddings and masks, and two settings of PyLate's."""

    def __init__(self, device="cpu", do_query_expansion=False):
        super().__init__()
        self.table = torch.nn.Embedding(200, 8, dtype=torch.float64, device=device)
        self.skiplist, self.do_query_expansion = [*range(7, 200, 12)], do_query_expansion

    def forward(self, features, task=None):
        embeddings = torch.nn.functional.normalize(self.table(features["input_ids"]), dim=-1)
        return {"token_embeddings": embeddings, "attention_mask": features["attention_mask"].bool()}


def texts(device, *shapes, shortest=1):
    """Texts of many lengths, padded, of distinct tokens: the similarities of equal ones tie."""
    ids, found = 4 + torch.randperm(196, device=device), []
    for rows, length in shapes:
        taken, ids = ids[: rows * length].view(rows, length), ids[rows * length :]
        lengths = torch.randint(shortest, length + 1, (rows, 1), device=device)
        kept = torch.arange(length, device=device) < lengths
        found.append({"input_ids": taken.where(kept, 3), "attention_mask": kept.long()})
    return found


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


def ragged(device, *lengths, d=8, dtype=torch.float64):
    return [torch.randn(n, d, device=device, dtype=dtype) for n in lengths]


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
    package.__path__ = [str(folder.joinpath(*name.split(".")))]
    return package


# Contexts in which whoever computes similarities, or selects from all of them, fails.
no_einsum = functools.partial(mock.patch.object, torch, "einsum", None)
no_topk = functools.partial(mock.patch.object, torch.Tensor, "topk", None)


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


def called(function, *args, **options):
    """How often a call of the function calls each of this package's operators."""
    with Calls() as calls:
        function(*args, **options)
    return calls.of


def leaves(side):
    """The side's floating tensors, which then want gradients, and the side made of them."""
    items = side if isinstance(side, list) else [side]
    if not all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in items):
        return [], side
    made = [x.detach().clone().requires_grad_() for x in items]
    return made, made if isinstance(side, list) else made[0]


def measured(score, Q, D, **options):
    """Scores and gradients, those of a mask of queries that is weights included."""
    (q, Q), (d, D) = leaves(Q), leaves(D)
    wanted = q + d
    for name in ("a_mask", "queries_mask"):
        if name in options:
            weights, options[name] = leaves(options[name])
            wanted += weights
    scores = score(Q, D, **options)
    if not wanted or not scores.requires_grad:
        return [scores]
    torch.manual_seed(1)
    factors = torch.randn(scores.shape, device=scores.device).to(scores.dtype)
    found = torch.autograd.grad(scores, wanted, factors, allow_unused=True)
    # A sequence without tokens may have no gradient, or one of zeros.
    gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]
    return [scores.detach(), gradients, [bool(g.any()) for g in gradients]]


# ---- what every patch is held to ----


def assert_leaves_are_reached(package):
    """What the patch replaces is what tools/maxsim_leaves.py says that it must."""
    module = package.replace("-", "_")
    reasons = LEAVES[package].items()
    reached = {name: reason[len(PATCHED) :] for name, reason in reasons if reason.startswith(PATCHED)}
    wanted = {place or f"{module}.{name}" for name, place in reached.items()}
    li.patch(package)
    assert wanted and wanted <= set(li.patched()[package].places)


def assert_unchanged(package, measure, without=no_einsum, **close):
    """The patch changes what ``measure()`` returns by rounding alone, and computes no similarities; what it
    returned before."""
    wanted = measure()
    li.patch(package)
    with without():
        torch.testing.assert_close(measure(), wanted, **close)
    return wanted


def assert_left_alone(package, measure, said="0"):
    """The patched library gives its own numbers, to the bit, by itself, where LATE_INTERACTION_DISABLE says
    this from then on."""
    wanted = measure()
    li.patch(package)
    with mock.patch.dict(os.environ, LATE_INTERACTION_DISABLE=said), Calls() as calls:
        torch.testing.assert_close(measure(), wanted, rtol=0, atol=0)
    assert not calls.of


def assert_refused_as_before(package, call):
    """The library refuses a call with the patch as it did without, in the same words."""
    with pytest.raises(Exception) as own:  # of whatever kind
        call()
    li.patch(package)
    with pytest.raises(own.type) as patched:
        call()
    assert str(patched.value) == str(own.value)


def assert_restored(package):
    """Patching twice changes some of what the package's modules hold, and unpatching twice gives all of it
    back; what it was. Functions that keep their identity look the same meanwhile."""
    before = attributes(package)
    for _ in range(2):
        li.patch(package)
    during = attributes(package)
    changed = {key for key, held in before.items() if during[key] != held}
    seen = {key: looks(during[key][0]) for key in changed if during[key][0] is before[key][0]}
    for _ in range(2):
        li.unpatch(package)
    after, modules = attributes(package), {module for module, *_ in before}
    assert changed and {key for key in after if key[0] in modules} == before.keys()
    assert [key for key, held in before.items() if after[key] != held] == []
    assert seen == {key: looks(before[key][0]) for key in seen}
    return changed


def looks(function):
    return inspect.signature(function), function.__name__, function.__code__.co_name, function.__doc__


def attributes(package):
    """Everything but modules that a package's loaded modules hold, their classes' attributes and defaults
    included; of each what it is, and the code of a function."""
    found = {}
    for name, loaded in sys.modules.items():
        if name.split(".")[0] != package.replace("-", "_"):
            continue
        found |= {(name, key): value for key, value in vars(loaded).items() if not key.startswith("__")}
        for cls in [value for value in vars(loaded).values() if isinstance(value, type)]:
            if cls.__module__ == name:
                found |= {(name, cls.__name__, key): value for key, value in vars(cls).items()}
                found[name, cls.__name__, "defaults"] = getattr(cls.__init__, "__defaults__", None)
    held = {key: value for key, value in found.items() if not isinstance(value, types.ModuleType)}
    return {key: (value, getattr(value, "__code__", None)) for key, value in held.items()}
