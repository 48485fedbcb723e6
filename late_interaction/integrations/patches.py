"""Patches of other libraries: :func:`patch`, :func:`unpatch` and :func:`patched`."""

import importlib
import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

from late_interaction._checks.messages import abbreviate
from late_interaction.integrations._shared import calls
from late_interaction.integrations._shared.compat import installed_release, turned_off
from late_interaction.integrations._shared.places import module_exists

__all__ = ["Patched", "patch", "patched", "unpatch"]

# The packages' names, as an installer knows them.
Name = Literal["pylate", "colpali-engine", "sentence-transformers", "transformers", "mteb", "vllm"]
_NAMES: tuple[Name, ...] = get_args(Name)


def patch(*names: Name, quiet: bool = False) -> dict[str, str]:
    """Have other libraries score and train on these kernels, on a CPU and a GPU.

    The module of each library in :mod:`late_interaction.integrations` says what is patched and how far
    results stay its own. A call that the kernels do not serve (another device, integers) runs the library's
    own code. So does every call while the environment variable ``LATE_INTERACTION_DISABLE`` is 1 or names the
    package, as in ``pylate,mteb``. Patching again changes nothing.

    Args:
        names: which libraries to patch, among ``"pylate"``, ``"colpali-engine"``,
            ``"sentence-transformers"``, ``"transformers"``, ``"mteb"`` and ``"vllm"``; they are imported. Not
            given: all that are installed.
        quiet: do not log what was done. (The logger is ``late_interaction``, the level INFO.)

    Returns:
        The outcome for each library: ``"patched"`` with its release, ``"patched in part"`` with what was
        not found, or ``"skipped"`` with the reason: patched already, turned off by the environment, or,
        where it was not named, not installed or of a release that cannot be patched.

    Raises:
        TypeError, ValueError: a name of no such library.
        ImportError: a library that was named is not installed, does not import, or has nothing that is
            patched. Those named before it are as they were.

    Warns:
        RuntimeWarning: a library that was named lacks something that was to be patched, or the environment
            turns its patch off.

    Example:
        >>> import late_interaction as li
        >>> li.patch("pylate")                     # doctest: +SKIP
        {'pylate': 'patched pylate 1.6.0'}
        >>> done = li.patch()                      # all that are installed  # doctest: +SKIP
        >>> li.unpatch()
    """
    done: dict[str, str] = {}
    try:
        for name in _known(names):
            done[name] = _put(name, named=bool(names))
    except ImportError:
        for name in _known(names):
            if done.get(name, "").startswith("patched"):
                _module(name).unpatch()
        raise
    if not quiet:
        for package, what in done.items():
            calls.LOGGER.info("%s: %s", package, what)
    return done


def unpatch(*names: Name) -> None:
    """Give other libraries their own code back.

    Args:
        names: which libraries, as in :func:`patch`; not given: all. Nothing is done where none is patched.

    Raises:
        TypeError, ValueError: a name of no such library.

    Returns:
        None.

    Example:
        >>> import late_interaction as li
        >>> li.unpatch("pylate", "vllm")
        >>> li.unpatch()
    """
    for name in _known(names):
        _module(name).unpatch()


@dataclass(frozen=True)
class Patched:
    """Report what :func:`patched` says of a library.

    Args:
        release: the installed release, or None where that is unknown.
        places: the functions and classes that are patched.
        served: how many calls the kernels served since the patch.
        left: how many calls were left to the library, by its function and the reason.

    Example:
        >>> from late_interaction.integrations.patches import Patched
        >>> Patched("6.2.0", ("sentence_transformers.util.similarity.maxsim",), 3, {}).served
        3
    """

    release: str | None
    places: tuple[str, ...]
    served: int
    left: dict[str, int]


def patched() -> dict[str, Patched]:
    """Return what is patched now, and how many calls the patches served or left to each library.

    A call that a patch leaves to its library, as it is not one for the kernels, is also logged the first time
    (logger ``late_interaction``, level WARNING). Calls that ``torch.compile`` traces are not counted; a call
    of a library may score several parts, each of which counts.

    Args:
        None.

    Returns:
        A :class:`Patched` for each library whose patch is in place, by its name.

    Example:
        >>> import late_interaction as li
        >>> li.unpatch()
        >>> li.patched()
        {}
        >>> done = li.patch("transformers")           # doctest: +SKIP
        >>> li.patched()["transformers"].left         # doctest: +SKIP
        {'ColPaliProcessor.score_retrieval: queries and documents differ in d': 1}
    """
    found: dict[str, Patched] = {}
    for name in _NAMES:
        if places := _module(name).places():
            counted = calls.calls_of(name)
            found[name] = Patched(installed_release(name), tuple(places), counted.served, dict(counted.left))
    return found


def _known(names: tuple[Name, ...]) -> tuple[Name, ...]:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"names must be str, got {abbreviate(name)}")
    if unknown := [name for name in names if name not in _NAMES]:
        raise ValueError(f"names must be among {', '.join(_NAMES)}, got {', '.join(map(repr, unknown))}")
    return tuple(dict.fromkeys(names)) or _NAMES


def _module(name: Name) -> Any:
    """Import the module that patches the library, which imports nothing of it."""
    inner = "._patch" if name == "sentence-transformers" else ""
    return importlib.import_module(f"{__package__}.{name.replace('-', '_')}{inner}")


def _put(name: Name, *, named: bool) -> str:
    library, release = _module(name), installed_release(name)
    if reason := turned_off(name):
        if named:
            warnings.warn(f'patch("{name}") did nothing: {reason}', RuntimeWarning, stacklevel=3)
        return f"skipped, {reason}"
    if library.places():
        return "skipped, it is patched already"
    if not named and release is None and not module_exists(name.replace("-", "_")):
        return "skipped, it is not installed"
    calls.forget(name)
    try:
        missed = library.patch()
    except ImportError as error:
        if named:
            raise
        return f"skipped, {error}"
    if missed is None:
        return f"patched {name} {release or ''}".rstrip()
    if named:
        warnings.warn(f'patch("{name}") {missed}', RuntimeWarning, stacklevel=3)
    return f"patched in part, {missed}"
