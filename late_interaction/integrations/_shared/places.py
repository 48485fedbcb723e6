"""Where a patch goes: :class:`Patch` tries every place of a library and says what it did not find."""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from late_interaction.integrations._shared.compat import brief_cause, nothing_to_patch
from late_interaction.integrations._shared.exchange import Exchanges

# A module, a name in it, and what patches that: it takes both, and says whether it found what it knows.
Place = tuple[str, str, Callable[[Any, str], bool]]


class Patch(Exchanges):
    """The patch of a library.

    Args:
        package: the distribution.
        name: as its documentation writes it.
        releases: those that the patch is tested with.
        surface: returns the places of the installed release.
    """

    def __init__(
        self, package: str, name: str, releases: str, surface: Callable[[], Sequence[Place]]
    ) -> None:
        super().__init__()
        self.package, self._name, self._releases, self._surface = package, name, releases, surface

    def patch(self) -> str | None:
        """Patch every place that is there, and return what is to be said of those that are not.

        Raises:
            ImportError: none is; the message says why.
        """
        missed: list[str] = []
        causes: dict[str, Exception] = {}
        for module, name, patch in self._surface():
            try:
                found = patch(importlib.import_module(module), name)
            except Exception as error:  # of whatever kind the packages that it needs raise
                causes.setdefault(module, error)
                found = False
            if not found:
                missed.append(f"{module}.{name}")
        if not self:
            cause = next(iter(causes.values()), None)
            raise nothing_to_patch(self.package, self._releases, cause) from cause
        if not missed:
            return None
        reasons = [f"{module} does not import ({brief_cause(cause)})" for module, cause in causes.items()]
        reasons += [f"it may have been refactored; {self._releases} are known"] * (not reasons)
        own = self._name + ("' own" if self._name.endswith("s") else "'s own")
        return f"did not find {', '.join(missed)}: whatever computes there stays {own}; {', '.join(reasons)}"


def module_exists(module: str) -> bool:
    """Tell whether the module is there; whether it imports is another question."""
    try:
        return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that would hold it
        return False


def calling(function: Callable[..., Any], like: Callable[..., Any] | None = None) -> FunctionType:
    """Make a function that calls another one from any namespace its code is put in.

    Its parameters are those of ``like``, or of the function itself.
    """
    names = ", ".join(inspect.signature(like or function).parameters)
    lines = f"from {function.__module__} import {function.__name__}", f"return {function.__name__}({names})"
    scope: dict[str, FunctionType] = {}
    exec(f"def call({names}):\n    " + "\n    ".join(lines), scope)
    return scope["call"]


def code_of(exchanges: Exchanges, instead: Callable[..., Any]) -> Callable[[Any, str], bool]:
    """Have the function of that name call the other one, if it has the other's parameters."""
    replacement = calling(instead)

    def patch(module: Any, name: str) -> bool:
        function = getattr(module, name, None)
        if not isinstance(function, FunctionType) or function.__closure__ is not None:
            return False
        if [*inspect.signature(function).parameters] != [*inspect.signature(replacement).parameters]:
            return False
        exchanges.code(function, replacement.__code__)
        return True

    return patch


def attribute_of(
    exchanges: Exchanges, replacement: Callable[[Any], Any], parameters: Sequence[str] | None = None,
    fits: Callable[[Any], bool] | None = None,
) -> Callable[[Any, str], bool]:  # fmt: skip
    """Put what ``replacement`` makes of an attribute in its place. A name may be a path: ``Class.method``.

    parameters: those that the attribute, a function, must have. fits: what else it must be.
    """

    def patch(module: Any, path: str) -> bool:
        *outer, name = path.split(".")
        holder = functools.reduce(lambda found, part: getattr(found, part, None), outer, module)
        original = inspect.getattr_static(holder, name, None)
        if original is None or (fits is not None and not fits(original)):
            return False
        if parameters is not None and [*inspect.signature(original).parameters] != [*parameters]:
            return False
        exchanges.attribute(holder, name, replacement(original))
        return True

    return patch
