"""Calls that are refused or watched, that a GPU's host does not wait for, and that want a compiler."""

import shutil
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="TorchInductor needs a C++ compiler"
)


def refused(error, words, function, *args, **options):
    """Require that the call raises this error, whose message is one line with these words."""
    with pytest.raises(error) as caught:
        function(*args, **options)
    said = str(caught.value)
    assert "\n" not in said and all(word in said for word in words), said


class Module(torch.nn.Module):
    """A function as what torch.export takes."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


class Called(TorchDispatchMode):
    """The names of our operators that run, and the arguments of each by name."""

    def __init__(self):
        super().__init__()
        self.names, self.arguments = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "late_interaction":
            self.names.append(function.name().removeprefix("late_interaction::"))
            schema = function._schema.arguments
            given = dict(zip([x.name for x in schema], args, strict=False))  # defaults are left out
            self.arguments.append({x.name: x.default_value for x in schema} | given | (kwargs or {}))
        return function(*args, **(kwargs or {}))


@contextmanager
def waiting_for_nothing():
    """Raise an error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_graph(function):
    """(graph, results): a CUDA graph of a call, and what it writes to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, function()


def peak(function):
    """Bytes asked for at the highest point of function() above what was there before: a block that the
    allocator has at hand may be up to 1 MiB larger, whatever came before in the process."""

    def requested(which):
        return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    result = function()
    torch.cuda.synchronize()
    del result
    return requested("peak") - before
