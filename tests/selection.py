"""Which tests a run takes: those of ``make test``, what it leaves to ``make ci``, or a few cases of each.

``pytest --stage test`` leaves out what LEFT_TO_CI lists, fails if it calls an operator nowhere that has a
kernel on this machine (:class:`CalledOperators`), and records the tests that passed. ``pytest --stage ci``
runs every test that is not on that record: those left out, and those that were skipped for want of something
that ``make ci`` has made since. So no test is in neither.

``pytest --strength 2``, the default, takes of a function with many parameter sets as many as it takes for
every two values of any two arguments to meet in one (pairwise testing); 3: every three; 0: all. Nightly
runs, which the variable LATE_INTERACTION_NIGHTLY makes, take all, draw :func:`examples` times as many
examples, and others every night.
"""

import hashlib
import itertools
import os
from collections import defaultdict

import torch
from torch._ops import OpOverload, OpOverloadPacket

NIGHTLY = os.environ.get("LATE_INTERACTION_NIGHTLY", "") not in ("", "0")
RECORD = "late_interaction/passed"  # in pytest's cache
FEW = {1: 2, 2: 24, 3: 48}  # parameter sets of which none is left out, by the strength
# Folders, files or test functions: what is not about the library, or takes long.
LEFT_TO_CI = {
    "tests/bench": "is about measuring",
    "tests/build": "is about the build and the source's shape",
    "tests/docs/test_example_programs.py": "trains, for minutes",
    "tests/packaging": "builds a source distribution",
    "tests/tools": "is about the tools of developers",
}


def is_left_to_ci(node: str) -> bool:
    return any(node == name or node.startswith((f"{name}/", f"{name}::", f"{name}[")) for name in LEFT_TO_CI)


def examples(ordinary: int) -> int:
    """How many examples hypothesis draws for a law that ``make ci`` tries ``ordinary`` of."""
    return ordinary * 20 if NIGHTLY else ordinary


def factors_of(item) -> list[tuple]:
    """What a parameter set is made of: for each parametrize mark its arguments and their values."""
    values = {name: id(x) for name, x in item.callspec.params.items()} if hasattr(item, "callspec") else {}
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found.append(tuple((name.strip(), values.pop(name.strip(), None)) for name in names))
    return sorted([*found, *(((name, value),) for name, value in values.items())])


def covering(items: list, strength: int) -> list:
    """The parameter sets that ``--strength`` keeps of a function: a covering array, by taking first those of
    which all combinations are new, then half of them, then any. Ties go by the digests of their names."""
    combinations = {}
    for item in items:
        factors = factors_of(item)
        # A function of one argument keeps all its values, which have no others to meet.
        combinations[item] = [*itertools.combinations(factors, min(strength, len(factors)))]
    order = sorted(items, key=lambda item: hashlib.md5(item.nodeid.encode()).digest())
    kept, seen = [], set()
    for share in (1, 0.5, 0):
        for item in order:
            own = combinations[item]
            fresh = sum(x not in seen for x in own)
            if fresh and fresh >= share * len(own):
                kept.append(item)
                seen.update(own)
    return kept


def combined(items: list, strength: int) -> set:
    """The tests that ``--strength`` keeps: all of a function with few parameter sets."""
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept: set = set()
    for cases in functions.values():
        kept.update(cases if len(cases) <= FEW[strength] else covering(cases, strength))
    return kept


def left_out(config, items) -> dict[str, list]:
    """The items that the options of a run leave out, by the reason why."""
    found = {}
    if strength := config.getoption("strength"):
        kept = combined(items, strength)
        others = [item for item in items if item not in kept]
        found[f"every {strength} of their values are tried together by others; --strength 0 runs all"] = (
            others
        )
    if config.getoption("stage") == "test":
        found["make ci runs them"] = [item for item in items if is_left_to_ci(item.nodeid)]
    if config.getoption("stage") == "ci":
        passed = set(config.cache.get(RECORD, []))
        found["they passed in make test"] = [item for item in items if item.nodeid in passed]
    return found


def operators() -> set[str]:
    """The names of all operators of the library."""
    named = torch._C._dispatch_get_all_op_names()
    return {
        name.partition("::")[2].partition(".")[0] for name in named if name.startswith("late_interaction::")
    }


def runs_here(operator: str) -> bool:
    """Whether this machine has a kernel for it."""
    keys = ["CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"]
    keys += ["CUDA"] if torch.cuda.is_available() else []
    name = f"late_interaction::{operator}"
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


class CalledOperators:
    """The names of the library's operators that Python calls from :meth:`watch` on. Not seen is the fast path
    of ``maxsim``, which calls what is beneath an overload's own ``__call__``."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def watch(self) -> None:
        for kind in (OpOverload, OpOverloadPacket):
            kind.__call__ = self._recorded(kind.__call__)  # type: ignore[method-assign]

    def _recorded(self, call):
        def recorded(op, /, *args, **kwargs):
            packet = getattr(op, "overloadpacket", op)
            if packet._qualified_op_name.startswith("late_interaction::"):
                self.names.add(packet.__name__)
            return call(op, *args, **kwargs)

        return recorded

    def missing(self) -> list[str]:
        return sorted(name for name in operators() - self.names if runs_here(name))
