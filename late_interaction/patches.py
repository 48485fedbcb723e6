"""All patches of other libraries at once: :func:`patch_all`, :func:`unpatch_all` and :func:`patched`.

Each patch alone is a function of :mod:`late_interaction` too: ``patch_pylate``, ``patch_colpali_engine``,
``patch_sentence_transformers``, ``patch_transformers``, ``patch_mteb`` and ``patch_vllm``.
"""

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from late_interaction import (
    colpali_compat,
    mteb_compat,
    pylate_compat,
    st_compat,
    transformers_compat,
    vllm_compat,
)
from late_interaction._patches import calls
from late_interaction._patches.compat import DISABLE, disabled, installed_release
from late_interaction._st import originals

__all__ = ["Patched", "patch_all", "patched", "unpatch_all"]


class _Patch(NamedTuple):
    patch: Callable[[], None]
    unpatch: Callable[[], None]
    places: Callable[[], list[str]]  # what is patched, while the patch is in place

    def in_place(self) -> bool:
        return bool(self.places())


# By the names of the packages, as an installer knows them.
_PATCHES = {
    "pylate": _Patch(
        pylate_compat.patch_pylate, pylate_compat.unpatch_pylate, lambda: list(pylate_compat._ORIGINAL)
    ),
    "colpali-engine": _Patch(
        colpali_compat.patch_colpali_engine,
        colpali_compat.unpatch_colpali_engine,
        colpali_compat._EXCHANGES.places,
    ),
    "sentence-transformers": _Patch(
        st_compat.patch_sentence_transformers,
        st_compat.unpatch_sentence_transformers,
        originals.EXCHANGES.places,
    ),
    "transformers": _Patch(
        transformers_compat.patch_transformers,
        transformers_compat.unpatch_transformers,
        transformers_compat._EXCHANGES.places,
    ),
    "mteb": _Patch(mteb_compat.patch_mteb, mteb_compat.unpatch_mteb, mteb_compat._EXCHANGES.places),
    "vllm": _Patch(vllm_compat.patch_vllm, vllm_compat.unpatch_vllm, vllm_compat._EXCHANGES.places),
}


def patch_all(packages: Sequence[str] | None = None, *, quiet: bool = False) -> dict[str, str]:
    """Patches the libraries that are installed, and returns what it did with each.

    Args:
        packages: which to patch, among ``"pylate"``, ``"colpali-engine"``, ``"sentence-transformers"``,
            ``"transformers"``, ``"mteb"`` and ``"vllm"``; None: all. Those that are installed are imported.
        quiet: do not log what was done. (The logger is ``late_interaction``, the level INFO.)

    Returns:
        What was done with each package: ``"patched"`` with its release, ``"patched in part"`` with what was
        not found, or ``"skipped"`` with the reason: not installed, already patched, disabled by
        ``LATE_INTERACTION_DISABLE``, or a release that cannot be patched.

    Raises:
        ValueError: an unknown name in ``packages``.

    Example:
        >>> from late_interaction import patch_all, unpatch_all
        >>> patch_all(["vllm"])                      # doctest: +SKIP
        {'vllm': 'skipped, it is not installed'}
        >>> unpatch_all()
    """
    wanted = list(_PATCHES) if packages is None else list(packages)
    unknown = [name for name in wanted if name not in _PATCHES]
    if unknown:
        raise ValueError(f"packages must be among {', '.join(_PATCHES)}, got {', '.join(map(repr, unknown))}")
    done = {package: _patched(package) for package in wanted}
    if not quiet:
        for package, what in done.items():
            calls.LOGGER.info("%s: %s", package, what)
    return done


def unpatch_all() -> None:
    """Undoes every patch that is in place.

    Args:
        None.

    Returns:
        None.

    Example:
        >>> from late_interaction import unpatch_all
        >>> unpatch_all()
    """
    for patch in _PATCHES.values():
        patch.unpatch()


@dataclass(frozen=True)
class Patched:
    """What :func:`patched` says of a library.

    Args:
        release: the installed release, or None where that is unknown.
        places: the functions and classes that are patched.
        served: how many calls the kernels served since the patch.
        left: how many calls were left to the library, by its function and the reason.

    Example:
        >>> from late_interaction.patches import Patched
        >>> Patched("6.2.0", ("sentence_transformers.util.similarity.maxsim",), 3, {}).served
        3
    """

    release: str | None
    places: tuple[str, ...]
    served: int
    left: dict[str, int]


def patched() -> dict[str, Patched]:
    """Returns what is patched now, and how many calls the patches served or left to each library.

    A call that a patch leaves to its library, as it is not one for the kernels, is also logged the first time
    (logger ``late_interaction``, level WARNING). Calls that ``torch.compile`` traces are not counted; a call
    of a library may score several parts, each of which counts.

    Args:
        None.

    Returns:
        A :class:`Patched` for each package whose patch is in place, by its name.

    Example:
        >>> from late_interaction import patch_all, patched, unpatch_all
        >>> unpatch_all()
        >>> patched()
        {}
        >>> done = patch_all()                     # doctest: +SKIP
        >>> patched()["transformers"].left         # doctest: +SKIP
        {'ColPaliProcessor.score_retrieval: queries and documents differ in d': 1}
    """
    found = {}
    for package, patch in _PATCHES.items():
        if places := patch.places():
            counted = calls.calls_of(package)
            release = installed_release(package)
            found[package] = Patched(release, tuple(places), counted.served, dict(counted.left))
    return found


def _patched(package: str) -> str:
    patch, release = _PATCHES[package], installed_release(package)
    if disabled(package):
        return f"skipped, {DISABLE}={os.environ[DISABLE]} turns it off"
    if patch.in_place():
        return "skipped, it is patched already"
    if release is None and not _can_be_imported(package.replace("-", "_")):
        return "skipped, it is not installed"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            patch.patch()
        except ImportError as error:
            return f"skipped, {error}"
    own = [str(w.message) for w in caught if str(w.message).startswith(f"{patch.patch.__name__}()")]
    for warning in caught:
        if str(warning.message) not in own:  # of the imports: none of this function's business
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return f"patched in part, {'; '.join(own)}" if own else f"patched {package} {release or ''}".rstrip()


def _can_be_imported(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None
