"""The public names of the package."""

import importlib
import pkgutil

import late_interaction as li


def public(*others):
    """Every public object by its name: of the package, and of its public modules but those in `others`."""
    found = {f"late_interaction.{name}": getattr(li, name) for name in li.__all__}
    for info in pkgutil.walk_packages(li.__path__, "late_interaction."):
        parts = info.name.split(".")
        if parts[1] not in others and not any(part.startswith("_") for part in parts):
            module = importlib.import_module(info.name)
            found |= {f"{info.name}.{name}": getattr(module, name) for name in module.__all__}
    return found
