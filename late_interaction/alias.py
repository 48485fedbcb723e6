""":mod:`late_interaction.lik` under another name: :func:`install_as` and :func:`uninstall_as`.

It has the names, module paths, signatures and defaults of ``late-interaction-kernels`` 0.4.5
(docs/guide/moving.md says what differs). So a package that imports that one by its name, as PyLate and
colpali-engine do, can be given these functions without a patch.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from late_interaction.integrations._shared.compat import turned_off

__all__ = ["install_as", "uninstall_as"]

_ROOT = __name__.rpartition(".")[0]
_PACKAGE = f"{_ROOT}.lik"


def install_as(name: str = "late_interaction_kernels") -> None:
    """Have ``import late_interaction_kernels`` mean :mod:`late_interaction.lik`, its modules included.

    Call it before the packages that import it are used: some remember that they did not find it. The modules
    are those of :mod:`late_interaction.lik`, under a second name. A second call changes nothing.

    Args:
        name: the name of the package, without dots. ``LATE_INTERACTION_DISABLE=1`` in the environment, or
            ``=late-interaction-kernels`` for that name, turns the call off.

    Returns:
        None.

    Raises:
        TypeError, ValueError: ``name`` is no name of a top-level package, or this package's own.
        ImportError: the package of that name is imported already, and its functions may be in use.

    Warns:
        RuntimeWarning: the environment turns the call off.

    Example:
        >>> from late_interaction import install_as, uninstall_as
        >>> install_as("another_maxsim")
        >>> from another_maxsim.varlen import maxsim_varlen
        >>> maxsim_varlen.__module__
        'late_interaction.lik.varlen'
        >>> uninstall_as("another_maxsim")
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name.isidentifier() or name == _ROOT:
        raise ValueError(f"name must be that of another top-level package, got {name!r}")
    if reason := turned_off(name.replace("_", "-")):
        warnings.warn(f"install_as() did nothing: {reason}", RuntimeWarning, stacklevel=2)
        return
    package = importlib.import_module(_PACKAGE)
    there = sys.modules.get(name)
    if there is package:
        return
    if there is not None:
        where = getattr(there, "__file__", None) or "somewhere"
        raise ImportError(
            f"install_as({name!r}) came too late: {name} is imported already, from {where}; call it earlier"
        )
    sys.meta_path.insert(0, _Modules(name))
    # A finder would bind each in the package, where retrieve is a function; so these are there already.
    for loaded in [x for x in sys.modules if x == _PACKAGE or x.startswith(f"{_PACKAGE}.")]:
        sys.modules[name + loaded.removeprefix(_PACKAGE)] = sys.modules[loaded]


def uninstall_as(name: str = "late_interaction_kernels") -> None:
    """Undo :func:`install_as`: the name means again what is installed by it, if anything is.

    Args:
        name: as it was given. Does nothing where it was not.

    Returns:
        None.

    Example:
        >>> from late_interaction import uninstall_as
        >>> uninstall_as("late_interaction_kernels")
    """
    finders = [x for x in sys.meta_path if isinstance(x, _Modules) and x.name == name]
    if not finders:
        return
    for finder in finders:
        sys.meta_path.remove(finder)
    for alias in [x for x in sys.modules if x == name or x.startswith(f"{name}.")]:
        del sys.modules[alias]


class _Modules(MetaPathFinder, Loader):
    """Find the modules of the package under another name: the same modules, not loaded again."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{self.name}."):
            return None
        try:
            module = importlib.import_module(_PACKAGE + fullname.removeprefix(self.name))
        except ModuleNotFoundError:
            return None
        return ModuleSpec(fullname, self, is_package=hasattr(module, "__path__"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_PACKAGE + spec.name.removeprefix(self.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own spec, which the import system has exchanged for the alias'."""
        alias = module.__spec__
        if alias is not None:
            module.__spec__ = alias.loader_state
