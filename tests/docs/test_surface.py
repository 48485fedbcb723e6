"""One name and one default for each thing, in every public function, class and method."""

import importlib
import inspect
import pkgutil
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import late_interaction as li
from late_interaction import pooling
from late_interaction._checks import options

# Whose names and defaults are those of another package.
OTHERS = ("lik", "integrations")
DEFAULTS = {"normalize": False, "temperature": 1.0, "learnable": False, "mean": False, "precision": None}
# What an option may be, wherever it is one.
CHOICES = {
    "precision": options.Precision, "backward": options.Backward, "winners": options.Winners,
    "reduction": options.Reduction, "method": pooling.Method, "rule": options.Rule,
}  # fmt: skip


def public(*others):
    """Every public object by its name: of the package, and of its public modules but those in `others`."""
    found = {f"late_interaction.{name}": getattr(li, name) for name in li.__all__}
    for info in pkgutil.walk_packages(li.__path__, "late_interaction."):
        parts = info.name.split(".")
        if parts[1] not in others and not any(part.startswith("_") for part in parts):
            module = importlib.import_module(info.name)
            found |= {f"{info.name}.{name}": getattr(module, name) for name in module.__all__}
    return found


def callables(name, x):
    if inspect.isclass(x):
        own = {f"{name}.{key}": getattr(x, key) for key in vars(x) if not key.startswith("_")}
        methods = {key: method for key, method in own.items() if callable(method)}
        return methods | ({name: x.__init__} if "__init__" in vars(x) else {})
    return {name: x} if callable(x) else {}


FUNCTIONS = {}
for name, x in public(*OTHERS, "ops").items():
    FUNCTIONS |= callables(name, x)


def parameters(function):
    return inspect.signature(inspect.unwrap(function)).parameters.values()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_name_and_one_default_each(name):
    for parameter in parameters(FUNCTIONS[name]):
        assert parameter.name not in ("top_k", "topk", "chunk", "chunk_size")
        if parameter.name in DEFAULTS:
            assert parameter.default == DEFAULTS[parameter.name], parameter
            assert parameter.kind is parameter.KEYWORD_ONLY, parameter


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_with_names_are_literals(name):
    hints = get_type_hints(inspect.unwrap(FUNCTIONS[name]))
    for parameter in parameters(FUNCTIONS[name]):
        hint = hints.get(parameter.name)
        given = [x for x in (hint, *get_args(hint)) if get_origin(x) is Literal]
        if parameter.name in CHOICES and not isinstance(parameter.default, bool):
            assert given == [CHOICES[parameter.name]], parameter
        if isinstance(parameter.default, str) and not given:
            assert parameter.name in ("column", "name"), f"{parameter} takes any string"


def test_the_surface_is_walked():
    assert len(FUNCTIONS) > 150
    walked = {name.rpartition(".")[2] for name in FUNCTIONS}
    assert walked >= {"search", "Contrastive", "encode_corpus", "encode", "train"}
