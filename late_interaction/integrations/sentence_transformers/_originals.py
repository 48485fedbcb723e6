"""Sentence Transformers' own functions, and what the patch has exchanged of them."""

import importlib
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from late_interaction.integrations._shared import compat as _compat
from late_interaction.integrations._shared.places import Patch

PACKAGE = "sentence-transformers"
SIMILARITY = "sentence_transformers.util.similarity"
COLBERT = "sentence_transformers.multi_vector_encoder.scoring.colbert"
XTR = "sentence_transformers.multi_vector_encoder.scoring.xtr"

EXCHANGES = Patch(
    PACKAGE, "Sentence Transformers", "6.0 to 6.2", lambda: module(f"{__package__}._patch").SURFACE
)


def disabled() -> bool:
    return _compat.disabled(PACKAGE)


def module(name: str) -> Any:
    return sys.modules.get(name) or importlib.import_module(name)


def own(place: str, name: str, instead: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Return a module's function as Sentence Transformers wrote it; instead: as in ``Exchanges.own``."""
    function: FunctionType = getattr(module(place), name)
    return EXCHANGES.own(function, instead)
