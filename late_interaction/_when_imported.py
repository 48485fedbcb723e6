"""What this package tells a module of PyTorch once somebody imports that, and not before.

Such modules take longer to import than this package, and most processes never do.
"""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call ``act`` now if the module is there, else as soon as it has been imported."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch:
    """A finder of one module, which others find and load."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self.act()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
