"""Sentence Transformers' own functions, and the exchange of their code for ours.

A function keeps its identity when its code is exchanged. So models, losses and evaluators that were built
before the patch, ``functools.partial`` objects and names imported elsewhere all reach the new code, and the
name that a model card writes stays the same.
"""

import importlib
import os
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

__all__ = ["COLBERT", "SIMILARITY", "XTR", "disabled", "exchange", "exchanged", "module", "own", "restore"]

SIMILARITY = "sentence_transformers.util.similarity"
COLBERT = "sentence_transformers.multi_vector_encoder.scoring.colbert"
XTR = "sentence_transformers.multi_vector_encoder.scoring.xtr"

# The functions whose code was exchanged, and the code that they had; empty while nothing is patched.
_CODE: dict[FunctionType, CodeType] = {}


def disabled() -> bool:
    return os.environ.get("LATE_INTERACTION_DISABLE") == "1"


def module(name: str) -> Any:
    return sys.modules.get(name) or importlib.import_module(name)


def exchange(function: FunctionType, code: CodeType) -> None:
    """The function runs ``code`` from now on, in the namespace that it has."""
    _CODE[function] = function.__code__
    function.__code__ = code.replace(co_name=function.__name__)


def exchanged() -> bool:
    """Whether some function runs other code now."""
    return bool(_CODE)


def restore() -> None:
    """Every function runs its own code again."""
    for function, code in _CODE.items():
        function.__code__ = code
    _CODE.clear()


def own(place: str, name: str, instead: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The function as Sentence Transformers wrote it.

    Args:
        place: its module.
        name: its name there.
        instead: what it finds under other names in place of what its module has.
    """
    holder = module(place)
    function: FunctionType = getattr(holder, name)
    return with_namespace(function, _CODE.get(function, function.__code__), instead or {})


def with_namespace(function: FunctionType, code: CodeType, instead: dict[str, Any]) -> Callable[..., Any]:
    """The code with the function's defaults, where some global names mean something else."""
    namespace = {**function.__globals__, **instead} if instead else function.__globals__
    copy = FunctionType(code, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__doc__ = function.__doc__
    return copy
