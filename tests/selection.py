"""Which tests ``make quick`` runs (``pytest tests --quick``), and how much more ``make nightly`` asks.

Quick: every test function, on at most CASES of its parameter sets; the tests in SLOW are left out. The run
fails if it calls an operator nowhere that has a kernel on this machine (:class:`CalledOperators`).

Nightly (the variable LATE_INTERACTION_NIGHTLY): hypothesis draws :func:`examples` times as many examples, and
others every night.
"""

import os
from collections import defaultdict

import torch
from torch._ops import OpOverload, OpOverloadPacket

CASES = 2
# What takes long and calls no operator in a way that other tests do not: files, folders or test functions.
SLOW = {
    "tests/build/test_cmake_architectures.py": "configures with CMake",
    "tests/build/test_headers.py": "compiles the host sources",
    "tests/build/test_hub.py": "packs the library, and loads it in processes of their own",
    "tests/build/test_libraries.py": "is about the built libraries",
    "tests/build/test_setup_messages.py": "runs setup.py",
    "tests/build/test_site.py::test_a_browser_shows_the_site": "opens a browser",
    "tests/packaging": "builds a source distribution",
    "tests/bench/test_bench.py": "is about measuring",
    "tests/bench/test_bench_contrastive.py": "is about measuring",
    "tests/bench/test_bench_end_to_end.py": "is about measuring",
    "tests/bench/test_bench_plans.py": "is about measuring",
    "tests/bench/test_bench_rules.py": "is about measuring",
    "tests/training/test_contrastive_faults.py": "waits for timeouts",
    "tests/training/test_contrastive_frameworks.py": "starts processes",
    "tests/docs/test_demo.py": "trains and searches with a model",
    "tests/docs/test_example_programs.py": "trains",
    "tests/docs/test_examples.py": "trains",
    "tests/search/test_fast_plaid.py": "builds indices in an environment of its own",
    "tests/search/test_lancedb.py::test_all_of_these_in_their_environment": "has another environment",
    "tests/maxsim/test_ops.py::test_aot_inductor": "compiles a program",
    "tests/bench/test_performance.py": "takes times",
    "tests/search/test_ray.py::test_all_of_these_in_their_environment": "has another environment",
    "tests/bench/test_sweep.py": "is about measuring",
}
NIGHTLY = os.environ.get("LATE_INTERACTION_NIGHTLY", "") not in ("", "0")


def examples(ordinary: int) -> int:
    """How many examples hypothesis draws for a law that ``make test`` tries ``ordinary`` of."""
    return ordinary * 20 if NIGHTLY else ordinary


def is_slow(node: str) -> bool:
    return any(node == name or node.startswith((f"{name}/", f"{name}::", f"{name}[")) for name in SLOW)


def quick(nodes: list[str]) -> set[str]:
    """The ids of the tests that --quick keeps: the first of each function, and others evenly spaced."""
    functions = defaultdict(list)
    for node in nodes:
        if not is_slow(node):
            functions[node.partition("[")[0]].append(node)
    kept: set[str] = set()
    for cases in functions.values():
        count = min(CASES, len(cases))
        kept |= {cases[i * (len(cases) - 1) // max(1, count - 1)] for i in range(count)}
    return kept


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
