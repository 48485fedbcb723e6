"""The random numbers of a part, which come again when it is encoded again."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from late_interaction._checks.messages import abbreviate

_Access = tuple[Callable[[], Any], Callable[[Any], Any]]  # what returns a state, and what sets it


class RandomStates:
    """The states of random number generators as they are now.

    They are PyTorch's of the CPU and of the GPUs in use, Python's, NumPy's global one if it is imported, and
    those of the given generators.
    """

    def __init__(self, accesses: list[_Access]) -> None:
        self._cpu = torch.get_rng_state()
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._gpus = torch.cuda.get_rng_state_all() if used else []
        self._accesses = accesses
        self._others = _states(accesses)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set these states within, and restore the present ones afterwards."""
        before = _states(self._accesses)
        with torch.random.fork_rng(range(len(self._gpus))):
            torch.set_rng_state(self._cpu)
            if self._gpus:
                torch.cuda.set_rng_state_all(self._gpus)
            try:
                _set(self._accesses, self._others)
                yield
            finally:
                _set(self._accesses, before)


def accesses_of(generators: Any) -> list[_Access]:
    """Return what reads and sets the states of these generators, and of the global ones beside PyTorch's."""
    if not isinstance(generators, Iterable):
        raise TypeError(f"generators must be a sequence of generators, got {abbreviate(generators)}")
    found: list[_Access] = [(random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append((lambda: numpy.random.get_state(legacy=False), numpy.random.set_state))
    return found + [_access(generator) for generator in generators]


def _access(generator: Any) -> _Access:
    if hasattr(generator, "bit_generator"):  # numpy.random.Generator
        bits = generator.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    for get, set_ in (("get_state", "set_state"), ("getstate", "setstate")):
        if hasattr(generator, get) and hasattr(generator, set_):
            return getattr(generator, get), getattr(generator, set_)
    raise TypeError(
        "generators must hold torch.Generator, numpy.random.Generator, numpy.random.RandomState or"
        f" random.Random objects, got {abbreviate(generator)}"
    )


def _states(accesses: list[_Access]) -> list[Any]:
    return [get() for get, _ in accesses]


def _set(accesses: list[_Access], states: list[Any]) -> None:
    for (_, set_), state in zip(accesses, states, strict=True):
        set_(state)
