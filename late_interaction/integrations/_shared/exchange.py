"""What a patch puts in place of another library's code, and how it is undone: :class:`Exchanges`.

A function whose code is exchanged keeps its identity. So models, losses and evaluators that were built
before the patch, ``functools.partial`` objects and names imported elsewhere all reach the new code, and the
name that a model card writes stays the same. A class gets another method where the replacement needs the one
that was there, or where there was none.
"""

from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

_INHERITED = object()


class Exchanges:
    """Everything that one patch has exchanged; false while that is nothing."""

    def __init__(self) -> None:
        self._code: dict[FunctionType, CodeType] = {}
        self._attributes: list[tuple[Any, str, Any]] = []  # a holder, a name, and what it had there itself

    def __bool__(self) -> bool:
        return bool(self._code or self._attributes)

    def code(self, function: FunctionType, code: CodeType) -> None:
        """Have the function run ``code`` from now on, in the namespace that it has."""
        self._code[function] = function.__code__
        function.__code__ = code.replace(co_name=function.__name__)

    def attribute(self, holder: Any, name: str, value: Any) -> None:
        """Give the class or module ``value`` by this name from now on."""
        self._attributes.append((holder, name, vars(holder).get(name, _INHERITED)))
        setattr(holder, name, value)

    def had(self, name: str) -> Any:
        return next(own for _, exchanged, own in self._attributes if exchanged == name)

    def own(self, function: FunctionType, instead: dict[str, Any] | None = None) -> Callable[..., Any]:
        """Return the function as its library wrote it, with its code exchanged or not.

        Args:
            function: a function of another library.
            instead: what it finds under other names in place of what its module has.
        """
        return with_namespace(function, self._code.get(function, function.__code__), instead or {})

    def places(self) -> list[str]:
        """Return what is exchanged, by the names that it has in its library."""
        found = [f"{function.__module__}.{function.__qualname__}" for function in self._code]
        for holder, name, _ in self._attributes:
            module = f"{holder.__module__}." if isinstance(holder, type) else ""
            found.append(f"{module}{getattr(holder, '__qualname__', holder.__name__)}.{name}")
        return found

    def restore(self) -> None:
        for function, code in self._code.items():
            function.__code__ = code
        for holder, name, own in reversed(self._attributes):
            if own is _INHERITED:
                delattr(holder, name)
            else:
                setattr(holder, name, own)
        self._code.clear()
        self._attributes.clear()


def with_namespace(function: FunctionType, code: CodeType, instead: dict[str, Any]) -> Callable[..., Any]:
    """Make a function of the code with another's defaults, where some global names mean something else."""
    namespace = function.__globals__
    if instead:
        namespace = {**namespace, **instead}
        del namespace["__name__"]  # torch.compile would look up names of nested calls in the module it names
    copy = FunctionType(code, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__doc__, copy.__module__ = function.__doc__, function.__module__
    return copy


class Instead(ModuleType):
    """A module of which some functions are others."""

    def __init__(self, of: ModuleType, **functions: Callable[..., Any]) -> None:
        super().__init__(of.__name__)
        self.__dict__.update(functions)
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)
